"""Attention through torch's scaled_dot_product_attention (SDPA), on CPU and CUDA.

Rows with few new tokens are gathered into groups of similar length, padded and masked. Rows with many new tokens are
attended one by one. With a window the gather of a row begins at the first page that its first new token sees. Contents
of unwritten slots never reach a result, not even as NaN. SDPA has neither soft caps nor sinks: with these the scores
are computed by separate operations, in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model.attention.interface import ALL_POSITIONS, Heads, ScoreRule
from pdserve.model.attention.page_gather import KVPool, PageGather, RowSpans
from pdserve.model.forward_batch import ForwardBatch, IntArray

QUERY_BLOCK = 512
"""Query tokens per SDPA call under a mask: each block skips the keys that none of its queries sees."""
MIN_ALONE_PRODUCT = 1 << 14
"""Product of new tokens and total tokens from which a row with several new tokens is attended alone. Grouping gains
such a row nothing, and padding costs time.
"""
MAX_GROUP_PRODUCT = 1 << 18
"""Upper bound of the same product, summed over a group of other rows, padding included."""


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """B = `num_rows` gathered rows. Each row has T new tokens and as many pages as `length` tokens.

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
class QueryBlock:
    """The queries `[first, last)` of a row, and the gathered keys `[low, high)` that one of them sees.

    `mask` `[last - first, high - low]` is true where a query sees a key.
    """

    first: int
    last: int
    low: int
    high: int
    mask: Tensor


@dataclasses.dataclass(frozen=True)
class ExtendRow:
    """One row with many (`num_tokens`) new tokens at flat index `offset`, and `num_keys` keys before and of them.

    `blocks` is None when the row starts at position 0: the new K and V are all. `parts` is None when, besides, all
    queries see all earlier keys.
    """

    offset: int
    num_tokens: int
    num_keys: int
    blocks: Tensor | None
    parts: tuple[QueryBlock, ...] | None


class TorchAttention:
    """The `torch` attention backend over one KV pool."""

    def __init__(self, pool: KVPool, num_heads: int, device: torch.device, rule: ScoreRule = ALL_POSITIONS) -> None:
        self._pool = pool
        self._num_heads = num_heads
        self._queries = num_heads // pool.group.num_kv_heads
        self._rule = rule
        self._window = rule.window
        self._device = device
        self._gather = PageGather(pool, device)

    def capturing(self) -> None:
        """See `AttentionBackend.capturing`. Returns None: tensor shapes depend on the rows' lengths."""

    def begin(self, batch: ForwardBatch) -> TorchStep:
        """Compute gather indices and masks for one step."""
        host = batch.host
        widths = host.ends - host.starts
        firsts = None if self._window is None else np.maximum(0, host.starts - self._window + 1)
        rows = RowSpans.of(host, self._pool.group, firsts)
        alone = (widths > 1) & (widths * rows.lengths >= MIN_ALONE_PRODUCT)
        kinds = np.where(alone, -1, np.ceil(np.log2(widths)))
        groups = [
            self._group(rows, some)
            for kind in np.unique(kinds[~alone])
            for some in self._together(rows, np.flatnonzero(kinds == kind))
        ]
        by_themselves = [self._extend_row(rows, int(row)) for row in np.flatnonzero(alone)]
        writes = self._pool.slot_index(batch.write_pages, batch.write_slots)
        return TorchStep(self._pool, self._num_heads, self._rule, writes, groups, by_themselves)

    def _together(self, rows: RowSpans, some: IntArray) -> Iterator[IntArray]:
        """Group the rows `some`, which have similar numbers of new tokens. Groups of decode rows have no size limit."""
        for bucket in self._gather.buckets(rows.lengths, some):
            width = int((rows.lengths - rows.starts)[bucket].max())
            longest = int(rows.lengths[bucket[-1]])
            most = len(bucket) if width == 1 else max(1, MAX_GROUP_PRODUCT // (width * longest))
            yield from (bucket[i : i + most] for i in range(0, len(bucket), most))

    def _group(self, rows: RowSpans, some: IntArray) -> RowGroup:
        """Compute indices for one gather of the rows `some`, sorted by length."""
        lengths = rows.lengths[some]
        length = int(lengths[-1])
        num_pages = self._pool.group.pages_for(length)
        pages = rows.pages(self._gather, some, num_pages)
        even = bool(lengths[0] == length)
        widths = lengths - rows.starts[some]
        new = np.arange(int(widths.max()))
        within = np.minimum(new, widths[:, None] - 1)
        tokens = (rows.host.offsets[some][:, None] + within).ravel()
        kept = np.flatnonzero(new < widths[:, None])
        mask, window = None, self._window
        if len(new) > 1 or not even or (window is not None and length > window):
            last = np.repeat(rows.starts[some][:, None] + within, self._queries if len(new) > 1 else 1, axis=1)
            last, slots = last[:, None, :, None], np.arange(length)
            seen = slots <= last
            mask = self._gather.tensor(seen if window is None else seen & (slots > last - window))
        return RowGroup(
            tokens=self._gather.tensor(tokens),
            kept=None if len(kept) == len(tokens) else self._gather.tensor(kept),
            into=self._gather.tensor(tokens[kept]),
            num_rows=len(some),
            length=length,
            blocks=self._gather.tensor(self._gather.block_index(pages)),
            mask=mask,
            junk=None if even else self._gather.tensor(self._gather.junk_slots(lengths, num_pages)),
        )

    def _extend_row(self, rows: RowSpans, row: int) -> ExtendRow:
        """Compute indices for one row with several new tokens."""
        start, num_keys = int(rows.starts[row]), int(rows.lengths[row])
        blocks = parts = None
        if rows.host.starts[row]:
            pages = rows.pages(self._gather, np.array([row]), self._pool.group.pages_for(num_keys))
            blocks = self._gather.tensor(self._gather.block_index(pages))
        if blocks is not None or (self._window is not None and num_keys > self._window):
            parts = query_blocks(start, num_keys, self._window, self._device)
        return ExtendRow(int(rows.host.offsets[row]), num_keys - start, num_keys, blocks, parts)


def query_blocks(start: int, num_keys: int, window: int | None, device: torch.device) -> tuple[QueryBlock, ...]:
    """Cut queries at the gathered positions `[start, num_keys)` into blocks."""
    blocks = []
    for first in range(0, num_keys - start, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, num_keys - start)
        low = 0 if window is None else max(0, start + first - window + 1)
        high = start + last
        diagonal = start + first - low
        mask = torch.ones(last - first, high - low, dtype=torch.bool, device=device).tril(diagonal)
        if window is not None:
            mask = mask.triu(diagonal - window + 1)
        blocks.append(QueryBlock(first, last, low, high, mask))
    return tuple(blocks)


class TorchStep:
    """Attention of one step through SDPA."""

    def __init__(
        self,
        pool: KVPool,
        num_heads: int,
        rule: ScoreRule,
        writes: Tensor,
        groups: list[RowGroup],
        rows: list[ExtendRow],
    ) -> None:
        self._pool = pool
        self._num_heads = num_heads
        self._rule = rule
        self._writes = writes
        self._groups = groups
        self._rows = rows

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """See `StepAttention.attend`."""
        q, k, v = heads.finished()
        k, v = self._pool.write(layer, self._writes, k, v)
        out = torch.empty_like(q)
        for group in self._groups:
            out.index_copy_(0, group.into, self._together(layer, q, group, heads.sinks))
        for row in self._rows:
            new = slice(row.offset, row.offset + row.num_tokens)
            out[new] = self._extend(layer, q[new], k[new], v[new], row, heads.sinks)
        return out.flatten(1)

    def _together(self, layer: int, q: Tensor, group: RowGroup, sinks: Tensor | None) -> Tensor:
        """Attend one group: `[N, num_heads, head_dim]`. Query heads of a KV head are treated as query positions."""
        spec = self._pool.group
        gathered = self._pool.gathered(layer, group.blocks, group.num_rows, group.junk, q.dtype)
        k, v = gathered[:, :, :, : group.length]
        heads = (group.num_rows, -1, spec.num_kv_heads, self._num_heads // spec.num_kv_heads, spec.head_dim)
        queries = q.index_select(0, group.tokens).view(heads).transpose(1, 2)
        if sinks is not None:
            sinks = sinks.view(spec.num_kv_heads, 1, -1).expand(-1, queries.shape[2], -1).flatten(1)
        out = _attend(queries.flatten(2, 3), k, v, group.mask, self._rule, sinks)
        out = out.reshape(queries.shape).transpose(1, 2).reshape(-1, self._num_heads, spec.head_dim)
        return out if group.kept is None else out.index_select(0, group.kept)

    def _extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, row: ExtendRow, sinks: Tensor | None) -> Tensor:
        """Attend one row: `[T, num_heads, head_dim]`. Query heads of a KV head are batches that share K and V."""
        spec = self._pool.group
        if row.blocks is None:
            keys, values = k.transpose(0, 1), v.transpose(0, 1)
        else:
            keys, values = self._pool.gathered(layer, row.blocks, 1, None, q.dtype)[:, 0, :, : row.num_keys]
        queries = q.view(row.num_tokens, spec.num_kv_heads, -1, spec.head_dim).permute(2, 1, 0, 3)
        shared = (queries.shape[0], -1, -1, -1)
        if sinks is not None:
            sinks = sinks.view(spec.num_kv_heads, -1).t()[:, :, None]
        out = _causal(queries, keys.expand(shared), values.expand(shared), row.parts, self._rule, sinks)
        return out.permute(2, 1, 0, 3).reshape(row.num_tokens, self._num_heads, spec.head_dim)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: ScoreRule, sinks: Tensor | None) -> Tensor:
    """Attend queries `[A, B, T, D]` to keys and values `[A, B, S, D]` where `mask` is true; None: everywhere.

    `sinks` broadcasts to `[A, B, T]`.
    """
    if rule.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=rule.scale)
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2))
    scores *= q.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    if rule.softcap is not None:
        scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    if mask is not None:
        scores = scores.masked_fill_(~mask, float("-inf"))
    if sinks is None:
        return torch.matmul(scores.softmax(-1), v.float()).to(q.dtype)
    column = sinks[..., None].expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return torch.matmul(weights, v.float()).to(q.dtype)


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: tuple[QueryBlock, ...] | None,
    rule: ScoreRule,
    sinks: Tensor | None,
) -> Tensor:
    """Attend the queries `[_, _, T, D]` of a row to its keys. `parts` None: the queries are as many as the keys.

    `sinks` broadcasts to `[_, _, T]`.
    """
    if parts is None:
        if rule.softcap is None and sinks is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=rule.scale)
        parts = query_blocks(0, k.shape[2], None, q.device)
    blocks = []
    for part in parts:
        keys, values = k[:, :, part.low : part.high], v[:, :, part.low : part.high]
        queries = q[:, :, part.first : part.last]
        blocks.append(_attend(queries, keys, values, part.mask, rule, sinks))
    return torch.cat(blocks, 2)
