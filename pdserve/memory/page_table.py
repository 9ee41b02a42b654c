"""The page table: the pages of each row. Written by the scheduler thread, read by the executor in `launch`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class PageTable:
    """`pages[row, i]` is the page that holds tokens `[i * page_tokens, (i + 1) * page_tokens)` of the row's request;
    int32.

    Also allocates the rows: `open` takes a free one, `close` returns it.
    """

    def __init__(self, num_rows: int, max_pages_per_row: int) -> None:
        self.pages: npt.NDArray[np.int32] = np.zeros((num_rows, max_pages_per_row), dtype=np.int32)
        self.num_rows = num_rows
        self.max_pages_per_row = max_pages_per_row
        self._free = list(range(num_rows - 1, -1, -1))
        self._is_open = bytearray(num_rows)

    @property
    def num_free(self) -> int:
        """Free rows."""
        return len(self._free)

    @property
    def open_rows(self) -> list[int]:
        """Rows that requests hold, ascending."""
        return [row for row, is_open in enumerate(self._is_open) if is_open]

    def open(self, pages: Sequence[int]) -> int | None:
        """Take a row and write `pages` into it; None when no row is free."""
        if not self._free:
            return None
        row = self._free.pop()
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
        self._free.append(row)

    def audit(self) -> list[str]:
        """Return one sentence for each inconsistency: every row must be either open or free, exactly once."""
        closed = set(range(self.num_rows)) - set(self.open_rows)
        free, found = set(self._free), list[str]()
        if len(free) != len(self._free):
            found.append(f"rows: the free list has {len(self._free) - len(free)} rows twice")
        if free - closed:
            found.append(
                f"rows: {len(free - closed)} of {self.num_rows} are both open and free: {sorted(free - closed)}"
            )
        if closed - free:
            found.append(f"rows: {len(closed - free)} of {self.num_rows} are lost: {sorted(closed - free)}")
        return found
