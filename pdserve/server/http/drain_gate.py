"""Who is let in to generate: counts the calls inside, and refuses those that come to the wrong server or too late.

    open ── close(why) ──> closed: 503 for whoever comes; those inside go on ──> empty

One for each role that a server has in its life; put around the application by `app`, closed by `host` when the role
changes, and for good when the server ends. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.base.stream_state import NO_ROLE, ROLE_HEADER
from pdserve.config.groups import DisaggMode
from pdserve.errors import RequestError
from pdserve.server.http.json_http import error_response
from pdserve.server.http.request_context import GENERATING


class DrainGate:
    """That of a server whose role is `role`."""

    def __init__(self, role: DisaggMode) -> None:
        self._role = role
        self._why: RequestError | None = None
        self._for_good = False
        self._num_inside = 0
        self._left = asyncio.Event()

    @property
    def takes(self) -> str:
        """For `ROLE_HEADER`: the role in which new requests are taken."""
        return self._role if self._why is None else NO_ROLE

    @property
    def num_inside(self) -> int:
        """Calls that have come in and whose answers have not ended."""
        return self._num_inside

    def close(self, why: RequestError, *, for_good: bool = False) -> None:
        """Refuse whoever comes from now on; `for_good` when the server ends, which routers learn from `/health`."""
        self._why = why
        self._for_good = for_good

    def require_staying(self) -> None:
        """Raise what new calls are refused with, if the server ends."""
        if self._for_good:
            self.require_open()

    def require_open(self) -> None:
        """Raise what new calls are refused with, if they are."""
        if self._why is not None:
            raise self._why

    def refusal(self, wanted: str | None) -> RequestError | None:
        """Why a call that is meant for a server of the role `wanted` is not let in; None: it is."""
        if self._why is not None or wanted in (None, self._role):
            return self._why
        text = f"this request is for a {wanted!r} server, and this is a {self._role!r} one (--disaggregation-mode)"
        return RequestError(text, status=503, code="wrong_role", retry_after_s=1)

    def enter(self) -> None:
        """A call comes in."""
        self._num_inside += 1

    def leave(self) -> None:
        """Its answer has ended."""
        self._num_inside -= 1
        self._left.set()

    async def empty(self, timeout_s: float) -> bool:
        """Wait until nobody is inside; False when somebody still is after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._num_inside:
                    self._left.clear()
                    await self._left.wait()
        return self._num_inside == 0


class DrainGateMiddleware:
    """ASGI: generating calls go through the door."""

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
            response.headers[ROLE_HEADER] = self._drain_gate.takes
            await response(scope, receive, send)
            return
        self._drain_gate.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain_gate.leave()
