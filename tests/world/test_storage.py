"""Worlds with a store below the host tier, and bugs that are planted there: each must give a wrong token, or worse."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from pdserve.errors import RankError
from pdserve.memory.layout import PageSpace
from pdserve.memory.page_keys import KeyNamespace
from pdserve.memory.tiers.host_pool import HostPool
from pdserve.memory.tiers.prefix_ends import PageKey
from pdserve.memory.tiers.storage import ObjectId
from pdserve.memory.tiers.storage_port import JobEnd
from pdserve.ranks.rank_storage import RankStoragePort
from pdserve.scheduler import storage_tier
from pdserve.scheduler.host_tier import HostTier
from pdserve.sim import hash_storage
from pdserve.sim.hash_storage import SimStoragePort
from tests.world.pressure import assert_caught
from tests.world.storage import HAPPENS, play, play_changes, play_ranks, play_weights

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("seed", range(3))
def test_servers_with_a_store(seed: int) -> None:
    play(seed)


@pytest.mark.parametrize("seed", range(2))
def test_ranks_with_a_store(seed: int) -> None:
    play_ranks(seed)


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(100, 140), marks=pytest.mark.slow)], ids=len)
def test_servers_with_a_store_change_their_role(seeds: range) -> None:
    found: Counter[str] = Counter()
    for seed in seeds:
        found += play_changes(seed)
    assert found["role changes in place"] and found["backuped_tokens"]


@pytest.mark.slow
def test_many_servers_with_a_store() -> None:
    found: Counter[str] = Counter()
    for seed in range(100, 200):
        found += play(seed)
    assert not [name for name in HAPPENS if not found[name]], found


@pytest.mark.slow
def test_many_ranks_with_a_store() -> None:
    for seed in range(100, 150):
        play_ranks(seed)


# ---------------------------------------------------------------------- planted bugs


def a_namespace_without_weights(patch: Patch) -> None:
    """Servers of different models share KV."""
    patch.setattr(KeyNamespace, "root", lambda self, adapter="", salt="": hashlib.sha256(b"all").digest())


def a_page_is_its_own_tokens(patch: Patch) -> None:
    """The key of a page does not tell what comes before."""

    def chain(self: KeyNamespace, before: bytes, tokens: bytes) -> list[bytes]:
        size = self.page_tokens * 4
        return [hashlib.sha256(tokens[at : at + size]).digest() for at in range(0, len(tokens) - size + 1, size)]

    patch.setattr(KeyNamespace, "chain", chain)


def objects_are_not_checked(patch: Patch) -> None:
    patch.setattr(hash_storage, "check", lambda stored, identity: None)


def bytes_land_after_a_job_was_given_up(patch: Patch) -> None:
    """A read that the server has given up goes on."""
    read, give_up = SimStoragePort._read, SimStoragePort.give_up
    reads: dict[int, tuple[bytes, Sequence[PageKey], Sequence[int]]] = {}
    get = SimStoragePort.get

    def remember(self: SimStoragePort, root: bytes, keys: Sequence[PageKey], slots: Sequence[int]) -> int:
        number = get(self, root, keys, slots)
        reads[number] = root, keys, slots
        return number

    def leave(self: SimStoragePort, number: int, *, late: bool) -> None:
        give_up(self, number, late=late)
        if number in reads:
            self._net.later(lambda: read(self, *reads[number]))

    patch.setattr(SimStoragePort, "get", remember)
    patch.setattr(SimStoragePort, "give_up", leave)


def all_that_was_found_is_read(patch: Patch) -> None:
    """What the store said to have counts as read."""
    ended = storage_tier.StorageTier._read_ended
    patch.setattr(
        storage_tier.StorageTier, "_read_ended", lambda self, reading, num_read: ended(self, reading, len(reading.keys))
    )


def a_state_is_used_that_was_not_read(patch: Patch) -> None:
    """What a read did not write enters the host tier with the token pages."""
    patch.setattr(HostPool, "drop_unread", lambda self, lease, numbers, *, state: None)


def the_key_of_a_state_has_no_position(patch: Patch) -> None:
    """All states of a namespace are one object, and so are all window pages."""
    ids = SimStoragePort._ids

    def same(self: SimStoragePort, root: bytes, keys: Sequence[PageKey]) -> list[ObjectId]:
        found = zip(keys, ids(self, root, keys), strict=True)
        return [one if key.space is PageSpace.TOKENS else replace(one, digest=bytes(32)) for key, one in found]

    patch.setattr(SimStoragePort, "_ids", same)


def window_pages_are_read_backwards(patch: Patch) -> None:
    """The slots of window pages are those of other numbers."""
    get = SimStoragePort.get

    def backwards(self: SimStoragePort, root: bytes, keys: Sequence[PageKey], slots: Sequence[int]) -> int:
        turned = [slot for key, slot in zip(keys, slots, strict=True) if key.space is PageSpace.WINDOW]
        return get(
            self, root, keys,
            [turned.pop() if key.space is PageSpace.WINDOW else slot for key, slot in zip(keys, slots, strict=True)],
        )  # fmt: skip

    patch.setattr(SimStoragePort, "get", backwards)


def each_rank_believes_itself(patch: Patch) -> None:
    def poll(self: RankStoragePort) -> Sequence[JobEnd]:
        ends = list(self._own.poll())
        self._pending.difference_update(end.number for end in ends)
        return ends

    patch.setattr(RankStoragePort, "poll", poll)


def with_other_weights(seed: int) -> object:
    """Servers of two models, one after the other."""
    return play_weights(seed, (0, 1, 0))


def with_groups(seed: int) -> object:
    """Servers of a model with recurrent states or a window."""
    return play(2 * seed + 1)


def a_role_change_waits_for_no_copy(patch: Patch) -> None:
    """A page may be another role's while it is copied."""
    patch.setattr(HostTier, "num_copies", 0)


Bug = tuple[Callable[[Patch], None], Callable[[int], object]]


QUICK: tuple[Bug, ...] = (
    (a_namespace_without_weights, with_other_weights),
    (objects_are_not_checked, play),
    (all_that_was_found_is_read, play),
    (a_state_is_used_that_was_not_read, with_groups),
    (the_key_of_a_state_has_no_position, with_groups),
    (each_rank_believes_itself, play_ranks),
)
SLOW: tuple[Bug, ...] = (
    (a_page_is_its_own_tokens, play),
    (window_pages_are_read_backwards, with_groups),
    (bytes_land_after_a_job_was_given_up, play),
    (a_role_change_waits_for_no_copy, play_changes),
)
BUGS = [pytest.param(*bug, id=bug[0].__name__) for bug in QUICK]
BUGS += [pytest.param(*bug, id=bug[0].__name__, marks=pytest.mark.slow) for bug in SLOW]


@pytest.mark.parametrize(("plant", "run"), BUGS)
def test_bugs_are_caught(plant: Callable[[Patch], None], run: Callable[[int], object], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    assert_caught(run, 150, RankError, IndexError, KeyError)
