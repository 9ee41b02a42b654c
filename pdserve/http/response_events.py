"""A response of `/v1/responses` that runs in the background: its object so far, and its events for readers.

    worker's events ──> RunningResponse.feed ── renumbered, with the response's own id ──> EventLog ──> any readers
                                             └─ the object, which `GET /v1/responses/ID` returns at any time

The server or router that made it reads the worker's stream, so the response goes on without its client. Event loop
only.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import orjson

from pdserve.errors import RequestError

ENDED_STATUSES = ("completed", "incomplete", "failed", "cancelled")
GAP = b"\n\n"
MAX_EVENT_BYTES = 32 << 20
"""A longer event ends a response in the background."""
_DATA = b"data: "
_REPORTS = (
    *(b"event: response.in_progress", b"event: response.output_item.done", b"event: response.completed"),
    *(b"event: response.incomplete", b"event: response.failed"),
)
"""Begin of the events that change the response object."""
_LAST = ("response.completed", "response.incomplete", "response.failed")


class EventLog:
    """The events of one response in order; the number of an event is its place. Readers wait for further events."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._events: list[bytes] | None = []
        self._ended = False
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._events or ())

    @property
    def is_dropped(self) -> bool:
        """Whether the events are gone."""
        return self._events is None

    def add(self, event: bytes) -> None:
        """Append an event, unless the log is dropped."""
        if self._events is not None:
            self._events.append(event)
            self.num_bytes += len(event)
        self._wake()

    def end(self) -> None:
        """No event follows."""
        self._ended = True
        self._wake()

    def drop(self) -> int:
        """Drop all events, now and later, and return their bytes. Readers that miss one get an error."""
        self._events, dropped, self.num_bytes = None, self.num_bytes, 0
        self._wake()
        return dropped

    async def read(self, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the events with numbers above `after`, until the last one.

        Raises:
            RequestError: 503, the events were dropped.
        """
        place = after + 1
        while True:
            if self._events is None:
                message = "the events of the response are no longer kept (--response-store-mb); GET it without stream"
                raise RequestError(message, status=503, code="response_events_dropped")
            if place < len(self._events):
                yield self._events[place]
                place += 1
            elif self._ended:
                return
            else:
                await self._news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class RunningResponse:
    """A response in the background. `items`: JSON of the conversation before its output.

    `events` None: its request did not set `stream`, so no events are kept.

    Raises:
        orjson.JSONEncodeError: `body` is nested too deeply.
    """

    def __init__(self, owner: str, items: bytes, body: Mapping[str, Any]) -> None:
        self.owner = owner
        self.items = items
        self.response = queued_response(body)
        self.id: str = self.response["id"]
        self.events = EventLog() if body.get("stream") is True else None
        self.counted_bytes = 0
        """Of `num_bytes`, what the store has counted."""
        self._body_bytes = len(orjson.dumps(body))
        self._number = 0
        self._rest = bytearray()
        for kind in ("response.created", "response.queued"):
            self._emit({"type": kind, "response": self.response})

    @property
    def num_bytes(self) -> int:
        """Memory of the body, which the task sends, of the conversation and the events."""
        num_events = 0 if self.events is None else self.events.num_bytes
        return self._body_bytes + len(self.items) + len(self._rest) + num_events

    @property
    def ended(self) -> bool:
        """Whether the response has its last status."""
        return self.response["status"] in ENDED_STATUSES

    def feed(self, piece: bytes) -> None:
        """Take the next bytes of the worker's stream, which end anywhere. Bytes behind its end are dropped."""
        if self.ended:
            return
        start = max(0, len(self._rest) - 1)
        self._rest += piece
        while (end := self._rest.find(GAP, start)) >= 0:
            event = bytes(self._rest[:end])
            del self._rest[: end + len(GAP)]
            start = 0
            self._take(event)
        if len(self._rest) > MAX_EVENT_BYTES:
            self.fail(f"an event of the worker has more than {MAX_EVENT_BYTES} bytes", 502)

    def restart(self) -> bool:
        """Forget the output so far, because another stream follows; False: not possible, readers may have it."""
        if self.events is not None or self.ended:
            return False
        self._rest.clear()
        self.response = {**self.response, "output": []}
        return True

    def fail(self, message: str, status: int = 500, field: str | None = None) -> None:
        """End the response with an error, unless it has ended. `status`: that of the refusal over HTTP."""
        if not self.ended:
            code = "rate_limit_exceeded" if status == 429 else "invalid_prompt" if status < 500 else "server_error"
            error = {"code": code, "message": message, **({} if field is None else {"param": field})}
            self._end("response.failed", {**self.response, "status": "failed", "error": error})

    def cancel(self) -> None:
        """End the response, unless it has ended. Its output has the items that were complete."""
        if not self.ended:
            self._end("response.incomplete", {**self.response, "status": "cancelled"})

    def _take(self, event: bytes) -> None:
        is_report = event.startswith(_REPORTS) or not event.startswith(b"event: ")
        if self.ended or (self.events is None and not is_report):
            return
        try:
            value = orjson.loads(event.partition(_DATA)[2])
        except orjson.JSONDecodeError:
            return  # the mark [DONE] of another server's stream
        if not isinstance(value, dict):
            return
        kind, given = value.get("type"), value.get("response")
        if isinstance(error := value.get("error"), dict):
            status = value.get("code")
            self.fail(str(error.get("message")), status if isinstance(status, int) else 500)
        elif kind in _LAST and isinstance(given, dict):
            self._end(kind, self._own(given))
        elif kind == "response.in_progress" and isinstance(given, dict):
            self.response = self._own({**given, "status": "in_progress", "output": self.response["output"]})
            self._emit({**value, "response": self.response})
        elif kind != "response.created":
            if kind == "response.output_item.done":
                self.response = {**self.response, "output": [*self.response["output"], value.get("item")]}
            self._emit(value)

    def _own(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the worker's response object with what is this response's own."""
        own = {"id": self.id, "created_at": self.response["created_at"], "background": True, "store": True}
        return {**given, **own}

    def _end(self, kind: str, response: dict[str, Any]) -> None:
        self.response = response
        self._rest.clear()
        self._emit({"type": kind, "response": response})
        if self.events is not None:
            self.events.end()

    def _emit(self, event: Mapping[str, Any]) -> None:
        if self.events is not None:
            data = orjson.dumps({**event, "sequence_number": self._number})
            self.events.add(b"event: " + str(event.get("type")).encode() + b"\ndata: " + data + GAP)
        self._number += 1


def queued_response(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response object of a request that no worker has seen yet, with a new id.

    The fields that repeat the request are those of `body`, unchecked; the worker's object replaces them.
    """
    tools, metadata, reasoning = body.get("tools"), body.get("metadata"), body.get("reasoning")
    text, choice = body.get("text"), body.get("tool_choice")
    named = ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key")
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued",
        "background": True,
        "error": None,
        "incomplete_details": None,
        **{name: body.get(name) for name in (*named, "safety_identifier", "user")},
        "metadata": metadata if isinstance(metadata, dict) else {},
        "model": body.get("model"),
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "reasoning": reasoning if isinstance(reasoning, dict) else {"effort": None, "summary": None},
        "service_tier": "default",
        "store": True,
        "temperature": body.get("temperature"),
        "text": text if isinstance(text, dict) else {"format": {"type": "text"}},
        "tool_choice": "auto" if choice is None else choice,
        "tools": tools if isinstance(tools, list) else [],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "usage": None,
    }
