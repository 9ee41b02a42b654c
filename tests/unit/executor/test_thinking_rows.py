"""Rows with a thinking budget: the forced end comes at one place, however the output is sampled or handed over."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pdserve.executor.interface import BatchRow
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import CoreSamplingParams, Grammar, ThinkingBudget
from tests.driver import Driver, build
from tests.tiny import EOS_ID, Family, tiny_tokenizer
from tests.unit.executor.drafting import Request, by_drafts, by_single_steps, prompt_of

CLOSING = tuple(tiny_tokenizer().encode("\n</think>", add_special_tokens=False))


@pytest.fixture(scope="module")
def driver(tiny_checkpoint: Callable[[Family], Path]) -> Driver:
    """Deterministic, so that float32 has the same bits for any number of rows."""
    return Driver(
        build(tiny_checkpoint("llama"), page_size=16, max_total_tokens=1 << 14, max_rows=32, deterministic=True)
    )


def thinking(num_tokens: int, **sampling: object) -> CoreSamplingParams:
    budget = ThinkingBudget(
        num_tokens=num_tokens, closing_ids=CLOSING, opening="<think>", ends=("</think>",), inside=True
    )
    base = CoreSamplingParams(temperature=1.0, seed=5, thinking=budget, grammar=Grammar(kind="any_text", text=""))
    return msgspec.structs.replace(base, **sampling)


def place_of_end(ids: list[int]) -> int:
    """Tokens before the forced end."""
    places = range(len(ids) - len(CLOSING) + 1)
    return next((at for at in places if tuple(ids[at : at + len(CLOSING)]) == CLOSING), -1)


def test_drafts_do_not_move_the_forced_end(driver: Driver) -> None:
    samplings = [
        thinking(0),
        thinking(3, temperature=0.0),
        thinking(7, seed=9, frequency_penalty=0.5),
        thinking(6, logit_bias={EOS_ID: 90.0}, ignore_eos=True),
        thinking(5, logit_bias={EOS_ID: 90.0}, min_new_tokens=24, max_new_tokens=30),
        CoreSamplingParams(temperature=1.0, seed=3),
    ]
    requests = [
        Request(prompt_of(3 + 9 * i, i), sampling, Logprobs(top=3) if i % 2 else None, num_new=22)
        for i, sampling in enumerate(samplings)
    ]
    plain = by_single_steps(driver, requests)
    assert [place_of_end(ids) for ids in plain.ids] == [0, 3, 7, 6, 5, -1]
    assert EOS_ID not in plain.ids[3] + plain.ids[4]
    drafted = by_drafts(driver, requests, plain.ids, random.Random(4))
    assert drafted.tokens == plain.tokens and drafted.num_accepted > 10 and drafted.num_rejected > 10
    free = CoreSamplingParams(temperature=1.0, seed=5)
    unlimited = by_single_steps(driver, [Request(prompt_of(21, 2), free, num_new=7)])
    same = by_single_steps(driver, [Request(prompt_of(21, 2), thinking(7), num_new=7)])
    assert same.ids == unlimited.ids, "the budget changes nothing before it is used up"
    for row in (*plain.rows, *drafted.rows, *unlimited.rows, *same.rows):
        driver.close(row)


@pytest.mark.parametrize("cut", [1, 4, 6, 9, 15])
def test_an_output_goes_on_from_any_token(driver: Driver, cut: int) -> None:
    """As behind a hand-over, a retraction or a migration: the other executor knows the output ids only."""
    prompt, sampling = prompt_of(12), thinking(5)
    whole = by_single_steps(driver, [Request(prompt, sampling, num_new=20)])
    output = whole.ids[0]
    row = driver.open([*prompt, *output[:cut]], 64, sampling, num_prompt=len(prompt))
    start, ids = 0, output[:cut]
    while len(ids) < len(output):
        end = len(prompt) + len(ids)
        ids = [*ids, *(token.token_id for token in driver.step((row, start, end, True)) if token is not None)]
        start = end
    assert ids == output and place_of_end(ids) == 5
    driver.close(row)
    driver.close(whole.rows[0])


def test_the_forced_end_is_offered_as_drafts(driver: Driver) -> None:
    executor, prompt = driver.built.executor, prompt_of(9)
    row = driver.open(prompt, 64, thinking(1))
    driver.step((row, 0, 9, True))
    executor.max_forced = 16
    try:
        assert executor.forced_tokens(row) == CLOSING
        result = driver.run([BatchRow("r", row, 9, 10 + len(CLOSING), True, drafts=CLOSING)])
    finally:
        executor.max_forced = 0
    assert tuple(token.token_id for token in result.sampled(0))[: len(CLOSING)] == CLOSING
    driver.close(row)
