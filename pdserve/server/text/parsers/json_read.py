"""Reads JSON out of a feed: values whole or as they come, and the objects in which most formats write a call.

It is lenient where models are careless: what is inside a value is not checked, only where the value ends.
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
    """Finds the end of an object, array or string that begins with the first character it is given."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end(self, text: str, start: int) -> int | None:
        """The index behind the value, or None if all of `text[start:]` belongs to it. `<` outside a string is none of
        JSON's: a value that was left open ends before it.
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
    """Hand the next value's text on as it comes; of a string, what it says: arguments that were encoded twice."""
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
    """The next value's text, read.

    Raises:
        NotACallError: there is none.
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
    """What a string literal says.

    Raises:
        NotACallError: it is none.
    """
    try:
        value = json.loads(text, strict=False)
    except ValueError as error:
        raise NotACallError from error
    if not isinstance(value, str):
        raise NotACallError
    return drop_surrogates(value)


def call_object(feed: IncrementalParser, known: Container[str] | None = None) -> Steps[None]:
    """Read an object with `name` and `arguments` (or `parameters`) as a call.

    `known`: there is no other sign of a call, so that the object must look like one from its first key on and name one
    of these.

    Raises:
        NotACallError: it is no call; nothing is decided then.
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
    """Read the arguments of a call that was opened, and what follows if the object goes on as objects do."""
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
