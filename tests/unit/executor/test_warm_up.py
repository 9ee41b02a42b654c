"""What start-up runs has Triton compile every form of its kernels that steps of serving launch. Nothing is computed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from pdserve.executor.graphs import Padding
from pdserve.executor.input_batch import build_batch
from pdserve.executor.warm_up import Span, idle_batch, warm_up
from pdserve.model.attention.interface import ScoreRule
from pdserve.model.attention.layer_backends import make_backends
from pdserve.model.attention.page_gather import GroupPool, KVPool
from pdserve.model.attention.triton_pages import TritonAttention
from pdserve.model.config import ModelSpec, kv_layout
from pdserve.model.decoder import Decoder
from pdserve.model.gated_delta_net import GatedDeltaNet
from pdserve.model.gpu import decode_attention, gated_delta
from pdserve.model.layer_spec import AttentionSpec, DecoderLayerSpec, GatedDeltaSpec, MoeSpec, SublayerSpec
from pdserve.model.layers.triton_kernels import TritonKernels
from pdserve.model.loader import read_spec
from pdserve.model.triton_delta import TritonDelta
from tests.model_families import FAMILIES
from tests.tiny import Family
from tests.unit.model.triton_kit import DEVICE

CONTEXT, CHUNK, PAGE_TOKENS, MAX_DRAFTS = 300, 64, 16, 5
NUM_EXPERTS = 8
"""So many that a chunk has small tiles yet, and a chunk with a row beside it large ones."""
NUM_STEPS = 60


class Launches:
    """Takes the place of launches: `forms` grows by what Triton would look a compiled kernel up by."""

    def __init__(self) -> None:
        self.forms: set[str] = set()
        self._binders: dict[str, Callable[..., Any]] = {}

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """What a kernel's `run` is called with."""
        name = kernel.fn.__name__
        if name not in self._binders:
            compiled = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
            backend = CUDABackend(GPUTarget("cuda", 90, 32))
            self._binders[name] = create_function_from_signature(compiled.signature, compiled.params, backend)
        values, specialisation, others = self._binders[name](*args, **options)
        self.forms.add(f"{name} {dict(zip(values, specialisation, strict=True))} {others}")
        if name == "_route":
            values["experts"].zero_()  # they are counted, by torch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    recorder = Launches()

    def run(kernel: Any, *args: Any, **options: Any) -> None:
        recorder.run(kernel, *args, **options)

    kernel_type = type(triton.jit(lambda: None))  # another one where triton interprets
    monkeypatch.setattr(kernel_type, "run", run)
    return recorder


def _sized(spec: ModelSpec, kv_heads: int) -> Iterator[SublayerSpec]:
    """The first layer's sublayers, with other numbers of heads and experts."""
    for sublayer in spec.layers[0].sublayers:
        op = sublayer.op
        if isinstance(op, AttentionSpec):
            op = dataclasses.replace(op, num_heads=2 * kv_heads, num_kv_heads=kv_heads)
        elif isinstance(op, MoeSpec):
            op = dataclasses.replace(op, num_experts=NUM_EXPERTS)
        yield dataclasses.replace(sublayer, op=op)


class Serving:
    """A model of uninitialised weights over pools of nothing."""

    def __init__(self, spec: ModelSpec) -> None:
        device = torch.device(DEVICE)
        self._model = Decoder(spec, torch.float16, device, TritonKernels())
        self._layout = kv_layout(spec, PAGE_TOKENS, "float16")
        self._pools = [(KVPool if group.page_tokens else GroupPool)(group, 1, device) for group in self._layout.groups]
        layers = [layer.operations[0] for layer in spec.layers]
        self._attention = make_backends(
            [op if isinstance(op, AttentionSpec) else None for op in layers], 0, self._pools,
            lambda pool, op: TritonAttention(pool, op.num_heads, device, ScoreRule.of(op)), device, MAX_DRAFTS,
            channel_decay=spec.has_channel_decay,
        )  # fmt: skip
        for layer in self._model.layers:
            for op in layer.operations:
                if isinstance(op, GatedDeltaNet):
                    op.kernels = TritonDelta()
        self._tokens = torch.zeros(1, CONTEXT + 1, dtype=torch.int32, device=device)

    def warm_up(self, max_rows: int) -> None:
        warm_up(
            self._model, self._attention, self._tokens, layout=self._layout, padding=Padding.of(self._pools, 0),
            max_rows=max_rows, chunk=CHUNK, max_drafts=MAX_DRAFTS,
        )  # fmt: skip

    def step(self, spans: Sequence[Span], num_samples: int, drafts: Sequence[int] | None = None) -> None:
        host = idle_batch(spans, layout=self._layout, padding=Padding.of(self._pools, 0), drafts=drafts)
        host = dataclasses.replace(host, sample_index=host.sample_index[:num_samples])
        batch = build_batch(host, self._tokens)
        self._model.forward(batch, self._attention.begin(batch))


def mixed(rng: random.Random, max_rows: int) -> list[Span]:
    """Rows that decode, few as often as many, and chunks of up to CHUNK tokens together; either may be missing."""
    num_chunks = rng.choice((0, 1, 1, 2, 3))
    most = max(max_rows - num_chunks, 0)
    num_decode = rng.choice((0, min(1, most), min(round(2 ** rng.uniform(0, 10)), most), most))
    ends = [rng.randint(1, rng.choice((100, CONTEXT))) for _ in range(num_decode)]
    chunks = []
    for _ in range(min(num_chunks, max_rows)):
        start, length = rng.randint(0, CONTEXT - CHUNK), rng.randint(1, CHUNK // 3)
        chunks.append((start, start + length))
    if len(chunks) == 1 and rng.random() < 0.5:
        chunks = [(0, CHUNK)]
    return [*((end - 1, end) for end in ends), *chunks] or [(0, CHUNK)]


def verifying(rng: random.Random, max_rows: int) -> tuple[list[Span], list[int]]:
    """Rows with up to MAX_DRAFTS drafts each, and some without; often a chunk behind them."""
    num_rows = rng.choice((1, min(2, max_rows), min(round(2 ** rng.uniform(0, 10)), max_rows), max_rows))
    drafts = [rng.randint(1, MAX_DRAFTS), *(rng.randint(0, MAX_DRAFTS) for _ in range(num_rows - 1))]
    ends = [rng.randint(1 + count, rng.choice((100, CONTEXT))) for count in drafts]
    spans = [(end - 1 - count, end) for end, count in zip(ends, drafts, strict=True)]
    if num_rows < max_rows and rng.random() < 0.5:
        return [*spans, (0, rng.randint(2, CHUNK))], [*drafts, 0]
    return spans, drafts


@pytest.mark.parametrize(
    ("family", "kv_heads", "cores", "max_rows"),
    [
        ("llama", 1, 132, 300),
        ("llama", 1, 148, 7),
        ("llama", 2, 132, 256),
        ("qwen3", 8, 132, 27),
        ("qwen3", 8, 108, 256),
        ("qwen3", 16, 132, 64),
        ("qwen3_moe", 4, 132, 50),
        ("qwen3_moe", 32, 78, 1),
    ],
)
def test_no_step_has_a_kernel_that_start_up_did_not_build(
    tiny_checkpoint: Callable[[Family], Path], launches: Launches, monkeypatch: pytest.MonkeyPatch, family: Family,
    kv_heads: int, cores: int, max_rows: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(decode_attention, "num_cores", lambda device: cores)
    spec = read_spec(tiny_checkpoint(family))
    layers = (DecoderLayerSpec(tuple(_sized(spec, kv_heads))),)
    serve(Serving(dataclasses.replace(spec, layers=layers)), launches, max_rows, ("_decode", "_extend"))


@pytest.mark.parametrize(
    ("value_heads", "cores", "max_rows", "channel_decay"),
    [(4, 132, 300, False), (32, 132, 16, False), (16, 78, 3, False), (32, 132, 1, False), (32, 132, 64, True),
     (16, 78, 2, True)],
)  # fmt: skip
def test_recurrent_layers_have_no_kernel_that_start_up_did_not_build(
    tmp_path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch, value_heads: int, cores: int, max_rows: int,
    channel_decay: bool,
) -> None:  # fmt: skip
    for module in (decode_attention, gated_delta):
        monkeypatch.setattr(module, "num_cores", lambda device: cores)
    FAMILIES["qwen3_5_text"].write(tmp_path)
    spec = read_spec(tmp_path)
    recurrent, attention = spec.layers
    delta = recurrent.operations[0]
    assert isinstance(delta, GatedDeltaSpec)
    sized = dataclasses.replace(
        delta, num_key_heads=value_heads // 2, num_value_heads=value_heads, key_dim=128, value_dim=128,
        channel_decay=channel_decay,
    )  # fmt: skip
    first = dataclasses.replace(recurrent.sublayers[0], op=sized)
    layers = (DecoderLayerSpec((first, *recurrent.sublayers[1:])), attention)
    kernels = ["_conv_decode", "_conv_chunks", "_delta_decode", "_prepare", "pass_state", "_outputs", "_gated_norm"]
    kernels += ["_scores", "_updates"] if channel_decay else []
    serve(Serving(dataclasses.replace(spec, layers=layers)), launches, max_rows, kernels)


def serve(serving: Serving, launches: Launches, max_rows: int, kernels: Sequence[str]) -> None:
    """Random steps after the start; `kernels` are among those that start-up builds."""
    rng = random.Random(max_rows)
    serving.warm_up(max_rows)
    built = set(launches.forms)
    assert all(any(form.startswith(f"{kernel} ") for form in built) for kernel in kernels)
    for _ in range(NUM_STEPS):
        spans = mixed(rng, max_rows)
        serving.step(spans, rng.randint(0, len(spans)))
        late = launches.forms - built
        assert not late, f"compiled by {spans[:3]}... of {len(spans)} rows: {late}"
        spans, drafts = verifying(rng, max_rows)
        serving.step(spans, len(spans), drafts)
        late = launches.forms - built
        assert not late, f"compiled by drafts {drafts[:3]}... of {len(spans)} rows, {spans[-1]}: {late}"
