"""Paged attention of rows with one new token each, with keys split over programs (Flash-Decoding).

Called by `attention/triton_pages.py`. The shape of a launch fixes the number of parts, independent of the rows'
lengths, so that a CUDA graph can capture the launch. The last program of a row to finish adds the parts up, in order.

In a step of decode rows alone the kernel takes the q/k/v projection's output (`FreshKV`). It finishes the query heads
and the new key itself, and writes key and value to their page.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.model.gpu.attention_math import (
    CODES,
    ask_ahead,
    finished,
    key_row,
    load_rows,
    online_softmax_update,
    page_rows,
    scores_of,
)
from pdserve.model.gpu.runtime import chaining, num_cores, power_of_2

LOG2_E = 1.4426950408889634
_WAVES = 4
"""Programs per multiprocessor: programs wait for memory most of the time."""
_MAX_PARTS = 64
_PART_TOKENS = 128
"""Minimum keys per part: below this, the reduction costs more than the split saves."""


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """Sliding window and logit cap.

    `window`: number of visible positions, including the query's own; 0 for all. `softcap`: scores become
    `softcap * tanh(score / softcap)`; 0 disables it.
    """

    window: int = 0
    softcap: float = 0.0


EVERYTHING = AttentionMask()
"""No window and no cap."""


@dataclasses.dataclass(frozen=True)
class FreshKV:
    """Unfinished heads and write targets of the new tokens; arguments as for `place_heads`.

    The first dimensions of a head, as many as `cos` and `sin` have, are rotated; None: nothing is rotated.
    """

    qkv: Tensor
    write_pages: Tensor
    write_slots: Tensor
    cos: Tensor | None
    sin: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    norm_offset: float = 0.0
    has_gates: bool = False


def num_parts(num_rows: int, num_kv_heads: int, max_tokens: int, device: torch.device) -> int:
    """Return the number of programs that share a row's keys: a power of two, to limit the kernels compiled."""
    filled = max(1, _WAVES * num_cores(device) // max(1, num_rows * num_kv_heads))
    return min(_MAX_PARTS, power_of_2(filled), power_of_2(-(-max_tokens // _PART_TOKENS)))


def counters(num_rows: int, num_kv_heads: int, device: torch.device) -> Tensor:
    """Make counters for `attend_decode` of up to `num_rows` rows. Launches of one stream share and reset them."""
    return torch.zeros(num_rows * num_kv_heads, dtype=torch.int32, device=device)


def attend_decode(
    q: Tensor | FreshKV,
    out: Tensor,
    kv: Tensor,
    table: Tensor,
    ends: Tensor,
    tokens: Tensor,
    through: Tensor,
    *,
    scale: float,
    parts: int,
    mask: AttentionMask = EVERYTHING,
    sinks: Tensor | None = None,
) -> None:
    """Write the attention of rows into `out`.

    `q`, `out` `[N, num_heads, D]`, the last two dimensions contiguous. `kv` `[num_pages, 2, num_kv_heads, page_tokens,
    D]`, contiguous within a page; codes have the items of a row instead of D. `table` int32 `[R, P]`: pages of each
    row. `ends` int32 `[R]`: number of positions. `tokens` int32 `[R]`: the row's index in `q` and `out`. `through`:
    `counters`. `sinks` float32 `[num_heads]`: logits that take softmax weight and add no value. `parts` is a power of
    two. A row with an end of 0 gets zeros; with `FreshKV` each row has at least its new token. With a window, only the
    pages of visible positions are read; other entries of `table` may have any value.
    """
    num_rows, (num_heads, dim) = len(ends), out.shape[1:]
    num_kv_heads, page_tokens = kv.shape[2:4]
    group = num_heads // num_kv_heads
    partial_out = lse = out
    if parts > 1:
        partial_out = torch.empty(num_rows, num_kv_heads, parts, group, dim, dtype=torch.float32, device=out.device)
        lse = torch.empty(num_rows, num_kv_heads, parts, group, dtype=torch.float32, device=out.device)
    has_cap, fresh = mask.softcap > 0, q if isinstance(q, FreshKV) else None
    source = q if isinstance(q, Tensor) else q.qkv
    block_dim = power_of_2(dim)
    values_dtype = out.dtype if kv.dtype in CODES else kv.dtype
    tiling = AttentionTiling.of(num_rows * num_kv_heads, dim, values_dtype, out.device)
    assert fresh is None or kv.dtype not in CODES, "keys and values become codes in `place_heads`"
    assert len(through) >= num_rows * num_kv_heads, "one counter for each row and KV head"
    _decode[(num_rows, num_kv_heads, parts)](
        source, out, kv, table, ends, tokens, partial_out, lse, through, sinks if sinks is not None else ends,
        *_fresh_arguments(fresh, source),
        source.stride(0), out.stride(0), kv.stride(0), kv.stride(1), table.stride(0),
        scale if has_cap else scale * LOG2_E, mask.softcap, mask.window,
        GROUP=group, PAGE=page_tokens, DIM=dim, ROW=kv.shape[-1], FORMAT=CODES.get(kv.dtype, 0),
        BLOCK_DIM=block_dim, BLOCK_HEADS=max(16, power_of_2(group)),
        BLOCK_KEYS=tiling.keys, PART=_PART_TOKENS, MOST_PARTS=_MAX_PARTS, IS_WHOLE=parts == 1,
        HAS_WINDOW=mask.window > 0, HAS_CAP=has_cap, HAS_SINKS=sinks is not None, IS_FRESH=fresh is not None,
        QUERY_STEP=2 if fresh is not None and fresh.has_gates else 1,
        ROTARY=0 if fresh is None or fresh.cos is None else fresh.cos.shape[-1],
        HAS_NORM=fresh is not None and fresh.q_norm is not None,
        NORM_OFFSET=0.0 if fresh is None else fresh.norm_offset,
        num_warps=tiling.warps, num_stages=3, **chaining(out.device),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AttentionTiling:
    """Block of keys, and warps per program."""

    keys: int
    warps: int

    @staticmethod
    def of(num_pairs: int, dim: int, dtype: torch.dtype, device: torch.device) -> AttentionTiling:
        """Choose a tiling for `num_pairs` pairs of row and KV head. With few pairs, one program's latency counts."""
        if dim > 128:
            return AttentionTiling(keys=32, warps=4)
        if 4 * num_pairs <= num_cores(device):
            return AttentionTiling(keys=128 if dtype.itemsize == 2 else 64, warps=8)
        return AttentionTiling(keys=64, warps=4)


def _fresh_arguments(fresh: FreshKV | None, nothing: Tensor) -> tuple[Tensor | float | int, ...]:
    """Return pages and slots, angles, norms and their epsilon, and the stride of angles."""
    if fresh is None:
        return (nothing,) * 6 + (0.0, 0)
    given = (fresh.cos, fresh.sin, fresh.q_norm, fresh.k_norm)
    stride = 0 if fresh.cos is None else fresh.cos.stride(0)
    tables = (nothing if each is None else each for each in given)
    return fresh.write_pages, fresh.write_slots, *tables, fresh.eps, stride


@triton.jit(
    do_not_specialize=["table_stride", "softcap", "window"],
    do_not_specialize_on_alignment=["write_pages", "write_slots"],  # see `fused_qk_norm_rope_cache._place`
)
def _decode(
    q, out, kv, table, ends, tokens, partial_out, lse, through, sinks,
    write_pages, write_slots, cos, sin, q_norm, k_norm, eps, angle_stride,
    q_stride, out_stride, page_stride, value_offset, table_stride, scale, softcap, window,
    GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, ROW: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, PART: tl.constexpr,
    MOST_PARTS: tl.constexpr, IS_WHOLE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, IS_FRESH: tl.constexpr,
    QUERY_STEP: tl.constexpr, ROTARY: tl.constexpr, HAS_NORM: tl.constexpr, NORM_OFFSET: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One row, one KV head with all query heads that share it, and one part of the keys."""
    row, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    most_parts = tl.num_programs(2)
    end = tl.load(ends + row)
    token = tl.load(tokens + row).to(tl.int64)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(end - window, 0)
    share = tl.cdiv(tl.cdiv(end - begin, most_parts), BLOCK_KEYS) * BLOCK_KEYS
    if not IS_WHOLE:
        share = tl.maximum(share, PART)
    first = begin + part * share
    if CHAINED:  # ends, pages and most keys were written before the awaited kernel began
        if first < end:
            ask_ahead(
                kv + kv_head * PAGE * ROW, table + row.to(tl.int64) * table_stride, first, end, page_stride,
                value_offset, BLOCK_KEYS, PAGE, ROW,
            )  # fmt: skip
        tl.extra.cuda.gdc_wait()
    if (first < end) | (part == 0):
        last = tl.minimum(first + share, end)
        within = tl.arange(0, BLOCK_HEADS)
        head = kv_head * GROUP + within
        dims = tl.arange(0, BLOCK_DIM)
        is_dim = dims < DIM
        is_head = within < GROUP
        cells = is_head[:, None] & is_dim[None, :]
        of_token = q + token * q_stride
        stored = last  # end of the keys that lie in pages
        of_head = kv + kv_head * PAGE * ROW
        line = table + row.to(tl.int64) * table_stride
        if IS_FRESH:
            stored = tl.minimum(last, end - 1)
            angle = token * angle_stride
            queries = finished(
                of_token + head[:, None] * QUERY_STEP * DIM, q_norm, angle, cos, sin, eps, cells, DIM, BLOCK_DIM,
                ROTARY, HAS_NORM, NORM_OFFSET,
            )  # fmt: skip
        else:
            queries = tl.load(of_token + head[:, None] * DIM + dims[None, :], mask=cells, other=0.0)
        total = tl.zeros((BLOCK_HEADS, BLOCK_DIM), tl.float32)
        top = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_HEADS,), tl.float32)
        if IS_FRESH and stored < last:  # the new token comes first, because its key needs no load from a page
            one = tl.arange(0, 1)[:, None]
            key_at = of_token + (tl.num_programs(1) * GROUP * QUERY_STEP + kv_head) * DIM + one
            is_one = (one == 0) & is_dim[None, :]
            page, slot = tl.load(write_pages + token), tl.load(write_slots + token)
            value = tl.load(key_at + tl.num_programs(1) * DIM + dims[None, :], mask=is_one, other=0.0)
            key = finished(
                key_at, k_norm, angle, cos, sin, eps, is_one, DIM, BLOCK_DIM, ROTARY, HAS_NORM, NORM_OFFSET
            )  # fmt: skip
            score = tl.sum(queries.to(tl.float32) * key.to(tl.float32), 1) * scale
            if HAS_CAP:
                score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0) * 1.4426950408889634
            total, top, weight = total + value.to(tl.float32), score, weight + 1.0
            to_page = key_row(kv, page, kv_head, slot, page_stride, PAGE, ROW)
            is_kept = is_one & (page >= 0)
            tl.store(to_page + dims[None, :] + one, key, mask=is_kept)
            tl.store(to_page + value_offset + dims[None, :] + one, value, mask=is_kept)
        for start in range(first, stored, BLOCK_KEYS):
            positions = start + tl.arange(0, BLOCK_KEYS)
            is_seen = positions < stored
            rows = page_rows(of_head, line, positions, is_seen, page_stride, PAGE, ROW)
            cells_read = is_seen[:, None] & is_dim[None, :]
            keys = load_rows(rows, dims, cells_read, is_seen, queries, ROW, FORMAT)
            values = load_rows(rows + value_offset, dims, cells_read, is_seen, queries, ROW, FORMAT)
            scores = scores_of(queries, keys, scale, softcap, HAS_CAP)
            scores = tl.where(is_seen[None, :], scores, float("-inf"))
            total, top, weight = online_softmax_update(total, top, weight, scores, values)
        if CHAINED:  # only now: the next kernel's programs must find all multiprocessors equally free
            tl.extra.cuda.gdc_launch_dependents()

        is_last = True
        if not IS_WHOLE:
            pair = row * tl.num_programs(1) + kv_head
            parts = tl.maximum(tl.cdiv(end - begin, share), 1)
            known = tl.where(weight > 0.0, weight, 1.0)
            lines = (pair.to(tl.int64) * most_parts + part) * GROUP + within
            tl.store(partial_out + lines[:, None] * DIM + dims[None, :], total / known[:, None], mask=cells)
            tl.store(lse + lines, top + tl.log2(known), mask=is_head)
            tl.debug_barrier()  # all threads' stores are done before one thread increments the counter
            is_last = tl.atomic_add(through + pair, 1) == parts - 1
            if is_last:
                tl.store(through + pair, 0)
                lines = pair.to(tl.int64) * most_parts * GROUP + within
                total, top, weight = reduced_sum(
                    partial_out, lse, lines, is_head, cells, parts, GROUP, DIM, BLOCK_DIM, BLOCK_HEADS, MOST_PARTS
                )  # fmt: skip
        if is_last:
            if HAS_SINKS:
                sink = tl.load(sinks + head, mask=is_head, other=0.0) * 1.4426950408889634
                higher = tl.maximum(top, sink)
                shrink = tl.exp2(top - higher)
                total = total * shrink[:, None]
                weight = weight * shrink + tl.exp2(sink - higher)
            found = total / tl.where(weight > 0.0, weight, 1.0)[:, None]
            at = out + token * out_stride + head[:, None] * DIM + dims[None, :]
            tl.store(at, found.to(out.dtype.element_ty), mask=cells)


@triton.jit
def reduced_sum(
    partial_out, lse, lines, is_head, cells, parts, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, MOST_PARTS: tl.constexpr,
):  # fmt: skip
    """Combine the parts of a row and KV head in the form of `online_softmax_update`. Loads bypass the L1 cache."""
    each = tl.arange(0, MOST_PARTS)
    is_part = is_head[:, None] & (each < parts)[None, :]
    at = lse + lines[:, None] + each[None, :] * GROUP
    logs = tl.load(at, mask=is_part, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(logs, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.sum(tl.exp2(logs - base[:, None]), 1)
    dims = tl.arange(0, BLOCK_DIM)
    total = tl.zeros((BLOCK_HEADS, BLOCK_DIM), tl.float32)
    for some in range(0, parts, 16):
        for within in tl.static_range(16):
            index = some + within
            log = tl.load(
                lse + lines + index * GROUP, mask=is_head & (index < parts), other=float("-inf"), cache_modifier=".cg"
            )  # fmt: skip
            found = tl.load(
                partial_out + (lines + index * GROUP)[:, None] * DIM + dims[None, :],
                mask=cells & (index < parts), other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            total += found * tl.exp2(log - base)[:, None]
    return total, top, weight
