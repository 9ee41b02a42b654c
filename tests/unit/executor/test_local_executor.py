"""The executor between scheduler and model: rows, buffers, hand-over from prefill to decode, sizes and refusals."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import psutil
import pytest
import torch

from pdserve.config.groups import KernelConfig, MemoryConfig
from pdserve.errors import ConfigError
from pdserve.executor.factory import prepare_device
from pdserve.executor.interface import BatchPlan, Executor, run
from pdserve.executor.memory_sizing import CPU_CAP_BYTES, pool_tokens
from pdserve.memory.layout import KVLayout, attention_group
from pdserve.model.config import kv_layout, read_model_spec
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import CoreSamplingParams
from tests.driver import Driver, build, random_prompt
from tests.tiny import VOCAB_SIZE, Family
from tests.unit.model.native_kit import LEVELS_HERE

PROMPT = random_prompt(37, VOCAB_SIZE)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[[Family], Path]) -> Path:
    return tiny_checkpoint("llama")


def test_the_pool_is_one_aligned_buffer_of_whole_pages(checkpoint: Path) -> None:
    built = build(checkpoint, page_size=16, max_total_tokens=1000)
    executor: Executor = built.executor
    ((address, num_bytes),) = executor.buffers
    group = executor.layout.groups[0]
    assert built.num_pages == 62 and built.max_total_tokens == 992
    assert num_bytes == 62 * group.page_bytes
    assert address % 4096 == 0
    pages = built.executor.pools[0].pages
    assert tuple(pages.shape) == (62, *group.page_shape) and pages.is_contiguous()
    pages[61, -1, -1, -1, -1, -1] = 1.0
    assert ctypes.string_at(address + num_bytes - 4, 4) == bytes(torch.tensor([1.0]).view(torch.uint8).tolist())


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    "sampling",
    [
        CoreSamplingParams(temperature=0.0),
        CoreSamplingParams(temperature=1.5, seed=11, top_p=0.95),
        CoreSamplingParams(temperature=1.0, seed=12, repetition_penalty=1.3, frequency_penalty=0.5, min_new_tokens=4),
    ],
)
def test_decode_goes_on_where_prefill_ended_in_another_pool(
    checkpoint: Path, page_size: int, sampling: CoreSamplingParams
) -> None:
    """Only page bytes and the first token cross; every other byte of the second pool is NaN."""
    monolith, prefill, decode = (Driver(build(checkpoint, page_size=page_size), seed=seed) for seed in range(3))
    expected = _generate(monolith, sampling, 8)
    source = prefill.open(PROMPT, len(PROMPT), sampling)
    prefill.step((source, 0, 20, False))
    first = prefill.step((source, 20, len(PROMPT), True))[0]
    assert first is not None and first.token_id == expected[0]
    target = decode.open([*PROMPT, first.token_id], 60, sampling, num_prompt=len(PROMPT))
    count = -(-len(PROMPT) // page_size)
    from_pages = prefill.built.table.pages[source, :count].tolist()
    to_pages = decode.built.table.pages[target, :count].tolist()
    assert from_pages != to_pages
    decode.built.executor.pools[0].pages[to_pages] = prefill.built.executor.pools[0].pages[from_pages]
    tokens = [first.token_id]
    for position in range(len(PROMPT), len(PROMPT) + 7):
        token = decode.step((target, position, position + 1, True))[0]
        assert token is not None
        tokens.append(token.token_id)
    assert tokens == expected


def test_sampled_tokens_do_not_depend_on_the_batch(checkpoint: Path) -> None:
    requests = [CoreSamplingParams(temperature=1.2, seed=seed, top_k=40) for seed in range(5)]
    alone = [_generate(Driver(build(checkpoint)), request, 6) for request in requests]
    driver = Driver(build(checkpoint))
    rows = [driver.open(PROMPT, 60, request) for request in requests]
    together: list[list[int]] = [[] for _ in rows]
    start, end = 0, len(PROMPT)
    for _ in range(6):
        for output, token in zip(together, driver.step(*[(row, start, end, True) for row in rows]), strict=True):
            assert token is not None
            output.append(token.token_id)
        start, end = end, end + 1
    assert together == alone
    assert len({tuple(output) for output in together}) > 1


def test_an_empty_plan_is_an_empty_result(checkpoint: Path) -> None:
    assert run(build(checkpoint).executor, BatchPlan(3, ())).tokens == ()


def test_a_plan_that_samples_nothing_gives_none(checkpoint: Path) -> None:
    driver = Driver(build(checkpoint))
    assert driver.step((driver.open(PROMPT, 40), 0, 10, False)) == [None]


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_processed_logprobs_are_of_output_tokens_only(checkpoint: Path, kernels: Literal["torch", "native"]) -> None:
    """At temperature 0.5 differences of log probabilities double; those of the prompt stay the model's own."""
    if kernels == "native" and not LEVELS_HERE:
        pytest.skip("this CPU has no native kernels")
    sampling, wanted = CoreSamplingParams(temperature=0.5, seed=3), Logprobs(top=5, token_ids=(5, 300), prompt_from=0)
    found = []
    for mode in ("raw", "processed"):
        driver = Driver(build(checkpoint, dtype="bfloat16", cpu_kernels=kernels, logprobs_mode=mode))
        row = driver.open(PROMPT, 40, sampling, logprobs=wanted)
        result = driver.result((row, 0, len(PROMPT), True))
        token = result.tokens[0]
        assert token is not None and token.logprob is not None
        found.append((token, result.prompts[0]))
    (raw, raw_prompt), (processed, prompt) = found
    assert prompt == raw_prompt and raw.token_id == processed.token_id
    assert [token for token, _ in raw.top] == [token for token, _ in processed.top]
    assert processed.picked[0] - processed.picked[1] == pytest.approx(2 * (raw.picked[0] - raw.picked[1]), rel=1e-4)
    assert processed.top[0][1] > raw.top[0][1]


def test_rows_are_reused(checkpoint: Path) -> None:
    driver = Driver(build(checkpoint, max_rows=1))
    first = driver.generate([PROMPT], 4)
    driver.generate([PROMPT[:9]], 9)
    assert driver.generate([PROMPT], 4) == first


def test_a_request_may_fill_the_whole_context(checkpoint: Path) -> None:
    built = build(checkpoint, context_length=40, page_size=16)
    assert built.table.pages.shape[1] == 3
    assert len(Driver(built).generate([PROMPT], 3)[0]) == 3


def test_a_context_longer_than_the_pool_warns(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    built = build(checkpoint, context_length=100, page_size=16, max_total_tokens=64)
    assert built.context_length == 100
    assert [line for line in caplog.messages if "smaller than the context of 100 tokens" in line]
    caplog.clear()
    build(checkpoint, context_length=64, page_size=16, max_total_tokens=64)
    assert not [line for line in caplog.messages if "smaller than the context" in line]


@pytest.mark.parametrize("context_length", [0, 5000])
def test_context_beyond_the_model_is_refused(checkpoint: Path, context_length: int) -> None:
    with pytest.raises(ConfigError, match="context_length"):
        build(checkpoint, context_length=context_length)


@pytest.mark.parametrize("page_size", [0, 129])
def test_page_size_out_of_range_is_refused(checkpoint: Path, page_size: int) -> None:
    with pytest.raises(ConfigError, match="page_size"):
        build(checkpoint, page_size=page_size)


def test_a_pool_smaller_than_a_page_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="max_total_tokens"):
        build(checkpoint, page_size=64, max_total_tokens=63)


def _layout(head_dim: int) -> KVLayout:
    spec = attention_group(
        num_layers=4, page_tokens=16, num_kv_heads=8,
        head_dim=head_dim, dtype="float32",
    )  # fmt: skip
    return KVLayout((spec,))


def test_the_pool_is_bounded_by_need_and_by_the_cap() -> None:
    layout, cpu = _layout(128), torch.device("cpu")
    small = pool_tokens(MemoryConfig(), layout, cpu, context_length=100, max_rows=2)
    assert small == 2 * 112
    large = pool_tokens(MemoryConfig(), layout, cpu, context_length=1 << 20, max_rows=256)
    assert 0 < large * layout.token_bytes <= CPU_CAP_BYTES and large % 16 == 0


def test_a_memory_fraction_is_honoured_beyond_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, free = _layout(8), types.SimpleNamespace(available=100 * CPU_CAP_BYTES)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    asked = pool_tokens(
        MemoryConfig(mem_fraction_static=0.5), layout, torch.device("cpu"), context_length=1 << 30, max_rows=256
    )
    assert asked * layout.token_bytes > 49 * CPU_CAP_BYTES


def test_ranks_of_one_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=16 << 30))
    alone, shared = (
        pool_tokens(
            MemoryConfig(), _layout(8), torch.device("cpu"), context_length=1 << 30, max_rows=256, num_sharing=count
        )
        for count in (1, 4)
    )
    assert 4 * shared <= alone < 4 * (shared + 16)


def test_memory_fraction_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="mem_fraction_static"):
        pool_tokens(
            MemoryConfig(mem_fraction_static=1.5), _layout(8), torch.device("cpu"), context_length=10, max_rows=1
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        prepare_device(KernelConfig(device="cuda"))
    assert prepare_device(KernelConfig(device="auto")).type == "cpu"


def test_layout_follows_the_spec(checkpoint: Path) -> None:
    group = kv_layout(read_model_spec(checkpoint), 32, "bfloat16").groups[0]
    assert (group.num_layers, group.num_kv_heads, group.head_dim, group.page_tokens) == (3, 2, 16, 32)


def _generate(driver: Driver, sampling: CoreSamplingParams, num_tokens: int) -> list[int]:
    row = driver.open(PROMPT, len(PROMPT) + num_tokens, sampling)
    start, end, tokens = 0, len(PROMPT), []
    for _ in range(num_tokens):
        token = driver.step((row, start, end, True))[0]
        assert token is not None
        tokens.append(token.token_id)
        start, end = end, end + 1
    return tokens
