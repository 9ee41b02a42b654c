"""Bounds on patterns, schemas and grammars: what is normal passes, what is hostile is refused, by its text alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import GrammarError
from pdserve.grammar.bounds import (
    MAX_STOP_REPEATED,
    check_grammar_text,
    check_pattern_size,
    check_schema,
    expanded_size,
)

NORMAL = [
    r"\d+", r"\n{3}", r"END\d", r"```[a-z]{0,10}\n(?:.{0,80}\n){1,50}```", r"(?<=: )\w{1,64}",
    r"\{\"a\": \{", ".{0,4096}x",
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "a{,5}", "(?:abcdefghij){e<=2}", r"\p{L}{1,30}",
    "a{b}c{1,2}", r"[^\]{}()]{1,30}\]", "[[a-z]--[aeiou]]{1,10}", "(?x) a{10} # [ comment", "(?i)" + "|".join("ab"),
]  # fmt: skip
HOSTILE = [
    "(?:ab?c*){1500000}x", "(?:(?:(?:(?:a{1,99}){1,99}){1,99}){1,99}){1,99}b", "a{1,65000}" * 20 + "b",
    "(?:ab?c*){100000}x", "(?:(?:(?:(?:xy){1000}){1000}){1000}){1000}z", "(" * 450 + "a" + ")" * 450,
    "(?:abc){e<=1}{9999}{99}", "(?#[)(?:a{1000}){1000}(?#])", "[[](?:a{1000}){1000}[]]", r"\[(?:a{1000}){1000}",
    r"[\]](?:a{1000}){1000}]", "(?x)#[\n(?:a{1000}){1000}#]", "a{99999999999999999999999999}", "(a{500}{,500})",
    r"(?:\p{L}{1000}){1000}", "(?:(?<=a{1000})b){1000}",
]  # fmt: skip


@pytest.mark.parametrize("pattern", NORMAL)
def test_a_normal_stop_pattern_passes(pattern: str) -> None:
    check_pattern_size(pattern, MAX_STOP_REPEATED)


@pytest.mark.parametrize("pattern", HOSTILE)
def test_a_hostile_stop_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarError, match=r"repeats expand to|nested deeper"):
        check_pattern_size(pattern, MAX_STOP_REPEATED)


def test_a_pattern_of_a_grammar_may_count_further() -> None:
    check_pattern_size("[a-z]{1,100000}")
    with pytest.raises(GrammarError, match="the maximum is 1,000,000"):
        check_pattern_size("(?:ab?c*){1500000}x")


PARTS = st.sampled_from(
    ["a", "[a-c]", r"\d", "(?:", "(", ")", "|", "*", "+?", "{3}", "{2,7}", "{,4}", "{e<=1}", "{", "[", "]", "(?#", "\\"]
)


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(PARTS, max_size=25).map("".join)))
def test_any_text_has_a_size_or_is_refused(pattern: str) -> None:
    try:
        check_pattern_size(pattern, MAX_STOP_REPEATED)
    except GrammarError:
        return
    assert expanded_size(pattern) <= MAX_STOP_REPEATED


def _sized(depth: int) -> st.SearchStrategy[tuple[str, int]]:
    """Patterns with the number of their atoms, repeats written out."""
    atom = st.sampled_from([("a", 1), ("[x-z]", 1), (r"\w", 1), (r"\{", 1)])
    if not depth:
        return atom
    inner = st.lists(_sized(depth - 1), min_size=1, max_size=3)
    whole = inner.map(lambda parts: ("".join(text for text, _ in parts), sum(size for _, size in parts)))
    return st.tuples(whole, st.integers(1, 30)).map(lambda one: (f"(?:{one[0][0]}){{{one[1]}}}", one[0][1] * one[1]))


@settings(max_examples=30, deadline=None)
@given(_sized(3))
def test_the_size_is_never_less_than_what_is_written_out(sized: tuple[str, int]) -> None:
    pattern, num_atoms = sized
    assert num_atoms <= expanded_size(pattern) <= num_atoms * len(pattern)


def _nested(depth: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(depth):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"properties": {f"p{i}": {} for i in range(5_001)}}, "5001 properties"),
        ({"enum": list(range(20_001))}, "20001 values in enum"),
        (_nested(101), "nested deeper than 100"),
        ({"anyOf": [{} for _ in range(50_001)]}, "more than 50000 values"),
        ({"type": "array", "items": {"maxLength": 1 << 31}}, "maxLength is 2147483648"),
        ({"properties": {"a": {"multipleOf": 99_999_989}}}, "multipleOf is 99999989"),
        ({"multipleOf": 0.0123457}, "multipleOf"),
        ({"pattern": "(?:a{1000}){1001}"}, "pattern '.*repeats expand"),
    ],
)
def test_a_schema_beyond_a_bound_is_refused(schema: Any, told: str) -> None:
    with pytest.raises(GrammarError, match=told):
        check_schema(schema)


def test_normal_schemas_pass() -> None:
    check_schema({"properties": {"pattern": {"type": "string"}, "multipleOf": {"multipleOf": 0.01, "maximum": 1e300}}})
    check_schema({"properties": {f"p{i}": {"type": "string", "maxLength": 100} for i in range(1000)}})
    check_schema(_nested(60))
    check_schema(True)


def test_a_grammar_has_a_bounded_number_of_rules_and_repeats() -> None:
    check_grammar_text('start: a{1,1000}\na: "x:" | "a::=b"\n')
    with pytest.raises(GrammarError, match="5001 rules"):
        check_grammar_text("start: a\n" + "\n".join(f'r{i}: "a"' for i in range(5000)))
    with pytest.raises(GrammarError, match="5001 rules"):
        check_grammar_text("root ::= a\n" + "\n".join(f'r{i} ::= "a"' for i in range(5000)))
    with pytest.raises(GrammarError, match="it has a repeat count"):
        check_grammar_text("start: a{99999999999}")


def test_counts_of_many_digits_cost_nothing() -> None:
    assert expanded_size("a{" + "9" * 100_000 + "}") > 10**9
    assert re.fullmatch(r"a\{9+\}", "a{" + "9" * 10 + "}") is not None
