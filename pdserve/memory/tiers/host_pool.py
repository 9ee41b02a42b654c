"""The host tier of the prefix cache: it maps token prefixes to the slots of host memory that hold their KV.

    device    RadixTree over pages of the pool      [A B C] [D E]
                   | save ^                              |
                   v load |                              v
    host      RadixTree over slots                  [A B C] [D E] [F]     F has left the device

The host tier has a radix tree of its own, whose pages are slots. So a prefix that leaves the device stays here until
its slots are needed, least recently used first. Window pages and recurrent states have slots of their own spaces. The
same pool has the KV of retracted requests, as leases that the tree does not know.

Slot numbers are equal on all ranks; `HostMemory` has this rank's bytes. Scheduler thread only, except for the bytes of
slots that a lease keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pdserve.memory.cache_recorder import CacheRecorder
from pdserve.memory.group_pools import GroupPoolSizes
from pdserve.memory.kv_memory import KVMemory, PageTable
from pdserve.memory.layout import KVLayout, PageSpace
from pdserve.memory.lease import Lease
from pdserve.memory.tiers.host_memory import HostMemory


class HostPool:
    """Slots of the host tier. `slots` has the leases and the tree: its "pages" are slot numbers.

    A copy into slots takes a lease with `reserve`, and gives the slots to the tree with `store` once the bytes are in
    place. A copy out of slots locks them with `lock`. Both drop the hold `tier` of their lease at the end.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_slots: Mapping[PageSpace, int],
        memory: HostMemory | None = None,
        *,
        recorder: CacheRecorder | None = None,
        on_free: Callable[[PageSpace, list[int]], None] | None = None,
    ) -> None:
        """`layout`: the whole model's. `memory`: the bytes of this rank; None where another object has them.

        `recorder` gets the changes of the tree. `on_free` is called with slots that become free.
        """
        free_tokens = None if on_free is None else lambda slots: on_free(PageSpace.TOKENS, slots)
        self.slots = KVMemory(
            layout,
            num_slots.get(PageSpace.TOKENS, 0),
            PageTable(0, 0),
            num_aux=0,
            on_free=free_tokens,
            prefix_cache=True,
            group_sizes=GroupPoolSizes(
                num_window_pages=num_slots.get(PageSpace.WINDOW, 0), num_slots=num_slots.get(PageSpace.SLOTS, 0)
            ),
            on_group_free=on_free,
            recorder=recorder,
        )
        self.memory = memory

    def record_to(self, recorder: CacheRecorder, memory: KVMemory) -> None:
        """Report the changes of the tree, which is empty so far, to `recorder`; `memory.flush_changes` flushes it."""
        tree = self.slots.pages.tree
        assert tree is not None and not tree.num_cached
        tree.recorder = recorder
        for part in (tree.states, tree.windows):
            if part is not None:
                part.recorder = recorder
        memory.flush_more = self.slots.flush_changes

    @property
    def num_tokens(self) -> int:
        """Tokens that all slots hold."""
        return self.slots.max_tokens

    @property
    def num_used_tokens(self) -> int:
        """Tokens whose slots are in use: cached, under copy, or of retracted requests."""
        pages = self.slots.pages
        return self.slots.layout.tokens_in(pages.num_total - pages.num_free)

    def match(self, token_ids: bytes, max_tokens: int) -> int:
        """Return the leading tokens of `token_ids` (int32 bytes), at most `max_tokens`, that the tier can give back.

        They are whole pages, with the window pages and the state that a prompt needs to continue behind them.
        """
        return self.slots.match_prefix(token_ids, max_tokens)

    def match_pages(self, token_ids: bytes, max_tokens: int) -> int:
        """Return the leading tokens whose token pages are here, with or without window pages and state."""
        return self.slots.match_pages(token_ids, max_tokens)

    def reserve(
        self, token_ids: bytes, num_pages: int, owner: str, numbers: Iterable[int] = (), *, state: bool = False
    ) -> Lease | None:
        """Return a lease over slots into which a copy writes, see `KVMemory.reserve_for_copy`; evicts where needed."""
        return self.slots.reserve_for_copy(token_ids, num_pages, owner, numbers, state=state)

    def lock(self, token_ids: bytes, owner: str, numbers: Iterable[int] = (), *, state: bool = False) -> Lease | None:
        """Return a lease over cached slots from which a copy reads, see `KVMemory.lock_for_copy`."""
        return self.slots.lock_for_copy(token_ids, owner, numbers, state=state)

    def store(self, lease: Lease, token_ids: bytes) -> None:
        """Give the slots of `lease`, which hold the KV of `token_ids` now, to the tree. The lease keeps its hold."""
        self.slots.cache(lease, token_ids, ending=True)

    def slot_bytes(self, space: PageSpace, slot: int) -> memoryview:
        """Return this rank's bytes of a slot, for reading and writing; a lease keeps the slot meanwhile."""
        assert self.memory is not None, "another object has the bytes"
        return self.memory.slot(space, slot)

    def drop_unread(self, lease: Lease, numbers: Iterable[int], *, state: bool) -> None:
        """Free what a copy into `lease` did not write: window pages with these numbers, and with `state` the state."""
        if lease.groups is not None:
            self.slots.groups.drop_unwritten(lease.groups, numbers, state=state)

    def flush(self) -> int:
        """Drop all cached slots that no copy uses; returns their number."""
        return self.slots.flush()

    def counts(self) -> dict[str, int]:
        """Return counts by name. At idle `host_pages_free` + `host_pages_cached` equal `host_pages_total`."""
        wanted = ("pages_", "window_pages_", "slots_")
        return {f"host_{name}": count for name, count in self.slots.counts().items() if name.startswith(wanted)}

    def audit(self) -> list[str]:
        """Return one sentence for each inconsistency, see `KVMemory.audit`."""
        return [f"host tier: {sentence}" for sentence in self.slots.audit()]
