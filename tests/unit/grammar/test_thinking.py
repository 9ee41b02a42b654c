"""The thinking budget: when the end of the reasoning is forced, with and without a grammar behind it."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from pdserve.grammar.compile import JsonRules, compile_grammar
from pdserve.grammar.matcher import FreeMatcher, Matcher, OutputMatcher
from pdserve.grammar.thinking import ThinkingMatcher, ThinkingState
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.protocol.sampling import Grammar, ThinkingBudget
from pdserve.server.request.constraints import Constraint, reasoning_grammar
from pdserve.server.text.parsers.thinking import THINKING
from tests.tiny import EOS_ID, VOCAB_SIZE, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER.backend_tokenizer.to_str(), VOCAB_SIZE, [EOS_ID])


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


(LETTER,) = ids_of("z")


def budget_of(num_tokens: int, *, inside: bool = True) -> ThinkingBudget:
    ids = tuple(ids_of("\n</think>"))
    return ThinkingBudget(
        num_tokens=num_tokens, closing_ids=ids, opening="<think>", ends=("</think>", "<tool_call>"), inside=inside
    )


def free(budget: ThinkingBudget) -> ThinkingMatcher:
    return ThinkingMatcher(FreeMatcher(VOCABULARY.num_mask_words), budget, VOCABULARY.piece)


def allowed(matcher: OutputMatcher) -> list[int]:
    bits = np.unpackbits(matcher.mask().astype("<u4").view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCAB_SIZE]).tolist()


def forced_after(budget: ThinkingBudget, output: list[int]) -> tuple[int, ...]:
    state = ThinkingState.first(budget)
    for token in output:
        state = state.after(token, budget, VOCABULARY.piece)
    return state.forced(budget)


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_the_end_is_forced_behind_the_last_token_of_the_budget(num_tokens: int) -> None:
    budget = budget_of(num_tokens)
    matcher = free(budget)
    for token in [LETTER] * num_tokens:
        assert len(allowed(matcher)) == VOCAB_SIZE
        matcher.accept([token])
    for index, token in enumerate(budget.closing_ids):
        assert allowed(matcher) == [token]
        assert matcher.forced_tokens() == list(budget.closing_ids[index:])
        matcher.accept([token])
    matcher.accept(ids_of("more than the budget"))
    assert len(allowed(matcher)) == VOCAB_SIZE and matcher.forced_tokens() == []


@pytest.mark.parametrize("text", ["ab</think>", "a</thi</think>", "<tool_call>", "\n</think>\n\nok", "x</think>yy"])
def test_reasoning_that_ends_by_itself_is_not_ended_again(text: str) -> None:
    """The end tag may lie anywhere in its tokens."""
    budget = budget_of(len(ids_of(text)))
    assert forced_after(budget, [*ids_of(text), *ids_of("many tokens behind it")]) == ()
    assert forced_after(budget, ids_of("z" * 40)) != ()


@pytest.mark.parametrize(
    ("text", "counts"),
    [("<think>", True), (" \n<think>", True), ("answer", False), ("<thin", False), ("a<think>", False)],
)
def test_an_output_that_does_not_begin_with_the_tag_does_not_reason(text: str, counts: bool) -> None:
    budget = budget_of(3, inside=False)
    assert bool(forced_after(budget, [*ids_of(text), LETTER, LETTER, LETTER])) == counts
    assert forced_after(budget, ids_of(text)) == ()


def test_states_roll_back_and_drafts_are_cut() -> None:
    budget = budget_of(3)
    matcher = free(budget)
    drafts = [*[LETTER] * 3, *budget.closing_ids, LETTER]
    assert matcher.num_allowed(drafts) == len(drafts)
    assert matcher.num_allowed([*[LETTER] * 4, *budget.closing_ids]) == 3
    matcher.accept(drafts)
    assert len(allowed(matcher)) == VOCAB_SIZE
    matcher.roll_back(len(drafts) - 3)
    assert allowed(matcher) == [budget.closing_ids[0]]
    other = matcher.copy()
    matcher.roll_back(3)
    assert len(allowed(matcher)) == VOCAB_SIZE and allowed(other) == [budget.closing_ids[0]]


def test_the_answer_follows_its_grammar_behind_the_forced_end() -> None:
    """Any text, characters of several tokens included: where the grammar forbids the end, the reasoning goes on."""
    grammar = Grammar(kind="json_schema", text=json.dumps({"enum": ["a", "b"]}))
    constraint = reasoning_grammar(Constraint(grammar, "json_schema"), THINKING["qwen3"], True)
    source = compile_grammar(constraint.grammar, JsonRules(), VOCABULARY)
    for seed in range(20):
        rng, budget = random.Random(seed), budget_of(5)
        matcher: OutputMatcher = ThinkingMatcher(Matcher(VOCABULARY, source), budget, VOCABULARY.piece)
        output: list[int] = []
        while len(output) < 60 and not matcher.ended:
            output.append(rng.choice(allowed(matcher)))
            matcher.accept(output[-1:])
        text = TOKENIZER.decode(output)
        thought, _, answer = text.removesuffix("<eos>").partition("</think>")
        assert json.loads(answer) in ("a", "b"), text
        assert len(ids_of(thought)) <= 5 + 3 + 2, "at most the rest of a character more, and the line break"
