"""Access control of a server: API keys, limits per client, cross-origin requests, security headers.

`app` installs the middleware. With an API key every path needs it except `PUBLIC`: as in SGLang, probes and Prometheus
send no key, and these paths reveal nothing about requests. `COMMANDS` need the admin key if one is set. A valid proof
of the control token replaces both keys. With `--require-control-proof` only the proof counts. An invalid proof is
refused on every path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.base.clients import COMMANDS, ClientLimit, client_address
from pdserve.base.http_rules import (
    BODY_TIMEOUT_S,
    BodyBudget,
    BodyHold,
    HttpRefusal,
    error_object,
    framing_refusal,
    page_refusal,
)
from pdserve.base.proof import PROOF_HEADER
from pdserve.base.session_proof import CHALLENGE_PATH
from pdserve.config.access_group import AccessConfig
from pdserve.errors import ProofError, RequestError
from pdserve.server.http import control_proof
from pdserve.server.http.control_proof import ControlProof
from pdserve.server.http.json_http import BODIES, error_response, json_response
from pdserve.server.http.request_context import CLIENT_OF_SCOPE, GENERATING

PUBLIC = frozenset({"/health", "/health_generate", "/ready", "/readiness", "/metrics"})
OPEN = PUBLIC | {CHALLENGE_PATH}
SECURITY_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
"""Responses contain the data of one client: browsers must not sniff their type, proxies must not store them."""
PREFLIGHT_S = 600


def install(app: FastAPI, config: AccessConfig, max_body_bytes: int, proof: ControlProof) -> None:
    """Add the access middleware outside all middleware that `app` has so far."""
    app.add_middleware(AccessMiddleware, config=config, bodies=BodyBudget(max_body_bytes), proof=proof)
    if config.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.origins,
            allow_methods=["GET", "POST", "PUT"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
            max_age=PREFLIGHT_S,
        )


class _StrangerError(Exception):
    """A request without valid credentials; carries the refusal and its headers."""

    def __init__(self, refusal: HttpRefusal, headers: Mapping[str, str]) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.headers = headers


class AccessMiddleware:
    """ASGI middleware: refuses unauthorized requests, and requests beyond a client's limit."""

    def __init__(self, app: ASGIApp, config: AccessConfig, bodies: BodyBudget, proof: ControlProof) -> None:
        self._app = app
        self._bodies = bodies
        self._proof = proof
        self._keys = config.keys
        self._proxies = config.proxies
        self._origins = config.origins
        self._limit = ClientLimit(config.max_concurrent_requests_per_client)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        framing = framing_refusal(scope["headers"], len(scope["raw_path"]) + len(scope["query_string"]))
        if framing is not None:
            await _refused(framing, {"Connection": "close"})(scope, receive, marked)
            return
        path, command = scope["path"], scope["path"] in COMMANDS
        try:
            digest = self._digest(scope, headers)
        except _StrangerError as error:
            await _refused(error.refusal, error.headers)(scope, receive, marked)
            return
        has_keys = self._keys.some or self._proof.required or digest is not None
        page = page_refusal(scope["method"], headers, self._origins, command=command, has_keys=has_keys)
        if page is not None:
            await _refused(page)(scope, receive, marked)
            return
        if digest is not None:
            receive = control_proof.signed(receive, digest)
        hold = self._bodies.open()
        scope[BODIES] = self._bodies
        scope[CLIENT_OF_SCOPE] = client = self._client(scope, headers)
        try:
            if path in GENERATING:
                await self._limited(scope, _counted(receive, hold), marked, client)
            else:
                await self._app(scope, _counted(receive, hold), marked)
        finally:
            hold.close()

    def _digest(self, scope: Scope, headers: Headers) -> bytes | None:
        """Authenticate a request. Return the digest that its signed body must have; None for a request without a proof.

        Raises:
            _StrangerError: the request is not authorized.
        """
        path, given = scope["path"], headers.get(PROOF_HEADER)
        if given is not None:
            try:
                return self._proof.check(scope, given)
            except ProofError as error:
                raise _StrangerError(*control_proof.refusal(error)) from error
        if path in OPEN:
            return None
        if self._proof.required:
            raise _StrangerError(*control_proof.refusal(None))
        if not self._keys.may(headers.get("authorization"), command=path in COMMANDS):
            text = "this path needs a valid API key as Authorization: Bearer KEY"
            raise _StrangerError(HttpRefusal(401, text, "invalid_api_key"), {"WWW-Authenticate": "Bearer"})
        return None

    async def _limited(self, scope: Scope, receive: Receive, send: Send, client: str) -> None:
        try:
            place = self._limit.take(client)
        except RequestError as error:
            await error_response(error)(scope, receive, send)
            return
        with place:
            await self._app(scope, receive, send)

    def _client(self, scope: Scope, headers: Headers) -> str:
        """Return the client that a request is counted for; see `pdserve.base.clients`."""
        key = self._keys.find(headers.get("authorization"))
        if key is not None and not self._proxies:
            return f"key {key}"
        peer = scope["client"]
        forwarded = headers.getlist("x-forwarded-for")
        return "unknown" if peer is None else client_address(peer[0], forwarded, self._proxies)


def _refused(refusal: HttpRefusal, headers: Mapping[str, str] | None = None) -> Response:
    body = error_object(refusal.message, refusal.status, code=refusal.code)
    return json_response(body, status=refusal.status, headers=headers)


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
            text = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
            raise RequestError(text, status=408, code="body_timeout") from error
        is_whole = not message.get("more_body", False)
        hold.add(len(message.get("body", b"")))
        return message

    return counted
