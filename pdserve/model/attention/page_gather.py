"""`KVPool`, and index arithmetic that gathers rows' pages into one tensor. Used by the attention backends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.memory import shared
from pdserve.memory.layout import KVGroup
from pdserve.model.forward_batch import IntArray, to_device
from pdserve.model.params import torch_dtype

_SLACK_PAGES = 4
"""Rows join a gather while the longest row has at most twice the pages of the shortest, plus this many."""


class PageGather:
    """Computes indices into one KV pool, for one device."""

    def __init__(self, pool: KVPool, device: torch.device) -> None:
        self._pool = pool
        self._device = device

    def buckets(self, ends: IntArray, rows: IntArray) -> list[IntArray]:
        """Sort `rows` by length and cut them so that padding at most about doubles the gathered bytes."""
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
        """Return rows of `KVPool.blocks` for pages `[B, P]`, in the order `[k/v, B, kv_head, P]`, flat."""
        heads = self._pool.group.num_kv_heads
        base = pages[None, :, None, :] * self._pool.page_blocks
        inner = np.arange(2)[:, None, None, None] * heads + np.arange(heads)[None, None, :, None]
        index: IntArray = (base + inner).reshape(-1)
        return index

    def junk_slots(self, lengths: IntArray, row_pages: IntArray, num_pages: int) -> IntArray:
        """Return slots after each row's last token, as flat indices of the gathered `[k/v, B, kv_head, slot]`."""
        heads, page_tokens = self._pool.group.num_kv_heads, self._pool.group.page_tokens
        counts = row_pages * page_tokens - lengths
        row = np.repeat(np.arange(len(lengths)), counts)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        slot = np.repeat(lengths, counts) + within
        lines = (np.arange(2)[:, None, None] * len(lengths) + row) * heads + np.arange(heads)[:, None]
        junk: IntArray = (lines * (num_pages * page_tokens) + slot).reshape(-1)
        return junk

    def tensor(self, array: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Tensor:
        """Copy `array` to the device without blocking."""
        return to_device(array, self._device)


_CUDA_ALIGN_BYTES = 2 << 20


class KVPool:
    """The KV pool of a rank. `pages` is `[num_pages, layer, 2, kv_head, page_tokens, head_dim]`.

    After the last page lies one more, the null page, which is always zero: padding of a gather reads it. The null page
    is outside `buffer`, so no peer can write it.

    With `shareable`, on CPU, other processes can map the pool, as transfer backend shm requires. Without it the pool
    uses huge pages, which most systems give to private memory only.
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
        """`(address, size in bytes)` of the pages, without the null page."""
        return self.pages.data_ptr(), self.num_pages * self.group.page_bytes

    def blocks(self, layer: int) -> Tensor:
        """View `[_, page_tokens * head_dim]` from `layer` on; block row: `page * page_blocks + kv * heads + head`."""
        return self._block_rows[layer * 2 * self.group.num_kv_heads :]

    def slots(self, layer: int, kv: int) -> Tensor:
        """View `[_, head_dim]` from the first slot of `layer`'s K (`kv` 0) or V (1); rows are those of `slot_index`."""
        return self._slot_rows[(layer * 2 + kv) * self.group.num_kv_heads * self.group.page_tokens :]

    def layer(self, layer: int) -> Tensor:
        """View `[num_pages + 1, 2, kv_head, page_tokens, head_dim]`: K and V of one layer, null page included."""
        return self._all[:, layer]

    @property
    def page_blocks(self) -> int:
        """Blocks in one page: layer x k/v x head."""
        return self.group.num_layers * 2 * self.group.num_kv_heads

    def slot_index(self, pages: Tensor, slots: Tensor) -> Tensor:
        """Return rows of `slots()` for tokens at `(pages, slots)` `[N]`: int64 `[N * num_kv_heads]`, head fastest."""
        heads = torch.arange(self.group.num_kv_heads, device=pages.device)
        blocks = pages[:, None] * self.page_blocks + heads
        return (blocks * self.group.page_tokens + slots[:, None]).flatten()


def _allocate(num_bytes: int, device: torch.device, shareable: bool) -> Tensor:
    """Allocate zeroed uint8 memory at an aligned address; on CPU, memory is committed on first touch."""
    if device.type == "cpu":
        memory = shared.allocate(num_bytes) if shareable else shared.allocate_private(num_bytes)
        return torch.frombuffer(memory, dtype=torch.uint8)
    raw = torch.zeros(num_bytes + _CUDA_ALIGN_BYTES, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % _CUDA_ALIGN_BYTES
    return raw[skip : skip + num_bytes]
