"""Greedy tokens of 1P+1D over the real transfer engine equal transformers' and the monolith's, in fp32."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.harness import assert_idle, running, running_pair, start_server
from tests.reference import load_reference, reference_greedy
from tests.tiny import Family

LENGTHS = (1, 15, 16, 17, 300, 1500)
NEW_TOKENS = 8
FAMILIES_HERE: tuple[Family, ...] = ("llama", "qwen2", "qwen3")
QUICK = {
    ("qwen2", "1", "64"), ("qwen3", "64", "-1"),
}  # fmt: skip
"""What is tried each time. The monolith has Llama."""
GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}


def make_prompts(vocab_size: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in LENGTHS]


def reference(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    loaded = load_reference(model)
    return [reference_greedy(loaded, prompt, NEW_TOKENS) for prompt in prompts]


def ask(url: str, input_ids: Any) -> Any:
    answer = requests.post(f"{url}/generate", json={"input_ids": input_ids, "sampling_params": GREEDY}, timeout=500)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_pair(
    model: Path, prompts: list[list[int]], expected: list[list[int]], *flags: str, at_once: int = 16
) -> None:
    """Alone, then `at_once` in mixed lengths; then everything is free."""
    with running_pair(str(model), "--dtype", "float32", *flags) as pair:
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert ask(pair.router.url, prompt)["output_ids"] == tokens, f"{len(prompt)} tokens, alone"
        batch = [prompts[i % len(prompts)] for i in range(at_once)]
        answers = ask(pair.router.url, batch)
        for i, answer in enumerate(answers):
            assert answer["output_ids"] == expected[i % len(prompts)], f"{len(batch[i])} tokens, {at_once} at once"
        assert pair.decode.state()["counters"]["requests"] == len(prompts) + at_once
        sent = pair.prefill.state()["counters"]["kv_transfer_bytes"]
        assert sent > sum(map(len, prompts)), "the KV must have gone through the transfer engine"
        assert_idle(pair.prefill, pair.decode)


@pytest.mark.parametrize(
    ("family", "page_size", "chunk"),
    [
        pytest.param(family, page_size, chunk, marks=[] if (family, page_size, chunk) in QUICK else pytest.mark.slow)
        for family in FAMILIES_HERE
        for page_size in ("1", "16", "64")
        for chunk in ("-1", "64")
    ],
)
def test_tiny_models(family: Family, page_size: str, chunk: str, tiny_checkpoint: Callable[[Family], Path]) -> None:
    model = tiny_checkpoint(family)
    prompts = make_prompts(vocab_size=320)
    expected = reference(model, prompts)
    flags = ("--page-size", page_size, "--chunked-prefill-size", chunk, "--max-total-tokens", "32768")
    check_pair(model, prompts, expected, *flags)


@pytest.mark.parametrize("family", ["llama", *(pytest.param(it, marks=pytest.mark.slow) for it in ("qwen2", "qwen3"))])
def test_tiny_models_on_the_monolith(family: Family, tiny_checkpoint: Callable[[Family], Path]) -> None:
    model = tiny_checkpoint(family)
    prompts = make_prompts(vocab_size=320)
    expected = reference(model, prompts)
    server = start_server(str(model), "null", "--dtype", "float32", "--max-total-tokens", "32768")
    with running(server):
        assert [ask(server.url, prompt)["output_ids"] for prompt in prompts] == expected
        assert [answer["output_ids"] for answer in ask(server.url, prompts)] == expected
        assert_idle(server)


@pytest.fixture(scope="module")
def smollm2_expected(smollm2_directory: Path) -> tuple[list[list[int]], list[list[int]]]:
    prompts = [prompt[:700] for prompt in make_prompts(vocab_size=49152, seed=1)]
    return prompts, reference(smollm2_directory, prompts)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", ["1", "16", "64"])
@pytest.mark.parametrize("chunk", ["-1", "512"])
def test_smollm2(
    page_size: str, chunk: str, smollm2_directory: Path, smollm2_expected: tuple[list[list[int]], list[list[int]]]
) -> None:
    flags = ("--page-size", page_size, "--chunked-prefill-size", chunk, "--max-total-tokens", "32768")
    check_pair(smollm2_directory, *smollm2_expected, *flags, at_once=8)
