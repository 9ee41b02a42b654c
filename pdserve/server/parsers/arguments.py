"""Arguments that models write as plain text between tags, turned into JSON by the types that the tool declares."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from pdserve.server.parsers.feed import IncrementalParser, Sink, Steps, scrub


def _types(schema: Any) -> frozenset[str]:
    """The JSON types that `schema` names; empty where it leaves them open."""
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(name for name in kind if isinstance(name, str))
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            parts = [_types(part) for part in schema[word]]
            return frozenset().union(*parts) if all(parts) else frozenset()
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return frozenset(("string",))
    return frozenset()


def _finite(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}")


def _dump(value: Any) -> str:
    return scrub(json.dumps(value, ensure_ascii=False, allow_nan=False))


def to_json(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value that the model wrote as `text`; a string where it is nothing else of these types."""
    bare = text.strip()
    if "string" in types:
        return "null" if "null" in types and bare == "null" else _dump(text)
    if bare.lower() in ("true", "false") and types <= {"boolean"}:
        return bare.lower()
    try:
        return _dump(json.loads(bare, parse_constant=_finite))
    except (ValueError, RecursionError):
        pass
    if types:
        try:
            return _dump(ast.literal_eval(bare))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass
    return _dump(text)


class ArgumentWriter:
    """Writes one call's arguments as a JSON object, field by field, strings while they come."""

    def __init__(self, sink: Sink, schema: Mapping[str, Any]) -> None:
        properties = schema.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._sink = sink
        self._first = True
        sink("{")

    def field(self, feed: IncrementalParser, key: str, ends: tuple[str, ...], *, trim: bool) -> Steps[str]:
        """Write the field `key` with the text up to one of `ends`, which is returned.

        `trim`: a newline at both ends of the text is not the value's.
        """
        self._sink(("" if self._first else ", ") + _dump(key) + ": ")
        self._first = False
        types = _types(self._properties.get(key))
        feed.commit()
        if types != {"string"}:
            text, end = yield from feed.take_until(ends)
            feed.commit()
            self._sink(to_json(text.removeprefix("\n").removesuffix("\n") if trim else text, types))
            return end
        self._sink('"')
        if trim and (yield from feed.skip("\n")):
            feed.commit()
        string = _String(self._sink, trim=trim)
        end = yield from feed.pass_until(ends, string.push)
        self._sink('"')
        return end

    def close(self) -> None:
        """No more fields."""
        self._sink("}")


class _String:
    """The inside of a JSON string; with `trim` a newline at the end is left out."""

    def __init__(self, sink: Sink, *, trim: bool) -> None:
        self._sink = sink
        self._trim = trim
        self._held = ""

    def push(self, text: str) -> None:
        """Write more of it."""
        text = self._held + text
        self._held = "\n" if self._trim and text.endswith("\n") else ""
        self._sink(_dump(text[: len(text) - len(self._held)])[1:-1])
