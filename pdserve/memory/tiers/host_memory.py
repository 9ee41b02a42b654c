"""Bytes of the host tier: one slab of slots for each page space, and the copies between slots and pages of the pool.

A slot has the bytes of one page number on this rank: the pages of all groups of its space, one behind the other.

    slot of TOKENS   [full][mla][index][draft]      slot of WINDOW   [window]      slot of SLOTS   [state][stamp]

The schedulers of all ranks use the same slot numbers. Which slots are free, and what they hold, is `HostPool`'s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from pdserve.memory.layout import KVLayout, PageSpace

Bytes = npt.NDArray[np.uint8]
SPACES = (PageSpace.TOKENS, PageSpace.WINDOW, PageSpace.SLOTS)


@dataclasses.dataclass(frozen=True, slots=True)
class PageCopies:
    """Copies of one space: page `pages[i]` of the pool and slot `slots[i]` of the host tier."""

    space: PageSpace
    pages: tuple[int, ...]
    slots: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.pages) == len(self.slots), f"{len(self.pages)} pages and {len(self.slots)} slots"


def num_copied(copies: Iterable[PageCopies]) -> int:
    """Return the number of pages that `copies` name, of all spaces."""
    return sum(len(one.pages) for one in copies)


@dataclasses.dataclass(frozen=True, slots=True)
class GroupPart:
    """Where the page of a layout group lies in a slot: `num_bytes` from `start` on. `group`: its index."""

    group: int
    start: int
    num_bytes: int


def parts_of(layout: KVLayout, space: PageSpace) -> tuple[GroupPart, ...]:
    """Return where the pages of a rank's groups lie in a slot of `space`; without the groups that have no layer."""
    found: list[GroupPart] = []
    start = 0
    for index, group in enumerate(layout.groups):
        if group.space is space and group.page_bytes:
            found.append(GroupPart(index, start, group.page_bytes))
            start += group.page_bytes
    return tuple(found)


def zeros(num_bytes: int) -> Bytes:
    """Allocate host memory, which the kernel commits page by page as it is used."""
    return np.zeros(num_bytes, dtype=np.uint8)


class HostMemory:
    """The slabs of one rank. `layout`: this rank's part of the KV layout. `num_slots`: by space; 0 where it is absent.

    `allocate` returns zeroed host memory of a number of bytes, such as pinned memory. A slot's bytes may be read and
    written by any thread while the scheduler keeps the slot from its reuse.
    """

    def __init__(
        self, layout: KVLayout, num_slots: Mapping[PageSpace, int], allocate: Callable[[int], Bytes] = zeros
    ) -> None:
        self.parts = {space: parts_of(layout, space) for space in SPACES}
        """Where the page of each group lies in a slot."""
        self.slabs: dict[PageSpace, Bytes] = {}
        """uint8 `[slots, bytes of a slot]`."""
        for space in SPACES:
            count, size = num_slots.get(space, 0), layout.space_bytes(space)
            self.slabs[space] = allocate(count * size).reshape(count, size)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in self.slabs.values())

    def slot(self, space: PageSpace, number: int) -> memoryview:
        """Return the bytes of slot `number` of a space, for reading and writing."""
        return memoryview(self.slabs[space][number])


def slots_for(layout: KVLayout, pages: Mapping[PageSpace, int], *, ratio: float, num_bytes: int = 0) -> dict[
    PageSpace, int
]:  # fmt: skip
    """Return how many slots of each space a host tier has.

    Args:
        layout: the whole model's layout, or one rank's.
        pages: pages of each space in the pool.
        ratio: slots for each page of the pool.
        num_bytes: host memory for all slots of `layout`, which wins over `ratio`; 0: `ratio` counts.
    """
    if num_bytes:
        pool = sum(count * layout.space_bytes(space) for space, count in pages.items())
        ratio = num_bytes / max(1, pool)
    return {space: math.floor(count * ratio) for space, count in pages.items() if layout.space_bytes(space)}
