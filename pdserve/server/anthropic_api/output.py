"""Content blocks of a message, and their stream events. One writer per message."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from pdserve.server.text.parsers.feed import CallArguments, CallOpened, Content, Delta, Reasoning

Event = dict[str, Any]


class ContentWriter:
    """Converts deltas to content blocks and events. The last block is open until `finish`."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []
        self._open = False
        self._arguments = ""
        self._thoughts = hashlib.blake2b(digest_size=24)

    @property
    def blocks(self) -> list[dict[str, Any]]:
        """The content of a message that has ended."""
        return self._blocks

    @property
    def has_calls(self) -> bool:
        """Whether a tool call has begun."""
        return any(block["type"] == "tool_use" for block in self._blocks)

    def push(self, deltas: Sequence[Delta]) -> list[Event]:
        """Append `deltas` and return their events."""
        events: list[Event] = []
        for delta in deltas:
            match delta:
                case Content(text):
                    events += self._in("text")
                    self._blocks[-1]["text"] += text
                    events.append(self._delta("text_delta", text=text))
                case Reasoning(text):
                    events += self._in("thinking")
                    self._blocks[-1]["thinking"] += text
                    self._thoughts.update(text.encode(errors="surrogatepass"))
                    events.append(self._delta("thinking_delta", thinking=text))
                case CallOpened(_, name, call_id):
                    events += self.finish()
                    events += self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
                case CallArguments(_, text):
                    self._arguments += text
                    events.append(self._delta("input_json_delta", partial_json=text))
        return events

    def finish(self) -> list[Event]:
        """Close the open block, and return its events; empty without an open block."""
        if not self._open:
            return []
        self._open = False
        block = self._blocks[-1]
        events: list[Event] = []
        if block["type"] == "thinking":
            block["signature"] = self._thoughts.hexdigest()
            events.append(self._delta("signature_delta", signature=block["signature"]))
        elif block["type"] == "tool_use":
            block["input"] = _as_object(self._arguments)
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _in(self, kind: str) -> list[Event]:
        """Open a block of this kind, unless one is open; return the events."""
        if self._open and self._blocks[-1]["type"] == kind:
            return []
        fields = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}}[kind]
        return [*self.finish(), *self._begin({"type": kind, **fields})]

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        self._blocks.append(block)
        self._open, self._arguments = True, ""
        self._thoughts = hashlib.blake2b(digest_size=24)
        return [{"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}]

    def _delta(self, kind: str, **fields: str) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": {"type": kind, **fields}}


def _as_object(arguments: str) -> dict[str, Any]:
    """Parse the arguments of a call; empty for a text that is no JSON object, such as one that the limit cut off."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
