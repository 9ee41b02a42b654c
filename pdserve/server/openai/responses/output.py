"""Output items of a response and their stream events. One writer per response."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from pdserve.server.text.parsers.feed import CallArguments, CallOpened, Content, Delta, Reasoning

Event = dict[str, Any]
"""An event without its sequence number."""


class OutputWriter:
    """Converts deltas to events. `items` has the items so far; the last one is open until `finish`."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = False
        self._logprobs: list[dict[str, Any]] = []

    def push(self, deltas: Sequence[Delta], logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Append `deltas` and return their events. `logprobs` are added to the next text of a message."""
        self._logprobs += logprobs
        events: list[Event] = []
        for delta in deltas:
            match delta:
                case Content(text):
                    events += self._in("message")
                    events.append(self._text_delta(text))
                case Reasoning(text):
                    events += self._in("reasoning")
                    self.items[-1]["content"][0]["text"] += text
                    events.append(self._event("response.reasoning_text.delta", content_index=0, delta=text))
                case CallOpened(_, name, call_id):
                    events += self._close("completed")
                    call = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
                    events += self._begin("fc", call)
                case CallArguments(_, text):
                    self.items[-1]["arguments"] += text
                    events.append(self._event("response.function_call_arguments.delta", delta=text))
        return events

    def finish(self, status: str) -> list[Event]:
        """Close the last item with `status` at the end of the text, and return the events."""
        events = [] if self.items else self._in("message")
        return [*events, *self._close(status)]

    def _text_delta(self, text: str) -> Event:
        part = self.items[-1]["content"][0]
        part["text"] += text
        logprobs, self._logprobs = self._logprobs, []
        part["logprobs"] += logprobs
        return self._event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _in(self, kind: str) -> list[Event]:
        """Open an item of this kind with one part, unless one is open; return the events."""
        if self._open and self.items[-1]["type"] == kind:
            return []
        events = self._close("completed")
        if kind == "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            events += self._begin("msg", {"type": "message", "role": "assistant", "content": []})
        else:
            part = {"type": "reasoning_text", "text": ""}
            events += self._begin("rs", {"type": "reasoning", "summary": [], "content": []})
        self.items[-1]["content"].append(part)
        return [*events, self._event("response.content_part.added", content_index=0, part=_copy(part))]

    def _begin(self, prefix: str, item: dict[str, Any]) -> list[Event]:
        self.items.append({"id": f"{prefix}_{uuid.uuid4().hex}", **item, "status": "in_progress"})
        self._open = True
        return [self._item_event("response.output_item.added")]

    def _close(self, status: str) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        item = self.items[-1]
        item["status"] = status
        return [*self._ending(item), self._item_event("response.output_item.done")]

    def _ending(self, item: dict[str, Any]) -> list[Event]:
        if item["type"] == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            return [self._event("response.function_call_arguments.done", **fields)]
        part = item["content"][0]
        if item["type"] == "reasoning":
            done = self._event("response.reasoning_text.done", content_index=0, text=part["text"])
        else:
            done = self._event(
                "response.output_text.done", content_index=0, text=part["text"], logprobs=list(part["logprobs"])
            )
        return [done, self._event("response.content_part.done", content_index=0, part=_copy(part))]

    def _item_event(self, kind: str) -> Event:
        item = self.items[-1]
        shown = {**item, "content": [_copy(part) for part in item["content"]]} if "content" in item else dict(item)
        return {"type": kind, "output_index": len(self.items) - 1, "item": shown}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


def _copy(part: dict[str, Any]) -> dict[str, Any]:
    """Copy a part, which later deltas extend."""
    return {name: list(value) if isinstance(value, list) else value for name, value in part.items()}
