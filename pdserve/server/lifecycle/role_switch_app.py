"""The ASGI application that uvicorn runs: forwards each call to the present role's application, and switches the role.

    prepare (may refuse) ──> drain ──> the old engine ends ──> the new one starts ──> ready
                                                                  └─ does not start ──> the old role again

The port stays open during a switch. The old application answers until its engine has ended. Then the new application
answers, with 503 `engine_starting` until its engine is ready. The engines never run together, because two would need
twice the memory. Created by `run`; event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from pdserve.config.groups import DisaggMode
from pdserve.errors import ConfigError, EngineDeadError, PdserveError, RequestError
from pdserve.server.lifecycle.instance import EngineBackend, EngineInstance
from pdserve.server.native.role_switch import RoleChanged
from pdserve.server.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SHUTTING_DOWN = RequestError(
    "this server is shutting down; send the request again", status=503, code="server_shutting_down", retry_after_s=1
)

OtherRole = Callable[[DisaggMode], EngineBackend]
"""Creates the backend of a role, checked but not started; any thread. Raises ConfigError if the server cannot have the
role."""


class RoleSwitchApp:
    """See the file's docstring.

    `other` None: the role is fixed. `port`: of the HTTP server. `leave` shuts the HTTP server down.
    """

    def __init__(
        self,
        first: EngineBackend,
        tokenizer: Tokenizer | None,
        other: OtherRole | None,
        *,
        port: int,
        leave: Callable[[], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._other = other
        self._port = port
        self._leave = leave
        self._changing: asyncio.Task[RoleChanged] | None = None
        self._preparing = self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._life = EngineInstance(first, tokenizer, self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the ASGI call to the present role's application."""
        await self._life.app(scope, receive, send)

    async def open(self) -> None:
        """Open the first role, whose engine has been started."""
        await self._life.open()
        self._keep(asyncio.create_task(self._guard(self._life)))
        self._keep(asyncio.create_task(self._announce_first()))

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests because the server shuts down; after `timeout_s` seconds cut the running ones.

        Returns at once during a role switch.
        """
        self._closing = True
        if self._changing is None:
            await self._life.drain(SHUTTING_DOWN, timeout_s, for_good=True)

    def cut(self) -> None:
        """Cut all running requests now, with the error of the drain timeout."""
        self._life.client.cut(SHUTTING_DOWN)

    async def close(self) -> int:
        """Close the present role; returns the exit status: 0, or 1 if the engine has died."""
        self._closing = True
        tasks = [*self._tasks, *([] if self._changing is None else [self._changing])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._life.close("the server is shutting down")
        return int(self._life.client.engine_lost)

    async def begin(self, role: DisaggMode, drain_s: float) -> asyncio.Future[RoleChanged]:
        """See `RoleChanger`."""
        if self._preparing or self._closing or self._changing is not None:
            text = "the role of this server is being changed already, or the server is shutting down"
            raise RequestError(text, field="new_role", status=409, code="role_switch_under_way")
        if self._other is None:
            raise RequestError("new_role: the role of this server cannot be changed", field="new_role")
        self._preparing = True
        try:
            backend = await asyncio.to_thread(self._other, role)
        except ConfigError as error:
            message = f"new_role: this server cannot be {_article(role)}: {error}"
            raise RequestError(message, field="new_role", code="role_not_possible") from error
        finally:
            self._preparing = False
        self._changing = asyncio.create_task(self._change(backend, drain_s))
        self._changing.add_done_callback(self._changed)
        return self._changing

    async def _change(self, backend: EngineBackend, drain_s: float) -> RoleChanged:
        before = self._life.backend.role
        text = f"this server changes its role from {before!r} to {backend.role!r}"
        log.warning("%s; running requests have %g s to end", text, drain_s)
        await self._life.drain(RequestError(text, status=503, code="role_switching", retry_after_s=1), drain_s)
        await self._end(self._life.backend, text)
        try:
            await self._begin(backend)
        except PdserveError as error:
            await self._end(backend, f"the engine of the role {backend.role!r} did not start")
            await self._go_back(before)
            text = f"the engine of the role {backend.role!r} did not start ({error}; the server's log says why)"
            raise RequestError(
                f"{text}; this is {_article(before)} again", status=500, code="role_switch_failed"
            ) from error
        return RoleChanged(before, backend.role, "ok", backend.bootstrap_port)

    async def _go_back(self, role: DisaggMode) -> None:
        """Start the old role again; shut the server down if its engine does not start either."""
        assert self._other is not None
        try:
            await self._begin(await asyncio.to_thread(self._other, role))
        except PdserveError:
            log.critical("the engine of the old role did not start either; the server shuts down")
            self._leave()
            raise

    async def _begin(self, backend: EngineBackend) -> None:
        """Start an engine and forward calls to it from now on; returns when it is ready."""
        backend.start()
        life = self._life = EngineInstance(backend, self._tokenizer, self, on_trial=True)
        await life.open()
        self._keep(asyncio.create_task(self._guard(life)))
        await life.client.wait_ready()
        life.on_trial = False
        backend.on_ready(self._port)

    async def _end(self, backend: EngineBackend, reason: str) -> None:
        """Close the present instance and wait until the engine of `backend` has ended."""
        await self._life.close(reason)
        await asyncio.to_thread(backend.end)

    async def _announce_first(self) -> None:
        life = self._life
        try:
            await life.client.wait_ready()
        except EngineDeadError:
            return
        life.backend.on_ready(self._port)

    async def _guard(self, life: EngineInstance) -> None:
        """Shut the server down when the engine of `life` dies, unless it is on trial."""
        await life.watch()
        if life.client.engine_lost and not life.on_trial:
            log.error("the engine has died; the server shuts down")
            self._leave()

    def _changed(self, task: asyncio.Task[RoleChanged]) -> None:
        self._changing = None
        if not task.cancelled() and task.exception() is not None:
            log.error("the role switch has failed: %s", task.exception())

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _article(role: DisaggMode) -> str:
    return {"prefill": "a prefill server", "decode": "a decode server", "null": "a server without disaggregation"}[role]
