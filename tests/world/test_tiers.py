"""The host tier in the simulated world: prefixes that leave the device come back with the same tokens, on all ranks.

Bugs of the copies are planted one by one, and must be caught.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from pdserve.errors import PdserveError
from pdserve.executor.page_copies import PendingCopy
from pdserve.memory.layout import PageSpace
from pdserve.memory.lease import Lease
from pdserve.memory.tiers.host_memory import PageCopies
from pdserve.ranks.rank_copies import AgreedCopy
from pdserve.scheduler.host_tier import HostTier
from pdserve.sim.hash_tier import HashTier
from pdserve.transfer.aux import AuxRecord, MetadataBuffers
from tests.share import rest_slow
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


def slots_are_used_again_before_a_load_has_ended(patch: Patch) -> None:
    start = HostTier._start_load

    def hasty(self: HostTier, rid: str, token_ids: bytes, *, has_groups: bool) -> bool:
        started = start(self, rid, token_ids, has_groups=has_groups)
        if started:
            self._loads[rid].host.drop("tier")
        return started

    patch.setattr(HostTier, "_start_load", hasty)


def pages_are_evicted_before_a_save_has_ended(patch: Patch) -> None:
    start = HostTier._start_saves

    def hasty(self: HostTier) -> None:
        start(self)
        for copy in self._saves:
            copy.device.drop("tier")

    patch.setattr(HostTier, "_start_saves", hasty)


def a_copy_counts_as_done_at_its_start(patch: Patch) -> None:
    """Loaded pages and saved slots are found before their bytes are there."""
    patch.setattr(PendingCopy, "is_done", property(lambda self: True))


def a_rank_takes_the_end_of_its_own_copy(patch: Patch) -> None:
    """The ranks find prefixes of different lengths."""
    patch.setattr(AgreedCopy, "is_done", property(lambda self: self._own.is_done))


def states_are_left_out(patch: Patch) -> None:
    copy = HashTier.copy

    def partial(self: HashTier, copies: Sequence[PageCopies], ranks: Sequence[int], *, to_host: bool) -> None:
        copy(self, [one for one in copies if one.space is not PageSpace.SLOTS], ranks, to_host=to_host)

    patch.setattr(HashTier, "copy", partial)


def window_pages_come_in_another_order(patch: Patch) -> None:
    pair = HostTier._pair

    def mixed(self: HostTier, device: Lease, host: Lease, pages: range, numbers: Sequence[int]) -> list[PageCopies]:
        return [
            PageCopies(one.space, one.pages, one.slots[::-1]) if one.space is PageSpace.WINDOW else one
            for one in pair(self, device, host, pages, numbers)
        ]

    patch.setattr(HostTier, "_pair", mixed)


def prefill_does_not_say_where_cached_tokens_were(patch: Patch) -> None:
    write = MetadataBuffers.write

    def silent(self: MetadataBuffers, slot: int, record: AuxRecord) -> None:
        write(self, slot, dataclasses.replace(record, cached_details=None))

    patch.setattr(MetadataBuffers, "write", silent)


@pytest.mark.parametrize(
    ("plant", "player", "first"),
    [
        (slots_are_used_again_before_a_load_has_ended, play, 46),
        (pages_are_evicted_before_a_save_has_ended, play, 0),
        (a_copy_counts_as_done_at_its_start, play, 0),
        (a_rank_takes_the_end_of_its_own_copy, play_ranks, 0),
        (states_are_left_out, play, 0),
        (window_pages_come_in_another_order, play, 0),
        (prefill_does_not_say_where_cached_tokens_were, play, 30),
    ],
    ids=lambda it: getattr(it, "__name__", str(it)),
)
def test_planted_bugs_are_caught(
    plant: Callable[[Patch], None], player: Callable[[int], object], first: int, monkeypatch: Patch
) -> None:
    """Seeds from `first` on, so that a rare event is found soon."""
    plant(monkeypatch)
    assert_caught(lambda seed: player(first + seed), MAX_SEEDS, PdserveError, KeyError, IndexError)
