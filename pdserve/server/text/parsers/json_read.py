"""Reads JSON from a feed: values whole or as they arrive, and the objects in which most formats write a call.

Models write sloppy JSON, so the reader is lenient: it finds the end of a value and does not check its inside.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Container

from pdserve.server.text.parsers.feed import IncrementalParser, NotACallError, Sink, Steps, drop_surrogates

ARGUMENT_KEYS = ("arguments", "parameters")
_STRUCTURE = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\]')
_AFTER_SCALAR = re.compile(r"[,}\]\s<;]")


class _Extent:
    """Finds the end of an object, array or string, starting at its first character."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end(self, text: str, start: int) -> int | None:
        """Return the index after the value, or None if all of `text[start:]` belongs to the value.

        JSON has no `<` outside a string, so an unclosed value ends before it.
        """
        at = start
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _STRUCTURE).search(text, at)
            if found is None:
                return None
            at = found.end()
            if found[0] == "<":
                return at - 1
            if self._step(found[0]):
                return at
        return None

    def _step(self, char: str) -> bool:
        if char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if char in "{[" else -1
        return self._depth <= 0 and not self._in_string


def forward_value(feed: IncrementalParser, sink: Sink) -> Steps[None]:
    """Pass the next value's text to `sink` as it arrives. A string is decoded first: its arguments were encoded
    twice.
    """
    if (yield from feed.peek()) not in "{[":
        sink(_arguments((yield from take_value(feed))))
        feed.commit()
        return
    extent = _Extent()
    while True:
        end = extent.end(feed.text, feed.pos)
        sink(feed.text[feed.pos : end])
        feed.pos = len(feed.text) if end is None else end
        feed.commit()
        if end is not None:
            return
        yield from feed.peek()


def take_value(feed: IncrementalParser) -> Steps[str]:
    """Read the next value; return its text.

    Raises:
        NotACallError: no value is next.
    """
    start = feed.pos
    if (yield from feed.peek()) in '{["':
        extent, at = _Extent(), start
        while (end := extent.end(feed.text, at)) is None:
            at = feed.pos = len(feed.text)
            yield from feed.peek()
        feed.pos = end
        return feed.text[start:end]
    while not _AFTER_SCALAR.match((yield from feed.peek())):
        feed.pos += 1
    if feed.pos == start:
        raise NotACallError
    return feed.text[start : feed.pos]


def _string(text: str) -> str:
    """Decode a JSON string literal.

    Raises:
        NotACallError: the text is no string literal.
    """
    try:
        value = json.loads(text, strict=False)
    except ValueError as error:
        raise NotACallError from error
    if not isinstance(value, str):
        raise NotACallError
    return drop_surrogates(value)


def call_object(feed: IncrementalParser, known: Container[str] | None = None) -> Steps[None]:
    """Parse an object with `name` and `arguments` (or `parameters`) as a call.

    `known`: the known tools, if only the object's shape marks it as a call. It must then look like a call from its
    first key on and name a known tool. None: any object is a call.

    Raises:
        NotACallError: the object is no call; the attempt is not decided then.
    """
    yield from feed.expect("{")
    name: str | None = None
    call_id: str | None = None
    arguments = "{}"
    while not (yield from feed.skip_spaced("}")):
        yield from feed.skip_spaced(",")
        yield from feed.skip_space()
        key = _string((yield from take_value(feed)))
        yield from feed.expect(":")
        yield from feed.skip_space()
        if key in ARGUMENT_KEYS and name is not None:
            yield from _rest_of_call(feed, feed.open_call(name, call_id))
            return
        text = yield from take_value(feed)
        if key == "name":
            name = _string(text)
            if known is not None and name not in known:
                raise NotACallError
        elif key in ARGUMENT_KEYS:
            arguments = _arguments(text)
        elif key == "id" and text.startswith('"'):
            call_id = _string(text)
        elif known is not None and key != "type":
            raise NotACallError
    if name is None:
        raise NotACallError
    feed.open_call(name, call_id)(arguments)


def _arguments(text: str) -> str:
    if text.startswith('"'):
        with contextlib.suppress(NotACallError):
            return _string(text)
    return "{}" if text == "null" else text


def _rest_of_call(feed: IncrementalParser, sink: Sink) -> Steps[None]:
    """Read the arguments of an opened call, and the rest of the object if it is well formed."""
    try:
        yield from forward_value(feed, sink)
        while not (yield from feed.skip_spaced("}")):
            yield from feed.expect(",")
            yield from feed.skip_space()
            yield from take_value(feed)
            yield from feed.expect(":")
            yield from feed.skip_space()
            yield from take_value(feed)
    except NotACallError:
        pass
    else:
        feed.commit()
    feed.pos = 0
