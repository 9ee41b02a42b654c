"""A leader and its followers compute the same as one rank alone."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest

from pdserve.base.parallel import ParallelShape
from pdserve.errors import RankError
from pdserve.executor.interface import BatchPlan, Executor, Row, StepResult
from pdserve.memory.page_table import PageTable
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import SamplingParams
from pdserve.ranks.leader import GroupExecutor
from pdserve.sim.hash_lm import HashExecutor, hash_layout
from tests.unit.ranks.kit import Losses, replica
from tests.unit.transfer.waiting import wait_until

PAGE_TOKENS, NUM_PAGES, NUM_ROWS, MAX_PAGES = 4, 101, 6, 12
LAYOUT = hash_layout(PAGE_TOKENS)
SHAPES = [
    ParallelShape(tp_size=2),
    ParallelShape(tp_size=3),
    ParallelShape(pp_size=2),
    ParallelShape(tp_size=2, pp_size=2),
]


def make_rank(rank: int = 0) -> tuple[HashExecutor, PageTable]:
    table = PageTable(NUM_ROWS, MAX_PAGES)
    return HashExecutor(LAYOUT, NUM_PAGES, table), table


class Play:
    """A seeded stream of requests that come, grow, are saved, come back and go, on any executor and its table."""

    def __init__(self, executor: Executor, table: PageTable, seed: int) -> None:
        self.executor, self.table = executor, table
        self._random = random.Random(seed)
        self._free = list(range(NUM_PAGES))
        self._live: dict[int, tuple[list[int], int, int]] = {}
        """Row to pages, tokens known, tokens computed."""
        self.results: list[StepResult] = []

    def run(self, num_steps: int) -> None:
        for step in range(1, num_steps + 1):
            self._come_and_go()
            if self._live and self._random.random() < 0.2:
                self._swap(self._random.choice(list(self._live)))
            self._step(step)

    def _come_and_go(self) -> None:
        if self._live and self._random.random() < 0.3:
            row = self._random.choice(list(self._live))
            pages, _, _ = self._live.pop(row)
            self.executor.close_row(row)
            self.table.close(row)
            self._free += pages
        if self.table.num_free and self._random.random() < 0.7:
            tokens = [self._random.randrange(50_000) for _ in range(self._random.randint(1, 17))]
            pages = [self._take() for _ in range(-(-len(tokens) // PAGE_TOKENS))]
            row = self.table.open(pages)
            assert row is not None
            self.executor.open_row(row, tokens, len(tokens), SamplingParams(), None)
            self._live[row] = (pages, len(tokens), 0)

    def _swap(self, row: int) -> None:
        """Save all pages, spoil them, bring them back into others."""
        pages, known, computed = self._live[row]
        saved = self.executor.offload(pages)
        assert saved.num_bytes > 0
        self._free += pages
        fresh = [self._take() for _ in pages]
        self.executor.restore(saved, fresh)
        self.executor.close_row(row)
        self.table.close(row)
        again = self.table.open(fresh)
        assert again == row
        tokens = [self._random.randrange(50_000) for _ in range(known)]
        self.executor.open_row(row, tokens, known, SamplingParams(), None)
        self._live[row] = (fresh, known, computed)

    def _step(self, step: int) -> None:
        rows = []
        for row, (pages, known, computed) in list(self._live.items()):
            if computed == known or known >= MAX_PAGES * PAGE_TOKENS - 1:
                continue
            end = self._random.randint(computed + 1, known)
            sample = end == known
            rows.append(Row(f"r{row}", row, computed, end, sample))
            if sample and (known + 1) > len(pages) * PAGE_TOKENS:
                pages = [*pages, self._take()]
                self.table.extend(row, len(pages) - 1, pages[-1:])
            self._live[row] = (pages, known + sample, end)
        handle = self.executor.launch(BatchPlan(step, tuple(rows)))
        self.results.append(self.executor.resolve(handle))

    def _take(self) -> int:
        return self._free.pop(self._random.randrange(len(self._free)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_rank_comes_to_what_one_rank_alone_comes_to(shape: ParallelShape) -> None:
    alone, alone_table = make_rank()
    expected = Play(alone, alone_table, seed=shape.num_ranks)
    expected.run(120)
    assert sum(token is not None for result in expected.results for token in result.tokens) > 50
    local, table = make_rank()
    with replica(shape, make_rank) as (followers, threads):
        group = GroupExecutor(local, table, LAYOUT, followers)
        play = Play(group, table, seed=shape.num_ranks)
        play.run(120)
        assert play.results == expected.results
        assert group.last_resolved == 120
    for thread in threads:
        assert thread.error is None and not thread.losses.errors
        assert isinstance(thread.executor, HashExecutor)
        np.testing.assert_array_equal(thread.executor.pool, alone.pool)


def test_pages_that_nobody_wants_are_dropped_by_followers() -> None:
    local, table = make_rank()
    with replica(ParallelShape(tp_size=2), make_rank) as (followers, threads):
        group = GroupExecutor(local, table, LAYOUT, followers)
        saved = group.offload([1, 2, 3])
        assert saved.num_bytes == 2 * 3 * LAYOUT.groups[0].page_bytes, "one head, which both ranks hold"
        group.restore(saved, [4, 5, 6])
        del saved
        gc.collect()
        thread = threads[0]
        wait_until(lambda: not thread.computer.num_saved, "the follower drops its copy")


def test_a_follower_that_cannot_compute_ends_the_replica_and_says_why() -> None:
    class Broken(HashExecutor):
        def launch(self, plan: BatchPlan, *, layer_marks: bool = False):  # type: ignore[no-untyped-def]
            raise MemoryError("no room")

    def make(rank: int) -> tuple[Executor, PageTable]:
        table = PageTable(NUM_ROWS, MAX_PAGES)
        return Broken(LAYOUT, NUM_PAGES, table), table

    losses = Losses()
    local, table = make_rank()
    with replica(ParallelShape(pp_size=2), make, losses) as (followers, _):
        group = GroupExecutor(local, table, LAYOUT, followers)
        handle = group.launch(BatchPlan(1, ()))
        with pytest.raises(RankError, match=r"rank 1 \(tp 0, pp 1\) on .* failed: MemoryError: no room"):
            group.resolve(handle)
        assert isinstance(losses.wait(), RankError)


def test_a_seed_is_drawn_once_for_all_ranks() -> None:
    seen: list[SamplingParams] = []

    class Noting(HashExecutor):
        def open_row(self, row, token_ids, num_prompt_tokens, sampling, logprobs):  # type: ignore[no-untyped-def]
            seen.append(sampling)
            super().open_row(row, token_ids, num_prompt_tokens, sampling, logprobs)

    def make(rank: int = 0) -> tuple[Executor, PageTable]:
        table = PageTable(NUM_ROWS, MAX_PAGES)
        return Noting(LAYOUT, NUM_PAGES, table), table

    local, table = make()
    with replica(ParallelShape(tp_size=2), make) as (followers, _):
        group = GroupExecutor(local, table, LAYOUT, followers)
        group.open_row(0, [1, 2], 2, SamplingParams(logit_bias={7: -1.5}, stop=("x",)), Logprobs(top=3))
        group.open_row(1, [1, 2], 2, SamplingParams(seed=5), None)
        wait_until(lambda: len(seen) == 4, "both ranks opened both rows")
    drawn = [sampling for sampling in seen if sampling.seed != 5]
    assert len(drawn) == 2 and drawn[0] == drawn[1] and drawn[0].seed is not None
