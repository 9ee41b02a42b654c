"""The prefix cache of hybrid models on real executors: second turns, branches and few slots, beside transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers

from tests.model_families import FAMILIES
from tests.model_pair import ModelServer, running_models
from tests.tiny import VOCAB_SIZE

NAME = "qwen3_next"
NEW_TOKENS = 8
GRID = 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("families") / NAME
    FAMILIES[NAME].write(path)
    return path


def random_tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]


def reference_tokens(path: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    """What transformers generates greedily, for each prompt alone."""
    model = getattr(transformers, FAMILIES[NAME].architecture).from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False)
        found.append(ids[0, len(prompt) :].tolist())
    return found


def counters(server: ModelServer) -> dict[str, float]:
    return server.state().counters


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("is_pair", [False, True], ids=["monolith", "pair"])
def test_turns_and_branches_continue_from_a_state(is_pair: bool, impl: str, checkpoint: Path) -> None:
    shared = random_tokens(150, 0)
    first, branch, third = (shared + random_tokens(count, seed) for seed, count in ((1, 60), (2, 20), (3, 30)))
    turn = first + random_tokens(70, 4)
    prompts = [first, branch, third, turn]
    expected = reference_tokens(checkpoint, prompts)
    with running_models(checkpoint, pair=is_pair, chunk=512, prefill_impl=impl, model_impl=impl) as server:
        prefill = server.prefill or server.answering
        cached = []
        for prompt, tokens in zip(prompts, expected, strict=True):
            before = counters(prefill).get("cached_tokens", 0)
            assert server.generate([prompt], NEW_TOKENS) == [tokens]
            cached.append(counters(prefill).get("cached_tokens", 0) - before)
        assert cached == [0, 0, 2 * GRID, 3 * GRID], "150 shared tokens reach the second multiple, 210 the third"
        assert server.generate(prompts, NEW_TOKENS) == expected, "all at once"
        server.assert_idle()


@pytest.mark.parametrize("is_pair", [False, True], ids=["monolith", "pair"])
def test_requests_take_turns_with_few_slots(is_pair: bool, checkpoint: Path) -> None:
    prompts = [random_tokens(80, 5) + random_tokens(count, count) for count in (1, 30, 64, 90)]
    expected = reference_tokens(checkpoint, prompts)
    with running_models(checkpoint, pair=is_pair, num_slots=1) as server:
        assert server.answering.state().memory["slots_total"] == 1
        assert server.generate(prompts, NEW_TOKENS) == expected
        server.assert_idle()


def test_the_cpu_kernels_give_the_same_tokens_whatever_is_cached(checkpoint: Path) -> None:
    """Prompts in two orders, so that each begins from other states, or from none."""
    shared = random_tokens(150, 0)
    prompts = [shared + random_tokens(count, seed) for seed, count in ((1, 60), (2, 20), (3, 30), (4, 200))]
    found: list[dict[int, list[int]]] = []
    for order in ((0, 1, 2, 3), (3, 2, 1, 0)):
        with running_models(
            checkpoint, pair=False, chunk=512, prefill_impl="native", model_impl="native", dtype="bfloat16"
        ) as server:
            found.append({index: server.generate([prompts[index]], NEW_TOKENS)[0] for index in order})
            assert counters(server.answering)["states_copied"] >= 2
            server.assert_idle()
    assert found[0] == found[1]
