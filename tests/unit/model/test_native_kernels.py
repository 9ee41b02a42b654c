"""Each CPU kernel but attention and experts against torch: shapes, formats, threads, every level this CPU can run.

Memory that a kernel must not read is poisoned: see `native_programs`.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdserve.model.native.weights import Arena, Format, pack, pack_gated
from tests.unit.model.native_kit import LEVELS_HERE, batch_of, needs_kernels, rms, rounded, rounded_weight
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
widths = st.one_of(st.integers(1, 200), st.sampled_from([576, 1025, 1536]))


@levels
@pytest.mark.parametrize("format", ["bf16", "int8"])
@FEW
@given(
    rows=st.sampled_from([1, 2, 3, 7, 12, 13, 16, 17, 33, 150]),
    num_out=st.one_of(st.integers(1, 130), st.just(320)),
    num_in=widths,
    bias=st.booleans(),
    threads=st.integers(1, 3),
)
def test_linear(level: str, format: Format, rows: int, num_out: int, num_in: int, bias: bool, threads: int) -> None:
    torch.manual_seed(rows * num_out + num_in)
    weight, norm = (torch.randn(num_out, num_in) * 0.1).bfloat16(), torch.rand(num_in) + 0.5
    offset = torch.randn(num_out).bfloat16() if bias else None
    x = torch.randn(rows, num_in)
    arena, p = Arena(), program(level, threads)
    packed = pack(arena, format, weight, offset)
    source, out = p.buffer(num_in), p.buffer(num_out)
    p.linear(source, packed, out, norm=fenced(norm), eps=1e-5)
    p.linear(source, packed, out, add=True)
    begin(p, rows)
    put(p, source, x)
    poison(p, out, rows)
    p.run(0, 2)
    wide = None if offset is None else offset.float()
    whole = rounded_weight(weight, format)
    wanted = F.linear(rounded(rms(x, norm, 1e-5), format), whole, wide) + F.linear(rounded(x, format), whole, wide)
    wrong = (taken(p, out, rows) - wanted).norm()
    assert wrong < TOLERANCE * (wanted.norm() + 1.0)  # of few outputs nearly nothing may be left


@levels
@pytest.mark.parametrize("format", ["bf16", "int8"])
@FEW
@given(
    rows=st.sampled_from([1, 5, 16, 40]),
    num_in=widths,
    inner=st.sampled_from([16, 32, 48, 129]),
    bias=st.booleans(),
    with_norm=st.booleans(),
    threads=st.integers(1, 3),
)
def test_gated(
    level: str, format: Format, rows: int, num_in: int, inner: int, bias: bool, with_norm: bool, threads: int
) -> None:
    torch.manual_seed(rows * inner + num_in)
    gate_up, down = (torch.randn(2 * inner, num_in) * 2 * num_in**-0.5).bfloat16(), torch.randn(40, inner).bfloat16()
    offset = torch.randn(2 * inner).bfloat16() if bias else None
    norm = torch.rand(num_in) + 0.5 if with_norm else None
    x = torch.randn(rows, num_in)
    arena, p = Arena(), program(level, threads)
    source, out = p.buffer(num_in), p.buffer(40)
    packed = pack_gated(arena, format, gate_up, offset)
    p.gated(source, packed, norm=None if norm is None else fenced(norm), eps=1e-5)
    p.linear(None, pack(arena, format, down), out)
    begin(p, rows)
    put(p, source, x)
    poison(p, out, rows)
    p.run(0, 2)
    wide = None if offset is None else offset.float()
    inputs = rounded(rms(x, norm, 1e-5), format)
    gate, up = F.linear(inputs, rounded_weight(gate_up, format), wide).chunk(2, -1)
    wanted = F.linear(rounded(F.silu(gate) * up, format), rounded_weight(down, format))
    assert relative(taken(p, out, rows), wanted) < (TOLERANCE if format == "bf16" else 4 * TOLERANCE)


@levels
@pytest.mark.parametrize("format", ["bf16", "int8"])
@pytest.mark.parametrize(("num_in", "counts"), [(70, range(1, 71)), (1536, (321, 333, 695))])
def test_a_row_has_the_bits_it_has_alone(level: str, format: Format, num_in: int, counts: Sequence[int]) -> None:
    """In whatever company: every way to cut rows into tiles, and more rows than are multiplied in one pass."""
    torch.manual_seed(num_in)
    arena, p = Arena(), program(level, 2)
    source, written, added = p.buffer(num_in), p.buffer(96), p.buffer(70)
    p.linear(source, pack(arena, format, (torch.randn(96, num_in) * 0.1).bfloat16()), written)
    gate_up = (torch.randn(160, num_in) * num_in**-0.5).bfloat16()
    p.gated(source, pack_gated(arena, format, gate_up), norm=None, eps=0.0)
    down = pack(arena, format, torch.randn(70, 80).bfloat16(), torch.randn(70).bfloat16())
    p.linear(None, down, added, add=True)
    x = torch.randn(max(counts), num_in)

    def computed(inputs: Tensor) -> Tensor:
        begin(p, len(inputs))
        put(p, source, inputs)
        poison(p, written, len(inputs))
        put(p, added, torch.ones(len(inputs), 70))
        p.run(0, 3)
        return torch.cat((taken(p, written, len(inputs)), taken(p, added, len(inputs))), 1).clone()

    alone = torch.cat([computed(x[row : row + 1]) for row in range(len(x))])
    assert alone.isfinite().all()
    for count in counts:
        assert torch.equal(computed(x[:count]), alone[:count]), count


@levels
@FEW
@given(
    width=widths,
    rows=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    threads=st.integers(1, 3),
)
def test_embedding_norm_and_selection(level: str, width: int, rows: list[int], threads: int) -> None:
    torch.manual_seed(width)
    tokens, samples = sum(rows), len(rows)
    table, norm = torch.randn(50, width).bfloat16(), torch.rand(width) + 0.5
    p = program(level, threads)
    x, normed = p.buffer(width), p.buffer(width, torch.bfloat16)
    picked = p.buffer(width, of_samples=True)
    p.embed(x, fenced(table))
    p.norm(x, fenced(norm), 1e-5, normed)
    p.select(x, picked)
    batch, _ = batch_of([(0, length) for length in rows], 1)
    ids = torch.randint(0, 50, (tokens,))
    ids[-1] = 49  # the last row, behind which the table ends
    batch.input_ids.copy_(ids)
    p.reserve(tokens + 1, samples + 1)
    p.begin(batch)
    for buffer, count in ((x, tokens), (normed, tokens), (picked, samples)):
        poison(p, buffer, count)
    p.run(0, p.num_ops)
    wanted = table[ids].float()
    assert torch.equal(taken(p, x, tokens), wanted)
    torch.testing.assert_close(taken(p, normed, tokens), rms(wanted, norm, 1e-5).bfloat16(), atol=1e-3, rtol=0.01)
    assert torch.equal(taken(p, picked, samples), wanted[torch.tensor(rows).cumsum(0) - 1])


def test_a_buffer_that_moves_is_seen_where_it_went() -> None:
    p = program(LEVELS_HERE[0], 1)
    buffer = p.buffer(64)
    p.reserve(4, 0)
    assert p.view(buffer, 3).shape == (3, 64)
    p.view(buffer, 4).fill_(1.0)
    p.reserve(1 << 16, 0)  # 16 MB, which no longer fit where they were
    moved = p.view(buffer, 4)
    p.view(buffer, 1 << 16).fill_(2.0)
    assert (moved == 2.0).all()


@levels
@FEW
@given(
    rows=st.sampled_from([1, 3, 16]),
    width=st.one_of(st.integers(1, 130), st.sampled_from([511, 512, 1025])),
    threads=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_argmax(level: str, rows: int, width: int, threads: int, seed: int) -> None:
    p = program(level, threads)
    source, out = p.buffer(width, of_samples=True), p.buffer(1, torch.int64, of_samples=True)
    p.argmax(source, out)
    begin(p, rows, of_samples=True)
    random = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (rows, width), generator=random).float()  # so that there are several of the largest
    strange = torch.tensor([-torch.inf, torch.inf, torch.nan])
    x[:, ::2] = strange[torch.randint(0, 3, x[:, ::2].shape, generator=random)]
    x[0] = torch.nan
    put(p, source, x, behind=torch.inf)  # a NaN would never be the largest
    poison(p, out, rows)
    p.run(0, 1)
    wanted = torch.where(x.isnan().all(-1), 0, x.where(~x.isnan(), -torch.inf).argmax(-1))
    lowest = (x == -torch.inf) | x.isnan()
    first = (x == -torch.inf).int().argmax(-1)
    wanted = torch.where(lowest.all(-1) & ~x.isnan().all(-1), first, wanted)
    assert taken(p, out, rows)[:, 0].tolist() == wanted.tolist()
