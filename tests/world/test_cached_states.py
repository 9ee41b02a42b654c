"""Prefix caches with recurrent states in the simulated world: conversations that branch, with hardly any memory.

States and pages are evicted, requests are retracted and continue from the deepest state, and slots are as few as one
request needs. Without a cache a monolith gives the tokens that all of them must have.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from pdserve.base.clock import ManualClock
from pdserve.memory.cached_states import CachedStates, RadixNode
from pdserve.memory.group_pools import GroupPools
from pdserve.memory.kv_memory import KVMemory
from pdserve.memory.lease import GroupLease
from pdserve.memory.prefix_cache import RadixTree
from pdserve.sim.network import Faults, SimNet
from pdserve.sim.node import SimNode
from pdserve.sim.shape import Prompt, Shape, request
from pdserve.sim.world import monolith_tokens
from tests.share import rest_slow
from tests.world import campaign, pressure
from tests.world.pressure import pressured
from tests.world.workload import with_states

Patch = pytest.MonkeyPatch
SEEDS_PER_CASE = 25
CASES = rest_slow(range(80), keep=1)
MAX_SEEDS = 120


def setting(seed: int) -> tuple[Shape, list[Prompt]]:
    shape, prompts = pressured(seed)
    return with_states(shape, random.Random(f"states {seed}")), prompts


def play(seed: int) -> Counter[str]:
    """A pair or a monolith under memory pressure, which retracts requests to their deepest state."""
    return pressure.play_cached(seed, *setting(seed))


@pytest.mark.parametrize("case", CASES)
def test_prompts_that_branch_under_memory_pressure(case: int) -> None:
    counts = Counter[str]()
    for seed in range(case * SEEDS_PER_CASE, (case + 1) * SEEDS_PER_CASE):
        counts += play(seed)
    happened = ("states_copied", "states_kept", "states_evicted", "evicted_pages", "requests_retracted")
    assert all(counts[name] for name in happened), counts


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 200), marks=pytest.mark.slow)], ids=len)
def test_cached_states_on_unequal_splits_with_all_kinds_of_faults(seeds: range) -> None:
    tally = campaign.tally_of(seeds, 1, model="states")
    assert not tally.failures, tally.failures[0]
    assert tally.counts["replicas of several ranks"] and tally.counts["requests that continued from a cached state"]


def test_a_second_turn_and_a_branch_continue_from_a_state() -> None:
    """The first prompt leaves a state at its end on the grid, the first that branches off one at the junction."""
    shape = Shape(
        page_tokens=4, num_pages=64, has_state=True, num_slots=8, chunk_tokens=None, state_grid_pages=1, num_rows=4
    )
    shared = tuple(range(100, 122))
    prompts = [Prompt((*shared, 1, 2, 3, 4, 5), 4), Prompt((*shared, 7, 8), 4), Prompt((*shared, 9, 10), 4)]
    prompts.append(Prompt((*prompts[0].tokens, 11, 12), 4))
    expected = monolith_tokens(shape, prompts)
    node = SimNode("null", shape, SimNet(0, ManualClock(), Faults()), "mono", "mono")
    cached = []
    for index, prompt in enumerate(prompts):
        before = node.scheduler.context.counters["cached_tokens"]
        node.mailbox.post(request(f"r{index}", prompt, None))
        for _ in range(200):
            if not node.scheduler.step() and node.idle:
                break
        cached.append(node.scheduler.context.counters["cached_tokens"] - before)
    assert [node.halves[f"r{index}"].tokens for index in range(4)] == expected
    assert cached == [0, 0, 20, 24], "the last multiple of the grid is 24; 20 is that of the 22 shared tokens"
    assert not node.leaks()


# ---------------------------------------------------------------------- planted bugs


def a_split_gives_the_state_to_the_upper_half(patch: Patch) -> None:
    """The state of one branch is found at the junction."""
    split = RadixTree._split

    def wrong(self: RadixTree, node: RadixNode, num_pages: int) -> RadixNode:
        upper = split(self, node, num_pages)
        if self.states is not None and node.state is not None and not self.states.is_locked(node):
            self.states.add(upper, self.states.take(node))
        return upper

    patch.setattr(RadixTree, "_split", wrong)


def the_junction_gets_the_state_of_an_earlier_node(patch: Patch) -> None:
    def wrong(self: RadixTree, tokens: bytes) -> RadixNode | None:
        return self.match(tokens, len(tokens) // (4 * self.page_tokens)).node if tokens else None

    patch.setattr(RadixTree, "node_at", wrong)


def a_state_is_used_beyond_its_nodes_end(patch: Patch) -> None:
    reserve = GroupPools.reserve

    def usable(self: KVMemory, token_ids: bytes, max_pages: int) -> int:
        tree = self.pages.tree
        if tree is None or (self.has_cached_states and tree.deepest_state(token_ids, max_pages) is None):
            return 0
        return tree.peek(token_ids, max_pages)

    def deepest(
        self: GroupPools, owner: str, max_len: int, *, decode_only: bool = False, source: RadixNode | None = None
    ) -> GroupLease | None:
        while source is not None and source.state is None:
            source = source.parent
        return reserve(self, owner, max_len, decode_only=decode_only, source=source)

    patch.setattr(KVMemory, "_usable_pages", usable)
    patch.setattr(GroupPools, "reserve", deepest)


def a_state_is_evicted_while_it_is_copied(patch: Patch) -> None:
    def slot_only(self: CachedStates, node: RadixNode) -> int:
        assert node.state is not None
        return node.state

    patch.setattr(CachedStates, "lock", slot_only)
    patch.setattr(CachedStates, "unlock", lambda self, node: None)


def a_state_is_cached_before_it_is_computed(patch: Patch) -> None:
    keep = GroupPools.keep

    def early(self: GroupPools, lease: GroupLease, position: int, *, evict: bool) -> int:
        slot = keep(self, lease, position, evict=evict)
        if slot >= 0 and len(lease.kept) > 1:
            first = min(lease.kept)
            lease.kept[position], lease.kept[first] = lease.kept[first], lease.kept[position]
        return slot

    patch.setattr(GroupPools, "keep", early)


def a_request_without_a_copy_of_the_state(patch: Patch) -> None:
    patch.setattr(GroupPools, "source_of", lambda self, lease: -1)


def a_trimmed_node_keeps_its_state(patch: Patch) -> None:
    patch.setattr(RadixTree, "_drop_state", lambda self, node: None)


PLANTED = (
    a_split_gives_the_state_to_the_upper_half,
    the_junction_gets_the_state_of_an_earlier_node,
    a_state_is_used_beyond_its_nodes_end,
    a_state_is_evicted_while_it_is_copied,
    a_state_is_cached_before_it_is_computed,
    a_request_without_a_copy_of_the_state,
    a_trimmed_node_keeps_its_state,
)


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_caught(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    pressure.assert_caught(play, MAX_SEEDS, KeyError, IndexError)
