"""The ASGI middlewares of a server, in the order in which a request passes them. `app` installs them.

    RequestIdMiddleware ─> HttpMetricsMiddleware ─> ErrorFormMiddleware ─> AccessMiddleware
        ─> DrainGateMiddleware (`drain_gate`) ─> CallMiddleware

`RequestIdMiddleware` sets the request id for log lines: the `X-Request-Id` header, which a router sends to both servers
of a pair, or a new id. `AccessMiddleware` applies `http.access.AccessRules` and proofs of the control token
(`control_proof`). With an API key every path needs it except `PUBLIC`: as in SGLang, probes and Prometheus send no key,
and these paths reveal nothing about requests. `COMMANDS` need the admin key if one is set. Without an API key a control
token closes the same paths: they need a proof.

A request's sequences are submitted deep inside its endpoint. Statistics and tracing need the call's arrival time, path
and trace. A context variable carries them without a parameter in every endpoint. The engine client and `GrammarCheck`
read it. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.base.log import current_request_id, request_context
from pdserve.base.proof import PROOF_HEADER
from pdserve.config.access_group import AccessConfig, ProofRule
from pdserve.errors import ProofError, RequestError
from pdserve.http.access import (
    BODY_TIMEOUT_S,
    COMMANDS,
    NO_SNIFF,
    NO_STORE,
    RESTORE_PATH,
    WEIGHT_VERSION_HEADER,
    AccessRules,
    BodyHold,
    Cors,
    body_timeout,
    client_address,
    framing_refusal,
)
from pdserve.http.credentials import authorization_of
from pdserve.http.error_forms import ANTHROPIC_REQUEST_ID, converted_error, is_converted
from pdserve.http.errors import HttpRefusal
from pdserve.http.page_files import is_page_path
from pdserve.http.session_proof import CHALLENGE_PATH
from pdserve.observe.http_calls import CLIENT_GONE, HttpMetrics, log_access, routing_key_of
from pdserve.observe.tracing import CallSpan
from pdserve.server.http.control_proof import ControlProof, proof_refusal, signed
from pdserve.server.http.json_http import BODIES, CLIENT_SLOT, GENERATES, REQUEST_ID, refused

PUBLIC = frozenset({"/health", "/health_generate", "/ping", "/ready", "/readiness", "/metrics"})
OPEN = PUBLIC | {CHALLENGE_PATH}
CORS_METHODS = ("GET", "POST", "PUT", "DELETE")
SECURITY_HEADERS = dict((NO_SNIFF, NO_STORE))


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return path in OPEN or is_page_path(path)


def install(app: FastAPI, config: AccessConfig, max_body_bytes: int, proof: ControlProof) -> None:
    """Add the access middleware outside all middleware that `app` has so far."""
    most = config.max_concurrent_requests_per_client
    cors = Cors(config.origins, CORS_METHODS)
    rules = AccessRules(config.keys, cors, config.proxies, most, max_body_bytes)
    app.add_middleware(AccessMiddleware, rules=rules, proof=proof)


class AccessMiddleware:
    """ASGI middleware: refuses unauthorized requests, and requests beyond a client's limit."""

    def __init__(self, app: ASGIApp, rules: AccessRules, proof: ControlProof) -> None:
        self._app = app
        self._rules = rules
        self._proof = proof

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        headers = Headers(scope=scope)

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = SECURITY_HEADERS | self._rules.cors.response_headers(headers.get("origin"))
                MutableHeaders(scope=message).update(added)
            await send(message)

        framing = framing_refusal(scope["headers"], len(scope["raw_path"]) + len(scope["query_string"]))
        if framing is not None:
            await refused(framing)(scope, receive, marked)
            return
        preflight = self._rules.cors.preflight_answer(scope["method"], headers)
        if preflight is not None:
            await Response(status_code=204, headers=preflight)(scope, receive, marked)
            return
        refusal, digest = self._check(scope, headers)
        if refusal is not None:
            await refused(refusal)(scope, receive, marked)
            return
        if digest is not None:
            receive = signed(receive, digest)
        scope[BODIES] = self._rules.bodies
        authorization, forwarded_for = authorization_of(headers), headers.getlist("x-forwarded-for")
        peer = None if scope["client"] is None else scope["client"][0]
        scope[CLIENT_OF_SCOPE] = client = self._rules.client(authorization, peer, forwarded_for)
        hold = self._rules.bodies.open()
        if scope["path"] == RESTORE_PATH:  # the endpoint bounds its bodies, which are larger than others
            await self._limited(scope, receive, marked, client)
            return
        try:
            if scope["path"] in GENERATES:
                await self._limited(scope, _counted(receive, hold), marked, client)
            else:
                await self._app(scope, _counted(receive, hold), marked)
        finally:
            hold.close()

    def _check(self, scope: Scope, headers: Headers) -> tuple[HttpRefusal | None, bytes | None]:
        """Return the refusal of a request, None if it is allowed, and the digest that its signed body must have."""
        path, command, public = scope["path"], scope["path"] in COMMANDS, is_open(scope["path"])
        stranger, digest = self._authenticate(scope, headers, command=command)
        if stranger is not None:
            return stranger, None
        proven = digest is not None or (self._proof.rule is not ProofRule.OPTIONAL and not public)
        page = self._rules.page_refusal(scope["method"], path, headers, command=command, public=public, proven=proven)
        return page, digest

    def _authenticate(
        self, scope: Scope, headers: Headers, *, command: bool
    ) -> tuple[HttpRefusal | None, bytes | None]:
        """Check proof or key of a request; return values as of `_check`."""
        given = headers.get(PROOF_HEADER)
        if given is not None:
            try:
                return None, self._proof.check(scope, given)
            except ProofError as error:
                return proof_refusal(error), None
        if is_open(scope["path"]):
            return None, None
        authorization = authorization_of(headers)
        if self._proof.rule is ProofRule.OPTIONAL:
            return self._rules.key_refusal(authorization, command=command), None
        if self._proof.rule is ProofRule.UNLESS_KEY and self._rules.keys.find(authorization) is not None:
            return None, None
        return self._proof.missing(), None

    async def _limited(self, scope: Scope, receive: Receive, send: Send, client: str) -> None:
        try:
            slot = self._rules.take_client_slot(client)
        except RequestError as error:
            await refused(HttpRefusal.of(error))(scope, receive, send)
            return
        with contextlib.ExitStack() as held:
            held.enter_context(slot)
            scope[CLIENT_SLOT] = held
            await self._app(scope, receive, send)


def _counted(receive: Receive, hold: BodyHold) -> Receive:
    """Wrap `receive`: the body must be complete within `BODY_TIMEOUT_S` and fit into the body budget."""
    deadline = asyncio.get_running_loop().time() + BODY_TIMEOUT_S
    is_whole = False

    async def counted() -> Message:
        nonlocal is_whole
        if is_whole:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError as error:
            raise body_timeout() from error
        is_whole = not message.get("more_body", False)
        hold.add(len(message.get("body", b"")))
        return message

    return counted


REQUEST_ID_HEADER = b"x-request-id"
_PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
CLIENT_OF_SCOPE = "pdserve.client"
"""Key in the ASGI scope of the client's name; set by `AccessMiddleware`."""
MAX_REQUEST_ID_BYTES = 256
"""Longer request ids are cut to this length."""


@dataclasses.dataclass(slots=True)
class HttpCall:
    """One HTTP call. `arrived_at` is Unix time in seconds, `arrived_s` is monotonic time in seconds.

    `request_id` is the `X-Request-Id` header (routers send it), None without one. `span` is None if the call is not
    traced.
    """

    path: str
    arrived_at: float
    arrived_s: float
    request_id: str | None
    span: CallSpan | None
    client: str = ""
    """The client, as `AccessRules.client` names it."""
    routing_key: str | None = None
    weight_version: str | None = None
    """Name of the version of the weights that compute the call; None before the first output. `Generation` sets it."""

    @property
    def traceparent(self) -> str | None:
        """W3C `traceparent` of the call's span; None if the call is not traced."""
        return None if self.span is None else self.span.traceparent


_CURRENT: contextvars.ContextVar[HttpCall | None] = contextvars.ContextVar("http_call", default=None)

OpenSpan = Callable[[str, dict[str, str]], AbstractContextManager[CallSpan]]
"""Maps path and headers (lower case) to a span that lasts as long as the `with` block."""


def current_call() -> HttpCall | None:
    """Return the call that this task serves; None outside of a generating call, as for health probes."""
    return _CURRENT.get()


class CallMiddleware:
    """ASGI middleware: records each generating call, and names the version of the weights in a header of its response.

    `open_span`: opens a span per call; None: no tracing.
    """

    def __init__(self, app: ASGIApp, open_span: OpenSpan | None) -> None:
        self._app = app
        self._open_span = open_span

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["path"] not in GENERATES:
            await self._app(scope, receive, send)
            return
        if self._open_span is None:
            await self._run(_arrived(scope, None), scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        with self._open_span(scope["path"], headers) as span:

            async def watched(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.answered(message["status"])
                await send(message)

            await self._run(_arrived(scope, span), scope, receive, watched)

    async def _run(self, call: HttpCall, scope: Scope, receive: Receive, send: Send) -> None:
        async def versioned(message: Message) -> None:
            if message["type"] == "http.response.start" and call.weight_version:
                MutableHeaders(scope=message)[WEIGHT_VERSION_HEADER] = header_text(call.weight_version)
            await send(message)

        token = _CURRENT.set(call)
        try:
            await self._app(scope, receive, versioned)
        finally:
            _CURRENT.reset(token)


def header_text(text: str) -> str:
    """Return `text` as the value of a header: other than printable ASCII, and `%`, are percent-encoded as UTF-8."""
    return quote(text, safe=_PRINTABLE)


def request_id_of(scope: Scope) -> str | None:
    """Return the `X-Request-Id` of a call; None without one."""
    given = next((value for name, value in scope["headers"] if name.lower() == REQUEST_ID_HEADER), b"")
    return given[:MAX_REQUEST_ID_BYTES].decode("latin-1") or None


def _arrived(scope: Scope, span: CallSpan | None) -> HttpCall:
    client, key = scope.get(CLIENT_OF_SCOPE, ""), routing_key_of(scope["headers"])
    return HttpCall(scope["path"], time.time(), time.monotonic(), request_id_of(scope), span, client, key)


class ErrorFormMiddleware:
    """ASGI middleware: converts errors of all inner layers on the paths of Anthropic's and Ollama's APIs to their form.

    It also adds the request id to the headers of all responses there.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or not is_converted(scope["path"]):
            await self._app(scope, receive, send)
            return
        request_id = current_request_id() or ""
        failed: Message | None = None
        parts: list[bytes] = []

        async def converted(message: Message) -> None:
            nonlocal failed
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[ANTHROPIC_REQUEST_ID] = request_id
                if message["status"] >= 400:
                    failed = message
                    return
            elif failed is not None:
                parts.append(message.get("body", b""))
                if message.get("more_body", False):
                    return
                body = converted_error(scope["path"], b"".join(parts), request_id)
                MutableHeaders(scope=failed)["content-length"] = str(len(body))
                await send(failed)
                message = {"type": "http.response.body", "body": body}
            await send(message)

        await self._app(scope, receive, converted)


class HttpMetricsMiddleware:
    """ASGI middleware: counts the calls of known paths. `app` installs it outside of all others but
    `RequestIdMiddleware`.
    """

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        endpoint, method, key = scope["path"], scope["method"], routing_key_of(scope["headers"])

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.answered(endpoint, method, message["status"])
            await send(message)

        self._metrics.began(endpoint, method, key)
        try:
            await self._app(scope, receive, watched)
        finally:
            self._metrics.ended(endpoint, method, key)


class RequestIdMiddleware:
    """ASGI middleware: sets the request id of task and response, and with `logs_access` logs each call at its end."""

    def __init__(self, app: ASGIApp, config: AccessConfig, *, logs_access: bool) -> None:
        self._app = app
        self._proxies = config.proxies
        self._logs_access = logs_access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope) or f"req-{uuid.uuid4().hex}"
        scope[REQUEST_ID] = request_id
        header = (REQUEST_ID_HEADER, request_id.encode("latin-1", errors="replace"))

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        with request_context(request_id):
            if self._logs_access:
                await self._logged(scope, receive, marked, request_id)
            else:
                await self._app(scope, receive, marked)

    async def _logged(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        began_s = time.monotonic()
        status: int | None = None
        complete = False

        async def watched(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        failed = 500
        try:
            await self._app(scope, receive, watched)
            failed = CLIENT_GONE  # the application has sent no answer
        finally:
            log_access(
                client=self._client(scope),
                method=scope["method"],
                path=scope["path"],
                status=failed if status is None else status,
                seconds=time.monotonic() - began_s,
                request_id=request_id,
                complete=complete or status is None,
            )

    def _client(self, scope: Scope) -> str:
        if scope["client"] is None:
            return "unknown"
        return client_address(scope["client"][0], Headers(scope=scope).getlist("x-forwarded-for"), self._proxies)
