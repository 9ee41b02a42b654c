"""Middlewares around generating calls: the HTTP call that the running task serves, and the gate that admits calls.

A request's sequences are submitted deep inside its endpoint. Statistics and tracing need the call's arrival time, path
and trace. A context variable carries them without a parameter in every endpoint. The engine client and `GrammarCheck`
read it.

The gate counts the running calls, and refuses new ones while draining or when sent to the wrong role:

    open ── close(why) ──> closed: new calls get a 503, running calls continue ──> empty

Each role that a server takes has its own gate. `app` adds the gate outside of `CallMiddleware`, which
`sglang_api/observability.install` adds: a refused call has no `HttpCall` and no span. `lifecycle/instance.py` closes
the gate when the role changes, and for good when the server shuts down. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.base.stream_state import NO_ROLE, ROLE_HEADER
from pdserve.config.groups import DisaggMode
from pdserve.errors import RequestError
from pdserve.http.access import GENERATING
from pdserve.observe.tracing import CallSpan
from pdserve.server.http.json_http import error_response

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


class DrainGate:
    """The drain gate of a server with the role `role`."""

    def __init__(self, role: DisaggMode) -> None:
        self._role = role
        self._why: RequestError | None = None
        self._for_good = False
        self._num_inside = 0
        self._left = asyncio.Event()

    @property
    def accepted_role(self) -> str:
        """Value of `ROLE_HEADER`: the role in which new requests are accepted, or `NO_ROLE` once closed."""
        return self._role if self._why is None else NO_ROLE

    @property
    def num_inside(self) -> int:
        """Number of admitted calls whose responses have not ended."""
        return self._num_inside

    def close(self, why: RequestError, *, for_good: bool = False) -> None:
        """Refuse new calls with `why`. `for_good`: the server shuts down, which routers see in `/health`."""
        self._why = why
        self._for_good = for_good

    def require_staying(self) -> None:
        """Raise the refusal of new calls if the server shuts down."""
        if self._for_good:
            self.require_open()

    def require_open(self) -> None:
        """Raise the refusal of new calls if the gate is closed."""
        if self._why is not None:
            raise self._why

    def refusal(self, wanted: str | None) -> RequestError | None:
        """Return the refusal of a call that is meant for a server of the role `wanted` (None: any); None if it is
        admitted.
        """
        if self._why is not None or wanted in (None, self._role):
            return self._why
        text = f"this request is for a {wanted!r} server, and this is a {self._role!r} server (--disaggregation-mode)"
        return RequestError(text, status=503, code="wrong_role", retry_after_s=1)

    def enter(self) -> None:
        """Count an admitted call."""
        self._num_inside += 1

    def leave(self) -> None:
        """Count the end of an admitted call's response."""
        self._num_inside -= 1
        self._left.set()

    async def empty(self, timeout_s: float) -> bool:
        """Wait until no admitted call runs; return False if some still run after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._num_inside:
                    self._left.clear()
                    await self._left.wait()
        return self._num_inside == 0


class DrainGateMiddleware:
    """ASGI middleware: passes generating calls through the drain gate."""

    def __init__(self, app: ASGIApp, drain_gate: DrainGate) -> None:
        self._app = app
        self._drain_gate = drain_gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["path"] not in GENERATING:
            await self._app(scope, receive, send)
            return
        refused = self._drain_gate.refusal(Headers(scope=scope).get(ROLE_HEADER))
        if refused is not None:
            response = error_response(refused)
            response.headers[ROLE_HEADER] = self._drain_gate.accepted_role
            await response(scope, receive, send)
            return
        self._drain_gate.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain_gate.leave()
