"""Rows with drafts: what a step writes and samples for them, and how many of their drafts are accepted.

A row with k drafts computes 1 + k tokens and samples 1 + k positions, each as a step of its own would: with its number
of (seed, position), its bans, and the penalties of all tokens before it. A draft is accepted while it equals the token
sampled at its position. So the first 1 + accepted sampled tokens are those of single steps, and the others are dropped.

    pool        last     draft 1    draft 2    draft 3
    sampled              s1         s2         s3         s4      s1 = draft 1, s2 != draft 2: one draft is accepted
    pool after  last     s1         s2         -          -       the next row starts at s2 and overwrites what follows

`LocalExecutor` reads a plan with `StepDrafts`, and takes the results apart with `take_apart`. `PendingRows` is for
models with recurrent layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from pdserve.executor.input_batch import HostBatch
from pdserve.executor.interface import BatchPlan, SampledToken
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.layout import KVLayout, PageSpace
from pdserve.model.forward_batch import IntArray

Fold = Callable[[IntArray, IntArray], None]
"""Folds pending tokens of state slots: slots and numbers of tokens, int64 `[n]` each."""


@dataclasses.dataclass(frozen=True)
class StepDrafts:
    """The drafts of a step, to be written into the token pool before it is computed.

    `table_rows`, `positions`, `token_ids`: int64, one entry for each draft.
    """

    table_rows: IntArray
    positions: IntArray
    token_ids: IntArray

    @staticmethod
    def of(plan: BatchPlan) -> StepDrafts | None:
        """Return the drafts of `plan`; None when it has none."""
        rows = [row for row in plan.rows if row.drafts]
        if not rows:
            return None
        assert all(row.sample and row.end == row.start + 1 + len(row.drafts) for row in rows), plan
        counts = np.array([len(row.drafts) for row in rows])
        within = np.arange(int(counts.sum())) - (counts.cumsum() - counts).repeat(counts)
        return StepDrafts(
            table_rows=np.array([row.row for row in rows]).repeat(counts),
            positions=np.array([row.start + 1 for row in rows]).repeat(counts) + within,
            token_ids=np.array([draft for row in rows for draft in row.drafts]),
        )


def shorten(plan: BatchPlan, most: Mapping[int, int]) -> BatchPlan:
    """Return `plan` with at most `most[i]` drafts in row i; rows that are absent in `most` keep theirs."""
    rows = list(plan.rows)
    for index, count in most.items():
        row = rows[index]
        if count < len(row.drafts):
            end = row.start + 1 + count
            rows[index] = msgspec.structs.replace(row, end=end, drafts=row.drafts[:count])
    return dataclasses.replace(plan, rows=tuple(rows))


def num_accepted(drafts: Sequence[int], sampled: Sequence[int], failed: Sequence[int] | None = None) -> int:
    """Return how many of `drafts` equal the token sampled at their position.

    `sampled`: the 1 + len(drafts) sampled ids. `failed`: 1 for each sampled position whose token is undefined; no draft
    before such a position is accepted, so that a step of its own fails there. None: no position failed.
    """
    count = 0
    while count < len(drafts) and sampled[count] == drafts[count] and not (failed and failed[count + 1]):
        count += 1
    return count


def accepted_counts(plan: BatchPlan, token_ids: Sequence[int]) -> IntArray:
    """Return how many drafts of each row of `plan` are accepted, int64 `[R]`. `token_ids`: all that were sampled."""
    counts, at = np.zeros(len(plan.rows), dtype=np.int64), 0
    for index, row in enumerate(plan.rows):
        if row.sample:
            counts[index] = num_accepted(row.drafts, token_ids[at : at + 1 + len(row.drafts)])
            at += 1 + len(row.drafts)
    return counts


@dataclasses.dataclass(frozen=True)
class StepTokens:
    """Results of a step by plan row, as in `StepResult`."""

    tokens: tuple[SampledToken | None, ...]
    more: dict[int, tuple[SampledToken, ...]]
    failed: tuple[int, ...]


def take_apart(plan: BatchPlan, sampled: Sequence[SampledToken], failed: npt.NDArray[np.bool_] | None) -> StepTokens:
    """Give each row of `plan` its sampled tokens, in order, up to the first that is no accepted draft.

    `failed` `[S]`: the sampled positions whose tokens are undefined; None: no position.
    """
    flags = None if failed is None else failed.tolist()
    tokens: list[SampledToken | None] = [None] * len(plan.rows)
    more: dict[int, tuple[SampledToken, ...]] = {}
    failed_rows = []
    at = 0
    for index, row in enumerate(plan.rows):
        if not row.sample:
            continue
        end = at + 1 + len(row.drafts)
        tokens[index] = sampled[at]
        if row.drafts:
            ids = [token.token_id for token in sampled[at:end]]
            count = num_accepted(row.drafts, ids, None if flags is None else flags[at:end])
            if count:
                more[index] = tuple(sampled[at + 1 : at + 1 + count])
        if flags is not None and flags[at]:
            failed_rows.append(index)
        at = end
    assert at == len(sampled), (at, len(sampled))
    return StepTokens(tuple(tokens), more, tuple(failed_rows))


def state_slots(layout: KVLayout, pages: Sequence[Sequence[int]]) -> list[int]:
    """Return the state slots in `pages`, a list for each layout group."""
    groups = zip(layout.groups, pages, strict=True)
    return [slot for group, own in groups if group.space is PageSpace.SLOTS for slot in own]


class PendingRows:
    """The table rows whose state slots have pending tokens (`HostRows.num_folded`), and how many were accepted.

    Scheduler thread. A row with drafts leaves its tokens pending; the next row in the same table row begins behind the
    accepted ones.
    """

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._starts: dict[int, int] = {}
        """By table row with pending tokens: position of the first."""
        self._counts: dict[int, int] = {}
        """By table row: its first token and accepted drafts, once they are known."""

    def __contains__(self, row: int) -> bool:
        return row in self._starts

    def launched(self, plan: BatchPlan, *, has_drafts: bool) -> None:
        """Record the rows of `plan` with drafts. Call `fold_into` for its batches before."""
        if self._starts or has_drafts:
            for row in plan.rows:
                self.drop(row.row)
                if row.drafts:
                    self._starts[row.row] = row.start

    def resolved(self, plan: BatchPlan, more: Mapping[int, Sequence[SampledToken]]) -> None:
        """Record how many drafts of each row were accepted."""
        if not self._starts:
            return
        for index, row in enumerate(plan.rows):
            if row.drafts and self._starts.get(row.row) == row.start:
                self._counts[row.row] = 1 + len(more.get(index, ()))

    def drop(self, row: int) -> None:
        """Forget the pending tokens of table row `row`."""
        self._starts.pop(row, None)
        self._counts.pop(row, None)

    def fold_into(self, batch: HostBatch) -> HostBatch:
        """Return `batch` with `HostRows.num_folded` where its rows have pending tokens."""
        first = self._starts
        if not first:
            return batch
        pairs = zip(batch.table_rows.tolist(), batch.rows.starts.tolist(), strict=True)
        counts = np.array([start - first.get(row, start) for row, start in pairs], dtype=np.int64)
        if not counts.any():
            return batch
        return dataclasses.replace(batch, rows=dataclasses.replace(batch.rows, num_folded=counts))

    def settle(self, slots: Iterable[int], fold: Fold) -> None:
        """Fold the accepted pending tokens of those of `slots` that have some. No step may be unresolved."""
        wanted = set(slots)
        rows = [row for row in self._starts if int(self._table.slots[row]) in wanted]
        if not rows:
            return
        counts = np.array([self._counts[row] for row in rows], dtype=np.int64)
        fold(self._table.slots[rows].astype(np.int64), counts)
        for row in rows:
            self.drop(row)
