"""Input of the scheduler loop in a replica of several ranks: every rank receives the same events. See
`ranks/input_log`.

The composition roots of the ranks' processes make these objects. Scheduler thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec

from pdserve.base.mailbox import Woken
from pdserve.executor.sampling_metadata import Seeds
from pdserve.protocol.messages import GenerateRequest, StartProfile, StateQuery, StopProfile
from pdserve.ranks.consensus import Consensus, Reduction
from pdserve.ranks.input_log import InputLog, TickInput
from pdserve.ranks.messages import SharedEvent
from pdserve.scheduler.scheduler import Event, InputSource
from pdserve.transfer.events import HandshakesFailed

OWN = StateQuery | StartProfile | StopProfile | Woken | HandshakesFailed
"""Events that stay on rank 0. They are queries, profiler commands, wake-ups and counters, and change no decision."""


class LeaderInputSource:
    """Implements `InputSource` on rank 0: sends every event that decides scheduling to the followers before its use.

    `consensus` is None where the replica transfers no KV. A request without a seed gets one, so that all ranks draw
    alike.
    """

    def __init__(self, mailbox: InputSource, log: InputLog, consensus: Consensus | None) -> None:
        self._mailbox = mailbox
        self._log = log
        self._consensus = consensus
        self._seeds = Seeds()

    def drain(self) -> Sequence[Event]:
        """See `InputSource.drain`."""
        events = [self._seeded(event) for event in self._mailbox.drain()]
        shared = [cast(SharedEvent, event) for event in events if not isinstance(event, OWN)]
        consensus = self._consensus
        if consensus is None:
            self._log.turn(TickInput(shared))
            return events
        num_pending = consensus.num_pending  # before `due` takes a reduction, as on followers
        due = consensus.due()
        self._log.turn(TickInput(shared, due, num_pending))
        return [*events, *consensus.poll_and_all_reduce(due)]

    def wait(self, timeout_s: float) -> bool:
        """See `InputSource.wait`."""
        return (self._consensus is not None and self._consensus.is_due) or self._mailbox.wait(timeout_s)

    def _seeded(self, event: Event) -> Event:
        if not isinstance(event, GenerateRequest):
            return event
        return msgspec.structs.replace(event, sampling=self._seeds.fix(event.sampling))


class FollowerInputSource:
    """Implements `InputSource` on a follower: `drain` blocks until the next turn of rank 0 arrives."""

    def __init__(self, log: InputLog, consensus: Consensus | None) -> None:
        self._log = log
        self._consensus = consensus

    def drain(self) -> Sequence[Event]:
        """See `InputSource.drain`."""
        consensus = self._consensus
        turn = self._log.turn(TickInput(num_pending=0 if consensus is None else consensus.num_pending))
        if consensus is None:
            return turn.events
        return [*turn.events, *consensus.poll_and_all_reduce(Reduction(turn.reduction))]

    def wait(self, timeout_s: float) -> bool:
        """See `InputSource.wait`."""
        return True
