"""GatedDeltaNet on the device: the recurrent step of rows with one new token, and the norm behind every layer.

A value head has a state S `[dk, dv]`. With a token's decay `exp(g)`, strength `beta`, key k and value v, the step is
`S *= exp(g); d = (v - S^T k) * beta; S += k d^T; out = S^T q` (arXiv:2412.06464). In Kimi Delta Attention
(arXiv:2510.26692) each row of S has a g of its own: with BY_CHANNEL g is a vector of dk values.
`gated_delta_prefill.py` and `channel_delta_prefill.py` compute rows with several new tokens in chunks.

`delta_verify` computes rows with drafts by the same step. It does not write the state, and leaves k, d and `exp(g)` of
each token pending; `fold_states` repeats the steps of the accepted ones on the state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.model.gpu.runtime import chaining, num_cores, power_of_2
from pdserve.model.gpu.state_rows import DecodeStateRows, FoldRows, StatePlanes, VerifyRows

_BLOCK_V = 32
_SMALL_BLOCK_V = 16
"""Columns of a state per program. `benchmarks/gpu/tilings.py --hybrid` times alternatives."""
_WARPS = 4
_HEADS_PER_NORM = 4
Changes = tuple[Tensor, Tensor, Tensor]
"""What pending tokens change, at most P of each slot, in float32: keys `[S, P, Hk, dk]` of length one, deltas
`[S, P, Hv, dv]`, and decays `exp(g)` `[S, P, Hv]`; with a decay for each row of a state `[S, P, Hv, dk]`.
"""


def delta_decode(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    out: Tensor,
    planes: StatePlanes,
    rows: DecodeStateRows,
) -> None:
    """Compute the one new token of each row, and update the row's state in place.

    `mixed` `[N, 2 * Hk * dk + Hv * dv]`: q, k and v of each token behind the convolution. `a`, `b` `[N, Hv]`: the
    projections to decay and strength. `a_log`, `dt_bias` `[Hv]`. `out` `[N, Hv, dv]`. Rows of `mixed`, `a`, `b` and
    `out` may lie apart. Value head i uses key head `i // (Hv // Hk)`. With a decay for each row of a state `a` is
    `[N, Hv * dk]` and `dt_bias` `[Hv * dk]`.
    """
    num_rows, num_heads, dk, dv = len(rows.slots), planes.num_value_heads, planes.key_dim, planes.value_dim
    if num_rows:
        block = _block_v(num_rows * num_heads, dv, mixed.device)
        _delta_decode[(num_rows, num_heads, triton.cdiv(dv, block))](
            mixed, a, b, a_log, dt_bias, out, planes.state, rows.slots, rows.starts, rows.tokens,
            mixed.stride(0), a.stride(0), b.stride(0), out.stride(0), planes.state.stride(0), dk**-0.5,
            KEY_HEADS=planes.num_key_heads, GROUP=num_heads // planes.num_key_heads, DK=dk, DV=dv,
            BLOCK_K=power_of_2(dk), BLOCK_V=block, BY_CHANNEL=len(dt_bias) > len(a_log), num_warps=_WARPS,
            **chaining(mixed.device),
        )  # fmt: skip


def delta_verify(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    out: Tensor,
    planes: StatePlanes,
    changes: Changes,
    rows: VerifyRows,
) -> None:
    """Compute the tokens of rows with drafts, and leave what they change; arguments as for `delta_decode`."""
    num_rows, num_heads, dk, dv = len(rows.slots), planes.num_value_heads, planes.key_dim, planes.value_dim
    if num_rows:
        block = _block_v(num_rows * num_heads, dv, mixed.device)
        _delta_verify[(num_rows, num_heads, triton.cdiv(dv, block))](
            mixed, a, b, a_log, dt_bias, out, planes.state, *changes, rows.slots, rows.tokens, rows.counts,
            mixed.stride(0), a.stride(0), b.stride(0), out.stride(0), planes.state.stride(0), changes[0].shape[1],
            dk**-0.5,
            KEY_HEADS=planes.num_key_heads, GROUP=num_heads // planes.num_key_heads, DK=dk, DV=dv,
            BLOCK_K=power_of_2(dk), BLOCK_V=block, BY_CHANNEL=len(dt_bias) > len(a_log), num_warps=_WARPS,
        )  # fmt: skip


def fold_states(planes: StatePlanes, changes: Changes, rows: FoldRows) -> None:
    """Fold pending tokens into the states of their slots."""
    num_rows, num_heads, dk, dv = len(rows.slots), planes.num_value_heads, planes.key_dim, planes.value_dim
    if num_rows:
        block = _block_v(num_rows * num_heads, dv, planes.state.device)
        _fold_states[(num_rows, num_heads, triton.cdiv(dv, block))](
            planes.state, *changes, rows.slots, rows.counts, planes.state.stride(0), changes[0].shape[1],
            KEY_HEADS=planes.num_key_heads, GROUP=num_heads // planes.num_key_heads, DK=dk, DV=dv,
            BLOCK_K=power_of_2(dk), BLOCK_V=block, BY_CHANNEL=changes[2].dim() == 4, num_warps=_WARPS,
        )  # fmt: skip


def _block_v(num_pairs: int, value_dim: int, device: torch.device) -> int:
    """Return the columns of a state per program. With few pairs of row and head, more programs share a state.

    There are two values, which steps with the fewest and with the most rows have, so start-up compiles both.
    """
    is_small = num_pairs * triton.cdiv(value_dim, _BLOCK_V) < num_cores(device)
    return min(_SMALL_BLOCK_V if is_small else _BLOCK_V, power_of_2(value_dim))


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, is_silu: bool = True) -> Tensor:
    """Normalise the heads of `x`, scale by `weight` `[dv]`, and multiply by `silu(gate)`: `[N, Hv, dv]` each.

    Without `is_silu` the factor is `sigmoid(gate)`. The last two dimensions of both are contiguous; tokens may lie
    apart. As in the models' own code, products are rounded to the dtype of `x` one by one with `is_silu`, else only at
    the end. Returns the shape and dtype of `x`.
    """
    num_tokens, num_heads, dim = x.shape
    out: Tensor = torch.empty(num_tokens, num_heads, dim, dtype=x.dtype, device=x.device)
    if num_tokens:
        _gated_norm[(num_tokens, triton.cdiv(num_heads, _HEADS_PER_NORM))](
            x, gate, out, weight, eps, x.stride(0), gate.stride(0), num_heads,
            DIM=dim, BLOCK=power_of_2(dim), HEADS=_HEADS_PER_NORM, SILU=is_silu, num_warps=4,
            **chaining(x.device),
        )  # fmt: skip
    return out


@triton.jit
def decay_and_strength(a, b, a_log, dt_bias):
    """Return g, the logarithm of the decay, and beta. Arguments and results are float32."""
    return log_decay_of(a, a_log, dt_bias), tl.sigmoid(b)


@triton.jit
def log_decay_of(a, a_log, dt_bias):
    """Return g, the logarithm of the decay. Arguments and result are float32."""
    x = a + dt_bias
    y = tl.exp(tl.minimum(x, 20.0))
    grown = 1.0 + y
    steps = grown - 1.0  # what is left of y; the quotient undoes the rounding
    soft = tl.where(steps == 0.0, y, tl.log(grown) * (y / tl.where(steps == 0.0, 1.0, steps)))
    return -tl.exp(a_log) * tl.where(x > 20.0, x, soft)


@triton.jit
def _of_head(values, head, along_k, DK: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """Return a head's item of `values`, or with BY_CHANNEL its items for the rows of a state `[BLOCK_K]`: float32."""
    if BY_CHANNEL:
        found = tl.load(values + head * DK + along_k, mask=along_k < DK, other=0.0)
    else:
        found = tl.load(values + head)
    return found.to(tl.float32)


@triton.jit
def _decayed(values, decay, BY_CHANNEL: tl.constexpr):
    """Multiply the rows of a state by `decay`, a scalar, or with BY_CHANNEL `[BLOCK_K]`."""
    return values * (decay[:, None] if BY_CHANNEL else decay)


@triton.jit
def unit_scale(squares):
    """Return the factor that gives a head of this sum of squares a length of one."""
    return 1.0 / tl.sqrt(squares + 1e-6)


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "tokens"])
def _delta_decode(
    mixed, a, b, a_log, dt_bias, out, state, slots, starts, tokens,
    mixed_stride, a_stride, b_stride, out_stride, slot_stride, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_CHANNEL: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One row, one value head and one block of the state's columns."""
    row, head = tl.program_id(0), tl.program_id(1)
    slot, start, token = tl.load(slots + row), tl.load(starts + row), tl.load(tokens + row)
    along_k = tl.arange(0, BLOCK_K)
    along_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_k, is_v = along_k < DK, along_v < DV
    cells = is_k[:, None] & is_v[None, :] & (slot >= 0)
    at = state + slot * slot_stride + head * DK * DV + along_k[:, None] * DV + along_v[None, :]
    values = tl.load(at, mask=cells & (start > 0), other=0.0)
    log_rate = tl.load(a_log + head).to(tl.float32)
    bias = _of_head(dt_bias, head, along_k, DK, BY_CHANNEL)
    if CHAINED:  # slots, weights and states were written before the awaited kernel began
        tl.extra.cuda.gdc_wait()
    of_q = mixed + token * mixed_stride + (head // GROUP) * DK
    q = tl.load(of_q + along_k, mask=is_k, other=0.0).to(tl.float32)
    k = tl.load(of_q + KEY_HEADS * DK + along_k, mask=is_k, other=0.0).to(tl.float32)
    of_v = mixed + token * mixed_stride + 2 * KEY_HEADS * DK + head * DV
    v = tl.load(of_v + along_v, mask=is_v, other=0.0).to(tl.float32)
    g, beta = decay_and_strength(
        _of_head(a + token * a_stride, head, along_k, DK, BY_CHANNEL),
        tl.load(b + token * b_stride + head).to(tl.float32), log_rate, bias,
    )  # fmt: skip
    if CHAINED:  # only now: the next kernel's programs must find all multiprocessors equally free
        tl.extra.cuda.gdc_launch_dependents()
    q *= unit_scale(tl.sum(q * q, 0)) * scale
    k *= unit_scale(tl.sum(k * k, 0))
    values = _decayed(values, tl.exp(g), BY_CHANNEL)
    delta = (v - tl.sum(values * k[:, None], 0)) * beta
    values += k[:, None] * delta[None, :]
    found = tl.sum(values * q[:, None], 0)
    tl.store(out + token * out_stride + head * DV + along_v, found.to(out.dtype.element_ty), mask=is_v)
    tl.store(at, values, mask=cells)


@triton.jit
def _delta_verify(
    mixed, a, b, a_log, dt_bias, out, state, keys, deltas, decays, slots, tokens, counts,
    mixed_stride, a_stride, b_stride, out_stride, slot_stride, most, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """One row with drafts, one value head and one block of the state's columns: `_delta_decode` token by token."""
    row, head = tl.program_id(0), tl.program_id(1)
    slot, first, count = tl.load(slots + row), tl.load(tokens + row), tl.load(counts + row)
    along_k = tl.arange(0, BLOCK_K)
    along_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_k, is_v = along_k < DK, along_v < DV
    at = state + slot * slot_stride + head * DK * DV + along_k[:, None] * DV + along_v[None, :]
    values = tl.load(at, mask=is_k[:, None] & is_v[None, :], other=0.0)
    log_rate = tl.load(a_log + head).to(tl.float32)
    bias = _of_head(dt_bias, head, along_k, DK, BY_CHANNEL)
    is_first = tl.program_id(2) == 0
    for number in range(count):
        token, line = first + number, slot * most + number
        of_q = mixed + token * mixed_stride + (head // GROUP) * DK
        q = tl.load(of_q + along_k, mask=is_k, other=0.0).to(tl.float32)
        k = tl.load(of_q + KEY_HEADS * DK + along_k, mask=is_k, other=0.0).to(tl.float32)
        of_v = mixed + token * mixed_stride + 2 * KEY_HEADS * DK + head * DV
        v = tl.load(of_v + along_v, mask=is_v, other=0.0).to(tl.float32)
        g, beta = decay_and_strength(
            _of_head(a + token * a_stride, head, along_k, DK, BY_CHANNEL),
            tl.load(b + token * b_stride + head).to(tl.float32), log_rate, bias,
        )  # fmt: skip
        q *= unit_scale(tl.sum(q * q, 0)) * scale
        k *= unit_scale(tl.sum(k * k, 0))
        decay = tl.exp(g)
        values = _decayed(values, decay, BY_CHANNEL)
        delta = (v - tl.sum(values * k[:, None], 0)) * beta
        values += k[:, None] * delta[None, :]
        found = tl.sum(values * q[:, None], 0)
        tl.store(out + token * out_stride + head * DV + along_v, found.to(out.dtype.element_ty), mask=is_v)
        tl.store(deltas + (line * KEY_HEADS * GROUP + head) * DV + along_v, delta, mask=is_v)
        of_decay = decays + (line * KEY_HEADS * GROUP + head) * (DK if BY_CHANNEL else 1)
        if BY_CHANNEL:
            tl.store(of_decay + along_k, decay, mask=is_k & is_first)
        else:
            tl.store(of_decay, decay, mask=is_first)
        of_key = keys + (line * KEY_HEADS + head // GROUP) * DK
        tl.store(of_key + along_k, k, mask=is_k & is_first & (head % GROUP == 0))


@triton.jit
def _fold_states(
    state, keys, deltas, decays, slots, counts, slot_stride, most,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """One slot, one value head and one block of the state's columns."""
    row, head = tl.program_id(0), tl.program_id(1)
    slot, count = tl.load(slots + row), tl.load(counts + row)
    along_k = tl.arange(0, BLOCK_K)
    along_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_k, is_v = along_k < DK, along_v < DV
    cells = is_k[:, None] & is_v[None, :]
    at = state + slot * slot_stride + head * DK * DV + along_k[:, None] * DV + along_v[None, :]
    values = tl.load(at, mask=cells, other=0.0)
    for number in range(count):
        line = slot * most + number
        k = tl.load(keys + (line * KEY_HEADS + head // GROUP) * DK + along_k, mask=is_k, other=0.0)
        delta = tl.load(deltas + (line * KEY_HEADS * GROUP + head) * DV + along_v, mask=is_v, other=0.0)
        decay = _of_head(decays, line * KEY_HEADS * GROUP + head, along_k, DK, BY_CHANNEL)
        values = _decayed(values, decay, BY_CHANNEL)
        values += k[:, None] * delta[None, :]
    tl.store(at, values, mask=cells)


@triton.jit
def _gated_norm(
    x, gate, out, weight, eps, x_stride, gate_stride, num_heads,
    DIM: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, SILU: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, BLOCK)
    cells = (head < num_heads)[:, None] & (dims < DIM)[None, :]
    factors = tl.load(weight + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = head[:, None] * DIM + dims[None, :]
    values = tl.load(x + token * x_stride + at, mask=cells, other=0.0)
    gates = tl.load(gate + token * gate_stride + at, mask=cells, other=0.0).to(tl.float32)
    wide = values.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / DIM + eps)
    normed = wide * scale[:, None]
    if SILU:
        scaled = normed.to(values.dtype).to(tl.float32) * factors[None, :]
        scaled = scaled.to(values.dtype).to(tl.float32) * (gates * tl.sigmoid(gates))
    else:
        scaled = normed * factors[None, :] * tl.sigmoid(gates)
    tl.store(out + token * num_heads * DIM + at, scaled.to(values.dtype), mask=cells)
