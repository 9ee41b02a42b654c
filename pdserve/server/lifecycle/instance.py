"""A server's objects for its present role, and the ASGI application that switches the role. Event loop only.

    EngineInstance ──> open ──> ready ──> (drain) ──> close          the engine may die at any time: `watch` returns

`RoleSwitchApp`, which uvicorn runs, has one instance at a time and forwards each call to its application:

    prepare (may refuse) ──> drain ──> the engine changes its role in place ──> the new application
                               │          └─ cannot ──> the old role goes on
                               └─ in place is not possible: the old engine ends ──> a new one starts ──> ready
                                                                                      └─ does not start ──> the old role

The port stays open during a switch. In place, weights, KV pool and prefix cache stay, and the channel to the engine is
handed to the new application. The engine is reloaded where a flag of the new role needs it, or where peers still hold
pages after the drain. Then the old application answers until its engine has ended, and the new one with 503
`engine_starting` until its engine is ready. Two engines never run together: they would need twice the memory. Created
by `run`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping

from starlette.types import Receive, Scope, Send

from pdserve.base.log import no_request
from pdserve.base.startup_times import api_startup_s
from pdserve.config.groups import DisaggMode, ServerConfig
from pdserve.errors import ConfigError, EngineDeadError, PdserveError, RequestError
from pdserve.protocol.channel import ApiChannel
from pdserve.protocol.messages import Shutdown, SwitchRole
from pdserve.server.app import create_app, make_metrics
from pdserve.server.engine_client.client import EngineClient
from pdserve.server.engine_client.live_requests import NewPrefill, WaitingRequests
from pdserve.server.http.drain_gate import DrainGate
from pdserve.server.sglang_api.role_switch import FAILED_CODE, RoleChanged, RoleChanger
from pdserve.server.snapshot_store import SnapshotStore
from pdserve.server.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

ENGINE_WATCH_S = 0.2
ABORT_S = 5.0
"""Seconds that the responses of aborted requests may take to be written."""
SWITCH_S = 90.0
"""Seconds that an engine may take to change its role: closing transports may wait 30 s for a copy that hangs."""
REGISTER_S = 5.0
"""Seconds within which the bootstrap server of a new prefill role must know all replicas."""
QUIET_S = 5.0
"""Seconds that peers may take to be notified of ended requests and to release each other's pages."""
LINGER_S = 0.5
"""Minimum seconds of a drain during which peers still get replies. Their halves of requests that this server refused
may be in flight."""
POLL_S = 0.02
HELD = (
    *("reqs_live", "pages_held_remote", "pages_held_send", "control_unacked"),
    *("keys_published", "keys_writing"),
)
"""Counts in `EngineState.memory` that are 0 when no request, page hold or control message of a peer is open.

`keys_early` is none of them: there a peer waits for a request that this server refuses, and holds nothing here.
"""


def nothing() -> None:
    """Default hook of `EngineBackend`; does nothing."""


def ignore_readiness(port: int) -> None:
    """Default hook for readiness; does nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineBackend:
    """The engine behind the HTTP server in one role, and the hooks of its processes. Created by the launcher.

    `open_channel` is called inside the event loop, where the sockets must be created. `start` is called on the main
    thread, before `open_channel`. `engine_died` returns a sentence that names the ended process; None: all run.
    `on_ready` gets the HTTP port when the engine takes requests. `own_counters` are added to `/metrics`. `registered`
    is a condition of `/ready`. `end` blocks until the engine, which received `Shutdown`, has ended; any thread may call
    it, repeatedly. `control_token`: secret that requests may prove; empty: none.

    `switch` makes the command by which a running engine takes this role, from a query id; None: no engine can.
    `reload` None: the backend has an engine of its own. Otherwise it takes over the engine of the present role by that
    command; `open_channel` then returns that engine's channel, `adopt` is called once the engine has the role, and
    `reload` returns a backend of the same role that starts an engine of its own instead (any thread).
    """

    config: ServerConfig
    open_channel: Callable[[], ApiChannel]
    engine_died: Callable[[], str | None]
    bootstrap_port: int | None = None
    on_ready: Callable[[int], None] = ignore_readiness
    own_counters: Callable[[], Mapping[str, float]] = dict
    registered: Callable[[], bool] = lambda: True
    start: Callable[[], None] = nothing
    end: Callable[[], None] = nothing
    control_token: str = dataclasses.field(default="", repr=False)
    switch: Callable[[str], SwitchRole] | None = None
    reload: Callable[[], EngineBackend] | None = None
    adopt: Callable[[], None] = nothing

    @property
    def role(self) -> DisaggMode:
        """The disaggregation mode: prefill, decode or null."""
        return self.config.disagg.disaggregation_mode


class EngineInstance:
    """See the file's docstring. `on_trial`: the caller handles an engine that does not start.

    `store`: the snapshots of suspended requests, which all instances of the server share.
    `former`: the instance whose engine this one takes over, with its LoRA adapters; None: the engine starts.

    Raises:
        ConfigError: a configured request log or tracing cannot be opened.
    """

    def __init__(
        self,
        backend: EngineBackend,
        tokenizer: Tokenizer | None,
        changer: RoleChanger,
        *,
        store: SnapshotStore,
        on_trial: bool = False,
        former: EngineInstance | None = None,
    ) -> None:
        self.backend = backend
        self.on_trial = on_trial
        self.drain_gate = DrainGate(backend.role)
        self.adapters: dict[str, str] = dict(backend.config.lora.adapters) if former is None else former.adapters
        self._channel = backend.open_channel()
        try:
            metrics = make_metrics(backend.config, backend.own_counters)
            waiting = WaitingRequests.of(backend.config)
            if waiting is not None:
                metrics.show(waiting.counters)
            self.client: EngineClient = EngineClient(
                self._channel,
                tokenizer,
                metrics,
                match_stops=backend.role != "prefill",
                new_prefill=NewPrefill.of(backend.config),
                waiting=waiting,
                former=None if former is None else former.client,
            )
            self.app = create_app(
                backend.config,
                self.client,
                tokenizer,
                metrics,
                registered=backend.registered,
                drain_gate=self.drain_gate,
                changer=changer,
                warm=True,
                control_token=backend.control_token,
                snapshot_store=store,
                adapters=self.adapters,
            )
        except BaseException:
            if former is None:
                self._channel.close()
            raise
        metrics.set_api_startup(api_startup_s())
        self._lifespan = self.app.router.lifespan_context(self.app)
        self._closed = False

    async def open(self) -> None:
        """Start to read the engine's channel."""
        await self._lifespan.__aenter__()

    async def watch(self) -> None:
        """Return when the engine has died or the client was stopped; all streams have failed by then."""
        while self.client.alive:
            sentence = self.backend.engine_died()
            if sentence is not None:
                log.error("%s", sentence)
                self.client.fail(EngineDeadError(sentence))
                break
            await asyncio.sleep(ENGINE_WATCH_S)

    async def drain(self, why: RequestError, timeout_s: float, *, for_good: bool = False) -> bool:
        """Refuse new requests, wait for running ones, and after `timeout_s` seconds abort the rest with `why`.

        Returns whether peers hold nothing any more.

        `for_good`: the server shuts down; an idle server then does not wait `LINGER_S`.
        """
        begun_s = time.monotonic()
        self.drain_gate.close(why, for_good=for_good)
        lingers = self.backend.role != "null" and (self.drain_gate.num_inside > 0 or not for_good)
        if not await self.drain_gate.empty(timeout_s):
            log.warning("%d requests have not ended within %g s and are aborted", self.drain_gate.num_inside, timeout_s)
            self.client.abort_all(why)
            await self.drain_gate.empty(ABORT_S)
        ended_s = time.monotonic()
        if lingers:
            await asyncio.sleep(max(0.0, begun_s + LINGER_S - ended_s))
        while (held := await self._held()) and time.monotonic() < ended_s + QUIET_S:
            await asyncio.sleep(POLL_S)
        quiet_s = time.monotonic() - ended_s
        log.info(
            "all requests have ended after %.2f s; %.2f s later still held for peers: %s",
            ended_s - begun_s,
            quiet_s,
            held or "nothing",
        )
        return not held

    async def _held(self) -> dict[str, int]:
        """The `HELD` counts that are not 0."""
        state = await self.client.state(QUIET_S)
        counts = {} if state is None or not self.client.alive else state.memory
        return {name: counts[name] for name in HELD if counts.get(name, 0)}

    async def hand_over(self, reason: str) -> None:
        """Close the instance, whose engine and channel another instance takes over."""
        self._closed = True
        await self.client.stop(reason)
        await self._lifespan.__aexit__(None, None, None)

    async def close(self, reason: str) -> None:
        """Fail all live requests with `reason` and send `Shutdown` to the engine if it is alive."""
        if self._closed:
            return
        self._closed = True
        try:
            await self.client.stop(reason)
            await self._lifespan.__aexit__(None, None, None)
            if not self.client.engine_lost:
                await self._channel.send(Shutdown())
        finally:
            self._channel.close()


SHUTTING_DOWN = RequestError(
    "this server is shutting down; send the request again", status=503, code="server_shutting_down", retry_after_s=1
)

OtherRole = Callable[[DisaggMode], EngineBackend]
"""Creates the backend of a role, checked but not started; any thread. Raises ConfigError if the server cannot have the
role."""


class _Refused(RequestError):
    """A replica of the engine cannot take the role, and has kept its own."""


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
        self._store = SnapshotStore.of(first.config)
        self._instance = EngineInstance(first, tokenizer, self, store=self._store)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the ASGI call to the present role's application."""
        await self._instance.app(scope, receive, send)

    async def open(self) -> None:
        """Open the first role, whose engine has been started."""
        await self._instance.open()
        self._keep(asyncio.create_task(self._guard(self._instance)))
        self._keep(asyncio.create_task(self._announce_first()))

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests because the server shuts down; after `timeout_s` seconds abort the running ones.

        Returns at once during a role switch.
        """
        self._closing = True
        if self._changing is None:
            await self._instance.drain(SHUTTING_DOWN, timeout_s, for_good=True)

    def abort_all(self) -> None:
        """Abort all running requests now, with the error of the drain timeout."""
        self._instance.client.abort_all(SHUTTING_DOWN)

    async def close(self) -> int:
        """Close the present role; returns the exit status: 0, or 1 if the engine has died."""
        self._closing = True
        tasks = [*self._tasks, *([] if self._changing is None else [self._changing])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._instance.close("the server is shutting down")
        return int(self._instance.client.engine_lost)

    @property
    def is_serving(self) -> bool:
        """See `RoleChanger`."""
        return self._instance.client.ready is not None and self._changing is None and not self._closing

    async def begin(self, role: DisaggMode, drain_s: float, *, reload: bool = False) -> asyncio.Future[RoleChanged]:
        """See `RoleChanger`."""
        if self._preparing or self._closing or self._changing is not None:
            text = "the role of this server is being changed already, or the server is shutting down"
            raise RequestError(text, field="new_role", status=409, code="role_switch_under_way")
        if self._other is None:
            raise RequestError("new_role: the role of this server cannot be changed", field="new_role")
        self._preparing = True
        try:
            backend = await asyncio.to_thread(self._other, role)
            if reload and backend.reload is not None:
                await asyncio.to_thread(backend.end)
                backend = await asyncio.to_thread(backend.reload)
        except ConfigError as error:
            message = f"new_role: this server cannot be {_article(role)}: {error}"
            raise RequestError(message, field="new_role", code="role_not_possible") from error
        finally:
            self._preparing = False
        self._changing = asyncio.create_task(self._change(backend, drain_s), context=no_request())
        self._changing.add_done_callback(self._changed)
        return self._changing

    async def _change(self, backend: EngineBackend, drain_s: float) -> RoleChanged:
        before = self._instance.backend.role
        text = f"this server changes its role from {before!r} to {backend.role!r}"
        log.warning("%s; running requests have %g s to end", text, drain_s)
        why = RequestError(text, status=503, code="role_switching", retry_after_s=1)
        quiet = await self._instance.drain(why, drain_s)
        if backend.reload is not None:
            if quiet:
                return await self._change_in_place(backend)
            log.warning("peers still hold pages of this engine, so it is reloaded")
            await asyncio.to_thread(backend.end)
            backend = await asyncio.to_thread(backend.reload)
        await self._end(self._instance.backend, text)
        try:
            await self._begin(backend)
        except PdserveError as error:
            await self._end(backend, f"the engine of the role {backend.role!r} did not start")
            await self._go_back(before)
            text = f"the engine of the role {backend.role!r} did not start ({error}; see the server's log)"
            raise RequestError(f"{text}; this is {_article(before)} again", status=500, code=FAILED_CODE) from error
        return RoleChanged(before, backend.role, "ok", backend.bootstrap_port, in_place=False)

    async def _change_in_place(self, backend: EngineBackend) -> RoleChanged:
        """Have the running engine take the role of `backend`; the old role goes on when it cannot."""
        old = self._instance
        before = old.backend.role
        old.on_trial = True
        try:
            await self._command(old, backend)
            await self._adopt(old, backend)
        except PdserveError as error:
            await asyncio.to_thread(backend.end)
            if isinstance(error, _Refused) and old.backend.config.parallel.dp_size == 1:
                self._go_on(old)
            else:
                await self._roll_back(old)
            text = f"the engine cannot take the role {backend.role!r}: {error}"
            message = f"{text}; this is {_article(before)} again"
            raise RequestError(message, status=500, code=FAILED_CODE) from error
        return RoleChanged(before, backend.role, "ok", backend.bootstrap_port, in_place=True)

    async def _command(self, instance: EngineInstance, backend: EngineBackend) -> None:
        """Send the engine of `instance` the command of `backend`. Raises PdserveError when a replica cannot obey."""
        assert backend.switch is not None, "this backend takes over an engine"
        reply = await instance.client.command(backend.switch, SWITCH_S)
        if not reply.ok:
            raise _Refused(reply.message, status=500, code=FAILED_CODE)

    async def _adopt(self, old: EngineInstance, backend: EngineBackend) -> None:
        """Serve with an engine that has taken the role of `backend`."""
        deadline = time.monotonic() + REGISTER_S
        while not backend.registered():
            if time.monotonic() > deadline:
                text = "the bootstrap server does not know all replicas"
                raise RequestError(text, status=500, code=FAILED_CODE)
            await asyncio.sleep(POLL_S)
        instance = EngineInstance(backend, self._tokenizer, self, store=self._store, former=old)
        self._instance = instance
        await old.hand_over("the role of this server has changed")
        await instance.open()  # now: a channel has one reader
        await asyncio.to_thread(backend.adopt)
        self._keep(asyncio.create_task(self._guard(instance)))
        backend.on_ready(self._port)

    async def _roll_back(self, old: EngineInstance) -> None:
        """Go on in the old role: replicas that have changed return to it. Reload the engine if one cannot."""
        try:
            await self._command(old, old.backend)
        except PdserveError as error:
            log.error("the engine cannot return to its role, so it is reloaded: %s", error)
            await self._end(old.backend, "the role switch has failed")
            await self._go_back(old.backend.role)
            return
        self._go_on(old)

    @staticmethod
    def _go_on(old: EngineInstance) -> None:
        old.on_trial = False
        old.drain_gate.reopen()

    async def _go_back(self, role: DisaggMode) -> None:
        """Start the old role again; shut the server down if its engine does not start either."""
        assert self._other is not None
        try:
            backend = await asyncio.to_thread(self._other, role)
            if backend.reload is not None:
                await asyncio.to_thread(backend.end)
                backend = await asyncio.to_thread(backend.reload)
            await self._begin(backend)
        except PdserveError:
            log.critical("the engine of the old role did not start either; the server shuts down")
            self._leave()
            raise

    async def _begin(self, backend: EngineBackend) -> None:
        """Start an engine and forward calls to it from now on; returns when it is ready."""
        backend.start()
        instance = self._instance = EngineInstance(backend, self._tokenizer, self, store=self._store, on_trial=True)
        await instance.open()
        self._keep(asyncio.create_task(self._guard(instance)))
        await instance.client.wait_ready()
        instance.on_trial = False
        backend.on_ready(self._port)

    async def _end(self, backend: EngineBackend, reason: str) -> None:
        """Close the present instance and wait until the engine of `backend` has ended."""
        await self._instance.close(reason)
        await asyncio.to_thread(backend.end)

    async def _announce_first(self) -> None:
        instance = self._instance
        try:
            await instance.client.wait_ready()
        except EngineDeadError:
            return
        instance.backend.on_ready(self._port)

    async def _guard(self, instance: EngineInstance) -> None:
        """Shut the server down when the engine of `instance` dies, unless it is on trial."""
        await instance.watch()
        if instance.client.engine_lost and not instance.on_trial:
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
