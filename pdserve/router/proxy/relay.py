"""Sends outcomes to the client. Called by `app`; owns the client's response, but not the worker's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from pdserve.router.http.errors import RETRY_AFTER, error_body, error_response
from pdserve.router.proxy.dispatch import Outcome
from pdserve.router.workers.admission import Refused
from pdserve.router.workers.outcome import (
    WORKER_FAILED,
    ConnectionFailed,
    ContinuedStream,
    EndedError,
    WorkerResponse,
    WorkerStream,
    describe,
)


async def relay(request: web.Request, outcome: Outcome, deadline: float) -> web.StreamResponse:
    """Send the outcome to the client; `deadline` is in the event loop's time."""
    match outcome:
        case WorkerStream():
            return await _relay_live(request, outcome, deadline)
        case WorkerResponse():
            return web.Response(status=outcome.status, headers=outcome.headers, body=outcome.body)
        case ConnectionFailed():
            spec = outcome.worker.spec
            if outcome.out_of_descriptors:
                text = "the router has no free file descriptor for a connection to a worker; try again"
                return error_response(503, text, "router_busy", RETRY_AFTER)
            text = f"the {spec.role} worker {spec.url} gave no answer: {outcome.message}"
            return error_response(502, text, "worker_unreachable", RETRY_AFTER)
        case Refused():
            return refusal(outcome)


def refusal(refused: Refused) -> web.Response:
    """Return the error response for a request that was sent to no worker."""
    after = {"Retry-After": str(refused.retry_after_s)} if refused.status == 503 else None
    return error_response(refused.status, refused.message, refused.reason, after)


async def _relay_live(request: web.Request, live: WorkerStream, deadline: float) -> web.StreamResponse:
    """Relay decode's answer chunk by chunk; a client that stops reading is disconnected at the deadline."""
    response = web.StreamResponse(status=live.response.status, headers=live.headers)
    await response.prepare(request)
    tail = b""
    pieces = _pieces(live, deadline) if live.stream is None else _continued(live, live.stream, deadline)
    try:
        async for piece in pieces:
            if piece and not await _write(request, response, piece, deadline):
                return response
            tail = (tail + piece)[-2:]
    except EndedError as error:
        await _end_broken(request, response, tail, error)
    else:
        await response.write_eof()
    return response


async def _pieces(live: WorkerStream, deadline: float) -> AsyncIterator[bytes]:
    """Yield the client's pieces of an answer, which may be empty. Raises EndedError if the answer is incomplete."""
    chunk = live.first
    while chunk:
        yield chunk if live.change is None else live.change(chunk, False)
        chunk = await _next_chunk(live, deadline)
    if live.change is not None:
        yield live.change(b"", True)


async def _continued(live: WorkerStream, stream: ContinuedStream, deadline: float) -> AsyncIterator[bytes]:
    """Yield the pieces of a stream that another pair continues if its worker dies; otherwise like `_pieces`."""
    chunk = live.first
    while True:
        try:
            while chunk:
                yield stream.feed(chunk)
                if stream.failure is not None:
                    raise stream.failure
                chunk = await _next_chunk(live, deadline)
            yield stream.end()
            return
        except EndedError as error:
            ending = stream.ending
            again = await _go_on(stream, error, deadline) if ending is None else None
            if again is not None:
                live, chunk = again, again.first
                continue
            if ending is None and not stream.error_event:
                raise
            ending = stream.error_event if ending is None else ending
        yield ending
        return


async def _go_on(stream: ContinuedStream, error: EndedError, deadline: float) -> WorkerStream | None:
    try:
        async with asyncio.timeout_at(deadline):
            return await stream.go_on(error)
    except TimeoutError:
        return None


async def _write(request: web.Request, response: web.StreamResponse, chunk: bytes, deadline: float) -> bool:
    """Write a chunk; False if the client did not read it before the deadline, and its connection was closed."""
    try:
        async with asyncio.timeout_at(deadline):
            await response.write(chunk)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        return False
    return True


async def _next_chunk(live: WorkerStream, deadline: float) -> bytes:
    """Return the next bytes, empty at the end. Raises EndedError on a failure or at the deadline."""
    try:
        async with asyncio.timeout_at(deadline):
            return await live.response.content.readany()
    except TimeoutError:
        text = "the request took longer than the router's --request-timeout-secs"
        raise EndedError(text, 502, WORKER_FAILED) from None
    except EndedError:
        raise
    except (aiohttp.ClientError, OSError) as error:
        text = f"the decode worker's answer ended early: {describe(error)}"
        raise EndedError(text, 502, WORKER_FAILED) from error


async def _end_broken(request: web.Request, response: web.StreamResponse, tail: bytes, why: EndedError) -> None:
    """End an incomplete answer: with an error event in a stream, otherwise by closing the connection."""
    if response.content_type == "text/event-stream" and response.content_length is None:
        gap = b"" if tail.endswith(b"\n\n") else b"\n\n"
        await response.write(gap + b"data: " + error_body(why.status, why.message, why.code) + b"\n\n")
        await response.write_eof()
    elif request.transport is not None:
        request.transport.close()
