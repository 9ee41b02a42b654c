"""The drain gate of a server: it counts the running calls, and refuses new ones while draining or for another role.

    open ── close(why) ──> closed: new calls get a 503, running calls continue ──> empty

Each role that a server takes has its own gate. `lifecycle/instance.py` closes it when the role changes, and for good
when the server shuts down. A refused call has no `HttpCall` and no span, because `sglang_api/observability.install`
adds `CallMiddleware` inside of the gate. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.base.stream_state import NO_ROLE, ROLE_HEADER
from pdserve.config.groups import DisaggMode
from pdserve.errors import RequestError
from pdserve.server.http.json_http import GENERATES, error_response


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

    def reopen(self) -> None:
        """Admit new calls again: the role change for which the gate was closed has failed."""
        self._why = None

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

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Count work that goes on behind the response of an admitted call."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

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
        if scope["type"] != "http" or scope["path"] not in GENERATES:
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
