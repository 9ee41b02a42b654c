"""Pieces of a chat model's output. The formats emit them; the endpoints convert them to JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


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


Piece = Content | Reasoning | CallOpened | CallArguments


@dataclasses.dataclass
class ParsedToolCall:
    """A complete tool call; `arguments` is JSON text as the model wrote it."""

    name: str
    id: str | None = None
    arguments: str = ""


@dataclasses.dataclass
class ParsedAnswer:
    """All pieces of a response joined; None for a kind without pieces."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[ParsedToolCall] = dataclasses.field(default_factory=list)


def put_together(pieces: Sequence[Piece]) -> ParsedAnswer:
    """Join `pieces`, in order, to a response."""
    whole = ParsedAnswer()
    for piece in pieces:
        match piece:
            case Content(text):
                whole.content = (whole.content or "") + text
            case Reasoning(text):
                whole.reasoning = (whole.reasoning or "") + text
            case CallOpened(_, name, call_id):
                whole.calls.append(ParsedToolCall(name, call_id))
            case CallArguments(index, text):
                whole.calls[index].arguments += text
    return whole
