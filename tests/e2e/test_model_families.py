"""Models of many families through transformers: greedy fp32 tokens of monolith and 1P1D over Mooncake equal
transformers' own, also with clients that leave and with too little memory where text is generated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.e2e.harness import (
    Pair,
    assert_idle,
    generate_all,
    generate_batch,
    generate_while_some_leave,
    running_monolith,
    running_pair,
)
from tests.model_families import FAMILIES
from tests.tiny import VOCAB_SIZE

LENGTHS = (1, 63, 64, 65, 300)
NEW_TOKENS = 12
COMMON = ("--dtype", "float32", "--chunked-prefill-size", "96", "--model-impl", "transformers")
SHORT = ("--max-total-tokens", "384", "--schedule-conservativeness", "0.1", "--num-reserved-decode-tokens", "8")
"""Memory of a decode server for half of the requests of the load."""
LONG = 100


@pytest.fixture(scope="module")
def family_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the tiny checkpoint of a family, once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("families") / name
            FAMILIES[name].write(made[name])
        return made[name]

    return make


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def bodies_of(prompts: Sequence[list[int]], num_new: int) -> list[dict[str, Any]]:
    sampling = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}
    return [{"input_ids": prompt, "sampling_params": sampling} for prompt in prompts]


def reference_tokens(name: str, path: Path, prompts: Sequence[list[int]], num_new: int) -> list[list[int]]:
    """What transformers generates greedily, for each prompt alone."""
    model_class = getattr(transformers, FAMILIES[name].architecture)
    model = model_class.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=num_new, do_sample=False)
        found.append(ids[0, len(prompt) :].tolist())
    return found


def tokens_of(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_monolith(name: str, family_checkpoint: Callable[[str], Path]) -> None:
    path, prompts = family_checkpoint(name), prompts_of(LENGTHS)
    expected = reference_tokens(name, path, prompts, NEW_TOKENS)
    with running_monolith(str(path), *COMMON) as server:
        bodies = bodies_of(prompts, NEW_TOKENS)
        assert [tokens_of(generate_all(server.url, [body]))[0] for body in bodies] == expected
        assert tokens_of(generate_batch(server.url, bodies[1:])) == expected[1:], "four at once"
        assert_idle(server)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_pair_over_mooncake(name: str, family_checkpoint: Callable[[str], Path]) -> None:
    path, prompts = family_checkpoint(name), prompts_of(LENGTHS)
    expected = reference_tokens(name, path, prompts, NEW_TOKENS)
    load = prompts_of((63, 64, 65, 40), seed=1)
    long = reference_tokens(name, path, load, LONG)
    with running_pair(str(path), *COMMON, decode_flags=SHORT) as pair:
        bodies = bodies_of(prompts, NEW_TOKENS)
        assert [tokens_of(generate_all(pair.url, [body]))[0] for body in bodies] == expected
        assert tokens_of(generate_batch(pair.url, bodies[1:4])) == expected[1:4], "several at once"
        _check_pressure(pair, load, long)


def _check_pressure(pair: Pair, prompts: Sequence[list[int]], expected: Sequence[list[int]]) -> None:
    """Requests that need more memory than there is, beside clients that leave."""
    bodies = bodies_of(prompts, LONG)
    answers = generate_while_some_leave(pair.url, bodies, bodies[:2])
    assert tokens_of(answers) == expected
    assert_idle(*pair.workers)
