"""Batch-invariant attention in torch: the result at position p depends on q[p] and k, v[0..p] alone.

Used with --enable-deterministic-inference. Keys are split into blocks of BLOCK at absolute positions, independent of
the page size. Every matrix product multiplies `size` query rows with one block. `layers/tiles.py` finds sizes for
which a row's bits do not depend on the other rows. More rows, blocks and heads are more products of the same shape.
The maximum over all keys is exact in any order. The blocks' sums are added in order. A masked block or key adds exactly
zero, so blocks that only other queries of the batch see do not change a result. With a window the blocks before a
query's first key are masked, or left out where no query of a piece sees them.

All arithmetic is in float32. Made by the executor factory. Runs on CPU and CUDA.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.errors import ConfigError
from pdserve.model.attention.interface import ALL_POSITIONS, Heads, ScoreRule
from pdserve.model.attention.page_gather import KVPool, PageGather, RowSpans
from pdserve.model.forward_batch import ForwardBatch, IntArray
from pdserve.model.layers.batch_invariant import tanh_capped
from pdserve.model.layers.tiles import PROBE_ROWS, cut, safe_sizes, telling

BLOCK = 128
"""Keys per block: the largest page size, so that pages of a power of two of tokens fill blocks exactly."""
SCORE_BYTES = 16 << 20
"""Upper bound of the scores of one product in bytes, where the sizes allow it; about the size of the caches."""
_PROBE_COUNTS = (1, 2, 5, 56)
"""Batch sizes of the probe's bmm calls: a product alone must have the bits of one product among many."""


@dataclasses.dataclass(frozen=True)
class QueryPiece:
    """`T` new tokens of each of `B` requests, attended together in products of `size` query rows.

    A query row is one query head of one token. Rows that share a KV head are adjacent, token by token. `tokens`
    `[B * T]` are flat indices. Blocks before `begin` and from `num_blocks` on are masked for all queries, blocks from
    `begin` to `first` for none. From `first` to `num_blocks`, `hidden` `[B, 1, num_blocks - first, size, BLOCK]` is
    true where a query row's key is masked.
    """

    tokens: Tensor
    num_tokens: int
    size: int
    begin: int
    num_blocks: int
    first: int
    hidden: Tensor


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Requests whose keys are gathered together, and the pieces that attend to them.

    `blocks` are rows of `KVPool.blocks` for `num_pages` pages per request, which cover at least `num_blocks` blocks.
    `junk` are gathered slots that hold no token of the request; None when there are none.
    """

    num_rows: int
    num_blocks: int
    blocks: Tensor
    junk: Tensor | None
    pieces: tuple[QueryPiece, ...]


class BatchInvariantAttention:
    """The deterministic attention backend over one KV pool.

    Raises:
        ConfigError: no product size is batch-invariant on this device.
    """

    def __init__(self, pool: KVPool, num_heads: int, device: torch.device, rule: ScoreRule = ALL_POSITIONS) -> None:
        self._pool = pool
        self._rule, self._window = rule, rule.window
        page_tokens = pool.group.page_tokens
        self._page_step = math.lcm(BLOCK, page_tokens) // page_tokens
        """Gathers begin at multiples of as many pages: at the start of a block and of a page."""
        self._gather = PageGather(pool, device)
        self._group = num_heads // pool.group.num_kv_heads
        self._sizes = _common_sizes(pool.group.head_dim, device)

    def capturing(self) -> None:
        """See `AttentionBackend.capturing`. Returns None: tensor shapes depend on the rows' lengths."""

    def begin(self, batch: ForwardBatch) -> BatchInvariantStep:
        """Compute gather indices and masks for one step."""
        host = batch.host
        firsts = None if self._window is None else np.maximum(0, host.starts - self._window + 1)
        rows = RowSpans.of(host, self._pool.group, firsts, self._page_step)
        is_decode = (host.ends - host.starts) == 1
        decode, extend = np.flatnonzero(is_decode), np.flatnonzero(~is_decode)
        together = [self._together(rows, some) for some in self._gather.buckets(rows.lengths, decode)]
        alone = [self._together(rows, extend[i : i + 1]) for i in range(len(extend))]
        writes = self._pool.slot_index(batch.write_pages, batch.write_slots)
        return BatchInvariantStep(self._pool, self._group, self._rule, writes, together + alone)

    def _together(self, rows: RowSpans, some: IntArray) -> Gathered:
        """Plan one gather: rows with one new token each, or one row with several. `some` are sorted by length."""
        lengths = rows.lengths[some]
        num_blocks = -(-int(lengths[-1]) // BLOCK)
        num_pages = self._pool.group.pages_for(num_blocks * BLOCK)
        pages = rows.pages(self._gather, some, num_pages)
        junk = self._gather.junk_slots(lengths, num_pages)
        return Gathered(
            num_rows=len(some),
            num_blocks=num_blocks,
            blocks=self._gather.tensor(self._gather.block_index(pages)),
            junk=self._gather.tensor(junk) if len(junk) else None,
            pieces=self._pieces(rows.host.offsets[some], rows.starts[some], lengths),
        )

    def _pieces(self, offsets: IntArray, starts: IntArray, ends: IntArray) -> tuple[QueryPiece, ...]:
        """Cut the new tokens of one gather into pieces. `starts` and `ends` count from each row's first page."""
        num_blocks = -(-int(ends.max()) // BLOCK)
        row_bytes = len(offsets) * self._pool.group.num_kv_heads * num_blocks * BLOCK * 4
        widths = {size // self._group: size for size in reversed(self._sizes) if size >= self._group}
        narrow = tuple(width for width, size in widths.items() if size * row_bytes <= SCORE_BYTES)
        pieces = []
        for tile in cut(int(ends[0] - starts[0]), tuple(sorted(narrow)) or (min(widths),)):
            new = np.arange(tile.start, tile.start + tile.rows)
            pieces.append(self._piece(offsets[:, None] + new, starts[:, None] + new, widths[tile.size]))
        return tuple(pieces)

    def _piece(self, tokens: IntArray, positions: IntArray, size: int) -> QueryPiece:
        """Build the piece of the tokens at flat indices `tokens` and `positions`, `[B, T]` each."""
        num_blocks, begin, window = int(positions.max()) // BLOCK + 1, 0, self._window
        first = (int(positions.min()) + 1) // BLOCK
        if window is not None:
            first = begin = max(0, int(positions.min()) - window + 1) // BLOCK
        keys = np.arange(first * BLOCK, num_blocks * BLOCK).reshape(-1, 1, BLOCK)
        hidden = np.zeros((len(tokens), num_blocks - first, size, BLOCK), dtype=np.bool_)
        last = np.repeat(positions, self._group, axis=1)[:, None, :, None]
        hidden[:, :, : last.shape[2]] = keys > last if window is None else (keys > last) | (keys <= last - window)
        return QueryPiece(
            tokens=self._gather.tensor(tokens.reshape(-1)),
            num_tokens=tokens.shape[1],
            size=size,
            begin=begin,
            num_blocks=num_blocks,
            first=first,
            hidden=self._gather.tensor(hidden)[:, None],
        )


class BatchInvariantStep:
    """Attention of one step in blocks of a fixed size."""

    def __init__(self, pool: KVPool, group: int, rule: ScoreRule, writes: Tensor, gathered: list[Gathered]) -> None:
        self._pool = pool
        self._group = group
        self._writes = writes
        self._gathered = gathered
        self._scale = pool.group.head_dim**-0.5 if rule.scale is None else rule.scale
        self._softcap = rule.softcap

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """See `StepAttention.attend`."""
        q, k, v = heads.finished()
        self._pool.write(layer, self._writes, k, v)
        out = torch.empty_like(q)
        for gathered in self._gathered:
            keys, values = self._blocks(layer, gathered)
            for piece in gathered.pieces:
                rows = self._query_rows(q, gathered.num_rows, piece)
                seen = slice(piece.begin, piece.num_blocks)
                sinks = None if heads.sinks is None else self._sink_rows(heads.sinks, piece)
                mixed = _attend(rows, keys[:, :, seen], values[:, :, seen], piece, self._softcap, sinks)
                out.index_copy_(0, piece.tokens, self._tokens(mixed, piece).to(q.dtype))
        return out.flatten(1)

    def _blocks(self, layer: int, gathered: Gathered) -> tuple[Tensor, Tensor]:
        """Gather keys and values, float32 `[B, kv_heads, num_blocks, BLOCK, D]` each; unwritten slots are zero."""
        pages = self._pool.gathered(layer, gathered.blocks, gathered.num_rows, gathered.junk, torch.float32)
        slots = pages.float()[:, :, :, : gathered.num_blocks * BLOCK]
        keys, values = slots.reshape(*slots.shape[:3], gathered.num_blocks, BLOCK, slots.shape[-1])
        return keys, values

    def _query_rows(self, q: Tensor, num_rows: int, piece: QueryPiece) -> Tensor:
        """Return the piece's scaled queries, float32 `[B, kv_heads, size, D]`; rows beyond its tokens are zero."""
        spec, used = self._pool.group, piece.num_tokens * self._group
        picked = q.index_select(0, piece.tokens).float() * self._scale
        heads = picked.view(num_rows, piece.num_tokens, spec.num_kv_heads, self._group, spec.head_dim).transpose(1, 2)
        rows: Tensor = picked.new_zeros(num_rows, spec.num_kv_heads, piece.size, spec.head_dim)
        rows[:, :, :used] = heads.reshape(num_rows, spec.num_kv_heads, used, spec.head_dim)
        return rows

    def _sink_rows(self, sinks: Tensor, piece: QueryPiece) -> Tensor:
        """Return the sinks `[num_heads]` of the rows of `_query_rows`, `[kv_heads, size, 1]`; zero beyond tokens."""
        of_heads = sinks.view(self._pool.group.num_kv_heads, -1).repeat(1, piece.num_tokens)
        return F.pad(of_heads, (0, piece.size - of_heads.shape[1]))[:, :, None]

    def _tokens(self, mixed: Tensor, piece: QueryPiece) -> Tensor:
        """Invert `_query_rows`: `[B * T, num_heads, D]`."""
        used = mixed[:, :, : piece.num_tokens * self._group]
        heads = used.reshape(*mixed.shape[:2], piece.num_tokens, self._group, mixed.shape[-1]).transpose(1, 2)
        return heads.reshape(len(piece.tokens), -1, mixed.shape[-1])


def _attend(
    rows: Tensor, keys: Tensor, values: Tensor, piece: QueryPiece, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Compute softmax of `rows` `[B, H, size, D]` with `keys`, times `values` (`[B, H, blocks, BLOCK, D]`).

    `sinks` `[H, size, 1]` are scores of a key without a value.
    """
    batch = keys.shape[:3]
    shared = rows[:, :, None].expand(*batch, -1, -1).reshape(-1, *rows.shape[2:])
    scores = torch.bmm(shared, keys.reshape(-1, *keys.shape[3:]).transpose(1, 2)).view(*batch, piece.size, BLOCK)
    if softcap is not None:
        scores = tanh_capped(scores, softcap)
    if piece.first < piece.num_blocks:
        scores[:, :, piece.first - piece.begin :].masked_fill_(piece.hidden, float("-inf"))
    highest = scores.amax((2, 4), keepdim=True)
    if sinks is not None:
        highest = torch.maximum(highest, sinks[None, :, None])
    weights = scores.sub_(highest).exp_()
    mixed = torch.bmm(weights.view(-1, piece.size, BLOCK), values.reshape(-1, *values.shape[3:]))
    total = _in_order(weights.sum(-1, keepdim=True))
    if sinks is not None:
        total = total + torch.exp(sinks - highest[:, :, 0])
    return _in_order(mixed.view(*batch, piece.size, -1)) / total


def _in_order(parts: Tensor) -> Tensor:
    """Sum over dimension 2, first to last: zeros at its end change nothing."""
    total = parts[:, :, 0]
    for index in range(1, parts.shape[2]):
        total = total + parts[:, :, index]
    return total


def _common_sizes(head_dim: int, device: torch.device) -> tuple[int, ...]:
    """Return the numbers of query rows that are batch-invariant in both products. Raises ConfigError."""
    queries, keys = telling(PROBE_ROWS, BLOCK, head_dim, torch.float32, device)
    weights, values = telling(PROBE_ROWS, head_dim, BLOCK, torch.float32, device)
    count = sum(_PROBE_COUNTS)
    by_keys = _sizes_of(queries, keys.repeat(count, 1, 1).transpose(1, 2), f"attention over heads of {head_dim}")
    by_values = _sizes_of(weights, values.t().repeat(count, 1, 1), f"attention over values of {head_dim}")
    sizes = tuple(size for size in by_keys if size in by_values)
    if not sizes:
        raise ConfigError(
            f"enable_deterministic_inference: attention over heads of {head_dim} has no fixed size on this device; "
            "try --cpu-threads 1",
            field="enable_deterministic_inference",
        )
    return sizes


def _sizes_of(x: Tensor, others: Tensor, what: str) -> tuple[int, ...]:
    """Return the batch-invariant row counts of `x @ others[i]`, whether computed alone or among many products."""
    bounds = list(itertools.accumulate(_PROBE_COUNTS, initial=0))

    def together(rows: Tensor) -> Tensor:
        return torch.cat([torch.bmm(rows[begin:end], others[begin:end]) for begin, end in itertools.pairwise(bounds)])

    def alone(rows: Tensor) -> Tensor:
        return torch.cat([torch.bmm(rows[i : i + 1], others[i : i + 1]) for i in range(bounds[-1])])

    return safe_sizes(together, x.expand(bounds[-1], -1, -1), what, reference=alone)
