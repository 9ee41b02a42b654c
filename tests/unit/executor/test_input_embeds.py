"""Rows with input embeddings: those of transformers' `inputs_embeds`, whatever the chunks and other rows of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from pdserve.protocol.hidden_states import HiddenArray, HiddenParams
from tests.driver import Driver, build, random_prompt
from tests.reference import load_reference
from tests.tiny import VOCAB_SIZE, Family, make_tiny

WIDTH = 64
ALL = HiddenParams()


def _embeds(count: int, seed: int = 0) -> HiddenArray:
    return np.random.default_rng(seed).normal(0, 0.15, (count, WIDTH)).astype(np.float32)


def _expected(path: Path, embeds: HiddenArray) -> HiddenArray:
    """Hidden states behind the final norm, by transformers."""
    with torch.no_grad():
        states = load_reference(path).model(inputs_embeds=torch.from_numpy(embeds)[None]).last_hidden_state[0]
    return np.asarray(states.float().numpy())


def _states(driver: Driver, embeds: HiddenArray, *, chunk: int) -> HiddenArray:
    count = len(embeds)
    row = driver.open([0] * count, count + 1, hidden=ALL, embeds=embeds.tobytes())
    parts = []
    for start in range(0, count, chunk):
        end = min(start + chunk, count)
        parts.append(driver.result((row, start, end, end == count)).hidden[0].rows())
    driver.close(row)
    return np.concatenate(parts)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_they_are_those_of_transformers(family: Family, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path)
    embeds = _embeds(30)
    np.testing.assert_allclose(_states(Driver(build(path)), embeds, chunk=13), _expected(path, embeds), atol=1e-3)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_kernels_in_bfloat16(kernels: Literal["native", "torch"], tmp_path: Path) -> None:
    path = make_tiny("qwen3", tmp_path, dtype="bfloat16")
    embeds = _embeds(30)
    rows = _states(Driver(build(path, cpu_kernels=kernels, dtype="bfloat16")), embeds, chunk=30)
    expected = _expected(path, embeds)
    similar = (rows * expected).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(expected, axis=1)
    assert similar.min() > 0.99


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_models_own_embeddings_give_its_tokens(dtype: Literal["float32", "bfloat16"], tmp_path: Path) -> None:
    """In one step with rows of token ids, which are not changed by it, and while the row decodes."""
    path = make_tiny("llama", tmp_path, dtype=dtype)
    driver = Driver(build(path, dtype=dtype))
    prompts = [random_prompt(length, VOCAB_SIZE, seed=length) for length in (20, 12)]
    expected = driver.generate(prompts, 4)
    table = load_reference(path).model.embed_tokens.weight.detach().float().numpy()
    own = table[prompts[0]].astype(np.float32).tobytes()
    rows = [driver.open([0] * 20, 30, embeds=own, num_prompt=20), driver.open(prompts[1], 30)]
    found: list[list[int]] = [[], []]
    result = driver.step((rows[0], 0, 20, True), (rows[1], 0, 12, True))
    for number in range(4):
        for tokens, token in zip(found, result, strict=True):
            assert token is not None
            tokens.append(token.token_id)
        at = [20 + number, 12 + number]
        result = driver.step(*((row, start, start + 1, True) for row, start in zip(rows, at, strict=True)))
    assert found == expected
    for row in rows:
        driver.close(row)
    row = driver.open(prompts[1], 30)
    assert driver.step((row, 0, 12, True))[0] is not None, "a row keeps nothing of the request before"
    driver.close(row)
