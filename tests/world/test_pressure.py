"""Eviction, retraction, offload, resume, partial sends, overlap: the monolith's tokens, and nothing left behind."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.world.pressure import FAULTS, KILLS, crowded, press, press_monolith, tally_of


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 2000), marks=pytest.mark.slow)], ids=len)
def test_servers_that_are_far_too_small_give_the_same_tokens(seeds: range) -> None:
    tally = tally_of(seeds, FAULTS)
    assert tally.num_seeds == len(seeds)
    assert not tally.lacks(), f"a run in which these hardly happened says nothing: {tally.lacks()} of {tally.seeds}"


def test_and_so_do_those_that_are_killed() -> None:
    tally = tally_of(range(10_000, 10_030), KILLS)
    assert tally.seeds["kills"] * 3 > tally.num_seeds == 30


def test_a_monolith_with_memory_for_its_largest_request_only() -> None:
    totals: Counter[str] = Counter()
    for seed in range(40):
        totals += press_monolith(seed)
    assert totals["requests_retracted"] and totals["restored_pages"] and totals["recomputed_tokens"]
    assert totals["requests_preempted"]


@pytest.mark.slow
def test_urgent_requests_preempt_others_and_displace_them_from_full_queues() -> None:
    totals: Counter[str] = Counter()
    for seed in range(200):
        totals += press(seed, (FAULTS, KILLS)[seed // 5 % 2], crowded(seed)).events
    for event in ("requests_preempted", "requests_evicted", "requests_retracted", "kv_loads_recomputed", "kills"):
        assert totals[event] > 20, (event, totals)
