"""Triton's kernels between the products, beside torch's operations: norms, rotation and pages, gates."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from pdserve.base.env import triton_is_interpreted
from pdserve.model.attention.interface import Heads
from pdserve.model.attention.triton_pages import placed
from pdserve.model.expert_math import ExpertWeights
from pdserve.model.gpu import small_batch_gemm
from pdserve.model.gpu.experts import sort_rows
from pdserve.model.gpu.routes import MAX_ROWS, order_rows
from pdserve.model.gpu.sampling import keep_argmax
from pdserve.model.layer_spec import Activation, MoeSpec
from pdserve.model.layers.dense import RMSNorm
from pdserve.model.layers.kernels import FastKernels, Rotary
from pdserve.model.layers.triton_kernels import TritonKernels
from pdserve.model.rope import RopeSpec
from tests.unit.model.triton_kit import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to a rounding or two of the number format."""
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[got.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 100), (0, 64), (2, 1000)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_are_torch_s(rows: int, width: int, offset: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, more = torch.randn(2, rows, width, generator=generator).to(DEVICE, dtype)
    weight = torch.linspace(0.5, 1.5, width).to(DEVICE, dtype)
    close(TritonKernels().norm(x, weight, 1e-6, offset), FastKernels().norm(x, weight, 1e-6, offset))
    mine, theirs = x.clone(), x.clone()
    expected = FastKernels().add_norm(theirs, more, weight, 1e-6, offset)
    close(TritonKernels().add_norm(mine, more, weight, 1e-6, offset), expected)
    close(mine, theirs)


def test_norms_read_rows_that_lie_apart() -> None:
    x = torch.randn(4, 96, device=DEVICE)[:, :40]
    weight = torch.ones(40, device=DEVICE)
    close(TritonKernels().norm(x, weight, 1e-6), FastKernels().norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 7), (3, 1500), (0, 8)])
def test_the_gate_is_torch_s(rows: int, width: int, dtype: torch.dtype) -> None:
    """Of the two halves of one product, with values at which exp overflows."""
    both = (torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(1)) * 60).to(DEVICE, dtype)
    gate, up = both.chunk(2, -1)
    close(TritonKernels().swiglu(gate, up), FastKernels().swiglu(gate, up))
    up = up / 60  # torch has 0 where this GELU has 1e-7
    close(TritonKernels().geglu(gate, up), FastKernels().geglu(gate, up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "dim"), [(2, 3, 16), (1, 2, 640), (0, 2, 8)])
def test_gates_by_a_sigmoid_are_torch_s(rows: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    """One gate for each output, beside the queries of a projection; and one for each row."""
    generator = torch.Generator().manual_seed(heads)
    x = torch.randn(rows, heads, dim, generator=generator).to(DEVICE, dtype)
    projected = (torch.randn(rows, heads, 2, dim, generator=generator) * 20).to(DEVICE, dtype)
    gate = projected[:, :, 1]
    close(TritonKernels().gate(x, gate), FastKernels().gate(x, gate))
    flat, one = x.flatten(1), projected.flatten(1)[:, :1]
    close(TritonKernels().gate(flat, one), FastKernels().gate(flat, one))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 24), (9, 3, 8)])
@pytest.mark.parametrize(
    ("with_norm", "offset", "share", "has_gates"),
    [(False, 0.0, 1.0, False), (True, 0.0, 0.5, False), (True, 1.0, 1.0, True), (True, 0.0, 0.0, False)],
)
def test_heads_are_finished_and_placed(
    heads: int, kv_heads: int, dim: int, with_norm: bool, offset: float, share: float, has_gates: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Queries come out, keys and values lie in their pages, nothing else is touched, and a page of -1 takes nothing."""
    tokens, page_tokens = 3, 4
    qkv = torch.randn(tokens, heads * (1 + has_gates) + 2 * kv_heads, dim, generator=torch.Generator().manual_seed(dim))
    norms: list[RMSNorm | None] = [None, None]
    if with_norm:
        norms = [RMSNorm(torch.linspace(a, 2, dim).to(DEVICE, dtype), 1e-6, FastKernels(), offset) for a in (0.5, 1.0)]
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    if share:
        rotary = Rotary(RopeSpec(theta=100.0, partial_rotary_factor=share), dim, dtype, torch.device(DEVICE))
        cos, sin = rotary.tables(torch.tensor([0, 5, 77], device=DEVICE))
    found = Heads(qkv.to(DEVICE, dtype), heads, kv_heads, norms[0], norms[1], cos, sin, has_gates)
    pool = torch.full((4, 2, 2, kv_heads, page_tokens, dim), float("nan"), dtype=dtype, device=DEVICE)
    pages, slots = torch.tensor([2, -1, 0], device=DEVICE), torch.tensor([3, 1, 0], device=DEVICE)
    q = placed(found, pool[:, 1], pages, slots)
    expected_q, expected_k, expected_v = found.finished()
    close(q, expected_q)
    for token, page, slot in ((0, 2, 3), (2, 0, 0)):
        close(pool[page, 1, 0, :, slot], expected_k[token])
        close(pool[page, 1, 1, :, slot], expected_v[token])
        pool[page, 1, :, :, slot] = float("nan")
    assert pool.isnan().all(), "a slot that is no token's was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "top_k", "num_experts"), [(1, 2, 5), (13, 3, 4), (40, 1, 2), (3, 2, 8), (0, 2, 4)])
def test_experts_are_torch_s(tokens: int, top_k: int, num_experts: int, dtype: torch.dtype) -> None:
    """With experts that nobody chose, more rows than a tile, and sizes that fill no block."""
    generator = torch.Generator().manual_seed(tokens)
    hidden, inner = 40, 24
    x = torch.randn(tokens, hidden, generator=generator).to(DEVICE, dtype)
    gate_up = (torch.randn(num_experts, 2 * inner, hidden, generator=generator) / 6).to(DEVICE, dtype)
    down = (torch.randn(num_experts, hidden, inner, generator=generator) / 5).to(DEVICE, dtype)
    slots = torch.randint(0, max(1, num_experts - 1), (tokens * top_k,), generator=generator).to(DEVICE)
    weights = torch.rand(tokens, top_k, generator=generator).to(DEVICE)
    held = ExpertWeights(gate_up, down)
    got, expected = (one.experts(x, slots, held) for one in (TritonKernels(), FastKernels()))
    close(got, expected)
    shape = (tokens, top_k, hidden)
    close(TritonKernels().weighted_sum(got.view(shape), weights), FastKernels().weighted_sum(got.view(shape), weights))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(1, 5, 2), (6, 16, 3), (3, 8, 8), (0, 4, 2)])
@pytest.mark.parametrize("normalise", [False, True])
def test_routes_are_torch_s(tokens: int, num_experts: int, top_k: int, normalise: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(tokens)] or [torch.empty(0)])
    logits = (logits[:tokens].reshape(tokens, num_experts) / 3).to(DEVICE, dtype)
    moe = MoeSpec(num_experts=num_experts, top_k=top_k, intermediate_size=1, norm_top_k=normalise)
    got, expected = (one.route(logits, moe) for one in (TritonKernels(), FastKernels()))
    assert torch.equal(got[0], expected[0])
    close(got[1], expected[1])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize(("num_experts", "groups"), [(12, (1, 1)), (16, (4, 2)), (15, (3, 1)), (40, (8, 3))])
def test_routes_with_groups_and_a_correction_are_torch_s(
    scoring: Literal["softmax", "sigmoid"], corrects: bool, num_experts: int, groups: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    moe = MoeSpec(
        num_experts=num_experts, top_k=3, intermediate_size=1, norm_top_k=True, scoring=scoring,
        correction_bias=corrects, num_groups=groups[0], top_groups=groups[1], routed_scale=2.5,
    )  # fmt: skip
    logits = torch.randn(7, num_experts, generator=generator).to(DEVICE)
    correction = torch.randn(num_experts, generator=generator).to(DEVICE) if corrects else None
    got, expected = (one.route(logits, moe, correction) for one in (TritonKernels(), FastKernels()))
    assert torch.equal(got[0], expected[0])
    close(got[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_experts_with_biases_and_the_activation_of_gpt_oss_are_torch_s(limit: float | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, inner, num_experts = 40, 24, 3

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / 6).to(DEVICE, dtype)

    held = ExpertWeights(
        normal(num_experts, 2 * inner, hidden), normal(num_experts, hidden, inner), normal(num_experts, 2 * inner),
        normal(num_experts, hidden), act="gpt_oss", act_limit=limit,
    )  # fmt: skip
    x, slots = normal(9, hidden) * 6, torch.randint(0, num_experts, (18,), generator=generator).to(DEVICE)
    close(*(one.experts(x, slots, held) for one in (TritonKernels(), FastKernels())))


@pytest.mark.parametrize(("rows", "num_experts", "tile"), [(1, 3, 16), (7, 5, 2), (130, 6, 16), (300, 128, 64)])
def test_rows_are_put_in_the_order_of_their_experts(rows: int, num_experts: int, tile: int) -> None:
    slots = torch.randint(0, num_experts, (rows,), generator=torch.Generator().manual_seed(rows)).to(DEVICE)
    order, row_ends, tile_ends = order_rows(slots, num_experts, tile)
    counts = torch.bincount(slots, minlength=num_experts)
    assert torch.equal(order, slots.argsort(stable=True))
    assert torch.equal(row_ends, counts.cumsum(0)) and torch.equal(tile_ends, (-(-counts // tile)).cumsum(0))


def test_more_rows_than_are_compared_are_sorted() -> None:
    slots = torch.randint(0, 6, (MAX_ROWS + 1,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found = sort_rows(slots, 6, 64)
    counts = torch.bincount(slots, minlength=6)
    assert torch.equal(found.order, slots.argsort(stable=True)) and torch.equal(found.row_ends, counts.cumsum(0))
    assert torch.equal(found.tile_ends, (-(-counts // 64)).cumsum(0)) and found.tile_ends[-1] <= found.num_tiles


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 24])
def test_angles_are_torch_s(dim: int, dtype: torch.dtype) -> None:
    rotary = Rotary(RopeSpec(theta=1e4), dim, dtype, torch.device(DEVICE))
    for positions in ([], [0, 1, 5000, 40959]):
        where = torch.tensor(positions, dtype=torch.int64, device=DEVICE)
        got = TritonKernels().angles(where, rotary.inverse, 0.75, dtype)
        expected = FastKernels().angles(where, rotary.inverse, 0.75, dtype)
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-2 if dtype != torch.float32 else 1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16] if triton_is_interpreted() else [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "num_out", "num_in"), [(1, 128, 256), (16, 130, 80), (3, 34, 1040), (17, 130, 80), (64, 60, 96)]
)
def test_products_of_few_rows_are_torch_s(
    rows: int, num_out: int, num_in: int, with_bias: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_out)
    x = torch.randn(rows, 2 * num_in, generator=generator).to(DEVICE, dtype)[:, :num_in]
    weight = (torch.randn(num_out, num_in, generator=generator) * num_in**-0.5).to(DEVICE, dtype)
    bias = torch.randn(num_out, generator=generator).to(DEVICE, dtype) if with_bias else None
    assert small_batch_gemm.fits(x, weight)
    close(TritonKernels().linear(x, weight, bias), FastKernels().linear(x, weight, bias))
    for act in ACTIVATIONS:
        close(TritonKernels().gated(x, weight, bias, act), FastKernels().gated(x, weight, bias, act))


@pytest.mark.parametrize(
    ("rows", "num_in", "dtype"),
    [(0, 64, torch.bfloat16), (65, 64, torch.bfloat16), (2, 64, torch.float32), (2, 40, torch.bfloat16)],
)
def test_other_products_are_left_to_the_library(rows: int, num_in: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, num_in, device=DEVICE).to(dtype), torch.randn(6, num_in, device=DEVICE).to(dtype)
    assert not small_batch_gemm.fits(x, weight)
    close(TritonKernels().linear(x, weight, None), FastKernels().linear(x, weight, None))
    for act in ACTIVATIONS:
        close(TritonKernels().gated(x, weight, None, act), FastKernels().gated(x, weight, None, act))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_likeliest_are_kept_and_put_behind_their_rows(dtype: torch.dtype) -> None:
    """Rows over several blocks of the vocabulary: the first of equals, in the last block, and nothing but NaN."""
    vocab = 9000
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    logits[0, [17, 5000]] = 30.0
    logits[1, vocab - 1] = 30.0
    logits[2] = float("nan")
    kept, best = torch.zeros_like(logits), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    tokens = torch.zeros(5, 8, dtype=torch.int32, device=DEVICE)
    lines, positions = (torch.tensor(x, device=DEVICE) for x in ([4, 0, 2], [3, 0, 6]))
    keep_argmax(logits, kept, best, tokens, lines, positions)
    assert torch.equal(kept.nan_to_num(1.0), logits.nan_to_num(1.0))
    assert best.tolist()[:2] == [17, vocab - 1] and 0 <= int(best[2]) < vocab
    expected = torch.zeros(5, 8, dtype=torch.int32, device=DEVICE)
    expected[lines, positions + 1] = best.int()
    assert torch.equal(tokens, expected)
