"""Long-running responses: server-sent events, and cancellation when the client disconnects.

A stream's status is sent with its first event, so a request that the scheduler refuses still gets its own status. A
disconnect cancels the work at once, even while nothing is being sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import orjson
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.errors import PdserveError
from pdserve.server.generation import Generation, GenerationUpdate
from pdserve.server.http.json_http import error_event

T = TypeVar("T")
log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client closed its connection before the response was ready."""


def event(value: Any) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it when the client of `request` disconnects. The body must have been read.

    Raises:
        ClientGoneError: the client disconnected.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def collect(generation: Generation, count: int) -> list[GenerationUpdate]:
    """Read a generation to its end and merge each of its `count` sequences into one update."""
    whole = [GenerationUpdate(index) for index in range(count)]
    async with generation:
        async for update in generation:
            whole[update.index].absorb(update)
    return whole


async def first_event(events: AsyncGenerator[bytes, None]) -> bytes:
    """Return the first of `events`, or raise its error."""
    return await anext(events)


async def stream_response(request: Request, events: AsyncGenerator[bytes, None]) -> Response:
    """Build the response that streams `events`, started once the first event is available; earlier errors are raised.

    `events` owns its generation and closes it when it ends or is closed.
    """
    return EventStream(await until_disconnect(request, first_event(events)), events)


class EventStream(Response):
    """Server-sent events; closes their source when the client disconnects. `done` is the last event."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], *, done: bytes = DONE) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: send the events, watching for the client's disconnect."""
        pump = asyncio.create_task(self._pump(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pump.cancel()
            gone.cancel()
            await asyncio.gather(pump, gone, return_exceptions=True)
            await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        async def body(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await body(self._first)
        try:
            async for data in self._events:
                await body(data)
        except PdserveError as error:
            await body(error_event(error))
        except OSError:
            return  # the client has disconnected
        except Exception:
            log.exception("a stream failed")
            await body(error_event(PdserveError("internal error")))
        await body(self._done, more=False)
