"""Logits and logprobs are close to transformers', and nothing outside a request's tokens touches them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.protocol.sampling import CoreSamplingParams
from tests.driver import GREEDY, Driver, build, random_prompt
from tests.reference import load_reference, reference_logits
from tests.tiny import FAMILIES, VOCAB_SIZE, Family, make_tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_raw_logits(family: Family, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path)
    prompt = random_prompt(50, VOCAB_SIZE)
    expected = reference_logits(load_reference(path), prompt)[-1].log_softmax(-1)
    driver = Driver(build(path))
    hot = CoreSamplingParams(temperature=3.0, seed=1, repetition_penalty=1.5, logit_bias={7: 5.0})
    row = driver.open(prompt, 60, hot, top_logprobs=5)
    token = driver.step((row, 0, 50, True))[0]
    assert token is not None and token.logprob is not None
    assert token.logprob == pytest.approx(float(expected[token.token_id]), abs=1e-3)
    best = expected.topk(5)
    assert [entry[0] for entry in token.top] == best.indices.tolist()
    assert [entry[1] for entry in token.top] == pytest.approx(best.values.tolist(), abs=1e-3)


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_a_request_does_not_see_what_runs_beside_it(page_size: int, tmp_path: Path) -> None:
    """Row lengths differ by far, so that gathers are padded and cut; every unused slot of the pool is NaN."""
    path = make_tiny("llama", tmp_path)
    prompts = [random_prompt(length, VOCAB_SIZE, seed=9) for length in (2, 31, 33, 500, 515, 90)]
    driver = Driver(build(path, page_size=page_size))
    together = _decode_logprobs(driver, prompts)
    alone = [_decode_logprobs(Driver(build(path, page_size=page_size)), [prompt])[0] for prompt in prompts]
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), atol=1e-4, rtol=0.0)


def test_a_page_with_junk_behind_its_tokens_changes_nothing(tmp_path: Path) -> None:
    """A decode server receives whole pages; what lies behind the last token in them is anything at all."""
    path = make_tiny("qwen3", tmp_path)
    prompt, other = random_prompt(20, VOCAB_SIZE), random_prompt(45, VOCAB_SIZE)
    clean = _decode_logprobs(Driver(build(path)), [prompt, other])
    driver = Driver(build(path))
    rows = [driver.open(tokens, 64, GREEDY, top_logprobs=0) for tokens in (prompt, other)]
    driver.step((rows[0], 0, 19, False), (rows[1], 0, 44, False))
    pool = driver.built.executor.pools[0].pages
    for row, used in zip(rows, (19, 44), strict=True):
        for page, first in [(used // 16, used % 16), (used // 16 + 1, 0)]:
            pool[int(driver.built.table.pages[row, page]), :, :, :, first:] = float("inf")
    tokens = driver.step((rows[0], 19, 20, True), (rows[1], 44, 45, True))
    assert [token.logprob for token in tokens if token is not None] == pytest.approx(clean, abs=1e-5)


def _decode_logprobs(driver: Driver, prompts: list[list[int]]) -> list[float]:
    """Prefill all but the last token of each prompt, then one decode step for all; the chosen tokens' logprobs."""
    rows = [driver.open(prompt, len(prompt) + 1, GREEDY, top_logprobs=0) for prompt in prompts]
    driver.step(*[(row, 0, len(prompt) - 1, False) for row, prompt in zip(rows, prompts, strict=True)])
    tokens = driver.step(*[(row, len(p) - 1, len(p), True) for row, p in zip(rows, prompts, strict=True)])
    logprobs = [token.logprob for token in tokens if token is not None and token.logprob is not None]
    assert len(logprobs) == len(prompts) and not any(value != value for value in logprobs)
    return logprobs
