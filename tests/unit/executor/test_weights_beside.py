"""Other weights beside what a server has for those in use: LoRA adapters, and experts that have moved between ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ParallelConfig, ServerConfig
from pdserve.config.lora_group import LoraConfig
from pdserve.executor.factory import build_executor
from pdserve.executor.weights import WeightsSource
from tests.adapters import ATTENTION, write_adapter
from tests.driver import Driver, build, random_prompt
from tests.share import rest_slow
from tests.tiny import VOCAB_SIZE, make_tiny
from tests.unit.executor.expert_ranks import Precision, changed, outcome
from tests.unit.executor.gang import Gang
from tests.unit.executor.test_deferred_drafter import drafts_after
from tests.unit.executor.test_weights import send_halves, swap
from tests.unit.model.eagle_kit import NATIVE, TORCH, make_eagle3, options

PROMPTS = [random_prompt(length, VOCAB_SIZE) for length in (40, 63, 17)]
NAMES = ("all", None, "attention")
NUM_NEW = 8


def adapted(path: Path, lora: LoraConfig, kernels: str) -> Driver:
    config = ServerConfig(
        model=ModelConfig(model_path=str(path), dtype="bfloat16"),
        memory=MemoryConfig(page_size=16, max_total_tokens=4096),
        kernels=KernelConfig(device="cpu", cpu_threads=1, cpu_kernels=kernels),  # type: ignore[arg-type]
        lora=lora,
    )
    return Driver(build_executor(config, max_rows=8))


def tokens(driver: Driver) -> list[list[int]]:
    """Greedy tokens of `PROMPTS` in one batch, each with its adapter."""
    loras = driver.built.loras
    assert loras is not None
    rows = [driver.open(prompt, len(prompt) + NUM_NEW) for prompt in PROMPTS]
    for row, name in zip(rows, NAMES, strict=True):
        if name is not None:
            loras.open_row(row, loras.find(name))
    spans = [(row, 0, len(prompt), True) for row, prompt in zip(rows, PROMPTS, strict=True)]
    found: list[list[int]] = [[] for _ in rows]
    for _ in range(NUM_NEW):
        for line, token in zip(found, driver.step(*spans), strict=True):
            assert token is not None
            line.append(token.token_id)
        spans = [(row, end, end + 1, True) for row, _, end, _ in spans]
    for row in rows:
        driver.close(row)
    return found


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_adapters_change_the_other_weights_as_they_would_have_from_the_start(kernels: str, tmp_path: Path) -> None:
    """Those of the flags, and one that is loaded behind the change; and tensors of the former weights once more."""
    paths = [make_tiny("qwen3", tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    whole = write_adapter(tmp_path / "all", paths[0], seed=1)
    attention = write_adapter(tmp_path / "attention", paths[0], seed=2, rank=8, modules=ATTENTION)
    both = LoraConfig(lora_paths=f"all={whole},attention={attention}")
    expected = [tokens(adapted(path, both, kernels)) for path in paths]
    assert expected[0] != expected[1]
    driver = adapted(paths[0], both, kernels)
    assert tokens(driver) == expected[0]
    swap(driver, WeightsSource(str(paths[1])))
    assert tokens(driver) == expected[1]
    loras = driver.built.loras
    assert loras is not None
    loras.unload("attention")
    loras.load("attention", str(attention))
    assert tokens(driver) == expected[1]
    send_halves(driver, paths[0])
    assert tokens(driver) == expected[0]


@pytest.mark.parametrize("precision", rest_slow(["bfloat16", "auto", "int8"], keep=1))
def test_experts_of_other_weights_are_where_the_former_ones_were(
    precision: Precision, gang: Gang, tmp_path: Path
) -> None:
    """They have moved before, and a plan that began before the change is carried out behind it. The file of their first
    places is gone.
    """
    paths = tuple(make_tiny("qwen3_moe", tmp_path / name, seed=seed) for seed, name in ((3, "a"), (4, "b")))
    location = tmp_path / "location.json"
    experts = ParallelConfig(
        tp_size=2, ep_size=2, ep_num_redundant_experts=2, enable_eplb=True, init_expert_location=str(location)
    )
    location.write_text(json.dumps({"physical_to_logical_map": [[5, 4, 3, 2, 1, 0, 5, 4]] * 3}))
    fresh = [gang.run(ParallelShape(tp_size=2), outcome, path, VOCAB_SIZE, experts, precision)[0] for path in paths]
    ranks = gang.run(ParallelShape(tp_size=2), changed, paths, VOCAB_SIZE, experts, precision)
    for rank in ranks:
        assert rank.sound and rank.counted
        assert rank.after == rank.before == ranks[0].before
        assert rank.last == ranks[0].last != rank.after, "the plan was carried out"
        assert [tokens[i][0] for tokens in rank.tokens[:2] for i in range(4)] == [
            one.greedy[i][0] for one in fresh for i in range(4)
        ]
        assert rank.tokens[1] == rank.tokens[2]
        assert "so tensors of all experts must be" in rank.refusal


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
@pytest.mark.parametrize("how", ["native", "torch"])
def test_a_drafter_of_its_own_drafts_for_the_other_weights(algorithm: str, how: str, tmp_path: Path) -> None:
    """Its weights stay. An EAGLE-3 head reads the new hidden states, and may share the new embedding."""
    paths = [make_tiny("qwen3", tmp_path / name, seed=seed, num_hidden_layers=6) for seed, name in enumerate("ab")]
    draft = make_eagle3(tmp_path / "draft", paths[0]) if algorithm == "EAGLE3" else paths[0]
    flags = options(NATIVE if how == "native" else TORCH, algorithm, draft)
    expected = [drafts_after(Driver(build(path, **flags)), 4, num_proposals=1) for path in paths]
    driver = Driver(build(paths[0], **flags))
    swap(driver, WeightsSource(str(paths[1])))
    assert drafts_after(driver, 4, num_proposals=1) == expected[1] != expected[0]
