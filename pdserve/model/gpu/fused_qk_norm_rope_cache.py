"""Fused kernel between the q/k/v projection and attention: q and k norms, rotation, and the KV write to pages.

Called by the attention backends for CUDA. Queries are returned rotated; keys and values are written to the KV pool.
`angle_tables` computes a step's angles once for all layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.model.gpu.attention_math import CODES, e4m3_codes, int8_codes, key_row, scaled_by_norm
from pdserve.model.gpu.runtime import chaining, power_of_2

_BLOCK_HEADS = 8


def place_heads(
    qkv: Tensor,
    num_heads: int,
    kv: Tensor,
    write_pages: Tensor,
    write_slots: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    norm_offset: float = 0.0,
    *,
    has_gates: bool = False,
) -> Tensor:
    """Return the rotated queries, `[N, num_heads, D]`, and write K and V to the pool `kv`.

    `qkv` is `[N, num_heads + 2 * num_kv_heads, D]`, the last two dimensions contiguous; with `has_gates` a gate, which
    is skipped, lies behind each query. `kv` as for `attend_decode`. Token n goes to slot `write_slots[n]`
    of page `write_pages[n]`; a negative page skips the write: int64 `[N]` each. `cos`, `sin` `[N, 1, rotary_dim]` come
    from `Rotary.tables`; the other dimensions are not rotated, and with None nothing is. `q_norm`, `k_norm` `[D]` are
    weights of RMS norms with `eps`, both or neither None; `norm_offset` is added to them.
    """
    num_tokens, _, dim = qkv.shape
    num_kv_heads, page_tokens = kv.shape[2:4]
    all_heads = num_heads + 2 * num_kv_heads
    q: Tensor = torch.empty(num_tokens, num_heads, dim, dtype=qkv.dtype, device=qkv.device)
    has_norm = q_norm is not None
    _place[(num_tokens, triton.cdiv(all_heads, _BLOCK_HEADS))](
        qkv, q, kv, write_pages, write_slots, *(qkv if each is None else each for each in (cos, sin, q_norm, k_norm)),
        eps, qkv.stride(0), 0 if cos is None else cos.stride(0), kv.stride(0), kv.stride(1),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, QUERY_STEP=1 + has_gates, PAGE=page_tokens, DIM=dim,
        ROW=kv.shape[-1], FORMAT=CODES.get(kv.dtype, 0), ROTARY=0 if cos is None else cos.shape[-1],
        BLOCK_HALF=power_of_2(dim // 2), BLOCK_HEADS=_BLOCK_HEADS, HAS_NORM=has_norm, NORM_OFFSET=norm_offset,
        num_warps=2, **chaining(qkv.device),
    )  # fmt: skip
    return q


def angle_tables(positions: Tensor, inverse: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute `layers.kernels.angle_tables` in one launch."""
    num_tokens, half = len(positions), len(inverse)
    cos, sin = (torch.empty(num_tokens, 1, 2 * half, dtype=dtype, device=positions.device) for _ in range(2))
    if num_tokens:
        _angles[(num_tokens,)](
            positions, inverse, cos, sin, factor, HALF=half, BLOCK=power_of_2(half), num_warps=1,
            **chaining(positions.device),
        )  # fmt: skip
    return cos, sin


@triton.jit(do_not_specialize_on_alignment=["positions"])  # see `_place`
def _angles(positions, inverse, cos, sin, factor, HALF: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """One token."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < HALF
    angle = tl.load(positions + token).to(tl.float32) * tl.load(inverse + at, mask=mask, other=0.0)
    c, s = tl.cos(angle) * factor, tl.sin(angle) * factor
    line = token * 2 * HALF + at
    dtype = cos.dtype.element_ty
    tl.store(cos + line, c.to(dtype), mask=mask)
    tl.store(cos + line + HALF, c.to(dtype), mask=mask)
    tl.store(sin + line, (-s).to(dtype), mask=mask)
    tl.store(sin + line + HALF, s.to(dtype), mask=mask)


# Pages and slots are rows of `ForwardBatch.columns`, so the number of tokens decides whether they are 16-byte aligned.
@triton.jit(do_not_specialize_on_alignment=["write_pages", "write_slots"])
def _place(
    qkv, q, kv, write_pages, write_slots, cos, sin, q_norm, k_norm, eps,
    qkv_stride, angle_stride, page_stride, value_offset,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, QUERY_STEP: tl.constexpr, PAGE: tl.constexpr,
    DIM: tl.constexpr, ROW: tl.constexpr, FORMAT: tl.constexpr,
    ROTARY: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, HAS_NORM: tl.constexpr,
    NORM_OFFSET: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Some heads of one token, each as pairs of dimensions that are rotated into each other.

    Pairs of dimensions that are not rotated come last, and have an angle of zero.
    """
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    half = tl.arange(0, BLOCK_HALF)
    HALF: tl.constexpr = DIM // 2
    HALF_ROTARY: tl.constexpr = ROTARY // 2
    is_half = half < HALF
    first, second = half, half + HALF
    if ROTARY < DIM:
        is_rotated = half < HALF_ROTARY
        first = tl.where(is_rotated, half, half + HALF_ROTARY)
        second = tl.where(is_rotated, half + HALF_ROTARY, half + HALF)
    cells = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & is_half[None, :]
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    source = head + (QUERY_STEP - 1) * tl.minimum(head, NUM_HEADS)
    at = qkv + token * qkv_stride + source[:, None] * DIM
    low = tl.load(at + first[None, :], mask=cells, other=0.0)
    high = tl.load(at + second[None, :], mask=cells, other=0.0)
    dtype = low.dtype
    x, y = low.to(tl.float32), high.to(tl.float32)
    if HAS_NORM:
        mean = (tl.sum(x * x, 1) + tl.sum(y * y, 1)) / DIM
        rsqrt = (1.0 / tl.sqrt(mean + eps))[:, None]
        x = scaled_by_norm(x, rsqrt, _either(q_norm, k_norm, is_query, first, is_half), dtype, NORM_OFFSET)
        y = scaled_by_norm(y, rsqrt, _either(q_norm, k_norm, is_query, second, is_half), dtype, NORM_OFFSET)
    angle = token * angle_stride + half + HALF_ROTARY  # the first half of sin is negated
    c = tl.load(cos + angle, mask=half < HALF_ROTARY, other=1.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=half < HALF_ROTARY, other=0.0).to(tl.float32)[None, :]
    turned_low = tl.where(is_value[:, None], low, (x * c - y * s).to(dtype))
    turned_high = tl.where(is_value[:, None], high, (y * c + x * s).to(dtype))

    to_q = q + (token * NUM_HEADS + head[:, None]) * DIM
    are_queries = cells & is_query[:, None]
    tl.store(to_q + first[None, :], turned_low, mask=are_queries)
    tl.store(to_q + second[None, :], turned_high, mask=are_queries)

    page, slot = tl.load(write_pages + token), tl.load(write_slots + token)
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    to_plane = key_row(kv, page, kv_head, slot, page_stride, PAGE, ROW) + tl.where(is_value, value_offset, 0)
    are_kept = cells & (head >= NUM_HEADS)[:, None] & (page >= 0)
    if FORMAT == 1:
        low_values, high_values = turned_low.to(tl.float32), turned_high.to(tl.float32)
        most = tl.maximum(tl.max(tl.abs(low_values), 1), tl.max(tl.abs(high_values), 1))
        inverse = (127.0 / tl.maximum(most, 1e-30))[:, None]
        turned_low = int8_codes(low_values, inverse).to(tl.int8)
        turned_high = int8_codes(high_values, inverse).to(tl.int8)
        scale_at = (to_plane + (ROW - 4)).to(tl.pointer_type(tl.float32), bitcast=True)
        is_stored = (head >= NUM_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (page >= 0)
        tl.store(scale_at, most / 127.0, mask=is_stored)
    elif FORMAT == 2:
        turned_low = e4m3_codes(turned_low.to(tl.float32)).to(tl.uint8)
        turned_high = e4m3_codes(turned_high.to(tl.float32)).to(tl.uint8)
    tl.store(to_plane[:, None] + first[None, :], turned_low, mask=are_kept)
    tl.store(to_plane[:, None] + second[None, :], turned_high, mask=are_kept)


@triton.jit
def _either(q_norm, k_norm, is_query, dims, is_half):
    """Return the weights of each head's norm, `[BLOCK_HEADS, BLOCK_HALF]`."""
    of_q = tl.load(q_norm + dims, mask=is_half, other=0.0).to(tl.float32)
    of_k = tl.load(k_norm + dims, mask=is_half, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], of_q[None, :], of_k[None, :])
