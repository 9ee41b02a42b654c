"""Serves the generating paths: parses the body, has the dispatcher answer it, and relays the outcome to the client.

    GenerateHandler.handle ─> parse_object ─> Dispatcher.answer ─> relay

A response of `/v1/responses` in the background is answered by a task, see `_read`. Made by `app`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import math
import time
from typing import Any

import orjson
from aiohttp import web

from pdserve.base.stream_state import RESUME_FIELD
from pdserve.errors import PdserveError, RequestError
from pdserve.http.access import LARGE_BODY_BYTES, RESPONSES_PATH, BodyBudget
from pdserve.http.background_responses import Take, is_background, worker_body
from pdserve.http.errors import MAX_MESSAGE_CHARS, HttpRefusal
from pdserve.http.response_events import RunningResponse
from pdserve.observe.history import CallMeter, FailedCall, History
from pdserve.observe.interval_stats import RouterStats
from pdserve.observe.tracing import Tracing
from pdserve.router.config.config import RouterConfig
from pdserve.router.http import BODY, CLIENT_SLOT, REQUEST_ID, REQUEST_ID_HEADER, CallTrace, error_response, refused
from pdserve.router.proxy.attempts import SHUTTING_DOWN, Drain
from pdserve.router.proxy.dispatch import Dispatcher, ProxiedCall
from pdserve.router.proxy.prompt_tokens import PromptTokenizer
from pdserve.router.proxy.relay import TakingWriter, failure_response, late_error, pass_on, relay, whole_answer
from pdserve.router.proxy.sessions import RouterSessions, attending, with_turn
from pdserve.router.proxy.stored_responses import StoredResponses, recorded
from pdserve.router.workers.admission import Admission
from pdserve.router.workers.metrics import RouterMetrics
from pdserve.router.workers.outcome import (
    WORKER_FAILED,
    EndedError,
    WorkerResponse,
    WorkerStream,
    error_of,
    forwarded_headers,
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
        message, field = explain_not_json(data, error)
        raise RequestError(message, field=field, code="invalid_request") from error
    if not isinstance(body, dict):
        message = f"the body must be a JSON object, got {type(body).__name__}"
        raise RequestError(message, code="invalid_request")
    num_fields = len(body)
    body.pop(RESUME_FIELD, None)
    if len(data) <= LARGE_BODY_BYTES:
        return body, None
    is_shallow = data.count(b"[") + data.count(b"{") <= SHALLOW
    return body, data if is_shallow and len(body) == num_fields else orjson.dumps(body)


def explain_not_json(data: bytes, error: orjson.JSONDecodeError) -> tuple[str, str | None]:
    """Return the error text for `data`, and the field with NaN or Infinity, which Python clients may send."""
    try:
        field = _non_finite(json.loads(data)) if len(data) <= EXPLAINED_BYTES else None
    except (ValueError, RecursionError):
        field = None
    return (f"the body is not JSON: {error}", None) if field is None else (f"{field} must be a finite number", field)


def _non_finite(value: object, name: str = "") -> str | None:
    """Return the path of the first field in `value` that is NaN or infinite, as in `options.seed`; None without one."""
    if isinstance(value, float):
        return None if math.isfinite(value) else name or "the body"
    items = [(name, item) for item in value] if isinstance(value, list) else ()
    if isinstance(value, dict):
        items = [(f"{name}.{key}" if name else key, item) for key, item in value.items()]
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
        sessions: RouterSessions,
        tokenizer: PromptTokenizer,
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
        self._sessions = sessions
        self._tokenizer = tokenizer

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
            if request.path == RESPONSES_PATH and is_background(body):
                call = self._call(request, worker_body(body), None, deadline, None)
                running = self._responses.background.begin(body, recording)
                read = functools.partial(self._read_all, call, request[REQUEST_ID], running)
                held = request[CLIENT_SLOT].pop_all()
                held.enter_context(self._drain.call())
                self._responses.background.start(running, read, held)
                return await self._responses.show(request, running, deadline)
            whole, turn = await self._sessions.begin(request, body)
            if turn is None:
                call = self._call(request, body, kept, deadline, trace)
            else:
                call = self._call(request, whole, None, deadline, trace, session=body, turn=turn.node.name)
            async with asyncio.timeout_at(deadline) as limit, contextlib.AsyncExitStack() as stack:
                stack.enter_context(attending(turn))
                if self._tokenizer.enabled:
                    routed = await self._tokenizer.tokenized(request, whole, call.routed)
                    call = dataclasses.replace(call, routed=routed)
                outcome = await stack.enter_async_context(self._dispatcher.answer(call))
                limit.reschedule(None)
                if isinstance(outcome, WorkerStream) or (isinstance(outcome, WorkerResponse) and outcome.status < 400):
                    first_byte_s = self._admission.now() - begun
                    self._metrics.first_byte_seconds.labels(request.path).observe(first_byte_s)
                    self._stats.first_byte(first_byte_s)
                outcome, reader = await with_turn(recorded(outcome, recording), turn, deadline)
                see = None if reader is None else reader.feed
                return await relay(request, outcome, deadline, meter, see)
        except RequestError as error:
            return refused(HttpRefusal.of(error))
        except orjson.JSONEncodeError as error:
            return error_response(400, f"the body is nested too deeply: {error}", "invalid_request")
        except TimeoutError:
            text = f"no answer within the router's --request-timeout-secs of {self._config.request_timeout_s:g} s"
            return error_response(504, text, "timeout")

    def _call(
        self,
        request: web.Request,
        body: dict[str, Any],
        data: bytes | None,
        deadline: float,
        trace: CallTrace | None,
        session: dict[str, Any] | None = None,
        turn: str | None = None,
    ) -> ProxiedCall:
        """Return the call with `body` for the workers. `session`: the client's body, if that names a session."""
        headers = forwarded_headers(request.headers, request.remote)
        headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
        routed = self._dispatcher.routed(request.path, body if session is None else session | body, headers)
        return ProxiedCall(request.path, body, data, headers, routed, deadline, trace, turn=turn)

    async def _read_all(self, call: ProxiedCall, request_id: str, running: RunningResponse, take: Take) -> None:
        """Call `_read`; again from the start if the decode worker dies, unless readers may have seen events.

        Raises:
            PdserveError: see `_read`.
        """
        for attempt in range(1, self._config.retry.max_tries + 1):
            try:
                await self._read(call, request_id, take)
                break
            except RequestError as error:
                is_last = attempt == self._config.retry.max_tries or self._admission.now() >= call.deadline
                if error.code != WORKER_FAILED or is_last or not running.restart():
                    raise

    async def _read(self, call: ProxiedCall, request_id: str, take: Take) -> None:
        """Have a call in the background answered, and give the pieces of its stream to `take`.

        Raises:
            PdserveError: it is refused, or its stream is incomplete.
        """
        begun = self._admission.now()
        meter = self._history.meter(begun)
        self._stats.begun()
        error: PdserveError | None = None
        try:
            async with asyncio.timeout_at(call.deadline) as limit, self._dispatcher.answer(call) as outcome:
                limit.reschedule(None)
                if not isinstance(outcome, WorkerStream):
                    answer = whole_answer(outcome)
                    code, message = error_of(answer.body if isinstance(answer.body, bytes) else b"")
                    text = message or f"a worker answered {answer.status}"
                    raise RequestError(text, status=answer.status, code=code or "failed")
                meter.name = outcome.worker.spec.url
                await pass_on(outcome, TakingWriter(take), call.deadline, meter)
        except EndedError as ended:
            error = ended.failure.error()
        except TimeoutError:
            error = late_error().failure.error()
        except PdserveError as refused_with:
            error = refused_with
        finally:
            status = 200 if error is None else HttpRefusal.of(error).status
            seconds = self._admission.now() - begun
            self._stats.ended(seconds, failed=status >= 500)
            meter.ended(failed=status >= 500)
            if status >= 500:
                text = str(error)[:MAX_MESSAGE_CHARS]
                failure = FailedCall(time.time(), call.path, request_id, meter.name, status, text, seconds)
                self._history.failures.append(failure)
        if error is not None:
            raise error

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
