"""Attention through torch's scaled_dot_product_attention (SDPA), on CPU and CUDA.

Rows with few new tokens are gathered into groups of similar length, padded and masked. Rows with many new tokens are
attended one by one. Contents of unwritten slots never reach a result, not even as NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model.attention.interface import Heads
from pdserve.model.attention.page_gather import KVPool, PageGather
from pdserve.model.forward_batch import ForwardBatch, HostRows, IntArray

_QUERY_BLOCK = 512
"""Query tokens per SDPA call under a mask: each block skips the keys after its last query."""
MIN_ALONE_PRODUCT = 1 << 14
"""Product of new tokens and total tokens from which a row with several new tokens is attended alone. Grouping gains
such a row nothing, and padding costs time.
"""
MAX_GROUP_PRODUCT = 1 << 18
"""Upper bound of the same product, summed over a group of other rows, padding included."""


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """B = `num_rows` gathered rows. Each row has T new tokens and as many pages as `length` tokens, which it sees.

    `tokens` `[B * T]` are flat indices; a row with fewer tokens repeats its last. `kept` `[N]` are the positions in
    `tokens` that are no repeats; None when all are kept. `into` `[N]` are their flat indices.
    `blocks` `[2 * B * kv_heads * pages]` and `junk` are arguments of `KVPool.gathered`.
    `mask` `[B, 1, T * query heads of a KV head, length]` is true where a query sees a token; its third dimension is 1
    when T is 1. None when each query sees all tokens.
    `junk` None: every gathered slot holds a token or lies in a null page.
    """

    tokens: Tensor
    kept: Tensor | None
    into: Tensor
    num_rows: int
    length: int
    blocks: Tensor
    mask: Tensor | None
    junk: Tensor | None


@dataclasses.dataclass(frozen=True)
class ExtendRow:
    """One row with many (`num_tokens`) new tokens at flat index `offset`, ending at position `end`.

    `blocks` and `mask` (`[num_tokens, end]`) are None when the row starts at position 0: the new K and V are all.
    """

    offset: int
    num_tokens: int
    end: int
    blocks: Tensor | None
    mask: Tensor | None


class TorchAttention:
    """The `torch` attention backend over one KV pool."""

    def __init__(self, pool: KVPool, num_heads: int, device: torch.device) -> None:
        self._pool = pool
        self._num_heads = num_heads
        self._queries = num_heads // pool.group.num_kv_heads
        self._device = device
        self._gather = PageGather(pool, device)

    def capturing(self) -> None:
        """See `AttentionBackend.capturing`. Returns None: tensor shapes depend on the rows' lengths."""

    def begin(self, batch: ForwardBatch) -> TorchStep:
        """Compute gather indices and masks for one step."""
        host = batch.host
        widths = host.ends - host.starts
        alone = (widths > 1) & (widths * host.ends >= MIN_ALONE_PRODUCT)
        kinds = np.where(alone, -1, np.ceil(np.log2(widths)))
        groups = [
            self._group(batch, rows)
            for kind in np.unique(kinds[~alone])
            for rows in self._together(host, np.flatnonzero(kinds == kind))
        ]
        rows = [self._extend_row(batch, int(row)) for row in np.flatnonzero(alone)]
        writes = self._pool.slot_index(batch.write_pages, batch.write_slots)
        return TorchStep(self._pool, self._num_heads, writes, groups, rows)

    def _together(self, host: HostRows, rows: IntArray) -> Iterator[IntArray]:
        """Group `rows`, which have similar numbers of new tokens. Groups of decode rows have no size limit."""
        for bucket in self._gather.buckets(host.ends, rows):
            width = int((host.ends - host.starts)[bucket].max())
            most = len(bucket) if width == 1 else max(1, MAX_GROUP_PRODUCT // (width * int(host.ends[bucket[-1]])))
            yield from (bucket[i : i + most] for i in range(0, len(bucket), most))

    def _group(self, batch: ForwardBatch, rows: IntArray) -> RowGroup:
        """Compute indices for one gather of `rows`, sorted by length."""
        host = batch.host
        lengths = host.ends[rows]
        length = int(lengths[-1])
        num_pages = self._pool.group.pages_for(length)
        pages = self._gather.row_pages(host, rows, num_pages)
        even = bool(lengths[0] == length)
        widths = lengths - host.starts[rows]
        new = np.arange(int(widths.max()))
        within = np.minimum(new, widths[:, None] - 1)
        tokens = (host.offsets[rows][:, None] + within).ravel()
        kept = np.flatnonzero(new < widths[:, None])
        mask = None
        if len(new) > 1 or not even:
            last = np.repeat(host.starts[rows][:, None] + within, self._queries if len(new) > 1 else 1, axis=1)
            mask = self._gather.tensor(np.arange(length) <= last[:, None, :, None])
        return RowGroup(
            tokens=self._gather.tensor(tokens),
            kept=None if len(kept) == len(tokens) else self._gather.tensor(kept),
            into=self._gather.tensor(tokens[kept]),
            num_rows=len(rows),
            length=length,
            blocks=self._gather.tensor(self._gather.block_index(pages)),
            mask=mask,
            junk=None if even else self._gather.tensor(self._gather.junk_slots(lengths, num_pages)),
        )

    def _extend_row(self, batch: ForwardBatch, row: int) -> ExtendRow:
        """Compute indices for one row with several new tokens."""
        host = batch.host
        start, end = int(host.starts[row]), int(host.ends[row])
        blocks = mask = None
        if start:
            pages = self._gather.row_pages(host, np.array([row]), self._pool.group.pages_for(end))
            blocks = self._gather.tensor(self._gather.block_index(pages))
            ones = torch.ones(end - start, end, dtype=torch.bool, device=self._device)
            mask = ones.tril(diagonal=start)
        return ExtendRow(int(host.offsets[row]), end - start, end, blocks, mask)


class TorchStep:
    """Attention of one step through SDPA."""

    def __init__(
        self, pool: KVPool, num_heads: int, writes: Tensor, groups: list[RowGroup], rows: list[ExtendRow]
    ) -> None:
        self._pool = pool
        self._num_heads = num_heads
        self._writes = writes
        self._groups = groups
        self._rows = rows

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """See `StepAttention.attend`."""
        q, k, v = heads.finished()
        self._pool.write(layer, self._writes, k, v)
        out = torch.empty_like(q)
        for group in self._groups:
            out.index_copy_(0, group.into, self._together(layer, q, group))
        for row in self._rows:
            new = slice(row.offset, row.offset + row.num_tokens)
            out[new] = self._extend(layer, q[new], k[new], v[new], row)
        return out.flatten(1)

    def _together(self, layer: int, q: Tensor, group: RowGroup) -> Tensor:
        """Attend one group: `[N, num_heads, head_dim]`. Query heads of a KV head are treated as query positions."""
        spec = self._pool.group
        gathered = self._pool.gathered(layer, group.blocks, group.num_rows, group.junk)
        k, v = gathered[:, :, :, : group.length]
        heads = (group.num_rows, -1, spec.num_kv_heads, self._num_heads // spec.num_kv_heads, spec.head_dim)
        queries = q.index_select(0, group.tokens).view(heads).transpose(1, 2)
        out = F.scaled_dot_product_attention(queries.flatten(2, 3), k, v, attn_mask=group.mask)
        out = out.reshape(queries.shape).transpose(1, 2).reshape(-1, self._num_heads, spec.head_dim)
        return out if group.kept is None else out.index_select(0, group.kept)

    def _extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, row: ExtendRow) -> Tensor:
        """Attend one row: `[T, num_heads, head_dim]`. Query heads of a KV head are batches that share K and V."""
        spec = self._pool.group
        if row.blocks is None:
            keys, values = k.transpose(0, 1), v.transpose(0, 1)
        else:
            keys, values = self._pool.gathered(layer, row.blocks, 1, None)[:, 0, :, : row.end]
        queries = q.view(row.num_tokens, spec.num_kv_heads, -1, spec.head_dim).permute(2, 1, 0, 3)
        shared = (queries.shape[0], -1, -1, -1)
        out = _causal(queries, keys.expand(shared), values.expand(shared), row.mask)
        return out.permute(2, 1, 0, 3).reshape(row.num_tokens, self._num_heads, spec.head_dim)


def _causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend the last T positions `q` `[_, _, T, D]` to all keys. `mask` `[T, num keys]`; None when T is all keys."""
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    num_queries, num_keys = mask.shape
    blocks = []
    for first in range(0, num_queries, _QUERY_BLOCK):
        last = min(first + _QUERY_BLOCK, num_queries)
        seen = num_keys - num_queries + last
        keys, values, part = k[:, :, :seen], v[:, :, :seen], mask[first:last, :seen]
        blocks.append(F.scaled_dot_product_attention(q[:, :, first:last], keys, values, attn_mask=part))
    return torch.cat(blocks, 2)
