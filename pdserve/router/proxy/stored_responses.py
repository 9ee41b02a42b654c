"""The router's stored responses: it completes bodies of `/v1/responses`, and reads responses while it relays them.

The workers get the whole conversation and store nothing, so any of them can continue it, and none is needed to read it.
Made by `app`. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable
from typing import Any

import orjson
from aiohttp import web

from pdserve.errors import RequestError
from pdserve.http.access import RESPONSES_PATH
from pdserve.http.background_responses import BackgroundResponses
from pdserve.http.credentials import Keys, authorization_of
from pdserve.http.error_forms import error_event
from pdserve.http.errors import HttpRefusal
from pdserve.http.response_events import GAP, MAX_EVENT_BYTES, RunningResponse
from pdserve.http.response_store import CANCEL_PATH, ITEMS_PATH, RESPONSE_PATH, Recording, ResponseStore
from pdserve.router.http import REQUEST_ID, json_response, refused
from pdserve.router.proxy.attempts import WRITE_S
from pdserve.router.proxy.dispatch import EVENT_STREAM
from pdserve.router.workers.outcome import Outcome, WorkerStream

_LAST_EVENTS = (b"event: response.completed\n", b"event: response.incomplete\n")
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
        while (end := self._read.find(GAP, start)) >= 0:
            event = bytes(self._read[:end])
            del self._read[: end + len(GAP)]
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
    """The store, and the handlers of the paths of one response.

    `keys`: the router's API keys. `timeout_s`: most seconds of a stream.
    """

    def __init__(self, store: ResponseStore, keys: Keys, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.store = store
        self.background = BackgroundResponses(store)
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

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Return a response, or the events of one of the background (OpenAI)."""
        try:
            events = self.store.events(request.match_info["response_id"], self._owner(request), request.query)
        except RequestError as error:
            return refused(HttpRefusal.of(error))
        if events is None:
            return self._answer(request, self.store.get)
        return await self._stream(request, events, asyncio.get_running_loop().time() + self._timeout_s)

    async def show(self, request: web.Request, running: RunningResponse, deadline: float) -> web.StreamResponse:
        """Return a response that runs in the background, or its events if its request streams."""
        if running.events is None:
            return json_response(running.response)
        return await self._stream(request, running.events.read(-1), deadline + WRITE_S)

    async def delete(self, request: web.Request) -> web.Response:
        """Delete a response (OpenAI)."""
        return self._answer(request, self.background.delete)

    async def cancel(self, request: web.Request) -> web.Response:
        """Cancel a response that runs in the background (OpenAI)."""
        return self._answer(request, self.background.cancel)

    async def input_items(self, request: web.Request) -> web.Response:
        """Return the items of a stored response's conversation (OpenAI)."""
        return self._answer(request, lambda name, owner: self.store.input_items(name, owner, request.query))

    async def _stream(
        self, request: web.Request, events: AsyncGenerator[bytes, None], deadline: float
    ) -> web.StreamResponse:
        """Send events until the last one. A client that stops reading is disconnected at `deadline`."""
        response = web.StreamResponse(headers={"Content-Type": EVENT_STREAM, "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            async with asyncio.timeout_at(deadline), contextlib.aclosing(events):
                try:
                    async for event in events:
                        await response.write(event)
                except RequestError as error:
                    await response.write(error_event(request.path, HttpRefusal.of(error).body, request[REQUEST_ID]))
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        return response

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
