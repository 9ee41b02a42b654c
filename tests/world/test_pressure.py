"""Eviction, retraction, offload, resume, partial sends, overlap: the monolith's tokens, and nothing left behind."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.world.pressure import FAULTS, KILLS, Tally, press, press_monolith

CASES, SEEDS_PER_CASE = 10, 200


@pytest.mark.parametrize("case", range(CASES))
def test_servers_that_are_far_too_small_give_the_same_tokens(case: int) -> None:
    tally = Tally()
    for seed in range(case * SEEDS_PER_CASE, (case + 1) * SEEDS_PER_CASE):
        tally.add(press(seed, FAULTS))
    assert not tally.lacks(), f"a run in which these hardly happened says nothing: {tally.lacks()} of {tally.seeds}"


@pytest.mark.parametrize("case", range(4))
def test_and_so_do_those_that_are_killed(case: int) -> None:
    tally = Tally()
    for seed in range(10_000 + case * 50, 10_000 + (case + 1) * 50):
        tally.add(press(seed, KILLS))
    assert tally.seeds["kills"] * 3 > tally.num_seeds


def test_a_monolith_with_memory_for_its_largest_request_only() -> None:
    totals: Counter[str] = Counter()
    for seed in range(200):
        totals += press_monolith(seed)
    assert totals["requests_retracted"] and totals["restored_pages"] and totals["recomputed_tokens"]
