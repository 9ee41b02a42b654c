"""The API process's objects for one role of a server: an engine client and an application over one engine.

    EngineInstance ──> open ──> ready ──> (drain) ──> close          the engine may die at any time: `watch` returns

Owned by `role_switch_app`, which has one at a time. Event loop only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping

from pdserve.config.groups import DisaggMode, ServerConfig
from pdserve.errors import EngineDeadError, RequestError
from pdserve.protocol.channel import ApiChannel
from pdserve.protocol.messages import Shutdown
from pdserve.server.app import create_app, make_metrics
from pdserve.server.engine_client.client import EngineClient
from pdserve.server.engine_client.new_prefill import NewPrefill
from pdserve.server.engine_client.waiting import WaitingRequests
from pdserve.server.http.drain_gate import DrainGate
from pdserve.server.native.role_switch import RoleChanger
from pdserve.server.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

ENGINE_WATCH_S = 0.2
CUT_S = 5.0
"""Seconds that the responses of cut requests may take to be written."""
QUIET_S = 5.0
"""Seconds that peers may take to be notified of ended requests and to release each other's pages."""
LINGER_S = 0.5
"""Minimum seconds of a drain during which peers still get replies. Their halves of requests that this server refused
may be in flight."""
POLL_S = 0.02
HELD = (
    *("reqs_live", "pages_held_remote", "pages_held_send", "control_unacked"),
    *("keys_published", "keys_early", "keys_writing"),
)
"""Counts in `EngineState.memory` that are 0 when no request, page hold or control message of a peer is open."""


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

    @property
    def role(self) -> DisaggMode:
        """The disaggregation mode: prefill, decode or null."""
        return self.config.disagg.disaggregation_mode


class EngineInstance:
    """See the file's docstring. `on_trial`: the caller handles an engine that does not start.

    Raises:
        ConfigError: a configured request log or tracing cannot be opened.
    """

    def __init__(
        self, backend: EngineBackend, tokenizer: Tokenizer | None, changer: RoleChanger, *, on_trial: bool = False
    ) -> None:
        self.backend = backend
        self.on_trial = on_trial
        self.drain_gate = DrainGate(backend.role)
        self._channel = backend.open_channel()
        try:
            metrics = make_metrics(backend.config, backend.own_counters)
            waiting = WaitingRequests.of(backend.config)
            if waiting is not None:
                metrics.show(waiting.counters)
            self.client = EngineClient(
                self._channel,
                tokenizer,
                metrics,
                match_stops=backend.role != "prefill",
                new_prefill=NewPrefill.of(backend.config),
                waiting=waiting,
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
            )
        except BaseException:
            self._channel.close()
            raise
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

    async def drain(self, why: RequestError, timeout_s: float, *, for_good: bool = False) -> None:
        """Refuse new requests, wait for running ones, and after `timeout_s` seconds cut the rest with `why`.

        `for_good`: the server shuts down; an idle server then does not wait `LINGER_S`.
        """
        begun_s = time.monotonic()
        self.drain_gate.close(why, for_good=for_good)
        lingers = self.backend.role != "null" and (self.drain_gate.num_inside > 0 or not for_good)
        if not await self.drain_gate.empty(timeout_s):
            log.warning("%d requests have not ended within %g s and are cut", self.drain_gate.num_inside, timeout_s)
            self.client.cut(why)
            await self.drain_gate.empty(CUT_S)
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

    async def _held(self) -> dict[str, int]:
        """The `HELD` counts that are not 0."""
        state = await self.client.state(QUIET_S)
        counts = {} if state is None or not self.client.alive else state.memory
        return {name: counts[name] for name in HELD if counts.get(name, 0)}

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
