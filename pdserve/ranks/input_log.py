"""Interfaces between the ranks of a replica: the input log, and the reports of progress beside it (`RankGroup`).

The input log has the inputs of all schedulers of a replica that they do not compute: time, events, results of steps.

    rank 0     tick, launched, step_ended, answer: reads its input, writes an entry, and goes on ──> all followers
    follower   tick, launched, step_ended, answer: reads the next entry

So every rank runs the same role on the same messages and the same `now`. A scheduler has no other input: any state that
differs between ranks must be hidden from it, or go through this log. Scheduler thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from pdserve.base.clock import Clock
from pdserve.errors import PdserveError, RankError
from pdserve.executor.interface import StepResult
from pdserve.protocol.messages import GenerateRequest
from pdserve.ranks.messages import Answer, Entry, Launched, PartialTick, SharedEvent, StepEnded, Tick, Value
from pdserve.transfer.checksum import RankDigest
from pdserve.transfer.events import FrameArrived

V = TypeVar("V", bound=Value)
E = TypeVar("E", bound=Entry)

PART_BYTES = 8 << 20
"""Approximate limit on the bytes of events in one entry."""
_TOKEN_BYTES, _EVENT_BYTES = 5, 1024


@dataclasses.dataclass(frozen=True)
class TickInput:
    """Input of a turn. `num_pending` is this rank's own; the rest is rank 0's."""

    events: Sequence[SharedEvent] = ()
    reduction: int = 0
    num_pending: int = 0


class InputLog(Protocol):
    """One rank's side of the input log, and the clock of all decisions. Raises RankError where ranks have diverged."""

    def now(self) -> float:
        """Return the time of the newest turn or end of a step."""
        ...

    def tick(self, tick_input: TickInput) -> TickInput:
        """Begin a turn of the loop; return the input of rank 0's turn."""
        ...

    def launched(self, step: int, seen: int) -> None:
        """Record that this rank is about to compute `step`. The fingerprint `seen` of its plan must equal rank 0's."""
        ...

    def step_ended(self, result: StepResult) -> StepResult:
        """End the oldest step under way, computed here with `result`; return rank 0's result."""
        ...

    def answer(self, find: Callable[[], V]) -> V:
        """Return a value that only rank 0 knows; rank 0 computes it with `find`."""
        ...


class LeaderLog:
    """Implements `InputLog` for rank 0: sends each entry with `send` before rank 0 acts on it."""

    def __init__(self, clock: Clock, send: Callable[[Entry], None]) -> None:
        self._clock = clock
        self._send = send
        self._now = clock.now()

    def now(self) -> float:
        """See `InputLog.now`."""
        return self._now

    def tick(self, tick_input: TickInput) -> TickInput:
        """See `InputLog.tick`."""
        self._now = self._clock.now()
        *first, last = _parts(tick_input.events)
        for part in first:
            self._send(PartialTick(tuple(part)))
        self._send(Tick(self._now, tuple(last), tick_input.reduction, tick_input.num_pending))
        return tick_input

    def launched(self, step: int, seen: int) -> None:
        """See `InputLog.launched`."""
        self._send(Launched(step, seen))

    def step_ended(self, result: StepResult) -> StepResult:
        """See `InputLog.step_ended`. Followers learn which hidden states were computed, but not their values."""
        self._now = self._clock.now()
        shared = result
        if result.hidden:
            hidden = {index: msgspec.structs.replace(part, values=b"") for index, part in result.hidden.items()}
            shared = dataclasses.replace(result, hidden=hidden)
        self._send(StepEnded(self._now, shared))
        return result

    def answer(self, find: Callable[[], V]) -> V:
        """See `InputLog.answer`."""
        value = find()
        self._send(Answer(value))
        return value


class FollowerLog:
    """Implements `InputLog` for a follower: `receive` waits for the next entry and returns it. `name` is this rank's.

    A `receive` that raises ends the loop: no entry follows.
    """

    def __init__(self, name: str, now: float, receive: Callable[[], Entry]) -> None:
        self._name = name
        self._receive = receive
        self._now = now

    def now(self) -> float:
        """See `InputLog.now`."""
        return self._now

    def tick(self, tick_input: TickInput) -> TickInput:
        """See `InputLog.tick`."""
        events: list[SharedEvent] = []
        while isinstance(entry := self._receive(), PartialTick):
            events += entry.events
        tick = self._check(entry, Tick)
        if tick.reduction and tick.num_pending != tick_input.num_pending:
            raise self._apart(f"has {tick_input.num_pending} pending transfer items, rank 0 has {tick.num_pending}")
        self._now = tick.now
        return TickInput([*events, *tick.events], tick.reduction, tick.num_pending)

    def launched(self, step: int, seen: int) -> None:
        """See `InputLog.launched`."""
        launched = self._check(self._receive(), Launched)
        if (launched.step, launched.seen) != (step, seen):
            raise self._apart(f"has planned step {step} differently than rank 0, which is at step {launched.step}")

    def step_ended(self, result: StepResult) -> StepResult:
        """See `InputLog.step_ended`."""
        step_ended = self._check(self._receive(), StepEnded)
        if step_ended.result.step != result.step:
            raise self._apart(f"has computed step {result.step}, rank 0 has computed step {step_ended.result.step}")
        self._now = step_ended.now
        return step_ended.result

    def answer(self, find: Callable[[], V]) -> V:
        """See `InputLog.answer`."""
        return self._check(self._receive(), Answer).value  # type: ignore[return-value]

    def _check(self, entry: Entry, wanted: type[E]) -> E:
        if not isinstance(entry, wanted):
            raise self._apart(f"expects {wanted.__name__}, but rank 0 sent {type(entry).__name__}")
        return entry

    def _apart(self, what: str) -> RankError:
        return RankError(f"{self._name} {what}: the schedulers of the ranks have diverged")


def _parts(events: Sequence[SharedEvent]) -> list[list[SharedEvent]]:
    """Split `events` in order into parts of about `PART_BYTES`; at least one part."""
    parts: list[list[SharedEvent]] = [[]]
    size = 0
    for event in events:
        num_bytes = _EVENT_BYTES
        if isinstance(event, FrameArrived):
            num_bytes += len(event.frame)
        elif isinstance(event, GenerateRequest):
            num_bytes += _TOKEN_BYTES * (len(event.input_ids) + len(event.prior_output_ids))
            num_bytes += len(event.input_embeds)
        if parts[-1] and size + num_bytes > PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(event)
        size += num_bytes
    return parts


T = TypeVar("T")


class RankGroup(Protocol):
    """Reports of progress: rank 0 waits, a follower only reports. Raises RankError when a rank is lost. Scheduler
    thread.
    """

    def computed(self, step: int) -> None:
        """Report that this rank's part of `step` is computed. On rank 0, return when all ranks' parts are."""
        ...

    def offloaded(self, number: int) -> None:
        """Report that the pages of offload `number` are copied here. On rank 0, return when they are on all ranks."""
        ...

    def digested(self, number: int, own: RankDigest) -> tuple[RankDigest, ...]:
        """Report this rank's digest for hash request `number`; return it. On rank 0, wait for and return all ranks'
        digests.
        """
        ...

    def reported(self, number: int, own: bytes) -> tuple[bytes, ...]:
        """Report this rank's answer to question `number`; return it. On rank 0, wait for and return all ranks' answers,
        in rank order.
        """
        ...

    def root_cause(self) -> PdserveError | None:
        """Return the loss of a rank after a failed exchange, as soon as it is known; None: no rank is lost."""
        ...


def guarded(compute: Callable[[], T], root_cause: Callable[[], PdserveError | None]) -> T:
    """Call `compute`. When it fails because another rank is lost, raise that loss instead."""
    try:
        return compute()
    except Exception as error:
        lost = root_cause()
        if lost is not None:
            raise lost from error
        raise
