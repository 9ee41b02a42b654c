"""Hidden states of a step's tokens: those of transformers behind the final norm, whatever the chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from pdserve.protocol.hidden_states import HiddenArray, HiddenParams, HiddenStates
from pdserve.protocol.logprobs import Logprobs
from tests.driver import Driver, build, random_prompt
from tests.reference import load_reference
from tests.tiny import VOCAB_SIZE, Family, make_tiny

ALL = HiddenParams()


def _expected(path: Path, tokens: list[int]) -> HiddenArray:
    """Hidden states behind the final norm, by transformers."""
    with torch.no_grad():
        states = load_reference(path).model(torch.tensor([tokens])).last_hidden_state[0]
    return np.asarray(states.float().numpy())


def _joined(parts: list[HiddenStates], start: int) -> HiddenArray:
    """The rows of parts that follow one another from position `start` on."""
    for part in parts:
        assert part.start == start
        start = part.end
    return np.concatenate([part.rows() for part in parts])


def _told(driver: Driver, prompt: list[int], hidden: HiddenParams, *, chunk: int) -> list[HiddenStates]:
    row = driver.open(prompt, len(prompt) + 1, hidden=hidden)
    parts: list[HiddenStates] = []
    for start in range(0, len(prompt), chunk):
        end = min(start + chunk, len(prompt))
        parts += driver.result((row, start, end, end == len(prompt))).hidden.values()
    driver.close(row)
    return parts


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_they_are_those_of_transformers(family: Family, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path)
    prompt = random_prompt(60, VOCAB_SIZE)
    parts = _told(Driver(build(path)), prompt, ALL, chunk=25)
    assert [(part.start, part.num_tokens) for part in parts] == [(0, 25), (25, 25), (50, 10)]
    np.testing.assert_allclose(_joined(parts, 0), _expected(path, prompt), atol=1e-3)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_kernels_in_bfloat16(kernels: Literal["native", "torch"], tmp_path: Path) -> None:
    path = make_tiny("qwen3", tmp_path, dtype="bfloat16")
    prompt = random_prompt(40, VOCAB_SIZE)
    driver = Driver(build(path, cpu_kernels=kernels, dtype="bfloat16"))
    rows, expected = _joined(_told(driver, prompt, ALL, chunk=40), 0), _expected(path, prompt)
    similar = (rows * expected).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(expected, axis=1)
    assert similar.min() > 0.995


def test_only_what_is_asked_for_of_each_request(tmp_path: Path) -> None:
    """Requests with other wishes, or none, stand in the same step; decode rows among them, and greedy ones."""
    path = make_tiny("llama", tmp_path)
    driver = Driver(build(path))
    prompts = [random_prompt(length, VOCAB_SIZE, seed=length) for length in (20, 31, 12, 9)]
    wanted = [HiddenParams(start=19), None, ALL, HiddenParams(pooled=True)]
    rows = [
        driver.open(prompt, 40, hidden=hidden, logprobs=Logprobs(prompt_from=0) if i == 2 else None)
        for i, (prompt, hidden) in enumerate(zip(prompts, wanted, strict=True))
    ]
    result = driver.result(*((row, 0, len(prompt), True) for row, prompt in zip(rows, prompts, strict=True)))
    assert sorted(result.hidden) == [0, 2, 3] and sorted(result.prompts) == [2]
    assert [(part.start, part.num_tokens) for part in result.hidden.values()] == [(19, 1), (0, 12), (0, 9)]
    np.testing.assert_allclose(result.hidden[0].rows(), _expected(path, prompts[0])[19:], atol=1e-3)
    np.testing.assert_allclose(result.hidden[2].rows(), _expected(path, prompts[2]), atol=1e-3)
    np.testing.assert_allclose(result.hidden[3].rows(), _expected(path, prompts[3]).sum(0)[None], atol=1e-3)

    tokens = [token.token_id for token in result.tokens if token is not None]
    again = driver.result(
        *((row, len(prompt), len(prompt) + 1, True) for row, prompt in zip(rows, prompts, strict=True))
    )
    assert sorted(again.hidden) == [0, 2, 3] and not again.prompts
    expected = _expected(path, [*prompts[0], tokens[0]])
    np.testing.assert_allclose(again.hidden[0].rows(), expected[20:], atol=1e-3)
    for row in rows:
        driver.close(row)
    row = driver.open(prompts[1], 40)
    assert not driver.result((row, 0, 31, True)).hidden, "a row keeps nothing of the request before"


def test_parts_stay_below_their_bound() -> None:
    rows = np.arange(40, dtype=np.float32).reshape(10, 4)
    whole = HiddenStates.pack(5, 10, rows)
    parts = list(whole.parts(3 * 16))
    assert [(part.start, part.num_tokens) for part in parts] == [(5, 3), (8, 3), (11, 3), (14, 1)]
    np.testing.assert_array_equal(_joined(parts, 5), rows)
    assert list(whole.parts(1))[3].rows().tolist() == [[12, 13, 14, 15]]
    summed = HiddenStates.pack(5, 10, rows.sum(0, keepdims=True))
    assert list(summed.parts(1)) == [summed]
