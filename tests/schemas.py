"""Random JSON schemas whose answers are of bounded length, and what an answer must hold. Seeded; no server needed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema

Schema = dict[str, Any]
NAMES = ("id", "name", "kind", "size", "tags", "when", "where", "note", "größe", "a b", "x/y", "parts")
PATTERNS = ("^[a-z]{2,6}$", "^[A-Z]{3}-[0-9]{2,4}$", "^(red|green|blue)( (light|dark))?$", "^[a-f0-9]{8}$")
FORMATS = ("date", "uuid", "ipv4")
WORDS = ("low", "high", 'say "hi"', "naïve", "日本", "a\\b", "tab\there", "", "🙂")
_CHECKER = jsonschema.FormatChecker(FORMATS)


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """A schema of an object: nested objects and arrays, enums, patterns, formats, bounds, anyOf, $ref."""
    made = _Maker(rng)
    schema = made.object(depth)
    if made.definitions:
        schema["$defs"] = made.definitions
    return schema


def check(text: str, schema: Schema) -> Any:
    """The value of an answer; raises where it does not parse or does not follow `schema`."""
    value = json.loads(text)
    jsonschema.Draft202012Validator(schema, format_checker=_CHECKER).validate(value)
    return value


class _Maker:
    """`depth` is how many levels may still follow."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.definitions: dict[str, Schema] = {}

    def any(self, depth: int) -> Schema:
        flat: list[Callable[[], Schema]] = [
            self._string, self._pattern, self._format, self._integer, self._number, self._enum, self._const,
            lambda: {"type": "boolean"}, lambda: {"type": "null"},
        ]  # fmt: skip
        deep: list[Callable[[], Schema]] = [
            lambda: self.object(depth - 1), lambda: self._array(depth - 1), lambda: self._tuple(depth - 1),
            lambda: self._any_of(depth - 1), lambda: self._reference(depth - 1),
        ]  # fmt: skip
        return self._rng.choice(flat + deep if depth > 0 else flat)()

    def object(self, depth: int) -> Schema:
        names = self._rng.sample(NAMES, self._rng.randint(1, 4))
        required = [name for name in names if self._rng.random() < 0.7]
        properties = {name: self.any(depth) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _array(self, depth: int) -> Schema:
        least = self._rng.randint(0, 2)
        return {
            "type": "array",
            "items": self.any(depth),
            "minItems": least,
            "maxItems": least + self._rng.randint(0, 2),
        }

    def _tuple(self, depth: int) -> Schema:
        items = [self.any(depth) for _ in range(self._rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.any(depth) for _ in range(self._rng.randint(2, 3))]}

    def _reference(self, depth: int) -> Schema:
        if not self.definitions or self._rng.random() < 0.5:
            schema = self.any(depth)
            self.definitions[f"part{len(self.definitions)}"] = schema
        return {"$ref": f"#/$defs/{self._rng.choice(list(self.definitions))}"}

    def _string(self) -> Schema:
        least = self._rng.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + self._rng.randint(0, 12)}

    def _pattern(self) -> Schema:
        return {"type": "string", "pattern": self._rng.choice(PATTERNS)}

    def _format(self) -> Schema:
        return {"type": "string", "format": self._rng.choice(FORMATS)}

    def _integer(self) -> Schema:
        low = self._rng.randint(-1000, 1000)
        bounds = {"minimum": low, "maximum": low + self._rng.randint(0, 500)}
        if self._rng.random() < 0.3:
            bounds = {"exclusiveMinimum": low - 1, "exclusiveMaximum": low + 100}
        return {"type": "integer", **bounds}

    def _number(self) -> Schema:
        """`multipleOf` bounds the digits: a small model may write 0.333 for ever."""
        low = self._rng.randint(-100, 100)
        step = self._rng.choice((0.5, 0.25, 0.125))
        return {"type": "number", "minimum": low, "maximum": low + self._rng.choice((0.5, 1, 10)), "multipleOf": step}

    def _enum(self) -> Schema:
        return {"enum": self._rng.sample([*WORDS, 1, -2.5, None, True, [1, "x"]], self._rng.randint(1, 5))}

    def _const(self) -> Schema:
        return {"const": self._rng.choice([*WORDS, 7, False, None])}
