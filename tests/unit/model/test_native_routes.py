"""Routes and experts by the CPU kernels against torch: shapes, formats, threads, every level this CPU can run.

Memory that a kernel must not read is poisoned: see `native_programs`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pdserve.model.expert_math import choose_experts, clamped_gate
from pdserve.model.layer_spec import MoeSpec
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


def moe_of(num_experts: int, top_k: int, *, norm_top_k: bool = True, **options: Any) -> MoeSpec:
    """A mixture whose router alone matters."""
    return MoeSpec(
        num_experts=num_experts, top_k=top_k, intermediate_size=1, norm_top_k=norm_top_k, **options
    )  # fmt: skip


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
    p.route(logits, experts, weights, moe_of(num_experts, top_k, norm_top_k=normalise))
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
    p.route(logits, experts, weights, moe_of(6, 3))
    begin(p, 2)
    nan, inf = torch.nan, torch.inf
    put(p, logits, torch.tensor([[nan] * 6, [nan, 1.0, -inf, 2.0, nan, 3.0]]), behind=inf)
    p.run(0, 1)
    assert p.view(experts, 2).tolist() == [[0, 1, 2], [5, 3, 1]]


@levels
@FEW
@given(
    rows=st.sampled_from([1, 5, 33]),
    groups=st.sampled_from([(1, 1), (4, 2), (3, 1), (8, 8)]),
    size=st.sampled_from([2, 5, 16]),
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    normalise=st.booleans(),
    corrects=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    threads=st.integers(1, 3),
)
def test_routes_are_torch_s(
    level: str,
    rows: int,
    groups: tuple[int, int],
    size: int,
    scoring: str,
    normalise: bool,
    corrects: bool,
    scale: float,
    threads: int,
) -> None:
    """Scores, the bias of the choice, and groups; a second router of one program shares the scratch."""
    torch.manual_seed(rows + size)
    num_experts, p = groups[0] * size, program(level, threads)
    moe = moe_of(
        num_experts, 2, norm_top_k=normalise, scoring=scoring, num_groups=groups[0], top_groups=groups[1],
        routed_scale=scale,
    )  # fmt: skip
    correction = torch.randn(num_experts) if corrects else None
    logits, weights = p.buffer(num_experts), p.buffer(2)
    experts = p.buffer(2, torch.int64)
    p.route(logits, experts, weights, moe, None if correction is None else fenced(correction))
    begin(p, rows)
    scores = torch.randn(rows, num_experts)
    put(p, logits, scores, behind=torch.inf)
    poison(p, weights, rows)
    poison(p, experts, rows)
    p.run(0, 1)
    chosen, shares = choose_experts(scores, moe, correction)
    assert torch.equal(taken(p, experts, rows), chosen)
    torch.testing.assert_close(taken(p, weights, rows), shares)


@levels
@pytest.mark.parametrize("format", ["bf16", "int8"])
@pytest.mark.parametrize("limit", [None, 0.7])
@FEW
@given(
    rows=st.sampled_from([1, 3, 50]), width=st.sampled_from([20, 64]), inner=st.sampled_from([16, 40, 96]),
    threads=st.integers(1, 2),
)  # fmt: skip
def test_experts_with_biases_and_the_activation_of_gpt_oss(
    level: str, format: Format, limit: float | None, rows: int, width: int, inner: int, threads: int
) -> None:
    torch.manual_seed(rows * inner)
    num_experts, top_k = 4, 2
    gate_ups = (torch.randn(num_experts, 2 * inner, width) * 0.2).bfloat16()
    downs = torch.randn(num_experts, width, inner).bfloat16()
    wide_bias, deep_bias = torch.randn(num_experts, 2 * inner).bfloat16(), torch.randn(num_experts, width).bfloat16()
    arena, p = Arena(), program(level, threads)
    wide = open_packed(arena, format, 2 * inner, width, has_bias=True, num_parts=2, count=num_experts)
    deep = open_packed(arena, format, width, inner, has_bias=True, count=num_experts)
    for index in range(num_experts):
        wide.put(gate_ups[index], wide_bias[index], index=index)
        deep.put(downs[index], deep_bias[index], index=index)
    source, out, weights = p.buffer(width), p.buffer(width), p.buffer(top_k)
    experts = p.buffer(top_k, torch.int64)
    p.experts(source, wide, deep, experts, weights, out, act="gpt_oss", limit=limit)
    begin(p, rows)
    x, shares = torch.randn(rows, width), torch.rand(rows, top_k)
    chosen = torch.rand(rows, num_experts).argsort(-1)[:, :top_k]
    for buffer, value in ((source, x), (weights, shares)):
        put(p, buffer, value)
    p.view(experts, rows).copy_(chosen)
    poison(p, out, rows)
    p.run(0, 1)
    wanted = torch.zeros(rows, width)
    for row, index in ((row, index) for row in range(rows) for index in range(top_k)):
        expert = chosen[row, index]
        products = F.linear(rounded(x[row, None], format), rounded_weight(gate_ups[expert], format))
        gate, up = (products + wide_bias[expert].float()).chunk(2, -1)
        inner_row = rounded(clamped_gate(gate, up, limit), format)
        made = F.linear(inner_row, rounded_weight(downs[expert], format)) + deep_bias[expert].float()
        wanted[row] += shares[row, index] * made[0]
    assert relative(taken(p, out, rows), wanted) < (TOLERANCE if format == "bf16" else 4 * TOLERANCE)
