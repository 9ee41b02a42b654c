"""RMS norm, fused add and RMS norm, and SwiGLU, one pass over memory each. For `layers/triton_kernels.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.model.gpu.runtime import chaining, power_of_2

_BLOCK_GATE = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise `x` `[N, width]` in float32 and scale by `weight` `[width]`; rows may have a stride."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, x, out, weight, eps, adds=False)
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `rms_norm` of `x + delta`, and overwrite `x` with the sum."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, delta, out, weight, eps, adds=True)
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `silu(gate) * up`, `[N, width]` each; rows may have a stride."""
    num_rows, width = gate.shape
    out: Tensor = torch.empty(num_rows, width, dtype=gate.dtype, device=gate.device)
    if num_rows:
        _swiglu[(num_rows, triton.cdiv(width, _BLOCK_GATE))](
            gate,
            up,
            out,
            gate.stride(0),
            up.stride(0),
            width,
            BLOCK=_BLOCK_GATE,
            num_warps=4,
            **chaining(gate.device),
        )
    return out


def _launch_norm(x: Tensor, delta: Tensor, out: Tensor, weight: Tensor, eps: float, *, adds: bool) -> None:
    """Launch one program per row; nothing for zero rows."""
    num_rows, width = x.shape
    if num_rows:
        block = power_of_2(width)
        _rms_norm[(num_rows,)](
            x, delta, out, weight, eps, x.stride(0), delta.stride(0), width,
            BLOCK=block, ADDS=adds, num_warps=min(16, max(1, block // 512)),
            **chaining(x.device),
        )  # fmt: skip


@triton.jit
def _rms_norm(
    x, delta, out, weight, eps, x_stride, delta_stride, width, BLOCK: tl.constexpr, ADDS: tl.constexpr,
    CHAINED: tl.constexpr,
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
    scaled = (wide * scale).to(dtype).to(tl.float32) * factors
    tl.store(out + row * width + at, scaled.to(dtype), mask=mask)


@triton.jit
def _swiglu(gate, up, out, gate_stride, up_stride, width, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
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
    shone = (wide * tl.sigmoid(wide)).to(left.dtype).to(tl.float32)
    tl.store(out + row * width + at, (shone * right).to(left.dtype), mask=mask)
