"""Options of decoders in the CPU kernels against torch: activations, scales, norms over all heads, norms behind.

Memory that a kernel must not read is poisoned: see `native_programs`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdserve.model.native.program import Program
from pdserve.model.native.resources import Activation, HeadShape, Threads
from pdserve.model.native.weights import Arena, Format, pack, pack_gated
from tests.unit.model.native_kit import (
    attended,
    batch_of,
    fill_known,
    needs_kernels,
    rms,
    rotated,
    rounded,
    rounded_weight,
)
from tests.unit.model.native_programs import (
    FEW,
    TOLERANCE,
    begin,
    fenced,
    levels,
    poison,
    program,
    put,
    relative,
    taken,
)

pytestmark = needs_kernels
LIMIT = 1.5


def activated(act: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """What `Program.gated` computes of gate and up."""
    if act == "silu":
        return F.silu(gate) * up
    if act == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@levels
@pytest.mark.parametrize("format", ["bf16", "int8"])
@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "gpt_oss"])
@pytest.mark.parametrize(("rows", "inner", "bias"), [(1, 48, True), (5, 129, False), (40, 32, True)])
def test_activations(level: str, format: Format, act: Activation, rows: int, inner: int, bias: bool) -> None:
    """Of gates that are large and small, alone and in tiles, with and without biases."""
    torch.manual_seed(inner)
    num_in = 70
    gate_up, down = (torch.randn(2 * inner, num_in) * 4 * num_in**-0.5).bfloat16(), torch.randn(40, inner).bfloat16()
    offset = torch.randn(2 * inner).bfloat16() if bias else None
    x, arena, p = torch.randn(rows, num_in), Arena(), program(level, 2)
    source, out = p.buffer(num_in), p.buffer(40)
    p.gated(source, pack_gated(arena, format, gate_up, offset), norm=None, eps=0.0, act=act, limit=LIMIT)
    p.linear(None, pack(arena, format, down), out)
    begin(p, rows)
    put(p, source, x)
    poison(p, out, rows)
    p.run(0, 2)
    wide = None if offset is None else offset.float()
    gate, up = F.linear(rounded(x, format), rounded_weight(gate_up, format), wide).chunk(2, -1)
    wanted = F.linear(rounded(activated(act, gate, up), format), rounded_weight(down, format))
    assert relative(taken(p, out, rows), wanted) < (TOLERANCE if format == "bf16" else 4 * TOLERANCE)


@levels
@pytest.mark.parametrize("format", ["bf16", "int8"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_sum_that_is_scaled(level: str, format: Format, rows: int) -> None:
    """A product with a bias, scaled and added. The scale 1 leaves the bits of a plain sum."""
    num_in, num_out = 96, 70
    weight, bias = (torch.randn(num_out, num_in) * 0.1).bfloat16(), torch.randn(num_out).bfloat16()
    x, before = torch.randn(rows, num_in), torch.randn(rows, num_out)
    arena, p = Arena(), program(level, 2)
    source, scaled, alone = p.buffer(num_in), p.buffer(num_out), p.buffer(num_out)
    packed = pack(arena, format, weight, bias)
    p.linear(source, packed, scaled, add=True, scale=0.22)
    p.linear(source, packed, alone)
    begin(p, rows)
    put(p, source, x)
    put(p, scaled, before)
    poison(p, alone, rows)
    p.run(0, 2)
    product = taken(p, alone, rows)
    torch.testing.assert_close(taken(p, scaled, rows), before + 0.22 * product, atol=1e-5, rtol=1e-5)
    plain = Program(Threads(2), level)
    source, added = plain.buffer(num_in), plain.buffer(num_out)
    plain.linear(source, packed, added, add=True)
    begin(plain, rows)
    put(plain, source, x)
    put(plain, added, before)
    plain.run(0, 1)
    assert torch.equal(taken(plain, added, rows), before + product)


@levels
@FEW
@given(
    rows=st.sampled_from([1, 2, 5, 40]),
    width=st.one_of(st.integers(1, 200), st.sampled_from([576, 1025])),
    with_norm=st.booleans(),
    scale=st.sampled_from([1.0, 0.22]),
    threads=st.integers(1, 3),
)
def test_add_and_cap(level: str, rows: int, width: int, with_norm: bool, scale: float, threads: int) -> None:
    """Rows added with a norm and a scale; then capped, and scaled without a cap."""
    torch.manual_seed(width)
    p = program(level, threads)
    source, out, scaled = p.buffer(width), p.buffer(width), p.buffer(width)
    norm = torch.rand(width) + 0.5 if with_norm else None
    p.add(source, out, norm=None if norm is None else fenced(norm), eps=1e-6, scale=scale)
    p.cap(out, scale=1.5, softcap=2.0)
    p.cap(scaled, scale=0.125, softcap=0.0)
    begin(p, rows)
    x, before, wide = torch.randn(rows, width) * 3, torch.randn(rows, width), torch.randn(rows, width)
    put(p, source, x)
    put(p, out, before)
    put(p, scaled, wide)
    p.run(0, 1)
    added = before + scale * rms(x, norm, 1e-6)
    torch.testing.assert_close(taken(p, out, rows), added, atol=1e-5, rtol=1e-5)
    p.run(1, 3)
    torch.testing.assert_close(taken(p, out, rows), 2.0 * torch.tanh(1.5 * added / 2.0), atol=1e-5, rtol=1e-5)
    assert torch.equal(taken(p, scaled, rows), 0.125 * wide)


@levels
@pytest.mark.parametrize("width", [7, 64, 130])
def test_embeddings_are_scaled(level: str, width: int) -> None:
    table, scale = torch.randn(50, width).bfloat16(), 25.25
    p = program(level, 2)
    out = p.buffer(width)
    p.embed(out, fenced(table), scale=scale)
    batch, _ = batch_of([(0, 5)], 1)
    batch.input_ids.copy_(torch.tensor([3, 49, 0, 7, 7]))
    p.reserve(6, 0)
    p.begin(batch)
    poison(p, out, 5)
    p.run(0, 1)
    assert torch.equal(taken(p, out, 5), table[batch.input_ids].float() * scale)


@levels
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(9, 3, 64), (4, 2, 16), (3, 1, 34)])
@pytest.mark.parametrize("rotated_half", [0, 4])
def test_norms_over_all_heads_scales_and_heads_that_are_not_rotated(
    level: str, num_heads: int, num_kv_heads: int, dim: int, rotated_half: int
) -> None:
    """A prompt, a chunk and decode rows, with a scale of the scores that is not of the head's size."""
    page_tokens, scale = 16, 0.3
    torch.manual_seed(dim)
    batch, num_pages = batch_of([(0, 40), (17, 18), (130, 150), (255, 256)], page_tokens)
    tokens = batch.num_tokens
    kv = torch.full((num_pages, 1, 2, num_kv_heads, page_tokens, dim), torch.nan, dtype=torch.bfloat16)
    fill_known(kv, batch, page_tokens)
    x = torch.randn(tokens, num_heads + 2 * num_kv_heads, dim)
    q_norm, k_norm = torch.rand(num_heads * dim) + 0.5, torch.rand(num_kv_heads * dim) + 0.5
    inverse = 1e2 ** (-torch.arange(rotated_half) / 4)
    mine = kv.clone()
    p = Program(Threads(2), level, HeadShape(1, num_heads, num_kv_heads, page_tokens, dim, scale=scale), mine)
    qkv, out = p.buffer(x[0].numel()), p.buffer(num_heads * dim)
    if rotated_half:
        p.angles(inverse, 1.0)
    p.place(qkv, 0, fenced(q_norm), fenced(k_norm), 1e-6, whole=True)
    p.attend(0, out)
    p.reserve(tokens + 1, 0)
    p.begin(batch)
    put(p, qkv, x.flatten(1))
    poison(p, out, tokens)
    p.run(0, p.num_ops)

    def finished(heads: Tensor, norm: Tensor) -> Tensor:
        normed = rms(heads.flatten(1), norm, 1e-6).view(heads.shape)
        turned = rotated(normed[..., : 2 * rotated_half], batch.positions, inverse)
        return torch.cat((turned, normed[..., 2 * rotated_half :]), -1)

    q, k = finished(x[:, :num_heads], q_norm), finished(x[:, num_heads:-num_kv_heads], k_norm)
    kv[batch.write_pages, 0, 0, :, batch.write_slots] = k.bfloat16()
    kv[batch.write_pages, 0, 1, :, batch.write_slots] = x[:, -num_kv_heads:].bfloat16()
    torch.testing.assert_close(mine, kv, atol=0.04, rtol=0.01, equal_nan=True)
    q = q * (scale * dim**0.5)  # the reference scales by the head's size
    wanted = attended(q, kv, batch, page_tokens, layer=0, window=0, softcap=0.0, sinks=None)
    torch.testing.assert_close(taken(p, out, tokens), wanted, atol=0.03, rtol=0.02)


@levels
def test_a_row_has_the_bits_it_has_alone_with_every_option(level: str) -> None:
    """A feed-forward by GELU, added with a norm or a scale, and capped."""
    num_in, width = 70, 64
    arena, p = Arena(), program(level, 2)
    source, part, out = p.buffer(num_in), p.buffer(width), p.buffer(width)
    gate_up = (torch.randn(160, num_in) * num_in**-0.5).bfloat16()
    down = pack(arena, "bf16", torch.randn(width, 80).bfloat16())
    p.gated(source, pack_gated(arena, "bf16", gate_up), norm=None, eps=0.0, act="gelu_tanh")
    p.linear(None, down, part)
    p.linear(None, down, out, add=True, scale=0.3)
    p.add(part, out, norm=torch.rand(width) + 0.5, eps=1e-6, scale=0.7)
    p.cap(out, scale=0.5, softcap=3.0)
    x = torch.randn(37, num_in)

    def computed(inputs: Tensor) -> Tensor:
        begin(p, len(inputs))
        put(p, source, inputs)
        poison(p, part, len(inputs))
        put(p, out, torch.ones(len(inputs), width))
        p.run(0, p.num_ops)
        return taken(p, out, len(inputs)).clone()

    alone = torch.cat([computed(x[row : row + 1]) for row in range(len(x))])
    assert alone.isfinite().all()
    for count in (2, 15, 16, 17, 33, 37):
        assert torch.equal(computed(x[:count]), alone[:count]), count
