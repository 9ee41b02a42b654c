"""GEMMs with quantized weights, which stay packed on the device and are dequantized in registers, tile by tile.

Called by `model/packed_layers.py`. A weight is dequantized in float32 and rounded once, to the dtype of the inputs; so
products are those of the dequantized weight, whose bytes are never written.

    linear             [N, in] -> [N, out]
    expert_rows        [N, hidden] -> [R, hidden], rows sorted by expert as in `experts.py`
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.model.expert_math import clamped_gate
from pdserve.model.gpu import elementwise
from pdserve.model.gpu.experts import Sorted, find_tile, sort_rows
from pdserve.model.gpu.runtime import chaining, power_of_2
from pdserve.model.grouped_weights import GroupFormat, QuantizedWeight
from pdserve.model.layer_spec import ExpertActivation

_FEW_ROWS, _MANY_ROWS, _OUTS, _MAX_DEPTH = 16, 64, 32, 128
_E2M1_UNIT, _E4M3_UNIT = tl.constexpr(2.0**126), tl.constexpr(2.0**120)
"""What a code's bits, placed in those of a float32, are too small by."""


@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """`count` weights `[out, in]` of a `GroupFormat` on a device, one after the other.

    `values` uint8 `[count, out, in]`, or of 4 bits `[count, out, in / 2]`, the value of the even input in the low bits;
    `scale` and `mins`, or None, float32 `[count, out, groups]`.
    """

    format: GroupFormat
    values: Tensor
    scale: Tensor
    mins: Tensor | None
    num_in: int

    @staticmethod
    def empty(format: GroupFormat, count: int, num_out: int, num_in: int, device: torch.device) -> PackedWeight:
        """Allocate `count` weights."""
        width = -(-num_in // 2) if format.bits == 4 else num_in
        values = torch.empty(count, num_out, width, dtype=torch.uint8, device=device)
        scale = torch.empty(count, num_out, -(-num_in // format.group), dtype=torch.float32, device=device)
        return PackedWeight(format, values, scale, torch.empty_like(scale) if format.has_mins else None, num_in)

    def put(self, index: int, weight: QuantizedWeight) -> None:
        """Copy `weight`, which has this format, to place `index`."""
        values = weight.values
        if self.format.bits == 4:
            values = torch.nn.functional.pad(values, (0, values.shape[1] % 2))
            values = values[:, 0::2] | values[:, 1::2] << 4
        self.values[index].copy_(values)
        self.scale[index].copy_(weight.scale)
        if self.mins is not None and weight.mins is not None:
            self.mins[index].copy_(weight.mins)

    @property
    def tensors(self) -> list[Tensor]:
        """All its tensors, `[count, ...]` each."""
        return [tensor for tensor in (self.values, self.scale, self.mins) if tensor is not None]

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Compute `x @ weight.T + bias`: `[N, in]` and `[out]` or None to `[N, out]`. `weight` is one weight."""
    num_rows, num_out = len(x), weight.values.shape[1]
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    rows = _FEW_ROWS if num_rows <= _FEW_ROWS else _MANY_ROWS
    _linear[(triton.cdiv(num_rows, rows), triton.cdiv(num_out, _OUTS))](
        x if x.stride(1) == 1 else x.contiguous(), *_pointers(weight), out if bias is None else bias, out, num_rows,
        x.stride(0) if x.stride(1) == 1 else x.shape[1], num_out, HAS_BIAS=bias is not None, ROWS=rows,
        **_options(weight, x.device),
    )  # fmt: skip
    return out


def expert_rows(
    x: Tensor, slots: Tensor, gate_up: PackedWeight, down: PackedWeight, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, act: ExpertActivation, limit: float | None,
) -> Tensor:  # fmt: skip
    """See `experts.expert_rows`. Biases are `[experts, out]` or None."""
    num_rows, num_experts, hidden = len(slots), len(gate_up.values), x.shape[1]
    out = torch.empty(num_rows, hidden, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    tile_rows = _FEW_ROWS if num_rows <= _FEW_ROWS * num_experts else _MANY_ROWS
    ranked = sort_rows(slots, num_experts, tile_rows)
    wide = torch.empty(num_rows, gate_up.values.shape[1], dtype=x.dtype, device=x.device)
    _of_experts(x.contiguous(), gate_up, gate_up_bias, wide, ranked, tile_rows, num_rows // len(x))
    gate, up = wide.chunk(2, -1)
    inner = elementwise.swiglu(gate, up) if act == "silu" else clamped_gate(gate, up, limit)
    _of_experts(inner.contiguous(), down, down_bias, out, ranked, tile_rows, None)
    return out


def _of_experts(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor, ranked: Sorted, tile_rows: int, share: int | None
) -> None:
    """Multiply sorted rows with their experts' weights.

    `share` rows have one row of `x`, and `out` is in sorted order; None: `x` is in sorted order, and `out` is not.
    """
    num_experts, num_out = weight.values.shape[:2]
    _expert_linear[(ranked.num_tiles, triton.cdiv(num_out, _OUTS))](
        x, *_pointers(weight), out if bias is None else bias, out, ranked.order, ranked.row_ends, ranked.tile_ends,
        x.shape[1], share or 1, num_out, TO_SORTED=share is not None, HAS_BIAS=bias is not None,
        EXPERTS=num_experts, BLOCK_EXPERTS=power_of_2(num_experts), ROWS=tile_rows, **_options(weight, x.device),
    )  # fmt: skip


def _pointers(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor, int, int, int]:
    """Return arguments of all kernels: values, scales, minima, inputs, bytes of a row, and its groups."""
    mins = weight.scale if weight.mins is None else weight.mins
    return weight.values, weight.scale, mins, weight.num_in, weight.values.shape[2], weight.scale.shape[2]


def _options(weight: PackedWeight, device: torch.device) -> dict[str, object]:
    """Return constants of all kernels. All inputs of an iteration are in one group."""
    form = weight.format
    return {
        "GROUP": form.group, "FOUR": form.bits == 4, "FLOAT": form.is_float, "HAS_MINS": form.has_mins,
        "OUTS": _OUTS, "DEPTH": min(form.group, _MAX_DEPTH), "num_warps": 4, "num_stages": 3, **chaining(device),
    }  # fmt: skip


@triton.jit
def _weights(
    values, scale, mins, lines, is_line, start, num_in, row_bytes, num_groups,
    GROUP: tl.constexpr, FOUR: tl.constexpr, FLOAT: tl.constexpr, HAS_MINS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return weights `[lines, DEPTH]` from input `start` on, in float32. `lines` int64: outputs of all experts."""
    if FOUR:
        halves = tl.arange(0, DEPTH // 2)
        mask = is_line[:, None] & (start + 2 * halves < num_in)[None, :]
        packed = tl.load(values + lines[:, None] * row_bytes + (start // 2 + halves)[None, :], mask=mask, other=0)
        packed = packed.to(tl.int32)
        codes = tl.interleave(packed & 15, packed >> 4)
    else:
        depths = tl.arange(0, DEPTH)
        mask = is_line[:, None] & (start + depths < num_in)[None, :]
        codes = tl.load(values + lines[:, None] * row_bytes + (start + depths)[None, :], mask=mask, other=0)
        codes = codes.to(tl.int32)
    at = lines * num_groups + start // GROUP
    factor = tl.load(scale + at, mask=is_line, other=0.0)[:, None]
    if FLOAT:
        if FOUR:
            wide = (((codes & 7) << 22) | ((codes & 8) << 28)).to(tl.float32, bitcast=True) * _E2M1_UNIT
        else:
            wide = (((codes & 127) << 20) | ((codes & 128) << 24)).to(tl.float32, bitcast=True) * _E4M3_UNIT
        return wide * factor
    if HAS_MINS:
        return codes.to(tl.float32) * factor + tl.load(mins + at, mask=is_line, other=0.0)[:, None]
    if FOUR:
        return (codes - 8).to(tl.float32) * factor
    return (codes - 128).to(tl.float32) * factor


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x, values, scale, mins, num_in, row_bytes, num_groups, bias, out, num_rows, x_stride, num_out,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr, FLOAT: tl.constexpr,
    HAS_MINS: tl.constexpr, OUTS: tl.constexpr, DEPTH: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One tile of rows, and a block of outputs."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    is_row, is_out = rows < num_rows, outs < num_out
    depths = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, OUTS), tl.float32)
    for start in range(0, num_in, DEPTH):
        mask = is_row[:, None] & (start + depths < num_in)[None, :]
        inputs = tl.load(x + rows[:, None] * x_stride + (start + depths)[None, :], mask=mask, other=0.0)
        parts = _weights(
            values, scale, mins, outs.to(tl.int64), is_out, start, num_in, row_bytes, num_groups,
            GROUP, FOUR, FLOAT, HAS_MINS, DEPTH,
        )  # fmt: skip
        total = tl.dot(inputs, tl.trans(parts.to(inputs.dtype)), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + outs, mask=is_out, other=0.0).to(tl.float32)[None, :]
    at = out + rows[:, None] * num_out + outs[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])


@triton.jit
def _expert_linear(
    x, values, scale, mins, num_in, row_bytes, num_groups, bias, out, order, row_ends, tile_ends, x_stride, share,
    num_out, TO_SORTED: tl.constexpr, HAS_BIAS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr, FLOAT: tl.constexpr, HAS_MINS: tl.constexpr,
    OUTS: tl.constexpr, DEPTH: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One tile of sorted rows, all of one expert, and a block of its outputs."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    if tile < tl.load(tile_ends + EXPERTS - 1):
        expert, first = find_tile(row_ends, tile_ends, tile, EXPERTS, BLOCK_EXPERTS, ROWS)
        rows = first + tl.arange(0, ROWS)
        is_row = rows < tl.load(row_ends + expert)
        places = tl.load(order + rows, mask=is_row, other=0)
        if TO_SORTED:
            sources, targets = places // share, rows
        else:
            sources, targets = rows, places
        outs = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
        is_out = outs < num_out
        lines = expert.to(tl.int64) * num_out + outs
        depths = tl.arange(0, DEPTH)
        total = tl.zeros((ROWS, OUTS), tl.float32)
        for start in range(0, num_in, DEPTH):
            mask = is_row[:, None] & (start + depths < num_in)[None, :]
            inputs = tl.load(x + sources[:, None] * x_stride + (start + depths)[None, :], mask=mask, other=0.0)
            parts = _weights(
                values, scale, mins, lines, is_out, start, num_in, row_bytes, num_groups,
                GROUP, FOUR, FLOAT, HAS_MINS, DEPTH,
            )  # fmt: skip
            total = tl.dot(inputs, tl.trans(parts.to(inputs.dtype)), total, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias + lines, mask=is_out, other=0.0).to(tl.float32)[None, :]
        at = out + targets[:, None] * num_out + outs[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])
