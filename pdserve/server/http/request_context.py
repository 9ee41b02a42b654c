"""Which HTTP call the running task works for, and when it arrived. Set by a middleware, read by the engine client.

A request's sequences are submitted deep inside its endpoint; who tells of them wants to know when the call came, on
which path, and as part of which trace. A context variable says so without passing through every endpoint.
"""

from __future__ import annotations

import contextvars
import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.observe.tracing import CallSpan

GENERATING = frozenset({"/generate", "/v1/chat/completions", "/v1/completions", "/v1/responses"})
"""Paths whose calls are told of."""
REQUEST_ID_HEADER = b"x-request-id"
CLIENT_OF_SCOPE = "pdserve.client"
"""Where `access` leaves who asks."""
MAX_REQUEST_ID_BYTES = 256
"""What is told of a longer one."""


@dataclasses.dataclass(frozen=True, slots=True)
class HttpCall:
    """One HTTP call: its path, when it arrived (wall time, monotonic), its `X-Request-Id` (which routers send), and its
    span where it is traced.
    """

    path: str
    arrived_at: float
    arrived_s: float
    request_id: str | None
    span: CallSpan | None
    client: str = ""
    """Who asks, as `access` knows clients."""

    @property
    def traceparent(self) -> str | None:
        """Of its span."""
        return None if self.span is None else self.span.traceparent


_CURRENT: contextvars.ContextVar[HttpCall | None] = contextvars.ContextVar("http_call", default=None)

OpenSpan = Callable[[str, dict[str, str]], AbstractContextManager[CallSpan]]
"""From path and headers (lower case) to a span that lasts as long as the block."""


def current_call() -> HttpCall | None:
    """The call that this task works for; None outside of one, as for health probes."""
    return _CURRENT.get()


class CallMiddleware:
    """ASGI: notes each generating call; `open_span` where calls are traced."""

    def __init__(self, app: ASGIApp, open_span: OpenSpan | None) -> None:
        self._app = app
        self._open_span = open_span

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["path"] not in GENERATING:
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
        token = _CURRENT.set(call)
        try:
            await self._app(scope, receive, send)
        finally:
            _CURRENT.reset(token)


def _arrived(scope: Scope, span: CallSpan | None) -> HttpCall:
    given = next((value for name, value in scope["headers"] if name.lower() == REQUEST_ID_HEADER), b"")
    request_id = given[:MAX_REQUEST_ID_BYTES].decode("latin-1") or None
    return HttpCall(scope["path"], time.time(), time.monotonic(), request_id, span, scope.get(CLIENT_OF_SCOPE, ""))
