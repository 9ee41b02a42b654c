"""Which pages each row has. Written by the scheduler thread, read by the executor when it builds a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class PageTable:
    """`pages[row, i]` is the page that holds tokens `[i * page_tokens, (i + 1) * page_tokens)` of the row's request.

    Owns the rows too: `open` takes a free one, `close` gives it back.
    """

    def __init__(self, num_rows: int, max_pages_per_row: int) -> None:
        self.pages: npt.NDArray[np.int32] = np.zeros((num_rows, max_pages_per_row), dtype=np.int32)
        self.num_rows = num_rows
        self.max_pages_per_row = max_pages_per_row
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that no request has."""
        return len(self._free)

    def open(self, pages: Sequence[int]) -> int | None:
        """Take a row and write `pages` into it; None when all rows are taken."""
        if not self._free:
            return None
        row = self._free.pop()
        self.pages[row, : len(pages)] = pages
        return row

    def extend(self, row: int, num_pages_before: int, pages: Sequence[int]) -> None:
        """Write further pages behind the first `num_pages_before` of `row`."""
        self.pages[row, num_pages_before : num_pages_before + len(pages)] = pages

    def close(self, row: int) -> None:
        """Give `row` back."""
        assert row not in self._free, f"row {row} closed twice"
        self._free.append(row)
