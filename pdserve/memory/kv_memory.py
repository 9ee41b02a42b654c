"""All memory of one scheduler rank: KV pages, page-table rows, aux slots. Roles access memory only through it."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.memory.allocator import PageAllocator
from pdserve.memory.audit import audit_pool
from pdserve.memory.layout import KVLayout, pages_for
from pdserve.memory.lease import Lease, LeasePool
from pdserve.memory.page_table import PageTable
from pdserve.memory.prefix_cache import TOKEN_BYTES, Eviction, RadixTree


class KVMemory:
    """Owns the allocators, the prefix cache and the page table. Scheduler thread only.

    The `num_aux` aux slots carry first tokens and logprobs between peers. With `prefix_cache`, pages that leases gave
    to `cache` stay after the lease's end, for prompts with the same prefix. Memory pressure evicts them in the order of
    `eviction`. `on_free` is called with all pages that become free, evicted ones included; `on_take` with all pages
    that are allocated. Token ids are int32 bytes (`token_bytes`).
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        page_table: PageTable,
        num_aux: int,
        on_free: Callable[[list[int]], None] | None = None,
        *,
        on_take: Callable[[list[int]], None] | None = None,
        prefix_cache: bool = False,
        eviction: Eviction = "lru",
    ) -> None:
        tree = RadixTree(layout.page_tokens, eviction) if prefix_cache else None
        self.layout = layout
        self.pages = LeasePool(PageAllocator(num_pages, on_free, on_take), tree)
        self.aux = LeasePool(PageAllocator(num_aux))
        self.table = page_table

    @property
    def max_tokens(self) -> int:
        """Token capacity of the pool."""
        return self.pages.num_total * self.layout.page_tokens

    @property
    def has_prefix_cache(self) -> bool:
        """True when pages are kept for later prompts."""
        return self.pages.tree is not None

    @property
    def cache_version(self) -> int:
        """Changes whenever the content of the prefix cache changes, so that match lengths can be kept. Always 0 without
        a cache.
        """
        return 0 if self.pages.tree is None else self.pages.tree.version

    @property
    def num_available(self) -> int:
        """Pages that a lease can get: free ones and evictable ones."""
        return self.pages.num_available

    def num_pages(self, num_tokens: int) -> int:
        """Return the pages that hold `num_tokens` tokens."""
        return pages_for(num_tokens, self.layout.page_tokens)

    def match_prefix(self, token_ids: bytes, max_tokens: int) -> int:
        """Return the number of leading tokens of `token_ids` that are cached: whole pages, at most `max_tokens`.

        Changes nothing.
        """
        if self.pages.tree is None:
            return 0
        page_tokens = self.layout.page_tokens
        return self.pages.tree.peek(token_ids, max_tokens // page_tokens) * page_tokens

    def num_taken(self, num_tokens: int, prefix: bytes, max_prefix_tokens: int) -> int:
        """Return how much `num_available` falls when `reserve_tokens` is called with these arguments."""
        num_pages = self.num_pages(num_tokens)
        if self.pages.tree is None:
            return num_pages
        return num_pages - self.pages.tree.peek_locked(prefix, max_prefix_tokens // self.layout.page_tokens)

    def reserve_tokens(
        self, num_tokens: int, owner: str = "", prefix: bytes | None = None, max_prefix_tokens: int = 0
    ) -> Lease | None:
        """Return a lease over pages for `num_tokens` tokens; None, without any change, when too few are available.

        Its first `num_prefix_pages` pages hold the KV of the longest cached prefix of `prefix`, at most
        `max_prefix_tokens`; they are read-only. The other pages are fresh; cached pages are evicted where needed.
        """
        max_prefix_pages = 0 if prefix is None else max_prefix_tokens // self.layout.page_tokens
        return self.pages.reserve(self.num_pages(num_tokens), owner, prefix or b"", max_prefix_pages)

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        """Add pages until `lease` covers `num_tokens`; False, without any change, when too few are available.

        The caller writes the page table.
        """
        return self.pages.grow(lease, self.num_pages(num_tokens))

    def cache(self, lease: Lease, token_ids: bytes, priority: int = 0, *, ending: bool = False) -> None:
        """Insert into the prefix cache the whole pages of `lease` that hold the KV of `token_ids`, from the first token
        on.

        The lease locks them while it lives. Call again as more is computed, and with `ending` just before the request's
        hold drops; see `LeasePool.cache`. Does nothing without a cache.
        """
        if self.pages.tree is None:
            return
        page_tokens = self.layout.page_tokens
        num_pages = len(token_ids) // TOKEN_BYTES // page_tokens
        self.pages.cache(lease, token_ids[: num_pages * page_tokens * TOKEN_BYTES], num_pages, priority, ending=ending)

    def flush(self) -> int:
        """Evict all cached pages that no live lease locks; returns their number."""
        return self.pages.flush()

    def counts(self) -> dict[str, int]:
        """Return counts by name. At idle pages_free + pages_cached, rows_free and aux_free equal their totals."""
        tree = self.pages.tree
        return {
            "pages_total": self.pages.num_total,
            "pages_free": self.pages.num_free,
            "pages_cached": 0 if tree is None else tree.num_cached,
            "pages_evictable": 0 if tree is None else tree.num_evictable,
            "rows_total": self.table.num_rows,
            "rows_free": self.table.num_free,
            "aux_total": self.aux.num_total,
            "aux_free": self.aux.num_free,
        }

    def holders(self) -> dict[str, int]:
        """Return the number of KV pages that live leases own, by owner. Cached pages belong to no lease."""
        return self.pages.holders()

    def audit(self) -> list[str]:
        """Return one sentence for each inconsistency: pages, aux slots and rows have exactly one owner, locks belong to
        leases.

        Costs O(all pages + pages of live leases); for idle moments, audit queries and tests.
        """
        return [*audit_pool("pages", self.pages), *audit_pool("aux", self.aux), *self.table.audit()]
