"""Pages of a `HashExecutor` outside steps: hashed, in host memory, and in the host tier, whose copies take time.

The bytes move at the end of a copy, at once. So a page or slot that is reused before the end gives wrong tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pdserve.executor.interface import CopyHandle
from pdserve.executor.page_copies import PendingCopy
from pdserve.memory.layout import GroupKind, KVLayout, PageSpace
from pdserve.memory.tiers.host_memory import HostMemory, PageCopies
from pdserve.sim.hash_layers import POISON, U64
from pdserve.transfer.checksum import GroupDigest, RankDigest, digest_group
from pdserve.transfer.plan import RankShard

Later = Callable[[Callable[[], None]], None]
"""Runs an action some time later."""


def _at_once(action: Callable[[], None]) -> None:
    action()


class HashTier:
    """Slots of the host tier for the pools of all ranks of a replica: `pools[rank][group]`, uint64 words.

    `layouts`: of each rank. `later` decides when a copy ends; by default at its start.
    """

    def __init__(
        self, pools: Sequence[Sequence[U64]], layouts: Sequence[KVLayout], num_slots: Mapping[PageSpace, int]
    ) -> None:
        self._pools = pools
        self.hosts = [HostMemory(layout, num_slots) for layout in layouts]
        """By rank."""
        self.later: Later = _at_once
        for space, count in num_slots.items():
            self.poison(space, range(count))
        self.num_running = 0
        """Copies that have not ended."""

    def poison(self, space: PageSpace, slots: Sequence[int]) -> None:
        """Overwrite freed slots, so that a read after free changes the tokens."""
        for host in self.hosts:
            host.slabs[space].view(np.uint64)[list(slots)] = POISON

    def start(self, copies: Sequence[PageCopies], ranks: Sequence[int], *, to_host: bool) -> PendingCopy:
        """Begin the copies of some ranks."""
        handle = PendingCopy()
        self.num_running += 1

        def end() -> None:
            self.num_running -= 1
            self.copy(copies, ranks, to_host=to_host)
            handle.end()

        self.later(end)
        return handle

    def copy(self, copies: Sequence[PageCopies], ranks: Sequence[int], *, to_host: bool) -> None:
        """Move the bytes of some ranks now."""
        for rank in ranks:
            self._copy(rank, copies, to_host=to_host)

    def _copy(self, rank: int, copies: Sequence[PageCopies], *, to_host: bool) -> None:
        host, pools = self.hosts[rank], self._pools[rank]
        for one in copies:
            words = host.slabs[one.space].view(np.uint64)
            pages, slots = list(one.pages), list(one.slots)
            for part in host.parts[one.space]:
                start, stop = part.start // 8, (part.start + part.num_bytes) // 8
                pool = pools[part.group]
                if to_host:
                    words[slots, start:stop] = pool[pages].reshape(len(pages), stop - start)
                else:
                    pool[pages] = words[slots, start:stop].reshape(len(pages), *pool.shape[1:])


class HashTierCopies:
    """Mixin of `HashExecutor`: the part of `Executor` for the host tier. `pools` and `windows`: by rank and group."""

    pools: list[list[U64]]
    windows: list[list[RankShard]]
    tier: HashTier | None = None
    """None until `open_tier`."""
    tier_ranks: Sequence[int] = ()
    """Ranks whose pages `start_save` and `start_load` copy."""

    def open_tier(self, num_slots: Mapping[PageSpace, int]) -> HashTier:
        """Make the host tier of all ranks."""
        layouts = [KVLayout(tuple(shard.group for shard in shards)) for shards in self.windows]
        self.tier = HashTier(self.pools, layouts, num_slots)
        self.tier_ranks = range(len(self.pools))
        return self.tier

    def start_save(self, copies: Sequence[PageCopies]) -> CopyHandle:
        """See `Executor.start_save`."""
        assert self.tier is not None, "there is no host tier"
        return self.tier.start(copies, self.tier_ranks, to_host=True)

    def start_load(self, copies: Sequence[PageCopies]) -> CopyHandle:
        """See `Executor.start_load`."""
        assert self.tier is not None, "there is no host tier"
        return self.tier.start(copies, self.tier_ranks, to_host=False)

    def poll_copies(self) -> None:
        """See `Executor.poll_copies`."""

    def copy_now(self, copies: Sequence[PageCopies], *, to_host: bool) -> None:
        """See `Executor.copy_now`: of all ranks."""
        assert self.tier is not None, "there is no host tier"
        if to_host:
            self.settle_slots({page for one in copies if one.space is PageSpace.SLOTS for page in one.pages})
        self.tier.copy(copies, range(len(self.pools)), to_host=to_host)

    def settle_slots(self, slots: set[int]) -> None:
        """Fold the pending tokens of these state slots."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class SavedPages:
    """Implements `HostPages`: the pages of each rank and group. `num_ranks`: ranks that have a part of them."""

    contents: list[U64]
    num_ranks: int = 1

    @property
    def num_bytes(self) -> int:
        """See `HostPages`."""
        return sum(content.nbytes for content in self.contents)

    def export(self) -> list[bytes] | None:
        """See `HostPages`."""
        return [content.tobytes() for content in self.contents] if self.num_ranks == 1 else None


class HashHasher:
    """Implements `KVHasher` over the pools of a `HashExecutor`. Draft KV is not hashed."""

    def __init__(self, executor: HashTierCopies) -> None:
        self._executor = executor

    def digest(self, pages: Sequence[Sequence[int]], firsts: Sequence[int], num_tokens: int) -> tuple[RankDigest, ...]:
        """See `KVHasher`."""
        digests = []
        for rank, (windows, pools) in enumerate(zip(self._executor.windows, self._executor.pools, strict=True)):
            groups: list[GroupDigest] = []
            for window, pool, own, first in zip(windows, pools, pages, firsts, strict=True):
                rows = pool[list(own)].reshape(len(own), window.group.page_bytes // 8).view(np.uint8)
                if window.group.kind is not GroupKind.DRAFT:
                    groups += digest_group(window, [rows], first, num_tokens)
            digests.append(RankDigest(rank, tuple(groups)))
        return tuple(digests)
