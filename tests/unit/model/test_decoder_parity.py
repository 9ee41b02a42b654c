"""The decoder gives the tokens of transformers in fp32, however the work is cut into pages, chunks and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.driver import Driver, build, random_prompt
from tests.reference import load_reference, reference_greedy
from tests.tiny import FAMILIES, VOCAB_SIZE, Family, make_tiny

NUM_TOKENS = 6


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    path = make_tiny(request.param, tmp_path_factory.mktemp(request.param))
    return path, load_reference(path)


@pytest.mark.parametrize("chunk", [None, 1, 7, 64])
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_mixed_batches_equal_transformers(
    checkpoint: tuple[Path, PreTrainedModel], page_size: int, chunk: int | None
) -> None:
    path, reference = checkpoint
    lengths = (1, 15, 16, 17, 40) if chunk == 1 else (1, 15, 16, 17, 150, 300)
    prompts = [random_prompt(length, VOCAB_SIZE) for length in lengths]
    driver = Driver(build(path, page_size=page_size))
    expected = [reference_greedy(reference, prompt, NUM_TOKENS) for prompt in prompts]
    assert driver.generate(prompts, NUM_TOKENS, chunk=chunk) == expected


def test_a_long_prompt_equals_transformers(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    path, reference = checkpoint
    prompt = random_prompt(1500, VOCAB_SIZE)
    expected = [reference_greedy(reference, prompt, NUM_TOKENS)]
    assert Driver(build(path)).generate([prompt], NUM_TOKENS) == expected
    for chunk in (512, 700):
        assert Driver(build(path)).generate([prompt], NUM_TOKENS, chunk=chunk) == expected


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
OPTIONS: dict[str, tuple[Family, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "tied qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
    "moe: dense layers between, weights that do not add up to 1": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "num_hidden_layers": 4, "norm_topk_prob": False},
    ),
    "moe: one dense layer, all experts": ("qwen3_moe", {"mlp_only_layers": [1], "num_experts_per_tok": 6}),
    "moe: one expert": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "wide heads": ("llama", {"head_dim": 40}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "as many kv heads": ("qwen2", {"num_key_value_heads": 4}),
    "theta": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}}),
    "yarn": ("qwen2", {"rope_parameters": YARN}),
    "yarn mscale": ("llama", {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5}}),
    "yarn factor": ("qwen3", {"rope_parameters": YARN | {"attention_factor": 1.2, "truncate": False}}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_equal_transformers(name: str, tmp_path: Path) -> None:
    family, overrides = OPTIONS[name]
    path = make_tiny(family, tmp_path, seed=3, **overrides)
    prompt = random_prompt(200, VOCAB_SIZE, seed=5)
    expected = reference_greedy(load_reference(path), prompt, 8)
    assert Driver(build(path)).generate([prompt], 8, chunk=77) == [expected]
