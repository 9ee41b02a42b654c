"""Allocates indices of a fixed pool (KV pages, aux slots). Owned by the scheduler thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np


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
