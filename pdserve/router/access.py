"""What holds for every request to the router: its id, who may ask (keys), and from which pages (CORS).

One middleware and one signal, put on the application by `app`.
"""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from pdserve.router.config import AccessConfig
from pdserve.router.errors_http import error_response

PUBLIC_PATHS = frozenset({"/health", "/readiness", "/liveness", "/metrics"})
"""Asked by probes and Prometheus, which have no key; they tell nothing of requests."""

ADMIN_PATHS = frozenset(
    {
        "/flush_cache",
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
        "/start_profile",
        "/stop_profile",
        "/add_worker",
        "/remove_worker",
    }
)
KINDS = {404: "not_found", 405: "method_not_allowed"}
REQUEST_ID_HEADER = "X-Request-Id"
REQUEST_ID = web.RequestKey("request_id", str)
SAFE_ID = re.compile(r"[\x21-\x7e]{1,256}")
PREFLIGHT_SECONDS = "600"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Access:
    """The rules of one router."""

    def __init__(self, config: AccessConfig) -> None:
        self._config = config

    def install(self, app: web.Application) -> None:
        """Put the rules on an application."""

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._check(request, handler)

        app.middlewares.append(check)
        app.on_response_prepare.append(self._mark)

    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = request_id(request.headers, self._config.request_id_headers)
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            return self._preflight(request)
        if not self._may(request):
            headers = {"WWW-Authenticate": "Bearer"}
            return error_response(
                401, "this needs a valid API key as Authorization: Bearer KEY", "unauthorized", headers
            )
        try:
            return await handler(request)
        except web.HTTPException as error:
            allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
            return error_response(
                error.status, f"{request.method} {request.path}: {error.reason}", "not_found", allowed
            )

    def _may(self, request: web.Request) -> bool:
        if request.path in PUBLIC_PATHS:
            return True
        keys = [self._config.admin_api_key] if is_admin(request.method, request.path) else []
        keys = [key for key in keys if key is not None] or [self._config.api_key, self._config.admin_api_key]
        if self._config.api_key is None and keys[0] is None:
            return True
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        known = [key.encode() for key in keys if key is not None]
        return kind.lower() == "bearer" and any(hmac.compare_digest(given.strip().encode(), key) for key in known)

    def _preflight(self, request: web.Request) -> web.Response:
        """The browser asks whether it may; `_mark` says from where."""
        headers = {}
        if self._allows(request):
            headers = {
                "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE",
                "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "*"),
                "Access-Control-Max-Age": PREFLIGHT_SECONDS,
            }
        return web.Response(status=204, headers=headers)

    def _allows(self, request: web.Request) -> bool:
        origins = self._config.cors_allowed_origins
        return "*" in origins or request.headers.get("Origin") in origins

    async def _mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Called for every answer just before its headers are sent."""
        if REQUEST_ID in request:
            response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
        if self._config.cors_allowed_origins and "Origin" in request.headers:
            response.headers["Vary"] = "Origin"
            if self._allows(request):
                response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
                response.headers["Access-Control-Expose-Headers"] = REQUEST_ID_HEADER


def is_admin(method: str, path: str) -> bool:
    """Whether a request changes what others see."""
    return path in ADMIN_PATHS or (path.startswith("/workers") and method not in ("GET", "HEAD"))


def request_id(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    """The id in the first of these headers that has one; else a new one."""
    found = next((headers[name] for name in names if SAFE_ID.fullmatch(headers.get(name, ""))), None)
    return found or f"req-{uuid.uuid4().hex}"
