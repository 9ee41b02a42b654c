"""Stored responses of `/v1/responses`, and the conversations that `previous_response_id` continues.

Servers and router have one store each; a server stores only what no router stores for it:

    client ── previous_response_id ──> ResponseStore.begin ── items of the conversation (`HISTORY_FIELD`) ──> workers
    client <── response ── Recording.keep <── response ─────────────────────────────────────────────────────── worker

So both servers of a pair, and any worker, get the whole conversation, and a dead worker loses no response. A response
is found only by requests with the API key of the request that made it. Event loop only.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from pdserve.errors import RequestError
from pdserve.http.access import RESPONSES_PATH

HISTORY_FIELD = "pdserve_history"
"""Field of a body that a router has completed: the items of the conversation before `input`, maybe none."""
PREVIOUS = "previous_response_id"
RESPONSE_PATH = f"{RESPONSES_PATH}/{{response_id}}"
CANCEL_PATH = f"{RESPONSE_PATH}/cancel"
ITEMS_PATH = f"{RESPONSE_PATH}/input_items"
KEPT_STATUSES = ("completed", "incomplete")
"""Statuses of responses that are stored."""
MAX_ITEMS = 100
DEFAULT_ITEMS = 20
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


@dataclasses.dataclass(frozen=True)
class StoreLimits:
    """Most stored responses (0: none are stored), their bytes, and the seconds that each is kept."""

    num: int
    num_bytes: int
    ttl_s: float


@dataclasses.dataclass(frozen=True)
class StoredResponse:
    """A response, and the items of the conversation before its output, as JSON. `stored_s`: monotonic seconds."""

    owner: str
    response: bytes
    items: bytes
    stored_s: float

    @property
    def num_bytes(self) -> int:
        """Memory of the JSON texts."""
        return len(self.response) + len(self.items)


class ResponseStore:
    """The stored responses by id, the oldest first. `now`: monotonic seconds. An owner is an API key, or empty."""

    def __init__(self, limits: StoreLimits, now: Callable[[], float]) -> None:
        self._most, self._most_bytes, self._ttl_s = limits.num, limits.num_bytes, limits.ttl_s
        self._now = now
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_bytes(self) -> int:
        """Bytes of all stored responses."""
        return self._num_bytes

    def begin(self, body: Mapping[str, Any], owner: str) -> tuple[dict[str, Any], Recording | None]:
        """Return the body of a request with the conversation that it continues, and what stores its response.

        Without a recording (None) nothing is stored: the body has `store: false`, or this store has no room for any.

        Raises:
            RequestError: 404 naming `previous_response_id`: there is no such response of this owner, or no more.
        """
        previous, wanted = body.get(PREVIOUS), body.get("store")
        history: list[Any] = []
        if isinstance(previous, str):  # a value of another type is the worker's to refuse, as in `store`
            found = self._find(previous, owner, PREVIOUS)
            history = [*orjson.loads(found.items), *orjson.loads(found.response)["output"]]
        whole = {**body, HISTORY_FIELD: history}
        if wanted not in (None, True, False) or wanted is False:
            return whole, None
        if not self._most:
            return {**whole, "store": False}, None
        return {**whole, "store": True}, Recording(self, owner, [*history, *_items(body.get("input"))])

    def put(self, owner: str, response: Mapping[str, Any], items: list[Any]) -> None:
        """Store `response`, whose conversation before the output is `items`; older ones make room for it."""
        made = StoredResponse(owner, orjson.dumps(response), orjson.dumps(items), self._now())
        if made.num_bytes > self._most_bytes:
            return
        self._stored[response["id"]] = made
        self._num_bytes += made.num_bytes
        self._drop_old()

    def get(self, response_id: str, owner: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return a stored response.

        Raises:
            RequestError: 404 naming `response_id`; 400 if the `query` wants a stream.
        """
        if query is not None and query.get("stream") == "true":
            raise RequestError("stream: a stored response is not streamed", field="stream", code="unsupported")
        response: dict[str, Any] = orjson.loads(self._find(response_id, owner, "response_id").response)
        return response

    def delete(self, response_id: str, owner: str) -> dict[str, Any]:
        """Delete a stored response and return OpenAI's answer. Raises RequestError as `get`."""
        self._find(response_id, owner, "response_id")
        self._num_bytes -= self._stored.pop(response_id).num_bytes
        return {"id": response_id, "object": "response", "deleted": True}

    def cancel(self, response_id: str, owner: str) -> dict[str, Any]:
        """Refuse to cancel a stored response, which has ended.

        Raises:
            RequestError: 404 as `get`; 400: it has ended.
        """
        self._find(response_id, owner, "response_id")
        message = f"response {response_id!r} has ended; a running one ends when its client disconnects"
        raise RequestError(message, field="response_id", code="response_ended")

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
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_ITEMS):
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

    def _find(self, response_id: Any, owner: str, field: str) -> StoredResponse:
        self._drop_old()
        found = self._stored.get(response_id) if isinstance(response_id, str) else None
        if found is None or found.owner != owner:
            why = "" if self._most else "; nothing is stored here (--response-store-size 0)"
            message = f"{field}: there is no stored response {str(response_id)[:100]!r}{why}"
            raise RequestError(message, field=field, status=404, code="response_not_found")
        return found

    def _drop_old(self) -> None:
        oldest_s = self._now() - self._ttl_s
        while self._stored:
            first = next(iter(self._stored.values()))
            full = len(self._stored) > self._most or self._num_bytes > self._most_bytes
            if not full and first.stored_s > oldest_s:
                return
            self._num_bytes -= self._stored.popitem(last=False)[1].num_bytes


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
