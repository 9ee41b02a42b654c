"""How the ranks of a replica agree on what has become of transfers: one MIN over all of them, for all that is polled.

    rank 0 (leader)   all copies of a transfer have ended, or one failed: begin ───┐ Turn.reduction
    all ranks         poll ── MIN over gloo ──> the same states on all ────────────┴─> the same events, in the same turn

Nothing is reduced while nothing is pending, or nothing is new. Nobody waits for a rank that is late: a reduction that
takes longer than a moment is taken in a later turn, which the leader names. Scheduler thread, but for `heard`.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from pdserve.errors import PdserveError
from pdserve.model.parallel import Arrival
from pdserve.ranks.copies import Item, Outcome, RankCopies, failure_of, item_of
from pdserve.ranks.input_log import InputLog
from pdserve.ranks.rank_group import guarded

WAIT_S = 0.001
"""How long a turn waits for its own reduction, where all ranks compute the same steps at the same time."""
PATIENCE_S = 0.05
"""A word that makes no transfer whole waits so long for others, and no longer."""
CLOSE_S = 4.0


class Reduction(enum.IntFlag):
    """What a turn does about it; first it takes, then it begins the next one."""

    NOTHING = 0
    TAKE = 1
    """What was begun has ended on the leader, and so is about to on all."""
    BEGIN = 2


class BeginLeast(Protocol):
    """See `Parallel.begin_least`."""

    def __call__(self, values: Tensor, then: Callable[[], None], /) -> Arrival: ...


@dataclasses.dataclass(frozen=True)
class _Round:
    """A reduction under way."""

    items: Sequence[Item]
    values: Tensor
    arrival: Arrival
    done: threading.Event


class Consensus:
    """One rank's side. `begin_least` is the reduction, `root_cause` as for `RankGroup`; `wake` is called on any thread
    when a turn should look again. With `in_step` the ranks have no stages, so that a turn waits a moment for its
    reduction. `now` is the time that `PATIENCE_S` is measured in.
    """

    def __init__(
        self,
        copies: RankCopies,
        begin_least: BeginLeast,
        log: InputLog,
        root_cause: Callable[[], PdserveError | None],
        wake: Callable[[], None],
        *,
        in_step: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._copies = copies
        self._begin_least = begin_least
        self._log = log
        self._blame = root_cause
        self._wake = wake
        self._in_step = in_step
        self._now = now
        self._round: _Round | None = None
        self._has_failed = False
        self._news_at: float | None = None
        """When the oldest word came that no reduction has told of yet."""
        self._taken: list[Outcome] | None = None
        """What this turn has taken already, to see whether another reduction is due. The leader's."""
        self._ended: set[Item] = set()
        """What has ended here or elsewhere, and is not agreed on. The leader's."""

    def heard(self, event: Outcome) -> None:
        """What has become of an item, of ours or of another rank's. The leader's; any thread."""
        item = item_of(event)
        self._copies.heard(event)
        self._ended.add(item)
        failed = failure_of(event) is not None
        self._has_failed = self._has_failed or failed
        if self._news_at is None:
            self._news_at = self._now()
        if failed or self._copies.all_ended(self._ended, item[0]):
            self._wake()

    @property
    def num_pending(self) -> int:
        """What the ranks have not agreed on; the same number on all, at the same point."""
        return self._copies.num_pending

    @property
    def is_due(self) -> bool:
        """Whether a turn would take a reduction, or begin one: when it would tell of a transfer that has ended or
        failed, or after a while of anything. The leader's.
        """
        if self._round is not None:
            return self._round.done.is_set()
        return self._may_begin

    @property
    def _may_begin(self) -> bool:
        if self._news_at is None or not self._copies.num_pending:
            return False
        late = self._now() > self._news_at + PATIENCE_S
        return self._has_failed or late or self._copies.all_ended(self._ended)

    def due(self) -> Reduction:
        """What this turn shall do, on all ranks. The leader's, which takes already; `poll_and_all_reduce` follows."""
        due = Reduction.NOTHING
        if self._round is not None:
            if not self._round.done.is_set():
                return due
            due, self._taken = Reduction.TAKE, self._take()
        if self._may_begin:
            self._news_at, self._has_failed = None, False  # before it polls: what comes now is for the next one
            due |= Reduction.BEGIN
        return due

    def poll_and_all_reduce(self, due: Reduction) -> list[Outcome]:
        """Do what is due in this turn; what all ranks agree on now. Raises RankError when a rank is lost."""
        agreed: list[Outcome] = []
        if Reduction.TAKE in due:
            agreed += self._take() if self._taken is None else self._taken
            self._taken = None
        if Reduction.BEGIN in due:
            self._begin()
            if self._in_step and self._log.answer(self._is_soon_done):
                agreed += self._take()
        return agreed

    def close(self) -> None:
        """What is under way should end before the ranks part."""
        if self._round is not None:
            self._round.done.wait(CLOSE_S)

    def _begin(self) -> None:
        assert self._round is None, "one reduction at a time"
        items, values = self._copies.poll()
        done = threading.Event()

        def end() -> None:
            done.set()
            self._wake()

        arrival = guarded(lambda: self._begin_least(values, end), self._blame)
        self._round = _Round(items, values, arrival, done)

    def _is_soon_done(self) -> bool:
        assert self._round is not None
        return self._round.done.wait(WAIT_S)

    def _take(self) -> list[Outcome]:
        assert self._round is not None, "nothing was begun"
        taken, self._round = self._round, None
        guarded(taken.arrival.wait, self._blame)
        agreed = self._copies.agreed(taken.items, taken.values)
        self._ended.difference_update(map(item_of, agreed))
        if not self._copies.num_pending:
            self._ended.clear()  # words that came too late
        return agreed
