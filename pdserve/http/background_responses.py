"""Responses of `/v1/responses` with `background`: the tasks that read their workers' streams, and their end.

    begin ── the body for the worker, always a stream ──> start ── task: pieces ──> ResponseStore.feed
    the stream ends, fails, or `cancel` ──> ResponseStore.settle: stored like any other response

A server and a router have one object each. A client that leaves ends nothing. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from pdserve.errors import PdserveError, RequestError
from pdserve.http.errors import HttpRefusal
from pdserve.http.response_events import RunningResponse
from pdserve.http.response_store import Recording, ResponseStore

log = logging.getLogger(__name__)
FIELD = "background"
Take = Callable[[bytes], None]
Read = Callable[[Take], Awaitable[None]]
"""Reads a worker's whole stream, and gives its pieces to the function. Raises PdserveError: the worker refuses it."""


def is_background(body: Mapping[str, Any]) -> bool:
    """Whether a body asks for a response in the background. Values of another type are the worker's to refuse."""
    return body.get(FIELD) is True


def worker_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body for the worker of a response in the background: a stream that ends with its connection."""
    return {**body, FIELD: False, "stream": True}


class BackgroundResponses:
    """The responses that run in the background. `store` has their objects and events."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def begin(self, body: Mapping[str, Any], recording: Recording | None) -> RunningResponse:
        """Add the response of `body` to the store, queued; call `start` for it at once.

        Raises:
            RequestError: 400 naming `background`: it is not stored; 400: the body is nested too deeply; 503: see
                `ResponseStore.run`.
        """
        if recording is None:
            raise not_stored()
        try:
            running = recording.running(body)
        except orjson.JSONEncodeError as error:
            raise RequestError(f"the body is nested too deeply: {error}", code="invalid_request") from error
        self._store.run(running)
        return running

    def start(self, running: RunningResponse, read: Read, held: contextlib.ExitStack) -> None:
        """Start the task of a response; `held` is closed at its end: what a call holds, such as its client's slot."""
        task = asyncio.create_task(self._run(running, read))
        self._tasks[running.id] = task

        def ended(_: asyncio.Task[None]) -> None:
            del self._tasks[running.id]
            with held:
                running.fail("the server shut down before the response had ended", 503)  # if the task was cancelled
                self._store.settle(running)

        task.add_done_callback(ended)

    def cancel(self, response_id: str, owner: str) -> dict[str, Any]:
        """Cancel a response and return it; one of the background that has ended is returned as it is.

        Raises:
            RequestError: see `ResponseStore.cancel`.
        """
        self._end(response_id, owner)
        return self._store.cancel(response_id, owner)

    def delete(self, response_id: str, owner: str) -> dict[str, Any]:
        """Cancel a response if it runs, and delete it. Raises RequestError: see `ResponseStore.delete`."""
        self._end(response_id, owner)
        return self._store.delete(response_id, owner)

    async def close(self) -> None:
        """End all responses that run: the process shuts down."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, response_id: str, owner: str) -> None:
        running = self._store.running(response_id, owner)
        if running is not None:
            running.cancel()
            self._store.settle(running)
            self._tasks[running.id].cancel()

    async def _run(self, running: RunningResponse, read: Read) -> None:
        try:
            await read(functools.partial(self._store.feed, running))
            running.fail("the worker's stream ended before its last event", 502)
        except PdserveError as error:
            refusal = HttpRefusal.of(error)
            field = error.field if isinstance(error, RequestError) else None
            running.fail(refusal.body["message"], refusal.status, field)
        except Exception as error:
            log.exception("the response %s in the background failed", running.id)
            running.fail(f"internal error: {type(error).__name__}")


def not_stored() -> RequestError:
    """Return the error of a body with `background` whose response is not stored."""
    message = f"{FIELD} needs a stored response: a server or router that stores them, and not store: false"
    return RequestError(message, field=FIELD, code="unsupported")
