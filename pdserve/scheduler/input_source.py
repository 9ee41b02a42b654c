"""What the loop hears of the world where a replica has many ranks: every rank's the same. See `ranks/input_log`.

Made by the composition roots of the ranks' processes; scheduler thread.
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
"""Questions to the leader, a trace of the leader, what only wakes it or is only counted: these decide nothing."""


class LeaderInputSource:
    """`InputSource` of rank 0: sends every event that the scheduler decides by to the followers before it is used.

    `consensus` is None where nothing is transferred. A request without a seed gets one, so that all ranks draw alike.
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
        num_pending = consensus.num_pending  # before anything is taken, as the followers count it
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
    """Implements `InputSource`: `drain` waits for the leader's next turn."""

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
