"""Relays the outcome of a request to its client, or a worker's stream to a function. Called by `generate`.

Owns the client's response, but not the worker's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import aiohttp
import orjson
from aiohttp import web

from pdserve.http.background_responses import Take
from pdserve.http.error_forms import error_event
from pdserve.http.errors import HttpRefusal
from pdserve.observe.history import CallMeter
from pdserve.protocol.failure import Failure
from pdserve.router.http import REQUEST_ID, RETRY_AFTER, error_response, refused
from pdserve.router.workers.outcome import (
    ConnectionFailed,
    ContinuedStream,
    EndedError,
    Outcome,
    WorkerResponse,
    WorkerStream,
    describe,
    worker_failed,
)


async def relay(
    request: web.Request,
    outcome: Outcome,
    deadline: float,
    meter: CallMeter,
    see: Callable[[bytes], None] | None = None,
) -> web.StreamResponse:
    """Send the outcome to the client; `deadline` is in the event loop's time. `see` gets each piece of
    a stream before the client.
    """
    if not isinstance(outcome, Failure):
        meter.name = outcome.worker.spec.url
    if isinstance(outcome, WorkerStream):
        return await _relay_stream(request, outcome, deadline, meter, see)
    return whole_answer(outcome)


def whole_answer(outcome: WorkerResponse | ConnectionFailed | Failure) -> web.Response:
    """Return the response to a request whose outcome is no stream."""
    match outcome:
        case WorkerResponse():
            return web.Response(status=outcome.status, headers=outcome.headers, body=outcome.body)
        case ConnectionFailed():
            spec = outcome.worker.spec
            if outcome.out_of_descriptors:
                text = "the router has no free file descriptor for a connection to a worker; try again"
                return error_response(503, text, "router_busy", RETRY_AFTER)
            text = f"the {spec.role} worker {spec.url} gave no answer: {outcome.message}"
            return error_response(502, text, "worker_unreachable", RETRY_AFTER)
        case Failure():
            return failure_response(outcome)


def failure_response(failure: Failure) -> web.Response:
    """Return the error response for a request that the router refuses or ends itself."""
    return refused(HttpRefusal.of(failure.error()))


async def _relay_stream(
    request: web.Request,
    upstream: WorkerStream,
    deadline: float,
    meter: CallMeter,
    see: Callable[[bytes], None] | None,
) -> web.StreamResponse:
    """Relay decode's answer chunk by chunk; a client that stops reading is disconnected at the deadline."""
    response = web.StreamResponse(status=upstream.response.status, headers=upstream.headers)
    await response.prepare(request)
    client = _ClientWriter(response, see)
    measured = meter if response.content_type in _ENDS else None
    try:
        if upstream.stream is None:
            await pass_on(upstream, client, deadline, measured)
        else:
            async for piece in _continued(upstream, upstream.stream, deadline, meter):
                async with asyncio.timeout_at(deadline):
                    await client.write(piece)
    except EndedError as error:
        meter.broke(orjson.dumps(HttpRefusal.of(error.failure.error()).body))
        await _end_broken(request, response, client.tail, error.failure)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    else:
        await response.write_eof()
    return response


class _PieceWriter(Protocol):
    """What `pass_on` writes pieces to."""

    @property
    def waits(self) -> bool:
        """Whether a write has begun and not ended."""

    async def write(self, piece: bytes) -> None:
        """Write a piece, which may be empty."""


class TakingWriter:
    """Gives the pieces to a function."""

    waits = False

    def __init__(self, take: Take) -> None:
        self._take = take

    async def write(self, piece: bytes) -> None:
        """See `_PieceWriter`."""
        self._take(piece)


class _ClientWriter:
    """Writes pieces to a client. `tail`: the last two bytes; `waits`: a write has begun and not ended."""

    __slots__ = ("_response", "_see", "tail", "waits")

    def __init__(self, response: web.StreamResponse, see: Callable[[bytes], None] | None) -> None:
        self._response = response
        self._see = see
        self.tail = b""
        self.waits = False

    async def write(self, piece: bytes) -> None:
        """Write a piece, which may be empty; waits while the client does not read."""
        if piece:
            if self._see is not None:
                self._see(piece)
            self.waits = True
            await self._response.write(piece)
            self.waits = False
            self.tail = (self.tail + piece[-2:])[-2:]


async def pass_on(upstream: WorkerStream, client: _PieceWriter, deadline: float, meter: CallMeter | None) -> None:
    """Write an answer, with one timer for all its pieces. `meter` None: it is no stream of events.

    Raises:
        EndedError: the answer is incomplete, also at the deadline.
        TimeoutError: the client did not read its answer before the deadline.
    """
    change = upstream.change
    now = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout_at(deadline):
            chunk = upstream.first
            while chunk:
                if meter is not None:
                    meter.piece(chunk, now())
                await client.write(chunk if change is None else change(chunk, False))
                chunk = await _read(upstream)
            if change is not None:
                await client.write(change(b"", True))
    except TimeoutError:
        if client.waits:
            raise
        raise late_error() from None


async def _continued(
    upstream: WorkerStream, stream: ContinuedStream, deadline: float, meter: CallMeter
) -> AsyncIterator[bytes]:
    """Yield the pieces of a stream that another pair continues if its worker dies; some may be empty.

    Raises:
        EndedError: the answer is incomplete, and no other pair continues it.
    """
    chunk = upstream.first
    now = asyncio.get_running_loop().time
    while True:
        try:
            while chunk:
                meter.piece(chunk, now())
                yield stream.feed(chunk)
                if stream.failure is not None:
                    raise EndedError(stream.failure)
                chunk = await _next_chunk(upstream, deadline)
            yield stream.end()
            return
        except EndedError as error:
            ending = stream.ending
            again = await _go_on(stream, error.failure, deadline) if ending is None else None
            if again is not None:
                upstream, chunk = again, again.first
                meter.mended()
                meter.name = again.worker.spec.url
                continue
            if ending is None and not stream.error_event:
                raise
            meter.mended()
            if ending is None:
                meter.broke(stream.error_event)
            ending = stream.error_event if ending is None else ending
        yield ending
        return


async def _go_on(stream: ContinuedStream, failure: Failure, deadline: float) -> WorkerStream | None:
    try:
        async with asyncio.timeout_at(deadline):
            return await stream.go_on(failure)
    except TimeoutError:
        return None


async def _next_chunk(upstream: WorkerStream, deadline: float) -> bytes:
    """Return the next bytes, empty at the end. Raises EndedError on a failure or at the deadline."""
    try:
        async with asyncio.timeout_at(deadline):
            return await _read(upstream)
    except TimeoutError:
        raise late_error() from None


def late_error() -> EndedError:
    return worker_failed("the request took longer than the router's --request-timeout-secs")


async def _read(upstream: WorkerStream) -> bytes:
    """Return the next bytes, empty at the end. Raises EndedError on a failure."""
    try:
        return await upstream.response.content.readany()
    except EndedError:
        raise
    except (aiohttp.ClientError, OSError) as error:
        raise worker_failed(f"the decode worker's answer ended early: {describe(error)}") from error


_ENDS = {"text/event-stream": b"\n\n", "application/x-ndjson": b"\n"}
"""The last bytes of an event, by the content type of a stream."""


async def _end_broken(request: web.Request, response: web.StreamResponse, tail: bytes, failure: Failure) -> None:
    """End an incomplete answer: with an error event in a stream, otherwise by closing the connection."""
    if response.content_type in _ENDS and response.content_length is None:
        end = _ENDS[response.content_type]
        gap = b"" if tail.endswith(end) else end
        await response.write(gap + error_event(request.path, HttpRefusal.of(failure.error()).body, request[REQUEST_ID]))
        await response.write_eof()
    elif request.transport is not None:
        request.transport.close()
