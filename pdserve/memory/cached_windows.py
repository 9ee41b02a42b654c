"""Window pages in the prefix cache: which tokens of a cached prefix layers with a window can still read.

    token pages    [A] [B] [C] [D] [E]     a window of two pages: a prompt can continue behind E, and not behind D,
    window pages               (D) (E)       as the page of C has been evicted

A request continues from a cached prefix only if the cache has the window pages that the next token reads. So a match
is cut back to the last page behind which they all are.

The window page of some tokens is found by their token page in the radix tree. Requests lock the pages that they read or
have written. A page that no request locks is evicted when a request needs a window page, the least recently used first.
It goes too when its token page leaves the tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from pdserve.memory.cache_recorder import CacheRecorder
from pdserve.memory.layout import PageSpace


class CachedWindowPage:
    """A window page of the cache. Written by `CachedWindows` only.

    `token_page`: page of the same tokens in the radix tree; None once that has left the tree, while requests still lock
    the window page.
    """

    __slots__ = ("locks", "page", "token_page")

    def __init__(self, page: int, token_page: int) -> None:
        self.page = page
        self.token_page: int | None = token_page
        self.locks = 1


class CachedWindows:
    """The window pages of a radix tree. Scheduler thread only.

    `on_free` gets pages that no request locks and whose token pages have left the tree. `version` changes whenever a
    page comes or goes. `recorder` gets each change; None: changes are not recorded.
    """

    def __init__(self, on_free: Callable[[list[int]], None], recorder: CacheRecorder | None = None) -> None:
        self._on_free = on_free
        self.recorder = recorder
        self._by_token_page: dict[int, CachedWindowPage] = {}
        self._evictable: OrderedDict[CachedWindowPage, None] = OrderedDict()
        self.version = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._by_token_page)

    @property
    def num_evictable(self) -> int:
        """Pages that no request locks."""
        return len(self._evictable)

    def pages(self) -> list[int]:
        """Return all pages of the cache. For the audit."""
        return [cached.page for cached in self._by_token_page.values()]

    def token_pages(self) -> Iterator[int]:
        """Yield the pages of the radix tree whose tokens have a window page here."""
        return iter(self._by_token_page)

    def find(self, token_page: int) -> CachedWindowPage | None:
        """Return the window page of the tokens in `token_page`; None without one."""
        return self._by_token_page.get(token_page)

    def usable(self, backwards: Iterable[int], num_pages: int, first_read: Callable[[int], int]) -> int:
        """Return the largest number of leading pages, at most `num_pages`, behind which a prompt can continue.

        `backwards`: the token pages of the prefix, the last of the `num_pages` first. `first_read(n)`: number of the
        first page that the token behind n pages reads.
        """
        end = at = num_pages
        for token_page in backwards:
            at -= 1
            if token_page not in self._by_token_page:
                end = at
            elif at <= first_read(end):
                return end
        return 0

    def add(self, token_page: int, page: int, known: CachedWindowPage | None = None) -> CachedWindowPage | None:
        """Take over `page`, which holds the tokens of `token_page`, locked once; None when the cache has one.

        `known`: the page was the cache's, and is still locked, but its token page has left the tree.
        """
        if token_page in self._by_token_page:
            return None
        cached = known or CachedWindowPage(page, token_page)
        cached.token_page = token_page
        self._by_token_page[token_page] = cached
        self._changed(token_page, stored=True)
        return cached

    def lock(self, cached: CachedWindowPage) -> None:
        """Protect a page from eviction, until the same number of `unlock` calls."""
        if cached.locks == 0:
            del self._evictable[cached]
        cached.locks += 1

    def unlock(self, cached: CachedWindowPage) -> None:
        """Remove one lock."""
        assert cached.locks > 0, "unlocked more often than locked"
        cached.locks -= 1
        if cached.locks:
            return
        if cached.token_page is None:
            self._on_free([cached.page])
        else:
            self._evictable[cached] = None

    def evict(self) -> int | None:
        """Remove the least recently used page that no request locks; return it, which the caller owns, or None."""
        if not self._evictable:
            return None
        cached, _ = self._evictable.popitem(last=False)
        assert cached.token_page is not None
        del self._by_token_page[cached.token_page]
        self._changed(cached.token_page, stored=False)
        self.num_evicted += 1
        return cached.page

    def drop(self, token_pages: Iterable[int]) -> None:
        """Forget the window pages of token pages that leave the tree."""
        freed = []
        for token_page in token_pages:
            cached = self._by_token_page.pop(token_page, None)
            if cached is None:
                continue
            self._changed(token_page, stored=False)
            cached.token_page = None
            if cached.locks == 0:
                del self._evictable[cached]
                freed.append(cached.page)
        if freed:
            self._on_free(freed)

    def locked(self) -> Iterator[CachedWindowPage]:
        """Yield the pages of the cache that requests lock. For the audit."""
        return (cached for cached in self._by_token_page.values() if cached.locks)

    def _changed(self, token_page: int, *, stored: bool) -> None:
        self.version += 1
        if self.recorder is not None:
            self.recorder.group_changed(PageSpace.WINDOW, token_page, stored=stored)
