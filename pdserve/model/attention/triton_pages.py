"""Attention by Triton kernels, which read pages in place without a gather. For CUDA; made by `backend_choice`.

A step's rows are ordered decode first, then extend. All kernel inputs travel to the device in one copy.

A row with drafts counts as a decode row for each of its tokens, so that its bits are those of decode steps. As each
token sees the KV of those before it, a kernel of its own then writes the KV first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.model.attention.interface import ALL_POSITIONS, Heads, ScoreRule
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.forward_batch import Filling, ForwardBatch, HostRows, IntArray, to_device
from pdserve.model.gpu.attention_math import CODES
from pdserve.model.gpu.decode_attention import (
    AttentionMask,
    FreshKV,
    attend_decode,
    counters,
    num_parts,
)
from pdserve.model.gpu.extend_attention import attend_extend, tile_tokens
from pdserve.model.gpu.fused_qk_norm_rope_cache import place_heads


@dataclasses.dataclass(frozen=True)
class PagedRows:
    """Rows on the device, int32. The first `num_decode` rows have one new token each; `tiles` cover the other rows.

    `table` `[R, P]`; `starts`, `ends`, `offsets` `[R]`; `tiles` `[T, 2]`. `parts` is the number of programs that share
    a decode row. `through` counts the programs that have finished. `has_drafts`: decode rows read each other's KV.
    """

    table: Tensor
    starts: Tensor
    ends: Tensor
    offsets: Tensor
    tiles: Tensor
    num_decode: int
    parts: int
    through: Tensor
    has_drafts: bool = False


class TritonAttention:
    """The `triton` attention backend over the pool of one FULL or WINDOW group. Implements `CapturableBackend`."""

    def __init__(self, pool: KVPool, num_heads: int, device: torch.device, rule: ScoreRule = ALL_POSITIONS) -> None:
        self._pool = pool
        self._device = device
        self._rule = rule
        self._layers = [pool.layer(layer) for layer in range(pool.group.num_layers)]
        self._through = counters(1, pool.group.num_kv_heads, device)
        self._captured: Tensor | None = None
        """Page table of captured steps; smaller sizes use its first lines. None before the first capture."""
        self._tile_tokens = tile_tokens(num_heads // pool.group.num_kv_heads, pool.group.head_dim, pool.pages.dtype)

    def begin(self, batch: ForwardBatch) -> TritonStep:
        """See `AttentionBackend.begin`."""
        return TritonStep(self._layers, self._rows(batch.host), batch.write_pages, batch.write_slots, self._rule)

    def capturing(self) -> TritonAttention:
        """See `AttentionBackend.capturing`."""
        return self

    def capturable(self, num_rows: int, max_pages: int, write_pages: Tensor, write_slots: Tensor) -> TritonCaptured:
        """See `CapturableBackend.capturable`."""
        if self._captured is None or self._captured.shape[0] < num_rows:
            shape = (num_rows, max_pages)
            self._captured = torch.full(shape, self._pool.null_page, dtype=torch.int32, device=self._device)
        rows = PagedRows(
            table=self._captured[:num_rows],
            starts=torch.zeros(num_rows, dtype=torch.int32, device=self._device),
            ends=torch.ones(num_rows, dtype=torch.int32, device=self._device),
            offsets=torch.arange(num_rows, dtype=torch.int32, device=self._device),
            tiles=torch.empty(0, 2, dtype=torch.int32, device=self._device),
            num_decode=num_rows,
            parts=self._parts(num_rows, self._pool.group.tokens_in(max_pages)),
            through=self._counters(num_rows),
        )
        return TritonCaptured(self._layers, rows, write_pages, write_slots, self._rule)

    def _rows(self, host: HostRows) -> PagedRows:
        """Send a step's rows to the device in one copy."""
        has_drafts = host.num_drafts is not None
        host = host.apart()
        is_decode = (host.ends - host.starts) == 1
        order = np.argsort(~is_decode, kind="stable")
        num_rows, num_decode = len(order), int(is_decode.sum())
        starts, ends = host.starts[order], host.ends[order]
        tiles = self._tiles(starts, ends, num_decode)
        pieces = (starts, ends, host.offsets[order], tiles.reshape(-1), host.pages[order].reshape(-1))
        on_device = pack_to_device(pieces, self._device)
        longest = int(ends[:num_decode].max()) if num_decode else 1
        return PagedRows(
            table=on_device[4].view(num_rows, -1),
            starts=on_device[0],
            ends=on_device[1],
            offsets=on_device[2],
            tiles=on_device[3].view(-1, 2),
            num_decode=num_decode,
            parts=self._parts(num_decode, longest),
            through=self._counters(num_decode),
            has_drafts=has_drafts,
        )

    def _tiles(self, starts: IntArray, ends: IntArray, first: int) -> IntArray:
        """Return `(row, new token)` of every tile of the rows from `first` on; tiles with the most keys come first."""
        counts = -(-(ends - starts)[first:] // self._tile_tokens)
        rows = np.repeat(np.arange(first, len(starts)), counts)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        new = within * self._tile_tokens
        longest_first = np.argsort(-(starts[rows] + new), kind="stable")
        return np.stack((rows, new), 1)[longest_first]

    def _counters(self, num_rows: int) -> Tensor:
        """Return counters for at least `num_rows` rows. Steps run one after the other and share one tensor."""
        num_kv_heads = self._pool.group.num_kv_heads
        if len(self._through) < num_rows * num_kv_heads:
            self._through = counters(num_rows, num_kv_heads, self._device)
        return self._through

    def _parts(self, num_rows: int, max_tokens: int) -> int:
        """Return the number of programs that share a decode row."""
        if self._rule.window is not None:
            max_tokens = min(max_tokens, self._rule.window)
        return num_parts(num_rows, self._pool.group.num_kv_heads, max_tokens, self._device)


class TritonStep:
    """Attention of one step by Triton kernels."""

    def __init__(
        self, layers: list[Tensor], rows: PagedRows, write_pages: Tensor, write_slots: Tensor, rule: ScoreRule
    ) -> None:
        self._layers = layers
        self._rows = rows
        self._mask = AttentionMask(window=rule.window or 0, softcap=rule.softcap or 0.0)
        self._scale = rule.scale
        self._write_pages, self._write_slots = write_pages, write_slots

    def attend(self, layer: int, heads: Heads) -> Tensor:
        """See `StepAttention.attend`."""
        rows, kv, num_decode = self._rows, self._layers[layer], self._rows.num_decode
        num_tokens, _, dim = heads.qkv.shape
        out, mask, sinks = heads.qkv.new_empty(num_tokens, heads.num_heads, dim), self._mask, heads.sinks
        scale = dim**-0.5 if self._scale is None else self._scale
        q: Tensor | FreshKV
        if len(rows.tiles) or rows.has_drafts or kv.dtype in CODES:
            q = placed(heads, kv, self._write_pages, self._write_slots)
        else:
            q = fresh(heads, self._write_pages, self._write_slots)
        if num_decode:
            ends, tokens = rows.ends[:num_decode], rows.offsets[:num_decode]
            attend_decode(
                q, out, kv, rows.table, ends, tokens, rows.through,
                scale=scale, parts=rows.parts, mask=mask, sinks=sinks,
            )  # fmt: skip
        if isinstance(q, Tensor) and len(rows.tiles):
            attend_extend(
                q, out, kv, rows.table, rows.starts, rows.ends, rows.offsets, rows.tiles,
                scale=scale, mask=mask, sinks=sinks,
            )  # fmt: skip
        return out.flatten(1)


class TritonCaptured(TritonStep):
    """Implements `CapturedAttention`: rows whose tensors stay at fixed addresses."""

    def filling(self, rows: HostRows) -> list[Filling]:
        """See `CapturedAttention.filling`."""
        mine = self._rows
        return [(mine.ends, rows.ends.astype(np.int32)), (mine.table[:, : rows.pages.shape[1]], rows.pages)]


def pack_to_device(pieces: Sequence[npt.NDArray[np.int32 | np.int64]], device: torch.device) -> list[Tensor]:
    """Copy flat `pieces` to `device` as int32, in one copy. Each piece begins 16-byte aligned.

    Triton compiles a kernel again when the alignment of a pointer changes.
    """
    begins = np.cumsum([0, *(len(piece) + -len(piece) % 4 for piece in pieces)]).tolist()
    packed = np.zeros(begins.pop(), dtype=np.int32)
    for begin, piece in zip(begins, pieces, strict=True):
        packed[begin : begin + len(piece)] = piece
    on_device = to_device(packed, device)
    return [on_device[begin : begin + len(piece)] for begin, piece in zip(begins, pieces, strict=True)]


def fresh(heads: Heads, write_pages: Tensor, write_slots: Tensor) -> FreshKV:
    """Bundle `heads` and write targets as `FreshKV`: the attention kernel finishes the heads."""
    q_norm, k_norm = heads.q_norm, heads.k_norm
    return FreshKV(
        heads.qkv, write_pages, write_slots, heads.cos, heads.sin,
        None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight,
        *((0.0, 0.0) if q_norm is None else (q_norm.eps, q_norm.offset)), heads.has_gates,
    )  # fmt: skip


def placed(heads: Heads, kv: Tensor, write_pages: Tensor, write_slots: Tensor) -> Tensor:
    """Finish `heads`: write keys and values to the pages `kv` of their layer, and return the queries."""
    q_norm, k_norm = heads.q_norm, heads.k_norm
    return place_heads(
        heads.qkv, heads.num_heads, kv, write_pages, write_slots, heads.cos, heads.sin,
        None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight,
        *((0.0, 0.0) if q_norm is None else (q_norm.eps, q_norm.offset)),
        has_gates=heads.has_gates,
    )  # fmt: skip
