"""The router's stored responses: it completes bodies of `/v1/responses`, and reads responses while it relays them.

The workers get the whole conversation and store nothing, so any of them can continue it, and none is needed to read it.
Made by `app`. Event loop only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from pdserve.errors import RequestError
from pdserve.http.access import RESPONSES_PATH
from pdserve.http.credentials import Keys, authorization_of
from pdserve.http.errors import HttpRefusal
from pdserve.http.response_store import CANCEL_PATH, ITEMS_PATH, RESPONSE_PATH, Recording, ResponseStore
from pdserve.router.http import json_response, refused
from pdserve.router.proxy.dispatch import EVENT_STREAM
from pdserve.router.workers.outcome import Outcome, WorkerStream

MAX_EVENT_BYTES = 32 << 20
"""A longer response, or event of one, is relayed and not stored."""
_LAST_EVENTS = (b"event: response.completed\n", b"event: response.incomplete\n")
_GAP = b"\n\n"
_DATA = b"\ndata: "


class ResponseReader:
    """Reads the response object from the pieces of a worker's answer, and keeps it. `is_stream`: of events."""

    def __init__(self, recording: Recording, *, is_stream: bool) -> None:
        self._recording = recording
        self._is_stream = is_stream
        self._read = bytearray()
        self._is_lost = False

    def feed(self, piece: bytes, is_last: bool) -> bytes:
        """See `WorkerStream.change`: return `piece` as it is."""
        if self._is_lost:
            return piece
        self._read += piece
        if self._is_stream:
            self._take_events(len(piece))
        elif is_last:
            self._keep(bytes(self._read))
        if len(self._read) > MAX_EVENT_BYTES:
            self._is_lost = True
            self._read.clear()
        return piece

    def _take_events(self, num_new: int) -> None:
        start = max(0, len(self._read) - num_new - 1)
        while (end := self._read.find(_GAP, start)) >= 0:
            event = bytes(self._read[:end])
            del self._read[: end + len(_GAP)]
            start = 0
            if event.startswith(_LAST_EVENTS):
                self._keep(event.partition(_DATA)[2], "response")

    def _keep(self, data: bytes, field: str | None = None) -> None:
        try:
            value = orjson.loads(data)
            self._recording.keep(value if field is None else value[field])
        except (orjson.JSONDecodeError, orjson.JSONEncodeError, AttributeError, KeyError, TypeError):
            pass  # no response object: the worker is another server, or its answer broke off


class StoredResponses:
    """The store, and the handlers of the paths of one response. `keys`: the router's API keys."""

    def __init__(self, store: ResponseStore, keys: Keys) -> None:
        self.store = store
        self._keys = keys

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of one response."""
        return [
            web.get(RESPONSE_PATH, self.get),
            web.delete(RESPONSE_PATH, self.delete),
            web.post(CANCEL_PATH, self.cancel),
            web.get(ITEMS_PATH, self.input_items),
        ]

    def begin(
        self, request: web.Request, body: dict[str, Any], data: bytes | None
    ) -> tuple[dict[str, Any], bytes | None, Recording | None]:
        """Return the body for the workers, its JSON if `data` is given, and what stores the response (None: nothing).

        Raises:
            RequestError: see `ResponseStore.begin`.
        """
        if request.path != RESPONSES_PATH:
            return body, data, None
        whole, recording = self.store.begin(body, self._owner(request))
        return whole, None if data is None else orjson.dumps(whole), recording

    async def get(self, request: web.Request) -> web.Response:
        """Return a stored response (OpenAI)."""
        return self._answer(request, lambda name, owner: self.store.get(name, owner, request.query))

    async def delete(self, request: web.Request) -> web.Response:
        """Delete a stored response (OpenAI)."""
        return self._answer(request, self.store.delete)

    async def cancel(self, request: web.Request) -> web.Response:
        """Refuse to cancel a stored response, which has ended (OpenAI)."""
        return self._answer(request, self.store.cancel)

    async def input_items(self, request: web.Request) -> web.Response:
        """Return the items of a stored response's conversation (OpenAI)."""
        return self._answer(request, lambda name, owner: self.store.input_items(name, owner, request.query))

    def _answer(self, request: web.Request, find: Callable[[str, str], dict[str, Any]]) -> web.Response:
        try:
            return json_response(find(request.match_info["response_id"], self._owner(request)))
        except RequestError as error:
            return refused(HttpRefusal.of(error))

    def _owner(self, request: web.Request) -> str:
        return self._keys.find(authorization_of(request.headers)) or ""


def recorded(outcome: Outcome, recording: Recording | None) -> Outcome:
    """Return `outcome` so that its response is stored while it is relayed."""
    if recording is None or not isinstance(outcome, WorkerStream) or outcome.response.status != 200:
        return outcome
    reader = ResponseReader(recording, is_stream=outcome.response.content_type == EVENT_STREAM)
    return dataclasses.replace(outcome, change=reader.feed)
