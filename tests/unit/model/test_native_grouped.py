"""CPU kernels on weights of 4 and 8 bits with a scale per group of inputs, against torch on the dequantized weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model.grouped_weights import GroupFormat, QuantizedWeight, quantize, whole_row
from pdserve.model.native import ops
from pdserve.model.native.weights import Arena, Packed, open_packed, pack
from tests.unit.model.native_kit import LEVELS_HERE, batch_of, needs_kernels, rms, rounded
from tests.unit.model.native_programs import TOLERANCE, begin, fenced, levels, poison, program, put, relative, taken

pytestmark = needs_kernels
assert ops  # registers the operations of torch
CASES = [
    (GroupFormat(bits, group, has_mins), num_out, num_in)
    for bits, has_mins, (group, num_out, num_in) in (
        (4, False, (32, 96, 576)),
        (4, False, (128, 70, 200)),
        (4, True, (32, 33, 70)),
        (4, True, (64, 64, 320)),
        (4, False, (1024, 40, 576)),
        (8, False, (32, 96, 576)),
        (8, True, (32, 31, 33)),
        (8, False, (1024, 40, 576)),
    )
]
cases = pytest.mark.parametrize(
    ("format", "num_out", "num_in"), CASES, ids=lambda value: str(value) if isinstance(value, int) else None
)


def weights(format: GroupFormat, num_out: int, num_in: int, seed: int = 0) -> QuantizedWeight:
    """Random values, scales and minima."""
    torch.manual_seed(seed + num_in)
    groups = -(-num_in // format.group)
    values = torch.randint(0, 1 << format.bits, (num_out, num_in), dtype=torch.uint8)
    scale = (torch.rand(num_out, groups) + 0.1) / (1 << format.bits)
    mins = -(1 << (format.bits - 1)) * scale * torch.rand(num_out, groups) * 2 if format.has_mins else None
    return QuantizedWeight(values, scale, mins, torch.arange(num_in) // format.group, format.bits)


def packed_of(arena: Arena, format: GroupFormat, weight: QuantizedWeight, bias: Tensor | None = None) -> Packed:
    """The weight packed."""
    num_out, num_in = weight.values.shape
    packed = open_packed(arena, format, num_out, num_in, has_bias=bias is not None)
    packed.put_values(weight, bias)
    return packed


@levels
@cases
def test_linear(level: str, format: GroupFormat, num_out: int, num_in: int) -> None:
    weight = weights(format, num_out, num_in)
    norm, bias = torch.rand(num_in) + 0.5, torch.randn(num_out)
    arena, p = Arena(), program(level, 2)
    packed = packed_of(arena, format, weight, bias)
    source, out = p.buffer(num_in), p.buffer(num_out)
    p.linear(source, packed, out, norm=fenced(norm), eps=1e-5)
    p.linear(source, packed, out, add=True)
    for rows in (1, 2, 5, 6, 7, 16, 40):
        x = torch.randn(rows, num_in)
        begin(p, rows)
        put(p, source, x)
        poison(p, out, rows)
        p.run(0, 2)
        wide = weight.dequantized()
        wanted = F.linear(rounded(rms(x, norm, 1e-5), "int8"), wide, bias) + F.linear(rounded(x, "int8"), wide, bias)
        assert relative(taken(p, out, rows), wanted) < TOLERANCE


@levels
@pytest.mark.parametrize("format", [GroupFormat(4, 32), GroupFormat(8, 64), GroupFormat(4, 64, has_mins=True)])
def test_a_row_has_the_bits_it_has_alone(level: str, format: GroupFormat) -> None:
    """Through a gated layer and the layer behind it, beside any number of other rows."""
    num_in, inner = 160, 80
    arena, p = Arena(), program(level, 2)
    gate_up = weights(format, 2 * inner, num_in)
    wide = open_packed(arena, format, 2 * inner, num_in, num_parts=2)
    wide.put_values(gate_up)
    down = weights(format, 70, inner, seed=1)
    source, out = p.buffer(num_in), p.buffer(70)
    p.gated(source, wide, norm=None, eps=0.0)
    p.linear(None, packed_of(arena, format, down), out)
    x = torch.randn(33, num_in)

    def computed(inputs: Tensor) -> Tensor:
        begin(p, len(inputs))
        put(p, source, inputs)
        poison(p, out, len(inputs))
        p.run(0, 2)
        return taken(p, out, len(inputs)).clone()

    alone = torch.cat([computed(x[row : row + 1]) for row in range(len(x))])
    for count in (2, 6, 7, 12, 13, 33):
        assert torch.equal(computed(x[:count]), alone[:count]), count
    gate, up = F.linear(rounded(x, "int8"), gate_up.dequantized()).chunk(2, -1)
    wanted = F.linear(rounded(F.silu(gate) * up, "int8"), down.dequantized())
    assert relative(alone, wanted) < 4 * TOLERANCE


@cases
def test_embeddings_are_rows_of_packed_weights(format: GroupFormat, num_out: int, num_in: int) -> None:
    weight = weights(format, num_out, num_in)
    arena, p = Arena(), program(LEVELS_HERE[0], 2)
    out = p.buffer(num_in)
    p.embed_packed(out, packed_of(arena, format, weight))
    batch, _ = batch_of([(0, 9)], 1)
    ids = torch.randint(0, num_out, (9,))
    ids[-1] = num_out - 1
    batch.input_ids.copy_(ids)
    p.reserve(10, 10)
    p.begin(batch)
    poison(p, out, 9)
    p.run(0, 1)
    torch.testing.assert_close(taken(p, out, 9), weight.dequantized()[ids], rtol=1e-6, atol=1e-6)


def test_embeddings_in_bf16_are_rows_of_packed_weights() -> None:
    """The head has the memory of both: the bits are those of the unpacked rows."""
    rows, p = torch.randn(70, 90).bfloat16(), program(LEVELS_HERE[0], 2)
    outs = p.buffer(90), p.buffer(90)
    p.embed_packed(outs[0], pack(Arena(), "bf16", rows), scale=1.5)
    p.embed(outs[1], rows, scale=1.5)
    batch, _ = batch_of([(0, 9)], 1)
    batch.input_ids.copy_(torch.randint(0, 70, (9,)))
    p.reserve(10, 10)
    p.begin(batch)
    for out in outs:
        poison(p, out, 9)
    p.run(0, 2)
    assert torch.equal(taken(p, outs[0], 9), taken(p, outs[1], 9))


@pytest.mark.parametrize("format", [GroupFormat(4, 32), GroupFormat(8, 32, has_mins=True)])
def test_experts(format: GroupFormat) -> None:
    """As operations of torch, which find the format by the shapes of the tensors."""
    num_experts, hidden, inner = 5, 96, 64
    arena = Arena()
    layers = [
        (weights(format, 2 * inner, hidden, seed=expert), weights(format, hidden, inner, seed=expert))
        for expert in range(num_experts)
    ]
    gate_up = open_packed(arena, format, 2 * inner, hidden, num_parts=2, count=num_experts)
    down = open_packed(arena, format, hidden, inner, count=num_experts)
    for expert, (wide, deep) in enumerate(layers):
        gate_up.put_values(wide, index=expert)
        down.put_values(deep, index=expert)
    x, experts, shares = torch.randn(9, hidden), torch.randint(0, num_experts, (9, 2)), torch.rand(9, 2)
    got = torch.ops.pdserve.experts(x, experts, shares, gate_up.data, gate_up.scale, down.data, down.scale)
    wanted = torch.zeros(9, hidden)
    for row in range(9):
        for expert, share in zip(experts[row].tolist(), shares[row], strict=True):
            wide, deep = layers[expert]
            gate, up = F.linear(rounded(x[row : row + 1], "int8"), wide.dequantized()).chunk(2, -1)
            product = F.linear(rounded(F.silu(gate) * up, "int8"), deep.dequantized())
            wanted[row] += share * product[0]
    assert relative(got, wanted) < 4 * TOLERANCE
    one = packed_of(arena, format, layers[0][0])
    whole = torch.ops.pdserve.linear(x, one.data, one.scale, None, 2 * inner)
    assert relative(whole, F.linear(rounded(x, "int8"), layers[0][0].dequantized())) < TOLERANCE
    assert one.scale is not None
    with pytest.raises(ValueError, match="the scale of weight"):
        torch.ops.pdserve.linear(x, one.data, one.scale[..., :16].contiguous(), None, 2 * inner)


def test_one_scale_per_output_is_the_format_int8() -> None:
    weight = quantize(torch.randn(40, 96), GroupFormat(8, whole_row(96)))
    packed = packed_of(Arena(), GroupFormat(8, whole_row(96)), weight)
    assert packed.scale is not None and packed.scale.shape == (1, 64) and packed.data.shape == (1, 2, 24, 32, 4)
    x = torch.randn(3, 96)
    got = torch.ops.pdserve.linear(x, packed.data, packed.scale, None, 40)
    assert relative(got, F.linear(rounded(x, "int8"), weight.dequantized())) < TOLERANCE


def test_four_bits_take_half_the_bytes() -> None:
    arena = Arena()
    four, eight = (open_packed(arena, GroupFormat(bits, 128), 64, 512) for bits in (4, 8))
    assert four.data.nbytes == 64 * 512 // 2 and eight.data.nbytes == 64 * 512
    assert four.scale is not None and four.scale.nbytes == 64 * 4 * 4
