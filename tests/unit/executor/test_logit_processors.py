"""Logit processors: what they may change, with drafts too, and that a failing one ends its own requests only."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from pdserve.errors import ConfigError
from pdserve.executor.logit_processors import LogitProcessors
from pdserve.executor.sampler import Sampler
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import CoreSamplingParams, Grammar, ProcessorParams
from tests.driver import Driver, build
from tests.tiny import Family, tiny_tokenizer
from tests.unit.executor.drafting import Request, by_drafts, by_single_steps, prompt_of

ANY = Grammar(kind="any_text", text="")
LETTERS = tuple(tiny_tokenizer().encode("xyz"))


def only_multiples(logits: Tensor, params: Sequence[Mapping[str, Any]]) -> Tensor:
    """Tokens whose id is a multiple of `of`; in place."""
    for row, given in zip(logits, params, strict=True):
        row[torch.arange(len(row)) % given["of"] != 0] = -torch.inf
    return logits


def allow_all(logits: Tensor, params: Sequence[Mapping[str, Any]]) -> Tensor:
    return torch.zeros_like(logits, dtype=torch.float64)


def of_another_shape(logits: Tensor, params: Sequence[Mapping[str, Any]]) -> Tensor:
    return logits[:, :-1]


KNOWN = {"only_multiples": only_multiples, "allow_all": allow_all, "of_another_shape": of_another_shape}


@pytest.fixture(scope="module")
def driver(tiny_checkpoint: Callable[[Family], Path]) -> Driver:
    driver = Driver(
        build(tiny_checkpoint("llama"), page_size=16, max_total_tokens=1 << 14, max_rows=32, deterministic=True)
    )
    runner = driver.built.executor._model_runner
    runner._sample = Sampler(runner._sample.choose, processors=LogitProcessors(KNOWN))
    return driver


def processed(name: str, params: Mapping[str, Any] | None = None, **sampling: Any) -> CoreSamplingParams:
    given = ProcessorParams(name=name, params=json.dumps(params or {}))
    base = CoreSamplingParams(temperature=1.0, seed=5, processor=given, grammar=ANY)
    return msgspec.structs.replace(base, **sampling)


def test_drafts_are_verified_against_processed_logits(driver: Driver) -> None:
    samplings = [
        processed("only_multiples", {"of": 3}),
        processed("only_multiples", {"of": 7}, temperature=0.0, frequency_penalty=0.5),
        processed("only_multiples", {"of": 2}, logit_bias={5: 100.0, 6: 100.0}),
        processed("allow_all", grammar=Grammar(kind="regex", text="[xyz]{40}")),
        CoreSamplingParams(temperature=1.0, seed=3),
    ]
    requests = [
        Request(prompt_of(3 + 9 * i, i), sampling, Logprobs(top=3) if i % 2 else None, num_new=18)
        for i, sampling in enumerate(samplings)
    ]
    plain = by_single_steps(driver, requests)
    for ids, of in zip(plain.ids, (3, 7, 2), strict=False):
        assert all(token % of == 0 for token in ids), of
    assert set(plain.ids[2]) == {6}, "the bias comes first"
    assert set(plain.ids[3]) <= set(tiny_tokenizer().encode("x y z xx yy zz xy")) | set(LETTERS)
    drafted = by_drafts(driver, requests, plain.ids, random.Random(4))
    assert drafted.tokens == plain.tokens and drafted.num_accepted > 10
    for row in (*plain.rows, *drafted.rows):
        driver.close(row)


@pytest.mark.parametrize("wrong", [processed("only_multiples"), processed("of_another_shape"), processed("unknown")])
def test_a_processor_that_fails_fails_its_rows_only(driver: Driver, wrong: CoreSamplingParams) -> None:
    samplings = [wrong, processed("only_multiples", {"of": 3}), wrong, CoreSamplingParams(temperature=1.0, seed=3)]
    rows = [driver.open(prompt_of(9), 40, sampling) for sampling in samplings]
    result = driver.result(*((row, 0, 9, True) for row in rows))
    assert result.failed == (0, 2)
    assert result.tokens[1] is not None and result.tokens[1].token_id % 3 == 0
    for row in rows:
        driver.close(row)


def test_only_installed_processors_are_loaded() -> None:
    with pytest.raises(ConfigError, match="--logit-processors is 'no_such'"):
        LogitProcessors.load(["no_such"])
