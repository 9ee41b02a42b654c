"""The host tier in the simulated world: prefixes that leave the device come back with the same tokens, on all ranks.

Bugs of the copies are planted one by one, and must be caught.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from pdserve.errors import PdserveError
from tests.share import rest_slow
from tests.world import tier_bugs
from tests.world.pressure import assert_caught
from tests.world.tiers import play, play_ranks

Patch = pytest.MonkeyPatch
SEEDS_PER_CASE = 10
CASES = rest_slow(range(80), keep=1)
MAX_SEEDS = 150


def assert_happened(counts: Counter[str], *names: str) -> None:
    assert all(counts[name] for name in names), counts


@pytest.mark.parametrize("case", CASES)
def test_prefixes_come_back_from_the_host_tier(case: int) -> None:
    counts = Counter[str]()
    for seed in range(case * SEEDS_PER_CASE, (case + 1) * SEEDS_PER_CASE):
        counts += play(seed)
    assert_happened(counts, "hicache_backup_tokens", "load_back_tokens", "evicted_pages", "requests_retracted")


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 150), marks=pytest.mark.slow)], ids=len)
def test_ranks_that_copy_at_their_own_pace_agree_on_hits(seeds: range) -> None:
    counts = Counter[str]()
    for seed in seeds:
        counts += play_ranks(seed)
    assert_happened(counts, "hicache_backup_tokens", "load_back_tokens")


# ---------------------------------------------------------------------- planted bugs


@pytest.mark.parametrize(
    ("plant", "player", "first"),
    [
        (tier_bugs.slots_are_used_again_before_a_load_has_ended, play, 46),
        (tier_bugs.pages_are_evicted_before_a_save_has_ended, play, 0),
        (tier_bugs.a_copy_counts_as_done_at_its_start, play, 0),
        (tier_bugs.a_rank_takes_the_end_of_its_own_copy, play_ranks, 0),
        (tier_bugs.states_are_left_out, play, 0),
        (tier_bugs.window_pages_come_in_another_order, play, 0),
        (tier_bugs.prefill_does_not_say_where_cached_tokens_were, play, 30),
    ],
    ids=lambda it: getattr(it, "__name__", str(it)),
)
def test_planted_bugs_are_caught(
    plant: Callable[[Patch], None], player: Callable[[int], object], first: int, monkeypatch: Patch
) -> None:
    """Seeds from `first` on, so that a rare event is found soon."""
    plant(monkeypatch)
    assert_caught(lambda seed: player(first + seed), MAX_SEEDS, PdserveError, KeyError, IndexError)
