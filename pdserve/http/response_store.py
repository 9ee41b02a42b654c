"""Stored responses of `/v1/responses`, and the conversations that `previous_response_id` continues.

Servers and router have one store each; a server stores only what no router stores for it:

    client ── previous_response_id ──> ResponseStore.begin ── items of the conversation (`HISTORY_FIELD`) ──> workers
    client <── response ── Recording.keep <── response ─────────────────────────────────────────────────────── worker

So both servers of a pair, and any worker, get the whole conversation, and a dead worker loses no response. A response
is found only by requests with the API key of the request that made it. Responses in the background
(`background_responses.py`) are in the store from their start. Event loop only.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import orjson

from pdserve.errors import RequestError
from pdserve.http.access import RESPONSES_PATH
from pdserve.http.response_events import EventLog, RunningResponse

HISTORY_FIELD = "pdserve_history"
"""Field of a body that a router has completed: the items of the conversation before `input`, maybe none."""
PREVIOUS = "previous_response_id"
RESPONSE_PATH = f"{RESPONSES_PATH}/{{response_id}}"
CANCEL_PATH = f"{RESPONSE_PATH}/cancel"
ITEMS_PATH = f"{RESPONSE_PATH}/input_items"
KEPT_STATUSES = ("completed", "incomplete")
"""Statuses of responses that are stored, and that a conversation continues. Of the background all are stored."""
FULL_RETRY_S = 5
MAX_ITEMS = 100
MAX_EVENT_NUMBER = 10**9 - 1
DEFAULT_ITEMS = 20
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


@dataclasses.dataclass(frozen=True)
class StoreLimits:
    """Most stored responses (0: none are stored), their bytes, and the seconds that each is kept.

    `num_running`: most responses that run in the background at a time.
    """

    num: int
    num_bytes: int
    ttl_s: float
    num_running: int = 0


@dataclasses.dataclass(frozen=True)
class StoredResponse:
    """A response, and the items of the conversation before its output, as JSON. `stored_s`: monotonic seconds.

    `events`: of a response that was streamed in the background; None: of another one.
    """

    owner: str
    response: bytes
    items: bytes
    stored_s: float
    events: EventLog | None = None
    background: bool = False

    @property
    def num_bytes(self) -> int:
        """Memory of the JSON texts and the events."""
        return len(self.response) + len(self.items) + (0 if self.events is None else self.events.num_bytes)


class ResponseStore:
    """The stored responses by id, the oldest first. `now`: monotonic seconds. An owner is an API key, or empty."""

    def __init__(self, limits: StoreLimits, now: Callable[[], float]) -> None:
        self._most, self._most_bytes, self._ttl_s = limits.num, limits.num_bytes, limits.ttl_s
        self._most_running = limits.num_running
        self._now = now
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._running: dict[str, RunningResponse] = {}
        self._with_events: OrderedDict[str, EventLog] = OrderedDict()
        """The events of stored responses, the oldest first: they make room before any response does."""
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_bytes(self) -> int:
        """Bytes of all responses, those that run in the background included."""
        return self._num_bytes

    def begin(self, body: Mapping[str, Any], owner: str) -> tuple[dict[str, Any], Recording | None]:
        """Return the body of a request with the conversation that it continues, and what stores its response.

        Without a recording (None) nothing is stored: the body has `store: false`, or this store has no room for any.

        Raises:
            RequestError: 404 naming `previous_response_id`: there is no such response of this owner, or no more; 400:
                it has not ended, or has failed.
        """
        previous, wanted = body.get(PREVIOUS), body.get("store")
        history: list[Any] = []
        if isinstance(previous, str):  # a value of another type is the worker's to refuse, as in `store`
            found = self._find(previous, owner, PREVIOUS)
            response = found.response if isinstance(found, RunningResponse) else orjson.loads(found.response)
            if response["status"] not in KEPT_STATUSES:
                message = f"{PREVIOUS}: the response {previous!r} is {response['status']}, and cannot be continued"
                raise RequestError(message, field=PREVIOUS, code="response_not_completed")
            history = [*orjson.loads(found.items), *response["output"]]
        whole = {**body, HISTORY_FIELD: history}
        if wanted not in (None, True, False) or wanted is False:
            return whole, None
        if not self._most:
            return {**whole, "store": False}, None
        return {**whole, "store": True}, Recording(self, owner, [*history, *_items(body.get("input"))])

    def put(self, owner: str, response: Mapping[str, Any], items: list[Any]) -> None:
        """Store `response`, whose conversation before the output is `items`; older ones make room for it."""
        self._put(response["id"], StoredResponse(owner, orjson.dumps(response), orjson.dumps(items), self._now()))

    def _put(self, name: str, made: StoredResponse) -> None:
        if made.num_bytes > self._most_bytes:
            return
        self._stored[name] = made
        self._num_bytes += made.num_bytes
        if made.events is not None and not made.events.is_dropped:
            self._with_events[name] = made.events
        self._drop_old()

    def run(self, running: RunningResponse) -> None:
        """Add a response that runs in the background; call `grow` and then `settle` for it.

        Raises:
            RequestError: 400, none may run; 503, too many run already, or their conversations and events have too many
                bytes.
        """
        if not self._most_running:
            message = "background is refused here (--max-background-responses 0)"
            raise RequestError(message, field="background", code="unsupported")
        self._drop_old()
        too_many = len(self._running) >= self._most_running
        if too_many or sum(one.counted_bytes for one in self._running.values()) + running.num_bytes > self._most_bytes:
            why = f"{self._most_running} responses run" if too_many else "those that run fill --response-store-mb"
            message = f"background: {why} in the background; try again later"
            raise RequestError(message, status=503, code="background_full", retry_after_s=FULL_RETRY_S)
        self._running[running.id] = running
        self._count(running)
        self._drop_old()

    def feed(self, running: RunningResponse, piece: bytes) -> None:
        """Give `running` the next bytes of its worker's stream. If the store is full, its events are dropped."""
        running.feed(piece)
        if running.id not in self._running:
            return  # deleted
        self._count(running)
        self._drop_old()
        if self._num_bytes > self._most_bytes and running.events is not None:
            running.events.drop()
            self._count(running)

    def settle(self, running: RunningResponse) -> None:
        """Keep a response that has ended, as long as any other one; nothing if it was deleted meanwhile."""
        if self._running.pop(running.id, None) is None:
            return
        self._num_bytes -= running.counted_bytes
        response, events = orjson.dumps(running.response), running.events
        if events is not None and len(response) + running.num_bytes > self._most_bytes:
            events.drop()
        made = StoredResponse(running.owner, response, running.items, self._now(), events, background=True)
        self._put(running.id, made)

    def _count(self, running: RunningResponse) -> None:
        self._num_bytes += running.num_bytes - running.counted_bytes
        running.counted_bytes = running.num_bytes

    def get(self, response_id: str, owner: str) -> dict[str, Any]:
        """Return a response.

        Raises:
            RequestError: 404 naming `response_id`.
        """
        found = self._find(response_id, owner, "response_id")
        response: dict[str, Any]
        response = found.response if isinstance(found, RunningResponse) else orjson.loads(found.response)
        return response

    def events(self, response_id: str, owner: str, query: Mapping[str, str]) -> AsyncGenerator[bytes, None] | None:
        """Return the events that a `query` wants: `stream=true`, `starting_after` (a number); None: it wants none.

        Raises:
            RequestError: 404 as `get`; 400 naming a parameter: the response has no events, or it is no number.
        """
        stream, after = query.get("stream", "false"), query.get("starting_after", "-1")
        if stream not in ("true", "false"):
            raise RequestError(f"stream must be true or false, got {stream!r}", field="stream")
        if stream == "false":
            return None
        found = self._find(response_id, owner, "response_id")
        if found.events is None:
            message = "stream: only responses that were made with background and stream can be streamed again"
            raise RequestError(message, field="stream", code="unsupported")
        if after != "-1" and not (_is_number(after) and int(after) <= MAX_EVENT_NUMBER):
            raise RequestError(f"starting_after must be the number of an event, got {after!r}", field="starting_after")
        return found.events.read(int(after))

    def delete(self, response_id: str, owner: str) -> dict[str, Any]:
        """Delete a response and return OpenAI's answer. Raises RequestError as `get`."""
        found = self._find(response_id, owner, "response_id")
        self._with_events.pop(response_id, None)
        if isinstance(found, RunningResponse):
            del self._running[response_id]
            self._num_bytes -= found.counted_bytes
        else:
            del self._stored[response_id]
            self._num_bytes -= found.num_bytes
        return {"id": response_id, "object": "response", "deleted": True}

    def cancel(self, response_id: str, owner: str) -> dict[str, Any]:
        """Return a response of the background, which `RunningResponse.cancel` has ended or which ended before.

        Raises:
            RequestError: 404 as `get`; 400: it was not made in the background.
        """
        found = self._find(response_id, owner, "response_id")
        if isinstance(found, StoredResponse) and not found.background:
            message = f"response {response_id!r} is not one of the background, and has ended"
            raise RequestError(message, field="response_id", code="response_ended")
        return self.get(response_id, owner)

    def running(self, response_id: str, owner: str) -> RunningResponse | None:
        """Return a response that runs in the background; None if no such one of this owner runs."""
        found = self._running.get(response_id)
        return found if found is not None and found.owner == owner else None

    def input_items(self, response_id: str, owner: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Return OpenAI's list of the items of a conversation before the output of a stored response.

        `query`: `order` (`desc` by default), `limit`, and `after`, an item's id.

        Raises:
            RequestError: 404 as `get`; 400 naming a parameter of the query.
        """
        items: list[dict[str, Any]] = orjson.loads(self._find(response_id, owner, "response_id").items)
        order, limit = query.get("order", "desc"), query.get("limit", str(DEFAULT_ITEMS))
        if order not in ("asc", "desc"):
            raise RequestError(f"order must be asc or desc, got {order!r}", field="order")
        if not (_is_number(limit) and 1 <= int(limit) <= MAX_ITEMS):
            raise RequestError(f"limit must be 1 to {MAX_ITEMS}, got {limit!r}", field="limit")
        found = items if order == "asc" else items[::-1]
        if (after := query.get("after")) is not None:
            places = [place for place, item in enumerate(found) if item.get("id") == after]
            if not places:
                raise RequestError(f"after: there is no item {after!r}", field="after")
            found = found[places[0] + 1 :]
        shown = found[: int(limit)]
        ids = [item.get("id") for item in shown] or [None]
        more = len(shown) < len(found)
        return {"object": "list", "data": shown, "first_id": ids[0], "last_id": ids[-1], "has_more": more}

    def _find(self, response_id: Any, owner: str, field: str) -> StoredResponse | RunningResponse:
        self._drop_old()
        found: StoredResponse | RunningResponse | None = None
        if isinstance(response_id, str):
            found = self._running.get(response_id) or self._stored.get(response_id)
        if found is None or found.owner != owner:
            why = "" if self._most else "; nothing is stored here (--response-store-size 0)"
            message = f"{field}: there is no stored response {str(response_id)[:100]!r}{why}"
            raise RequestError(message, field=field, status=404, code="response_not_found")
        return found

    def _drop_old(self) -> None:
        oldest_s = self._now() - self._ttl_s
        while self._num_bytes > self._most_bytes and self._with_events:
            self._num_bytes -= self._with_events.popitem(last=False)[1].drop()
        while self._stored:
            name, first = next(iter(self._stored.items()))
            full = len(self._stored) > self._most or self._num_bytes > self._most_bytes
            if not full and first.stored_s > oldest_s:
                return
            del self._stored[name]
            self._with_events.pop(name, None)
            self._num_bytes -= first.num_bytes


@dataclasses.dataclass(frozen=True)
class Recording:
    """Stores the response of one request. `items`: the conversation before its output."""

    store: ResponseStore
    owner: str
    items: list[Any]

    def keep(self, response: Mapping[str, Any]) -> None:
        """Store the whole response, unless it has failed or was cancelled."""
        if response.get("status") in KEPT_STATUSES and isinstance(response.get("id"), str):
            self.store.put(self.owner, response, self.items)

    def running(self, body: Mapping[str, Any]) -> RunningResponse:
        """Return the response of `body` that runs in the background, not yet in the store."""
        return RunningResponse(self.owner, orjson.dumps(self.items), body)


def _is_number(text: str) -> bool:
    """Whether a parameter of a query is a whole number of at most 10 digits."""
    return len(text) <= 10 and text.isascii() and text.isdigit()


def _items(given: Any) -> list[Any]:
    """Return the items of a body's `input`, each with an id. The worker checks the input."""
    entries = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_item(entry) for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _item(entry: dict[str, Any]) -> dict[str, Any]:
    kind = entry.get("type") or "message"
    made = {**entry, "type": kind, "id": entry.get("id") or f"{_PREFIXES.get(kind, 'item')}_{secrets.token_hex(16)}"}
    if kind == "message" and isinstance(entry.get("content"), str):
        part = "output_text" if entry.get("role") == "assistant" else "input_text"
        more: dict[str, Any] = {"annotations": []} if part == "output_text" else {}
        made["content"] = [{"type": part, "text": entry["content"], **more}]
    return made
