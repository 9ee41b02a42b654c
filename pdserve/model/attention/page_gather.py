"""`GroupPool`, `KVPool`, and index arithmetic that gathers rows' pages into one tensor. Used by attention backends."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.memory import shared
from pdserve.memory.dtypes import EIGHT_BIT, row_items
from pdserve.memory.layout import GroupKind, KVGroup
from pdserve.model.attention.kv_rows import decode_rows, encode_rows
from pdserve.model.forward_batch import HostRows, IntArray, to_device
from pdserve.model.params import torch_dtype

_SLACK_PAGES = 4
"""Rows join a gather while the longest row has at most twice the pages of the shortest, plus this many."""


@dataclasses.dataclass(frozen=True)
class RowSpans:
    """The rows of a step, by what is gathered of them: each from a page `first_pages[r]` on, to its last token.

    Row r has `lengths[r]` gathered tokens. Tokens from `starts[r]` on are new. `valid_from[r]`: its first page
    that is not behind the window. `first_pages` and `valid_from` are None where all rows begin with their first page.
    """

    host: HostRows
    starts: IntArray
    lengths: IntArray
    first_pages: IntArray | None
    valid_from: IntArray | None

    @staticmethod
    def of(host: HostRows, group: KVGroup, firsts: IntArray | None, step: int = 1) -> RowSpans:
        """Return the rows. `firsts`: first position that each row sees; None: 0.

        First pages are multiples of `step`.
        """
        if firsts is None:
            return RowSpans(host, host.starts, host.ends, None, None)
        valid_from = firsts // group.page_tokens
        first_pages = valid_from // step * step
        bases = first_pages * group.page_tokens
        return RowSpans(host, host.starts - bases, host.ends - bases, first_pages, valid_from)

    def pages(self, gather: PageGather, rows: IntArray, num_pages: int) -> IntArray:
        """Return `num_pages` pages of each row to gather, `[B, num_pages]`; null pages for those that it lacks."""
        if self.first_pages is None or self.valid_from is None:
            return gather.row_pages(self.host, rows, num_pages)
        return gather.row_pages(self.host, rows, num_pages, self.first_pages[rows], self.valid_from[rows])


class PageGather:
    """Computes indices into one KV pool, for one device."""

    def __init__(self, pool: KVPool, device: torch.device) -> None:
        self._pool = pool
        self._device = device
        planes, heads = range(pool.group.num_planes), range(pool.group.num_kv_heads)
        self._layer_blocks = np.array([[pool.group.block(0, plane, head) for head in heads] for plane in planes])
        """Blocks of a page's first layer, `[k/v, kv_head]`."""

    def buckets(self, lengths: IntArray, rows: IntArray) -> list[IntArray]:
        """Sort `rows` by length and cut them so that padding at most about doubles the gathered bytes.

        `lengths[r]`: tokens of row r that are gathered.
        """
        order = rows[np.argsort(lengths[rows], kind="stable")]
        num_pages = self._pool.group.pages_for(lengths[order])
        buckets: list[IntArray] = []
        first = 0
        for i in range(1, len(order) + 1):
            if i == len(order) or num_pages[i] > 2 * num_pages[first] + _SLACK_PAGES:
                buckets.append(order[first:i])
                first = i
        return buckets

    def row_pages(
        self,
        host: HostRows,
        rows: IntArray,
        num_pages: int,
        firsts: IntArray | None = None,
        valid_from: IntArray | None = None,
    ) -> IntArray:
        """Return `num_pages` pages of each row, `[B, num_pages]`; null pages after the row's last one.

        They begin with page `firsts[i]` of row `rows[i]`; None: with its first page. The null page also stands for
        pages before `valid_from[i]`, which are behind the row's window.
        """
        pages = np.full((len(rows), num_pages), self._pool.null_page, dtype=np.int64)
        counts = self._pool.group.pages_for(host.ends[rows])[:, None]
        if firsts is None:
            known = min(num_pages, host.pages.shape[1])
            pages[:, :known] = host.pages[rows, :known]
            pages[np.arange(num_pages) >= counts] = self._pool.null_page
            return pages
        numbers = firsts[:, None] + np.arange(num_pages)
        is_known = numbers < np.minimum(counts, host.pages.shape[1])
        if valid_from is not None:
            is_known &= numbers >= valid_from[:, None]
        line, column = np.nonzero(is_known)
        pages[line, column] = host.pages[rows[line], numbers[line, column]]
        return pages

    def block_index(self, pages: IntArray) -> IntArray:
        """Return the blocks of pages `[B, P]` for `KVPool.gathered`, in the order `[k/v, B, kv_head, P]`, flat."""
        base = pages[None, :, None, :] * self._pool.group.page_blocks
        index: IntArray = (base + self._layer_blocks[:, None, :, None]).reshape(-1)
        return index

    def junk_slots(self, lengths: IntArray, num_pages: int) -> IntArray:
        """Return slots after each row's last token, as flat indices of the gathered `[k/v, B, kv_head, slot]`.

        Slots of null pages are not among them.
        """
        group, heads = self._pool.group, self._pool.group.num_kv_heads
        counts = group.tokens_in(group.pages_for(lengths)) - lengths
        row = np.repeat(np.arange(len(lengths)), counts)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        slot = np.repeat(lengths, counts) + within
        planes = np.arange(group.num_planes)
        lines = (planes[:, None, None] * len(lengths) + row) * heads + np.arange(heads)[:, None]
        junk: IntArray = (lines * group.tokens_in(num_pages) + slot).reshape(-1)
        return junk

    def tensor(self, array: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Tensor:
        """Copy `array` to the device without blocking."""
        return to_device(array, self._device)


_CUDA_ALIGN_BYTES = 2 << 20


class GroupPool:
    """The pages of one layout group on a rank, with planes of any shapes and dtypes. For STATE the pages are slots.

    A rank without layers of the group has a pool of no bytes.

    After the last page lies one more, the null page, which is always zero: padding of a gather reads it. The null page
    is outside `buffer`, so no peer can write it.

    With `shareable`, on CPU, other processes can map the pool, as transfer backend shm requires. Without it the pool
    uses huge pages, which most systems give to private memory only.
    """

    def __init__(self, group: KVGroup, num_pages: int, device: torch.device, *, shareable: bool = True) -> None:
        self.group = group
        self.num_pages = num_pages
        self.null_page = num_pages
        self._raw = _allocate(max(1, group.bytes_of(num_pages + 1)), device, shareable)[: group.bytes_of(num_pages + 1)]

    @property
    def buffer(self) -> tuple[int, int]:
        """`(address, size in bytes)` of the pages, without the null page."""
        return self._raw.data_ptr(), self.group.bytes_of(self.num_pages)

    def give_back(self) -> None:
        """Give the memory of all pages back to the system, in host memory only. They are zero and can be used again.

        Raises:
            OSError: the system refuses.
        """
        shared.give_back(self._raw.data_ptr(), self._raw.nbytes)

    @property
    def pages_as_bytes(self) -> Tensor:
        """The pages as bytes: uint8 `[num_pages, page_bytes]`."""
        return self._raw.view(self.num_pages + 1, -1)[: self.num_pages]

    @functools.cached_property
    def pages(self) -> Tensor:
        """View `[num_pages, layer, plane, head, row, items of a row]` of a group whose planes are alike."""
        values = self._raw.view(torch_dtype(self.group.dtype))
        return values.view(self.num_pages + 1, *self.group.page_shape)[: self.num_pages]

    def plane(self, layer: int, plane: int) -> Tensor:
        """View `[num_pages + 1, head, row, width]` of one plane of the group's layer number `layer`, null page
        included. Not for planes of codes.
        """
        group, shape = self.group, self.group.planes[plane]
        assert shape.dtype not in EIGHT_BIT, shape
        values = self._raw.view(torch_dtype(shape.dtype))
        size = values.element_size()
        offset = (layer * group.layer_bytes + group.plane_offsets[plane]) // size
        strides = (group.page_bytes // size, shape.rows * shape.width, shape.width, 1)
        return values.as_strided((self.num_pages + 1, shape.num_heads, shape.rows, shape.width), strides, offset)

    def plane_blocks(self, layer: int, plane: int) -> tuple[Tensor, int] | None:
        """View `[blocks, row * width]` from a plane's first block on, and the blocks from one page to the next.

        Head h of page p is block `p * blocks_per_page + h`. None where a page is no multiple of the plane's blocks.
        """
        group, shape = self.group, self.group.planes[plane]
        values = self._raw.view(torch_dtype(shape.dtype))
        size, width = values.element_size(), shape.rows * shape.width
        if group.page_bytes % (width * size):
            return None
        first = (layer * group.layer_bytes + group.plane_offsets[plane]) // size
        num_blocks = (len(values) - first) // width
        return values[first : first + num_blocks * width].view(num_blocks, width), group.page_bytes // (width * size)


class KVPool(GroupPool):
    """The pool of a group of keys and values of one shape.

    In a group of an 8-bit format (`memory/dtypes.py`) the rows are codes, which `write` and `gathered` convert.
    """

    def __init__(self, group: KVGroup, num_pages: int, device: torch.device, *, shareable: bool = True) -> None:
        super().__init__(group, num_pages, device, shareable=shareable)
        self._all = self._raw.view(torch_dtype(group.dtype)).view(num_pages + 1, *group.page_shape)
        self._row_items = row_items(group.head_dim, group.dtype)
        self.has_codes = group.dtype in EIGHT_BIT
        self._block_rows = self._all.view(-1, group.page_tokens * self._row_items)
        self._slot_rows = self._all.view(-1, self._row_items)

    def layer(self, layer: int) -> Tensor:
        """View `[num_pages + 1, 2, kv_head, page_tokens, items of a row]`: K and V of one layer, null page included."""
        return self._all[:, layer]

    def gathered(
        self, layer: int, blocks: Tensor, num_rows: int, junk: Tensor | None, values_dtype: torch.dtype
    ) -> Tensor:
        """Gather K and V of `num_rows` rows of equally many pages: `[2, num_rows, kv_head, slot, head_dim]`.

        `blocks` comes from `PageGather.block_index`. The slots `junk`, from `PageGather.junk_slots`, become zero.
        `values_dtype`: what codes are converted to; other pools return their own dtype.
        """
        group = self.group
        found = self._block_rows[group.block(layer) :].index_select(0, blocks)
        if junk is not None:
            found.view(-1, self._row_items).index_fill_(0, junk, 0)
        found = found.view(group.num_planes, num_rows, group.num_kv_heads, -1, self._row_items)
        return decode_rows(found, group.dtype, group.head_dim, values_dtype) if self.has_codes else found

    def slot_index(self, pages: Tensor, slots: Tensor) -> Tensor:
        """Return the index for `write` of tokens at `(pages, slots)` `[N]`: int64 `[N * kv_heads]`, head fastest."""
        heads = torch.arange(self.group.num_kv_heads, device=pages.device)
        blocks = pages[:, None] * self.group.page_blocks + heads
        return (blocks * self.group.page_tokens + slots[:, None]).flatten()

    def write(self, layer: int, index: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values `[N, num_kv_heads, head_dim]` of N tokens; `index` comes from `slot_index`.

        Returns the keys and values that the pages then hold: in a pool of codes, those that the codes stand for.
        """
        group, kept = self.group, []
        for plane, values in enumerate((k, v)):
            slots = self._slot_rows[group.block(layer, plane) * group.page_tokens :]
            rows = encode_rows(values, group.dtype) if self.has_codes else values
            slots.index_copy_(0, index, rows.reshape(-1, self._row_items))
            kept.append(decode_rows(rows, group.dtype, group.head_dim, values.dtype) if self.has_codes else values)
        return kept[0], kept[1]


def places_in(pools: Sequence[GroupPool], first: int, *, of_index: bool) -> dict[int, tuple[GroupPool, int]]:
    """Return the pool of each layer and the layer's number there, by its number counted from layer `first`.

    With `of_index` of the INDEX groups, else of all other groups.
    """
    chosen = [pool for pool in pools if (pool.group.kind is GroupKind.INDEX) is of_index]
    return {number - first: (pool, index) for pool in chosen for index, number in enumerate(pool.group.layers)}


def _allocate(num_bytes: int, device: torch.device, shareable: bool) -> Tensor:
    """Allocate zeroed uint8 memory at an aligned address; on CPU, memory is committed on first touch."""
    if device.type == "cpu":
        memory = shared.allocate(num_bytes) if shareable else shared.allocate_private(num_bytes)
        return torch.frombuffer(memory, dtype=torch.uint8)
    raw = torch.zeros(num_bytes + _CUDA_ALIGN_BYTES, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % _CUDA_ALIGN_BYTES
    return raw[skip : skip + num_bytes]
