"""All memory of one scheduler rank: KV pages, page-table rows, aux slots. The roles' only door to memory."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.memory.allocator import PageAllocator
from pdserve.memory.audit import audit_pool
from pdserve.memory.layout import KVLayout, pages_for
from pdserve.memory.lease import Lease, LeasePool
from pdserve.memory.page_table import PageTable
from pdserve.memory.prefix_cache import TOKEN_BYTES, Eviction, RadixTree


class KVMemory:
    """Owns the allocators, the prefix cache and the page table.

    `num_aux` slots carry first tokens and logprobs between peers. With `prefix_cache`, pages that leases gave to
    `cache` stay after the lease's end for prompts that begin alike, until memory is short: then they go in the order
    of `eviction`, and `on_free` sees them like any page that comes back, as `on_take` sees those that are taken. Token
    ids are int32 bytes (`token_bytes`).
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
        """Tokens that fit when everything is free."""
        return self.pages.num_total * self.layout.page_tokens

    @property
    def has_prefix_cache(self) -> bool:
        """Whether pages are kept for later prompts."""
        return self.pages.tree is not None

    @property
    def cache_version(self) -> int:
        """Another number whenever the content of the cache has changed, so that match lengths can be kept."""
        return 0 if self.pages.tree is None else self.pages.tree.version

    @property
    def num_available(self) -> int:
        """Pages that a lease can have: free ones and those that can be evicted."""
        return self.pages.num_available

    def num_pages(self, num_tokens: int) -> int:
        """Pages for `num_tokens` tokens."""
        return pages_for(num_tokens, self.layout.page_tokens)

    def match_prefix(self, token_ids: bytes, max_tokens: int) -> int:
        """How many first tokens of `token_ids` are cached: whole pages, at most `max_tokens`. Changes nothing."""
        if self.pages.tree is None:
            return 0
        page_tokens = self.layout.page_tokens
        return self.pages.tree.peek(token_ids, max_tokens // page_tokens) * page_tokens

    def num_taken(self, num_tokens: int, prefix: bytes, max_prefix_tokens: int) -> int:
        """How much `num_available` falls by when `reserve_tokens` is called with these."""
        num_pages = self.num_pages(num_tokens)
        if self.pages.tree is None:
            return num_pages
        return num_pages - self.pages.tree.peek_locked(prefix, max_prefix_tokens // self.layout.page_tokens)

    def reserve_tokens(
        self, num_tokens: int, owner: str = "", prefix: bytes | None = None, max_prefix_tokens: int = 0
    ) -> Lease | None:
        """A lease over pages for `num_tokens` tokens; None, and nothing changed, when too few are available.

        Its first `num_prefix_pages` pages have the KV of the longest cached beginning of `prefix`, at most
        `max_prefix_tokens`; they must be read only. The others are fresh, evicted where needed.
        """
        max_prefix_pages = 0 if prefix is None else max_prefix_tokens // self.layout.page_tokens
        return self.pages.reserve(self.num_pages(num_tokens), owner, prefix or b"", max_prefix_pages)

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        """Add pages until `lease` covers `num_tokens`; False, and nothing changed, when too few are available.

        The caller writes the page table.
        """
        return self.pages.grow(lease, self.num_pages(num_tokens))

    def cache(self, lease: Lease, token_ids: bytes, priority: int = 0, *, ending: bool = False) -> None:
        """The KV of `token_ids`, from the first token on, is in the lease's pages: keep the whole pages of it.

        They are locked while the lease lives. Called again as more is computed, and with `ending` just before the
        request's hold drops; see `LeasePool.cache`. Nothing happens without a cache.
        """
        if self.pages.tree is None:
            return
        page_tokens = self.layout.page_tokens
        num_pages = len(token_ids) // TOKEN_BYTES // page_tokens
        self.pages.cache(lease, token_ids[: num_pages * page_tokens * TOKEN_BYTES], num_pages, priority, ending=ending)

    def flush(self) -> int:
        """Empty the cache but for what live leases lock; returns the number of pages that are free now."""
        return self.pages.flush()

    def counts(self) -> dict[str, int]:
        """Counts by name. At idle pages_free + pages_cached, rows_free, aux_free equal their totals."""
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
        """How many KV pages the live leases own, by their owner; cached pages are nobody's."""
        return self.pages.holders()

    def audit(self) -> list[str]:
        """A sentence for every difference: pages, aux slots and rows have exactly one owner, locks those of leases.

        Costs O(all pages + pages of live leases); for idle moments, questions and tests.
        """
        return [*audit_pool("pages", self.pages), *audit_pool("aux", self.aux), *self.table.audit()]
