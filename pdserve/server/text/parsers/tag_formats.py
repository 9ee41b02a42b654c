"""Formats that enclose every argument in its own tags, and gpt-oss's, whose tags enclose messages (`Harmony`)."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from pdserve.server.text.parsers.feed import IncrementalParser, NotACallError, Sink, Steps, drop_surrogates
from pdserve.server.text.parsers.tool_format import MAX_NAME_CHARS, MarkedFormat, ToolFormat


def _types(schema: Any) -> frozenset[str]:
    """Return the JSON types that `schema` allows; empty if it does not restrict them."""
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
    return drop_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))


def to_json(text: str, types: frozenset[str]) -> str:
    """Convert a value that the model wrote as `text` to JSON; a string if it has none of the other types."""
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
    """Writes one call's arguments as a JSON object, field by field; strings are streamed."""

    def __init__(self, sink: Sink, schema: Mapping[str, Any]) -> None:
        properties = schema.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._sink = sink
        self._first = True
        sink("{")

    def field(self, feed: IncrementalParser, key: str, ends: tuple[str, ...], *, trim: bool) -> Steps[str]:
        """Write the field `key` with the text up to one of `ends`; return that end.

        `trim`: drop a newline at each end of the text.
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
        end = yield from feed.forward_until(ends, string.push)
        self._sink('"')
        return end

    def close(self) -> None:
        """Close the JSON object."""
        self._sink("}")


class _String:
    """Writes the inside of a JSON string; `trim` drops a newline at the end."""

    def __init__(self, sink: Sink, *, trim: bool) -> None:
        self._sink = sink
        self._trim = trim
        self._held = ""

    def push(self, text: str) -> None:
        """Write the next part of the string."""
        text = self._held + text
        self._held = "\n" if self._trim and text.endswith("\n") else ""
        self._sink(_dump(text[: len(text) - len(self._held)])[1:-1])


def _checked(name: str) -> str:
    """Strip and check a tool's name.

    Raises:
        NotACallError: it is no valid name.
    """
    name = name.strip()
    if not name or any(char.isspace() or char in "<>{}" for char in name):
        raise NotACallError
    return name


class Qwen3Coder(MarkedFormat):
    """Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`."""

    template_marks = ("<function=", "<parameter=")
    opening = ("<tool_call>", "<function=")

    def call(self, feed: IncrementalParser, marker: str) -> Steps[None]:
        """See `MarkedFormat.call`."""
        if marker == "<tool_call>":
            yield from feed.expect("<function=")
        name = _checked((yield from feed.take_until((">",), MAX_NAME_CHARS))[0])
        arguments = ArgumentWriter(feed.open_call(name), self.tools.get(name, {}))
        ends = ("</parameter>", "<parameter=", "</function>", "</tool_call>")
        end = "</parameter>"
        while end in ("</parameter>", "<parameter="):
            if end == "</parameter>" and not (yield from feed.skip_spaced("<parameter=")):
                break
            key, _ = yield from feed.take_until((">",))
            end = yield from arguments.field(feed, key.strip(), ends, trim=True)
        arguments.close()
        if end != "</tool_call>":
            yield from feed.skip_spaced("</function>")
            yield from feed.skip_spaced("</tool_call>")
        feed.commit()


class Glm45(MarkedFormat):
    """GLM 4.5 to 4.7: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>`."""

    template_marks = ("<arg_key>", "<arg_value>")
    opening = ("<tool_call>",)

    def call(self, feed: IncrementalParser, marker: str) -> Steps[None]:
        """See `MarkedFormat.call`."""
        text, end = yield from feed.take_until(("<arg_key>", "</tool_call>"), MAX_NAME_CHARS)
        name = _checked(text)
        arguments = ArgumentWriter(feed.open_call(name), self.tools.get(name, {}))
        while end == "<arg_key>":
            key, _ = yield from feed.take_until(("</arg_key>",))
            yield from feed.skip_spaced("<arg_value>")
            end = yield from arguments.field(feed, key.strip(), ("</arg_value>", "</tool_call>"), trim=False)
            if end == "</arg_value>":
                if (yield from feed.skip_spaced("<arg_key>")):
                    end = "<arg_key>"
                else:
                    yield from feed.skip_spaced("</tool_call>")
        arguments.close()
        feed.commit()


_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_STARTS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")


class Harmony(ToolFormat):
    """The message format of gpt-oss ("harmony"): channels for reasoning, calls and the final answer.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
    <|message|>{...}<|call|>             <|start|>assistant<|channel|>final<|message|>...<|return|>

    It parses reasoning and calls together.
    """

    template_marks = ("<|channel|>",)
    special_tokens = True

    def read(self, feed: IncrementalParser) -> Steps[None]:
        """See `ToolFormat.read`."""
        start = yield from feed.forward_until(_STARTS, feed.content)
        while True:
            header, _ = yield from feed.take_until(("<|message|>",))
            header = start + header
            feed.commit()
            start = yield from self._body(feed, header)
            while start not in _STARTS:
                start = yield from feed.forward_until(_STARTS, _ignore)

    def _body(self, feed: IncrementalParser, header: str) -> Steps[str]:
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL.search(header)
        if recipient is not None and recipient[1].startswith("functions.") and recipient[1] != "functions.":
            sink = feed.open_call(recipient[1].removeprefix("functions."))
        elif channel is not None and channel[1] == "analysis":
            sink = feed.reasoning
        else:
            sink = feed.content
        return (yield from feed.forward_until(_ENDS, sink))


def _ignore(_: str) -> None:
    """Drop text between two messages."""
