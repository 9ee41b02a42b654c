"""Timings of the executor on a device beside what the device can do: copy bandwidth and matmul rate, measured here.

Called by `check_cuda.py`. A step ends with its tokens on the host, so the host's clock measures it whole.
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

from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.executor.factory import Built, build_executor
from pdserve.executor.interface import BatchPlan, Row, run
from pdserve.memory.layout import DTYPE_BYTES, pages_for
from pdserve.protocol.sampling import SamplingParams
from tests.driver import random_prompt

QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
"""The published shape of Qwen3-0.6B; the weights are random."""
GREEDY = SamplingParams(temperature=0.0)
BATCHES = (1, 16, 64)
CONTEXT = 1024
PREFILL_TOKENS = 2048
NUM_WARM, NUM_TIMED = 5, 30


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the device does when it does nothing else: bytes read and written a second by a copy, bf16 matmul rate."""

    copy_bytes_s: float
    matmul_flop_s: float


@dataclasses.dataclass(frozen=True)
class Shape:
    """What prefill computes: weights applied to every token, and those of the head, applied to the last."""

    num_layers: int
    num_heads: int
    head_dim: int
    layer_params: int
    head_params: int


@dataclasses.dataclass(frozen=True)
class Timing:
    """One step: its median, least and most over the timed steps, the floor by the measured limits, tokens a step."""

    name: str
    median_s: float
    low_s: float
    high_s: float
    floor_s: float
    tokens: int


def measure_limits(device: torch.device) -> Limits:
    """Copy 2 GiB, multiply 8,192 x 8,192 random bf16 matrices; the best of ten each."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy_s = _best_s(lambda: target.copy_(source))
    size = 8192
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    matmul_s = _best_s(lambda: torch.mm(a, b))
    return Limits(2 * source.numel() / copy_s, 2 * size**3 / matmul_s)


def _best_s(work: Callable[[], object]) -> float:
    """Seconds of the fastest of ten runs on the CUDA device, after three that do not count."""
    times: list[float] = []
    for index in range(13):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if index >= 3:
            times.append(time.perf_counter() - began)
    return min(times)


def decode_floor_s(limits: Limits, *, weight_bytes: int, kv_bytes: int) -> float:
    """A decode step reads all weights and all KV once; at the copy's bytes a second."""
    return (weight_bytes + kv_bytes) / limits.copy_bytes_s


def prefill_flop(shape: Shape, num_tokens: int) -> int:
    """Operations of a prompt alone: 2 per weight and token, QK and PV over the causal half, the head once."""
    attention = 2 * 2 * shape.num_layers * shape.num_heads * shape.head_dim * num_tokens * (num_tokens + 1) // 2
    return 2 * shape.layer_params * num_tokens + 2 * shape.head_params + attention


def build_dummy(directory: Path, config: dict[str, Any], device: Literal["cpu", "cuda"]) -> Built:
    """An executor with random weights of `config`'s shape, and a pool for the largest batch."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    num_tokens = max(BATCHES) * (CONTEXT + 128) + 2 * PREFILL_TOKENS
    return build_executor(
        ServerConfig(
            model=ModelConfig(model_path=str(directory), dtype="bfloat16", load_format="dummy", context_length=4096),
            memory=MemoryConfig(max_total_tokens=num_tokens),
            kernels=KernelConfig(device=device),
        ),
        max_rows=max(BATCHES),
    )


class Timer:
    """Times steps of one executor. Pages are given out in order and all taken back after each measurement."""

    def __init__(self, built: Built, limits: Limits) -> None:
        self._built, self._limits = built, limits
        self._weight_bytes = built.executor.weight_bytes
        self._vocab = built.spec.vocab_size

    def decode(self, batch: int, context: int = CONTEXT) -> Timing:
        """Steps of `batch` rows that each have `context` tokens already."""
        total = context + NUM_WARM + NUM_TIMED + 1
        rows = [self._open(index, context, total) for index in range(batch)]
        for row in rows:
            self._step([(row, 0, context)])
        times = [
            self._step([(row, context + step, context + step + 1) for row in rows])
            for step in range(NUM_WARM + NUM_TIMED)
        ]
        self._close(rows)
        middle = context + NUM_WARM + NUM_TIMED // 2
        kv_bytes = batch * middle * self._built.executor.layout.token_bytes
        floor = decode_floor_s(self._limits, weight_bytes=self._weight_bytes, kv_bytes=kv_bytes)
        return _timing(f"decode, batch {batch}, {context} tokens of context", times[NUM_WARM:], floor, batch)

    def prefill(self, num_tokens: int = PREFILL_TOKENS) -> Timing:
        """One prompt of `num_tokens`, over and over."""
        row = self._open(0, num_tokens, num_tokens + 1)
        times = [self._step([(row, 0, num_tokens)]) for _ in range(NUM_WARM + NUM_TIMED)]
        self._close([row])
        floor = prefill_flop(shape_of(self._built), num_tokens) / self._limits.matmul_flop_s
        return _timing(f"prefill, {num_tokens} tokens", times[NUM_WARM:], floor, num_tokens)

    def _open(self, index: int, num_prompt: int, total: int) -> int:
        """A row with pages for `total` tokens, and a random prompt."""
        count = pages_for(total, self._built.executor.layout.page_tokens)
        assert (index + 1) * count <= self._built.num_pages, "the pool is too small for this measurement"
        row = self._built.table.open(range(index * count, (index + 1) * count))
        assert row is not None
        prompt = random_prompt(num_prompt, self._vocab, seed=index)
        self._built.executor.open_row(row, prompt, num_prompt, GREEDY, None)
        return row

    def _step(self, ranges: list[tuple[int, int, int]]) -> float:
        """Seconds of one step."""
        plan = BatchPlan(0, tuple(Row(str(row), row, start, end, True) for row, start, end in ranges))
        began = time.perf_counter()
        run(self._built.executor, plan)
        return time.perf_counter() - began

    def _close(self, rows: list[int]) -> None:
        """Give rows and pages back."""
        for row in rows:
            self._built.executor.close_row(row)
            self._built.table.close(row)


def shape_of(built: Built) -> Shape:
    """Counts for `prefill_flop`; all weights but the embedding and the head are applied to every token."""
    spec, width = built.spec, DTYPE_BYTES[built.dtype]
    head = spec.vocab_size * spec.hidden_size
    layers = built.executor.weight_bytes // width - head * (1 if spec.tied_embeddings else 2)
    return Shape(spec.num_layers, spec.num_heads, spec.head_dim, layers, head)


def _timing(name: str, times: list[float], floor_s: float, tokens: int) -> Timing:
    """The summary of timed steps."""
    return Timing(name, statistics.median(times), min(times), max(times), floor_s, tokens)
