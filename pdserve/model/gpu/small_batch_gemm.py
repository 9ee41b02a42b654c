"""GEMMs of few rows, which are bound by reading the weights: `x @ weight.T`, and both halves of a gate in one kernel.

Called by `layers/triton_kernels.py`. Programs divide the outputs so that all memory channels are busy to the end.
`linear` lets the next kernel start as soon as its own wait is over. `gated` does so after its loads: an earlier start
would spread the next kernel's programs unevenly, and a memory-bound kernel is as slow as its fullest multiprocessor.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.base.env import triton_is_interpreted
from pdserve.model.gpu.elementwise import activated
from pdserve.model.gpu.runtime import chaining, num_cores, shared_bytes
from pdserve.model.layer_spec import Activation

MAX_ROWS = 64
"""Above this, the rows are read from cache more often than the weights from memory, and cuBLAS is faster."""
_FEWEST_ROWS = 16
"""Minimum rows of a tensor-core product."""


@dataclasses.dataclass(frozen=True)
class SmallBatchTiling:
    """Outputs per program, inputs per iteration, warps, and pipeline stages."""

    outs: int
    depth: int
    warps: int
    stages: int

    @staticmethod
    def of(num_rows: int, num_outs: int, device: torch.device, *, is_gate: bool) -> SmallBatchTiling:
        """Choose a tiling; a gate has two halves of `num_outs`. `benchmarks/gpu/products.py` times alternatives."""
        if triton_is_interpreted():
            return SmallBatchTiling(outs=64, depth=64, warps=4, stages=1)
        cores = num_cores(device)
        if is_gate:
            few, many = SmallBatchTiling(32, 128, 4, 4), SmallBatchTiling(32, 64, 4, 4)
        elif num_outs > 48 * cores:  # more outputs per program read the rows less often
            few, many = SmallBatchTiling(32, 256, 4, 6), SmallBatchTiling(128, 128, 8, 3)
        elif num_outs > 32 * cores:
            few, many = SmallBatchTiling(32, 128, 4, 5), SmallBatchTiling(64, 128, 4, 5)
        elif num_outs >= 16 * cores:  # one program per multiprocessor, with many loads in flight
            few, many = SmallBatchTiling(32, 128, 4, 7), SmallBatchTiling(32, 128, 4, 7)
        else:
            few, many = SmallBatchTiling(16, 256, 4, 6), SmallBatchTiling(16, 256, 4, 4)
        rows = padded(num_rows)
        tiling = few if rows == _FEWEST_ROWS else many
        step_bytes = 2 * tiling.depth * (rows + tiling.outs * (1 + is_gate))
        return dataclasses.replace(tiling, stages=min(tiling.stages, shared_bytes(device) // step_bytes))


def padded(num_rows: int) -> int:
    """Return the rows as computed. Two kernels are enough, because reading the weights takes the time."""
    return _FEWEST_ROWS if num_rows <= _FEWEST_ROWS else MAX_ROWS


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` or `gated` supports this product."""
    return 0 < len(x) <= MAX_ROWS and x.dtype.itemsize == 2 and x.stride(1) == 1 and weight.shape[1] % 16 == 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `x @ weight.T + bias`: `[N, in]`, `[out, in]` and `[out]` to `[N, out]`. Requires `fits`."""
    return _launch(x, weight, bias, len(weight), is_gate=False)


def gated(x: Tensor, weight: Tensor, bias: Tensor | None, act: Activation = "silu") -> Tensor:
    """Compute `act(gate) * up`, the halves of `linear`: `[N, out / 2]`. Requires `fits`."""
    return _launch(x, weight, bias, len(weight) // 2, is_gate=True, is_gelu=act == "gelu_tanh")


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_outs: int, *, is_gate: bool, is_gelu: bool = False
) -> Tensor:
    """Launch one product."""
    num_rows, num_in = x.shape
    out: Tensor = torch.empty(num_rows, num_outs, dtype=x.dtype, device=x.device)
    tiling = SmallBatchTiling.of(num_rows, num_outs, x.device, is_gate=is_gate)
    _product[(triton.cdiv(num_outs, tiling.outs),)](
        x, weight, bias if bias is not None else weight, out, num_rows, num_outs, num_in, x.stride(0),
        ROWS=padded(num_rows), OUTS=tiling.outs, DEPTH=tiling.depth, IS_GATE=is_gate,
        IS_WHOLE=num_in % tiling.depth == 0, HAS_BIAS=bias is not None, IS_GELU=is_gelu,
        num_warps=tiling.warps, num_stages=tiling.stages, **chaining(x.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x, weight, bias, out, num_rows, num_outs, num_in, x_stride,
    ROWS: tl.constexpr, OUTS: tl.constexpr, DEPTH: tl.constexpr, IS_WHOLE: tl.constexpr, IS_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_GELU: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A block of outputs of all rows."""
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    is_out = outs < num_outs
    held = tl.minimum(outs, num_outs - 1).to(tl.int64)
    of_weight = weight + held * num_in
    second = num_outs.to(tl.int64) * num_in
    rows, depths = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    is_row = rows < num_rows
    of_x = x + rows[:, None] * x_stride + depths[None, :]
    of_weight = of_weight[:, None] + depths[None, :]
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        if not IS_GATE:
            tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((ROWS, OUTS), tl.float32)
    other = tl.zeros((ROWS, OUTS), tl.float32)
    for start in range(0, num_in, DEPTH):
        if IS_WHOLE:
            inputs = tl.load(of_x + start, mask=is_row[:, None], other=0.0)
            parts = tl.load(of_weight + start)
        else:
            is_deep = (start + depths < num_in)[None, :]
            inputs = tl.load(of_x + start, mask=is_row[:, None] & is_deep, other=0.0)
            parts = tl.load(of_weight + start, mask=is_deep, other=0.0)
        total = tl.dot(inputs, tl.trans(parts), total, input_precision="ieee")
        if IS_GATE:
            if IS_WHOLE:
                more = tl.load(of_weight + second + start)
            else:
                more = tl.load(of_weight + second + start, mask=(start + depths < num_in)[None, :], other=0.0)
            other = tl.dot(inputs, tl.trans(more), other, input_precision="ieee")
    if CHAINED and IS_GATE:
        tl.extra.cuda.gdc_launch_dependents()
    dtype = out.dtype.element_ty
    if HAS_BIAS:
        total += tl.load(bias + held).to(tl.float32)[None, :]
    if IS_GATE:
        if HAS_BIAS:
            other += tl.load(bias + num_outs + held).to(tl.float32)[None, :]
        wide = total.to(dtype).to(tl.float32)
        total = activated(wide, IS_GELU).to(dtype).to(tl.float32) * other.to(dtype).to(tl.float32)
    at = out + rows[:, None] * num_outs + outs[None, :]
    tl.store(at, total.to(dtype), mask=is_row[:, None] & is_out[None, :])
