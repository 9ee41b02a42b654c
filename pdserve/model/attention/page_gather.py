"""Index arithmetic that brings the pages of rows together in one piece. Used by the attention backends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.memory import shared
from pdserve.memory.layout import KVGroup
from pdserve.model.dtypes import torch_dtype
from pdserve.model.forward_batch import IntArray, to_device

_SLACK_PAGES = 4
"""Rows join a gather while its longest has at most twice their pages plus this."""


class PageGather:
    """Indices into one KV pool, for one device."""

    def __init__(self, pool: KVPool, device: torch.device) -> None:
        self._pool = pool
        self._device = device

    def buckets(self, ends: IntArray, rows: IntArray) -> list[IntArray]:
        """`rows` sorted by length and cut so that padding at most about doubles what is gathered."""
        order = rows[np.argsort(ends[rows], kind="stable")]
        num_pages = -(-ends[order] // self._pool.group.page_tokens)
        buckets: list[IntArray] = []
        first = 0
        for i in range(1, len(order) + 1):
            if i == len(order) or num_pages[i] > 2 * num_pages[first] + _SLACK_PAGES:
                buckets.append(order[first:i])
                first = i
        return buckets

    def block_index(self, pages: IntArray) -> IntArray:
        """Rows of `KVPool.blocks` for pages `[B, P]`, in the order `[k/v, B, kv_head, P]`, flat."""
        heads = self._pool.group.num_kv_heads
        base = pages[None, :, None, :] * self._pool.page_blocks
        inner = np.arange(2)[:, None, None, None] * heads + np.arange(heads)[None, None, :, None]
        index: IntArray = (base + inner).reshape(-1)
        return index

    def junk_slots(self, lengths: IntArray, row_pages: IntArray, num_pages: int) -> IntArray:
        """Slots behind each row's last token, in the gathered piece seen as `[k/v, B, kv_head, slot]`, flat."""
        heads, page_tokens = self._pool.group.num_kv_heads, self._pool.group.page_tokens
        counts = row_pages * page_tokens - lengths
        row = np.repeat(np.arange(len(lengths)), counts)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        slot = np.repeat(lengths, counts) + within
        lines = (np.arange(2)[:, None, None] * len(lengths) + row) * heads + np.arange(heads)[:, None]
        junk: IntArray = (lines * (num_pages * page_tokens) + slot).reshape(-1)
        return junk

    def tensor(self, array: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Tensor:
        """`array` on the device; the copy does not wait for it."""
        return to_device(array, self._device)


_CUDA_ALIGN_BYTES = 2 << 20


class KVPool:
    """`pages` is `[num_pages, layer, 2, kv_head, page_tokens, head_dim]`.

    Behind the last page lies one more, the null page, always zero: padding of a gather points there. It is not
    part of `buffer`, so no peer can write it.

    `shareable`, on CPU: other processes can map it, as transfer backend shm asks. Where they need not, it lies in huge
    pages, which most systems give to private memory only.
    """

    def __init__(self, group: KVGroup, num_pages: int, device: torch.device, *, shareable: bool = True) -> None:
        self.group = group
        self.num_pages = num_pages
        self.null_page = num_pages
        dtype = torch_dtype(group.dtype)
        raw = _allocate((num_pages + 1) * group.page_bytes, device, shareable)
        self._all = raw.view(dtype).view(num_pages + 1, *group.page_shape)
        self.pages = self._all[:num_pages]
        self._block_rows = self._all.view(-1, group.page_tokens * group.head_dim)
        self._slot_rows = self._all.view(-1, group.head_dim)

    @property
    def buffer(self) -> tuple[int, int]:
        """`(address, bytes)` of the pages."""
        return self.pages.data_ptr(), self.num_pages * self.group.page_bytes

    def blocks(self, layer: int) -> Tensor:
        """`[_, page_tokens * head_dim]` from `layer` on: a block is row `page * page_blocks + kv * heads + head`."""
        return self._block_rows[layer * 2 * self.group.num_kv_heads :]

    def slots(self, layer: int, kv: int) -> Tensor:
        """`[_, head_dim]` from the first slot of `layer`'s K (`kv` 0) or V (1) on; rows as `slot_index` says."""
        return self._slot_rows[(layer * 2 + kv) * self.group.num_kv_heads * self.group.page_tokens :]

    def layer(self, layer: int) -> Tensor:
        """`[num_pages + 1, 2, kv_head, page_tokens, head_dim]`: K and V of one layer, the null page with them."""
        return self._all[:, layer]

    @property
    def page_blocks(self) -> int:
        """Blocks in one page: layer x k/v x head."""
        return self.group.num_layers * 2 * self.group.num_kv_heads

    def slot_index(self, pages: Tensor, slots: Tensor) -> Tensor:
        """Rows of `slots()` for tokens at `(pages, slots)` `[N]`: int64 `[N * num_kv_heads]`, head fastest."""
        heads = torch.arange(self.group.num_kv_heads, device=pages.device)
        blocks = pages[:, None] * self.page_blocks + heads
        return (blocks * self.group.page_tokens + slots[:, None]).flatten()


def _allocate(num_bytes: int, device: torch.device, shareable: bool) -> Tensor:
    """Zeroed uint8 memory at a page-aligned address; on CPU it is committed as it is touched."""
    if device.type == "cpu":
        memory = shared.allocate(num_bytes) if shareable else shared.allocate_private(num_bytes)
        return torch.frombuffer(memory, dtype=torch.uint8)
    raw = torch.zeros(num_bytes + _CUDA_ALIGN_BYTES, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % _CUDA_ALIGN_BYTES
    return raw[skip : skip + num_bytes]
