"""The HTTP call that the running task serves. A middleware sets it; the engine client and `GrammarCheck` read it.

A request's sequences are submitted deep inside its endpoint. Statistics and tracing need the call's arrival time, path
and trace. A context variable carries them without a parameter in every endpoint.
"""

from __future__ import annotations

import contextvars
import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.http.access import GENERATING
from pdserve.observe.tracing import CallSpan

REQUEST_ID_HEADER = b"x-request-id"
CLIENT_OF_SCOPE = "pdserve.client"
"""Key in the ASGI scope of the client's name; set by `access`."""
MAX_REQUEST_ID_BYTES = 256
"""Longer request ids are cut to this length."""


@dataclasses.dataclass(frozen=True, slots=True)
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
    """The client, as `access` names clients."""

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
    """ASGI middleware: records each generating call. `open_span`: opens a span per call; None: no tracing."""

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
