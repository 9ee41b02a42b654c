"""Inputs of the scheduler loop: requests whose grammar is compiled, and the same events on every rank of a replica.

    GenerateRequest with a grammar ──> compiled already? ──yes──> the loop
                                        └─ no: waits here, later requests pass ──compiled, or failed──> the loop
    LoadLora ──> PrepareLora: each rank begins to read the adapter ──read on rank 0──> LoadLora ──> the loop

A step waits for the masks of all its rows, so a row whose grammar takes a second to compile would delay the other rows.
The API process bounds the number of waiting requests: see `WaitingRequests` in
`server/engine_client/live_requests.py`.

The composition roots of the ranks' processes make these objects. Scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

import msgspec

from pdserve.base.mailbox import Mailbox, Woken
from pdserve.executor.input_batch import Seeds
from pdserve.protocol.messages import (
    AbortRequest,
    GenerateRequest,
    LoadLora,
    PrepareLora,
    StartProfile,
    StateQuery,
    StopProfile,
)
from pdserve.protocol.sampling import Grammar
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

    def change_consensus(self, consensus: Consensus | None) -> None:
        """Use the consensus of another role from the next turn on. Nothing is pending in the former one."""
        self._consensus = consensus

    def drain(self) -> Sequence[Event]:
        """See `InputSource.drain`."""
        events = [self._seeded(event) for event in self._mailbox.drain()]
        shared = [cast(SharedEvent, event) for event in events if not isinstance(event, OWN)]
        consensus = self._consensus
        if consensus is None:
            self._log.tick(TickInput(shared))
            return events
        num_pending = consensus.num_pending  # before `due` takes a reduction, as on followers
        due = consensus.due()
        self._log.tick(TickInput(shared, due, num_pending))
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

    def change_consensus(self, consensus: Consensus | None) -> None:
        """See `LeaderInputSource.change_consensus`."""
        self._consensus = consensus

    def drain(self) -> Sequence[Event]:
        """See `InputSource.drain`."""
        consensus = self._consensus
        tick = self._log.tick(TickInput(num_pending=0 if consensus is None else consensus.num_pending))
        if consensus is None:
            return tick.events
        return [*tick.events, *consensus.poll_and_all_reduce(Reduction(tick.reduction))]

    def wait(self, timeout_s: float) -> bool:
        """See `InputSource.wait`."""
        return True


Prepare = Callable[[Grammar], "Future[Any] | None"]
"""Begins to compile a grammar; returns None where there is nothing to wait for."""
PrepareAdapter = Callable[[str, str], "Future[Any] | None"]
"""Begins to read the adapter of a name and a path; returns None where there is nothing to wait for."""


class GrammarGate:
    """Implements `InputSource` over `mailbox`. An abort releases its waiting request first, so that the loop can end
    it.

    `prepare_adapter` None: adapters are read by the loop.
    """

    def __init__(
        self, mailbox: Mailbox[Event], prepare: Prepare, prepare_adapter: PrepareAdapter | None = None
    ) -> None:
        self._mailbox = mailbox
        self._prepare = prepare
        self._prepare_adapter = prepare_adapter
        self._loads: list[tuple[LoadLora, Future[Any]]] = []
        self._waiting: dict[str, tuple[GenerateRequest, Future[Any]]] = {}
        """By rid, in order of arrival."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._waiting)

    def drain(self) -> Sequence[Event]:
        """See `InputSource.drain`. Released requests come before new events."""
        passed: list[Event] = self._opened() if self._waiting else []
        if self._loads:
            passed += [load for load, reading in self._loads if reading.done()]
            self._loads = [(load, reading) for load, reading in self._loads if not reading.done()]
        for event in self._mailbox.drain():
            match event:
                case GenerateRequest() if self._keeps(event):
                    continue
                case LoadLora() if self._reads(event):
                    passed.append(PrepareLora(name=event.name, path=event.path))
                    continue
                case AbortRequest() if self._waiting:
                    passed += self._named(event)
            passed.append(event)
        return passed

    def wait(self, timeout_s: float) -> bool:
        """See `InputSource.wait`. A compiled grammar ends the wait."""
        return self._mailbox.wait(timeout_s)

    def _keeps(self, request: GenerateRequest) -> bool:
        grammar = request.sampling.grammar
        if grammar is None or request.rid in self._waiting:  # the loop refuses a duplicate rid
            return False
        opening = self._prepare(grammar)
        if opening is None or opening.done():
            return False
        self._waiting[request.rid] = request, opening
        opening.add_done_callback(lambda _: self._mailbox.post(Woken()))
        return True

    def _reads(self, load: LoadLora) -> bool:
        reading = None if self._prepare_adapter is None else self._prepare_adapter(load.name, load.path)
        if reading is None:
            return False
        self._loads.append((load, reading))
        reading.add_done_callback(lambda _: self._mailbox.post(Woken()))
        return True

    def _opened(self) -> list[Event]:
        rids = [rid for rid, (_, opening) in self._waiting.items() if opening.done()]
        return [self._waiting.pop(rid)[0] for rid in rids]

    def _named(self, abort: AbortRequest) -> list[Event]:
        rids = list(self._waiting) if abort.rid is None else [abort.rid]
        return [self._waiting.pop(rid)[0] for rid in rids if rid in self._waiting]
