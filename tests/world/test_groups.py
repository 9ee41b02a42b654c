"""Hybrid models in the simulated world: a window group and a state group beside full attention.

The tokens of the hash model depend on every byte of all three groups, so a stale, missing or misplaced one changes
them. Memory is as small as the largest request needs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from pdserve.base.parallel import ParallelShape
from pdserve.memory.cached_states import RadixNode
from pdserve.memory.group_pools import GroupPools
from pdserve.memory.kv_memory import KVMemory
from pdserve.memory.layout import KVGroup, KVLayout, PageSpace
from pdserve.memory.lease import GroupLease, Lease, numbers_to_move, numbers_with, pages_at
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.request import Req
from pdserve.sim.network import Faults
from pdserve.sim.world import World, monolith_tokens
from pdserve.transfer import plan as plan_module
from pdserve.transfer import sender as sender_module
from pdserve.transfer.plan import ChunkPart, ChunkPlanner, ShardFlow
from pdserve.transfer.wire import Hello
from tests.share import rest_slow
from tests.world import campaign, pressure
from tests.world.pressure import MAX_NEW, MAX_PROMPT, pressured
from tests.world.workload import with_groups

Patch = pytest.MonkeyPatch
SEEDS_PER_CASE = 12
CASES = rest_slow(range(40), keep=2)
MAX_SEEDS = 60


def play_pressed(seed: int) -> Counter[str]:
    """A pair with hardly more memory than one request needs: retraction, offload, aborts. Returns what happened."""
    shape, prompts = pressured(seed)
    shape = with_groups(shape, random.Random(f"groups {seed}"), MAX_PROMPT + MAX_NEW)
    world, _ = pressure.run_pair(seed, shape, prompts)
    counts = pressure.counts_of(world.prefill, world.decode)
    counts["aborts"] = world.num_aborts
    return counts


@pytest.mark.parametrize("case", CASES)
def test_hybrid_models_under_memory_pressure(case: int) -> None:
    counts = Counter[str]()
    for seed in range(case * SEEDS_PER_CASE, (case + 1) * SEEDS_PER_CASE):
        counts += play_pressed(seed)
    happened = ("requests_retracted", "offloaded_pages", "restored_pages", "recomputed_tokens", "aborts")
    of_all = happened if case == 0 else ("aborts",)  # a few seeds need not have all
    assert all(counts[name] for name in of_all), counts


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 300), marks=pytest.mark.slow)], ids=len)
def test_hybrid_models_on_unequal_splits_with_all_kinds_of_faults(seeds: range) -> None:
    tally = campaign.tally_of(seeds, 1, model="groups")
    assert not tally.failures, tally.failures[0]
    assert tally.counts["replicas of several ranks"] and tally.counts["requests with the monolith's tokens"]


# ---------------------------------------------------------------------- planted bugs


def a_retracted_state_is_not_restored(patch: Patch) -> None:
    restore = SchedulerContext.restore

    def stale(self: SchedulerContext, req: Req) -> None:
        layout, own = self.memory.layout, self.memory.pages_by_group

        def without_state(lease: Lease, num_tokens: int, first_page: int = 0) -> list[list[int]]:
            pages = own(lease, num_tokens, first_page)
            return [self_or_spare(group, found) for group, found in zip(layout.groups, pages, strict=True)]

        patch.setattr(self.memory, "pages_by_group", without_state)
        try:
            restore(self, req)
        finally:
            patch.setattr(self.memory, "pages_by_group", own)

    def self_or_spare(group: KVGroup, found: list[int]) -> list[int]:
        return found if group.space is not PageSpace.SLOTS else [0 if found[0] else 1]

    patch.setattr(SchedulerContext, "restore", stale)


def a_slot_is_free_although_it_is_sent(patch: Patch) -> None:
    leave = SchedulerContext.leave_device

    def hasty(self: SchedulerContext, req: Req) -> None:
        lease = req.lease
        leave(self, req)
        if lease is not None and lease.groups is not None and lease.groups.num_returning == 0:
            self.memory.groups.end(lease.groups)
            lease.groups = None

    patch.setattr(SchedulerContext, "leave_device", hasty)


def the_state_is_sent_with_the_first_pages(patch: Patch) -> None:
    numbers = numbers_with

    def early(layout: KVLayout, group: KVGroup, pages: range, num_tokens: int) -> range:
        if group.space is PageSpace.SLOTS:
            return range(1) if pages and pages.start == 0 else range(0)
        return numbers(layout, group, pages, num_tokens)

    patch.setattr(sender_module, "numbers_with", early)


def the_state_of_another_slot_is_sent(patch: Patch) -> None:
    pages = pages_at

    def another(group: KVGroup, lease: Lease, numbers: range) -> list[int]:
        found = pages(group, lease, numbers)
        return [slot - 1 if slot else slot for slot in found] if group.space is PageSpace.SLOTS else found

    patch.setattr(sender_module, "pages_at", another)


def the_state_is_not_sent(patch: Patch) -> None:
    numbers = numbers_with

    def none(layout: KVLayout, group: KVGroup, pages: range, num_tokens: int) -> range:
        return range(0) if group.space is PageSpace.SLOTS else numbers(layout, group, pages, num_tokens)

    patch.setattr(sender_module, "numbers_with", none)


def the_first_window_page_is_not_sent(patch: Patch) -> None:
    numbers = numbers_with

    def short(layout: KVLayout, group: KVGroup, pages: range, num_tokens: int) -> range:
        found = numbers(layout, group, pages, num_tokens)
        if group.space is PageSpace.WINDOW and numbers_to_move(layout, group, num_tokens)[:1] == found[:1]:
            return found[1:]
        return found

    patch.setattr(sender_module, "numbers_with", short)


def all_planes_are_cut_like_the_first(patch: Patch) -> None:
    flows = plan_module.shard_flows

    def alike(group: KVGroup, source: ParallelShape, destination: ParallelShape) -> tuple[ShardFlow, ...]:
        return tuple(
            ShardFlow(flow.source_rank, flow.destination_rank, flow.layers, (flow.heads[0],) * len(flow.heads))
            for flow in flows(group, source, destination)
        )

    patch.setattr(plan_module, "shard_flows", alike)


def a_group_is_left_out(patch: Patch) -> None:
    pages = ChunkPlanner.pages

    def without_window(
        self: ChunkPlanner, peer: Hello, source: list[Sequence[int]], target: list[Sequence[int]], layers: range
    ) -> list[ChunkPart]:
        return pages(self, peer, [source[0], [], *source[2:]], [target[0], [], *target[2:]], layers)

    patch.setattr(ChunkPlanner, "pages", without_window)


def a_window_page_returns_while_a_step_reads_it(patch: Patch) -> None:
    cover = GroupPools.cover

    def hasty(self: GroupPools, lease: GroupLease, start: int, end: int) -> tuple[list[int], list[int]]:
        new, released = cover(self, lease, start, end)
        oldest = min(lease.window, default=0)
        if len(lease.window) > 1:
            released.append(lease.window.pop(oldest))
            lease.returning[released[-1]] = oldest
        return new, released

    patch.setattr(GroupPools, "cover", hasty)


def a_slot_belongs_to_two_requests(patch: Patch) -> None:
    reserve = GroupPools.reserve

    def shared(
        self: GroupPools, owner: str, max_len: int, *, decode_only: bool = False, source: RadixNode | None = None
    ) -> GroupLease | None:
        lease = reserve(self, owner, max_len, decode_only=decode_only, source=source)
        if lease is not None and lease.slot is not None:
            self.allocator_of(PageSpace.SLOTS).give_back([lease.slot])
        return lease

    patch.setattr(GroupPools, "reserve", shared)


def the_table_keeps_the_slot_of_the_row_before(patch: Patch) -> None:
    open_row = KVMemory.open_row

    def stale(self: KVMemory, lease: Lease) -> int | None:
        slots = self.table.slots.copy()
        row = open_row(self, lease)
        if row is not None:
            self.table.slots[row] = slots[row]
        return row

    patch.setattr(KVMemory, "open_row", stale)


PRESSED = (
    a_retracted_state_is_not_restored,
    a_slot_is_free_although_it_is_sent,
    the_state_is_sent_with_the_first_pages,
    the_state_of_another_slot_is_sent,
    the_state_is_not_sent,
    the_first_window_page_is_not_sent,
    a_group_is_left_out,
    a_window_page_returns_while_a_step_reads_it,
    a_slot_belongs_to_two_requests,
    the_table_keeps_the_slot_of_the_row_before,
)


@pytest.mark.parametrize("plant", PRESSED)
def test_a_planted_bug_is_caught(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    pressure.assert_caught(play_pressed, MAX_SEEDS, KeyError, IndexError)


def test_planes_cut_at_the_wrong_heads_are_caught(monkeypatch: Patch) -> None:
    all_planes_are_cut_like_the_first(monkeypatch)
    for seed in range(MAX_SEEDS):
        try:
            campaign.play(seed, "ranks", model="groups")
        except (AssertionError, ValueError):
            return
    pytest.fail(f"not caught in {MAX_SEEDS} seeds")


def test_a_hybrid_without_faults_gets_every_token() -> None:
    shape, prompts = pressured(1)
    shape = with_groups(shape, random.Random(1), MAX_PROMPT + MAX_NEW)
    world = World(1, shape, Faults())
    halves = world.run(prompts, num_rooms=8)
    assert [half.tokens if half else None for half in halves] == monolith_tokens(shape, prompts)
