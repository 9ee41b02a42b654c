"""Allocator and page table against a queue and a dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.memory.kv_memory import PageTable
from pdserve.memory.lease import PageAllocator

NUM_PAGES, NUM_ROWS, ROW_PAGES = 9, 3, 5


class AllocatorMachine(RuleBasedStateMachine):
    """Pages come back in the order in which they were given back."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.allocator = PageAllocator(NUM_PAGES, self.freed.extend)
        self.queue = list(range(NUM_PAGES))
        self.taken: list[int] = []

    @rule(num_pages=st.integers(0, NUM_PAGES + 1))
    def take(self, num_pages: int) -> None:
        pages = self.allocator.take(num_pages)
        if num_pages > len(self.queue):
            assert pages is None
            return
        assert pages == self.queue[:num_pages]
        self.queue = self.queue[num_pages:]
        self.taken += pages

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.taken), unique=True))
        self.allocator.give_back(pages)
        assert self.freed == pages
        self.freed.clear()
        self.queue += pages
        self.taken = [page for page in self.taken if page not in pages]

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def give_back_twice(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.queue))
        with pytest.raises(AssertionError, match=f"page {page} freed twice"):
            self.allocator.give_back([page])

    @invariant()
    def free_is_what_nobody_has(self) -> None:
        assert self.allocator.num_free == len(self.queue)
        assert self.allocator.free_pages() == (self.queue, sorted(self.queue))
        assert [page for page in range(NUM_PAGES) if self.allocator.is_free(page)] == sorted(self.queue)


class TableMachine(RuleBasedStateMachine):
    """Rows by number, each with its own pages."""

    def __init__(self) -> None:
        super().__init__()
        self.table = PageTable(NUM_ROWS, ROW_PAGES)
        self.rows: dict[int, list[int]] = {}

    @rule(pages=st.lists(st.integers(0, 99), max_size=ROW_PAGES))
    def open(self, pages: list[int]) -> None:
        row = self.table.open(pages)
        assert (row is None) == (len(self.rows) == NUM_ROWS)
        if row is not None:
            assert row not in self.rows
            self.rows[row] = list(pages)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        pages = data.draw(st.lists(st.integers(0, 99), max_size=ROW_PAGES - len(self.rows[row])))
        self.table.extend(row, len(self.rows[row]), pages)
        self.rows[row] += pages

    @rule(row=st.integers(0, NUM_ROWS - 1))
    def close(self, row: int) -> None:
        if row in self.rows:
            self.table.close(row)
            del self.rows[row]
        else:
            with pytest.raises(AssertionError, match=f"row {row} closed twice"):
                self.table.close(row)

    @invariant()
    def every_row_is_open_or_free(self) -> None:
        assert self.table.audit() == []
        assert self.table.open_rows == sorted(self.rows)
        assert self.table.num_free == NUM_ROWS - len(self.rows)
        for row, pages in self.rows.items():
            assert np.array_equal(self.table.pages[row, : len(pages)], pages)


BOUNDS = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = BOUNDS
TestTable = TableMachine.TestCase
TestTable.settings = BOUNDS
