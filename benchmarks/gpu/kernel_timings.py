"""Each kernel of a step alone, beside its bytes at the copy's rate or its products at the matmul's, whichever binds.

Called by `check_cuda.py`. Caches are filled with other data before every run, as a step's weights and KV do it between
two layers: by reading, for what is written there would have to go to memory while the kernel runs.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.gpu.delta_checks import KIMI_LINEAR, QWEN3_NEXT, TINY_KIMI, TINY_SHAPE, DeltaShape, delta_step
from benchmarks.gpu.kernel_checks import AttentionShape, attention_of, heads_of, step_of
from benchmarks.gpu.timings import Limits, delta_flop
from pdserve.config.groups import AttentionBackendName
from pdserve.executor.backend_choice import Choice, make_kernels
from pdserve.model.expert_math import ExpertWeights
from pdserve.model.gpu.sampling import top_p_threshold
from pdserve.model.layers.gated_delta import OutputGate
from pdserve.model.triton_delta import TritonDelta

_FLUSH_BYTES = 256 << 20
_NUM_RUNS = 15


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is timed. `linears`: name, outputs and inputs; `gate`: the one whose halves are a gate.

    `drawn`: rows that sample by top-p. `deltas`: a GatedDeltaNet and a KDA layer; `delta_rows` and `delta_prompts`: the
    decode steps and prompts of each.
    """

    shape: AttentionShape
    decodes: tuple[tuple[int, int], ...]
    prefills: tuple[int, ...]
    linears: tuple[tuple[str, int, int], ...]
    rows: tuple[int, ...]
    hidden: int
    inner: int
    num_experts: int
    top_k: int
    vocab: int
    drawn: tuple[int, ...]
    deltas: tuple[DeltaShape, ...]
    delta_rows: tuple[int, ...]
    delta_prompts: tuple[int, ...]
    gate: str = "gate, up"


SIZES = Sizes(
    shape=AttentionShape("Qwen3-8B", 32, 8, 128, 16),
    decodes=((1, 1024), (1, 32768), (16, 1024), (64, 1024), (64, 8192), (256, 1024)),
    prefills=(512, 2048, 8192),
    linears=(("qkv", 6144, 4096), ("out", 4096, 4096), ("gate, up", 24576, 4096), ("down", 4096, 12288),
             ("head", 151936, 4096)),
    rows=(1, 16, 64, 256, 2048), hidden=2048, inner=768, num_experts=128, top_k=8, vocab=151936, drawn=(1, 64),
    deltas=(QWEN3_NEXT, KIMI_LINEAR), delta_rows=(1, 16, 64, 256), delta_prompts=(512, 2048, 8192),
)  # fmt: skip
TINY_SIZES = Sizes(
    shape=AttentionShape("tiny", 4, 2, 16, 4, "float32"), decodes=((2, 5),), prefills=(6,),
    linears=(("qkv", 32, 16), ("gate, up", 32, 16)), rows=(2,), hidden=16, inner=8, num_experts=4, top_k=2, vocab=50,
    drawn=(2,), deltas=(TINY_SHAPE, TINY_KIMI), delta_rows=(2,), delta_prompts=(70,),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one size, and what it must at least read, write and multiply."""

    name: str
    work: Callable[[], object]
    num_bytes: float
    num_flop: float = 0.0


@dataclasses.dataclass(frozen=True)
class KernelTiming:
    """Seconds, and the least that they could be."""

    name: str
    seconds: float
    floor_s: float


def cases(sizes: Sizes, backends: tuple[AttentionBackendName, ...], device: torch.device) -> Iterator[Case]:
    """All cases, one after the other: what a case needs is gone when the next is made."""
    for backend in backends:
        for batch, context in sizes.decodes:
            yield _attention(
                backend, sizes.shape, [(context - 1, context)] * batch, f"decode {batch} x {context}", device
            )
        for tokens in sizes.prefills:
            yield _attention(backend, sizes.shape, [(0, tokens)], f"prefill {tokens}", device)
    dtype = torch.bfloat16 if sizes.shape.dtype == "bfloat16" else torch.float32
    for name, num_out, num_in in sizes.linears:
        weight = torch.randn(num_out, num_in, device=device, dtype=dtype)
        for rows in sizes.rows:
            yield _linear(f"{name} {rows}", torch.randn(rows, num_in, device=device, dtype=dtype), weight)
            if name == sizes.gate:
                x = torch.randn(rows, num_in, device=device, dtype=dtype)
                yield _gated(f"{name}, SiLU {rows}", x, weight)
    yield from _experts(sizes, dtype, device)
    yield from _passes(sizes, dtype, device)


def hybrid_cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """The cases of what hybrid models have."""
    for shape in sizes.deltas:
        for rows in sizes.delta_rows:
            yield _delta(shape, [(1023, 1024)] * rows, f"decode {rows}", device)
        for tokens in sizes.delta_prompts:
            yield _delta(shape, [(0, tokens)], f"prefill {tokens}", device)


def measure(case: Case, limits: Limits, device: torch.device) -> KernelTiming:
    """The median of some runs, each with cold caches."""
    case.work()
    flush = torch.zeros(_FLUSH_BYTES // 4 if device.type == "cuda" else 1, device=device)
    times = []
    for _ in range(_NUM_RUNS if device.type == "cuda" else 1):
        flush.sum()
        times.append(_seconds(case.work, device))
    floor = max(case.num_bytes / limits.copy_bytes_s, case.num_flop / limits.matmul_flop_s)
    return KernelTiming(case.name, statistics.median(times), floor)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one run: between two events in the stream, or by the clock."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(200_000)  # type: ignore[no-untyped-call]  # the host is ahead when the work begins
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def section(timings: list[KernelTiming]) -> str:
    """The table."""
    rows = [
        [one.name, f"{one.seconds * 1e6:.1f}", f"{one.floor_s * 1e6:.1f}", f"{one.floor_s / one.seconds:.0%}"]
        for one in timings
    ]
    table = report.markdown_table(["kernel", "us", "floor, us", "floor / time"], rows)
    return f"## Kernels alone, with cold caches\n\n{table}\n"


def _attention(
    backend: AttentionBackendName, shape: AttentionShape, spans: list[tuple[int, int]], name: str, device: torch.device
) -> Case:
    """Norms, rotation, write into pages and attention of one layer."""
    batch, pool = step_of(shape, tuple(spans), device)
    heads = heads_of(shape, batch)
    choice: Choice = "flashinfer" if backend == "flashinfer" else "triton"
    step = attention_of(choice, pool(), shape, device).begin(batch)
    keys = sum(end for _, end in spans)
    pairs = sum((end - start) * (start + end + 1) // 2 for start, end in spans)
    num_bytes = 2 * keys * shape.num_kv_heads * shape.head_dim * heads.qkv.element_size() + 2 * heads.qkv.nbytes
    flop = 4.0 * pairs * shape.num_heads * shape.head_dim
    return Case(f"{backend} attention, {name}", lambda: step.attend(1, heads), num_bytes, flop)


def _delta(shape: DeltaShape, spans: list[tuple[int, int]], name: str, device: torch.device) -> Case:
    """Convolution, delta rule and norm of one layer. The rule's operations are those of chunks of 64 tokens."""
    inputs, states = delta_step(shape, tuple(spans), device)
    here, num_tokens, pair = states(), len(inputs.qkv), shape.key_dim * shape.value_dim
    kernels = TritonDelta()
    layer = "KDA" if shape.channel_decay else "GatedDeltaNet"
    gate: OutputGate = "sigmoid" if shape.channel_decay else "silu"
    z = inputs.qkv.new_empty(num_tokens, shape.num_value_heads, shape.value_dim)
    gates = (inputs.b.numel() + inputs.a.numel()) * inputs.qkv.element_size()
    num_bytes = 2 * inputs.qkv.numel() * inputs.qkv.element_size() + gates + 3 * z.nbytes
    num_bytes += 2 * len(spans) * shape.num_value_heads * pair * 4
    flop = float(num_tokens * delta_flop(shape.spec)) if num_tokens > len(spans) else 0.0

    def work() -> Tensor:
        return kernels.norm(kernels.mix(inputs, here), z, z[0, 0], 1e-6, gate)

    return Case(f"{layer}, {name}", work, num_bytes, flop)


def _linear(name: str, x: Tensor, weight: Tensor) -> Case:
    """One product."""
    rows, (num_out, num_in) = len(x), weight.shape
    num_bytes = weight.nbytes + x.nbytes + rows * num_out * x.element_size()
    kernels = make_kernels("triton")
    return Case(f"linear, {name}", lambda: kernels.linear(x, weight, None), num_bytes, 2.0 * rows * num_out * num_in)


def _gated(name: str, x: Tensor, weight: Tensor) -> Case:
    """The product of both halves of a gate, with what comes of them."""
    kernels, (num_out, num_in) = make_kernels("triton"), weight.shape
    num_bytes = weight.nbytes + x.nbytes + len(x) * num_out // 2 * x.element_size()
    return Case(f"linear, {name}", lambda: kernels.gated(x, weight, None), num_bytes, 2.0 * len(x) * num_out * num_in)


def _experts(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """A layer of experts, chosen by lot."""
    kernels, hidden, inner, top_k = make_kernels("triton"), sizes.hidden, sizes.inner, sizes.top_k
    gate_up = torch.randn(sizes.num_experts, 2 * inner, hidden, device=device, dtype=dtype)
    down = torch.randn(sizes.num_experts, hidden, inner, device=device, dtype=dtype)
    for rows in sizes.rows:
        x = torch.randn(rows, hidden, device=device, dtype=dtype)
        slots = torch.rand(rows, sizes.num_experts, device=device).topk(top_k).indices.flatten()
        chosen = len(set(slots.tolist()))
        num_bytes = chosen * 3 * inner * hidden * x.element_size() + rows * (1 + top_k) * hidden * x.element_size()

        def work(x: Tensor = x, slots: Tensor = slots) -> Tensor:
            return kernels.experts(x, slots, ExpertWeights(gate_up, down))

        yield Case(f"experts {rows}", work, num_bytes, 2.0 * rows * top_k * 3 * inner * hidden)


def _passes(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """What only reads and writes."""
    kernels, rows = make_kernels("triton"), sizes.rows[-1]
    x, more, both = (
        torch.randn(rows, width, device=device, dtype=dtype) for width in (sizes.hidden, sizes.hidden, 2 * sizes.inner)
    )
    gate, up = both.chunk(2, -1)
    yield Case(f"residual + norm {rows}", lambda: kernels.add_norm(x, more, x[0], 1e-6), 4 * x.nbytes)
    yield Case(f"SiLU and product {rows}", lambda: kernels.swiglu(gate, up), 1.5 * both.nbytes)
    for num_rows in sizes.drawn:
        probs = torch.randn(num_rows, sizes.vocab, device=device).softmax(-1)
        top_p = torch.full((num_rows,), 0.95, device=device)
        yield Case(f"top-p {num_rows}", partial(top_p_threshold, probs, top_p), probs.nbytes)
