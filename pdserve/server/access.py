"""Who may ask a server what: keys, limits per client, pages of other origins, headers. Put on the application by `app`.

With a key everything needs it but `PUBLIC`: as in SGLang these are for probes and Prometheus, which have none, and
tell nothing of requests. `COMMANDS` need the admin key where there is one.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.base.clients import ClientLimit, client_address
from pdserve.base.error_object import error_object
from pdserve.base.keys import COMMANDS
from pdserve.base.origins import from_elsewhere
from pdserve.config.access_group import AccessConfig
from pdserve.errors import RequestError
from pdserve.server.calls import GENERATING
from pdserve.server.errors_http import error_response
from pdserve.server.json_http import json_response

PUBLIC = frozenset({"/health", "/health_generate", "/ready", "/readiness", "/metrics"})
SECURITY_HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
"""Answers are data of one client: no browser shall guess at them, nobody between shall keep them."""
PREFLIGHT_S = 600
ELSEWHERE = "web pages of other origins may not do this; --cors-allowed-origins names those that may"


def install(app: FastAPI, config: AccessConfig) -> None:
    """Put the rules around all that `app` has so far."""
    app.add_middleware(AccessMiddleware, config=config)
    if config.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.origins,
            allow_methods=["GET", "POST", "PUT"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
            max_age=PREFLIGHT_S,
        )


class AccessMiddleware:
    """ASGI: refuses who may not ask, and who asks too much at a time."""

    def __init__(self, app: ASGIApp, config: AccessConfig) -> None:
        self._app = app
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

        path, headers = scope["path"], Headers(scope=scope)
        if path not in PUBLIC and not self._keys.may(headers.get("authorization"), command=path in COMMANDS):
            text = "this needs a valid API key as Authorization: Bearer KEY"
            body = error_object(text, 401, code="invalid_api_key")
            await json_response(body, status=401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, marked)
        elif path in COMMANDS and not self._keys.some and from_elsewhere(headers, self._origins):
            body = error_object(ELSEWHERE, 403, code="origin_not_allowed")
            await json_response(body, status=403)(scope, receive, marked)
        elif path not in GENERATING:
            await self._app(scope, receive, marked)
        else:
            await self._limited(scope, receive, marked, self._client(scope, headers))

    async def _limited(self, scope: Scope, receive: Receive, send: Send, client: str) -> None:
        try:
            place = self._limit.take(client)
        except RequestError as error:
            await error_response(error)(scope, receive, send)
            return
        with place:
            await self._app(scope, receive, send)

    def _client(self, scope: Scope, headers: Headers) -> str:
        """Whose request this is: see `pdserve.base.clients`."""
        key = self._keys.find(headers.get("authorization"))
        if key is not None and not self._proxies:
            return f"key {key}"
        peer = scope["client"]
        forwarded = headers.getlist("x-forwarded-for")
        return "unknown" if peer is None else client_address(peer[0], forwarded, self._proxies)
