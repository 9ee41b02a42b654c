"""Index arithmetic that brings the pages of rows together in one piece. Used by the attention backends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.model.attention.kv_pool import KVPool
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
