"""What a tool-call format is: how one family of models writes its calls. Subclasses register themselves by name."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

from pdserve.server.text.parsers.feed import IncrementalParser, NotACallError, Steps

MAX_NAME_CHARS = 256
"""Markup that has no name within so many characters is none."""

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each tool, by the tool's name."""


class ToolFormat(abc.ABC):
    """Reads the calls out of one sequence's text. One object per sequence.

    A call of an unknown tool is handed on where markup says that it is a call: the client can tell the model. Where
    nothing but its looks makes text a call, it must name a known tool.
    """

    template_marks: ClassVar[tuple[str, ...]] = ()
    """A chat template that holds all of these makes models write this format. Empty: it cannot be told."""
    special_tokens: ClassVar[bool] = False
    """The markup is special tokens, which must not be skipped when tokens become text."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools

    @classmethod
    def new_id(cls, index: int, name: str, random: str) -> str:
        """An id for call number `index`, of the tool `name`, as the model knows ids. `random`: 32 hex digits."""
        return f"call_{random[:24]}"

    @abc.abstractmethod
    def read(self, feed: IncrementalParser) -> Steps[None]:
        """Read all of `feed`, to its end."""


class MarkedFormat(ToolFormat):
    """Formats in which a marker opens a call."""

    opening: ClassVar[tuple[str, ...]]
    """Markers that a call follows."""
    swallowed: ClassVar[tuple[str, ...]] = ()
    """Markers between and around calls, which say nothing."""

    @abc.abstractmethod
    def call(self, feed: IncrementalParser, marker: str) -> Steps[None]:
        """Read the call behind `marker`, which was read.

        Raises:
            NotACallError: it is none, and none was opened: the marker is text.
        """

    def read(self, feed: IncrementalParser) -> Steps[None]:
        """See `ToolFormat.read`."""
        while (marker := (yield from feed.content_until(self.opening + self.swallowed))) is not None:
            if marker in self.swallowed:
                feed.commit()
                continue
            try:
                yield from self.call(feed, marker)
            except NotACallError:
                feed.give_up(len(marker))
