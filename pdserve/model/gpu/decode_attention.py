"""Attention of rows with one new token each over pages, read in place; keys split over programs (Flash-Decoding).

Called by `attention/triton_pages.py`. How many parts the keys have is fixed by the shape of a launch, never by the
lengths of its rows, so that a launch can be captured in a CUDA graph. The parts are added up by a second kernel.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.model.gpu.attention_math import page_rows, scores_of, soften
from pdserve.model.gpu.runtime import chaining, num_cores, power_of_2

LOG2_E = 1.4426950408889634
_WAVES = 4
"""Programs for each multiprocessor: they wait for memory most of the time."""
_MAX_PARTS = 64
_PART_TOKENS = 128
"""A part has at least so many keys: below, adding up costs more than it saves."""


@dataclasses.dataclass(frozen=True)
class Mask:
    """What a query sees, and how scores are bent.

    `window`: so many positions up to its own, all when 0. `softcap`: scores become `softcap * tanh(score / softcap)`,
    unless 0.
    """

    window: int = 0
    softcap: float = 0.0


def num_parts(num_rows: int, num_kv_heads: int, max_tokens: int, device: torch.device) -> int:
    """How many programs share a row's keys: a power of two, for each number is a kernel of its own."""
    filled = max(1, _WAVES * num_cores(device) // max(1, num_rows * num_kv_heads))
    return min(_MAX_PARTS, power_of_2(filled), power_of_2(-(-max_tokens // _PART_TOKENS)))


def attend_decode(
    q: Tensor,
    out: Tensor,
    kv: Tensor,
    table: Tensor,
    ends: Tensor,
    tokens: Tensor,
    *,
    scale: float,
    parts: int,
    mask: Mask = Mask(),
    sinks: Tensor | None = None,
) -> None:
    """Write the attention of rows into `out`.

    `q`, `out` `[N, num_heads, D]`, the last two dimensions contiguous; `kv` `[num_pages, 2, num_kv_heads, page_tokens,
    D]`, contiguous but for the pages; `table` int32 `[R, P]`, pages of each row; `ends` int32 `[R]`, positions it has;
    `tokens` int32 `[R]`, its index in `q` and `out`. `sinks` float32 `[num_heads]`: a logit that takes weight and gives
    nothing. `parts` is a power of two. A row with an end of 0 gets zeros.
    """
    num_rows, (num_heads, dim) = len(ends), q.shape[1:]
    num_kv_heads, page_tokens = kv.shape[2:4]
    group = num_heads // num_kv_heads
    block_dim = power_of_2(dim)
    block_heads = max(16, power_of_2(group))
    partial_out = lse = out
    if parts > 1:
        partial_out = torch.empty(num_rows, num_heads, parts, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(num_rows, num_heads, parts, dtype=torch.float32, device=q.device)
    has_cap, chained = mask.softcap > 0, chaining(q.device)
    _decode[(num_rows, num_kv_heads, parts)](
        q, out, kv, table, ends, tokens, partial_out, lse, sinks if sinks is not None else ends,
        q.stride(0), out.stride(0), kv.stride(0), kv.stride(1), table.stride(0),
        scale if has_cap else scale * LOG2_E, mask.softcap, mask.window,
        GROUP=group, PAGE=page_tokens, DIM=dim, BLOCK_DIM=block_dim, BLOCK_HEADS=block_heads,
        BLOCK_KEYS=64 if block_dim <= 128 else 32, PART=_PART_TOKENS,
        HAS_WINDOW=mask.window > 0, HAS_CAP=has_cap, HAS_SINKS=sinks is not None, WHOLE=parts == 1,
        num_warps=4, num_stages=3, **chained,
    )  # fmt: skip
    if parts > 1:
        _combine[(num_rows, num_heads)](
            partial_out, lse, out, tokens, sinks if sinks is not None else ends, out.stride(0),
            DIM=dim, BLOCK_DIM=block_dim, NUM_PARTS=parts, HAS_SINKS=sinks is not None, num_warps=4,
            **chained,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "softcap", "window"])
def _decode(
    q, out, kv, table, ends, tokens, partial_out, lse, sinks,
    q_stride, out_stride, page_stride, value_offset, table_stride, scale, softcap, window,
    GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, PART: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, WHOLE: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One row, one KV head with all query heads that share it, one part of its keys."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_parts, num_heads = tl.num_programs(2), tl.num_programs(1) * GROUP
    end = tl.load(ends + row)
    token = tl.load(tokens + row).to(tl.int64)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(end - window, 0)
    share = tl.cdiv(tl.cdiv(end - begin, num_parts), BLOCK_KEYS) * BLOCK_KEYS
    if not WHOLE:
        share = tl.maximum(share, PART)
    first = begin + part * share
    last = tl.minimum(first + share, end)

    within = tl.arange(0, BLOCK_HEADS)
    head = kv_head * GROUP + within
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < DIM
    is_head = within < GROUP
    cells = is_head[:, None] & is_dim[None, :]
    queries = tl.load(q + token * q_stride + head[:, None] * DIM + dims[None, :], mask=cells, other=0.0)
    total = tl.zeros((BLOCK_HEADS, BLOCK_DIM), tl.float32)
    top = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_HEADS,), tl.float32)
    of_head = kv + kv_head * PAGE * DIM
    line = table + row.to(tl.int64) * table_stride
    for start in range(first, last, BLOCK_KEYS):
        positions = start + tl.arange(0, BLOCK_KEYS)
        is_seen = positions < last
        rows = page_rows(of_head, line, positions, is_seen, page_stride, PAGE, DIM)
        cells_read = is_seen[:, None] & is_dim[None, :]
        keys = tl.load(rows[:, None] + dims[None, :], mask=cells_read, other=0.0)
        values = tl.load(rows[:, None] + value_offset + dims[None, :], mask=cells_read, other=0.0)
        scores = scores_of(queries, keys, scale, softcap, HAS_CAP)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        total, top, weight = soften(total, top, weight, scores, values)

    if WHOLE:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_head, other=0.0) * 1.4426950408889634
            higher = tl.maximum(top, sink)
            shrink = tl.exp2(top - higher)
            total = total * shrink[:, None]
            weight = weight * shrink + tl.exp2(sink - higher)
        found = total / tl.where(weight > 0.0, weight, 1.0)[:, None]
        at = out + token * out_stride + head[:, None] * DIM + dims[None, :]
        tl.store(at, found.to(out.dtype.element_ty), mask=cells)
    else:
        line_out = (row.to(tl.int64) * num_heads + head) * num_parts + part
        known = tl.where(weight > 0.0, weight, 1.0)
        tl.store(partial_out + line_out[:, None] * DIM + dims[None, :], total / known[:, None], mask=cells)
        tl.store(lse + line_out, top + tl.log2(known), mask=is_head)


@triton.jit
def _combine(
    partial_out, lse, out, tokens, sinks, out_stride,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, NUM_PARTS: tl.constexpr, HAS_SINKS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One row and query head: its parts, weighted."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(tokens + row).to(tl.int64)
    line = (row.to(tl.int64) * tl.num_programs(1) + head) * NUM_PARTS
    parts, dims = tl.arange(0, NUM_PARTS), tl.arange(0, BLOCK_DIM)
    is_dim = dims < DIM
    logs = tl.load(lse + line + parts)
    top = tl.max(logs, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head) * 1.4426950408889634
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(logs - base)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - base)
    found = tl.load(partial_out + (line + parts)[:, None] * DIM + dims[None, :], mask=is_dim[None, :], other=0.0)
    mixed = tl.sum(found * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + token * out_stride + head * DIM + dims, mixed.to(out.dtype.element_ty), mask=is_dim)
