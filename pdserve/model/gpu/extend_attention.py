"""Paged attention of rows with several new tokens: causal after a prefix (FlashAttention-2).

Called by `attention/triton_pages.py` once the new tokens' K and V are in the pages. A tile is some new tokens of one
row with all query heads that share a KV head. Its query rows are ordered token by token and share the loaded keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.base.env import triton_is_interpreted
from pdserve.model.gpu.attention_math import CODES, load_rows, online_softmax_update, page_rows, scores_of
from pdserve.model.gpu.decode_attention import EVERYTHING, LOG2_E, AttentionMask
from pdserve.model.gpu.runtime import chaining, power_of_2


def tile_rows(group: int, dim: int, dtype: torch.dtype) -> int:
    """Return the query rows of a tile. `dtype`: that of the pages."""
    least = max(32, power_of_2(group))
    if triton_is_interpreted() or dtype.itemsize > 2:
        return least
    return max(least, 128 if dim <= 128 else 64)


def tile_tokens(group: int, dim: int, dtype: torch.dtype) -> int:
    """Return the new tokens of a tile."""
    return tile_rows(group, dim, dtype) // group


def attend_extend(
    q: Tensor,
    out: Tensor,
    kv: Tensor,
    table: Tensor,
    starts: Tensor,
    ends: Tensor,
    offsets: Tensor,
    tiles: Tensor,
    *,
    scale: float,
    mask: AttentionMask = EVERYTHING,
    sinks: Tensor | None = None,
) -> None:
    """Write the attention of rows into `out`.

    `q`, `out`, `kv`, `table`, `sinks` as for `attend_decode`. Row r computes positions `[starts[r], ends[r])`, and its
    first token has index `offsets[r]` in `q`: int32 `[R]` each. `tiles` int32 `[T, 2]`: a row, and the first of up to
    `tile_tokens` of its new tokens.
    """
    num_heads, dim = q.shape[1:]
    num_kv_heads, page_tokens = kv.shape[2:4]
    group, block_dim = num_heads // num_kv_heads, power_of_2(dim)
    has_cap = mask.softcap > 0
    block_rows = tile_rows(group, dim, kv.dtype)
    _extend[(len(tiles), num_kv_heads)](
        q, out, kv, table, starts, ends, offsets, tiles, sinks if sinks is not None else ends,
        q.stride(0), out.stride(0), kv.stride(0), kv.stride(1), table.stride(0),
        scale if has_cap else scale * LOG2_E, mask.softcap, mask.window,
        GROUP=group, PAGE=page_tokens, DIM=dim, ROW=kv.shape[-1], FORMAT=CODES.get(kv.dtype, 0),
        BLOCK_DIM=block_dim, BLOCK_ROWS=block_rows,
        TOKENS=block_rows // group, BLOCK_KEYS=_block_keys(block_dim, q.dtype),
        HAS_WINDOW=mask.window > 0, HAS_CAP=has_cap, HAS_SINKS=sinks is not None,
        num_warps=8 if block_rows * block_dim >= 128 * 128 else 4, num_stages=2, **chaining(q.device),
    )  # fmt: skip


def _block_keys(block_dim: int, dtype: torch.dtype) -> int:
    """Return the keys per block, so that two stages of K and V fit shared memory."""
    return 64 if block_dim <= 128 and dtype.itemsize == 2 and not triton_is_interpreted() else 32


@triton.jit(do_not_specialize=["table_stride", "softcap", "window"])
def _extend(
    q, out, kv, table, starts, ends, offsets, tiles, sinks,
    q_stride, out_stride, page_stride, value_offset, table_stride, scale, softcap, window,
    GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, ROW: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One tile and one KV head."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.load(tiles + 2 * tile)
    new = tl.load(tiles + 2 * tile + 1)
    start, end = tl.load(starts + row), tl.load(ends + row)
    offset = tl.load(offsets + row).to(tl.int64)

    lines = tl.arange(0, BLOCK_ROWS)
    inner = lines // GROUP
    head = kv_head * GROUP + lines % GROUP
    at = new + inner
    position = start + at
    is_line = (inner < TOKENS) & (position < end)
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < DIM
    cells = is_line[:, None] & is_dim[None, :]
    token = offset + at
    queries = tl.load(q + token[:, None] * q_stride + head[:, None] * DIM + dims[None, :], mask=cells, other=0.0)
    total = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_ROWS,), tl.float32)
    if HAS_SINKS:  # the sink acts as a first key with a value of zero
        top = tl.load(sinks + head, mask=is_line, other=0.0) * 1.4426950408889634
        weight = tl.full((BLOCK_ROWS,), 1.0, tl.float32)

    low = start + new
    high = tl.minimum(low + TOKENS, end)
    first = 0
    seen_by_all = (low + 1) // BLOCK_KEYS * BLOCK_KEYS
    if HAS_WINDOW:
        first = tl.maximum(low - window + 1, 0) // BLOCK_KEYS * BLOCK_KEYS
        seen_by_all = first
    of_head = kv + kv_head * PAGE * ROW
    line = table + row.to(tl.int64) * table_stride
    for begin in range(first, seen_by_all, BLOCK_KEYS):
        positions = begin + tl.arange(0, BLOCK_KEYS)
        rows = page_rows(of_head, line, positions, positions >= 0, page_stride, PAGE, ROW)
        keys = load_rows(rows, dims, is_dim[None, :], positions >= 0, queries, ROW, FORMAT)
        values = load_rows(rows + value_offset, dims, is_dim[None, :], positions >= 0, queries, ROW, FORMAT)
        scores = scores_of(queries, keys, scale, softcap, HAS_CAP)
        total, top, weight = online_softmax_update(total, top, weight, scores, values)
    for begin in range(seen_by_all, high, BLOCK_KEYS):
        positions = begin + tl.arange(0, BLOCK_KEYS)
        is_read = positions < high
        if HAS_WINDOW:  # pages behind the window belong to other rows, or to none
            is_read = is_read & (positions > low - window)
        rows = page_rows(of_head, line, positions, is_read, page_stride, PAGE, ROW)
        cells_read = is_read[:, None] & is_dim[None, :]
        keys = load_rows(rows, dims, cells_read, is_read, queries, ROW, FORMAT)
        values = load_rows(rows + value_offset, dims, cells_read, is_read, queries, ROW, FORMAT)
        scores = scores_of(queries, keys, scale, softcap, HAS_CAP)
        is_seen = positions[None, :] <= position[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (positions[None, :] > position[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        total, top, weight = online_softmax_update(total, top, weight, scores, values)
    found = total / tl.where(weight > 0.0, weight, 1.0)[:, None]
    where = out + token[:, None] * out_stride + head[:, None] * DIM + dims[None, :]
    tl.store(where, found.to(out.dtype.element_ty), mask=cells)
