"""What `tool_choice` and reasoning make grammars allow, with the real engine."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import GrammarError, RequestError
from pdserve.grammar.compile import JsonRules, compile_grammar
from pdserve.grammar.matcher import Matcher
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.server.http.json_http import convert
from pdserve.server.openai.chat_tools import plan_tools
from pdserve.server.request.constraints import Constraint, openai_constraint, reasoning_grammar
from pdserve.server.request.sampling_fields import is_constrained
from pdserve.server.request.schemas import CONSTRAINTS, ChatBody, CompletionBody
from pdserve.server.text.parsers.thinking import THINKING
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import EOS, VOCAB, token_ids

CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/name"}}, "required": ["city"],
        "$defs": {"name": {"type": "string"}}}  # fmt: skip
ROUTE = {"type": "object", "properties": {"stops": {"type": "array", "items": {"$ref": "#/definitions/name"}}},
         "required": ["stops"], "definitions": {"name": {"enum": ["A", "B"]}}}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "route", "parameters": ROUTE}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer.as_json(), VOCAB, [EOS])


def constraint_of(**fields: Any) -> Constraint:
    body = convert({"messages": [{"role": "user", "content": "x"}], **fields}, ChatBody)
    constraint = plan_tools(body, None).constraint or openai_constraint(body)
    assert constraint is not None
    return constraint


def test_each_field_that_can_constrain_is_seen() -> None:
    values: dict[str, Any] = {
        "response_format": {"type": "json_object"},
        "structured_outputs": {"regex": "a"},
        "guided_choice": ["a"],
    }
    assert {"regex", "guided_grammar", *values} < set(CONSTRAINTS)
    assert not is_constrained(CompletionBody(prompt="a", stop="b", stop_regex="c", seed=5, n=2, logit_bias={"1": 1.0}))
    for name in CONSTRAINTS:
        body = CompletionBody(**{name: values.get(name, "{}")})
        assert is_constrained(body) and openai_constraint(body) is not None, name


def allows(tokenizer: Tokenizer, vocabulary: Vocabulary, constraint: Constraint, text: str) -> bool:
    """Whether `text` is a whole answer."""
    matcher = Matcher(vocabulary, compile_grammar(constraint.grammar, JsonRules(), vocabulary))
    try:
        matcher.accept([*token_ids(tokenizer, text), EOS])
    except GrammarError:
        return False
    return matcher.ended


@pytest.mark.parametrize(
    ("choice", "parallel", "text", "allowed"),
    [
        ("required", True, '[{"name": "weather", "parameters": {"city": "Rome"}}]', True),
        ("required", True, '[{"name":"route","parameters":{"stops":["A","B"]}},{"name":"now","parameters":{}}]', True),
        ("required", False, '[{"name":"now","parameters":{}},{"name":"now","parameters":{}}]', False),
        ("required", True, '[{"name": "route", "parameters": {"stops": ["C"]}}]', False),
        ("required", True, '[{"name": "weather", "parameters": {"city": 5}}]', False),
        ("required", True, '[{"name": "other", "parameters": {}}]', False),
        ("required", True, "[]", False),
        ("required", True, "no", False),
        ({"type": "function", "function": {"name": "weather"}}, True, '{"city": "Rome"}', True),
        ({"type": "function", "function": {"name": "weather"}}, True, '{"town": "Rome"}', False),
        ({"type": "function", "function": {"name": "now"}}, True, "{}", True),
        (
            {"type": "allowed_tools", "allowed_tools": {
                "mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}},
            True, '[{"name": "weather", "parameters": {"city": "Rome"}}]', False,
        ),
    ],
)  # fmt: skip
def test_tool_choice(
    tokenizer: Tokenizer, vocabulary: Vocabulary, choice: Any, parallel: bool, text: str, allowed: bool
) -> None:
    constraint = constraint_of(tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel)
    assert allows(tokenizer, vocabulary, constraint, text) is allowed


@pytest.mark.parametrize(
    ("inside", "text", "allowed"),
    [
        (True, 'hm, {"a"} <x>\n</think>\n\n{"a": 1}', True),
        (True, 'hm</think>{"a": 1}', True),
        (True, 'hm</think>{"a": "no"}', False),
        (True, "hm</think>\n\nfree text", False),
        (True, "never ends", False),
        (True, '{"a": 1}', False),
        (None, '<think>hm</think>\n{"a": 1}', True),
        (None, '{"a": 1}', True),
        (None, "hm", False),
        (False, '{"a": 1}', True),
        (False, '<think></think>{"a": 1}', False),
    ],
)
def test_a_grammar_holds_behind_the_thoughts(
    tokenizer: Tokenizer, vocabulary: Vocabulary, inside: bool | None, text: str, allowed: bool
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    asked = constraint_of(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    constraint = reasoning_grammar(asked, THINKING["qwen3"], inside)
    assert constraint.field == asked.field
    assert allows(tokenizer, vocabulary, constraint, text) is allowed


def test_calls_that_are_required_come_behind_the_thoughts(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    asked = constraint_of(tools=TOOLS, tool_choice="required")
    constraint = reasoning_grammar(asked, THINKING["deepseek-r1"], True)
    assert allows(tokenizer, vocabulary, constraint, 'hm</think>\n[{"name": "now", "parameters": {}}]')
    assert not allows(tokenizer, vocabulary, constraint, "hm</think>\n[]")


def test_a_regex_is_wrapped_and_a_handwritten_grammar_is_not(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    wrapped = reasoning_grammar(constraint_of(regex="[0-9]+"), THINKING["qwen3"], True)
    assert allows(tokenizer, vocabulary, wrapped, "hm</think>42")
    assert not allows(tokenizer, vocabulary, wrapped, "hm</think>x")
    own = constraint_of(ebnf='root ::= "a"')
    assert reasoning_grammar(own, THINKING["qwen3"], True) is own


@pytest.mark.parametrize("text", ["x", "{", "[" * 100_000])
def test_a_schema_that_is_no_json_names_its_field(text: str) -> None:
    with pytest.raises(RequestError, match="guided_json: the schema is not valid JSON") as raised:
        reasoning_grammar(constraint_of(guided_json=text), THINKING["qwen3"], None)
    assert raised.value.field == "guided_json"
