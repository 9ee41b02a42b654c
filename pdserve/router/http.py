"""The router's HTTP layer: its own responses, and the checks of every request.

`Access` is the aiohttp middleware around `http.access.AccessRules`, with CORS and request ids: one middleware and one
signal, installed by `app`. Errors have OpenAI's form. Used by every file with handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping

import orjson
from aiohttp import web

from pdserve.base.log import request_context
from pdserve.errors import RequestError
from pdserve.http.access import (
    BODY_TIMEOUT_S,
    CHANGING,
    COMMANDS,
    GENERATING,
    LARGE_BODY_BYTES,
    NO_SNIFF,
    NO_STORE,
    TOO_MANY_VALUES,
    AccessRules,
    BodyBudget,
    BodyHold,
    Cors,
    body_timeout,
    client_address,
    framing_refusal,
    has_dots,
    has_too_many_values,
)
from pdserve.http.credentials import authorization_of
from pdserve.http.error_forms import ANTHROPIC_REQUEST_ID, converted_error, is_converted
from pdserve.http.errors import HttpRefusal
from pdserve.http.page_files import is_page_path
from pdserve.observe.http_calls import CLIENT_GONE, log_access
from pdserve.observe.tracing import CallSpan, Tracing
from pdserve.router.config.config import RouterAccessConfig

RETRY_AFTER = {"Retry-After": "1"}
NO_HEADERS: Mapping[str, str] = {}


def error_response(
    status: int, message: str, code: str, headers: Mapping[str, str] | None = None, *, param: str | None = None
) -> web.Response:
    """Return an error response of the router itself."""
    return refused(HttpRefusal(status, message, code, headers or NO_HEADERS, param))


def refused(refusal: HttpRefusal) -> web.Response:
    """Return the response to a refused request."""
    return json_response(refusal.body, refusal.status, refusal.headers)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a response with `value` as JSON."""
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json", headers=headers)


@dataclasses.dataclass(frozen=True)
class CallTrace:
    """Tracing context of a request on its way through the dispatcher."""

    tracing: Tracing
    span: CallSpan

    @contextlib.contextmanager
    def half(self, role: str, url: str) -> Iterator[Mapping[str, str]]:
        """Open a span for a call to a worker; yields headers that make the worker's spans its children.

        The span of decode ends with its first bytes.
        """
        with self.tracing.outgoing(role, self.span) as span:
            span.note(server__address=url)
            yield span.headers


@contextlib.contextmanager
def half_of(trace: CallTrace | None, role: str, url: str) -> Iterator[Mapping[str, str]]:
    """Call `CallTrace.half`; without tracing yield no headers, so that the client's trace headers stay unchanged."""
    if trace is None:
        yield NO_HEADERS
    else:
        with trace.half(role, url) as headers:
            yield headers


PUBLIC_PATHS = frozenset({"/health", "/readiness", "/ready", "/liveness", "/ping", "/metrics", "/engine_metrics"})
"""Paths for probes and Prometheus, which need no key; their answers contain no data of requests."""

ADMIN_PATHS = COMMANDS | {"/add_worker", "/remove_worker"}
KINDS = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
CORS_METHODS = ("GET", "POST", "PUT", "DELETE")
REQUEST_ID_HEADER = "X-Request-Id"
REQUEST_ID = web.RequestKey("request_id", str)
BODY = web.RequestKey("body", bytes)
"""The complete body of the request."""
CLIENT_SLOT = web.RequestKey("client_slot", contextlib.ExitStack)
"""The place of a generating request in its client's limit. Work that goes on behind the response takes it over."""
SAFE_ID = re.compile(r"[\x21-\x7e]{1,256}")
_LOG = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Access:
    """The access rules of one router."""

    def __init__(self, config: RouterAccessConfig, max_body_bytes: int, *, logs_access: bool = False) -> None:
        self._config = config
        self._logs_access = logs_access
        self._max_body_bytes = max_body_bytes
        most = config.max_concurrent_requests_per_client
        cors = Cors(config.cors_allowed_origins, CORS_METHODS)
        self._rules = AccessRules(config.keys, cors, config.proxies, most, max_body_bytes)

    @property
    def bodies(self) -> BodyBudget:
        """The budget of all request bodies."""
        return self._rules.bodies

    def install(self, app: web.Application) -> None:
        """Install the rules on an application."""

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            request[REQUEST_ID] = request_id(request.headers, self._config.request_id_headers)
            with request_context(request[REQUEST_ID]):
                try:
                    if self._logs_access:
                        return await self._logged(request, handler)
                    return await self._answer(request, handler)
                except ConnectionError:
                    if request.transport is not None and not request.transport.is_closing():
                        raise
                    raise asyncio.CancelledError from None  # the client left; aiohttp logs any other exception

        app.middlewares.append(check)
        app.on_response_prepare.append(self._mark)

    async def _logged(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Like `_check`; logs the request at its end."""
        began_s = time.monotonic()
        status = CLIENT_GONE
        try:
            response = await self._answer(request, handler)
            status = response.status
            return response
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:
            status = 500
            raise
        finally:
            forwarded_for = request.headers.getall("X-Forwarded-For", [])
            log_access(
                client=client_address(request.remote or "unknown", forwarded_for, self._config.proxies),
                method=request.method,
                path=request.path,
                status=status,
                seconds=time.monotonic() - began_s,
                request_id=request[REQUEST_ID],
            )

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Like `_check`; an error is converted to the form of the API at the request's path."""
        response = await self._check(request, handler)
        if is_converted(request.path) and response.status >= 400 and isinstance(response, web.Response):
            body = response.body if isinstance(response.body, bytes) else b""
            response.body = converted_error(request.path, body, request[REQUEST_ID])
            response.headers.pop("Content-Length", None)  # a worker's, of its body
        return response

    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        framing = framing_refusal(request.raw_headers, len(request.raw_path))
        if framing is not None:
            response = refused(framing)
            response.force_close()
            return response
        preflight = self._rules.cors.preflight_answer(request.method, request.headers)
        if preflight is not None:
            return web.Response(status=204, headers=preflight)
        if has_dots(request.raw_path):
            return error_response(404, f"{request.method}: paths with . or .. segments are not accepted", "not_found")
        command = is_admin(request.method, request.path)
        public = is_public(request.path)
        refusal = self._rules.key_refusal(authorization_of(request.headers), command=command)
        if refusal is None or public:
            refusal = self._rules.page_refusal(
                request.method, request.path, request.headers, command=command, public=public
            )
        if refusal is not None:
            return refused(refusal)
        hold = self._rules.bodies.open()
        try:
            return await self._with_body(request, handler, hold)
        finally:
            hold.close()

    async def _with_body(self, request: web.Request, handler: Handler, hold: BodyHold) -> web.StreamResponse:
        """Read the body into `request[BODY]`, then call the handler."""
        request[BODY] = b""
        if request.method in CHANGING:
            try:
                if request.content.is_eof():  # the whole body is buffered: no deadline is needed
                    request[BODY] = self._take(request, hold)
                else:
                    async with asyncio.timeout(BODY_TIMEOUT_S):
                        request[BODY] = await self._read(request, hold)
            except TimeoutError:
                return refused(HttpRefusal.of(body_timeout()))
            except RequestError as error:
                return refused(HttpRefusal.of(error))
            if await self._has_too_many_values(request[BODY]):
                return error_response(400, TOO_MANY_VALUES, "invalid_request")
        return await self._handled(request, handler)

    async def _has_too_many_values(self, body: bytes) -> bool:
        """See `has_too_many_values`; large bodies take turns."""
        if len(body) <= LARGE_BODY_BYTES:
            return has_too_many_values(body)
        async with self.bodies.turn(len(body)):
            return has_too_many_values(body)

    def _take(self, request: web.Request, hold: BodyHold) -> bytes:
        """Return a body that has arrived completely."""
        data = request.content.read_nowait()
        self._check_size(len(data))
        hold.add(len(data))
        return data

    async def _read(self, request: web.Request, hold: BodyHold) -> bytes:
        self._check_size(request.content_length or 0)
        parts: list[bytes] = []
        size = 0
        async for part in request.content.iter_any():
            size += len(part)
            self._check_size(size)
            hold.add(len(part))
            parts.append(part)
        return b"".join(parts)

    def _check_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            message = f"the body is larger than {self._max_body_bytes} bytes"
            raise RequestError(message, status=413, code="request_too_large")

    async def _handled(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await self._limited(request, handler)
        except web.HTTPException as error:
            allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
            kind = KINDS.get(error.status, "invalid_request")
            return error_response(error.status, f"{request.method} {request.path}: {error.reason}", kind, allowed)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            if request.path in GENERATING:
                raise  # its answer may have begun; the connection is closed
            _LOG.exception("%s %s", request.method, request.path)
            return error_response(500, f"internal error: {type(error).__name__}", "internal_error")

    async def _limited(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Call the handler; a generating request counts toward the client's limit."""
        if request.path not in GENERATING:
            return await handler(request)
        try:
            headers = request.headers
            forwarded_for = headers.getall("X-Forwarded-For", [])
            client = self._rules.client(authorization_of(headers), request.remote, forwarded_for)
            slot = self._rules.take_client_slot(client)
        except RequestError as error:
            return refused(HttpRefusal.of(error))
        with contextlib.ExitStack() as held:
            held.enter_context(slot)
            request[CLIENT_SLOT] = held
            return await handler(request)

    async def _mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add headers to every response; called just before its headers are sent."""
        headers = response.headers
        headers["Server"] = "pdserve"
        headers.setdefault(*NO_SNIFF)
        if not is_public(request.path):
            headers.setdefault(*NO_STORE)
        if REQUEST_ID in request:
            headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
            if is_converted(request.path):
                headers[ANTHROPIC_REQUEST_ID] = request[REQUEST_ID]
        headers.update(self._rules.cors.response_headers(request.headers.get("Origin")))


def is_public(path: str) -> bool:
    """Whether a path needs no key."""
    return path in PUBLIC_PATHS or path == "/" or is_page_path(path)


def is_admin(method: str, path: str) -> bool:
    """Whether a request needs the admin key: a path of `ADMIN_PATHS`, or a change of workers."""
    return path in ADMIN_PATHS or (path.startswith("/workers") and method not in ("GET", "HEAD"))


def request_id(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the id in the first of the headers `names` with a valid one; else a new id."""
    for name in names:
        given = headers.get(name)
        if given is not None and SAFE_ID.fullmatch(given):
            return given
    return f"req-{uuid.uuid4().hex}"
