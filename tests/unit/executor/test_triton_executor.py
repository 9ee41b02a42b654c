"""Whole models by Triton's kernels: the tokens of torch, in mixed batches, over pages of any size, in a pool of NaN."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.errors import ConfigError
from pdserve.executor import backend_choice
from pdserve.executor.backend_choice import choose_attention, make_attention
from pdserve.executor.factory import LoadedEngine, build_executor
from pdserve.executor.interface import BatchRow
from pdserve.memory.layout import attention_group
from pdserve.model.attention.page_gather import KVPool
from pdserve.model.attention.triton_pages import TritonAttention
from pdserve.model.loader import read_spec
from pdserve.protocol.logprobs import Logprobs
from tests.driver import Driver, random_prompt
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE, Family
from tests.unit.executor.drafting import Request, by_single_steps
from tests.unit.model.triton_kit import DEVICE

TORCH = KernelConfig(device="cuda" if DEVICE == "cuda" else "cpu", attention_backend="torch", cpu_threads=1)
TRITON = dataclasses.replace(TORCH, attention_backend="triton")
PROMPTS = [random_prompt(length, VOCAB_SIZE) for length in (1, 13)]


def built(checkpoint: Path, kernels: KernelConfig, page_size: int) -> LoadedEngine:
    """A small executor in float32."""
    model = ModelConfig(model_path=str(checkpoint), dtype="float32")
    memory = MemoryConfig(page_size=page_size, max_total_tokens=512)
    return build_executor(ServerConfig(model=model, memory=memory, kernels=kernels), max_rows=4)


@pytest.mark.parametrize(("family", "page_size"), [("llama", 1), ("qwen3_moe", 16)])
def test_tokens_are_torch_s(tiny_checkpoint: Callable[[Family], Path], family: Family, page_size: int) -> None:
    checkpoint = tiny_checkpoint(family)
    expected = Driver(built(checkpoint, TORCH, 16)).generate(PROMPTS, 2)
    driver = Driver(built(checkpoint, TRITON, page_size))
    assert driver.generate(PROMPTS, 2, chunk=8) == expected


@pytest.mark.parametrize("name", rest_slow(["gemma2", "olmo3", "smollm3", "granite", "gemma3_text", "glm4"]))
def test_tokens_of_families_with_options_are_torch_s(name: str, family_checkpoint: Callable[[str], Path]) -> None:
    """Prompts that are longer than a window of 24, alone in chunks and beside rows that decode."""
    checkpoint, prompts = family_checkpoint(name), [random_prompt(length, VOCAB_SIZE) for length in (3, 40)]
    expected = Driver(built(checkpoint, TORCH, 16)).generate(prompts, 3)
    assert Driver(built(checkpoint, TRITON, 16)).generate(prompts, 3, chunk=16) == expected


def test_rows_with_drafts_attend_as_decode_steps_do(tiny_checkpoint: Callable[[Family], Path]) -> None:
    """Alone, and beside a prompt; the tile kernel, which adds in another order, computes prompts only."""
    driver = Driver(built(tiny_checkpoint("llama"), TRITON, 4))
    (one,) = requests = [Request(tuple(PROMPTS[1]), logprobs=Logprobs(top=2), num_new=5)]
    (wanted,) = by_single_steps(driver, requests).tokens
    truth = [token.token_id for token in wanted]
    row, other = (driver.open(one.prompt, 24, logprobs=one.logprobs) for _ in range(2))
    found = [*driver.result((row, 0, 13, True)).sampled(0)]
    for start, drafts, beside in ((13, (truth[1], 9), []), (15, (truth[3],), [BatchRow("o", other, 0, 13, True)])):
        end = start + 1 + len(drafts)
        found += driver.run([*beside, BatchRow("r", row, start, end, True, drafts=drafts)]).sampled(len(beside))
    assert [token.token_id for token in found] == truth
    assert [token.logprob for token in found] == pytest.approx([token.logprob for token in wanted], abs=1e-5)


def test_what_cannot_be_had_is_refused_by_the_flag_s_name(tiny_checkpoint: Callable[[Family], Path]) -> None:
    spec, cpu = read_spec(tiny_checkpoint("qwen3")), torch.device("cpu")
    for kernels, reason in (
        (dataclasses.replace(TRITON, attention_backend="flashinfer"), "flashinfer is for CUDA"),
        (dataclasses.replace(TRITON, enable_deterministic_inference=True), "its own attention backend"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            choose_attention(kernels, spec, torch.float32, cpu)
        assert caught.value.field == "attention_backend"
    assert choose_attention(KernelConfig(), spec, torch.float32, cpu) == "torch"


def test_a_flashinfer_that_cannot_build_is_refused_or_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def __init__(self, *args: object) -> None:
            raise RuntimeError("no nvcc")

    monkeypatch.setattr(backend_choice, "FlashInferAttention", Broken)
    layout = attention_group(
        num_layers=1, page_tokens=4, num_kv_heads=1,
        head_dim=8, dtype="float32",
    )  # fmt: skip
    pool, device = KVPool(layout, 2, torch.device(DEVICE)), torch.device(DEVICE)
    with pytest.raises(ConfigError, match="flashinfer: RuntimeError: no nvcc") as caught:
        make_attention("flashinfer", pool, 2, device, was_asked_for=True)
    assert caught.value.field == "attention_backend"
    assert isinstance(make_attention("flashinfer", pool, 2, device, was_asked_for=False), TritonAttention)
    assert "attention is by Triton: RuntimeError: no nvcc" in caplog.text


def test_triton_is_not_for_cpus(tiny_checkpoint: Callable[[Family], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="--attention-backend triton: Triton's kernels are for CUDA") as caught:
        choose_attention(TRITON, read_spec(tiny_checkpoint("qwen3")), torch.float32, torch.device("cpu"))
    assert caught.value.field == "attention_backend"
