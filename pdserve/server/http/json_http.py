"""Bodies of requests and responses: bounded JSON, errors that name the field, server-sent events. For all endpoints.

A stream's status is sent with its first event, so a request that the scheduler refuses still gets its own status. A
disconnect cancels the work at once, even while nothing is being sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from pdserve.base.log import current_request_id
from pdserve.base.stream_state import DONE
from pdserve.errors import PdserveError, RequestError
from pdserve.http.access import CONTINUING, GENERATING, TOO_MANY_VALUES, BodyBudget, has_too_many_values
from pdserve.http.error_forms import ANTHROPIC_PATHS, ANTHROPIC_REQUEST_ID, converted_error, error_event
from pdserve.http.errors import HttpRefusal, error_object
from pdserve.http.errors import convert as convert
from pdserve.server.generation import Generation, GenerationUpdate


def refused(refusal: HttpRefusal) -> Response:
    """Build the response to a refused request."""
    return json_response(refusal.body, status=refusal.status, headers=refusal.headers)


def error_response(error: PdserveError) -> Response:
    """Build the response to a request that failed before its first byte; sets `Retry-After` (seconds) if known."""
    return refused(HttpRefusal.of(error))


async def _on_pdserve_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, PdserveError)
    return error_response(error)


async def _on_http_exception(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = error_object(str(error.detail), error.status_code)
    return json_response(body, status=error.status_code, headers=dict(error.headers or {}))


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answer in the form of the API at the path: this handler runs outside of all middleware."""
    body = orjson.dumps(error_object(f"internal error: {type(error).__name__}", 500, code="internal_error"))
    request_id = request.scope.get(REQUEST_ID)
    data = converted_error(request.url.path, body, request_id)
    headers = None if request_id is None else {"x-request-id": request_id, ANTHROPIC_REQUEST_ID: request_id}
    return Response(data, status_code=500, media_type="application/json", headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Install handlers that answer every error as an OpenAI error object."""
    app.add_exception_handler(PdserveError, _on_pdserve_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)


T = TypeVar("T")
log = logging.getLogger(__name__)

GENERATES = frozenset((*GENERATING, *CONTINUING))
"""Paths of a server whose calls compute requests."""
SHALLOW = 200
"""A body with at most this many brackets cannot be nested too deeply."""
PARSED_BODY = "pdserve.parsed_body"
"""Key in a request's ASGI scope of its body, if `read_json_object` has read and `server/pairing` changed it."""
CLIENT_SLOT = "pdserve.client_slot"
"""Key in the ASGI scope of a generating call of an `ExitStack` with its place in the client's limit; set by
`AccessMiddleware`. Work that goes on behind the response takes it over."""
REQUEST_ID = "pdserve.request_id"
"""Key in a request's ASGI scope of its id; set by `RequestIdMiddleware`."""
BODIES = "pdserve.bodies"
"""Key in a request's ASGI scope of the application's `BodyBudget`; set by `AccessMiddleware`."""
EXPLAINED_BYTES = 1 << 20
"""Larger bodies are not parsed again to accept `NaN`: Python's own parser takes many times as long."""


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Build a JSON response."""
    data = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    return Response(data, status_code=status, headers=headers, media_type="application/json")


async def read_body(request: Request, max_bytes: int, flag: str = "--max-request-bytes") -> list[bytes]:
    """Read the whole body, in parts. `flag` sets `max_bytes`.

    Raises:
        RequestError: 413 as soon as it is known to be larger than `max_bytes`.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes, flag)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes, flag)
        parts.append(part)
    return parts


def _too_large(max_bytes: int, flag: str) -> RequestError:
    text = f"request body is larger than {max_bytes} bytes ({flag})"
    return RequestError(text, status=413, code="request_too_large")


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """Read the body as a JSON object. `NaN` and `Infinity` are accepted here, so that the field's check can name them.

    Raises:
        RequestError: 400 for malformed JSON or another type than an object, 413 when too large.
    """
    given: dict[str, Any] | None = request.scope.get(PARSED_BODY)
    if given is not None:
        return dict(given)
    parts = await read_body(request, max_bytes)
    bodies: BodyBudget = request.scope[BODIES]
    async with bodies.turn(sum(map(len, parts))):
        data = b"".join(parts)
        await asyncio.sleep(0)
        if has_too_many_values(data):
            raise RequestError(TOO_MANY_VALUES, code="invalid_json")
        await asyncio.sleep(0)
        value = _parse(data)
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, got {type(value).__name__}", code="invalid_json")
    return value


def _parse(data: bytes) -> Any:
    try:
        value = orjson.loads(data)
        if data.count(b"[") + data.count(b"{") > SHALLOW:
            orjson.dumps(value)  # fails on more than 254 levels, which could not be serialized again later
        return value
    except orjson.JSONEncodeError as error:
        del value  # the traceback keeps this frame
        raise RequestError("the body is nested too deeply", code="invalid_json") from error
    except orjson.JSONDecodeError as error:
        malformed = RequestError(f"the body is not valid JSON: {error}", code="invalid_json")
    if len(data) > EXPLAINED_BYTES:
        raise malformed
    try:
        value = json.loads(data)
        orjson.dumps(value)  # fails on lone surrogates, which tokenizers and sockets do not accept
    except (ValueError, RecursionError, TypeError) as error:
        raise malformed from error
    return value


def refuse_unsupported(body: dict[str, Any], names: Iterable[str], *, prefix: str = "") -> dict[str, Any]:
    """Return `body` without the fields `names`, which pdserve does not support.

    Raises:
        RequestError: 400 naming the field, if one of them is set (not null, false, 0 or empty).
    """
    refused = set(names)
    for name in sorted(refused & body.keys()):
        if body[name]:
            field = f"{prefix}.{name}" if prefix else name
            raise RequestError(f"{field} is not supported by this server", field=field, code="unsupported")
    return {name: value for name, value in body.items() if name not in refused}


def scalar_or_list(value: Any, count: int, field: str, kinds: type | tuple[type, ...]) -> list[Any]:
    """Expand a field that is given once for all prompts, or as a list with one entry per prompt.

    Raises:
        RequestError: 400 naming `field`, for a wrong type or a list of another length than `count`.
    """
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise RequestError(f"{field} has {len(values)} entries for {count} prompts", field=field)
    for entry in values:
        wrong_bool = isinstance(entry, bool) and kinds is not bool
        if entry is not None and (wrong_bool or not isinstance(entry, kinds)):
            raise RequestError(f"{field} has the wrong type: {type(entry).__name__}", field=field)
    return values


EVENTS = "text/event-stream"


class ClientGoneError(Exception):
    """The client closed its connection before the response was ready."""


def event(value: Any) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"


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


async def collect(generation: Generation, count: int, before: GenerationUpdate | None = None) -> list[GenerationUpdate]:
    """Read a generation to its end and merge each of its `count` sequences into one update.

    `before`: the output of an earlier try of the only sequence, which its update begins with; None: there is none.
    """
    whole = [GenerationUpdate(index) for index in range(count)]
    if before is not None:
        assert count == 1
        whole = [before]
    first = dataclasses.replace(whole[0])
    async with generation:
        async for update in generation:
            whole[update.index].absorb(update)
    if before is not None and before.token_ids:
        before.take_cached(first)
    return whole


async def first_event(events: AsyncGenerator[bytes, None]) -> bytes:
    """Return the first of `events`, or raise its error; empty where there is none, as behind the last event."""
    return await anext(events, b"")


async def stream_response(
    request: Request, events: AsyncGenerator[bytes, None], *, done: bytes = DONE, media_type: str = EVENTS
) -> Response:
    """Build the response that streams `events`, started once the first event is available; earlier errors are raised.

    `events` owns its generation and closes it when it ends or is closed. `done` is the last event.
    """
    return EventStream(await until_disconnect(request, first_event(events)), events, done=done, media_type=media_type)


class EventStream(Response):
    """Server-sent events; closes their source when the client disconnects. `done` is the last event."""

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], *, done: bytes = DONE, media_type: str = EVENTS
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache"}, media_type=media_type)
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._done = done
        self._path = ""

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a response that is not sent. Raises PdserveError: the stream failed."""
        async with contextlib.aclosing(self._events):
            yield self._first
            async for data in self._events:
                yield data

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: send the events, watching for the client's disconnect."""
        self._path = scope["path"]
        pump = asyncio.create_task(self._pump(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pump.cancel()
            gone.cancel()
            await asyncio.gather(pump, gone, return_exceptions=True)
            await self._events.aclose()

    def _failed(self, error: PdserveError) -> bytes:
        """Return the events that end the stream after `error`."""
        last = b"" if self._path in ANTHROPIC_PATHS else self._done
        return error_event(self._path, HttpRefusal.of(error).body, current_request_id()) + last

    async def _pump(self, send: Send) -> None:
        async def body(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await body(self._first)
        last = self._done
        try:
            async for data in self._events:
                await body(data)
        except PdserveError as error:
            last = self._failed(error)
        except OSError:
            return  # the client has disconnected
        except Exception:
            log.exception("a stream failed")
            last = self._failed(PdserveError("internal error"))
        await body(last, more=False)
