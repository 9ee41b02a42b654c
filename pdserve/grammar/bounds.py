"""Size limits of regular expressions, schemas and grammars, checked before an engine compiles them. Pure.

`compile` applies them to grammars, the server to `stop_regex`. Each check costs time in proportion to the text. A check
counts text that it cannot parse as larger than it is. A text within the limits may still be costly, so the compile
worker also limits processor time and memory.
"""

from __future__ import annotations

import math
import re
from typing import Any

from pdserve.errors import GrammarError

MAX_NESTING = 64
"""Maximum depth of nested brackets: the engines' parsers recurse."""
MAX_REPEATED = 1_000_000
"""Maximum expanded size of a regular expression of a grammar: the engine counts repeats and does not write them out."""
MAX_STOP_REPEATED = 10_000
"""Maximum expanded size of a `stop_regex`, whose repeats may be written out: 400 bytes and 0.8 us for each part."""
MAX_SCHEMA_DEPTH = 100
MAX_SCHEMA_NODES = 50_000
MAX_PROPERTIES = 5_000
"""Maximum properties in all objects of a schema; opening takes time with the square of the properties of one object."""
MAX_ENUM = 20_000
MAX_COUNT = (1 << 31) - 1
"""Maximum of `maxItems`, `minLength` and similar keywords, and of a repeat in a grammar."""
MAX_MULTIPLE = 50_000
"""Maximum of the digits of `multipleOf` without the decimal point: the engine builds an automaton of that many
states.
"""
MAX_RULES = 4_096

_BRACKETS = re.compile(r"\\.|[()\[\]{}]", re.DOTALL)
_COUNTS = re.compile(r"\{\s*([0-9]*)\s*(?:,\s*([0-9]*)\s*)?\}")
_COMMENTS = re.compile(r"\(\?(?:#|[A-Za-z0-9]*x)")
"""A comment, or the flag of patterns with comments: brackets in comments have no meaning."""
_BRACES = re.compile(r"\{[^{}()\[\]\\|]*\}")
"""Braces such as the limits of a fuzzy match."""
_ESCAPE = re.compile(r"\\(?:[pPNxg]\{[^}]*\}|[Lg]<[^>]*>|.)", re.DOTALL)
_RULE = re.compile(r"^[ \t]*[?!]?[\w.-]+[^\n\"'/:]*(?:::=|:)", re.MULTILINE)
_SIZES = frozenset(
    {"maxItems", "minItems", "maxLength", "minLength", "maxProperties", "minProperties", "maxContains", "minContains"}
)


def check_nesting(text: str) -> None:
    """Check that the brackets of a regular expression or grammar are not nested too deeply.

    Brackets in strings and character classes count too; useful ones do not reach the limit.

    Raises:
        GrammarError: they are nested deeper than `MAX_NESTING`.
    """
    depth = 0
    for bracket in _BRACKETS.findall(text):
        depth += bracket in "([{"
        depth = max(0, depth - (bracket in ")]}"))
        if depth > MAX_NESTING:
            raise GrammarError(f"its brackets are nested deeper than {MAX_NESTING}")


def check_pattern_size(pattern: str, most: int = MAX_REPEATED) -> None:
    """Check the nesting and the expanded size of a regular expression.

    Raises:
        GrammarError: the expanded size is above `most`, or brackets are nested too deeply.
    """
    check_nesting(pattern)
    size = expanded_size(pattern)
    if size > most:
        told = f"{size:,}" if size < 10**15 else "more than 10^15"
        raise GrammarError(f"its repeats expand to {told} parts; the maximum is {most:,}")


def expanded_size(pattern: str) -> int:
    """Return an upper bound of the parts of `pattern` when each `{m,n}` is written out n times (m times without an n).

    A part is a character, a class, a bracket or an operator. If the structure depends on an engine's flags, the bound
    is the length times all counts.
    """
    crude = len(pattern) * math.prod(_largest_counts(pattern))
    if crude == len(pattern) or _COMMENTS.search(pattern):
        return crude
    parsed = _Parser(pattern).size()
    return crude if parsed is None else min(crude, parsed)


def _largest_counts(text: str) -> list[int]:
    """Return the larger number of each `{m,n}`, capped so that products stay small."""
    return [max(1, *(_count(digits) for digits in pair)) for pair in _COUNTS.findall(text)]


def _count(digits: str) -> int:
    return min(int(digits[-30:] or 0) if len(digits) <= 18 else MAX_COUNT, MAX_COUNT)


class _Parser:
    """Counts the parts of a pattern, bracket by bracket. `size` is None if the structure is unclear."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def size(self) -> int | None:
        groups = [0]
        """Size of each open bracket, outermost first."""
        last = 0
        """Size of the part that a quantifier here would repeat."""
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == "(":
                self._at += 1
                groups.append(1)
                last = 0
            elif char == ")":
                self._at += 1
                if len(groups) == 1:
                    return None
                last = groups.pop() + 1
                groups[-1] += last
            elif char == "{":
                counts, braces = _COUNTS.match(self._text, self._at), _BRACES.match(self._text, self._at)
                if braces is None:
                    return None
                self._at = braces.end()
                times = 1 if counts is None else max(1, *(_count(digits) for digits in counts.groups(default="0")))
                groups[-1] += last * (times - 1) + len(braces[0])
                last *= times
            elif (atom := self._atom()) is None:
                return None
            else:
                groups[-1] += atom
                last = last if char in "*+?" else atom
        return groups[0] if len(groups) == 1 else None

    def _atom(self) -> int | None:
        """Consume the character, escape or class here and return its size; None: a class nested in a class."""
        char = self._text[self._at]
        if char == "\\":
            found = _ESCAPE.match(self._text, self._at)
            self._at = len(self._text) if found is None else found.end()
            return 1
        if char != "[":
            self._at += 1
            return 1
        start = self._at
        self._at += 1
        if self._text.startswith("^", self._at):
            self._at += 1
        if self._text.startswith("]", self._at):
            self._at += 1
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == "[":
                return None
            self._at += 2 if char == "\\" else 1
            if char == "]":
                return self._at - start
        return None


def check_grammar_text(text: str) -> None:
    """Check the number of rules, the counts and the nesting of an EBNF grammar.

    Raises:
        GrammarError: naming the limit.
    """
    check_nesting(text)
    num_rules = len(_RULE.findall(text))
    if num_rules > MAX_RULES:
        raise GrammarError(f"it has {num_rules} rules; the maximum is {MAX_RULES}")
    worst = max(_largest_counts(text), default=1)
    if worst >= MAX_COUNT:
        raise GrammarError(f"it has a repeat count of {worst} or more; the maximum is {MAX_COUNT - 1}")


def check_schema(schema: Any) -> None:
    """Check the depth, properties, enum values, counts and patterns of a JSON schema.

    `schema` is any JSON value; the engine refuses values that are no schema.

    Raises:
        GrammarError: naming the keyword and the limit.
    """
    num_nodes = num_properties = num_options = 0
    ahead: list[tuple[Any, int]] = [(schema, 1)]
    while ahead:
        node, depth = ahead.pop()
        num_nodes += 1
        if num_nodes > MAX_SCHEMA_NODES:
            raise GrammarError(f"the schema has more than {MAX_SCHEMA_NODES} values")
        if depth > MAX_SCHEMA_DEPTH:
            raise GrammarError(f"the schema is nested deeper than {MAX_SCHEMA_DEPTH}")
        if isinstance(node, list):
            ahead += [(entry, depth + 1) for entry in node]
            continue
        if not isinstance(node, dict):
            continue
        properties, options = node.get("properties"), node.get("enum")
        num_properties += len(properties) if isinstance(properties, dict) else 0
        num_options += len(options) if isinstance(options, list) else 0
        if num_properties > MAX_PROPERTIES:
            raise GrammarError(f"the schema has {num_properties} properties; the maximum is {MAX_PROPERTIES}")
        if num_options > MAX_ENUM:
            raise GrammarError(f"the schema has {num_options} values in enum; the maximum is {MAX_ENUM}")
        for keyword, value in node.items():
            _check_keyword(keyword, value)
            if isinstance(value, dict | list):
                ahead.append((value, depth + 1))


def _check_keyword(keyword: str, value: Any) -> None:
    """Check one keyword of a schema. A property named like a keyword has an object as value, which passes here."""
    if keyword == "pattern" and isinstance(value, str):
        try:
            check_pattern_size(value)
        except GrammarError as error:
            raise GrammarError(f"pattern {value[:40]!r}: {error}") from error
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if keyword in _SIZES and value > MAX_COUNT:
        raise GrammarError(f"{keyword} is {value}; the maximum is {MAX_COUNT}")
    if keyword == "multipleOf" and _coefficient(value) > MAX_MULTIPLE:
        raise GrammarError(f"multipleOf is {value}: its digits without the point may be at most {MAX_MULTIPLE}")


def _coefficient(value: float) -> int:
    """Return the digits of `value` without the decimal point and trailing decimal zeros: 25 for 0.25, 9973 for 9973."""
    if not math.isfinite(value):
        return MAX_COUNT
    if float(value).is_integer():
        return abs(int(value))
    return abs(int(f"{value:.15f}".rstrip("0").replace(".", "")))
