"""The outermost middleware of a server: the request id of each call for log lines, and the access log.

The id is the `X-Request-Id` header, which a router sends to both servers of a pair; a call without one gets a new id.
"""

from __future__ import annotations

import time
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.base.log import request_context
from pdserve.config.access_group import AccessConfig
from pdserve.http.access import client_address
from pdserve.http.access_log import CLIENT_GONE, log_access
from pdserve.server.http.middleware import request_id_of


class RequestIdMiddleware:
    """ASGI middleware: sets the request id of the task, and with `logs_access` logs each call at its end."""

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
        with request_context(request_id):
            if self._logs_access:
                await self._logged(scope, receive, send, request_id)
            else:
                await self._app(scope, receive, send)

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
