"""Models driven without an executor, for the tests of EAGLE-3: one forward pass at a time, over scattered pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.base import native
from pdserve.config.groups import ModelConfig
from pdserve.executor.backend_choice import make_native
from pdserve.executor.input_batch import build_batch, read_plan
from pdserve.executor.interface import BatchPlan, BatchRow
from pdserve.memory.kv_memory import PageTable
from pdserve.model.attention.interface import AttentionBackend
from pdserve.model.attention.layer_backends import make_backends
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.attention.torch_sdpa import TorchAttention
from pdserve.model.config import kv_layout, read_model_spec
from pdserve.model.decoder import Decoder
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.interface import LayerTaps, Model
from pdserve.model.layer_spec import AttentionSpec
from pdserve.model.loader import empty_model, fill_model
from pdserve.model.native.packer import AttentionInProgram
from tests.unit.model.native_kit import needs_kernels

CPU = torch.device("cpu")
PAGE = 16


@dataclasses.dataclass(frozen=True)
class Way:
    """What computes a model, and how far its hidden states may be from transformers' in float32, as a share."""

    kernels: Literal["torch", "native"]
    dtype: Literal["float32", "bfloat16"]
    tolerance: float


TORCH, NATIVE = Way("torch", "float32", 1e-5), Way("native", "bfloat16", 0.1)


def ways() -> list[object]:
    """Parameters of a test: torch in float32, and the CPU kernels in bfloat16 where there are some."""
    return [pytest.param(TORCH, id="torch"), pytest.param(NATIVE, id="native", marks=needs_kernels)]


def assert_near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Every row of `found` `[n, width]` differs from `wanted` by at most that share of its length."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    share = (found.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(share.max()) <= tolerance, share


class Bench:
    """A model with rows for `prompts`, whose pages are scattered and hold NaN at first."""

    def __init__(self, path: Path, way: Way, prompts: Sequence[Sequence[int]], num_more: int = 0) -> None:
        decoder = empty_model(read_model_spec(path), way.dtype, CPU)
        self.model: Model = decoder
        if way.kernels == "native":
            bound = make_native(decoder, ModelConfig(model_path=str(path)), native.best_level(), nullcontext)
            self.model = bound
        fill_model(decoder, path, load_format="auto", seed=0)
        self.layout = kv_layout(decoder.spec, PAGE, way.dtype)
        counts = [-(-(len(prompt) + num_more) // PAGE) for prompt in prompts]
        order = np.random.default_rng(0).permutation(sum(counts)).tolist()
        pool = KVPool(self.layout.groups[0], sum(counts), CPU)
        pool.pages[:] = float("nan")
        self.attention: AttentionBackend
        if way.kernels == "native":
            bound.bind([pool])
            self.attention = AttentionInProgram()
        else:
            self.attention = torch_attention(decoder, pool)
        self.table = PageTable(len(prompts), max(counts))
        for count in counts:
            self.table.open([order.pop() for _ in range(count)])
        self._prompts = np.array([len(prompt) for prompt in prompts])
        self.tokens = torch.zeros(len(prompts), max(counts) * PAGE + 1, dtype=torch.int32)
        for row, prompt in enumerate(prompts):
            self.tokens[row, : len(prompt)] = torch.tensor(prompt)

    def batch(self, rows: Sequence[tuple[int, int, int]]) -> ForwardBatch:
        """Positions `[start, end)` of some rows; each row has one sample, its last token."""
        plan = BatchPlan(0, tuple(BatchRow(str(row), row, start, end, True) for row, start, end in rows))
        return build_batch(read_plan(plan, self.table, self._prompts, self.layout), self.tokens)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, taps: LayerTaps | None = None) -> Tensor:
        """Compute the logits of the samples."""
        return self.model.forward(batch, self.attention.begin(batch), taps=taps)


def torch_attention(decoder: Decoder, pool: KVPool) -> AttentionBackend:
    """Make the torch backends of a model over its only pool."""

    def make(pool: KVPool, op: AttentionSpec) -> AttentionBackend:
        return TorchAttention(pool, op.num_heads, CPU, op.window)

    attended = [next(op for op in layer.operations if isinstance(op, AttentionSpec)) for layer in decoder.spec.layers]
    return make_backends(attended, 0, [pool], make, CPU)
