"""CPU kernels on weights in FP8 and MXFP4 give the bits of bfloat16 weights with the same values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdserve.model.grouped_weights import GroupFormat, QuantizedWeight
from pdserve.model.native import ops
from pdserve.model.native.weights import Arena, Packed, open_packed, pack
from tests.unit.model.native_kit import needs_kernels
from tests.unit.model.native_programs import begin, levels, poison, program, put, taken

pytestmark = needs_kernels
assert ops  # registers the operations of torch
FP8_128, FP8_ALL = GroupFormat(8, 128, is_float=True), GroupFormat(8, 1024, is_float=True)
MXFP4 = GroupFormat(4, 32, is_float=True)
ROWS = (1, 2, 5, 13, 16, 17, 33, 70)


def weights(format: GroupFormat, num_out: int, num_in: int, seed: int = 0) -> QuantizedWeight:
    """All codes but the NaNs of FP8, and random scales, from far below to far above 1."""
    torch.manual_seed(seed + num_in)
    groups = -(-num_in // format.group)
    group_of = torch.arange(num_in) // format.group
    if format.bits == 4:
        values = torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8)
        exponents = torch.randint(-20, 4, (num_out, groups))
        exponents[0], exponents[-1] = -125, 20
        return QuantizedWeight(values, torch.exp2(exponents.float()), None, group_of, 4, is_float=True)
    values = torch.randint(0, 254, (num_out, num_in), dtype=torch.uint8)
    values += (values >= 127).to(torch.uint8)
    scale = torch.rand(num_out, groups) * torch.exp2(torch.randint(-20, 4, (num_out, groups)).float())
    return QuantizedWeight(values, scale, None, group_of, 8, is_float=True)


def both(arena: Arena, weight: QuantizedWeight, format: GroupFormat, *, num_parts: int = 1) -> tuple[Packed, Packed]:
    """The weight packed in its format, and dequantized to bfloat16."""
    packed = open_packed(arena, format, *weight.values.shape, num_parts=num_parts)
    packed.put_values(weight)
    return packed, pack(arena, "bf16", weight.dequantized().bfloat16(), num_parts=num_parts)


formats = pytest.mark.parametrize("format", [FP8_128, FP8_ALL, MXFP4], ids=str)


@levels
@formats
@pytest.mark.parametrize(("num_out", "num_in"), [(96, 576), (70, 200), (33, 70), (31, 33)])
def test_linear(level: str, format: GroupFormat, num_out: int, num_in: int) -> None:
    arena, p = Arena(), program(level, 2)
    mine, wanted = both(arena, weights(format, num_out, num_in), format)
    assert mine.inputs == "bf16" and mine.num_bytes < 0.7 * wanted.num_bytes
    source = p.buffer(num_in)
    outs = p.buffer(num_out), p.buffer(num_out)
    for packed, out in zip((mine, wanted), outs, strict=True):
        p.linear(source, packed, out)
        p.linear(source, packed, out, add=True, scale=0.5)
    for rows in ROWS:
        begin(p, rows)
        put(p, source, torch.randn(rows, num_in))
        for out in outs:
            poison(p, out, rows)
        p.run(0, 4)
        assert torch.equal(taken(p, outs[0], rows), taken(p, outs[1], rows)), rows


@levels
@formats
def test_gated(level: str, format: GroupFormat) -> None:
    """And the layer behind it; both of each row alone."""
    num_in, inner = 160, 80
    arena, p = Arena(), program(level, 2)
    wide = both(arena, weights(format, 2 * inner, num_in), format, num_parts=2)
    deep = both(arena, weights(format, 70, inner, seed=1), format)
    source = p.buffer(num_in)
    outs = p.buffer(70), p.buffer(70)
    for gate_up, down, out in zip(wide, deep, outs, strict=True):
        p.gated(source, gate_up, norm=None, eps=0.0)
        p.linear(None, down, out)
    x = torch.randn(max(ROWS), num_in)

    def computed(inputs: Tensor) -> Tensor:
        begin(p, len(inputs))
        put(p, source, inputs)
        for out in outs:
            poison(p, out, len(inputs))
        p.run(0, 4)
        found, wanted = (taken(p, out, len(inputs)).clone() for out in outs)
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
        return found

    alone = torch.cat([computed(x[row : row + 1]) for row in range(len(x))])
    for count in ROWS:
        assert torch.equal(computed(x[:count]).nan_to_num(), alone[:count].nan_to_num()), count


@formats
def test_experts(format: GroupFormat) -> None:
    """As operations of torch, which find the format by the shapes of the tensors."""
    num_experts, hidden, inner = 5, 96, 64
    arena = Arena()
    found: list[list[Packed]] = []
    for num_out, num_in, num_parts in ((2 * inner, hidden, 2), (hidden, inner, 1)):
        mine = open_packed(arena, format, num_out, num_in, num_parts=num_parts, count=num_experts)
        plain = open_packed(arena, "bf16", num_out, num_in, num_parts=num_parts, count=num_experts)
        for expert in range(num_experts):
            weight = weights(format, num_out, num_in, seed=expert)
            mine.put_values(weight, index=expert)
            plain.put(weight.dequantized().bfloat16(), index=expert)
        found.append([mine, plain])
    x, experts, shares = torch.randn(9, hidden), torch.randint(0, num_experts, (9, 2)), torch.rand(9, 2)
    results = [
        torch.ops.pdserve.experts(x, experts, shares, wide.data, wide.scale, deep.data, deep.scale)
        for wide, deep in zip(*found, strict=True)
    ]
    assert torch.equal(results[0].nan_to_num(), results[1].nan_to_num())
    mixed = open_packed(arena, GroupFormat(4, 32), hidden, inner, count=num_experts)
    wide = found[0][0]
    with pytest.raises(ValueError, match="gate_up has inputs in bf16, and down in int8"):
        torch.ops.pdserve.experts(x, experts, shares, wide.data, wide.scale, mixed.data, mixed.scale)


def test_bytes_of_a_weight() -> None:
    arena = Arena()
    fp8, mxfp4 = (open_packed(arena, each, 64, 512) for each in (FP8_128, MXFP4))
    assert fp8.num_bytes == 64 * 512 + 64 * 4 * 4 and mxfp4.num_bytes == 64 * 512 * 17 // 32
