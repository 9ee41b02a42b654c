"""Calls written as Python: `[get_weather(city="Paris"), now()]`, as Llama 4 and some Llama 3.2 models write them."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from pdserve.server.text.parsers.feed import CutOffError, IncrementalParser, NotACallError, Steps, drop_surrogates
from pdserve.server.text.parsers.tool_format import ToolFormat

_STRUCTURE = re.compile(r"""["'()\[\]{}]""")
_CONSTANTS = {"true": True, "false": False, "null": None}


class Pythonic(ToolFormat):
    """A list of calls anywhere in the text that begins with a known tool. Each call is emitted when it is complete."""

    template_marks = ("<|python_start|>",)
    markers = ("[", "<|python_start|>", "<|python_end|>")

    def read(self, feed: IncrementalParser) -> Steps[None]:
        """See `ToolFormat.read`."""
        while (marker := (yield from feed.content_until(self.markers))) is not None:
            if marker != "[":
                feed.commit()
                continue
            try:
                yield from self._known_name(feed)
            except NotACallError:
                feed.give_up(1)
            except CutOffError:
                feed.give_up(len(feed.text))
            else:
                yield from self._calls(feed)

    def _known_name(self, feed: IncrementalParser) -> Steps[str]:
        yield from feed.skip_space()
        start = feed.pos
        while (char := (yield from feed.peek())).isalnum() or char in "_.-":
            feed.pos += 1
        name = feed.text[start : feed.pos]
        if name not in self.tools:
            raise NotACallError
        yield from feed.expect("(")
        return name

    def _calls(self, feed: IncrementalParser) -> Steps[None]:
        """Parse the calls of a list; the first call's name and `(` were checked already."""
        opened = 1
        feed.pos = 1
        try:
            while True:
                name = yield from self._known_name(feed)
                source = yield from _to_closing(feed)
                arguments = self._arguments(name, source)
                feed.open_call(name)(arguments)
                opened = 0
                if not (yield from feed.skip_spaced(",")):
                    break
        except NotACallError:
            feed.give_up(opened)
        else:
            yield from feed.skip_spaced("]")
            feed.commit()

    def _arguments(self, name: str, source: str) -> str:
        """Convert the arguments in `source`, the text between the parentheses, to JSON."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call = ast.parse(f"f({source})", mode="eval").body
            assert isinstance(call, ast.Call)
            properties = self.tools[name].get("properties")
            values = dict(zip(properties if isinstance(properties, Mapping) else (), call.args, strict=False))
            if len(values) < len(call.args):
                raise NotACallError
            values |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
            text = json.dumps({key: _value(node) for key, node in values.items()}, ensure_ascii=False, allow_nan=False)
        except (SyntaxError, ValueError, TypeError, AssertionError, MemoryError, RecursionError) as error:
            raise NotACallError from error
        return drop_surrogates(text)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {ast.literal_eval(key): _value(v) for key, v in zip(keys, values, strict=True) if key is not None}
    return ast.literal_eval(node)


def _to_closing(feed: IncrementalParser) -> Steps[str]:
    """Read up to the `)` that closes the call; return the text before it."""
    start, depth = feed.pos, 1
    while True:
        found = _STRUCTURE.search(feed.text, feed.pos)
        if found is None:
            feed.pos = len(feed.text)
            yield from feed.peek()
            continue
        feed.pos = found.end()
        if found[0] in "\"'":
            yield from _skip_string(feed, found[0])
            continue
        depth += 1 if found[0] in "([{" else -1
        if depth == 0:
            return feed.text[start : feed.pos - 1]


def _skip_string(feed: IncrementalParser, quote: str) -> Steps[None]:
    while (char := (yield from feed.peek())) != quote:
        feed.pos += 1
        if char == "\\":
            yield from feed.peek()
            feed.pos += 1
    feed.pos += 1
