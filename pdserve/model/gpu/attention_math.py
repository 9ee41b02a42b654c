"""Building blocks of both attention kernels: loading keys and values from pages, and online softmax.

Scores are in units of log2, because the device has exp2. A `kv` pointer points at the first K of a layer; V lies
`value_offset` elements after K. The kernels never read slots that no visible position was written to.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CODES = {torch.int8: 1, torch.uint8: 2}
"""FORMAT of pages with codes, int8 and fp8_e4m3 (`memory/dtypes.py`); of other pages it is 0."""


@triton.jit
def key_row(kv, page, kv_head, slot, page_stride, PAGE: tl.constexpr, ROW: tl.constexpr):
    """Return the pointer to the K of a head in a slot of a page; rows have ROW items. Arguments may be vectors."""
    return kv + page.to(tl.int64) * page_stride + (kv_head * PAGE + slot) * ROW


@triton.jit
def page_rows(kv, table, positions, is_read, page_stride, PAGE: tl.constexpr, ROW: tl.constexpr):
    """Return pointers to the K rows of `positions` of one request and head; `table` is its page-table line."""
    pages = tl.load(table + positions // PAGE, mask=is_read, other=0)
    return key_row(kv, pages, 0, positions % PAGE, page_stride, PAGE, ROW)


@triton.jit
def load_rows(rows, dims, mask, is_read, queries, ROW: tl.constexpr, FORMAT: tl.constexpr):
    """Load the values at pointers `rows` `[N]`: `[N, BLOCK_DIM]`, codes converted to the dtype of `queries`.

    `mask` broadcasts to the result; `is_read` `[N]` is true where a row is read.
    """
    at = rows[:, None] + dims[None, :]
    if FORMAT == 0:
        return tl.load(at, mask=mask, other=0.0)
    codes = tl.load(at, mask=mask, other=0)
    if FORMAT == 1:
        scale_at = (rows + (ROW - 4)).to(tl.pointer_type(tl.float32), bitcast=True)
        scales = tl.load(scale_at, mask=is_read, other=0.0)
        return (codes.to(tl.float32) * scales[:, None]).to(queries.dtype)
    # the exponent is placed 120 higher; below 2^-6 that adds 2^-7, which the minimum removes
    bits = ((codes & 0x7F).to(tl.int32) << 20) + (120 << 23)
    size = bits.to(tl.float32, bitcast=True)
    size = tl.minimum(size, 2.0 * size - 0.015625)
    return tl.where(codes >= 128, -size, size).to(queries.dtype)


@triton.jit
def e4m3_codes(x):
    """Return the nearest codes of FP8 E4M3, ties to even, as int32; magnitudes above 448 become 448."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    fine = (((size + 16384.0) - 16384.0) * 512.0).to(tl.int32)  # below 2^-6: multiples of 2^-9
    coarse = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    return tl.where(size < 0.015625, fine, coarse) | ((x.to(tl.int32, bitcast=True) >> 24) & 128)


@triton.jit
def int8_codes(x, inverse):
    """Return `x * inverse` rounded to int32, ties to even. Its magnitude is at most 127."""
    return ((x * inverse + 12582912.0) - 12582912.0).to(tl.int32)


@triton.jit
def ask_ahead(
    kv, table, start, end, page_stride, value_offset, BLOCK_KEYS: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr
):  # fmt: skip
    """Prefetch keys and values from `start` on into the L2 cache, without waiting.

    Does nothing when a row is not a multiple of 16 bytes, which the prefetch instruction requires.
    """
    ROW_BYTES: tl.constexpr = ROW * kv.dtype.element_ty.primitive_bitwidth // 8
    if ROW_BYTES % 16 == 0:
        positions = tl.minimum(start + tl.arange(0, BLOCK_KEYS), end - 1)
        rows = page_rows(kv, table, positions, positions >= 0, page_stride, PAGE, ROW)
        num_bytes = tl.full((BLOCK_KEYS,), ROW_BYTES, tl.int32)
        for which in tl.static_range(2):
            lines = (rows + which * value_offset).to(tl.int64, bitcast=True)
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [lines, num_bytes],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def scores_of(q, keys, scale, softcap, HAS_CAP: tl.constexpr):
    """Scores of `q` `[M, D]` with `keys` `[N, D]`: float32 `[M, N]`, in log2. Without HAS_CAP, `scale` has 1 / ln 2."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    if HAS_CAP:  # cap * tanh(x / cap), through the sigmoid, which every Triton backend has
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * 1.4426950408889634
    return scores


@triton.jit
def online_softmax_update(total, top, weight, scores, values):
    """Add one block of keys to the output sum `total` `[M, D]`, the maximum score `top` `[M]`, and `weight` `[M]`.

    `weight` is the sum of softmax weights. A row without a visible key yet has a `top` of -inf and stays zero.
    """
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    weight = weight * shrink + tl.sum(weights, 1)
    total = total * shrink[:, None]
    total = tl.dot(weights.to(values.dtype), values, total, input_precision="ieee")
    return total, higher, weight


@triton.jit
def scaled_by_norm(x, scale, weight, dtype, NORM_OFFSET: tl.constexpr):
    """Return `x * scale * weight`, float32 rounded to `dtype`.

    Without an offset the product with `scale` is rounded to `dtype` first; with one, the weight is `NORM_OFFSET` more.
    """
    if NORM_OFFSET == 0.0:
        return ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    return (x * scale * (weight + NORM_OFFSET)).to(dtype).to(tl.float32)


@triton.jit
def finished(
    head_at, norm, angle, cos, sin, eps, mask, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROTARY: tl.constexpr,
    HAS_NORM: tl.constexpr, NORM_OFFSET: tl.constexpr,
):  # fmt: skip
    """Load heads at `head_at` `[M, 1]`, normalise them and rotate their first ROTARY dimensions: `[M, BLOCK_DIM]`.

    Computes the same as `fused_qk_norm_rope_cache._place`. `angle` is the offset of the token's line of `cos` and
    `sin`; the first half of `sin` is negated. `norm` is the norm's weights.
    """
    HALF: tl.constexpr = ROTARY // 2
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < DIM
    is_rotated = dims < ROTARY
    across = tl.where(dims < HALF, dims + HALF, dims - HALF)
    if ROTARY < DIM:
        across = tl.where(is_rotated, across, dims)
    here = tl.load(head_at + dims[None, :], mask=mask, other=0.0)
    there = tl.load(head_at + across[None, :], mask=mask, other=0.0)
    dtype = here.dtype
    x, y = here.to(tl.float32), there.to(tl.float32)
    if HAS_NORM:
        rsqrt = (1.0 / tl.sqrt(tl.sum(x * x, 1) / DIM + eps))[:, None]
        of_x = tl.load(norm + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        of_y = tl.load(norm + across, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        x = scaled_by_norm(x, rsqrt, of_x, dtype, NORM_OFFSET)
        y = scaled_by_norm(y, rsqrt, of_y, dtype, NORM_OFFSET)
    c = tl.load(cos + angle + dims, mask=is_rotated, other=1.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle + dims, mask=is_rotated, other=0.0).to(tl.float32)[None, :]
    return (x * c + y * s).to(dtype)
