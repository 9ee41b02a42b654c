"""Kimi Delta Attention of rows with several new tokens, in chunks of 64 positions (arXiv:2510.26692).

Each of the dk rows of a state has a decay of its own. Within a chunk, let `G_i` `[dk]` be the running sum of the
tokens' g, and `<x, y>_ij` the sum over channels c of `exp(G_ic - G_jc) x_ic y_jc`. A is the strictly lower matrix with
`A_ij = beta_i <k, k>_ij`. With `T = (I + A)^-1`, `U = T diag(beta) V` and `W = T diag(beta) (exp(G) * K)`, the tokens'
updates of the state are `D = U - W S` for the state S at the chunk's start. Five kernels follow:

1. `_prepare`: normalised keys and G.
2. `_scores`: `<q, k>_ij` with `j <= i`, and `<k, k>_ij` with `j < i`, for parts of 16 tokens.
3. `_updates`: U, W, and the keys decayed to the chunk's end, `exp(G_last - G) * K`.
4. `pass_state`: chunk after chunk, D and the state behind it: `S = diag(exp(G_last)) S + (exp(G_last - G) * K)^T D`.
5. `_outputs`: `(exp(G_i) * q_i)^T S + sum_(j <= i) <q, k>_ij d_j`.

All but `pass_state` compute all chunks at once. `exp(-G_j)` alone may overflow. So the tokens of a part meet the keys
before the part by way of its first token r: the weight is `exp(G_i - G_r) exp(G_r - G_j)`, whose factors are at most 1.
Within a part the weights `exp(G_i - G_j)` are computed key by key.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.model.gpu.gated_delta import log_decay_of, unit_scale
from pdserve.model.gpu.gated_delta_prefill import (
    LEAST_DIM,
    OUTPUT_COLUMNS,
    STATE_COLUMNS,
    SUB,
    chunk_tokens,
    pass_state,
    unit_lower_inverse,
)
from pdserve.model.gpu.runtime import chaining, power_of_2
from pdserve.model.gpu.state_rows import CHUNK, StateChunks, StatePlanes

_PART = 16
"""Tokens of a part."""
_WARPS = 4


def channel_delta_prefill(
    mixed: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, out: Tensor, planes: StatePlanes,
    rows: StateChunks,
) -> None:  # fmt: skip
    """Compute the new tokens of the rows with chunks, and update the rows' states; arguments as for `delta_decode`.

    `a` is `[N, Hv * dk]` and `dt_bias` `[Hv * dk]`. A row whose first chunk here is not chunk 0 goes on from the state
    in its slot. Temporary memory is proportional to the number of chunks.
    """
    num_chunks = len(rows.chunks)
    if not num_chunks:
        return
    key_heads, heads, dk, dv = planes.num_key_heads, planes.num_value_heads, planes.key_dim, planes.value_dim

    def empty(*shape: int, dtype: torch.dtype = mixed.dtype) -> Tensor:
        return torch.empty(num_chunks, heads, *shape, dtype=dtype, device=mixed.device)

    keys, w, u, states = empty(CHUNK, dk), empty(CHUNK, dk), empty(CHUNK, dv), empty(dk, dv)
    scores, lower = empty(CHUNK, CHUNK), empty(CHUNK, CHUNK, dtype=torch.float32)
    decay = empty(CHUNK, dk, dtype=torch.float32)
    all_v = max(LEAST_DIM, power_of_2(dv))
    size = {"DK": dk, "BLOCK_K": max(LEAST_DIM, power_of_2(dk)), "CHUNK": CHUNK}
    shape = {"KEY_HEADS": key_heads, "GROUP": heads // key_heads, **size}
    precision = {"PRECISION": "tf32x3" if mixed.dtype == torch.float32 else "tf32"}
    launch = {"num_warps": _WARPS, "num_stages": 2, **chaining(mixed.device)}
    of_rows = (rows.starts, rows.offsets, rows.chunks)
    _prepare[(num_chunks, heads)](
        mixed, a, a_log, dt_bias, keys, decay, *of_rows, mixed.stride(0), a.stride(0), **shape, **launch
    )
    _scores[(num_chunks, heads, CHUNK // _PART)](
        mixed, keys, decay, scores, lower, *of_rows, mixed.stride(0), dk**-0.5,
        **shape, **precision, PART=_PART, **launch,
    )  # fmt: skip
    _updates[(num_chunks, heads)](
        mixed, b, keys, decay, lower, w, u, *of_rows, mixed.stride(0), b.stride(0),
        **shape, **precision, DV=dv, BLOCK_V=min(64, all_v), SUB=SUB, **launch,
    )  # fmt: skip
    block = min(STATE_COLUMNS, all_v)
    pass_state[(rows.num_rows, heads, triton.cdiv(dv, block))](
        keys, w, u, decay, states, planes.state, rows.slots, rows.starts, rows.chunks, rows.chunk_starts,
        planes.state.stride(0), KEY_HEADS=heads, GROUP=1, **size, **precision, DV=dv, BLOCK_V=block, BY_CHANNEL=True,
        **launch,
    )  # fmt: skip
    block = min(OUTPUT_COLUMNS, all_v)
    _outputs[(num_chunks, heads, triton.cdiv(dv, block))](
        mixed, u, decay, scores, states, out, *of_rows, mixed.stride(0), out.stride(0), dk**-0.5,
        **shape, **precision, DV=dv, BLOCK_V=block, **launch,
    )  # fmt: skip


@triton.jit
def _unit_rows(rows, stride, at, along_k, is_token, DK: tl.constexpr):
    """Load heads of DK items at the lines `at` of `rows`, as float32 of length one; zeros where not `is_token`."""
    cells = is_token[:, None] & (along_k < DK)[None, :]
    wide = tl.load(rows + at[:, None] * stride + along_k[None, :], mask=cells, other=0.0).to(tl.float32)
    return wide * unit_scale(tl.sum(wide * wide, 1))[:, None]


@triton.jit(do_not_specialize_on_alignment=["starts", "offsets"])  # the number of rows may decide it
def _prepare(
    mixed, a, a_log, dt_bias, keys, decay, starts, offsets, chunks, mixed_stride, a_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One chunk and one value head. Positions that are not new tokens have keys and g of zero."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk, head = tl.program_id(0), tl.program_id(1)
    at, along_k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    base, is_token = chunk_tokens(chunk, starts, offsets, chunks, at, CHUNK)
    is_k = (along_k < DK)[None, :]
    within = (chunk.to(tl.int64) * KEY_HEADS * GROUP + head) * CHUNK * DK + at[:, None] * DK + along_k[None, :]
    raw = mixed + base * mixed_stride + (KEY_HEADS + head // GROUP) * DK
    key = _unit_rows(raw, mixed_stride, at, along_k, is_token, DK)
    tl.store(keys + within, key.to(keys.dtype.element_ty), mask=is_k)
    of_a = a + base * a_stride + head * DK + at[:, None] * a_stride + along_k[None, :]
    bias = tl.load(dt_bias + head * DK + along_k, mask=along_k < DK, other=0.0).to(tl.float32)
    g = log_decay_of(
        tl.load(of_a, mask=is_token[:, None] & is_k, other=0.0).to(tl.float32),
        tl.load(a_log + head).to(tl.float32), bias[None, :],
    )  # fmt: skip
    tl.store(decay + within, tl.cumsum(tl.where(is_token[:, None], g, 0.0), 0), mask=is_k)


@triton.jit(do_not_specialize_on_alignment=["starts", "offsets"])
def _scores(
    mixed, keys, decay, scores, lower, starts, offsets, chunks, mixed_stride, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
    PART: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One chunk, one value head and one part: the part's lines of `scores` and `lower`, `[CHUNK, CHUNK]` each."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk, head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2) * PART
    at, along_k = first + tl.arange(0, PART), tl.arange(0, BLOCK_K)
    base, is_token = chunk_tokens(chunk, starts, offsets, chunks, at, CHUNK)
    is_k = along_k < DK
    pair = chunk.to(tl.int64) * KEY_HEADS * GROUP + head
    of_key, of_decay = keys + pair * CHUNK * DK, decay + pair * CHUNK * DK
    within = at[:, None] * DK + along_k[None, :]
    raw = mixed + base * mixed_stride + (head // GROUP) * DK
    query = _unit_rows(raw, mixed_stride, at, along_k, is_token, DK) * scale
    key = tl.load(of_key + within, mask=is_k[None, :], other=0.0).to(tl.float32)
    total = tl.load(of_decay + within, mask=is_k[None, :], other=0.0)
    dtype = keys.dtype.element_ty
    line = pair * CHUNK * CHUNK + at[:, None] * CHUNK
    entry = tl.load(of_decay + first * DK + along_k, mask=is_k, other=0.0)
    since = tl.exp(total - entry[None, :])
    query_since, key_since = (query * since).to(dtype), (key * since).to(dtype)
    for start in range(0, first, PART):
        column = start + tl.arange(0, PART)
        before = column[:, None] * DK + along_k[None, :]
        apart = entry[None, :] - tl.load(of_decay + before, mask=is_k[None, :], other=0.0)
        earlier = tl.load(of_key + before, mask=is_k[None, :], other=0.0).to(tl.float32) * tl.exp(apart)
        earlier = tl.trans(earlier.to(dtype))
        of_query = tl.dot(query_since, earlier, input_precision=PRECISION)
        tl.store(scores + line + column[None, :], of_query.to(dtype))
        tl.store(lower + line + column[None, :], tl.dot(key_since, earlier, input_precision=PRECISION))
    of_query, of_own = tl.zeros((PART, PART), tl.float32), tl.zeros((PART, PART), tl.float32)
    for number in range(first, first + PART):
        one = tl.load(of_key + number * DK + along_k, mask=is_k, other=0.0).to(tl.float32)
        apart = total - tl.load(of_decay + number * DK + along_k, mask=is_k, other=0.0)[None, :]
        weights = tl.exp(tl.minimum(apart, 0.0)) * one[None, :]  # tokens before this key are masked below
        is_column = at[None, :] == number
        of_query = tl.where(is_column & (at >= number)[:, None], tl.sum(query * weights, 1)[:, None], of_query)
        of_own = tl.where(is_column & (at > number)[:, None], tl.sum(key * weights, 1)[:, None], of_own)
    tl.store(scores + line + at[None, :], of_query.to(dtype))
    tl.store(lower + line + at[None, :], of_own)
    for start in range(first + PART, CHUNK, PART):
        column = start + tl.arange(0, PART)
        tl.store(scores + line + column[None, :], tl.zeros((PART, PART), dtype))
        tl.store(lower + line + column[None, :], tl.zeros((PART, PART), tl.float32))


@triton.jit(do_not_specialize_on_alignment=["starts", "offsets"])
def _updates(
    mixed, b, keys, decay, lower, w, u, starts, offsets, chunks, mixed_stride, b_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One chunk and one value head. `keys` become those that are decayed to the chunk's end."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk, head = tl.program_id(0), tl.program_id(1)
    at, along_k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    base, is_token = chunk_tokens(chunk, starts, offsets, chunks, at, CHUNK)
    is_k = along_k < DK
    pair = chunk.to(tl.int64) * KEY_HEADS * GROUP + head
    strength = tl.load(b + base * b_stride + head + at * b_stride, mask=is_token, other=0.0).to(tl.float32)
    beta = tl.where(is_token, tl.sigmoid(strength), 0.0)
    system = tl.load(lower + pair * CHUNK * CHUNK + at[:, None] * CHUNK + at[None, :]) * beta[:, None]
    dtype = keys.dtype.element_ty
    inverse = unit_lower_inverse(system, CHUNK, SUB, PRECISION).to(dtype)
    within = pair * CHUNK * DK + at[:, None] * DK + along_k[None, :]
    key = tl.load(keys + within, mask=is_k[None, :], other=0.0).to(tl.float32)
    total = tl.load(decay + within, mask=is_k[None, :], other=0.0)
    whole = tl.load(decay + (pair * CHUNK + CHUNK - 1) * DK + along_k, mask=is_k, other=0.0)
    weights = tl.dot(inverse, (key * tl.exp(total) * beta[:, None]).to(dtype), input_precision=PRECISION)
    tl.store(w + within, weights.to(dtype), mask=is_k[None, :])
    tl.store(keys + within, (key * tl.exp(whole[None, :] - total)).to(dtype), mask=is_k[None, :])
    of_value = mixed + base * mixed_stride + 2 * KEY_HEADS * DK + head * DV
    for first in range(0, DV, BLOCK_V):
        along_v = first + tl.arange(0, BLOCK_V)
        is_v = (along_v < DV)[None, :]
        value = tl.load(
            of_value + at[:, None] * mixed_stride + along_v[None, :], mask=is_token[:, None] & is_v, other=0.0
        )
        value = (value.to(tl.float32) * beta[:, None]).to(dtype)
        found = tl.dot(inverse, value, input_precision=PRECISION)
        tl.store(u + pair * CHUNK * DV + at[:, None] * DV + along_v[None, :], found.to(dtype), mask=is_v)


@triton.jit(do_not_specialize_on_alignment=["starts", "offsets"])
def _outputs(
    mixed, delta, decay, scores, states, out, starts, offsets, chunks, mixed_stride, out_stride, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One chunk, one value head and one block of columns."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk, head = tl.program_id(0), tl.program_id(1)
    at, along_k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    along_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    base, is_token = chunk_tokens(chunk, starts, offsets, chunks, at, CHUNK)
    is_k, is_v = along_k < DK, (along_v < DV)[None, :]
    pair = chunk.to(tl.int64) * KEY_HEADS * GROUP + head
    raw = mixed + base * mixed_stride + (head // GROUP) * DK
    query = _unit_rows(raw, mixed_stride, at, along_k, is_token, DK) * scale
    of_decay = decay + pair * CHUNK * DK + at[:, None] * DK + along_k[None, :]
    total = tl.load(of_decay, mask=is_k[None, :], other=0.0)
    dtype = states.dtype.element_ty
    of_state = states + pair * DK * DV + along_k[:, None] * DV + along_v[None, :]
    values = tl.load(of_state, mask=is_k[:, None] & is_v, other=0.0)
    found = tl.dot((query * tl.exp(total)).to(dtype), values, input_precision=PRECISION)
    weights = tl.load(scores + pair * CHUNK * CHUNK + at[:, None] * CHUNK + at[None, :])
    updates = tl.load(delta + pair * CHUNK * DV + at[:, None] * DV + along_v[None, :], mask=is_v, other=0.0)
    found = tl.dot(weights, updates, found, input_precision=PRECISION)
    to = out + base * out_stride + head * DV + at[:, None] * out_stride + along_v[None, :]
    tl.store(to, found.to(out.dtype.element_ty), mask=is_token[:, None] & is_v)
