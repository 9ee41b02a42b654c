"""Runs parsers over text cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from pdserve.server.openai.chat_tools import ParsedAnswer, join_deltas
from pdserve.server.text.chat_formats import TOOL_FORMATS
from pdserve.server.text.parsers.feed import (
    CallArguments,
    Content,
    Delta,
    DeltaReader,
    IncrementalParser,
    Reasoning,
)
from pdserve.server.text.parsers.thinking import THINKING
from pdserve.server.text.parsers.tool_format import ToolFormat

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array"},
        "note": {"type": ["string", "null"]},
    },
}
TOOLS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "now": {}}


def tool_reader(kind: str | type[ToolFormat]) -> DeltaReader:
    feed = IncrementalParser()
    made = (TOOL_FORMATS[kind] if isinstance(kind, str) else kind)(TOOLS)
    return DeltaReader(feed, made.read(feed))


def thought_reader(name: str, inside: bool | None) -> DeltaReader:
    feed = IncrementalParser()
    return DeltaReader(feed, THINKING[name].read(feed, inside))


def read(make: Callable[[], DeltaReader], texts: Sequence[str]) -> list[Delta]:
    """The pieces of a text that comes as `texts`."""
    reader = make()
    deltas = [delta for text in texts for delta in reader.push(text)]
    deltas += reader.finish()
    for delta in deltas:
        assert not isinstance(delta, Content | Reasoning | CallArguments) or delta.text, "no empty pieces"
    return deltas


def whole(make: Callable[[], DeltaReader], text: str) -> ParsedAnswer:
    """What a text is made of; the same whether it comes at once or character by character."""
    at_once = join_deltas(read(make, [text]))
    assert join_deltas(read(make, list(text))) == at_once
    return at_once


def calls(made: ParsedAnswer) -> list[tuple[str, Any]]:
    """Names and arguments, as values."""
    return [(call.name, json.loads(call.arguments)) for call in made.calls]
