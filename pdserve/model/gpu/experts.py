"""Grouped GEMMs of a mixture of experts without host synchronisation. Rows are sorted by expert; a tile has one expert.

Called by `layers/triton_kernels.py`. The number of rows alone fixes the number of tiles, and surplus tiles do nothing,
so that a CUDA graph can capture a launch. A program finds its expert from the tile counts.

    gate and up, activated             [R, hidden] -> [R, inner], in sorted order
    down                               [R, inner] -> [R, hidden], in the rows' original order
    weighted sum                       [N, top_k, hidden] -> [N, hidden]
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.model.expert_math import SIGMOID_SLOPE, ExpertWeights
from pdserve.model.gpu.routes import MAX_ROWS, order_rows
from pdserve.model.gpu.runtime import chaining, power_of_2

_FEW_ROWS = 16
"""Average rows per expert up to which reading the weights dominates."""


@dataclasses.dataclass(frozen=True)
class ExpertTiling:
    """Block sizes of the products."""

    rows: int
    outs: int
    depth: int
    warps: int
    stages: int

    @staticmethod
    def of(num_rows: int, num_experts: int, dtype: torch.dtype) -> ExpertTiling:
        """Choose block sizes for `num_rows` rows over `num_experts` experts."""
        if dtype.itemsize > 2:
            return ExpertTiling(rows=16, outs=32, depth=32, warps=4, stages=2)
        if num_rows <= _FEW_ROWS * num_experts:
            return ExpertTiling(rows=16, outs=32, depth=128, warps=4, stages=3)
        return ExpertTiling(rows=64, outs=64, depth=64, warps=8, stages=3)


@dataclasses.dataclass(frozen=True)
class Sorted:
    """Rows sorted by expert, all on the device.

    `order` int64 `[R]` are row indices. `row_ends` and `tile_ends`, int64 `[E]`, are where each expert's rows and tiles
    end. `num_tiles` is an upper bound.
    """

    order: Tensor
    row_ends: Tensor
    tile_ends: Tensor
    num_tiles: int


def sort_rows(slots: Tensor, num_experts: int, tile_rows: int) -> Sorted:
    """Sort rows by expert. `slots` int64 `[R]`: the expert of each row."""
    num_tiles = min(len(slots), num_experts) + len(slots) // tile_rows
    if len(slots) <= MAX_ROWS:
        return Sorted(*order_rows(slots, num_experts, tile_rows), num_tiles)
    ranked, order = slots.sort(stable=True)
    experts = torch.arange(num_experts, device=slots.device)
    row_ends = torch.searchsorted(ranked, experts, right=True)
    counts = torch.diff(row_ends, prepend=row_ends.new_zeros(1))
    tile_ends = ((counts + tile_rows - 1) // tile_rows).cumsum(0)
    return Sorted(order, row_ends, tile_ends, num_tiles)


def expert_rows(x: Tensor, slots: Tensor, weights: ExpertWeights) -> Tensor:
    """Run row r through expert `slots[r]`, `[R]`: `[R, hidden]`. Row r is row `r // (R / N)` of `x` `[N, hidden]`.

    The tensors of `weights` are contiguous.
    """
    num_rows, hidden = len(slots), x.shape[1]
    gate_up, down = weights.gate_up, weights.down
    wide, deep = weights.gate_up_bias, weights.down_bias
    num_experts, inner = gate_up.shape[0], down.shape[2]
    out = torch.empty(num_rows, hidden, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    tiling = ExpertTiling.of(num_rows, num_experts, x.dtype)
    ranked = sort_rows(slots, num_experts, tiling.rows)
    gated = torch.empty(num_rows, inner, dtype=x.dtype, device=x.device)
    options = {
        "EXPERTS": num_experts, "BLOCK_EXPERTS": power_of_2(num_experts), "ROWS": tiling.rows, "OUTS": tiling.outs,
        "DEPTH": tiling.depth, "num_warps": tiling.warps, "num_stages": tiling.stages,
        **chaining(x.device),
    }  # fmt: skip
    limit = weights.act_limit
    _gate_up[(ranked.num_tiles, triton.cdiv(inner, tiling.outs))](
        x, gate_up, gate_up if wide is None else wide, gated, ranked.order, ranked.row_ends, ranked.tile_ends,
        x.stride(0), num_rows // len(x), hidden, inner, limit or 0.0,
        HAS_BIAS=wide is not None, IS_SILU=weights.act == "silu", LIMITS=limit is not None, SLOPE=SIGMOID_SLOPE,
        **options,
    )  # fmt: skip
    _down[(ranked.num_tiles, triton.cdiv(hidden, tiling.outs))](
        gated, down, down if deep is None else deep, out, ranked.order, ranked.row_ends, ranked.tile_ends,
        inner, hidden, HAS_BIAS=deep is not None, **options,
    )  # fmt: skip
    return out


def weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """Sum `[N, top_k, hidden]` with weights float32 `[N, top_k]` to `[N, hidden]`, in float32."""
    num_tokens, top_k, hidden = outputs.shape
    out = torch.empty(num_tokens, hidden, dtype=outputs.dtype, device=outputs.device)
    block = min(1024, power_of_2(hidden))
    if num_tokens:
        _weigh[(num_tokens, triton.cdiv(hidden, block))](
            outputs.contiguous(), weights.contiguous(), out, hidden, TOP_K=top_k, BLOCK=block, num_warps=4,
            **chaining(out.device),
        )  # fmt: skip
    return out


@triton.jit
def find_tile(row_ends, tile_ends, tile, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return the expert of a tile, and the tile's first row in sorted order."""
    experts = tl.arange(0, BLOCK_EXPERTS)
    ends = tl.load(tile_ends + experts, mask=experts < EXPERTS, other=1 << 40)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    before = tl.maximum(expert - 1, 0)
    has_before = expert > 0
    first_tile = tl.where(has_before, tl.load(tile_ends + before), 0)
    first_row = tl.where(has_before, tl.load(row_ends + before), 0)
    return expert, first_row + (tile - first_tile) * ROWS


@triton.jit
def _gate_up(
    x, weight, bias, out, order, row_ends, tile_ends, x_stride, share, hidden, inner, limit,
    HAS_BIAS: tl.constexpr, IS_SILU: tl.constexpr, LIMITS: tl.constexpr, SLOPE: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, DEPTH: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One tile, and a block of outputs of both halves."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    if tile < tl.load(tile_ends + EXPERTS - 1):
        expert, first = find_tile(row_ends, tile_ends, tile, EXPERTS, BLOCK_EXPERTS, ROWS)
        rows = first + tl.arange(0, ROWS)
        is_row = rows < tl.load(row_ends + expert)
        tokens = tl.load(order + rows, mask=is_row, other=0) // share
        outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
        is_out = outs < inner
        depths = tl.arange(0, DEPTH)
        of_gate = weight + expert.to(tl.int64) * (2 * inner * hidden) + outs[:, None] * hidden + depths[None, :]
        of_x = x + tokens[:, None] * x_stride + depths[None, :]
        gate = tl.zeros((ROWS, OUTS), tl.float32)
        up = tl.zeros((ROWS, OUTS), tl.float32)
        for start in range(0, hidden, DEPTH):
            is_deep = (start + depths < hidden)[None, :]
            inputs = tl.load(of_x + start, mask=is_row[:, None] & is_deep, other=0.0)
            left = tl.load(of_gate + start, mask=is_out[:, None] & is_deep, other=0.0)
            right = tl.load(of_gate + inner * hidden + start, mask=is_out[:, None] & is_deep, other=0.0)
            gate = tl.dot(inputs, tl.trans(left), gate, input_precision="ieee")
            up = tl.dot(inputs, tl.trans(right), up, input_precision="ieee")
        if HAS_BIAS:
            of_bias = bias + expert.to(tl.int64) * (2 * inner) + outs
            gate += tl.load(of_bias, mask=is_out, other=0.0).to(tl.float32)[None, :]
            up += tl.load(of_bias + inner, mask=is_out, other=0.0).to(tl.float32)[None, :]
        dtype = out.dtype.element_ty
        if IS_SILU:
            shone = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
        else:
            if LIMITS:
                gate = tl.minimum(gate, limit)
                up = tl.minimum(tl.maximum(up, -limit), limit)
            shone = gate * tl.sigmoid(SLOPE * gate) * (up + 1.0)
        tl.store(out + rows[:, None] * inner + outs[None, :], shone.to(dtype), mask=is_row[:, None] & is_out[None, :])


@triton.jit
def _down(
    x, weight, bias, out, order, row_ends, tile_ends, inner, hidden, HAS_BIAS: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, DEPTH: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One tile, and a block of outputs."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    if tile < tl.load(tile_ends + EXPERTS - 1):
        expert, first = find_tile(row_ends, tile_ends, tile, EXPERTS, BLOCK_EXPERTS, ROWS)
        rows = first + tl.arange(0, ROWS)
        is_row = rows < tl.load(row_ends + expert)
        targets = tl.load(order + rows, mask=is_row, other=0)
        outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
        is_out = outs < hidden
        depths = tl.arange(0, DEPTH)
        of_weight = weight + expert.to(tl.int64) * (hidden * inner) + outs[:, None] * inner + depths[None, :]
        of_x = x + rows[:, None] * inner + depths[None, :]
        total = tl.zeros((ROWS, OUTS), tl.float32)
        for start in range(0, inner, DEPTH):
            is_deep = (start + depths < inner)[None, :]
            inputs = tl.load(of_x + start, mask=is_row[:, None] & is_deep, other=0.0)
            parts = tl.load(of_weight + start, mask=is_out[:, None] & is_deep, other=0.0)
            total = tl.dot(inputs, tl.trans(parts), total, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias + expert.to(tl.int64) * hidden + outs, mask=is_out, other=0.0).to(tl.float32)[None, :]
        at = out + targets[:, None] * hidden + outs[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])


@triton.jit
def _weigh(outputs, weights, out, hidden, TOP_K: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """One block of one token."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(TOP_K):
        said = tl.load(outputs + (token * TOP_K + choice) * hidden + at, mask=mask, other=0.0).to(tl.float32)
        total += said * tl.load(weights + token * TOP_K + choice)
    tl.store(out + token * hidden + at, total.to(out.dtype.element_ty), mask=mask)
