"""Models computed by the CPU kernels come to what torch and transformers come to, in every way they are run."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from pdserve.base import native
from pdserve.base.parallel import ParallelShape
from pdserve.config.cli import parse_server_args
from pdserve.config.groups import KernelConfig, ModelConfig
from pdserve.config.resolve import Machine, fill_in
from pdserve.errors import ConfigError
from pdserve.executor.backend_choice import choose_level, make_native
from pdserve.executor.input_batch import build_batch, read_plan
from pdserve.executor.interface import BatchPlan, BatchRow
from pdserve.memory.kv_memory import PageTable
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.config import kv_layout, read_model_spec
from pdserve.model.decoder import Attention, Decoder
from pdserve.model.forward_batch import ForwardBatch
from pdserve.model.layers.dense import DenseMLP
from pdserve.model.layers.moe import Experts
from pdserve.model.loader import empty_model, fill_model
from pdserve.model.native.decoder import NativeDecoder
from pdserve.model.native.packer import AttentionInModel
from pdserve.model.parallel import SingleRank
from pdserve.model.params import ParamSlots
from pdserve.model.tensor_sources import TensorSource
from pdserve.protocol.logprobs import Logprobs
from tests.driver import Driver, build, random_prompt
from tests.reference import load_reference, reference_logits
from tests.tiny import FAMILIES, VOCAB_SIZE, Family, make_tiny
from tests.unit.executor.gang import Gang
from tests.unit.executor.native_ranks import LENGTHS, divergence, outcome
from tests.unit.model.native_kit import needs_kernels

CPU = torch.device("cpu")
TP2, PP2, BOTH = (ParallelShape(tp_size=tp, pp_size=pp) for tp, pp in ((2, 1), (1, 2), (2, 2)))
PROMPT = random_prompt(37, VOCAB_SIZE)


def empty_native(path: Path, quantization: Literal["int8"] | None = None) -> tuple[Decoder, NativeDecoder]:
    """A model without weights in bfloat16, and the native model that takes it over."""
    decoder = empty_model(read_model_spec(path), "bfloat16", CPU)
    config = ModelConfig(model_path=str(path), quantization=quantization)
    return decoder, make_native(decoder, config, native.best_level(), nullcontext)


def fill(decoder: Decoder, path: Path) -> None:
    """Load the weights."""
    fill_model(decoder, path, load_format="auto", seed=0)


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_nearer_to_float32_than_torch_in_bfloat16(family: Family, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path)
    reference = load_reference(path)
    wanted = torch.stack(
        [reference_logits(reference, random_prompt(length, VOCAB_SIZE))[-1].log_softmax(-1) for length in LENGTHS]
    )
    mine, torchs = (outcome(SingleRank(), path, VOCAB_SIZE, kernels) for kernels in ("native", "torch"))
    assert divergence(mine.logprobs, wanted) < max(1e-3, 1.2 * divergence(torchs.logprobs, wanted))
    assert torch.equal(mine.logprobs.argmax(-1), wanted.argmax(-1))


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_int8_is_near_too_whatever_the_pages_and_threads(family: Family, page_size: int, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path)
    wanted = reference_logits(load_reference(path), PROMPT)[-1].log_softmax(-1)
    for threads in (1, 2):
        built = build(path, page_size=page_size, dtype="bfloat16", quantization="int8", cpu_threads=threads)
        driver = Driver(built)
        row = driver.open(PROMPT, 60, top_logprobs=VOCAB_SIZE)
        token = driver.step((row, 0, len(PROMPT), True))[0]
        assert token is not None
        logprobs = torch.zeros(VOCAB_SIZE)
        for index, value in token.top:
            logprobs[index] = value
        assert divergence(logprobs[None], wanted[None]) < 0.03


@needs_kernels
@pytest.mark.parametrize(
    ("shape", "family", "overrides"),
    [
        (TP2, "qwen2", {"tie_word_embeddings": True, "vocab_size": 321}),
        (PP2, "llama", {"attention_bias": True, "mlp_bias": True}),
        (BOTH, "qwen3_moe", {}),
    ],
    ids=["tp2", "pp2", "both, experts"],
)
def test_a_split_model_stops_for_other_ranks(
    shape: ParallelShape, family: Family, overrides: dict[str, Any], gang: Gang, tmp_path: Path
) -> None:
    path = make_tiny(family, tmp_path, **overrides)
    vocab_size = int(overrides.get("vocab_size", VOCAB_SIZE))
    whole = outcome(SingleRank(), path, vocab_size, "native")
    ranks = gang.run(shape, outcome, path, vocab_size, "native")
    for rank in ranks:
        assert rank.greedy == ranks[0].greedy
        assert divergence(rank.logprobs, whole.logprobs) < 2e-3


@needs_kernels
def test_chunks_and_decode_rows_share_steps(tiny_checkpoint: Callable[[Family], Path]) -> None:
    """In chunks beside rows that decode, and pages of all sizes, the tokens are those of one prompt at a time."""
    prompts = [random_prompt(length, VOCAB_SIZE) for length in (50, 33, 2, 100)]
    path = tiny_checkpoint("llama")
    alone = [Driver(build(path, dtype="bfloat16")).generate([prompt], 8)[0] for prompt in prompts]
    for page_size, chunk in ((16, 16), (5, 7)):
        driver = Driver(build(path, dtype="bfloat16", page_size=page_size, cpu_threads=2))
        assert driver.generate(prompts, 8, chunk=chunk) == alone


@needs_kernels
def test_prompt_logprobs_leave_the_next_token_as_it_is(tiny_checkpoint: Callable[[Family], Path]) -> None:
    path = tiny_checkpoint("qwen3")
    plain, asking = (Driver(build(path, dtype="bfloat16")) for _ in range(2))
    first = plain.step((plain.open(PROMPT, 60, top_logprobs=0), 0, len(PROMPT), True))[0]
    row = asking.open(PROMPT, 60, logprobs=Logprobs(top=2, prompt_from=0))
    result = asking.result((row, 0, len(PROMPT), True))
    second = result.tokens[0]
    assert first is not None and second is not None
    assert (second.token_id, second.logprob) == (first.token_id, first.logprob)
    assert result.prompts.keys() == {0}


@needs_kernels
def test_a_layer_is_marked_when_it_is_written_and_the_next_is_not(tiny_checkpoint: Callable[[Family], Path]) -> None:
    path = tiny_checkpoint("llama")
    decoder, model = empty_native(path)
    fill(decoder, path)
    layout = kv_layout(model.spec, 16, "bfloat16")
    pool = KVPool(layout.groups[0], 4, CPU)
    pool.pages[: pool.num_pages] = float("nan")
    model.bind([pool])
    table = PageTable(1, 3)
    row = table.open([2, 1, 0])
    assert row is not None
    tokens = torch.tensor([PROMPT], dtype=torch.int32)

    def computes(start: int, end: int) -> ForwardBatch:
        plan = BatchPlan(1, (BatchRow("a", row, start, end, True),))
        return build_batch(read_plan(plan, table, np.array([len(PROMPT)]), layout), tokens)

    seen = []

    def on_layer(layer: int) -> None:
        missing = pool.pages[1].isnan().flatten(1).any(1).tolist()
        seen.append((layer, missing))

    with torch.inference_mode():
        model.forward(computes(0, 16), AttentionInModel())
        marked = model.forward(computes(16, 32), AttentionInModel(), on_layer).clone()
        assert torch.equal(model.forward(computes(16, 32), AttentionInModel()), marked)
    assert seen == [(layer, [other > layer for other in range(model.num_layers)]) for layer in range(model.num_layers)]


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_weights_are_packed_and_let_go_of_but_known(family: Family, tiny_checkpoint: Callable[[Family], Path]) -> None:
    path = tiny_checkpoint(family)
    packed, plain, small = (
        build(path, dtype="bfloat16", cpu_kernels=kernels, quantization=quantization).executor
        for kernels, quantization in (("native", None), ("torch", None), ("auto", "int8"))
    )
    assert packed.weights_fingerprint == plain.weights_fingerprint == small.weights_fingerprint
    assert small.weight_bytes < packed.weight_bytes
    decoder, model = empty_native(path)
    fill(decoder, path)
    attentions = [op for layer in decoder.layers for op in layer.operations if isinstance(op, Attention)]
    assert len(attentions) == model.num_layers and all(op.qkv.weight.numel() == 0 for op in attentions)
    assert all(
        isinstance(one.experts, Experts) and not one.experts.weights.gate_up.numel()
        for one in model.moe_layers.values()
    )


@needs_kernels
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_layer_is_packed_as_soon_as_it_is_read(
    quantization: Literal["int8"] | None, tiny_checkpoint: Callable[[Family], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a model is never in memory twice: of the originals no more than one layer's are there at a time."""
    path = tiny_checkpoint("llama")
    plain = build(path, dtype="bfloat16", cpu_kernels="torch").executor.weight_bytes
    decoder, _ = empty_native(path, quantization)
    whole, num_read, unpacked = original_bytes(decoder), 0, list[int]()
    put = ParamSlots.fill

    def watched(slots: ParamSlots, name: str, source: TensorSource) -> None:
        nonlocal num_read
        put(slots, name, source)
        num_read += 2 * math.prod(source.shape)
        unpacked.append(num_read - (whole - original_bytes(decoder)))

    monkeypatch.setattr(ParamSlots, "fill", watched)
    fill(decoder, path)
    assert decoder.embedding is not None
    embedding = decoder.embedding.weight.nbytes
    assert plain / 8 < max(unpacked) < plain / 2 + embedding
    assert unpacked[-1] < plain / 4 + embedding


def original_bytes(decoder: Decoder) -> int:
    """Bytes of the linear layers' weights that the decoder itself has, filled or not."""
    assert decoder.head is not None
    linears = [decoder.head]
    for op in (op for layer in decoder.layers for op in layer.operations):
        assert isinstance(op, Attention | DenseMLP)
        linears += [op.qkv, op.out] if isinstance(op, Attention) else [op.gate_up, op.down]
    return sum(linear.weight.nbytes for linear in linears)


@pytest.mark.parametrize(
    ("kernels", "quantization", "dtype", "field"),
    [
        (KernelConfig(cpu_kernels="native"), None, torch.float32, "cpu_kernels"),
        (KernelConfig(), "int8", torch.float32, "quantization"),
        (KernelConfig(cpu_kernels="torch"), "int8", torch.bfloat16, "quantization"),
        (KernelConfig(cpu_kernels="native", attention_backend="torch"), None, torch.bfloat16, "cpu_kernels"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_by_the_flag_that_asks(
    kernels: KernelConfig, quantization: Any, dtype: torch.dtype, field: str, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    spec = read_model_spec(tiny_checkpoint("llama"))
    with pytest.raises(ConfigError) as caught:
        choose_level(kernels, ModelConfig(quantization=quantization), spec, dtype, CPU)
    assert caught.value.field == field


@needs_kernels
def test_whoever_asks_for_torch_s_attention_gets_torch(tiny_checkpoint: Callable[[Family], Path]) -> None:
    """Also by a server's command line, whose default is the kernels."""
    path = tiny_checkpoint("llama")
    for words, is_native in ((), True), (("--attention-backend", "torch"), False):
        argv = ["--model-path", str(path), "--dtype", "bfloat16", "--device", "cpu", *words]
        config, _ = fill_in(parse_server_args(argv), Machine(has_cuda=False, num_cores=1))
        level = choose_level(config.kernels, config.model, read_model_spec(path), torch.bfloat16, CPU)
        assert (level is not None) == is_native


def test_without_the_library_torch_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    monkeypatch.setenv(native.PATH_VARIABLE, str(tmp_path / "absent.so"))
    native.library.cache_clear()
    spec = read_model_spec(tiny_checkpoint("llama"))
    try:
        assert choose_level(KernelConfig(), ModelConfig(), spec, torch.bfloat16, CPU) is None
        with pytest.raises(ConfigError, match="was not built"):
            choose_level(KernelConfig(cpu_kernels="native"), ModelConfig(), spec, torch.bfloat16, CPU)
    finally:
        native.library.cache_clear()


@needs_kernels
@pytest.mark.parametrize(
    ("code", "message"),
    [("int other() { return 0; }", "not of pdserve"), ("long pdk_version() { return 1; }", "of version 1")],
)
def test_a_library_of_another_version_is_to_be_built_anew(
    code: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "other.c").write_text(code)
    library = tmp_path / "other.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "other.c"], check=True, timeout=60)
    monkeypatch.setenv(native.PATH_VARIABLE, str(library))
    native.library.cache_clear()
    try:
        with pytest.raises(native.Unavailable, match=f"{message}.*rebuild it"):
            native.library()
    finally:
        native.library.cache_clear()


@needs_kernels
def test_a_level_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.LEVEL_VARIABLE, "avx2")
    assert native.best_level() == "avx2"
    monkeypatch.setenv(native.LEVEL_VARIABLE, "sse9")
    with pytest.raises(ConfigError, match="sse9"):
        native.best_level()
