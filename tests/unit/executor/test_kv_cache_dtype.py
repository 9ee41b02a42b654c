"""`--kv-cache-dtype`: tokens near those of the model's dtype, equal in monolith, pair and any batch; refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import KernelConfig, KVCacheDType, MemoryConfig, ModelConfig, ServerConfig
from pdserve.errors import ConfigError, HandshakeError
from pdserve.executor.backend_choice import choose_attention
from pdserve.executor.factory import build_executor
from pdserve.memory.layout import GroupKind
from pdserve.model.config import read_model_spec
from pdserve.model.parallel import Parallel, SingleRank
from pdserve.transfer.peers import check_facts
from tests.driver import Driver, build, random_prompt
from tests.model_families import prompts_of
from tests.model_pair import running_models
from tests.tiny import VOCAB_SIZE, make_tiny
from tests.unit.executor.gang import Gang
from tests.unit.model.native_kit import needs_kernels

CODES: tuple[KVCacheDType, ...] = ("fp8_e4m3", "int8")
formats = pytest.mark.parametrize("kv_dtype", CODES)
LENGTHS = (70, 3, 1, 40)
PROMPT = random_prompt(150, VOCAB_SIZE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("qwen3"), eos_token_id=None)


def logprobs(path: Path, kv_dtype: KVCacheDType, dtype: str) -> torch.Tensor:
    """Log probabilities of the vocabulary behind `PROMPT`, computed in two chunks."""
    driver = Driver(build(path, dtype=dtype, kv_cache_dtype=kv_dtype))  # type: ignore[arg-type]
    row = driver.open(PROMPT, len(PROMPT) + 1, top_logprobs=VOCAB_SIZE)
    driver.step((row, 0, 80, False))
    (token,) = driver.step((row, 80, len(PROMPT), True))
    assert token is not None
    found = torch.zeros(VOCAB_SIZE)
    for index, value in token.top:
        found[index] = value
    return found


@needs_kernels
@formats
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_near_those_of_the_models_dtype(kv_dtype: KVCacheDType, dtype: str, checkpoint: Path) -> None:
    wanted = logprobs(checkpoint, "auto", dtype)
    found = logprobs(checkpoint, kv_dtype, dtype)
    divergence = float((wanted.exp() * (wanted - found)).sum())
    assert 0.0 < divergence < (0.02 if kv_dtype == "fp8_e4m3" else 0.002)


@needs_kernels
@formats
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_of_a_pair_are_the_monoliths(kv_dtype: KVCacheDType, dtype: str, checkpoint: Path) -> None:
    """Again with a prefix from the cache, and with so little memory that requests are retracted to host memory."""
    prompts = prompts_of((1, 63, 64, 130))
    impls = {"prefill_impl": "native", "model_impl": "native", "dtype": dtype, "kv_cache_dtype": kv_dtype}
    with running_models(checkpoint, pair=False, **impls) as server:  # type: ignore[arg-type]
        expected = [server.generate([prompt], 40)[0] for prompt in prompts]
        assert server.generate(prompts, 40) == expected, "at once, with prefixes of the cache"
        server.assert_idle()
    with running_models(checkpoint, pair=True, max_total_tokens=384, offload=True, **impls) as pair:  # type: ignore[arg-type]
        assert pair.generate(prompts, 40) == expected
        for _ in range(20):  # until requests have met in decode's memory; from the first turn on with cached prefixes
            assert pair.generate(prompts, 40) == expected, "with prefixes of the cache"
            if pair.answering.state().counters.get("requests_retracted"):
                break
        assert pair.answering.state().counters.get("requests_retracted")
        layout = pair.answering.built.layout
        assert layout.groups[0].dtype == kv_dtype and pair.answering.built.dtype == dtype
        pair.assert_idle()


def greedy(parallel: Parallel, path: Path, kv_dtype: KVCacheDType) -> list[list[int]]:
    """Greedy tokens of prompts in chunks, on one rank."""
    config = ServerConfig(
        model=ModelConfig(model_path=str(path), dtype="float32"),
        memory=MemoryConfig(page_size=16, max_total_tokens=2048, kv_cache_dtype=kv_dtype),
        kernels=KernelConfig(device="cpu", cpu_threads=1),
    )
    driver = Driver(build_executor(config, max_rows=8, parallel=parallel))
    return driver.generate([random_prompt(length, VOCAB_SIZE) for length in LENGTHS], 6, chunk=16)


@formats
def test_tensor_ranks_and_stages_give_the_same_tokens(kv_dtype: KVCacheDType, gang: Gang, checkpoint: Path) -> None:
    wanted = greedy(SingleRank(), checkpoint, kv_dtype)
    for shape in (ParallelShape(tp_size=2, pp_size=1), ParallelShape(tp_size=1, pp_size=2)):
        assert gang.run(shape, greedy, checkpoint, kv_dtype) == [wanted, wanted]


@formats
def test_bits_do_not_depend_on_the_batch_in_the_deterministic_mode(kv_dtype: KVCacheDType, checkpoint: Path) -> None:
    prompts = [random_prompt(length, VOCAB_SIZE) for length in LENGTHS]
    driver = Driver(build(checkpoint, dtype="float32", deterministic=True, kv_cache_dtype=kv_dtype))
    alone = [driver.generate([prompt], 6)[0] for prompt in prompts]
    assert driver.generate(prompts, 6, chunk=16) == alone


def test_peers_with_other_formats_refuse_each_other_by_the_field(checkpoint: Path) -> None:
    layouts = [build(checkpoint, kv_cache_dtype=dtype).layout for dtype in ("auto", *CODES)]
    for ours in layouts:
        for theirs in layouts:
            if ours is not theirs:
                with pytest.raises(HandshakeError) as caught:
                    check_facts(ours.fields(), theirs.fields())
                assert caught.value.field == "kv_cache_dtype"


def test_states_keep_the_models_dtype(hybrid_checkpoint: object) -> None:
    built = build(hybrid_checkpoint("qwen3_next"), kv_cache_dtype="int8")  # type: ignore[operator]
    dtypes = {group.kind: {plane.dtype for plane in group.planes} for group in built.layout.groups}
    assert dtypes[GroupKind.FULL] == {"int8"} and dtypes[GroupKind.STATE] == {"float32"}


def test_ways_without_codes_are_refused_by_name(checkpoint: Path) -> None:
    config = ServerConfig(
        model=ModelConfig(model_path=str(checkpoint), model_impl="transformers"),
        memory=MemoryConfig(page_size=16, max_total_tokens=512, kv_cache_dtype="int8"),
        kernels=KernelConfig(device="cpu", cpu_threads=1),
    )
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype does not fit a model through transformers") as caught:
        build_executor(config, max_rows=2)
    assert caught.value.field == "kv_cache_dtype"
    spec, kernels = read_model_spec(checkpoint), dataclasses.replace(config.kernels, attention_backend="flashinfer")
    with pytest.raises(ConfigError, match="KV cache in int8"):
        choose_attention(kernels, spec, torch.bfloat16, torch.device("cuda"), "int8")
