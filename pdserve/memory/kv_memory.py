"""All memory of one scheduler rank: KV pages, page-table rows, aux slots, and their self-audit.

Roles access memory only through `KVMemory`. The executor reads the page table in `launch`. The audit of a pool checks
that free + cached + leased = total, and that every page has one owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pdserve.memory.audit import audit_pool
from pdserve.memory.cache_recorder import CacheRecorder
from pdserve.memory.cached_states import CachedStates
from pdserve.memory.cached_windows import CachedWindowPage, CachedWindows
from pdserve.memory.group_pools import GroupPools, GroupPoolSizes
from pdserve.memory.layout import KVLayout, PageSpace
from pdserve.memory.lease import GroupLease, Lease, LeasePool, PageAllocator, ReleasePreview, pages_of_group
from pdserve.memory.prefix_cache import TOKEN_BYTES, Eviction, RadixTree


class KVMemory:
    """Owns the allocators, the prefix cache and the page table. Scheduler thread only.

    The `num_aux` aux slots carry first tokens and logprobs between peers. With `prefix_cache`, pages that leases gave
    to `cache` stay after the lease's end, for prompts with the same prefix. Memory pressure evicts them in the order of
    `eviction`. `on_free` is called with all pages that become free, evicted ones included; `on_take` with all pages
    that are allocated. Token ids are int32 bytes (`token_bytes`). `group_sizes`: of window pages and state slots, whose
    release `on_group_free` reports. With STATE groups the prefix cache also keeps states, see `CachedStates`, and a
    prefix can be used up to the deepest one. With WINDOW groups it keeps window pages, see `CachedWindows`, and a
    prefix can be used up to a page behind which they are there. `recorder` gets the changes of the prefix cache, at
    each `flush_changes`; None: they are not recorded.
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
        group_sizes: GroupPoolSizes | None = None,
        on_group_free: Callable[[PageSpace, list[int]], None] | None = None,
        recorder: CacheRecorder | None = None,
    ) -> None:
        self.groups = GroupPools(layout, group_sizes or GroupPoolSizes(), on_group_free)
        self.layout = layout
        self.flush_more: Callable[[], None] = lambda: None
        self.pages = LeasePool(PageAllocator(num_pages, on_free, on_take))
        self.aux = LeasePool(PageAllocator(num_aux))
        self.table = page_table
        self._eviction = eviction
        self._uses_cache = prefix_cache
        if prefix_cache:
            self._open_cache(recorder)
        if self.groups.is_used:
            self.pages.on_end = self._end_groups

    def change_role(self, num_aux: int, *, prefix_cache: bool, recorder: CacheRecorder | None = None) -> None:
        """Fit the memory to another role of the server. No lease lives.

        Without `prefix_cache` requests neither use nor fill the cache, whose pages stay until they are evicted. A cache
        that is made now is empty, and `recorder` gets its changes.
        """
        assert not self.pages.live_leases and not self.aux.live_leases, "a request or a peer still holds pages"
        if num_aux != self.aux.num_total:
            self.aux = LeasePool(PageAllocator(num_aux))
        self._uses_cache = prefix_cache
        if prefix_cache and self.pages.tree is None:
            self._open_cache(recorder)

    def _open_cache(self, recorder: CacheRecorder | None) -> None:
        if self.layout.has_state:
            self.groups.states = CachedStates(self.groups.free_slot, recorder)
        if self.layout.window:
            self.groups.windows = CachedWindows(self.groups.free_window, recorder)
        self.pages.tree = RadixTree(
            self.layout.page_tokens, self._eviction, self.groups.states, self.groups.windows, recorder
        )

    @property
    def max_tokens(self) -> int:
        """Token capacity of the pool."""
        return self.layout.tokens_in(self.pages.num_total)

    @property
    def num_used_tokens(self) -> int:
        """Token capacity of the pages that a lease holds or locks; cached pages that can be evicted do not count."""
        return self.layout.tokens_in(self.pages.num_total - self.pages.num_available)

    @property
    def has_prefix_cache(self) -> bool:
        """True when pages are kept for later prompts."""
        return self._uses_cache

    @property
    def cache_version(self) -> int:
        """Changes whenever the content of the prefix cache changes, so that match lengths can be kept. Always 0 without
        a cache.
        """
        if self.pages.tree is None:
            return 0
        parts = (self.groups.states, self.groups.windows)
        return self.pages.tree.version + sum(part.version for part in parts if part is not None)

    @property
    def has_cached_states(self) -> bool:
        """True when the prefix cache keeps recurrent states."""
        return self._uses_cache and self.groups.states is not None

    @property
    def num_available(self) -> int:
        """Pages that a lease can get: free ones and evictable ones."""
        return self.pages.num_available

    def num_pages(self, num_tokens: int) -> int:
        """Return the pages that hold `num_tokens` tokens."""
        return self.layout.pages_for(num_tokens)

    def match_prefix(self, token_ids: bytes, max_tokens: int) -> int:
        """Return the number of leading tokens of `token_ids` that a request can take from the cache.

        They are whole pages, at most `max_tokens`. With STATE groups they end at a state, and with WINDOW groups at a
        page behind which the window pages are cached. Changes nothing.
        """
        return self.layout.tokens_in(self._usable_pages(token_ids, self.layout.whole_pages(max_tokens)))

    def match_pages(self, token_ids: bytes, max_tokens: int) -> int:
        """Return the number of leading tokens of `token_ids` whose pages are cached, with or without a state behind
        them.
        """
        if self.pages.tree is None or not self._uses_cache:
            return 0
        return self.layout.tokens_in(self.pages.tree.peek(token_ids, self.layout.whole_pages(max_tokens)))

    def has_state_at(self, token_ids: bytes) -> bool:
        """Return whether the cache has the state behind `token_ids`, whole pages."""
        return self.match_prefix(token_ids, len(token_ids) // TOKEN_BYTES) == len(token_ids) // TOKEN_BYTES

    def _usable_pages(self, token_ids: bytes, max_pages: int) -> int:
        """Return the leading pages of `token_ids` that a request can take from the cache, at most `max_pages`."""
        tree = self.pages.tree
        return tree.usable(token_ids, max_pages, self.first_read) if tree is not None and self._uses_cache else 0

    def first_read(self, num_pages: int) -> int:
        """Return the number of the first page that layers with a window read for the token behind `num_pages`."""
        num_tokens = self.layout.tokens_in(num_pages)
        return self.layout.window_pages(num_tokens, num_tokens).start

    @property
    def _cuts_matches(self) -> bool:
        """Whether a request may be able to use less of the cache than the pages of its longest cached prefix."""
        return self.groups.states is not None or self.groups.windows is not None

    def num_taken(
        self, num_tokens: int, prefix: bytes, max_prefix_tokens: int, after: ReleasePreview | None = None
    ) -> int:
        """Return how much `num_available` falls when `reserve_tokens` is called with these arguments.

        `after`: when it is called after that release.
        """
        num_pages = self.num_pages(num_tokens)
        if self.pages.tree is None or not self._uses_cache:
            return num_pages
        going = None if after is None else after.locks
        max_prefix_pages = self.layout.whole_pages(max_prefix_tokens)
        if self._cuts_matches:
            max_prefix_pages = self._usable_pages(prefix, max_prefix_pages)
        return num_pages - self.pages.tree.peek_locked(prefix, max_prefix_pages, going)

    def preview_release(self, leases: Iterable[Lease]) -> ReleasePreview:
        """Return what changes when the hold `request` of these leases drops. Changes nothing."""
        return self.pages.preview_release(leases)

    def reserve_tokens(
        self,
        num_tokens: int,
        owner: str = "",
        prefix: bytes | None = None,
        max_prefix_tokens: int = 0,
        *,
        max_len: int = 0,
        decode_only: bool = False,
        needs_state: bool = True,
    ) -> Lease | None:
        """Return a lease over pages for `num_tokens` tokens; None, without any change, when too few are available.

        Its first `num_prefix_pages` pages hold the KV of the longest cached prefix of `prefix`, at most
        `max_prefix_tokens`; they are read-only. The other pages are fresh; cached pages are evicted where needed. With
        WINDOW or STATE groups the lease has a slot and a commitment of window pages; see `GroupPools.reserve` for
        `max_len` (at least `num_tokens`) and `decode_only`. The prefix ends where `match_prefix` says, and the request
        continues from the state and the window pages there, unless `needs_state` is False: a transfer then brings
        both, and the caller asks for no page of the prefix that the transfer's window has.
        """
        max_prefix_pages = self.layout.whole_pages(max_prefix_tokens) if prefix is not None and self._uses_cache else 0
        if not self.groups.is_used:
            return self.pages.reserve(self.num_pages(num_tokens), owner, prefix or b"", max_prefix_pages)
        most = max(max_len, num_tokens)
        if not self.groups.fits(most, decode_only=decode_only):
            return None
        continues = self.has_cached_states and needs_state
        if self._cuts_matches and needs_state:
            max_prefix_pages = self._usable_pages(prefix or b"", max_prefix_pages)
        lease = self.pages.reserve(self.num_pages(num_tokens), owner, prefix or b"", max_prefix_pages)
        if lease is not None:
            source = lease.node if continues else None
            lease.groups = self.groups.reserve(owner, most, decode_only=decode_only, source=source)
            assert lease.groups is not None, "it fits"
            if needs_state and self.groups.windows is not None:
                self._share_window(lease, self.groups.windows)
        return lease

    def _share_window(self, lease: Lease, windows: CachedWindows) -> None:
        """Give a lease that begins with a cached prefix the window pages that its first step reads."""
        assert lease.groups is not None
        found = {}
        for number in range(self.first_read(lease.num_prefix_pages), lease.num_prefix_pages):
            cached = windows.find(lease.pages[number])
            assert cached is not None, "the match was cut back"
            found[number] = cached
        self.groups.share_window(lease.groups, found)

    def lock_for_copy(self, token_ids: bytes, owner: str, numbers: Iterable[int] = (), *, state: bool) -> Lease | None:
        """Return a lease with the hold `tier` over the cached pages of `token_ids`, all whole, from which a copy reads.

        It also locks the cached window pages with these numbers within the prompt, see `Lease.groups`, and with `state`
        the state behind the tokens. None, without any change, where they are not all cached, or where too many window
        pages are committed.
        """
        lease = self.pages.lock_cached(token_ids, owner)
        if lease is None:
            return None
        lease.hold_only("tier")
        found: dict[int, CachedWindowPage] = {}
        for number in numbers:
            cached = None if self.groups.windows is None else self.groups.windows.find(lease.pages[number])
            if cached is not None:
                found[number] = cached
        if found or state:
            source = lease.node if state else None
            if source is None or source.state is not None:
                lease.groups = self.groups.reserve_for_copy(owner, shared=found, source=source)
            if lease.groups is None:
                lease.drop("tier")
                return None
        return lease

    def reserve_for_copy(
        self, token_ids: bytes, num_pages: int, owner: str, numbers: Iterable[int] = (), *, state: bool
    ) -> Lease | None:
        """Return a lease with the hold `tier` over `num_pages` pages, into which a copy writes.

        Args:
            token_ids: whole pages of tokens; those of them that are cached come first and are not written, see
                `Lease.num_prefix_pages`.
            num_pages: pages of the lease.
            owner: a label for the audit.
            numbers: numbers of the window pages that are copied; the lease has fresh ones for those that are not
                cached, and locks the others (`GroupLease.cached`).
            state: with a slot for the state behind `token_ids`, see `GroupLease.kept`.

        Returns:
            None, without any change but evictions, when pages, window pages or slots are short. `cache` with these
            tokens gives all of it to the prefix cache.
        """
        lease = self.pages.reserve(num_pages, owner, token_ids, num_pages)
        if lease is None:
            return None
        lease.hold_only("tier")
        found: dict[int, CachedWindowPage] = {}
        new: list[int] = []
        for number in numbers:
            cached = None
            if self.groups.windows is not None and number < lease.num_prefix_pages:
                cached = self.groups.windows.find(lease.pages[number])
            if cached is None:
                new.append(number)
            else:
                found[number] = cached
        if found or new or state:
            position = len(token_ids) // TOKEN_BYTES if state else None
            lease.groups = self.groups.reserve_for_copy(owner, shared=found, new=new, state_at=position)
            if lease.groups is None:
                lease.drop("tier")
                return None
        return lease

    def open_row(self, lease: Lease) -> int | None:
        """Take a page-table row for the pages and the slot of `lease`; None when no row is free."""
        row = self.table.open(lease.pages)
        if row is not None and lease.groups is not None:
            if lease.groups.slot is not None:
                self.table.slots[row] = lease.groups.slot
            for index, page in lease.groups.window.items():
                self.table.window[row, index] = page
        return row

    def cover_window(self, lease: Lease, row: int | None, start: int, end: int) -> list[int]:
        """Give `lease`, in page-table row `row`, the window pages of a step that computes tokens `[start, end)`.

        Returns the pages that fell behind the window; see `GroupPools.cover`.
        """
        assert lease.groups is not None
        new, released = self.groups.cover(lease.groups, start, end)
        if row is not None:
            for index in new:
                self.table.window[row, index] = lease.groups.window[index]
        return released

    def pages_by_group(self, lease: Lease, num_tokens: int, first_page: int = 0) -> list[list[int]]:
        """Return the pages of each group that hold the KV of the first `num_tokens` tokens; see `pages_of_group`."""
        return [pages_of_group(self.layout, group, lease, num_tokens, first_page) for group in self.layout.groups]

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
        if self.pages.tree is None or not self._uses_cache:
            return
        num_pages = self.layout.whole_pages(len(token_ids) // TOKEN_BYTES)
        num_bytes = self.layout.tokens_in(num_pages) * TOKEN_BYTES
        self.pages.cache(lease, token_ids[:num_bytes], num_pages, priority, ending=ending)
        if lease.groups is not None and lease.groups.kept:
            self._cache_states(lease.groups, token_ids)
        if lease.groups is not None and self.groups.windows is not None:
            self._cache_window(lease.groups, token_ids[:num_bytes], num_pages)

    def _cache_window(self, lease: GroupLease, token_ids: bytes, num_pages: int) -> None:
        """Give the cache the window pages of a request whose first `num_pages` pages hold the KV of `token_ids`.

        The pages of the tree may be those of another request with the same tokens.
        """
        assert self.pages.tree is not None
        own = self.groups.uncached_window(lease, num_pages)
        if not own:
            return
        first, number = min(own), self.pages.tree.peek(token_ids, num_pages)
        for token_page in self.pages.tree.backwards(token_ids, num_pages):
            number -= 1
            if number in own:
                self.groups.cache_window(lease, token_page, own[number])
            if number <= first:
                return

    def _cache_states(self, lease: GroupLease, token_ids: bytes) -> None:
        """Give the kept states of a request, whose computed tokens are `token_ids`, to the nodes that end there.

        Of the states behind pages that the cache lacks, the request keeps the last one, for a later call.
        """
        assert self.pages.tree is not None and self.groups.states is not None
        num_computed = len(token_ids) // TOKEN_BYTES
        waiting: list[int] = []
        for position in sorted(position for position in lease.kept if position <= num_computed):
            node = self.pages.tree.node_at(token_ids[: position * TOKEN_BYTES])
            if node is None:
                waiting.append(position)
            elif self.groups.states.add(node, lease.kept[position]):
                self.groups.take_kept(lease, position)
            else:
                self.groups.drop_kept(lease, position)
        for position in waiting[:-1]:
            self.groups.drop_kept(lease, position)
        if waiting:
            self.groups.let_wait(lease, waiting[-1])

    def flush_changes(self) -> None:
        """Give the recorded changes of the prefix cache, and of the host tier, to their reader, if there is one."""
        tree = self.pages.tree
        if tree is not None and tree.recorder is not None:
            tree.recorder.flush(tree.describe)
        self.flush_more()

    def flush(self) -> int:
        """Evict all cached pages that no live lease locks; returns their number."""
        return self.pages.flush()

    @property
    def no_cached_page_is_held(self) -> bool:
        """True when `flush` would empty the prefix cache: no live lease locks a cached page."""
        tree = self.pages.tree
        return tree is None or tree.num_cached == tree.num_evictable

    def allocator_of(self, space: PageSpace) -> PageAllocator:
        """Return the free list of the pages of a space."""
        return self.pages.allocator if space is PageSpace.TOKENS else self.groups.allocator_of(space)

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
            **self.groups.counts(),
        }

    def holders(self) -> dict[str, int]:
        """Return the number of KV pages that live leases own, by owner. Cached pages belong to no lease."""
        return self.pages.holders()

    def audit(self) -> list[str]:
        """Return one sentence for each inconsistency: pages, aux slots and rows have exactly one owner, locks belong to
        leases.

        Costs O(all pages + pages of live leases); for idle moments, audit queries and tests.
        """
        found = [*audit_pool("pages", self.pages), *audit_pool("aux", self.aux)]
        if self.groups.is_used:
            found += self.groups.audit()
        return [*found, *self.table.audit()]

    def _end_groups(self, lease: Lease) -> None:
        if lease.groups is not None:
            self.groups.end(lease.groups)
            lease.groups = None


class PageTable:
    """`pages[row, i]` is the page that holds tokens `[i * page_tokens, (i + 1) * page_tokens)` of the row's request;
    int32.

    `window[row, i]` is the same for WINDOW groups, valid for pages in the window; without such
    groups it has no columns. `slots[row]` is the state slot. Also allocates the rows: `open` takes a free one,
    `close` returns it.
    """

    def __init__(self, num_rows: int, max_pages_per_row: int, *, has_window: bool = False) -> None:
        self.pages: npt.NDArray[np.int32] = np.zeros((num_rows, max_pages_per_row), dtype=np.int32)
        self.window: npt.NDArray[np.int32] = np.zeros((num_rows, max_pages_per_row * has_window), dtype=np.int32)
        self.slots: npt.NDArray[np.int32] = np.zeros(num_rows, dtype=np.int32)
        self.num_rows = num_rows
        self.max_pages_per_row = max_pages_per_row
        self.free_rows = list(range(num_rows - 1, -1, -1))
        """The last one is opened next. Only the table changes it."""
        self._is_open = bytearray(num_rows)

    @property
    def num_free(self) -> int:
        """Free rows."""
        return len(self.free_rows)

    @property
    def open_rows(self) -> list[int]:
        """Rows that requests hold, ascending."""
        return [row for row, is_open in enumerate(self._is_open) if is_open]

    def open(self, pages: Sequence[int]) -> int | None:
        """Take a row and write `pages` into it; None when no row is free."""
        if not self.free_rows:
            return None
        row = self.free_rows.pop()
        self._is_open[row] = 1
        self.pages[row, : len(pages)] = pages
        return row

    def extend(self, row: int, num_pages_before: int, pages: Sequence[int]) -> None:
        """Write `pages` behind the first `num_pages_before` pages of `row`."""
        self.pages[row, num_pages_before : num_pages_before + len(pages)] = pages

    def close(self, row: int) -> None:
        """Return `row` to the free list."""
        assert self._is_open[row], f"row {row} closed twice"
        self._is_open[row] = 0
        self.free_rows.append(row)

    def audit(self) -> list[str]:
        """Return one sentence for each inconsistency: every row must be either open or free, exactly once."""
        closed = set(range(self.num_rows)) - set(self.open_rows)
        free, found = set(self.free_rows), list[str]()
        if len(free) != len(self.free_rows):
            found.append(f"rows: the free list has {len(self.free_rows) - len(free)} rows twice")
        if free - closed:
            found.append(
                f"rows: {len(free - closed)} of {self.num_rows} are both open and free: {sorted(free - closed)}"
            )
        if closed - free:
            found.append(f"rows: {len(closed - free)} of {self.num_rows} are lost: {sorted(closed - free)}")
        return found
