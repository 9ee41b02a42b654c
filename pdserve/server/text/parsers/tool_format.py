"""Base classes of tool-call formats: how one family of models writes its calls. `registry` maps names to subclasses."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

from pdserve.server.text.parsers.feed import IncrementalParser, NotACallError, Steps

MAX_NAME_CHARS = 256
"""A marker without a tool name within this many characters opens no call."""

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each tool, by the tool's name."""


class ToolFormat(abc.ABC):
    """Parses the calls in one sequence's text. One object per sequence.

    If markup identifies a call, a call of an unknown tool is emitted too: the client can tell the model. If only the
    shape of the text suggests a call, it must name a known tool.
    """

    template_marks: ClassVar[tuple[str, ...]] = ()
    """A chat template that contains all of these makes models write this format. Empty: detection is impossible."""
    special_tokens: ClassVar[bool] = False
    """The markup consists of special tokens, which the detokenizer must not skip."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools

    @classmethod
    def new_id(cls, index: int, name: str, random: str) -> str:
        """Create an id for call `index` of the tool `name`, in the form that the model knows. `random`: 32 hex
        digits.
        """
        return f"call_{random[:24]}"

    @abc.abstractmethod
    def read(self, feed: IncrementalParser) -> Steps[None]:
        """Parse all of `feed`, to its end."""


class MarkedFormat(ToolFormat):
    """Base class of formats in which a marker opens a call."""

    opening: ClassVar[tuple[str, ...]]
    """Markers that precede a call."""
    swallowed: ClassVar[tuple[str, ...]] = ()
    """Markers between and around calls, which are dropped."""

    @abc.abstractmethod
    def call(self, feed: IncrementalParser, marker: str) -> Steps[None]:
        """Parse the call after `marker`, which was read.

        Raises:
            NotACallError: no call follows, and no call was opened: the marker is content.
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
