"""Timings of the executor on a device beside what the device can do: copy bandwidth and matmul rate, measured here.

Called by `check_cuda.py` through `model_timings`. A step ends with its tokens on the host, so the host's clock measures
it whole; of steps launched ahead, each is what passes between the ends of two.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from pdserve.config.groups import AttentionBackendName, KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.config.speculative_group import SpeculativeConfig
from pdserve.executor.factory import LoadedEngine, build_executor
from pdserve.executor.interface import BatchPlan, BatchRow, StepHandle
from pdserve.memory.dtypes import DTYPE_BYTES
from pdserve.memory.layout import PageSpace, pages_for
from pdserve.model.layer_spec import AttentionSpec, GatedDeltaSpec
from pdserve.protocol.sampling import CoreSamplingParams
from tests.driver import random_prompt

GREEDY = CoreSamplingParams(temperature=0.0)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is timed."""

    device: str = "cuda"
    attention_backend: AttentionBackendName = "auto"
    page_size: int = 16
    batches: tuple[int, ...] = (1, 16, 64, 256)
    context: int = 1024
    prefills: tuple[int, ...] = (512, 2048, 8192)
    num_warm: int = 5
    num_timed: int = 30
    num_drafts: int = 0
    """Most drafts of a row."""

    @property
    def num_steps(self) -> int:
        """Steps of one measurement."""
        return self.num_warm + self.num_timed


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the device does when it does nothing else: bytes read and written a second by a copy, bf16 matmul rate."""

    copy_bytes_s: float
    matmul_flop_s: float


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is computed: weights applied to every token, those of the head, and those of all experts.

    A token goes to `top_k` of `num_experts`; without experts both are 1 and `expert_params` is 0. `num_layers` are
    those with attention. `state_bytes`: the recurrent states of a request; `state_flop`: the operations on them of a
    token in a chunk of 64.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    layer_params: int
    head_params: int
    expert_params: int = 0
    num_experts: int = 1
    top_k: int = 1
    state_bytes: int = 0
    state_flop: int = 0

    def read_params(self, batch: int) -> float:
        """Weights that a decode step of `batch` tokens reads; of experts those that somebody chose, were it by lot."""
        chosen = 1.0 - (1.0 - self.top_k / self.num_experts) ** batch
        return self.layer_params + self.head_params + self.expert_params * chosen


@dataclasses.dataclass(frozen=True)
class Timing:
    """One step: its median, least and most over the timed steps, the floor by the measured limits, tokens a step."""

    name: str
    median_s: float
    low_s: float
    high_s: float
    floor_s: float
    tokens: int


def measure_limits(device: torch.device, *, copy_bytes: int = 2 << 30, size: int = 8192) -> Limits:
    """Copy `copy_bytes`, multiply random bf16 matrices of `size` x `size`; the best of ten each."""
    source = torch.empty(copy_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy_s = _best_s(lambda: target.copy_(source), device)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    matmul_s = _best_s(lambda: torch.mm(a, b), device)
    return Limits(2 * source.numel() / copy_s, 2 * size**3 / matmul_s)


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of ten runs, after three that do not count."""
    times: list[float] = []
    for index in range(13):
        _synchronize(device)
        began = time.perf_counter()
        work()
        _synchronize(device)
        if index >= 3:
            times.append(time.perf_counter() - began)
    return min(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def decode_floor_s(limits: Limits, *, weight_bytes: float, kv_bytes: int, state_bytes: int = 0) -> float:
    """A decode step reads its weights and all KV once, reads and writes all states; at the copy's bytes a second."""
    return (weight_bytes + kv_bytes + 2 * state_bytes) / limits.copy_bytes_s


def prefill_flop(shape: Shape, num_tokens: int) -> int:
    """Operations of a prompt alone: 2 per weight and token, QK and PV over the causal half, the head once."""
    attention = 2 * 2 * shape.num_layers * shape.num_heads * shape.head_dim * num_tokens * (num_tokens + 1) // 2
    applied = shape.layer_params + shape.expert_params * shape.top_k // shape.num_experts
    return (2 * applied + shape.state_flop) * num_tokens + 2 * shape.head_params + attention


def build_dummy(directory: Path, config: dict[str, Any], plan: Plan) -> LoadedEngine:
    """An executor with random weights of `config`'s shape, no captured steps, and as large a pool as there is room."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    longest = max((plan.context + plan.num_steps + 2 + plan.num_drafts, *(tokens + 1 for tokens in plan.prefills)))
    context = min(config["max_position_embeddings"], longest)
    device: Literal["cuda", "cpu"] = "cuda" if plan.device == "cuda" else "cpu"
    return build_executor(
        ServerConfig(
            model=ModelConfig(model_path=str(directory), load_format="dummy", context_length=context),
            memory=MemoryConfig(page_size=plan.page_size),
            kernels=KernelConfig(
                device=device, attention_backend=plan.attention_backend, disable_cuda_graph=True, cpu_kernels="torch"
            ),
            speculative=SpeculativeConfig(
                speculative_algorithm="NGRAM" if plan.num_drafts else None,
                speculative_num_draft_tokens=1 + plan.num_drafts if plan.num_drafts else None,
            ),
        ),
        max_rows=max(plan.batches),
    )


class Timer:
    """Times steps of one executor. Pages are given out in order and all taken back after each measurement.

    Contexts are zeros: what KV holds makes no difference to how long it takes to read.
    """

    def __init__(self, built: LoadedEngine, limits: Limits, plan: Plan) -> None:
        self._built, self._limits, self._plan = built, limits, plan
        self.shape = shape_of(built)
        self._vocab = built.spec.vocab_size

    @property
    def num_warm(self) -> int:
        """Steps that do not count."""
        return self._plan.num_warm

    def fits(self, batch: int) -> bool:
        """Whether the pool has room for so many rows of decode."""
        slots = batch if self._built.executor.layout.has_state else 0
        pages = batch * self._pages(self._plan.context + self._plan.num_steps + 1 + self._plan.num_drafts)
        return pages <= self._built.num_pages and slots <= self._built.group_sizes.num_slots

    def fits_prompt(self, num_tokens: int) -> bool:
        """Whether it has room for a prompt of so many tokens."""
        return self._pages(num_tokens + 1) <= self._built.num_pages

    def decode(self, batch: int, *, ahead: bool) -> Timing:
        """Steps of `batch` rows that each have a context already; with `ahead`, one is in flight while the next comes.

        Graphs or not is the executor's matter.
        """
        times = self.decode_steps(batch, ahead=ahead)
        middle = self._plan.context + self._plan.num_warm + self._plan.num_timed // 2
        kv_bytes = batch * middle * self._built.executor.layout.token_bytes
        weights = self.shape.read_params(batch) * DTYPE_BYTES[self._built.dtype]
        states = batch * self.shape.state_bytes
        floor = decode_floor_s(self._limits, weight_bytes=weights, kv_bytes=kv_bytes, state_bytes=states)
        return _timing(f"decode {batch}", times[self._plan.num_warm :], floor, batch)

    def decode_steps(
        self, batch: int, *, ahead: bool, before: Callable[[int], None] | None = None
    ) -> list[float]:  # fmt: skip
        """Seconds of each step of `decode`; `before(i)` is called before it is launched."""
        context, num_steps = self._plan.context, self._plan.num_steps
        rows = [self._open(index, context, context + num_steps + 1) for index in range(batch)]
        steps = [[(row, context + step, context + step + 1) for row in rows] for step in range(num_steps)]
        times = self._run(steps, ahead=ahead, before=before)
        self._close(rows)
        return times

    def verify(self, batch: int, num_drafts: int) -> Timing:
        """Steps of `batch` rows with `num_drafts` wrong drafts each, one by one, as speculative decoding runs them.

        Each row goes on behind its first sampled token. The floor is that of a decode step.
        """
        context, num_steps = self._plan.context, self._plan.num_steps
        rows = [self._open(index, context, context + num_steps + 1 + num_drafts) for index in range(batch)]
        steps = [[(row, context + step, context + step + 1 + num_drafts) for row in rows] for step in range(num_steps)]
        times = self._run(steps, ahead=False, num_drafts=num_drafts)
        self._close(rows)
        middle = context + self._plan.num_warm + self._plan.num_timed // 2
        floor = decode_floor_s(
            self._limits, weight_bytes=self.shape.read_params(batch) * DTYPE_BYTES[self._built.dtype],
            kv_bytes=batch * middle * self._built.executor.layout.token_bytes,
            state_bytes=batch * self.shape.state_bytes,
        )  # fmt: skip
        name = f"verify {batch} x {1 + num_drafts}"
        return _timing(name, times[self._plan.num_warm :], floor, batch * (1 + num_drafts))

    def prefill(self, num_tokens: int) -> Timing:
        """One prompt of `num_tokens`, over and over."""
        row = self._open(0, num_tokens, num_tokens + 1)
        times = self._run([[(row, 0, num_tokens)]] * self._plan.num_steps, ahead=False)
        self._close([row])
        floor = prefill_flop(self.shape, num_tokens) / self._limits.matmul_flop_s
        return _timing(f"prefill {num_tokens}", times[self._plan.num_warm :], floor, num_tokens)

    def _pages(self, num_tokens: int) -> int:
        return pages_for(num_tokens, self._built.executor.layout.page_tokens)

    def _open(self, index: int, num_prompt: int, total: int) -> int:
        """A row with pages for `total` tokens, and a random prompt."""
        count = self._pages(total)
        assert (index + 1) * count <= self._built.num_pages, "the pool is too small for this measurement"
        row = self._built.table.open(range(index * count, (index + 1) * count))
        assert row is not None
        self._built.table.slots[row] = index
        prompt = random_prompt(num_prompt + 1, self._vocab, seed=index)
        self._built.executor.open_row(row, prompt, num_prompt, GREEDY, None)
        return row

    def _run(
        self,
        steps: list[list[tuple[int, int, int]]],
        *,
        ahead: bool,
        before: Callable[[int], None] | None = None,
        num_drafts: int = 0,
    ) -> list[float]:
        """Seconds of each step; the last `num_drafts` tokens of each row are drafts."""
        executor = self._built.executor

        def launch(index: int) -> StepHandle:
            if before is not None:
                before(index)
            return executor.launch(plans[index])

        drafts = tuple(range(2, 2 + num_drafts))
        plans = [
            BatchPlan(0, tuple(BatchRow(str(row), row, start, end, True, drafts=drafts) for row, start, end in ranges))
            for ranges in steps
        ]
        times = []
        began = time.perf_counter()
        flying = launch(0) if ahead else None
        for index in range(len(plans)):
            if flying is None:
                executor.resolve(launch(index))
            else:
                following = launch(index + 1) if index + 1 < len(plans) else None
                executor.resolve(flying)
                flying = following
            ended = time.perf_counter()
            times.append(ended - began)
            began = ended
        return times

    def _close(self, rows: list[int]) -> None:
        """Give rows and pages back."""
        for row in rows:
            self._built.executor.close_row(row)
            self._built.table.close(row)


def shape_of(built: LoadedEngine) -> Shape:
    """Counts for the floors; all weights but the embedding, the head and experts are applied to every token."""
    spec, width = built.spec, DTYPE_BYTES[built.dtype]
    heads = spec.attentions[0]
    head = spec.vocab_size * spec.hidden_size
    layers = built.executor.weight_bytes // width - head * (1 if spec.tied_embeddings else 2)
    ops = [op for layer in spec.layers for op in layer.operations]
    state_flop = sum(delta_flop(op) for op in ops if isinstance(op, GatedDeltaSpec))
    shape = Shape(
        sum(isinstance(op, AttentionSpec) for op in ops), heads.num_heads, heads.head_dim, layers, head,
        state_bytes=built.executor.layout.space_bytes(PageSpace.SLOTS), state_flop=state_flop,
    )  # fmt: skip
    if spec.moe is None:
        return shape
    moe = spec.moe
    experts = len(spec.moe_layers) * moe.num_experts * 3 * moe.intermediate_size * spec.hidden_size
    return dataclasses.replace(
        shape, layer_params=layers - experts, expert_params=experts, num_experts=moe.num_experts, top_k=moe.top_k
    )


def delta_flop(op: GatedDeltaSpec) -> int:
    """Operations on the states of a layer for a token in a chunk of 64."""
    per_head = 6 * op.key_dim * op.value_dim + 2 * 64 * (3 * op.key_dim + 2 * op.value_dim)
    return op.num_value_heads * per_head


def _timing(name: str, times: list[float], floor_s: float, tokens: int) -> Timing:
    """The summary of timed steps."""
    return Timing(name, statistics.median(times), min(times), max(times), floor_s, tokens)
