"""Bugs of the host tier and of the store that the tests of the simulated world plant."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import pytest

from pdserve.executor.page_copies import PendingCopy
from pdserve.memory.layout import PageSpace
from pdserve.memory.lease import Lease
from pdserve.memory.page_keys import KeyNamespace
from pdserve.memory.tiers.host_memory import PageCopies
from pdserve.memory.tiers.host_pool import HostPool
from pdserve.memory.tiers.prefix_ends import PageKey
from pdserve.memory.tiers.storage import ObjectId
from pdserve.memory.tiers.storage_port import JobEnd
from pdserve.ranks.rank_copies import AgreedCopy
from pdserve.ranks.rank_storage import RankStoragePort
from pdserve.scheduler import storage_tier
from pdserve.scheduler.host_tier import HostTier
from pdserve.sim import hash_storage
from pdserve.sim.hash_storage import SimStoragePort
from pdserve.sim.hash_tier import HashTier
from pdserve.transfer.aux import AuxRecord, MetadataBuffers

Patch = pytest.MonkeyPatch


# ---------------------------------------------------------------------- the host tier


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


# ---------------------------------------------------------------------- the store


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
        return [
            one if key.space is PageSpace.TOKENS else dataclasses.replace(one, digest=bytes(32)) for key, one in found
        ]

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


def a_role_change_waits_for_no_copy(patch: Patch) -> None:
    """A page may be another role's while it is copied."""
    patch.setattr(HostTier, "num_copies", 0)
