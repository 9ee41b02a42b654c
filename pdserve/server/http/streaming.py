"""Answers that take a while: server-sent events, and waiting with an eye on the client.

A stream's status is sent with its first event, so that a request refused by the scheduler still gets its true status.
A client that goes away ends the work at once, even while nothing is being sent.
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
    """The client closed its connection before the answer was ready; nobody will read what is answered now."""


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client of `request` (whose body has been read) goes away.

    Raises:
        ClientGoneError: the client went away.
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
    """All of a generation's `count` sequences, each merged into one update."""
    whole = [GenerationUpdate(index) for index in range(count)]
    async with generation:
        async for update in generation:
            whole[update.index].absorb(update)
    return whole


async def first_event(events: AsyncGenerator[bytes, None]) -> bytes:
    """The first of `events`, or the error that came instead."""
    return await anext(events)


async def stream_response(request: Request, events: AsyncGenerator[bytes, None]) -> Response:
    """A stream of `events`, begun once the first of them is there; errors before that are raised.

    `events` owns its generation and closes it when it ends or is closed.
    """
    return EventStream(await until_disconnect(request, first_event(events)), events)


class EventStream(Response):
    """Server-sent events; stops and closes their source when the client goes away. `done` ends the stream."""

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
            return  # the client is gone
        except Exception:
            log.exception("a stream failed")
            await body(error_event(PdserveError("internal error")))
        await body(self._done, more=False)
