"""GatedDeltaNet of rows with several new tokens, in chunks of 64 positions (arXiv:2412.06464).

Within a chunk, let G be the running sum of the tokens' g, and A the strictly lower matrix with
`A_ij = beta_i exp(G_i - G_j) k_i . k_j`. With `T = (I + A)^-1`, `U = T diag(beta) V` and `W = T diag(beta exp G) K`,
the tokens' updates of the state are `D = U - W S` for the state S at the chunk's start. Three kernels follow:

1. `_prepare`: normalised keys, U, W and G of every chunk, all chunks at once.
2. `pass_state`: chunk after chunk, D and the state behind it: `S = exp(G_last) S + K^T diag(exp(G_last - G)) D`.
3. `_outputs`: `exp(G_i) q_i^T S + sum_(j <= i) exp(G_i - G_j) (q_i . k_j) d_j`, all chunks at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.model.gpu.gated_delta import decay_and_strength, unit_scale
from pdserve.model.gpu.runtime import chaining, power_of_2
from pdserve.model.gpu.state_rows import CHUNK, StateChunks, StatePlanes

LEAST_DIM = 16
"""Minimum width of a tensor-core product."""
STATE_COLUMNS, OUTPUT_COLUMNS = 32, 64
"""Columns of a state per program of `pass_state` and `_outputs`. `benchmarks/gpu/tilings.py` times alternatives."""
_WARPS = 4
SUB = 16
"""Tokens of the blocks on the diagonal of A that are inverted row by row."""


def delta_prefill(
    mixed: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, out: Tensor, planes: StatePlanes,
    rows: StateChunks,
) -> None:  # fmt: skip
    """Compute the new tokens of the rows with chunks, and update the rows' states; arguments as for `delta_decode`.

    A row whose first chunk here is not chunk 0 goes on from the state in its slot. Temporary memory is proportional to
    the number of chunks.
    """
    num_chunks = len(rows.chunks)
    if not num_chunks:
        return
    key_heads, heads, dk, dv = planes.num_key_heads, planes.num_value_heads, planes.key_dim, planes.value_dim

    def empty(*shape: int, dtype: torch.dtype = mixed.dtype) -> Tensor:
        return torch.empty(num_chunks, *shape, dtype=dtype, device=mixed.device)

    keys, w, u = empty(key_heads, CHUNK, dk), empty(heads, CHUNK, dk), empty(heads, CHUNK, dv)
    states, decay = empty(heads, dk, dv), empty(heads, CHUNK, dtype=torch.float32)
    block_k, all_v = max(LEAST_DIM, power_of_2(dk)), max(LEAST_DIM, power_of_2(dv))
    shape = {"KEY_HEADS": key_heads, "GROUP": heads // key_heads, "DK": dk, "DV": dv, "BLOCK_K": block_k}
    options = {"CHUNK": CHUNK, "PRECISION": "tf32x3" if mixed.dtype == torch.float32 else "tf32"}
    chained = chaining(mixed.device)
    of_rows = (rows.starts, rows.offsets, rows.chunks)
    _prepare[(num_chunks, heads)](
        mixed, a, b, a_log, dt_bias, keys, w, u, decay, *of_rows, mixed.stride(0), a.stride(0), b.stride(0),
        **shape, **options, BLOCK_V=min(64, all_v), SUB=SUB, num_warps=_WARPS, num_stages=2, **chained,
    )  # fmt: skip
    block = min(STATE_COLUMNS, all_v)
    pass_state[(rows.num_rows, heads, triton.cdiv(dv, block))](
        keys, w, u, decay, states, planes.state, rows.slots, rows.starts, rows.chunks, rows.chunk_starts,
        planes.state.stride(0), **shape, **options, BLOCK_V=block, BY_CHANNEL=False, num_warps=4, num_stages=2,
        **chained,
    )  # fmt: skip
    block = min(OUTPUT_COLUMNS, all_v)
    _outputs[(num_chunks, heads, triton.cdiv(dv, block))](
        mixed, keys, u, decay, states, out, *of_rows, mixed.stride(0), out.stride(0), dk**-0.5,
        **shape, **options, BLOCK_V=block, num_warps=4, num_stages=2, **chained,
    )  # fmt: skip


@triton.jit
def unit_lower_inverse(lower, SIZE: tl.constexpr, SUB: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of `I + lower`; `lower` float32 `[SIZE, SIZE]` is strictly lower, `SIZE <= 4 * SUB`.

    The blocks on the diagonal are inverted by substitution, all at once. The rest is nilpotent: with E the inverse of
    the diagonal blocks and `N = E * rest`, the result is `(I - N) (I + N^2) E`. Powers of whole chunks would lose all
    digits where keys repeat.
    """
    NUM: tl.constexpr = SIZE // SUB
    blocks = tl.arange(0, NUM)
    is_diagonal = blocks[:, None, None, None] == blocks[None, None, :, None]
    grid = tl.reshape(lower, (NUM, SUB, NUM, SUB))
    inner = tl.sum(tl.where(is_diagonal, grid, 0.0), 2)
    rows = tl.arange(0, SUB)
    one = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
    inverse = tl.broadcast_to(one[None, :, :], (NUM, SUB, SUB))
    for row in range(1, SUB):
        is_row = rows[None, :, None] == row
        line = tl.sum(tl.where(is_row, inner, 0.0), 1)
        known = tl.sum(line[:, :, None] * inverse, 1)
        inverse = tl.where(is_row, inverse - known[:, None, :], inverse)
    rest = tl.reshape(tl.where(is_diagonal, 0.0, grid), (SIZE, SIZE))
    diagonal = tl.reshape(tl.where(is_diagonal, inverse[:, :, None, :], 0.0), (SIZE, SIZE))
    step = tl.dot(diagonal, rest, input_precision=PRECISION)
    square = tl.dot(step, step, input_precision=PRECISION)
    found = diagonal + tl.dot(square, diagonal, input_precision=PRECISION)
    return found - tl.dot(step, found, input_precision=PRECISION)


@triton.jit
def chunk_tokens(chunk, starts, offsets, chunks, at, CHUNK: tl.constexpr):
    """Return the flat index of a chunk's first position, and which of its positions `at` are new tokens of its row.

    The index is of a token of another row, or of none, where the chunk's first positions are not new.
    """
    row = tl.load(chunks + 2 * chunk)
    first, last = tl.load(offsets + row), tl.load(offsets + row + 1)
    base = first + tl.load(chunks + 2 * chunk + 1) * CHUNK - tl.load(starts + row)
    token = base + at
    return base, (token >= first) & (token < last)


@triton.jit(do_not_specialize_on_alignment=["starts", "offsets"])  # the number of rows may decide it
def _prepare(
    mixed, a, b, a_log, dt_bias, keys, w, u, decay, starts, offsets, chunks, mixed_stride, a_stride, b_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One chunk and one value head. Positions that are not new tokens have keys, g and beta of zero."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk, head = tl.program_id(0), tl.program_id(1)
    key_head = head // GROUP
    at = tl.arange(0, CHUNK)
    base, is_token = chunk_tokens(chunk, starts, offsets, chunks, at, CHUNK)
    along_k = tl.arange(0, BLOCK_K)
    is_k = along_k < DK
    of_chunk = mixed + base * mixed_stride
    cells = is_token[:, None] & is_k[None, :]
    of_key = of_chunk + (KEY_HEADS + key_head) * DK
    raw = tl.load(of_key + at[:, None] * mixed_stride + along_k[None, :], mask=cells, other=0.0)
    dtype = raw.dtype
    wide = raw.to(tl.float32)
    key = (wide * unit_scale(tl.sum(wide * wide, 1))[:, None]).to(dtype)
    pair = chunk.to(tl.int64) * KEY_HEADS * GROUP + head
    if head % GROUP == 0:
        to_key = keys + (chunk.to(tl.int64) * KEY_HEADS + key_head) * CHUNK * DK
        tl.store(to_key + at[:, None] * DK + along_k[None, :], key, mask=is_k[None, :])
    g, beta = decay_and_strength(
        tl.load(a + base * a_stride + head + at * a_stride, mask=is_token, other=0.0).to(tl.float32),
        tl.load(b + base * b_stride + head + at * b_stride, mask=is_token, other=0.0).to(tl.float32),
        tl.load(a_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32),
    )  # fmt: skip
    total = tl.cumsum(tl.where(is_token, g, 0.0), 0)
    beta = tl.where(is_token, beta, 0.0)
    tl.store(decay + pair * CHUNK + at, total)
    products = tl.dot(key, tl.trans(key), input_precision=PRECISION)
    apart = tl.where(at[:, None] > at[None, :], total[:, None] - total[None, :], float("-inf"))
    lower = products * tl.exp(apart) * beta[:, None]
    inverse = unit_lower_inverse(lower, CHUNK, SUB, PRECISION).to(dtype)
    scaled = (key.to(tl.float32) * (beta * tl.exp(total))[:, None]).to(dtype)
    weights = tl.dot(inverse, scaled, input_precision=PRECISION)
    tl.store(w + pair * CHUNK * DK + at[:, None] * DK + along_k[None, :], weights.to(dtype), mask=is_k[None, :])
    for first in range(0, DV, BLOCK_V):
        along_v = first + tl.arange(0, BLOCK_V)
        is_v = along_v < DV
        of_value = of_chunk + 2 * KEY_HEADS * DK + head * DV
        value = tl.load(
            of_value + at[:, None] * mixed_stride + along_v[None, :], mask=is_token[:, None] & is_v[None, :], other=0.0
        )  # fmt: skip
        value = (value.to(tl.float32) * beta[:, None]).to(dtype)
        found = tl.dot(inverse, value, input_precision=PRECISION)
        tl.store(u + pair * CHUNK * DV + at[:, None] * DV + along_v[None, :], found.to(dtype), mask=is_v[None, :])


@triton.jit(do_not_specialize_on_alignment=["slots", "starts"])
def pass_state(
    keys, w, u, decay, states, state, slots, starts, chunks, chunk_starts, slot_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, BY_CHANNEL: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One row, one value head and one block of the state's columns. `u` becomes D; `states` are the chunks' first.

    With BY_CHANNEL `decay` is G of each channel, `[T, Hv, CHUNK, DK]`, and `keys` decay to the end of their chunk.
    """
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1)
    of_row = chunk_starts + tl.program_id(0)
    first, last = tl.load(of_row).to(tl.int64), tl.load(of_row + 1).to(tl.int64)
    row, number = tl.load(chunks + 2 * first), tl.load(chunks + 2 * first + 1)
    slot = tl.load(slots + row)
    has_state = (slot >= 0) & ((tl.load(starts + row) > 0) | (number > 0))
    at = tl.arange(0, CHUNK)
    along_k = tl.arange(0, BLOCK_K)
    along_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_k, is_v = (along_k < DK)[None, :], (along_v < DV)[None, :]
    cells = (along_k < DK)[:, None] & is_v
    within = along_k[:, None] * DV + along_v[None, :]
    of_slot = state + slot * slot_stride + head * DK * DV + within
    values = tl.load(of_slot, mask=cells & has_state, other=0.0)
    for chunk in range(first, last):
        pair = chunk * KEY_HEADS * GROUP + head
        of_key = keys + (chunk * KEY_HEADS + head // GROUP) * CHUNK * DK
        narrow = values.to(keys.dtype.element_ty)
        tl.store(states + pair * DK * DV + within, narrow, mask=cells)
        weights = tl.load(w + pair * CHUNK * DK + at[:, None] * DK + along_k[None, :], mask=is_k, other=0.0)
        of_delta = u + pair * CHUNK * DV + at[:, None] * DV + along_v[None, :]
        delta = tl.load(of_delta, mask=is_v, other=0.0).to(tl.float32)
        delta -= tl.dot(weights, narrow, input_precision=PRECISION)
        tl.store(of_delta, delta.to(narrow.dtype), mask=is_v)
        key = tl.load(of_key + at[:, None] * DK + along_k[None, :], mask=is_k, other=0.0)
        if BY_CHANNEL:
            whole = tl.load(decay + (pair * CHUNK + CHUNK - 1) * DK + along_k, mask=along_k < DK, other=0.0)
            values *= tl.exp(whole)[:, None]
        else:
            total = tl.load(decay + pair * CHUNK + at)
            whole = tl.load(decay + pair * CHUNK + CHUNK - 1)
            delta *= tl.exp(whole - total)[:, None]
            values *= tl.exp(whole)
        values = tl.dot(tl.trans(key), delta.to(narrow.dtype), values, input_precision=PRECISION)
    tl.store(of_slot, values, mask=cells & (slot >= 0))


@triton.jit(do_not_specialize_on_alignment=["starts", "offsets"])
def _outputs(
    mixed, keys, delta, decay, states, out, starts, offsets, chunks, mixed_stride, out_stride, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One chunk, one value head and one block of columns."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    chunk, head = tl.program_id(0), tl.program_id(1)
    key_head = head // GROUP
    at = tl.arange(0, CHUNK)
    base, is_token = chunk_tokens(chunk, starts, offsets, chunks, at, CHUNK)
    pair = chunk.to(tl.int64) * KEY_HEADS * GROUP + head
    along_k = tl.arange(0, BLOCK_K)
    along_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_k, is_v = along_k < DK, along_v < DV
    of_query = mixed + base * mixed_stride + key_head * DK
    cells = is_token[:, None] & is_k[None, :]
    raw = tl.load(of_query + at[:, None] * mixed_stride + along_k[None, :], mask=cells, other=0.0)
    dtype = raw.dtype
    wide = raw.to(tl.float32)
    query = (wide * (unit_scale(tl.sum(wide * wide, 1)) * scale)[:, None]).to(dtype)
    of_key = keys + (chunk.to(tl.int64) * KEY_HEADS + key_head) * CHUNK * DK
    key = tl.load(of_key + at[:, None] * DK + along_k[None, :], mask=is_k[None, :], other=0.0)
    total = tl.load(decay + pair * CHUNK + at)
    apart = tl.where(at[:, None] >= at[None, :], total[:, None] - total[None, :], float("-inf"))
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * tl.exp(apart)
    values = tl.load(
        states + pair * DK * DV + along_k[:, None] * DV + along_v[None, :], mask=is_k[:, None] & is_v[None, :],
        other=0.0,
    )  # fmt: skip
    found = tl.dot(query, values, input_precision=PRECISION) * tl.exp(total)[:, None]
    of_delta = delta + pair * CHUNK * DV
    updates = tl.load(of_delta + at[:, None] * DV + along_v[None, :], mask=is_v[None, :], other=0.0)
    found = tl.dot(scores.to(dtype), updates, found, input_precision=PRECISION)
    to = out + base * out_stride + head * DV
    tl.store(
        to + at[:, None] * out_stride + along_v[None, :],
        found.to(out.dtype.element_ty),
        mask=is_token[:, None] & is_v[None, :],
    )
