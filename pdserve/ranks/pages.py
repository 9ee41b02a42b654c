"""The page table on two ranks: the leader sends what is new of a row, the follower writes it into a table of its own.

    leader     PageNews.take(row, end)  ->  bytes in `PlannedRow.pages`  ->  PageCopybook.write(row, pages)     follower

A row is begun anew when a request takes it. While one has it, its pages only become more.
"""

from __future__ import annotations

from pdserve.memory.layout import pages_for
from pdserve.memory.page_table import PageTable
from pdserve.ranks.orders import pack, unpack


class PageNews:
    """What followers know of the leader's table. Scheduler thread."""

    def __init__(self, table: PageTable, page_tokens: int) -> None:
        self._table = table
        self._page_tokens = page_tokens
        self._sent = [0] * table.num_rows

    def begin(self, row: int) -> None:
        """Another request has `row`; followers know nothing of it."""
        self._sent[row] = 0

    def take(self, row: int, end: int) -> bytes:
        """The pages of `row` for tokens up to `end` that were not taken before, packed."""
        sent, needed = self._sent[row], pages_for(end, self._page_tokens)
        if needed <= sent:
            return b""
        self._sent[row] = needed
        return pack(self._table.pages[row, sent:needed])


class PageCopybook:
    """The follower's table, written as the leader says. Computing thread."""

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._known = [0] * table.num_rows

    def begin(self, row: int) -> None:
        """Another request has `row`."""
        self._known[row] = 0

    def write(self, row: int, news: bytes) -> None:
        """Put further pages behind those that are known."""
        if news:
            pages = unpack(news)
            self._table.extend(row, self._known[row], pages)
            self._known[row] += len(pages)
