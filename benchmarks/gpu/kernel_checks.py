"""The device's kernels beside torch's operations at the shapes of real models. Called by `check_cuda.py`.

Each check raises AssertionError. Pages are scattered, and slots without a token are NaN.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.delta_checks import delta_checks
from pdserve.config.groups import AttentionBackendName
from pdserve.executor.backend_choice import Choice, make_attention, make_kernels
from pdserve.executor.input_batch import build_batch, read_plan
from pdserve.executor.interface import BatchPlan, BatchRow
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.layout import KVLayout, attention_group, pages_for
from pdserve.model.attention.interface import AttentionBackend, Heads, ScoreRule
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.expert_math import ExpertWeights
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.layers.dense import RMSNorm
from pdserve.model.layers.kernels import FastKernels, Rotary
from pdserve.model.rope import RopeSpec

Span = tuple[int, int]
"""Positions `[start, end)` that a row computes."""
TOLERANCE = {"bfloat16": 3e-2, "float32": 2e-4}


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """Heads and pages. `window`: tokens that a query sees; None: all. A share `rotary` of the dimensions is rotated.

    `scale`, `softcap` and `has_sinks`: see `AttentionSpec`.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: str = "bfloat16"
    window: int | None = None
    rotary: float = 1.0
    norm_offset: float = 0.0
    has_gates: bool = False
    scale: float | None = None
    softcap: float | None = None
    has_sinks: bool = False


SHAPES = (
    AttentionShape("Qwen3-0.6B", 16, 8, 128, 16),
    AttentionShape("Qwen3-8B", 32, 8, 128, 16),
    AttentionShape("Qwen3-8B, page 1", 32, 8, 128, 1),
    AttentionShape("Qwen3-30B-A3B", 32, 4, 128, 64),
    AttentionShape("SmolLM2-135M", 9, 3, 64, 16),
)
QWEN3_NEXT = AttentionShape("Qwen3-Next", 16, 2, 256, 16, rotary=0.25, norm_offset=1.0, has_gates=True)
WINDOW = AttentionShape("Qwen3-0.6B with a window", 16, 8, 128, 16, window=512)
GEMMA2 = AttentionShape("Gemma-2-9B", 16, 8, 256, 16, scale=256**-0.5, softcap=50.0)
GPT_OSS = AttentionShape("gpt-oss", 64, 8, 64, 16, window=128, has_sinks=True)
NOPE = AttentionShape("SmolLM3-3B without rotation", 16, 4, 128, 16, rotary=0.0)
HYBRID_SHAPES = (QWEN3_NEXT, WINDOW, GEMMA2, GPT_OSS, NOPE)
TINY_SHAPES = (AttentionShape("tiny", 4, 2, 16, 4, "float32"),)
TINY_HYBRID_SHAPES = (
    AttentionShape("tiny, a part rotated", 4, 2, 16, 4, "float32", rotary=0.5, norm_offset=1.0, has_gates=True),
    AttentionShape("tiny, a window", 4, 2, 16, 4, "float32", window=6),
    AttentionShape("tiny, capped", 4, 2, 16, 4, "float32", rotary=0.0, scale=0.3, softcap=2.0, has_sinks=True),
)
STEPS: dict[str, tuple[Span, ...]] = {
    "decode": ((0, 1), (700, 701), (4095, 4096), (15, 16), (8000, 8001)),
    "prefill": ((0, 1000), (0, 1), (0, 130)),
    "mixed": ((512, 1537), (99, 100), (0, 64), (3000, 3001)),
}
TINY_STEPS: dict[str, tuple[Span, ...]] = {"decode": ((0, 1), (9, 10)), "mixed": ((5, 12), (3, 4), (0, 6))}


def checks(
    device: torch.device, backends: tuple[AttentionBackendName, ...], *, tiny: bool = False
) -> list[tuple[str, Callable[[], object]]]:
    """All checks, by name."""

    def attention(
        backend: AttentionBackendName, shape: AttentionShape, spans: tuple[Span, ...]
    ) -> Callable[[], object]:
        return lambda: check_attention(backend, shape, spans, device)

    shapes, steps = (TINY_SHAPES, TINY_STEPS) if tiny else (SHAPES, STEPS)
    found = [
        (f"{backend} attention, {shape.name}, {step}", attention(backend, shape, spans))
        for backend in backends
        for shape in shapes
        for step, spans in steps.items()
    ]
    sizes = (3,) if tiny else (1, 16, 300, 4096)
    return found + [
        (f"experts, {size} tokens", lambda size=size: check_experts(size, device, tiny=tiny)) for size in sizes
    ]


def hybrid_checks(device: torch.device, *, tiny: bool = False) -> list[tuple[str, Callable[[], object]]]:
    """Checks for hybrid models and other options: delta rules, rotations, windows, soft caps, sinks."""

    def attention(shape: AttentionShape, spans: tuple[Span, ...]) -> Callable[[], object]:
        return lambda: check_attention("triton", shape, spans, device)

    shapes, steps = (TINY_HYBRID_SHAPES, TINY_STEPS) if tiny else (HYBRID_SHAPES, STEPS)
    return delta_checks(device, tiny=tiny) + [
        (f"triton attention, {shape.name}, {step}", attention(shape, spans))
        for shape in shapes
        for step, spans in steps.items()
    ]


def check_attention(
    backend: AttentionBackendName, shape: AttentionShape, spans: tuple[Span, ...], device: torch.device
) -> None:
    """Attention of a step, and what it leaves in the pages, are those of the torch backend."""
    batch, pool = step_of(shape, spans, device)
    theirs = pool()
    expected = attention_of("torch", theirs, shape, device).begin(batch).attend(1, heads_of(shape, batch))
    mine = pool()
    choice: Choice = "flashinfer" if backend == "flashinfer" else "triton"
    got = attention_of(choice, mine, shape, device).begin(batch).attend(1, heads_of(shape, batch))
    _close(got, expected, shape.dtype, "attention")
    _close(mine.pages.nan_to_num(7.0), theirs.pages.nan_to_num(7.0), shape.dtype, "pages")


def attention_of(choice: Choice, pool: KVPool, shape: AttentionShape, device: torch.device) -> AttentionBackend:
    """The backend over `pool`."""
    rule = ScoreRule(window=shape.window, scale=shape.scale, softcap=shape.softcap)
    return make_attention(choice, pool, shape.num_heads, device, rule=rule)


def check_experts(num_tokens: int, device: torch.device, *, tiny: bool) -> None:
    """Experts of Qwen3-30B-A3B, each computed alone by torch."""
    hidden, inner, num_experts, top_k = (32, 16, 4, 2) if tiny else (2048, 768, 128, 8)
    dtype = "float32" if tiny else "bfloat16"
    generator = torch.Generator(device).manual_seed(num_tokens)
    kind = torch.float32 if tiny else torch.bfloat16

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(kind)

    x, gate_up = normal(num_tokens, hidden), normal(num_experts, 2 * inner, hidden, scale=hidden**-0.5)
    down = normal(num_experts, hidden, inner, scale=inner**-0.5)
    slots = torch.randint(0, num_experts, (num_tokens * top_k,), generator=generator, device=device)
    mine, theirs = make_kernels("triton"), FastKernels()
    got, expected = (one.experts(x, slots, ExpertWeights(gate_up, down)) for one in (mine, theirs))
    _close(got, expected, dtype, "experts")
    weights = torch.rand(num_tokens, top_k, generator=generator, device=device)
    outputs = expected.view(num_tokens, top_k, hidden)
    _close(mine.weighted_sum(outputs, weights), theirs.weighted_sum(outputs, weights), dtype, "weighted sum")


def step_of(
    shape: AttentionShape, spans: tuple[Span, ...], device: torch.device
) -> tuple[ForwardBatch, Callable[[], KVPool]]:
    """A batch of these rows, and pools that hold what is before them, all alike."""
    counts = [pages_for(end, shape.page_tokens) for _, end in spans]
    group = attention_group(
        num_layers=2, page_tokens=shape.page_tokens,
        num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        dtype=shape.dtype,
    )  # fmt: skip
    table = PageTable(len(spans), max(counts))
    free = list(range(sum(counts) + 1))
    random.Random(1).shuffle(free)
    rows, before = [], []
    for (start, end), count in zip(spans, counts, strict=True):
        pages = [free.pop() for _ in range(count)]
        row = table.open(pages)
        assert row is not None
        rows.append(BatchRow(str(row), row, start, end, True))
        at = np.arange(start)
        before.append(np.stack((np.array(pages)[at // shape.page_tokens], at % shape.page_tokens)))
    known = np.concatenate(before, 1)
    where = torch.from_numpy(known.astype(np.int64)).to(device)

    def pool() -> KVPool:
        made = KVPool(group, sum(counts) + 1, device)
        made.pages.fill_(float("nan"))
        seeded = torch.Generator(device).manual_seed(3)
        content = torch.randn(
            len(where[0]), 2, 2, shape.num_kv_heads, shape.head_dim, generator=seeded, device=device
        )  # fmt: skip
        made.pages.permute(0, 4, 1, 2, 3, 5)[where[0], where[1]] = content.to(made.pages.dtype)
        return made

    tokens = torch.zeros(len(spans), max(end for _, end in spans), dtype=torch.int32, device=device)
    prompts = np.zeros(table.num_rows, dtype=np.int64)
    batch = build_batch(read_plan(BatchPlan(0, tuple(rows)), table, prompts, KVLayout((group,))), tokens)
    return batch, pool


def heads_of(shape: AttentionShape, batch: ForwardBatch) -> Heads:
    """The same random projections every time, with norms."""
    device = batch.positions.device
    dtype = torch.bfloat16 if shape.dtype == "bfloat16" else torch.float32
    cos: Tensor | None = None
    sin: Tensor | None = None
    if shape.rotary:
        rope = RopeSpec(theta=1e6, partial_rotary_factor=shape.rotary)
        cos, sin = Rotary(rope, shape.head_dim, dtype, device).tables(batch.positions)
    sinks = torch.linspace(-1.0, 2.0, shape.num_heads, device=device) if shape.has_sinks else None
    num = shape.num_heads * (1 + shape.has_gates) + 2 * shape.num_kv_heads
    generator = torch.Generator(device).manual_seed(5)
    qkv = torch.randn(len(batch.positions), num, shape.head_dim, generator=generator, device=device).to(dtype)
    norms = [
        RMSNorm(
            torch.linspace(low, 1.5, shape.head_dim, device=device).to(dtype), 1e-6, FastKernels(), shape.norm_offset
        )
        for low in (0.5, 1.0)
    ]
    return Heads(qkv, shape.num_heads, shape.num_kv_heads, norms[0], norms[1], cos, sin, shape.has_gates, sinks)


def _close(got: Tensor, expected: Tensor, dtype: str, what: str) -> None:
    """Equal up to some roundings, and never NaN."""
    assert got.isfinite().all(), f"{what}: not finite"
    worst = float((got.float() - expected.float()).abs().max())
    assert worst <= TOLERANCE[dtype] * max(1.0, float(expected.abs().max())), f"{what}: differs by {worst:.3g}"
