"""The right to pages, kept alive by named holds.

A request's life and a transfer's life end at different moments. Whoever may still read or write the pages has a hold;
the pages go back to the allocator only when the last hold drops:

    reserve      publish addresses     request ends              peer is done, or fenced
      |  request hold ................... x
      |                | remote hold ............................... x -> pages are free
      |                                 (decode side)
      |  request hold ............... x
      |        | send hold: a copy worker reads ............. x -> pages are free
                                        (prefill side)
"""

from __future__ import annotations

from typing import Literal

from pdserve.memory.allocator import PageAllocator

Hold = Literal["request", "remote", "send", "prefix"]


class Lease:
    """Pages with holds. Starts with the hold `request`. Written by the scheduler thread only."""

    __slots__ = ("_allocator", "_holds", "pages")

    def __init__(self, allocator: PageAllocator, pages: list[int]) -> None:
        self._allocator = allocator
        self._holds: set[Hold] = {"request"}
        self.pages = pages

    @property
    def alive(self) -> bool:
        """True while anyone holds the pages."""
        return bool(self._holds)

    def held_by(self, name: Hold) -> bool:
        """True while `name` holds the pages."""
        return name in self._holds

    def hold(self, name: Hold) -> None:
        """Add a hold; the lease must be alive."""
        assert self._holds, f"hold {name} on a dead lease"
        self._holds.add(name)

    def drop(self, name: Hold) -> None:
        """Drop a hold; dropping one that is not there does nothing. The last one frees the pages."""
        if name not in self._holds:
            return
        self._holds.discard(name)
        if not self._holds:
            self._allocator.give_back(self.pages)
            self.pages = []


class LeasePool:
    """An allocator and the leases over it, with counts for the audit."""

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator = allocator

    def reserve(self, num_pages: int) -> Lease | None:
        """A lease over `num_pages` pages, or None when there are fewer free."""
        pages = self.allocator.take(num_pages)
        return None if pages is None else Lease(self.allocator, pages)

    @property
    def num_total(self) -> int:
        """Pages of the pool."""
        return self.allocator.num_pages

    @property
    def num_free(self) -> int:
        """Pages no lease has."""
        return self.allocator.num_free
