"""Each CPU kernel against torch: shapes, formats, page sizes, lengths, threads, and every level this CPU can run.

All memory that a kernel must not read is NaN.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.model.native.program import HeadShape, Program, Threads
from pdserve.model.native.weights import Arena, Format, open_packed, pack, pack_gated
from tests.unit.model.native_kit import (
    LEVELS_HERE,
    attended,
    batch_of,
    fill_known,
    needs_kernels,
    rms,
    rotated,
    rounded,
    rounded_weight,
)

pytestmark = needs_kernels
NO_HEADS = HeadShape(layers=1, num_heads=1, num_kv_heads=1, page_tokens=1, dim=2)
TOLERANCE = 0.004
"""Of the norm of a product, whose inputs are rounded here as they are there; a few fall to the other side."""
FEW = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
levels = pytest.mark.parametrize("level", LEVELS_HERE)


def program(level: str, threads: int) -> Program:
    """One for operations that know no heads."""
    return Program(Threads(threads), level, NO_HEADS, torch.zeros(1, 1, 2, 1, 1, 2, dtype=torch.bfloat16))


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Error over size; NaN where there is any."""
    return float((got - wanted).norm() / wanted.norm())


@levels
@pytest.mark.parametrize("format", ["bf16", "int8"])
@FEW
@given(
    rows=st.sampled_from([1, 2, 3, 7, 12, 13, 16, 17, 33, 150]),
    num_out=st.sampled_from([2, 32, 33, 100, 320]),
    num_in=st.sampled_from([32, 34, 64, 200, 1536]),
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
    p.linear(source, packed, out, norm=norm, eps=1e-5)
    p.linear(source, packed, out, add=True)
    p.begin(batch_of([(0, rows)], 1)[0])
    p.view(source, rows).copy_(x)
    p.view(out, rows).fill_(float("nan"))
    p.run(0, 2)
    wide = None if offset is None else offset.float()
    whole = rounded_weight(weight, format)
    wanted = F.linear(rounded(rms(x, norm, 1e-5), format), whole, wide) + F.linear(rounded(x, format), whole, wide)
    assert relative(p.view(out, rows), wanted) < TOLERANCE


@levels
@pytest.mark.parametrize("format", ["bf16", "int8"])
@FEW
@given(
    rows=st.sampled_from([1, 5, 16, 40]),
    inner=st.sampled_from([16, 32, 48, 129]),
    bias=st.booleans(),
    threads=st.integers(1, 3),
)
def test_gated(level: str, format: Format, rows: int, inner: int, bias: bool, threads: int) -> None:
    torch.manual_seed(rows * inner)
    gate_up, down = (torch.randn(2 * inner, 96) * 0.2).bfloat16(), torch.randn(40, inner).bfloat16()
    offset = torch.randn(2 * inner).bfloat16() if bias else None
    x = torch.randn(rows, 96)
    arena, p = Arena(), program(level, threads)
    source, out = p.buffer(96), p.buffer(40)
    p.gated(source, pack_gated(arena, format, gate_up, offset), norm=None, eps=0.0)
    p.linear(None, pack(arena, format, down), out)
    p.begin(batch_of([(0, rows)], 1)[0])
    p.view(source, rows).copy_(x)
    p.run(0, 2)
    wide = None if offset is None else offset.float()
    gate, up = F.linear(rounded(x, format), rounded_weight(gate_up, format), wide).chunk(2, -1)
    wanted = F.linear(rounded(F.silu(gate) * up, format), rounded_weight(down, format))
    assert relative(p.view(out, rows), wanted) < (TOLERANCE if format == "bf16" else 4 * TOLERANCE)


@levels
@FEW
@given(
    heads=st.sampled_from([(9, 3, 64), (4, 2, 16), (8, 1, 32), (6, 2, 80), (2, 2, 128)]),
    page_tokens=st.sampled_from([1, 5, 16, 64]),
    rows=st.lists(
        st.sampled_from([(0, 1), (0, 2), (0, 40), (17, 18), (255, 256), (300, 301), (130, 150), (1, 90)]),
        min_size=1,
        max_size=5,
    ),
    qk_norm=st.booleans(),
    window=st.sampled_from([0, 0, 7, 130]),
    softcap=st.sampled_from([0.0, 0.0, 5.0]),
    with_sinks=st.booleans(),
    threads=st.integers(1, 3),
)
def test_attention(
    level: str,
    heads: tuple[int, int, int],
    page_tokens: int,
    rows: list[tuple[int, int]],
    qk_norm: bool,
    window: int,
    softcap: float,
    with_sinks: bool,
    threads: int,
) -> None:
    """Heads to their places, then attention, in the second of two layers; prompts, chunks and decode rows at once."""
    num_heads, num_kv_heads, dim = heads
    torch.manual_seed(len(rows))
    batch, num_pages = batch_of(rows, page_tokens)
    tokens = len(batch.positions)
    kv = torch.full((num_pages, 2, 2, num_kv_heads, page_tokens, dim), float("nan"), dtype=torch.bfloat16)
    fill_known(kv, batch, page_tokens)
    x = torch.randn(tokens, num_heads + 2 * num_kv_heads, dim)
    q_norm, k_norm = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5) if qk_norm else (None, None)
    inverse = 1e4 ** (-torch.arange(0, dim, 2) / dim)
    sinks = torch.randn(num_heads) if with_sinks else None

    mine = kv.clone()
    p = Program(Threads(threads), level, HeadShape(2, num_heads, num_kv_heads, page_tokens, dim), mine)
    qkv, out = p.buffer(x[0].numel()), p.buffer(num_heads * dim)
    p.angles(inverse, 1.0)
    p.place(qkv, 1, q_norm, k_norm, 1e-6)
    p.attend(1, out, window=window, softcap=softcap, sinks=sinks)
    p.begin(batch)
    p.view(qkv, tokens).copy_(x.flatten(1))
    p.run(0, p.num_ops)

    q = rotated(rms(x[:, :num_heads], q_norm, 1e-6), batch.positions, inverse)
    k = rotated(rms(x[:, num_heads:-num_kv_heads], k_norm, 1e-6), batch.positions, inverse)
    kv[batch.write_pages, 1, 0, :, batch.write_slots] = k.bfloat16()
    kv[batch.write_pages, 1, 1, :, batch.write_slots] = x[:, -num_kv_heads:].bfloat16()
    torch.testing.assert_close(mine, kv, atol=0.04, rtol=0.01, equal_nan=True)
    wanted = attended(q, kv, batch, page_tokens, layer=1, window=window, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(p.view(out, tokens), wanted, atol=0.03, rtol=0.02)


@levels
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim"), [(4, 1, 64), (9, 3, 64), (5, 5, 64), (8, 4, 128), (16, 8, 64)]
)
@pytest.mark.parametrize("page_tokens", [16, 5, 64])
def test_long_rows_are_shared_by_the_threads(
    level: str, threads: int, num_heads: int, num_kv_heads: int, dim: int, page_tokens: int
) -> None:
    """Queries over thousands of keys, whose pieces are merged, beside shorter ones; of one, of some or of all heads.
    Twice in a step, as by two layers, for counters that go on from one to the next."""
    rows = [(at, at + 1) for at in (3000, 2100, 511, 510, 700, 40)]
    batch, num_pages = batch_of(rows, page_tokens)
    kv = torch.full((num_pages, 1, 2, num_kv_heads, page_tokens, dim), float("nan"), dtype=torch.bfloat16)
    fill_known(kv, batch, page_tokens)
    p = Program(Threads(threads), level, HeadShape(1, num_heads, num_kv_heads, page_tokens, dim), kv)
    qkv, outs = p.buffer((num_heads + 2 * num_kv_heads) * dim), [p.buffer(num_heads * dim) for _ in range(2)]
    p.angles(torch.zeros(dim // 2), 1.0)
    p.place(qkv, 0, None, None, 0.0)
    for window in (0, 600):
        attend = p.num_ops
        for out in outs:
            p.attend(0, out, window=window)
        x = torch.randn(len(rows), num_heads + 2 * num_kv_heads, dim)
        p.begin(batch)
        p.view(qkv, len(rows)).copy_(x.flatten(1))
        p.run(0, 2)
        p.run(attend, p.num_ops)
        q = x[:, :num_heads]
        wanted = attended(q, kv, batch, page_tokens, layer=0, window=window, softcap=0.0, sinks=None)
        for out in outs:
            torch.testing.assert_close(p.view(out, len(rows)), wanted, atol=0.01, rtol=0.02)


@levels
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim"), [(10, 5, 64), (5, 5, 128), (64, 4, 32), (15, 3, 96), (7, 1, 40)]
)
@pytest.mark.parametrize("threads", [1, 2])
def test_query_heads_share_what_is_loaded(
    level: str, threads: int, num_heads: int, num_kv_heads: int, dim: int
) -> None:
    """More heads than are taken together, so that the last ones are fewer; a prompt among rows that decode."""
    page_tokens, rows = 16, [(at, at + 1) for at in (0, 15, 16, 127, 128, 260, 400)] + [(9, 30)]
    batch, num_pages = batch_of(rows, page_tokens)
    tokens = len(batch.positions)
    kv = torch.full((num_pages, 1, 2, num_kv_heads, page_tokens, dim), float("nan"), dtype=torch.bfloat16)
    fill_known(kv, batch, page_tokens)
    p = Program(Threads(threads), level, HeadShape(1, num_heads, num_kv_heads, page_tokens, dim), kv)
    x = torch.randn(tokens, num_heads + 2 * num_kv_heads, dim)
    qkv, out = p.buffer(x[0].numel()), p.buffer(num_heads * dim)
    p.angles(torch.zeros(dim // 2), 1.0)
    p.place(qkv, 0, None, None, 0.0)
    for window in (0, 100):
        p.attend(0, out, window=window)
        p.begin(batch)
        p.view(qkv, tokens).copy_(x.flatten(1))
        p.run(0, p.num_ops)
        wanted = attended(x[:, :num_heads], kv, batch, page_tokens, layer=0, window=window, softcap=0.0, sinks=None)
        torch.testing.assert_close(p.view(out, tokens), wanted, atol=0.01, rtol=0.02)


@levels
def test_embedding_selection_and_norm(level: str) -> None:
    table = torch.randn(50, 70).bfloat16()
    norm = torch.rand(70) + 0.5
    p = program(level, 2)
    x, normed = p.buffer(70), p.buffer(70, torch.bfloat16)
    picked = p.buffer(70, of_samples=True)
    p.embed(x, table)
    p.norm(x, norm, 1e-5, normed)
    p.select(x, picked)
    batch, _ = batch_of([(0, 3), (0, 5)], 1)
    ids = torch.tensor([3, 49, 0, 7, 7, 8, 9, 10])
    batch.input_ids.copy_(ids)
    p.begin(batch)
    p.run(0, p.num_ops)
    wanted = table[ids].float()
    assert torch.equal(p.view(x, 8), wanted)
    torch.testing.assert_close(p.view(normed, 8), rms(wanted, norm, 1e-5).bfloat16(), atol=1e-3, rtol=0.01)
    assert torch.equal(p.view(picked, 2), wanted[[2, 7]])


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
    width=st.sampled_from([1, 31, 32, 100, 1025]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_best(level: str, rows: int, width: int, threads: int, seed: int) -> None:
    p = program(level, threads)
    source, out = p.buffer(width, of_samples=True), p.buffer(1, torch.int64, of_samples=True)
    p.best(source, out)
    p.begin_samples(rows)
    random = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (rows, width), generator=random).float()  # so that there are several of the largest
    strange = torch.tensor([-torch.inf, torch.inf, torch.nan])
    x[:, ::2] = strange[torch.randint(0, 3, x[:, ::2].shape, generator=random)]
    x[0] = torch.nan
    p.view(source, rows).copy_(x)
    p.run(0, 1)
    wanted = torch.where(x.isnan().all(-1), 0, x.where(~x.isnan(), -torch.inf).argmax(-1))
    lowest = (x == -torch.inf) | x.isnan()
    first = (x == -torch.inf).int().argmax(-1)
    wanted = torch.where(lowest.all(-1) & ~x.isnan().all(-1), first, wanted)
    assert p.view(out, rows)[:, 0].tolist() == wanted.tolist()


@levels
@pytest.mark.parametrize("format", ["bf16", "int8"])
@FEW
@given(
    rows=st.sampled_from([1, 2, 7, 40, 150]),
    num_experts=st.sampled_from([1, 3, 8, 33]),
    top_k=st.sampled_from([1, 2, 5]),
    inner=st.sampled_from([16, 32, 48, 100]),
    normalise=st.booleans(),
    of_samples=st.booleans(),
    threads=st.integers(1, 3),
)
def test_experts(
    level: str,
    format: Format,
    rows: int,
    num_experts: int,
    top_k: int,
    inner: int,
    normalise: bool,
    of_samples: bool,
    threads: int,
) -> None:
    """Rows are routed and go through their experts, twice: the second time what is found is added."""
    torch.manual_seed(rows * inner + num_experts)
    top_k, width = min(top_k, num_experts), 70
    gate_ups = (torch.randn(num_experts, 2 * inner, width) * 0.2).bfloat16()
    downs = torch.randn(num_experts, width, inner).bfloat16()
    arena, p = Arena(), program(level, threads)
    wide = open_packed(arena, format, 2 * inner, width, num_parts=2, count=num_experts)
    deep = open_packed(arena, format, width, inner, count=num_experts)
    for index in range(num_experts):
        wide.put(gate_ups[index], index=index)
        deep.put(downs[index], index=index)
    source, out, logits, weights = (
        p.buffer(size, of_samples=of_samples) for size in (width, width, num_experts, top_k)
    )
    experts = p.buffer(top_k, torch.int64, of_samples=of_samples)
    counts, norm = torch.zeros(num_experts, dtype=torch.int64), torch.rand(width) + 0.5
    p.route(logits, experts, weights, normalise=normalise)
    p.experts(source, wide, deep, experts, weights, out, norm=norm, eps=1e-5)
    p.experts(source, wide, deep, experts, weights, out, counts=counts, add=True)
    p.begin_samples(rows) if of_samples else p.begin(batch_of([(0, rows)], 1)[0])
    x, scores = torch.randn(rows, width), torch.randn(rows, num_experts)
    scores[0] = 1.0  # all alike: the first are taken
    best = torch.sort(scores.softmax(-1), dim=-1, descending=True, stable=True)
    chosen, shares = best.indices[:, :top_k], best.values[:, :top_k]
    for idle in set(range(num_experts)) - set(chosen.flatten().tolist()):
        for packed in (wide, deep):  # an expert that no row goes to is not read
            for tensor in packed.tensors:
                tensor[idle] = 255 if tensor.dtype == torch.uint8 else float("nan")
    p.view(source, rows).copy_(x)
    p.view(logits, rows).copy_(scores)
    p.view(out, rows).fill_(float("nan"))
    p.run(0, 3)

    shares = shares / shares.sum(-1, keepdim=True) if normalise else shares
    assert torch.equal(p.view(experts, rows), chosen)
    torch.testing.assert_close(p.view(weights, rows), shares)
    assert torch.equal(counts, torch.bincount(chosen.flatten(), minlength=num_experts))
    wanted = torch.zeros(rows, width)
    for seen in (rms(x, norm, 1e-5), x):
        for row, index in ((row, index) for row in range(rows) for index in range(top_k)):
            expert = chosen[row, index]
            gate, up = F.linear(rounded(seen[row, None], format), rounded_weight(gate_ups[expert], format)).chunk(2, -1)
            made = F.linear(rounded(F.silu(gate) * up, format), rounded_weight(downs[expert], format))
            wanted[row] += shares[row, index] * made[0]
    assert relative(p.view(out, rows), wanted) < (TOLERANCE if format == "bf16" else 4 * TOLERANCE)


@levels
def test_routes_of_logits_that_are_not_numbers_come_last(level: str) -> None:
    p = program(level, 1)
    logits, weights = p.buffer(6), p.buffer(3)
    experts = p.buffer(3, torch.int64)
    p.route(logits, experts, weights, normalise=True)
    p.begin(batch_of([(0, 2)], 1)[0])
    nan, inf = torch.nan, torch.inf
    p.view(logits, 2).copy_(torch.tensor([[nan] * 6, [nan, 1.0, -inf, 2.0, nan, 3.0]]))
    p.run(0, 1)
    assert p.view(experts, 2).tolist() == [[0, 1, 2], [5, 3, 1]]
