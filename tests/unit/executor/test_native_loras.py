"""LoRA adapters of a model that the CPU kernels run: near the exact result, and with the same bits in any batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, Quantization, ServerConfig
from pdserve.config.lora_group import LoraConfig
from pdserve.config.speculative_group import SpeculativeConfig
from pdserve.executor.factory import build_executor
from pdserve.model.parallel import Parallel, SingleRank
from tests.adapters import ATTENTION, write_adapter
from tests.driver import Driver
from tests.model_families import FAMILIES, prompts_of
from tests.model_pair import running_models
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE, make_tiny
from tests.unit.executor.gang import Gang
from tests.unit.executor.native_ranks import CpuKernels, Dtype, divergence
from tests.unit.model.native_kit import needs_kernels

pytestmark = needs_kernels
PROMPTS = prompts_of((70, 3, 1, 40, 30))
NAMES = ("all", None, "attention", "attention", "all")
NUM_NEW = 12


def adapters_of(base: Path, root: Path) -> LoraConfig:
    """Two adapters of a checkpoint: one of all layers, one of attention."""
    paths = {
        "all": write_adapter(root / "all", base, seed=1, rank=5),
        "attention": write_adapter(root / "attention", base, seed=2, rank=40, modules=ATTENTION, lora_alpha=8),
    }
    return LoraConfig(lora_paths=",".join(f"{name}={path}" for name, path in paths.items()))


def logprobs_of(
    parallel: Parallel, base: Path, lora: LoraConfig, names: Sequence[str | None], kernels: CpuKernels, dtype: Dtype,
    quantization: Quantization | None = None,
) -> torch.Tensor:  # fmt: skip
    """Log probabilities of the whole vocabulary behind `PROMPTS`, `[prompts, vocab]`, each with its adapter."""
    config = ServerConfig(
        model=ModelConfig(model_path=str(base), dtype=dtype, quantization=quantization),
        memory=MemoryConfig(page_size=16, max_total_tokens=2048),
        kernels=KernelConfig(device="cpu", cpu_threads=1, cpu_kernels=kernels),
        lora=lora,
    )
    built = build_executor(config, max_rows=8, parallel=parallel)
    driver, loras = Driver(built), built.loras
    assert loras is not None
    rows = [driver.open(prompt, len(prompt) + 1, top_logprobs=VOCAB_SIZE) for prompt in PROMPTS]
    for row, name in zip(rows, names, strict=True):
        if name is not None:
            loras.open_row(row, loras.find(name))
    found = torch.zeros(len(PROMPTS), VOCAB_SIZE)
    steps = [(row, 0, len(prompt), True) for row, prompt in zip(rows, PROMPTS, strict=True)]
    for line, token in zip(found, driver.step(*steps), strict=True):
        assert token is not None
        ids, values = zip(*token.top, strict=True)
        line[list(ids)] = torch.tensor(values)
    return found


@pytest.mark.parametrize("family", rest_slow(["qwen3_5_text", "gemma3_text", "glm4", "olmo2", "granite"], keep=2))
def test_the_kernels_are_as_exact_as_torch(family: str, tmp_path: Path) -> None:
    base, tiny = tmp_path / "base", FAMILIES[family]
    wide = {"linear_key_head_dim": 16, "linear_value_head_dim": 16} if family == "qwen3_5_text" else {}
    dataclasses.replace(tiny, changes={**tiny.changes, **wide}).write(base)
    lora = adapters_of(base, tmp_path)
    one = SingleRank()
    truth = logprobs_of(one, base, lora, NAMES, "torch", "float32")
    plain = logprobs_of(one, base, lora, [None] * len(PROMPTS), "torch", "float32")
    assert divergence(plain[0], truth[0]) > 0.05, "an adapter changes something"
    mine, torchs = (logprobs_of(one, base, lora, NAMES, kernels, "bfloat16") for kernels in ("native", "torch"))
    assert divergence(mine, truth) < max(2e-3, 1.2 * divergence(torchs, truth))


@pytest.mark.slow
def test_tensor_ranks_cut_adapters_of_the_kernels(tmp_path: Path, gang: Gang) -> None:
    base = make_tiny("qwen2", tmp_path / "base", eos_token_id=None)
    lora = adapters_of(base, tmp_path)
    truth = logprobs_of(SingleRank(), base, lora, NAMES, "torch", "float32")
    for shape in (ParallelShape(tp_size=2, pp_size=1), ParallelShape(tp_size=1, pp_size=2)):
        found = gang.run(shape, logprobs_of, base, lora, NAMES, "native", "bfloat16")
        assert all(divergence(each, truth) < 5e-3 for each in found)
    eight = logprobs_of(SingleRank(), base, lora, NAMES, "native", "bfloat16", "int8")
    assert divergence(eight, truth) < 2e-2


def test_tokens_are_the_same_alone_in_a_batch_and_in_a_pair(tmp_path: Path) -> None:
    """By steps of prompts, by decode steps in one call, by steps that verify drafts: all have the same bits."""
    base = make_tiny("qwen2", tmp_path / "base", eos_token_id=None)
    lora = adapters_of(base, tmp_path)
    drafter = SpeculativeConfig(
        speculative_algorithm="STANDALONE", speculative_draft_model_path=str(base), speculative_num_steps=3,
        speculative_adaptive=False,
    )  # fmt: skip
    impl: dict[str, Any] = {"prefill_impl": "native", "model_impl": "native", "dtype": "bfloat16"}
    with running_models(base, pair=False, lora=lora, chunk=32, **impl) as server:
        pairs = zip(PROMPTS, NAMES, strict=True)
        alone = [server.generate([prompt], NUM_NEW, loras=[name])[0] for prompt, name in pairs]
        assert server.generate(PROMPTS, NUM_NEW, loras=NAMES) == alone
        assert server.generate([PROMPTS[0]] * 3, NUM_NEW, loras=["all", None, "attention"])[0] == alone[0]
        without = server.generate(PROMPTS, NUM_NEW)
        assert without[1] == alone[1] and without[0] != alone[0]
        server.assert_idle()
    with running_models(base, pair=True, lora=lora, speculative=drafter, **impl) as pair:
        assert pair.generate(PROMPTS, NUM_NEW, loras=NAMES) == alone
        assert pair.answering.state().counters["spec_verify_steps"] > 0
        pair.assert_idle()
    with running_models(base, pair=False, **impl) as plain:
        assert plain.generate(PROMPTS, NUM_NEW) == without, "a server without --enable-lora"
