"""Consensus of a replica's ranks on the outcomes of transfers: one MIN reduction over the states of all pending items.

    rank 0            all copies of a transfer have ended, or one failed: begin ───┐ Tick.reduction
    all ranks         poll ── MIN over gloo ──> the same states on all ────────────┴─> the same events, in the same turn

No reduction runs while no item is pending, or no report is new. No turn waits for a late rank: a reduction that takes
longer than `WAIT_S` is taken in a later turn, which rank 0 names. Scheduler thread, except `heard`.
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
from pdserve.ranks.input_log import InputLog, guarded

WAIT_S = 0.001
"""Seconds that a turn waits for its own reduction, where all ranks compute the same steps at the same time."""
PATIENCE_S = 0.05
"""Longest delay in seconds of a report that completes no transfer; it waits for further reports."""
CLOSE_S = 4.0


class Reduction(enum.IntFlag):
    """Actions of a turn: first take the running reduction, then begin the next one."""

    NOTHING = 0
    TAKE = 1
    """The running reduction has ended on rank 0, and ends soon on all ranks."""
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
    """One rank's side of the consensus.

    `begin_least` starts the reduction, `root_cause` is as in `RankGroup`; `wake` is called on any thread when a turn
    should check for work. `in_step`: the replica has no pipeline stages, so a turn waits a moment for its reduction.
    `now` is the clock of `PATIENCE_S`.
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
        self._root_cause = root_cause
        self._wake = wake
        self._in_step = in_step
        self._now = now
        self._round: _Round | None = None
        self._has_failed = False
        self._news_at: float | None = None
        """Time of the oldest report that no reduction has covered; None: none."""
        self._taken: list[Outcome] | None = None
        """Outcomes that this turn has taken early, to decide whether another reduction is due. Rank 0 only."""
        self._ended: set[Item] = set()
        """Items that have ended on their rank, and are not agreed on. Rank 0 only."""

    def heard(self, event: Outcome) -> None:
        """Record the outcome of an item of any rank. Rank 0 only; any thread."""
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
        """Number of items that the ranks have not agreed on; the same on all ranks at the same point."""
        return self._copies.num_pending

    @property
    def is_due(self) -> bool:
        """True when a turn would take or begin a reduction. Rank 0 only.

        A reduction begins for a transfer that has ended or failed, and after `PATIENCE_S` for any report.
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
        """Return the actions of this turn for all ranks; rank 0 only. It may take already; `poll_and_all_reduce` must
        follow.
        """
        due = Reduction.NOTHING
        if self._round is not None:
            if not self._round.done.is_set():
                return due
            due, self._taken = Reduction.TAKE, self._take()
        if self._may_begin:
            self._news_at, self._has_failed = None, False  # reset before the poll
            due |= Reduction.BEGIN
        return due

    def poll_and_all_reduce(self, due: Reduction) -> list[Outcome]:
        """Run the due actions of this turn; return the agreed outcomes. Raises RankError when a rank is lost."""
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
        """Wait for the running reduction before the ranks disconnect, at most `CLOSE_S` seconds."""
        if self._round is not None:
            self._round.done.wait(CLOSE_S)

    def _begin(self) -> None:
        assert self._round is None, "one reduction at a time"
        items, values = self._copies.poll()
        done = threading.Event()

        def end() -> None:
            done.set()
            self._wake()

        arrival = guarded(lambda: self._begin_least(values, end), self._root_cause)
        self._round = _Round(items, values, arrival, done)

    def _is_soon_done(self) -> bool:
        assert self._round is not None
        return self._round.done.wait(WAIT_S)

    def _take(self) -> list[Outcome]:
        assert self._round is not None, "nothing was begun"
        taken, self._round = self._round, None
        guarded(taken.arrival.wait, self._root_cause)
        agreed = self._copies.agreed(taken.items, taken.values)
        self._ended.difference_update(map(item_of, agreed))
        if not self._copies.num_pending:
            self._ended.clear()  # late reports
        return agreed
