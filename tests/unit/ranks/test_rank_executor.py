"""Ranks in step: each computes the same as one rank alone, gives what the leader's gave, and says so in time."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from pdserve.base.clock import ManualClock
from pdserve.base.parallel import ParallelShape
from pdserve.errors import RankError
from pdserve.executor.interface import BatchPlan, BatchRow, Executor, StepResult
from pdserve.memory.kv_memory import PageTable
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.ranks.input_log import LeaderLog
from pdserve.ranks.messages import Entry, Launched
from pdserve.ranks.rank_executor import RankExecutor
from pdserve.sim.hash_lm import HashExecutor, hash_layout
from tests.unit.ranks.kit import Losses, Rank, replica
from tests.unit.ranks.reductions import Unaided
from tests.waiting import wait_until

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
            self.executor.open_row(row, tokens, len(tokens), CoreSamplingParams(), None)
            self._live[row] = (pages, len(tokens), 0)

    def _swap(self, row: int) -> None:
        """Save all pages, spoil them, bring them back into others."""
        pages, known, computed = self._live[row]
        saved = self.executor.offload([pages])
        assert saved.num_bytes > 0
        self._free += pages
        fresh = [self._take() for _ in pages]
        self.executor.restore(saved, [fresh])
        self.executor.close_row(row)
        self.table.close(row)
        again = self.table.open(fresh)
        assert again == row
        tokens = [self._random.randrange(50_000) for _ in range(known)]
        self.executor.open_row(row, tokens, known, CoreSamplingParams(), None)
        self._live[row] = (fresh, known, computed)

    def _step(self, step: int) -> None:
        rows = []
        for row, (pages, known, computed) in list(self._live.items()):
            if computed == known or known >= MAX_PAGES * PAGE_TOKENS - 1:
                continue
            end = self._random.randint(computed + 1, known)
            sample = end == known
            rows.append(BatchRow(f"r{row}", row, computed, end, sample))
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
    plays: dict[int, Play] = {}

    def work(rank: Rank) -> None:
        play = plays[rank.coord.rank] = Play(rank.executor, rank.table, seed=shape.num_ranks)
        play.run(120)

    with replica(shape, make_rank, work) as (leader, _, threads):
        work(leader)
    assert sorted(plays) == list(range(shape.num_ranks))
    for thread in threads:
        assert thread.error is None and not thread.losses.errors
        assert isinstance(thread.own, HashExecutor)
        np.testing.assert_array_equal(thread.own.pools[0][0], alone.pools[0][0])
    for play in plays.values():
        assert play.results == expected.results


def test_saved_pages_count_as_much_on_every_rank_and_are_everybodys_when_the_leader_goes_on() -> None:
    saved: dict[int, int] = {}
    may_copy = threading.Event()

    def work(rank: Rank) -> None:
        if rank.coord.rank:
            assert may_copy.wait(10.0)
        saved[rank.coord.rank] = rank.executor.offload([[1, 2, 3]]).num_bytes

    with replica(ParallelShape(tp_size=2), make_rank, work) as (leader, *_):
        going_on = threading.Thread(target=work, args=(leader,))
        going_on.start()
        going_on.join(0.2)
        assert going_on.is_alive() and not saved, "a peer could write where the follower still reads"
        may_copy.set()
        going_on.join(10.0)
        wait_until(lambda: len(saved) == 2, "the follower, too")
    assert set(saved.values()) == {2 * 3 * LAYOUT.groups[0].page_bytes}, "one head, which both ranks hold"


def test_with_stages_a_step_is_resolved_when_the_last_one_has_computed_it() -> None:
    """And no later: what that one's own scheduler waits for is no concern of the leader's."""
    went_on = threading.Event()

    def work(rank: Rank) -> None:
        handle = rank.executor.launch(BatchPlan(1, ()))
        assert went_on.wait(10.0)
        assert rank.executor.resolve(handle).step == 1

    with replica(ParallelShape(pp_size=2), make_rank, work) as (leader, _, (thread,)):
        assert leader.executor.resolve(leader.executor.launch(BatchPlan(1, ()))).step == 1
        went_on.set()
    assert thread.error is None


def test_a_follower_that_cannot_compute_ends_the_replica_and_says_why() -> None:
    class Broken(HashExecutor):
        def launch(self, plan: BatchPlan, *, layer_events: bool = False):  # type: ignore[no-untyped-def]
            raise MemoryError("no room")

    def make(rank: int) -> tuple[Executor, PageTable]:
        table = PageTable(NUM_ROWS, MAX_PAGES)
        return (Broken if rank else HashExecutor)(LAYOUT, NUM_PAGES, table), table

    losses = Losses()
    with replica(ParallelShape(pp_size=2), make, lambda rank: rank.executor.launch(BatchPlan(1, ())), losses) as (
        leader,
        *_,
    ):
        handle = leader.executor.launch(BatchPlan(1, ()))
        with pytest.raises(RankError, match=r"rank 1 \(tp 0, pp 1\) on .* failed: MemoryError: no room"):
            leader.executor.resolve(handle)
        assert isinstance(losses.wait(), RankError)


def test_pages_that_a_row_was_given_in_another_order_are_seen() -> None:
    """Also where the step at hand writes to the same page on all ranks: it reads the others."""
    seen = []
    for pages in ([1, 2, 5], [2, 1, 5], [1, 2, 5]):
        own, table = make_rank()
        entries: list[Entry] = []
        executor = RankExecutor(own, table, own.layout, ParallelShape(tp_size=2).coord(0), Unaided(),
                                LeaderLog(ManualClock(), entries.append))  # fmt: skip
        row = table.open(pages)
        assert row is not None
        tokens = list(range(2 * PAGE_TOKENS + 1))
        executor.open_row(row, tokens, len(tokens), CoreSamplingParams(), None)
        for start, end in ((0, 2 * PAGE_TOKENS), (2 * PAGE_TOKENS, 2 * PAGE_TOKENS + 1)):
            executor.resolve(executor.launch(BatchPlan(start + 1, (BatchRow("r", row, start, end, False),))))
        seen.append([entry.seen for entry in entries if isinstance(entry, Launched)])
    assert seen[0] == seen[2] and seen[0][0] != seen[1][0] and seen[0][1] == seen[1][1]


@pytest.mark.parametrize("what", ["step", "row", "end", "page"])
def test_a_rank_that_plans_something_else_ends_the_replica(what: str) -> None:
    """Whatever makes a scheduler come to another plan than its leader's is found before the rank computes it."""

    def work(rank: Rank) -> None:
        other = rank.coord.rank > 0
        row = rank.table.open([8 if other and what == "page" else 7])
        assert row is not None
        rank.executor.open_row(row, [1, 2, 3], 3, CoreSamplingParams(), None)
        end = 2 if other and what == "end" else 3
        rows = () if other and what == "row" else (BatchRow("r", row, 0, end, end == 3),)
        step = 2 if other and what == "step" else 1
        rank.executor.resolve(rank.executor.launch(BatchPlan(step, rows)))

    losses = Losses()
    with replica(ParallelShape(tp_size=2), make_rank, work, losses) as (leader, _, (thread,)):
        work(leader)
        assert "have diverged" in str(losses.wait()) and "rank 1" in str(losses.wait())
    assert isinstance(thread.error, RankError)
    assert isinstance(thread.own, HashExecutor)
    np.testing.assert_array_equal(thread.own.pools[0][0], make_rank()[0].pools[0][0], "something was computed")


def test_other_drafts_are_another_plan() -> None:
    """Also where they are equally many."""
    seen = []
    for drafts in ((7,), (8,), (7,)):
        own, table = make_rank()
        entries: list[Entry] = []
        executor = RankExecutor(own, table, own.layout, ParallelShape(tp_size=2).coord(0), Unaided(),
                                LeaderLog(ManualClock(), entries.append))  # fmt: skip
        row = table.open([1, 2])
        assert row is not None
        executor.open_row(row, [1, 2, 3, 4, 5], 3, CoreSamplingParams(), None)
        executor.resolve(executor.launch(BatchPlan(1, (BatchRow("r", row, 0, 3, False),))))
        executor.resolve(executor.launch(BatchPlan(2, (BatchRow("r", row, 3, 5, True, drafts=drafts),))))
        seen.append([entry.seen for entry in entries if isinstance(entry, Launched)])
    assert seen[0] == seen[2] and seen[0][1] != seen[1][1]


def test_another_adapter_is_another_plan() -> None:
    """Ranks that read other files under one name would add up parts of different layers."""
    seen = []
    for adapter in (7, 8, 7):
        own, table = make_rank()
        entries: list[Entry] = []
        executor = RankExecutor(
            own, table, own.layout, ParallelShape(tp_size=2).coord(0), Unaided(),
            LeaderLog(ManualClock(), entries.append), adapter_of={0: adapter}.__getitem__,
        )  # fmt: skip
        row = table.open([1])
        assert row == 0
        executor.open_row(row, [1, 2, 3], 3, CoreSamplingParams(), None)
        executor.resolve(executor.launch(BatchPlan(1, (BatchRow("r", row, 0, 3, False),))))
        seen += [entry.seen for entry in entries if isinstance(entry, Launched)]
    assert seen[0] == seen[2] != seen[1]
