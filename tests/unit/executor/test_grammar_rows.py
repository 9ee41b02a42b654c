"""Rows that follow a grammar: every answer is of its grammar, wherever it is handed over and whatever else runs."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pdserve.base.clock import ManualClock
from pdserve.errors import GrammarError
from pdserve.executor import grammar_rows
from pdserve.executor.grammar_rows import GrammarRows
from pdserve.executor.interface import BatchPlan, BatchRow, run
from pdserve.executor.local_executor import LocalExecutor
from pdserve.grammar.compile import JsonRules
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.protocol.sampling import CoreSamplingParams, Grammar
from tests.driver import Driver, build, random_prompt
from tests.schemas import check, random_schema
from tests.tiny import EOS_ID, VOCAB_SIZE, Family, tiny_tokenizer

PROMPT = random_prompt(9, VOCAB_SIZE)
MAX_TOKENS = 250
TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def driver(tiny_checkpoint: Callable[[Family], Path]) -> Driver:
    return Driver(build(tiny_checkpoint("llama"), page_size=64, max_total_tokens=400_000, max_rows=4))


def regex(pattern: str, **sampling: object) -> CoreSamplingParams:
    return msgspec.convert(
        {"temperature": 1.0, "seed": 5, "grammar": {"kind": "regex", "text": pattern}, **sampling}, CoreSamplingParams
    )


def answer(
    driver: Driver, sampling: CoreSamplingParams, *, known: list[int] | None = None, most: int = 60
) -> list[int]:
    """Output ids up to EOS or `most`; `known` were sampled elsewhere."""
    output = list(known or [])
    row = driver.open([*PROMPT, *output], len(PROMPT) + most, sampling, num_prompt=len(PROMPT))
    start = 0
    while len(output) < most and EOS_ID not in output:
        end = len(PROMPT) + len(output)
        token = driver.step((row, start, end, True))[0]
        assert token is not None
        output.append(token.token_id)
        start = end
    driver.close(row)
    return output


def text_of(output: list[int]) -> str:
    assert output[-1] == EOS_ID
    return str(TOKENIZER.decode(output[:-1]))


@settings(max_examples=8, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(seed=st.integers(0, 1 << 32), cut=st.floats(0, 1), greedy=st.booleans())
def test_any_schema_is_followed_and_handed_over_anywhere(driver: Driver, seed: int, cut: float, greedy: bool) -> None:
    """A random model, so that whatever the grammar lets through is tried."""
    schema = random_schema(random.Random(seed), depth=1)
    grammar = Grammar(kind="json_schema", text=json.dumps(schema))
    sampling = CoreSamplingParams(temperature=0.0 if greedy else 1.0, seed=seed, grammar=grammar)
    output = answer(driver, sampling, most=MAX_TOKENS)
    if EOS_ID in output:
        check(text_of(output), schema)
    known = output[: int(cut * (len(output) - 1))]
    assert answer(driver, sampling, known=known, most=len(output)) == output


def test_rows_do_not_touch_each_other(driver: Driver) -> None:
    """Two grammars and two rows without one, in the same steps, and alone."""
    plain = CoreSamplingParams(temperature=1.0, seed=3)
    samplings = [regex("[0-9]{30}"), plain, regex("(ab|cd)+", seed=9), msgspec.structs.replace(plain, seed=4)]
    rows = [driver.open(PROMPT, 60, sampling) for sampling in samplings]
    together: list[list[int]] = [[] for _ in rows]
    start, end = 0, len(PROMPT)
    for _ in range(10):
        for output, token in zip(together, driver.step(*[(row, start, end, True) for row in rows]), strict=True):
            assert token is not None
            output.append(token.token_id)
        start, end = end, end + 1
    for row in rows:
        driver.close(row)
    for output, sampling in zip(together, samplings, strict=True):
        alone = answer(driver, sampling, most=10)
        assert output[: len(alone)] == alone
    assert re.fullmatch("[0-9]+", TOKENIZER.decode(together[0]))


def test_eos_comes_where_the_grammar_ends_and_nowhere_else(driver: Driver) -> None:
    bias = {EOS_ID: 100.0}
    assert text_of(answer(driver, regex("[a-c]{7}", logit_bias=bias))) in ("".join(x) for x in _words("abc", 7))
    assert text_of(answer(driver, regex("x|y", temperature=0.0))) in ("x", "y")
    assert answer(driver, regex("a*", logit_bias=bias))[0] == EOS_ID


def _words(letters: str, length: int) -> list[str]:
    words = [""]
    for _ in range(length):
        words = [word + letter for word in words for letter in letters]
    return words


@pytest.mark.parametrize("logprob_params", [{"ignore_eos": True}, {"min_new_tokens": 12, "max_new_tokens": 50}])
def test_unwanted_eos_stays_away_while_the_grammar_can_go_on(driver: Driver, logprob_params: dict[str, object]) -> None:
    bias = {EOS_ID: 100.0}
    assert EOS_ID not in answer(driver, regex("[a-z]*", logit_bias=bias, **logprob_params), most=12)
    assert text_of(answer(driver, regex("[0-9]{3}", logit_bias=bias, **logprob_params))).isdigit()


def test_banned_stop_tokens_give_way_where_nothing_else_is_allowed(driver: Driver) -> None:
    stop = TOKENIZER.convert_tokens_to_ids("a")
    sampling = regex("a{3}", stop_token_ids=[stop], min_new_tokens=2)
    assert text_of(answer(driver, sampling)) == "aaa"


def test_log_probabilities_are_of_what_the_grammar_allows(driver: Driver) -> None:
    row = driver.open(PROMPT, 40, regex("yes|no", temperature=0.0), top_logprobs=20)
    token = driver.step((row, 0, len(PROMPT), True))[0]
    driver.close(row)
    assert token is not None and token.logprob is not None
    allowed = {TOKENIZER.convert_tokens_to_ids(piece) for piece in ("y", "ye", "yes", "n", "no")}
    assert {token_id for token_id, _ in token.top} <= allowed
    assert all(value > float("-inf") for _, value in token.top)


def _step(
    executor: LocalExecutor, step: int, *rows: tuple[int, int, int]
) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """The tokens of one step, and which of its rows failed."""
    plan = BatchPlan(step, tuple(BatchRow(str(row), row, start, end, True) for row, start, end in rows))
    result = run(executor, plan)
    return tuple(None if token is None else token.token_id for token in result.tokens), result.failed


def test_a_grammar_that_fails_is_told_and_harms_no_other(driver: Driver) -> None:
    """The second row's grammar is too large to follow beyond its first token; the third's is none at all."""
    plain = CoreSamplingParams(temperature=0.0)
    expected = answer(driver, plain, most=2)
    executor = driver.built.executor
    rows = [driver.open(PROMPT, 40, sampling) for sampling in (plain, regex("a{900}{1000}"), regex("("))]
    end = len(PROMPT)
    tokens, failed = _step(executor, 900, *[(row, 0, end) for row in rows])
    assert tokens[0] == expected[0] and failed == (2,)
    tokens, failed = _step(executor, 901, *[(row, end, end + 1) for row in rows[1::-1]])
    assert tokens[1] == expected[1] and failed == (0,)
    for row in rows:
        driver.close(row)


def test_a_grammar_that_is_slow_to_follow_fails_and_others_go_on(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ambiguous one: each token takes time with the square of the output's length."""
    monkeypatch.setattr(grammar_rows, "QUICK_S", 0.0)
    monkeypatch.setattr(grammar_rows, "SLOW_S", 0.1)
    text = 'start: a\na: a a | "x" | a a a | ""'
    ambiguous = CoreSamplingParams(seed=1, grammar=Grammar(kind="ebnf", text=text), ignore_eos=True)
    executor = driver.built.executor
    slow, other = driver.open(PROMPT, 200, ambiguous), driver.open(PROMPT, 200, regex("[0-9]{150}"))
    start, end, failed = 0, len(PROMPT), ()
    while not failed and end < 160:
        tokens, failed = _step(executor, 1000 + end, (slow, start, end), (other, start, end))
        start, end = end, end + 1
    assert failed == (0,) and end > len(PROMPT) + 5
    assert tokens[1] is not None and TOKENIZER.decode([tokens[1]]).isdigit()
    monkeypatch.setattr(grammar_rows, "SUSPECT_SLOW_S", -1.0)
    again = driver.open(PROMPT, 200, ambiguous)
    tokens, failed = _step(executor, 2000, (again, 0, len(PROMPT)), (other, start, end))
    assert failed == (0,), "it has less time"
    for row in (slow, other, again):
        driver.close(row)
    clock = ManualClock()
    prepared = grammar_rows.OpenedGrammar(clock.now)
    prepared.check(grammar_rows.SLOW_S)
    with pytest.raises(GrammarError, match="too long"):
        prepared.check(2 * grammar_rows.SLOW_S)
    monkeypatch.setattr(grammar_rows, "SUSPECT_SLOW_S", 0.05)
    prepared.check(0.05)
    with pytest.raises(GrammarError, match="too long"):
        prepared.check(0.06)
    clock.advance(grammar_rows.SUSPECT_S)
    prepared.check(0.06)


def test_grammars_that_are_kept_open_are_bounded(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_rows, "MAX_PREPARED", 3)
    executor = driver.built.executor
    grammars = [Grammar(kind="regex", text=f"kept{i}") for i in range(5)]
    openings = [executor.prepare_grammar(grammar) for grammar in grammars]
    assert all(opening is not None and not opening.result().ended for opening in openings)
    assert executor.prepare_grammar(grammars[4]) is openings[4], "kept"
    assert executor.prepare_grammar(grammars[0]) is not openings[0], "let go of, and opened again"


def test_nothing_waits_for_a_grammar_when_the_threads_end() -> None:
    def vocabulary() -> Vocabulary:
        entered.set()
        assert leave.wait(60)
        raise GrammarError("none")

    entered, leave = threading.Event(), threading.Event()
    rows = GrammarRows(vocabulary, JsonRules(), ())
    openings = [rows.prepare(Grammar(kind="regex", text=str(i))) for i in range(4)]
    assert entered.wait(60)
    ending = threading.Thread(target=rows.shut_down)
    ending.start()
    leave.set()
    ending.join(60)
    assert not ending.is_alive()
    assert all(opening is not None and opening.done() for opening in openings)


def test_an_output_that_is_none_of_the_grammar_is_refused_when_the_row_opens(driver: Driver) -> None:
    row = driver.open([*PROMPT, 40, 41], 40, regex("[0-9]"), num_prompt=len(PROMPT))
    assert _step(driver.built.executor, 902, (row, 0, len(PROMPT) + 2))[1] == (0,)
    driver.close(row)
