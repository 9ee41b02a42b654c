"""RMS norm, fused add and RMS norm, gates by SiLU, GELU or a sigmoid, one pass over memory each.

For `layers/triton_kernels.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.model.gpu.attention_math import scaled_by_norm
from pdserve.model.gpu.runtime import chaining, power_of_2

_BLOCK_GATE = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Normalise `x` `[N, width]` in float32 and scale by `weight + offset` `[width]`; rows may have a stride."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, x, out, weight, eps, offset, adds=False)
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Compute `rms_norm` of `x + delta`, and overwrite `x` with the sum."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, delta, out, weight, eps, offset, adds=True)
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `silu(gate) * up`, `[N, width]` each; rows may have a stride."""
    return _gated(gate, up, is_gelu=False)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `gelu(gate) * up` with GELU's approximation by tanh; see `swiglu`."""
    return _gated(gate, up, is_gelu=True)


def _gated(gate: Tensor, up: Tensor, *, is_gelu: bool) -> Tensor:
    """Launch one program per block of a row; nothing for zero rows."""
    num_rows, width = gate.shape
    out: Tensor = torch.empty(num_rows, width, dtype=gate.dtype, device=gate.device)
    if num_rows:
        _gate[(num_rows, triton.cdiv(width, _BLOCK_GATE))](
            gate, up, out, gate.stride(0), up.stride(0), width,
            BLOCK=_BLOCK_GATE, IS_GELU=is_gelu, num_warps=4, **chaining(gate.device),
        )  # fmt: skip
    return out


def gate_by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Compute `x * sigmoid(gate)`: `[N, num_heads, head_dim]`, contiguous, and a gate that broadcasts to it.

    Elements of `gate` may lie apart, as where a projection has query and gate of each head side by side. The sigmoid is
    rounded to the dtype before the product.
    """
    num_rows, num_heads, dim = x.shape
    out: Tensor = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows:
        _sigmoid_gate[(num_rows, triton.cdiv(num_heads * dim, _BLOCK_GATE))](
            x, gate, out, num_heads * dim, *gate.expand(x.shape).stride(),
            DIM=dim, BLOCK=_BLOCK_GATE, num_warps=4, **chaining(x.device),
        )  # fmt: skip
    return out


def _launch_norm(
    x: Tensor, delta: Tensor, out: Tensor, weight: Tensor, eps: float, offset: float, *, adds: bool
) -> None:  # fmt: skip
    """Launch one program per row; nothing for zero rows."""
    num_rows, width = x.shape
    if num_rows:
        block = power_of_2(width)
        _rms_norm[(num_rows,)](
            x, delta, out, weight, eps, x.stride(0), delta.stride(0), width,
            BLOCK=block, ADDS=adds, NORM_OFFSET=offset, num_warps=min(16, max(1, block // 512)),
            **chaining(x.device),
        )  # fmt: skip


@triton.jit
def _rms_norm(
    x, delta, out, weight, eps, x_stride, delta_stride, width, BLOCK: tl.constexpr, ADDS: tl.constexpr,
    NORM_OFFSET: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    factors = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(x + row * x_stride + at, mask=mask, other=0.0)
    dtype = values.dtype
    wide = values.to(tl.float32)
    if ADDS:
        wide += tl.load(delta + row * delta_stride + at, mask=mask, other=0.0).to(tl.float32)
        wide = wide.to(dtype).to(tl.float32)
        tl.store(x + row * x_stride + at, wide.to(dtype), mask=mask)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    scaled = scaled_by_norm(wide, scale, factors, dtype, NORM_OFFSET)
    tl.store(out + row * width + at, scaled.to(dtype), mask=mask)


@triton.jit
def activated(x, IS_GELU: tl.constexpr):
    """SiLU of float32 values, or GELU by tanh: half of 1 + tanh(u) is sigmoid(2 u), which every backend has."""
    inner = x
    if IS_GELU:
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 * sqrt(2 / pi)
    return x * tl.sigmoid(inner)


@triton.jit
def _gate(
    gate, up, out, gate_stride, up_stride, width, BLOCK: tl.constexpr, IS_GELU: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    """One block of one row."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    left = tl.load(gate + row * gate_stride + at, mask=mask, other=0.0)
    right = tl.load(up + row * up_stride + at, mask=mask, other=0.0).to(tl.float32)
    wide = left.to(tl.float32)
    shone = activated(wide, IS_GELU).to(left.dtype).to(tl.float32)
    tl.store(out + row * width + at, (shone * right).to(left.dtype), mask=mask)


@triton.jit
def _sigmoid_gate(
    x, gate, out, width, row_stride, head_stride, dim_stride, DIM: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One block of one row."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    values = tl.load(x + row * width + at, mask=mask, other=0.0)
    of_gate = gate + row * row_stride + at // DIM * head_stride + at % DIM * dim_stride
    gates = tl.sigmoid(tl.load(of_gate, mask=mask, other=0.0).to(tl.float32)).to(values.dtype)
    tl.store(out + row * width + at, (values.to(tl.float32) * gates.to(tl.float32)).to(values.dtype), mask=mask)
