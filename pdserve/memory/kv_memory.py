"""All memory of one scheduler rank: KV pages, page-table rows, aux slots. The roles' only door to memory."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.memory.allocator import PageAllocator
from pdserve.memory.layout import KVLayout, pages_for
from pdserve.memory.lease import Lease, LeasePool
from pdserve.memory.page_table import PageTable


class KVMemory:
    """Owns the allocators and the page table. `num_aux` slots carry first tokens and logprobs between peers."""

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        page_table: PageTable,
        num_aux: int,
        on_free: Callable[[list[int]], None] | None = None,
    ) -> None:
        self.layout = layout
        self.pages = LeasePool(PageAllocator(num_pages, on_free))
        self.aux = LeasePool(PageAllocator(num_aux))
        self.table = page_table

    @property
    def max_tokens(self) -> int:
        """Tokens that fit when everything is free."""
        return self.pages.num_total * self.layout.page_tokens

    def num_pages(self, num_tokens: int) -> int:
        """Pages for `num_tokens` tokens."""
        return pages_for(num_tokens, self.layout.page_tokens)

    def reserve_tokens(self, num_tokens: int) -> Lease | None:
        """A lease over pages for `num_tokens` tokens, or None."""
        return self.pages.reserve(self.num_pages(num_tokens))

    def counts(self) -> dict[str, int]:
        """Totals and free counts; at idle every `_free` equals its `_total`."""
        return {
            "pages_total": self.pages.num_total,
            "pages_free": self.pages.num_free,
            "rows_total": self.table.num_rows,
            "rows_free": self.table.num_free,
            "aux_total": self.aux.num_total,
            "aux_free": self.aux.num_free,
        }
