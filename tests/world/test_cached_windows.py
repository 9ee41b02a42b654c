"""Prefix caches with window pages in the simulated world: prompts that share beginnings, with hardly any memory.

Window pages and token pages are evicted, requests are retracted and continue from a cached prefix, and transfers bring
the window. Without a cache a monolith gives the tokens that all of them must have.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from pdserve.memory.cached_windows import CachedWindowPage, CachedWindows
from pdserve.memory.group_pools import GroupPools
from pdserve.memory.kv_memory import KVMemory
from pdserve.memory.lease import GroupLease
from pdserve.sim.shape import Prompt, Shape
from tests.share import rest_slow
from tests.world import pressure
from tests.world.pressure import MAX_NEW, MAX_PROMPT, pressured
from tests.world.workload import with_groups

Patch = pytest.MonkeyPatch
SEEDS_PER_CASE = 20
CASES = rest_slow(range(80), keep=1)
MAX_SEEDS = 120


def setting(seed: int) -> tuple[Shape, list[Prompt]]:
    rng = random.Random(f"windows {seed}")
    shape, prompts = pressured(seed)
    shape = with_groups(shape, rng, MAX_PROMPT + MAX_NEW)
    num_window_pages = shape.num_window_pages + rng.choice((0, 4, 30))
    return (
        dataclasses.replace(
            shape, is_hybrid=rng.random() < 0.2, prefix_cache=True, decode_prefix_cache=rng.random() < 0.5,
            num_window_pages=num_window_pages,
        ),
        prompts,
    )  # fmt: skip


def play(seed: int) -> Counter[str]:
    """A pair or a monolith under memory pressure; the pair's decode server has a prefix cache."""
    shape, prompts = setting(seed)
    if seed % 2 == 0:
        shape = dataclasses.replace(shape, decode_prefix_cache=True)
    return pressure.play_cached(seed, shape, prompts)


@pytest.mark.parametrize("case", CASES)
def test_prompts_that_share_beginnings_under_memory_pressure(case: int) -> None:
    counts = Counter[str]()
    for seed in range(case * SEEDS_PER_CASE, (case + 1) * SEEDS_PER_CASE):
        counts += play(seed)
    happened = ("cached_tokens", "windows_evicted", "evicted_pages", "requests_retracted", "decode_cached_tokens")
    assert all(counts[name] for name in happened), counts


# ---------------------------------------------------------------------- planted bugs


def a_match_is_not_cut_back(patch: Patch) -> None:
    """The first step reads window pages of another request, or none."""

    def share(self: KVMemory, lease: object, windows: CachedWindows) -> None:
        groups = lease.groups  # type: ignore[attr-defined]
        pages = lease.pages  # type: ignore[attr-defined]
        count = lease.num_prefix_pages  # type: ignore[attr-defined]
        found = {n: cached for n in range(count) if (cached := windows.find(pages[n])) is not None}
        self.groups.share_window(groups, {n: c for n, c in found.items() if n >= self.first_read(count)})

    patch.setattr(CachedWindows, "usable", lambda self, backwards, num_pages, first_read: num_pages)
    patch.setattr(KVMemory, "_share_window", share)


def a_page_that_a_request_reads_is_evicted(patch: Patch) -> None:
    def lock(self: CachedWindows, cached: CachedWindowPage) -> None:
        cached.locks += 1

    def unlock(self: CachedWindows, cached: CachedWindowPage) -> None:
        cached.locks -= 1
        if cached.locks == 0 and cached.token_page is not None:
            self._evictable[cached] = None

    patch.setattr(CachedWindows, "lock", lock)
    patch.setattr(CachedWindows, "unlock", unlock)


def a_window_page_stays_when_its_token_page_goes(patch: Patch) -> None:
    """The next tokens in that token page find the window of other tokens."""
    patch.setattr(CachedWindows, "drop", lambda self, token_pages: None)


def pages_are_cached_under_the_token_page_before(patch: Patch) -> None:
    def shifted(self: GroupPools, lease: GroupLease, num_pages: int) -> dict[int, int]:
        numbers = {number: page for page, number in lease.returning.items()} | lease.window
        return {n - 1: page for n, page in numbers.items() if 0 < n < num_pages and page not in lease.cached}

    patch.setattr(GroupPools, "uncached_window", shifted)


def a_page_of_the_cache_is_freed_with_the_request(patch: Patch) -> None:
    def leave(self: GroupPools, lease: GroupLease, pages: Iterable[int]) -> None:
        found = list(pages)
        for page in found:
            lease.cached.pop(page, None)
        self.free_window(found)

    patch.setattr(GroupPools, "_leave_window", leave)


PLANTED = (
    a_match_is_not_cut_back,
    a_page_that_a_request_reads_is_evicted,
    a_window_page_stays_when_its_token_page_goes,
    pages_are_cached_under_the_token_page_before,
    a_page_of_the_cache_is_freed_with_the_request,
)


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_caught(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    pressure.assert_caught(play, MAX_SEEDS, KeyError, IndexError)
