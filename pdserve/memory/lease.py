"""The right to pages, kept alive by named holds. Owned by `KVMemory`; written by the scheduler thread only.

A page has exactly one owner: the free list, the prefix cache, or one lease. A request's life and a transfer's life end
at different moments. Whoever may still read or write the pages has a hold; when the last hold drops, the lease's own
pages go back to the free list, and cached pages that it only used may be evicted again:

    reserve      publish addresses     request ends              peer is done, or fenced
      |  request hold ................... x
      |                | remote hold ............................... x -> pages are free
      |                                 (decode side)
      |  request hold ............... x
      |        | send hold: a copy worker reads ............. x -> pages are free, cached ones unlocked
                                        (prefill side)

Pages of a lease, in token order; `cache` moves the border to the right:

      locked in the cache (some may be `spares`: our own        |  our own
      copies of what the cache had already from somebody else)  |
      0 ................................................ num_locked_pages ............ len(pages)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from pdserve.memory.allocator import PageAllocator
from pdserve.memory.prefix_cache import RadixNode, RadixTree

Hold = Literal["request", "remote", "send"]


class Lease:
    """Pages with holds; made by a `LeasePool`, starts with the hold `request`.

    `pages`: all of them in token order, empty once the lease is dead. `owner`: a label for the audit, such as a rid.
    `num_prefix_pages`: how many came from the cache at the start. `node` locks the first `num_locked_pages` in the
    cache; of these the lease owns only its `spares`. Only the pool writes these fields.
    """

    __slots__ = ("_holds", "_pool", "node", "num_locked_pages", "num_prefix_pages", "owner", "pages", "spares")

    def __init__(self, pool: LeasePool, pages: list[int], owner: str, node: RadixNode | None) -> None:
        self._pool = pool
        self._holds: set[Hold] = {"request"}
        self.pages = pages
        self.owner = owner
        self.node = node
        self.num_prefix_pages = self.num_locked_pages = 0 if node is None else node.end
        self.spares: list[int] = []

    def __repr__(self) -> str:
        return f"lease of {self.owner!r} held by {', '.join(sorted(self._holds)) or 'nobody'}"

    @property
    def alive(self) -> bool:
        """True while anyone holds the pages."""
        return bool(self._holds)

    @property
    def owned(self) -> list[int]:
        """The pages that go back to the free list at the end: all but those of the cache."""
        return self.spares + self.pages[self.num_locked_pages :]

    def held_by(self, name: Hold) -> bool:
        """True while `name` holds the pages."""
        return name in self._holds

    def hold(self, name: Hold) -> None:
        """Add a hold; the lease must be alive."""
        assert self._holds, f"hold {name} on a dead lease"
        self._holds.add(name)

    def drop(self, name: Hold) -> None:
        """Drop a hold; dropping one that is not there does nothing. The last one ends the lease."""
        if name not in self._holds:
            return
        self._holds.discard(name)
        if not self._holds:
            self._pool.end(self)

    def extend(self, pages: Sequence[int]) -> None:
        """Add pages at the end, which the lease owns from now on; the caller took them from the allocator."""
        assert self._holds, "extend of a dead lease"
        self.pages.extend(pages)


class LeasePool:
    """An allocator, the prefix cache over its pages if there is one, and the leases; counts in pages.

    `live_leases` has the leases that anyone holds, in the order in which they began. `num_evicted` counts pages.
    """

    def __init__(self, allocator: PageAllocator, tree: RadixTree | None = None) -> None:
        self.allocator = allocator
        self.tree = tree
        self.live_leases: dict[Lease, None] = {}
        self.num_evicted = 0

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
        """Pages that a lease can have: free ones and those that can be evicted."""
        return self.num_free if self.tree is None else self.num_free + self.tree.num_evictable

    def reserve(self, num_pages: int, owner: str = "", prefix: bytes = b"", max_prefix_pages: int = 0) -> Lease | None:
        """A lease over `num_pages` pages, or None, and nothing changed, when there are fewer available.

        The first are those in which the cache has the KV of the tokens `prefix` (int32 bytes), at most
        `max_prefix_pages`; the others are fresh, and somebody else's cached pages are evicted where needed.
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

    def grow(self, lease: Lease, num_pages: int) -> bool:
        """Add fresh pages until `lease` has `num_pages`; False, and nothing changed, when too few are available."""
        assert lease.alive, "grow of a dead lease"
        fresh = self._take(max(0, num_pages - len(lease.pages)))
        if fresh is None:
            return False
        lease.extend(fresh)
        return True

    def cache(self, lease: Lease, tokens: bytes, num_pages: int, priority: int = 0, *, ending: bool = False) -> None:
        """The first `num_pages` pages of `lease` have the KV of `tokens`, no more, no less: the cache takes them.

        All are locked while the lease lives. A lease whose pages the cache has already from somebody else keeps its
        own and locks no others beside them, or it would need twice what its tokens do; only when it is `ending` is
        what follows them taken, and they stay with it as spares. Calling again with fewer pages than are locked
        changes nothing. Without a cache nothing happens.
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
        """Empty the cache but for what live leases lock; returns the number of pages that are free now."""
        dropped = [] if self.tree is None else self.tree.clear()
        self.allocator.give_back(dropped)
        return len(dropped)

    def end(self, lease: Lease) -> None:
        """Called by a lease when its last hold has dropped."""
        owned = lease.owned
        if self.tree is not None and lease.node is not None:
            self.tree.unlock(lease.node)
        del self.live_leases[lease]
        lease.pages, lease.spares, lease.node, lease.num_locked_pages = [], [], None, 0
        self.allocator.give_back(owned)

    def holders(self) -> dict[str, int]:
        """How many pages the live leases own, by their `owner`; cached pages are nobody's."""
        owners: Counter[str] = Counter()
        for lease in self.live_leases:
            owners[lease.owner] += len(lease.owned)
        return dict(owners)

    def _lock_prefix(self, tree: RadixTree, prefix: bytes, max_pages: int) -> tuple[RadixNode | None, list[int]]:
        """Lock the longest cached beginning of `prefix`, so that making room cannot evict it; its pages."""
        found = tree.match(prefix, max_pages)
        if found.num_pages == 0:
            return None, []
        tree.lock(found.node)
        return found.node, tree.pages_of(found.node)

    def _take(self, num_pages: int) -> list[int] | None:
        """Fresh pages; evicts as many as are missing. None, and nothing evicted, when that is not enough."""
        if num_pages > self.num_available:
            return None
        if self.tree is not None and num_pages > self.num_free:
            evicted = self.tree.evict(num_pages - self.num_free)
            self.num_evicted += len(evicted)
            self.allocator.give_back(evicted)
        return self.allocator.take(num_pages)
