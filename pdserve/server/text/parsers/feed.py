"""Incremental parser for text that arrives in pieces. One `IncrementalParser` per sequence; formats are generators.

A generator reads with `yield from feed....()` and is suspended while the feed needs more text. Its decisions depend on
the text alone, never on how the text was split. So a stream and a complete response give the same deltas.

    feed.text    [ attempt: read, not decided | not read yet ]
                                              feed.pos

`commit` accepts the attempt. `give_up` turns the beginning of the attempt into content; the rest is read again.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Generator
from typing import TypeVar


@dataclasses.dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """Reasoning text."""

    text: str


@dataclasses.dataclass(frozen=True)
class CallOpened:
    """Start of tool call `index` (from 0). `id` is the model's own id of the call; None if its format has none."""

    index: int
    name: str
    id: str | None = None


@dataclasses.dataclass(frozen=True)
class CallArguments:
    """The next part of the JSON text of the arguments of call `index`."""

    index: int
    text: str


Delta = Content | Reasoning | CallOpened | CallArguments


T = TypeVar("T")
Steps = Generator[None, None, T]
Sink = Callable[[str], None]
SPACE = " \t\r\n"
_SURROGATE = re.compile("[\ud800-\udfff]")


class CutOffError(Exception):
    """The text ended in the middle of a construct."""


class NotACallError(Exception):
    """Text that looked like markup is content."""


def drop_surrogates(text: str) -> str:
    """Replace lone surrogates in `text` by U+FFFD: JSON escapes can write them, and no encoder accepts them."""
    return _SURROGATE.sub("\ufffd", text)


def beginning_at_end(text: str, markers: tuple[str, ...]) -> int:
    """Return how many characters at the end of `text` may be the beginning of a marker."""
    for size in range(min(len(text), max(len(marker) for marker in markers) - 1), 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers if len(marker) > size):
            return size
    return 0


def first_marker(text: str, markers: tuple[str, ...], start: int = 0) -> tuple[int, str] | None:
    """Find the first marker; return its index and the marker. At one index the longest marker wins."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker, start)) >= 0]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker


class IncrementalParser:
    """Incremental parser of one sequence; see the module docstring. `deltas` holds the parsed deltas until they are
    taken.
    """

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False
        self.deltas: list[Delta] = []
        self.num_calls = 0
        self._space = ""
        self._has_content = False
        self._marked = False
        self._has_reasoning = False
        self._reasoning_space = ""

    # decisions -------------------------------------------------------------------------------------------------------

    def content(self, text: str) -> None:
        """Emit `text` as content. White space waits for text after it: none is emitted between a call and the end of
        the text.
        """
        shown = text.rstrip(SPACE)
        if shown:
            lead = self._space if self._has_content or not self.num_calls else ""
            if not self._has_content and self.num_calls:
                shown = shown.lstrip(SPACE)
            self.deltas.append(Content(lead + shown))
            self._has_content = True
            self._space = ""
        self._space += text[len(text.rstrip(SPACE)) :]

    def plain(self, size: int) -> None:
        """Emit the first `size` characters as content unchanged, white space included: another format parses them
        next.
        """
        if size:
            self.deltas.append(Content(self.text[:size]))
            self.text, self.pos = self.text[size:], 0

    def reasoning(self, text: str) -> None:
        """Emit `text` as reasoning, without white space at its beginning and end."""
        body = text.rstrip(SPACE)
        if body:
            shown = self._reasoning_space + body if self._has_reasoning else body.lstrip(SPACE)
            self.deltas.append(Reasoning(shown))
            self._has_reasoning, self._reasoning_space = True, ""
        self._reasoning_space += text[len(body) :]

    def end_content(self) -> None:
        """End the content: emit the white space at the end of the text unless there were calls."""
        if self._space and not self.num_calls:
            self.deltas.append(Content(self._space))
        self._space = ""

    def open_call(self, name: str, call_id: str | None = None) -> Sink:
        """Emit the start of a call and commit the attempt; return the sink for the call's arguments.

        Raises:
            NotACallError: the name is empty.
        """
        if not name:
            raise NotACallError
        index = self.num_calls
        self.num_calls += 1
        self.deltas.append(CallOpened(index, name, call_id))
        self.commit()

        def more(text: str) -> None:
            if text:
                self.deltas.append(CallArguments(index, text))

        return more

    def commit(self) -> None:
        """Accept the attempt: drop the text that was read."""
        self.text = self.text[self.pos :]
        self.pos = 0

    def give_up(self, size: int) -> None:
        """Emit the first `size` characters of the attempt as content; the rest is read again."""
        self.pos = size
        self.content(self.text[:size])
        self.commit()

    # reading ---------------------------------------------------------------------------------------------------------

    def more(self) -> Steps[bool]:
        """Wait for more text; False at the end of the text."""
        size = len(self.text)
        while len(self.text) == size and not self.ended:
            yield
        return len(self.text) > size

    def _need_more(self) -> Steps[None]:
        if not (yield from self.more()):
            raise CutOffError

    def content_until(self, markers: tuple[str, ...]) -> Steps[str | None]:
        """Emit content up to a marker, which becomes the attempt; return the marker, None at the end of the text.

        The beginning of a marker at the very end of the text is emitted only if no marker came before.
        """
        while True:
            found = first_marker(self.text, markers)
            if found is not None:
                at, marker = found
                self.give_up(at)
                self.pos = len(marker)
                self._marked = True
                return marker
            if self.ended:
                self.give_up(len(self.text) - (beginning_at_end(self.text, markers) if self._marked else 0))
                return None
            self.give_up(len(self.text) - beginning_at_end(self.text, markers))
            yield from self.more()

    def content_to_end(self) -> Steps[None]:
        """Emit all text that is not read yet as content."""
        while True:
            self.give_up(len(self.text))
            if not (yield from self.more()):
                return

    def forward_until(self, markers: tuple[str, ...], sink: Sink) -> Steps[str]:
        """Pass text to `sink` as it arrives, up to a marker; skip and return the marker.

        Raises:
            CutOffError: at the end of the text, after all of it was passed to `sink`.
        """
        while True:
            found = first_marker(self.text, markers, self.pos)
            rest = self.text[self.pos :]
            keep = 0 if self.ended or found is not None else beginning_at_end(rest, markers)
            end = len(self.text) - keep if found is None else found[0]
            sink(self.text[self.pos : end])
            self.pos = end
            if found is not None:
                self.pos += len(found[1])
                self.commit()
                return found[1]
            self.commit()
            yield from self._need_more()

    def take_until(self, markers: tuple[str, ...], limit: int | None = None) -> Steps[tuple[str, str]]:
        """Read text up to and including a marker; return the text and the marker.

        Raises:
            NotACallError: no marker within `limit` characters.
            CutOffError: no marker before the end of the text.
        """
        longest = max(len(marker) for marker in markers)
        start = self.pos
        while (found := first_marker(self.text, markers, start)) is None:
            start = max(self.pos, len(self.text) - longest + 1)
            if limit is not None and start - self.pos > limit:
                raise NotACallError
            yield from self._need_more()
        at, marker = found
        if limit is not None and at - self.pos > limit:
            raise NotACallError
        taken = self.text[self.pos : at]
        self.pos = at + len(marker)
        return taken, marker

    def peek(self) -> Steps[str]:
        """Return the next character without reading it.

        Raises:
            CutOffError: at the end of the text.
        """
        while self.pos == len(self.text):
            yield from self._need_more()
        return self.text[self.pos]

    def skip_space(self) -> Steps[None]:
        """Read white space, until another character follows.

        Raises:
            CutOffError: at the end of the text.
        """
        while (yield from self.peek()) in SPACE:
            self.pos += 1

    def skip(self, word: str) -> Steps[bool]:
        """Read `word` if it is next; return whether it was.

        Raises:
            CutOffError: at the end of the text, in the middle of the word.
        """
        while True:
            rest = self.text[self.pos : self.pos + len(word)]
            if rest == word:
                self.pos += len(word)
                return True
            if not word.startswith(rest):
                return False
            yield from self._need_more()

    def skip_spaced(self, word: str) -> Steps[bool]:
        """Read `word` if it is next after white space; otherwise the white space stays unread. Return whether `word`
        was next.
        """
        start = self.pos
        yield from self.skip_space()
        if (yield from self.skip(word)):
            return True
        self.pos = start
        return False

    def expect(self, word: str) -> Steps[None]:
        """Read `word`, after optional white space.

        Raises:
            NotACallError: another text is next.
        """
        if not (yield from self.skip_spaced(word)):
            raise NotACallError


class DeltaReader:
    """Runs a format over a feed: text in, deltas out."""

    def __init__(self, feed: IncrementalParser, steps: Steps[None]) -> None:
        self._feed = feed
        self._steps = steps
        self._running = True
        self._advance()

    def push(self, text: str) -> list[Delta]:
        """Append `text`; return the deltas that are decided now."""
        self._feed.text += text
        if text:
            self._advance()
        return self._taken()

    def finish(self) -> list[Delta]:
        """End the text; return the remaining deltas. The beginning of a call that was cut off is dropped."""
        self._feed.ended = True
        self._advance()
        assert not self._running, "a format must come to an end with the text"
        self._feed.end_content()
        return self._taken()

    def _advance(self) -> None:
        if not self._running:
            return
        try:
            next(self._steps)
        except (StopIteration, CutOffError):
            self._running = False

    def _taken(self) -> list[Delta]:
        deltas, self._feed.deltas = self._feed.deltas, []
        return deltas
