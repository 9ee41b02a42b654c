"""What the schedulers of all ranks decide by and do not compute themselves: the time, what came in, what steps gave.

    leader     turn, launched, settled, answer: looks, writes an entry, and goes on ──> all followers
    follower   turn, launched, settled, answer: the next entry

So every rank runs the same role on the same messages and the same `now`. A scheduler reads nothing else of the world:
whatever else differs between ranks must not be seen by it, or come through here. Scheduler thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from pdserve.base.clock import Clock
from pdserve.errors import RankError
from pdserve.executor.interface import StepResult
from pdserve.protocol.messages import GenerateRequest
from pdserve.ranks.messages import Answer, Entry, Launched, More, Settled, SharedEvent, Turn, Value
from pdserve.transfer.events import FrameArrived

V = TypeVar("V", bound=Value)
E = TypeVar("E", bound=Entry)

PART_BYTES = 8 << 20
"""About as much as one entry has of what came in."""
_TOKEN_BYTES, _EVENT_BYTES = 5, 1024


@dataclasses.dataclass(frozen=True)
class TickInput:
    """What a turn begins with. `num_pending` is this rank's own; the rest is the leader's."""

    events: Sequence[SharedEvent] = ()
    reduction: int = 0
    num_pending: int = 0


class InputLog(Protocol):
    """One rank's side of it. It is the clock of all that decides. Raises RankError where ranks have come apart."""

    def now(self) -> float:
        """The time that the newest turn, or end of a step, came with."""
        ...

    def turn(self, look: TickInput) -> TickInput:
        """A turn of the loop begins; what the leader's begins with."""
        ...

    def launched(self, step: int, seen: int) -> None:
        """This rank is about to compute `step`. All must see the same of its plan."""
        ...

    def settled(self, result: StepResult) -> StepResult:
        """The oldest step under way is computed here, with `result`; what the leader's gave."""
        ...

    def answer(self, find: Callable[[], V]) -> V:
        """What only the leader knows, by `find` there."""
        ...


class LeaderLog:
    """Implements `InputLog`: what we see we tell, by `say`, before we act on it."""

    def __init__(self, clock: Clock, say: Callable[[Entry], None]) -> None:
        self._clock = clock
        self._say = say
        self._now = clock.now()

    def now(self) -> float:
        """See `InputLog.now`."""
        return self._now

    def turn(self, look: TickInput) -> TickInput:
        """See `InputLog.turn`."""
        self._now = self._clock.now()
        *first, last = _parts(look.events)
        for part in first:
            self._say(More(tuple(part)))
        self._say(Turn(self._now, tuple(last), look.reduction, look.num_pending))
        return look

    def launched(self, step: int, seen: int) -> None:
        """See `InputLog.launched`."""
        self._say(Launched(step, seen))

    def settled(self, result: StepResult) -> StepResult:
        """See `InputLog.settled`."""
        self._now = self._clock.now()
        self._say(Settled(self._now, result))
        return result

    def answer(self, find: Callable[[], V]) -> V:
        """See `InputLog.answer`."""
        value = find()
        self._say(Answer(value))
        return value


class FollowerLog:
    """Implements `InputLog`: the next entry is what `hear` gives, which waits for it. `name` is this rank's.

    A `hear` that raises ends the loop: nothing comes any more.
    """

    def __init__(self, name: str, now: float, hear: Callable[[], Entry]) -> None:
        self._name = name
        self._hear = hear
        self._now = now

    def now(self) -> float:
        """See `InputLog.now`."""
        return self._now

    def turn(self, look: TickInput) -> TickInput:
        """See `InputLog.turn`."""
        events: list[SharedEvent] = []
        while isinstance(entry := self._hear(), More):
            events += entry.events
        turn = self._check(entry, Turn)
        if turn.reduction and turn.num_pending != look.num_pending:
            raise self._apart(f"has {look.num_pending} things to agree on where its leader has {turn.num_pending}")
        self._now = turn.now
        return TickInput([*events, *turn.events], turn.reduction, turn.num_pending)

    def launched(self, step: int, seen: int) -> None:
        """See `InputLog.launched`."""
        launched = self._check(self._hear(), Launched)
        if (launched.step, launched.seen) != (step, seen):
            raise self._apart(f"has planned another step {step} than its leader, which is at step {launched.step}")

    def settled(self, result: StepResult) -> StepResult:
        """See `InputLog.settled`."""
        settled = self._check(self._hear(), Settled)
        if settled.result.step != result.step:
            raise self._apart(f"has computed step {result.step} where its leader has step {settled.result.step}")
        self._now = settled.now
        return settled.result

    def answer(self, find: Callable[[], V]) -> V:
        """See `InputLog.answer`."""
        return self._check(self._hear(), Answer).value  # type: ignore[return-value]

    def _check(self, entry: Entry, wanted: type[E]) -> E:
        if not isinstance(entry, wanted):
            raise self._apart(f"waits for {wanted.__name__} where its leader said {type(entry).__name__}")
        return entry

    def _apart(self, what: str) -> RankError:
        return RankError(f"{self._name} {what}: the ranks' schedulers have come apart")


def _parts(events: Sequence[SharedEvent]) -> list[list[SharedEvent]]:
    """`events` in order, in parts of about `PART_BYTES`; at least one part."""
    parts: list[list[SharedEvent]] = [[]]
    size = 0
    for event in events:
        num_bytes = _EVENT_BYTES
        if isinstance(event, FrameArrived):
            num_bytes += len(event.frame)
        elif isinstance(event, GenerateRequest):
            num_bytes += _TOKEN_BYTES * (len(event.input_ids) + len(event.prior_output_ids))
        if parts[-1] and size + num_bytes > PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(event)
        size += num_bytes
    return parts
