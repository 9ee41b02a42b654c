"""Pages of a fixed pool. `PageAllocator` has the free list, and `LeasePool` grants leases, the right to use pages.

A lease lives while it has a named hold.

Owned by `KVMemory`; written by the scheduler thread only. Aux slots are pages of a pool of their own.

A page has exactly one owner: the free list, the prefix cache, or one lease. A request and its transfer end at different
times. Each party that may still read or write the pages has a hold. When the last hold drops, the lease's own pages go
back to the free list, and cached pages that it locked become evictable again. For a request that ends before its
transfer:

    reserve      publish addresses     request ends              peer is done, or fenced
      |  request hold ................... x
      |                | remote hold ............................... x -> pages are free
      |                                 (decode side)
      |  request hold ............... x
      |        | send hold: a copy worker reads ............. x -> pages are free, cached ones unlocked
                                        (prefill side)

Normally the transfer ends first, and the request hold is the last to drop, on both sides.

Pages of a lease, in token order; `cache` moves the boundary to the right:

      locked in the cache (some may be `spares`: own copies     |  owned by the lease
      of pages that the cache has from another lease)           |
      0 ................................................ num_locked_pages ............ len(pages)
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from pdserve.memory.cached_states import RadixNode
from pdserve.memory.cached_windows import CachedWindowPage
from pdserve.memory.layout import KVGroup, KVLayout, PageSpace
from pdserve.memory.prefix_cache import RadixTree, path_to


class PageAllocator:
    """Free list over `[0, num_pages)`, first in first out, so that a page stays unused as long as possible before its
    reuse.

    Pages are handed out in ascending order until all were used once. `on_take` is called with allocated pages,
    `on_free` with returned ones (tests poison them).
    """

    def __init__(
        self,
        num_pages: int,
        on_free: Callable[[list[int]], None] | None = None,
        on_take: Callable[[list[int]], None] | None = None,
    ) -> None:
        self.num_pages = num_pages
        self._free = deque(range(num_pages))
        self._is_free = bytearray(b"\1") * num_pages
        self._on_free = on_free
        self._on_take = on_take

    @property
    def num_free(self) -> int:
        """Free pages."""
        return len(self._free)

    def is_free(self, page: int) -> bool:
        """True while `page` is on the free list."""
        return bool(self._is_free[page])

    def free_pages(self) -> tuple[list[int], list[int]]:
        """Return the free list in its order, and the pages for which `is_free` holds, ascending. For the audit."""
        return list(self._free), np.frombuffer(self._is_free, np.uint8).nonzero()[0].tolist()

    def take(self, num_pages: int) -> list[int] | None:
        """Allocate `num_pages` pages; None, without any change, when fewer are free."""
        if num_pages > len(self._free):
            return None
        pages = [self._free.popleft() for _ in range(num_pages)]
        for page in pages:
            self._is_free[page] = 0
        if self._on_take is not None:
            self._on_take(pages)
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """Return pages to the free list. Each must be allocated."""
        returned = list(pages)
        for page in returned:
            assert not self._is_free[page], f"page {page} freed twice"
            self._is_free[page] = 1
        self._free.extend(returned)
        if self._on_free is not None:
            self._on_free(returned)


@dataclasses.dataclass(eq=False)
class GroupLease:
    """The window pages and the state slots of a request. Only `GroupPools` writes it.

    `window`: page by its number within the request. `most_window_pages`: what the pool has committed to the request.
    """

    owner: str
    slot: int | None
    most_window_pages: int
    window: dict[int, int] = dataclasses.field(default_factory=dict)
    returning: dict[int, int] = dataclasses.field(default_factory=dict)
    """Pages behind the window that a step under way may still read, and their numbers within the request."""
    cached: dict[int, CachedWindowPage] = dataclasses.field(default_factory=dict)
    """Those of the pages above that belong to the prefix cache, by page; the request locks each once."""
    most_in_decode: int | None = None
    """What the commitment falls to, page by page, once the prompt is complete; None before."""
    source: RadixNode | None = None
    """Node of the prefix cache whose state the next step copies into the slot; locked until that step has ended."""
    kept: dict[int, int] = dataclasses.field(default_factory=dict)
    """Slots with copies of the request's state for the prefix cache, by position; written by a step under way or
    ended.
    """

    @property
    def num_returning(self) -> int:
        """Number of pages that will return once no step under way reads them."""
        return len(self.returning)


Hold = Literal["request", "remote", "send", "tier"]


class Lease:
    """Pages with holds; made by a `LeasePool`, starts with the hold `request`.

    A copy between tiers has the hold `tier`.

    `pages`: all pages in token order, empty once the lease has ended. `owner`: a label for the audit, such as a rid.
    `num_prefix_pages`: pages from the prefix cache at the start. `node` locks the first `num_locked_pages` pages in the
    cache; of these the lease owns only its `spares`. Only the pool writes these fields. `groups`: window pages and
    state slot, which end with the lease; None without such groups.
    """

    __slots__ = (
        "_holds",
        "_pool",
        "groups",
        "node",
        "num_locked_pages",
        "num_prefix_pages",
        "owner",
        "pages",
        "spares",
    )

    def __init__(self, pool: LeasePool, pages: list[int], owner: str, node: RadixNode | None) -> None:
        self._pool = pool
        self._holds: set[Hold] = {"request"}
        self.pages = pages
        self.owner = owner
        self.node = node
        self.num_prefix_pages = self.num_locked_pages = 0 if node is None else node.end
        self.spares: list[int] = []
        self.groups: GroupLease | None = None

    def __repr__(self) -> str:
        return f"lease of {self.owner!r} held by {', '.join(sorted(self._holds)) or 'none'}"

    @property
    def alive(self) -> bool:
        """True while the lease has a hold."""
        return bool(self._holds)

    @property
    def owned(self) -> list[int]:
        """The pages that return to the free list at the end: all but the cache's."""
        return self.spares + self.pages[self.num_locked_pages :]

    def held_by(self, name: Hold) -> bool:
        """True while the lease has the hold `name`."""
        return name in self._holds

    def held_only_by(self, name: Hold) -> bool:
        """True while `name` is the only hold: dropping it ends the lease."""
        return self._holds == {name}

    def hold(self, name: Hold) -> None:
        """Add a hold; the lease must be alive."""
        assert self._holds, f"hold {name} on a dead lease"
        self._holds.add(name)

    def hold_only(self, name: Hold) -> Lease:
        """Replace all holds of a new lease by `name`; return the lease."""
        assert self._holds, f"hold {name} on a dead lease"
        self._holds = {name}
        return self

    def drop(self, name: Hold) -> None:
        """Drop a hold; does nothing when the lease does not have it. Dropping the last hold ends the lease."""
        if name not in self._holds:
            return
        self._holds.discard(name)
        if not self._holds:
            self._pool.end(self)

    def extend(self, pages: Sequence[int]) -> None:
        """Append pages, which the lease owns from now on; the caller has taken them from the allocator."""
        assert self._holds, "extend of a dead lease"
        self.pages.extend(pages)


@dataclasses.dataclass(frozen=True, slots=True)
class ReleasePreview:
    """What the end of some leases would change: pages that become available, and locks that go, by node of the cache.

    A node is unlocked only if all of its locks go.
    """

    num_pages: int
    locks: Mapping[RadixNode, int]


class LeasePool:
    """An allocator, the prefix cache over its pages (None: no cache), and the leases; counts in pages.

    `live_leases`: the leases with a hold, in the order in which they began. `num_evicted` counts pages.
    """

    def __init__(self, allocator: PageAllocator, tree: RadixTree | None = None) -> None:
        self.allocator = allocator
        self.tree = tree
        self.live_leases: dict[Lease, None] = {}
        self.num_evicted = 0
        self.on_end: Callable[[Lease], None] | None = None
        """Called when a lease ends, before its pages are free."""

    @property
    def num_total(self) -> int:
        """Pages of the pool."""
        return self.allocator.num_pages

    @property
    def num_free(self) -> int:
        """Pages on the free list."""
        return self.allocator.num_free

    @property
    def num_available(self) -> int:
        """Pages that a lease can get: free ones and evictable ones."""
        return self.num_free if self.tree is None else self.num_free + self.tree.num_evictable

    def reserve(self, num_pages: int, owner: str = "", prefix: bytes = b"", max_prefix_pages: int = 0) -> Lease | None:
        """Return a lease over `num_pages` pages; None, without any change, when fewer are available.

        Its first pages are those in which the cache has the KV of the tokens `prefix` (int32 bytes), at most
        `max_prefix_pages`. The other pages are fresh; cached pages are evicted where needed.
        """
        max_prefix_pages = min(max_prefix_pages, num_pages)
        if num_pages - max_prefix_pages > self.num_available:
            return None
        if self.tree is None or max_prefix_pages == 0:
            node, cached = None, list[int]()
        else:
            node, cached = self._lock_prefix(self.tree, prefix, max_prefix_pages)
        fresh = self._take(num_pages - len(cached))
        if fresh is None:
            if self.tree is not None and node is not None:
                self.tree.unlock(node)
            return None
        if self.tree is not None and node is not None:
            self.tree.use(node)
        lease = Lease(self, cached + fresh, owner, node)
        self.live_leases[lease] = None
        return lease

    def lock_cached(self, tokens: bytes, owner: str) -> Lease | None:
        """Return a lease over the cached pages of `tokens`, all whole, which owns none of them and counts no use.

        None when they are not all cached. May split a node.
        """
        node = None if self.tree is None else self.tree.node_at(tokens)
        if node is None or self.tree is None:
            return None
        self.tree.lock(node)
        lease = Lease(self, self.tree.pages_of(node), owner, node)
        self.live_leases[lease] = None
        return lease

    def grow(self, lease: Lease, num_pages: int) -> bool:
        """Add fresh pages until `lease` has `num_pages`; False, without any change, when too few are available."""
        assert lease.alive, "grow of a dead lease"
        fresh = self._take(max(0, num_pages - len(lease.pages)))
        if fresh is None:
            return False
        lease.extend(fresh)
        return True

    def cache(self, lease: Lease, tokens: bytes, num_pages: int, priority: int = 0, *, ending: bool = False) -> None:
        """Insert the first `num_pages` pages of `lease`, which hold exactly the KV of `tokens`, into the cache.

        All of them are locked while the lease lives. Where the cache has such pages from another lease already, the
        lease keeps its own pages. It does not also lock the cached ones, which would double its memory. Only with
        `ending` are its later pages inserted; the duplicates stay with the lease as spares. A call with fewer pages
        than are locked changes nothing. Does nothing without a cache.
        """
        assert lease.alive, "cache of a dead lease"
        if self.tree is None or num_pages <= lease.num_locked_pages:
            return
        assert num_pages <= len(lease.pages), f"{num_pages} pages to cache of a lease of {len(lease.pages)}"
        first_new = lease.num_locked_pages
        if not ending and self.tree.peek(tokens, num_pages) > first_new:
            return
        inserted = self.tree.insert(tokens, lease.pages[:num_pages], priority, lease.node)
        if lease.node is None:
            self.tree.lock(inserted.node)
        assert inserted.taken_from >= first_new, "locked pages have left the cache"
        lease.spares += lease.pages[first_new : inserted.taken_from]
        lease.node, lease.num_locked_pages = inserted.node, num_pages

    def flush(self) -> int:
        """Evict all cached pages that no live lease locks; returns their number."""
        dropped = [] if self.tree is None else self.tree.clear()
        self.allocator.give_back(dropped)
        return len(dropped)

    def end(self, lease: Lease) -> None:
        """End a lease. Called by the lease when its last hold has dropped."""
        if self.on_end is not None:
            self.on_end(lease)
        owned = lease.owned
        if self.tree is not None and lease.node is not None:
            self.tree.unlock(lease.node)
        del self.live_leases[lease]
        lease.pages, lease.spares, lease.node, lease.num_locked_pages = [], [], None, 0
        self.allocator.give_back(owned)

    def preview_release(self, leases: Iterable[Lease]) -> ReleasePreview:
        """Return what changes when the hold `request` of these leases drops. Changes nothing."""
        num_pages, locks = 0, Counter[RadixNode]()
        for lease in leases:
            if lease.held_only_by("request"):
                num_pages += len(lease.owned)
                locks.update(path_to(lease.node))
        num_pages += sum(len(node.pages) for node, count in locks.items() if node.locks == count)
        return ReleasePreview(num_pages, locks)

    def holders(self) -> dict[str, int]:
        """Return the number of pages that live leases own, by `owner`. Cached pages belong to no lease."""
        owners: Counter[str] = Counter()
        for lease in self.live_leases:
            owners[lease.owner] += len(lease.owned)
        return dict(owners)

    def _lock_prefix(self, tree: RadixTree, prefix: bytes, max_pages: int) -> tuple[RadixNode | None, list[int]]:
        """Lock the longest cached prefix of `prefix`, so that eviction spares it; returns its node and pages."""
        found = tree.match(prefix, max_pages)
        if found.num_pages == 0:
            return None, []
        tree.lock(found.node)
        return found.node, tree.pages_of(found.node)

    def _take(self, num_pages: int) -> list[int] | None:
        """Allocate fresh pages, evicting those that are missing; None, without any eviction, when too few are
        available.
        """
        if num_pages > self.num_available:
            return None
        if self.tree is not None and num_pages > self.num_free:
            evicted = self.tree.evict(num_pages - self.num_free)
            self.num_evicted += len(evicted)
            self.allocator.give_back(evicted)
        return self.allocator.take(num_pages)


def is_shared(lease: Lease, number: int) -> bool:
    """Return whether the window page with this number of a lease is the prefix cache's."""
    assert lease.groups is not None
    return lease.groups.window[number] in lease.groups.cached


def numbers_to_move(layout: KVLayout, group: KVGroup, num_tokens: int, first_page: int = 0) -> range:
    """Return the numbers within a request of the pages in `group` that hold the KV of its first `num_tokens` tokens.

    Token groups: from page `first_page` on. WINDOW: pages that the token at `num_tokens` reads. STATE: the slot, 0.
    """
    match group.space:
        case PageSpace.TOKENS:
            return range(first_page, layout.pages_for(num_tokens))
        case PageSpace.WINDOW:
            return layout.window_pages(num_tokens, num_tokens)
        case PageSpace.SLOTS:
            return range(1)


def numbers_with(layout: KVLayout, group: KVGroup, pages: range, num_tokens: int) -> range:
    """Return the numbers of the pages in `group` that move together with the token pages `pages` of a request.

    Window pages move with the token pages of the same numbers, the state with the last token pages of the `num_tokens`.
    """
    match group.space:
        case PageSpace.TOKENS:
            return pages
        case PageSpace.WINDOW:
            moved = numbers_to_move(layout, group, num_tokens)
            start = max(pages.start, moved.start)
            return range(start, max(start, pages.stop))
        case PageSpace.SLOTS:
            return range(1) if pages and pages.stop == layout.pages_for(num_tokens) else range(0)


def pages_of_group(layout: KVLayout, group: KVGroup, lease: Lease, num_tokens: int, first_page: int = 0) -> list[int]:
    """Return the pages of `lease` in `group` that `numbers_to_move` names."""
    return pages_at(group, lease, numbers_to_move(layout, group, num_tokens, first_page))


def pages_at(group: KVGroup, lease: Lease, numbers: range) -> list[int]:
    """Return the pages of `lease` in `group` with these numbers within the request."""
    if group.space is PageSpace.TOKENS:
        return lease.pages[numbers.start : numbers.stop]
    assert lease.groups is not None, f"the request has no memory in group {group.name}"
    if group.space is PageSpace.WINDOW:
        return [lease.groups.window[number] for number in numbers]
    assert lease.groups.slot is not None
    return [lease.groups.slot] if numbers else []
