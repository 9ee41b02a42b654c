"""Serves the generating paths: parses the body, has the dispatcher answer it, and relays the outcome to the client.

    GenerateHandler.handle ─> parse_object ─> Dispatcher.answer ─> relay

Made by `app`. Owns the client's response, but not the worker's.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from pdserve.base.stream_state import RESUME_FIELD
from pdserve.errors import RequestError
from pdserve.http.access import LARGE_BODY_BYTES, BodyBudget
from pdserve.http.error_forms import error_event
from pdserve.http.errors import MAX_MESSAGE_CHARS, HttpRefusal
from pdserve.observe.history import CallMeter, FailedCall, History
from pdserve.observe.interval_stats import RouterStats
from pdserve.observe.tracing import Tracing
from pdserve.protocol.failure import Failure
from pdserve.router.config.config import RouterConfig
from pdserve.router.http import BODY, REQUEST_ID, REQUEST_ID_HEADER, RETRY_AFTER, CallTrace, error_response, refused
from pdserve.router.proxy.attempts import SHUTTING_DOWN, Drain
from pdserve.router.proxy.dispatch import Dispatcher, ProxiedCall
from pdserve.router.proxy.stored_responses import StoredResponses, recorded
from pdserve.router.workers.admission import Admission
from pdserve.router.workers.metrics import RouterMetrics
from pdserve.router.workers.outcome import (
    ConnectionFailed,
    ContinuedStream,
    EndedError,
    Outcome,
    WorkerResponse,
    WorkerStream,
    describe,
    error_of,
    forwarded_headers,
    worker_failed,
)

CLIENT_GONE = "499"
EXPLAINED_BYTES = 1 << 20
"""Longer bodies are not parsed again to name the invalid field."""
SHALLOW = 200
"""A body with at most this many brackets is not nested too deeply to be serialized again."""


def parse_object(data: bytes) -> tuple[dict[str, Any], bytes | None]:
    """Return the JSON object in `data` without the field that only the router may set, and for large bodies its JSON.

    That JSON is `data`, if the object is as it was sent, and is surely not nested too deeply.

    Raises:
        RequestError: 400, `data` is not JSON, or no object.
        orjson.JSONEncodeError: a large body is nested too deeply.
    """
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestError(explain_not_json(data, error), code="invalid_request") from error
    if not isinstance(body, dict):
        message = f"the body must be a JSON object, got {type(body).__name__}"
        raise RequestError(message, code="invalid_request")
    num_fields = len(body)
    body.pop(RESUME_FIELD, None)
    if len(data) <= LARGE_BODY_BYTES:
        return body, None
    is_shallow = data.count(b"[") + data.count(b"{") <= SHALLOW
    return body, data if is_shallow and len(body) == num_fields else orjson.dumps(body)


def explain_not_json(data: bytes, error: orjson.JSONDecodeError) -> str:
    """Return the error text for `data`; it names the field with NaN or Infinity, which Python clients may send."""
    try:
        field = _non_finite(json.loads(data)) if len(data) <= EXPLAINED_BYTES else None
    except (ValueError, RecursionError):
        field = None
    return f"the body is not JSON: {error}" if field is None else f"{field} must be a finite number"


def _non_finite(value: object, name: str = "the body") -> str | None:
    """Return the name of the first field in `value` that is NaN or infinite; None without one."""
    if isinstance(value, float):
        return None if math.isfinite(value) else name
    items = value.items() if isinstance(value, dict) else [(name, v) for v in value] if isinstance(value, list) else ()
    return next((found for key, item in items if (found := _non_finite(item, key)) is not None), None)


class GenerateHandler:
    """The handler of the generating paths; one per app. `tracing` None: requests are not traced."""

    def __init__(
        self,
        config: RouterConfig,
        dispatcher: Dispatcher,
        admission: Admission,
        metrics: RouterMetrics,
        stats: RouterStats,
        history: History,
        bodies: BodyBudget,
        drain: Drain,
        tracing: Tracing | None,
        responses: StoredResponses,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._admission = admission
        self._metrics = metrics
        self._stats = stats
        self._history = history
        self._bodies = bodies
        self._drain = drain
        self._tracing = tracing
        self._responses = responses

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Generate: send the request to a pair and relay decode's answer."""
        begun = self._admission.now()
        if self._drain.closed:
            return self._refuse(request)
        self._stats.begun()
        meter = self._history.meter(begun)
        failed, response = True, None
        try:
            with self._drain.call():
                response = await self._traced(request, begun, meter)
            failed = response.status >= 500
        except (asyncio.CancelledError, ConnectionError):
            failed = False
            self._metrics.disconnects.inc()
            self._metrics.requests.labels(request.path, CLIENT_GONE).inc()
            raise
        finally:
            seconds = self._admission.now() - begun
            self._stats.ended(seconds, failed=failed)
            meter.ended(failed=failed)
            if failed or meter.is_broken:
                self._history.failures.append(_failed_call(request, response, meter, seconds))
        self._metrics.requests.labels(request.path, str(response.status)).inc()
        self._metrics.request_seconds.labels(request.path).observe(self._admission.now() - begun)
        return response

    def _refuse(self, request: web.Request) -> web.Response:
        response = failure_response(SHUTTING_DOWN)
        response.force_close()
        self._metrics.requests.labels(request.path, str(response.status)).inc()
        self._metrics.refused.labels(SHUTTING_DOWN.code).inc()
        return response

    async def _traced(self, request: web.Request, begun: float, meter: CallMeter) -> web.StreamResponse:
        """Handle the request, inside a span if tracing is enabled."""
        if self._tracing is None:
            return await self._generate(request, begun, meter, None)
        with self._tracing.call(request.path, request.headers) as span:
            response = await self._generate(request, begun, meter, CallTrace(self._tracing, span))
            span.answered(response.status)
            return response

    async def _generate(
        self, request: web.Request, begun: float, meter: CallMeter, trace: CallTrace | None
    ) -> web.StreamResponse:
        deadline = begun + self._config.request_timeout_s
        data = request[BODY]
        try:
            body, kept = parse_object(data) if len(data) <= LARGE_BODY_BYTES else await self._parse_large(data)
            body, kept, recording = self._responses.begin(request, body, kept)
            headers = forwarded_headers(request.headers, request.remote)
            headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
            routed = self._dispatcher.routed(request.path, body, headers)
            call = ProxiedCall(request.path, body, kept, headers, routed, deadline, trace)
            async with asyncio.timeout_at(deadline) as limit, self._dispatcher.answer(call) as outcome:
                limit.reschedule(None)
                if isinstance(outcome, WorkerStream) or (isinstance(outcome, WorkerResponse) and outcome.status < 400):
                    first_byte_s = self._admission.now() - begun
                    self._metrics.first_byte_seconds.labels(request.path).observe(first_byte_s)
                    self._stats.first_byte(first_byte_s)
                return await relay(request, recorded(outcome, recording), deadline, meter)
        except RequestError as error:
            return refused(HttpRefusal.of(error))
        except orjson.JSONEncodeError as error:
            return error_response(400, f"the body is nested too deeply: {error}", "invalid_request")
        except TimeoutError:
            text = f"no answer within the router's --request-timeout-secs of {self._config.request_timeout_s:g} s"
            return error_response(504, text, "timeout")

    async def _parse_large(self, data: bytes) -> tuple[dict[str, Any], bytes | None]:
        """Call `parse_object` when it is the body's turn."""
        async with self._bodies.turn(len(data)):
            return parse_object(data)


def _failed_call(
    request: web.Request, response: web.StreamResponse | None, meter: CallMeter, seconds: float
) -> FailedCall:
    """Describe a failed request. `response` None: an unexpected error of the router."""
    body = response.body if isinstance(response, web.Response) else meter.error_event
    error = ""
    if isinstance(body, bytes):
        event = body if body.startswith(b"{") else body.partition(b"data: ")[2]
        _, error = error_of(event.partition(b"\n")[0])
    return FailedCall(
        time=time.time(),
        path=request.path,
        id=request[REQUEST_ID],
        worker=meter.name,
        status=500 if response is None else response.status,
        error=error[:MAX_MESSAGE_CHARS] or ("the stream broke off" if meter.is_broken else "no error text"),
        seconds=seconds,
    )


async def relay(request: web.Request, outcome: Outcome, deadline: float, meter: CallMeter) -> web.StreamResponse:
    """Send the outcome to the client; `deadline` is in the event loop's time."""
    if not isinstance(outcome, Failure):
        meter.name = outcome.worker.spec.url
    match outcome:
        case WorkerStream():
            return await _relay_stream(request, outcome, deadline, meter)
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
    request: web.Request, upstream: WorkerStream, deadline: float, meter: CallMeter
) -> web.StreamResponse:
    """Relay decode's answer chunk by chunk; a client that stops reading is disconnected at the deadline."""
    response = web.StreamResponse(status=upstream.response.status, headers=upstream.headers)
    await response.prepare(request)
    client = _ClientWriter(response)
    measured = meter if response.content_type in _ENDS else None
    try:
        if upstream.stream is None:
            await _pass_on(upstream, client, deadline, measured)
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


class _ClientWriter:
    """Writes pieces to a client. `tail`: the last two bytes; `waits`: a write has begun and not ended."""

    __slots__ = ("_response", "tail", "waits")

    def __init__(self, response: web.StreamResponse) -> None:
        self._response = response
        self.tail = b""
        self.waits = False

    async def write(self, piece: bytes) -> None:
        """Write a piece, which may be empty; waits while the client does not read."""
        if piece:
            self.waits = True
            await self._response.write(piece)
            self.waits = False
            self.tail = (self.tail + piece[-2:])[-2:]


async def _pass_on(upstream: WorkerStream, client: _ClientWriter, deadline: float, meter: CallMeter | None) -> None:
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
        raise _late() from None


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
        raise _late() from None


def _late() -> EndedError:
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
