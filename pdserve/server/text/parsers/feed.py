"""Reads text that arrives in pieces as if it were complete. One `IncrementalParser` per sequence.

Formats are generators over it.

A generator reads with `yield from feed....()` and is suspended while the feed needs more text. What it decides depends
on the text alone, never on where the text was cut, so a stream and a whole answer give the same.

    feed.text    [ attempt, read but not decided |  not read yet ]
                                             feed.pos

`commit` makes the attempt final; `give_up` turns its beginning into content, and what follows is read anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from pdserve.server.text.parsers.pieces import CallArguments, CallOpened, Content, Piece, Reasoning

T = TypeVar("T")
Steps = Generator[None, None, T]
Sink = Callable[[str], None]
SPACE = " \t\r\n"
_SURROGATE = re.compile("[\ud800-\udfff]")


class CutOffError(Exception):
    """The text ended in the middle of something."""


class NotACallError(Exception):
    """What looked like markup is ordinary text."""


def drop_surrogates(text: str) -> str:
    """`text` without lone surrogates, which JSON escapes can write and no encoder takes."""
    return _SURROGATE.sub("\ufffd", text)


def beginning_at_end(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    for size in range(min(len(text), max(len(marker) for marker in markers) - 1), 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers if len(marker) > size):
            return size
    return 0


def first_marker(text: str, markers: tuple[str, ...], start: int = 0) -> tuple[int, str] | None:
    """Where the first marker is, and which; of several at one place the longest."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker, start)) >= 0]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker


class IncrementalParser:
    """See the file's docstring. `pieces` is what has been made out so far; its owner takes them away."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False
        self.pieces: list[Piece] = []
        self.num_calls = 0
        self._space = ""
        self._said = False
        self._marked = False
        self._thought = False
        self._thought_space = ""

    # decisions -------------------------------------------------------------------------------------------------------

    def content(self, text: str) -> None:
        """Show `text`. White space waits for text after it: none is shown between a call and the end of the text."""
        shown = text.rstrip(SPACE)
        if shown:
            lead = self._space if self._said or not self.num_calls else ""
            if not self._said and self.num_calls:
                shown = shown.lstrip(SPACE)
            self.pieces.append(Content(lead + shown))
            self._said = True
            self._space = ""
        self._space += text[len(text.rstrip(SPACE)) :]

    def plain(self, size: int) -> None:
        """The first `size` characters are content as they are, white space too: another format reads them next."""
        if size:
            self.pieces.append(Content(self.text[:size]))
            self.text, self.pos = self.text[size:], 0

    def reasoning(self, text: str) -> None:
        """Show `text` as reasoning, without white space at its beginning and end."""
        body = text.rstrip(SPACE)
        if body:
            shown = self._thought_space + body if self._thought else body.lstrip(SPACE)
            self.pieces.append(Reasoning(shown))
            self._thought, self._thought_space = True, ""
        self._thought_space += text[len(body) :]

    def end_content(self) -> None:
        """The text has ended: white space at its end is shown unless there were calls."""
        if self._space and not self.num_calls:
            self.pieces.append(Content(self._space))
        self._space = ""

    def open_call(self, name: str, call_id: str | None = None) -> Sink:
        """Begin a call, and decide the attempt; returns where its arguments go.

        Raises:
            NotACallError: the name is empty.
        """
        if not name:
            raise NotACallError
        index = self.num_calls
        self.num_calls += 1
        self.pieces.append(CallOpened(index, name, call_id))
        self.commit()

        def more(text: str) -> None:
            if text:
                self.pieces.append(CallArguments(index, text))

        return more

    def commit(self) -> None:
        """What was read is done with."""
        self.text = self.text[self.pos :]
        self.pos = 0

    def give_up(self, size: int) -> None:
        """The first `size` characters of the attempt are content after all; the rest is read again."""
        self.pos = size
        self.content(self.text[:size])
        self.commit()

    # reading ---------------------------------------------------------------------------------------------------------

    def more(self) -> Steps[bool]:
        """Wait for more text; False when there is none."""
        size = len(self.text)
        while len(self.text) == size and not self.ended:
            yield
        return len(self.text) > size

    def _need_more(self) -> Steps[None]:
        if not (yield from self.more()):
            raise CutOffError

    def content_until(self, markers: tuple[str, ...]) -> Steps[str | None]:
        """Show text up to a marker, which becomes the attempt; None at the end of the text.

        The beginning of a marker at the very end of the text is shown only if no marker came before.
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
        """Show all text that is not read yet."""
        while True:
            self.give_up(len(self.text))
            if not (yield from self.more()):
                return

    def forward_until(self, markers: tuple[str, ...], sink: Sink) -> Steps[str]:
        """Hand text on as it comes, up to a marker, which is skipped and returned.

        Raises:
            CutOffError: at the end of the text, after all of it was handed on.
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
        """Read text up to a marker; both are returned, and read.

        Raises:
            NotACallError: there is none within `limit` characters.
            CutOffError: there is none.
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
        """The next character; stays unread.

        Raises:
            CutOffError: at the end of the text.
        """
        while self.pos == len(self.text):
            yield from self._need_more()
        return self.text[self.pos]

    def skip_space(self) -> Steps[None]:
        """Read white space, at least one other character follows.

        Raises:
            CutOffError: at the end of the text.
        """
        while (yield from self.peek()) in SPACE:
            self.pos += 1

    def skip(self, word: str) -> Steps[bool]:
        """Read `word` if it is next.

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
        """Read `word` if it is next after white space; the white space stays unread if not."""
        start = self.pos
        yield from self.skip_space()
        if (yield from self.skip(word)):
            return True
        self.pos = start
        return False

    def expect(self, word: str) -> Steps[None]:
        """Read `word`, after white space.

        Raises:
            NotACallError: something else is next.
        """
        if not (yield from self.skip_spaced(word)):
            raise NotACallError


class PiecesReader:
    """Drives a format over a feed: text in, pieces out."""

    def __init__(self, feed: IncrementalParser, steps: Steps[None]) -> None:
        self._feed = feed
        self._steps = steps
        self._running = True
        self._advance()

    def push(self, text: str) -> list[Piece]:
        """What `text`, which follows all earlier text, lets us know."""
        self._feed.text += text
        if text:
            self._advance()
        return self._taken()

    def finish(self) -> list[Piece]:
        """What remains now that the text has ended. The beginning of a call that was cut off is dropped."""
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

    def _taken(self) -> list[Piece]:
        pieces, self._feed.pieces = self._feed.pieces, []
        return pieces
