"""Grammars under speculation: masks at each position, drafts that are cut, matchers that roll back, forced tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from pdserve.errors import GrammarError
from pdserve.executor.interface import BatchRow
from pdserve.grammar.compile import JsonRules, compile_grammar
from pdserve.grammar.matcher import Matcher
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import CoreSamplingParams, Grammar
from tests.driver import Driver, build
from tests.tiny import EOS_ID, VOCAB_SIZE, Family, tiny_tokenizer
from tests.unit.executor.drafting import Request, by_drafts, by_single_steps, prompt_of
from tests.unit.executor.same_bits import kv_of

TOKENIZER = tiny_tokenizer()
SCHEMA = '{"type":"object","properties":{"name":{"type":"string"},"n":{"type":"integer"}},"required":["name","n"]}'


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text)["input_ids"])


def following(kind: str, text: str, **sampling: object) -> CoreSamplingParams:
    fields = {"temperature": 1.0, "seed": 5, "grammar": {"kind": kind, "text": text}, **sampling}
    return msgspec.convert(fields, CoreSamplingParams)


@pytest.fixture(scope="module")
def driver(tiny_checkpoint: Callable[[Family], Path]) -> Driver:
    """Deterministic, so that float32 has the same bits for any number of rows."""
    return Driver(
        build(tiny_checkpoint("llama"), page_size=16, max_total_tokens=1 << 15, max_rows=32, deterministic=True)
    )


def test_answers_with_drafts_are_those_without(driver: Driver) -> None:
    """Grammars that go on, that end, that ignore EOS, with bans; and a row without one beside them."""
    samplings = [
        following("regex", "[0-9]{60}"),
        following("regex", "(ab|cd)+", seed=9),
        following("regex", "[a-c]{5}", logit_bias={EOS_ID: 100.0}),
        following("regex", "[a-z]*", logit_bias={EOS_ID: 9.0}, ignore_eos=True),
        following("regex", "[a-z]*", logit_bias={EOS_ID: 9.0}, min_new_tokens=8),
        following("json_schema", SCHEMA, temperature=0.0),
        following("json_schema", SCHEMA, seed=8, frequency_penalty=0.4),
        CoreSamplingParams(temperature=1.0, seed=3),
        following("regex", "(", seed=1),
    ]
    requests = [
        Request(prompt_of(3 + 9 * i, i), sampling, Logprobs(top=3) if i % 2 else None, num_new=20)
        for i, sampling in enumerate(samplings)
    ]
    plain = by_single_steps(driver, requests)
    drafted = by_drafts(driver, requests, plain.ids, random.Random(4))
    assert drafted.tokens[:-1] == plain.tokens[:-1], "the last grammar is none"
    assert drafted.num_accepted > 30 and drafted.num_rejected > 30
    for row in (*plain.rows, *drafted.rows):
        driver.close(row)


def opened(driver: Driver, sampling: CoreSamplingParams, known: str = "") -> int:
    """A row whose prompt is computed and whose output so far is `known` and one token."""
    prompt = prompt_of(9)
    output = ids_of(known)
    row = driver.open([*prompt, *output], 64, sampling, num_prompt=len(prompt))
    driver.step((row, 0, len(prompt) + len(output), True))
    return row


def test_drafts_behind_a_forbidden_one_are_not_computed(driver: Driver) -> None:
    row = opened(driver, following("regex", "abcd(e|f)gh+", temperature=0.0))
    drafts = (*ids_of("bcd"), *ids_of("z"), *ids_of("gh"))
    result = driver.run([BatchRow("r", row, 9, 10 + len(drafts), True, drafts=drafts)])
    assert TOKENIZER.decode([token.token_id for token in result.sampled(0)]) in ("bcde", "bcdf")
    kv = kv_of(driver.built, row, 16)
    assert not torch.isnan(kv[..., :13, :]).any(), "the last token and three drafts"
    assert torch.isnan(kv[..., 13:, :]).all(), "the forbidden draft and those behind it"
    driver.close(row)


def test_nothing_but_eos_comes_behind_the_end_of_a_grammar(driver: Driver) -> None:
    row = opened(driver, following("regex", "ab"))
    drafts = (*ids_of("b"), EOS_ID, *ids_of("c"))
    result = driver.run([BatchRow("r", row, 9, 13, True, drafts=drafts)])
    assert [token.token_id for token in result.sampled(0)] == [*ids_of("b"), EOS_ID, EOS_ID]
    result = driver.run([BatchRow("r", row, 12, 14, True, drafts=ids_of("c"))])
    assert [token.token_id for token in result.sampled(0)] == [EOS_ID]
    driver.close(row)


def test_tokens_that_a_grammar_forces_are_offered_as_drafts(driver: Driver) -> None:
    executor = driver.built.executor
    sampling, prompt = following("regex", "0918273(4|5)6", temperature=0.0), prompt_of(9)
    row = driver.open(prompt, 64, sampling)
    plain = driver.open(prompt, 64)
    assert driver.result((row, 0, 9, True)).drafts == {}
    executor.max_forced = 4
    try:
        assert executor.forced_tokens(row) == ids_of("9182") and executor.forced_tokens(plain) == ()
        result = driver.run(
            [BatchRow("p", plain, 0, 9, True), BatchRow("r", row, 9, 14, True, drafts=executor.forced_tokens(row))]
        )
        assert tuple(token.token_id for token in result.sampled(1)) == ids_of("91827")
        assert result.drafts == {1: ids_of("3")}
        result = driver.run([BatchRow("r", row, 14, 16, True, drafts=result.drafts[1])])
        assert len(result.sampled(0)) == 2 and result.drafts == {0: ids_of("6")}
    finally:
        executor.max_forced = 0
        driver.close(row)
        driver.close(plain)


def matcher(pattern: str) -> Matcher:
    vocabulary = Vocabulary(TOKENIZER.backend_tokenizer.to_str(), VOCAB_SIZE, (EOS_ID,))
    return Matcher(vocabulary, compile_grammar(Grammar(kind="regex", text=pattern), JsonRules(), vocabulary))


def test_a_matcher_rolls_back_what_it_has_accepted() -> None:
    one = matcher("01(2|3)4")
    one.accept(ids_of("0"))
    before = one.mask()
    assert one.num_allowed(ids_of("124")) == 3 and one.num_allowed(ids_of("129")) == 2
    one.accept(ids_of("124"))
    assert one.ended and one.num_allowed(ids_of("4")) == 0 and one.forced_tokens() == []
    one.roll_back(3)
    assert not one.ended and (one.mask() == before).all() and tuple(one.forced_tokens()) == ids_of("1")
    one.roll_back(0)
    with pytest.raises(GrammarError, match="roll"):
        one.roll_back(7)
