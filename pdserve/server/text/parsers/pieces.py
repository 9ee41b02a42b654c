"""What a chat model's text is made of, as values. Made by the formats, turned into JSON by the endpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclasses.dataclass(frozen=True)
class CallOpened:
    """The tool call `index` (from 0) begins. `id` is the model's own name for it, where its format has one."""

    index: int
    name: str
    id: str | None = None


@dataclasses.dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of the arguments of call `index`."""

    index: int
    text: str


Piece = Content | Reasoning | CallOpened | CallArguments


@dataclasses.dataclass
class ParsedToolCall:
    """A whole tool call; `arguments` is JSON text as the model wrote it."""

    name: str
    id: str | None = None
    arguments: str = ""


@dataclasses.dataclass
class ParsedAnswer:
    """All pieces of an answer put together; None where there was none of a kind."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[ParsedToolCall] = dataclasses.field(default_factory=list)


def put_together(pieces: Sequence[Piece]) -> ParsedAnswer:
    """The answer that `pieces`, in order, make."""
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
