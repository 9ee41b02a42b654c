"""Routes and experts by the CPU kernels against torch: shapes, formats, threads, every level this CPU can run.

Memory that a kernel must not read is poisoned: see `native_programs`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pdserve.model.native.weights import Arena, Format, open_packed
from tests.unit.model.native_kit import needs_kernels, rms, rounded, rounded_weight
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


@levels
@pytest.mark.parametrize("format", ["bf16", "int8"])
@FEW
@given(
    rows=st.sampled_from([1, 2, 7, 40, 150]),
    num_experts=st.sampled_from([1, 3, 8, 33]),
    top_k=st.sampled_from([1, 2, 5]),
    width=st.integers(2, 100),
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
    width: int,
    inner: int,
    normalise: bool,
    of_samples: bool,
    threads: int,
) -> None:
    """Rows are routed and go through their experts, twice: the second time what is found is added."""
    torch.manual_seed(rows * inner + num_experts + width)
    top_k = min(top_k, num_experts)
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
    p.experts(source, wide, deep, experts, weights, out, norm=fenced(norm), eps=1e-5)
    p.experts(source, wide, deep, experts, weights, out, counts=counts, add=True)
    begin(p, rows, of_samples=of_samples)
    x, scores = torch.randn(rows, width), torch.randn(rows, num_experts)
    scores[0] = 1.0  # all alike: the first are taken
    best = torch.sort(scores.softmax(-1), dim=-1, descending=True, stable=True)
    chosen, shares = best.indices[:, :top_k], best.values[:, :top_k]
    for idle in set(range(num_experts)) - set(chosen.flatten().tolist()):
        for packed in (wide, deep):  # an expert that no row goes to is not read
            for tensor in packed.tensors:
                tensor[idle] = 255 if tensor.dtype == torch.uint8 else float("nan")
    put(p, source, x)
    put(p, logits, scores, behind=torch.inf)  # a NaN would never be the best
    for buffer in (out, weights, experts):
        poison(p, buffer, rows)
    p.run(0, 3)

    shares = shares / shares.sum(-1, keepdim=True) if normalise else shares
    assert torch.equal(taken(p, experts, rows), chosen)
    torch.testing.assert_close(taken(p, weights, rows), shares)
    assert torch.equal(counts, torch.bincount(chosen.flatten(), minlength=num_experts))
    wanted = torch.zeros(rows, width)
    for seen in (rms(x, norm, 1e-5), x):
        for row, index in ((row, index) for row in range(rows) for index in range(top_k)):
            expert = chosen[row, index]
            gate, up = F.linear(rounded(seen[row, None], format), rounded_weight(gate_ups[expert], format)).chunk(2, -1)
            made = F.linear(rounded(F.silu(gate) * up, format), rounded_weight(downs[expert], format))
            wanted[row] += shares[row, index] * made[0]
    assert relative(taken(p, out, rows), wanted) < (TOLERANCE if format == "bf16" else 4 * TOLERANCE)


@levels
def test_routes_of_logits_that_are_not_numbers_come_last(level: str) -> None:
    p = program(level, 1)
    logits, weights = p.buffer(6), p.buffer(3)
    experts = p.buffer(3, torch.int64)
    p.route(logits, experts, weights, normalise=True)
    begin(p, 2)
    nan, inf = torch.nan, torch.inf
    put(p, logits, torch.tensor([[nan] * 6, [nan, 1.0, -inf, 2.0, nan, 3.0]]), behind=inf)
    p.run(0, 1)
    assert p.view(experts, 2).tolist() == [[0, 1, 2], [5, 3, 1]]
