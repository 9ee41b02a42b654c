"""Structural tags: free text in which trigger words begin a part that must follow a schema, such as a tool call.

Converts a structural tag to llguidance's Lark dialect. Pure; called by `compile` only. Two forms are accepted: SGLang's
`structures` and `triggers`, and the `format` tree of xgrammar, which vLLM and SGLang accept too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pdserve.errors import GrammarError
from pdserve.grammar.bounds import check_pattern_size, check_schema
from pdserve.grammar.vocabulary import Vocabulary

MAX_DEPTH = 32
MAX_TAGS = 512


def structural_tag_lark(tag: Any, json_options: Mapping[str, object], vocabulary: Vocabulary) -> str:
    """Convert one structural tag to a Lark grammar.

    `json_options` are the engine's options for JSON; `vocabulary` looks up special tokens.

    Raises:
        GrammarError: `tag` is no structural tag; the message names the place.
    """
    fields = _object(tag, "the structural tag")
    if fields.get("type", "structural_tag") != "structural_tag":
        raise GrammarError(f"its type must be 'structural_tag', got {fields.get('type')!r}")
    writer = _Writer(json_options, vocabulary)
    start = writer.format(fields["format"], "format", 0) if "format" in fields else writer.structures(fields)
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules, ""])


class _Writer:
    """Collects rules. Each method returns an expression; `where` is the place for error messages."""

    def __init__(self, json_options: Mapping[str, object], vocabulary: Vocabulary) -> None:
        self._json_options = json_options
        self._vocabulary = vocabulary
        self.rules: list[str] = []
        self._kinds: dict[str, Callable[[dict[str, Any], str, int], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def structures(self, fields: dict[str, Any]) -> str:
        """Convert SGLang's form: `structures` and `triggers`."""
        triggers = _strings(fields.get("triggers"), "triggers")
        tags = []
        for i, entry in enumerate(_list(fields.get("structures"), "structures")):
            where = f"structures[{i}]"
            structure = _object(entry, where)
            content = self._schema(structure.get("schema"), f"{where}.schema")
            tags.append((_string(structure.get("begin"), f"{where}.begin"), content, self._end(structure, where)))
        return self._triggered(triggers, tags, "structures")

    def format(self, value: Any, where: str, depth: int) -> str:
        """Convert one node of xgrammar's `format` tree."""
        if depth > MAX_DEPTH:
            raise GrammarError(f"{where} is nested deeper than {MAX_DEPTH}")
        fields = _object(value, where)
        kind = fields.get("type")
        if not isinstance(kind, str) or kind not in self._kinds:
            raise GrammarError(f"{where}.type must be one of {', '.join(self._kinds)}; got {kind!r}")
        return self._rule(self._kinds[kind](fields, where, depth + 1))

    def _const_string(self, fields: dict[str, Any], where: str, depth: int) -> str:
        return self._literal(_string(fields.get("value"), f"{where}.value"))

    def _json_schema(self, fields: dict[str, Any], where: str, depth: int) -> str:
        return self._schema(fields.get("json_schema"), f"{where}.json_schema")

    def _regex(self, fields: dict[str, Any], where: str, depth: int) -> str:
        pattern = _string(fields.get("pattern"), f"{where}.pattern")
        check_pattern_size(pattern)
        return self._terminal(pattern)

    def _any_text(self, fields: dict[str, Any], where: str, depth: int) -> str:
        return self._text()

    def _sequence(self, fields: dict[str, Any], where: str, depth: int) -> str:
        return " ".join(self._elements(fields, where, depth))

    def _or(self, fields: dict[str, Any], where: str, depth: int) -> str:
        return " | ".join(self._elements(fields, where, depth))

    def _tag(self, fields: dict[str, Any], where: str, depth: int) -> str:
        begin, content, end = self._tag_parts(fields, where, depth)
        return f"{self._literal(begin)} {content} {end}"

    def _triggered_tags(self, fields: dict[str, Any], where: str, depth: int) -> str:
        triggers = _strings(fields.get("triggers"), f"{where}.triggers")
        tags = self._tags(fields, where, depth)
        return self._triggered(
            triggers, tags, where,
            at_least_one=bool(fields.get("at_least_one")), only_one=bool(fields.get("stop_after_first")),
        )  # fmt: skip

    def _tags_with_separator(self, fields: dict[str, Any], where: str, depth: int) -> str:
        separator = self._literal(_string(fields.get("separator"), f"{where}.separator"))
        options = [
            f"{self._literal(begin)} {content} {end}" for begin, content, end in self._tags(fields, where, depth)
        ]
        one = self._rule(" | ".join(options))
        many = one if fields.get("stop_after_first") else f"{one} ({separator} {one})*"
        return many if fields.get("at_least_one") else f"({many})?"

    # ------------------------------------------------------------------ helpers

    def _triggered(
        self,
        triggers: list[str],
        tags: list[tuple[str, str, str]],
        where: str,
        *,
        at_least_one: bool = False,
        only_one: bool = False,
    ) -> str:
        """Return an expression for text in which each trigger begins one of the tags that start with it."""
        options = []
        for trigger in triggers:
            rests = [
                f"{self._literal(begin[len(trigger) :])} {content} {end}"
                for begin, content, end in tags
                if begin.startswith(trigger)
            ]
            if not rests:
                raise GrammarError(f"{where}: no tag begins with the trigger {trigger!r}")
            options.append(f"{self._trigger(trigger)} {self._rule(' | '.join(rests))}")
        for begin, _, _ in tags:
            if not any(begin.startswith(trigger) for trigger in triggers):
                raise GrammarError(f"{where}: the tag {begin!r} begins with none of the triggers")
        one = self._rule(" | ".join(options))
        if only_one:
            return one if at_least_one else f"{one} | {self._text()}"
        return f"{one} {one}* {self._text()}" if at_least_one else f"{one}* {self._text()}"

    def _trigger(self, trigger: str) -> str:
        """Return a lazy lexeme for text up to and including the trigger; it ends as soon as it can."""
        if self._vocabulary.special_token(trigger) is not None:
            return f"{self._text()} {self._literal(trigger)}"
        name = self._name()
        self.rules.append(f"{name}[lazy]: {self._text()} {json.dumps(trigger)}")
        return name

    def _tags(self, fields: dict[str, Any], where: str, depth: int) -> list[tuple[str, str, str]]:
        entries = _list(fields.get("tags"), f"{where}.tags")
        return [
            self._tag_parts(_object(entry, f"{where}.tags[{i}]"), f"{where}.tags[{i}]", depth)
            for i, entry in enumerate(entries)
        ]

    def _tag_parts(self, fields: dict[str, Any], where: str, depth: int) -> tuple[str, str, str]:
        begin = _string(fields.get("begin"), f"{where}.begin")
        content = self.format(fields.get("content"), f"{where}.content", depth + 1)
        return begin, content, self._end(fields, where)

    def _elements(self, fields: dict[str, Any], where: str, depth: int) -> list[str]:
        entries = _list(fields.get("elements"), f"{where}.elements")
        return [self.format(entry, f"{where}.elements[{i}]", depth) for i, entry in enumerate(entries)]

    def _end(self, fields: dict[str, Any], where: str) -> str:
        end = fields.get("end", "")
        ends = end if isinstance(end, list) else [end]
        literals = [self._literal(_string(text, f"{where}.end", empty=True)) for text in ends]
        return self._rule(" | ".join(literals))

    def _schema(self, schema: Any, where: str) -> str:
        if schema is True:
            schema = {}
        check_schema(schema)
        fields = dict(_object(schema, where))
        fields["x-guidance"] = {**self._json_options, **_object(fields.get("x-guidance", {}), f"{where}.x-guidance")}
        return self._rule("%json " + json.dumps(fields))

    def _literal(self, text: str) -> str:
        """Return a string literal, or the special token that is written so."""
        if not text:
            return '""'
        special = self._vocabulary.special_token(text)
        return json.dumps(text) if special is None else f"<[{special}]>"

    def _text(self) -> str:
        """Return the terminal for any text."""
        if not any(rule.startswith("TEXT:") for rule in self.rules):
            self.rules.append(r"TEXT: /(.|\n)*/")
        return "TEXT"

    def _terminal(self, pattern: str) -> str:
        escaped = pattern.replace("/", r"\/")
        return self._rule(f"/{escaped}/")

    def _rule(self, body: str) -> str:
        name = self._name()
        self.rules.append(f"{name.lower()}: {body}")
        return name.lower()

    def _name(self) -> str:
        if len(self.rules) > 16 * MAX_TAGS:
            raise GrammarError(f"the structural tag has more than {MAX_TAGS} tags")
        return f"part_{len(self.rules)}"


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GrammarError(f"{where} must be an object, got {type(value).__name__}")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise GrammarError(f"{where} must be a list that is not empty")
    if len(value) > MAX_TAGS:
        raise GrammarError(f"{where} has {len(value)} entries; the maximum is {MAX_TAGS}")
    return value


def _strings(value: Any, where: str) -> list[str]:
    return [_string(entry, f"{where}[{i}]") for i, entry in enumerate(_list(value, where))]


def _string(value: Any, where: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise GrammarError(f"{where} must be a string{'' if empty else ' that is not empty'}")
    return value
