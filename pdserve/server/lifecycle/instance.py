"""A server in one of its roles, as the API process has it: an engine client and an application over one engine.

    Life ──> open ──> ready ──> (drain) ──> close          the engine may go away at any time: `watch` returns

Owned by `host`, which has one at a time. Event loop only.
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
"""How long the answers of requests that are cut may take to be written."""
QUIET_S = 5.0
"""How long peers may take to hear of requests that have ended, and to let go of each other's pages."""
LINGER_S = 0.5
"""So long, at least, partners are answered whose halves of requests were on their way when ours were refused."""
POLL_S = 0.02
HELD = (
    *("reqs_live", "pages_held_remote", "pages_held_send", "control_unacked"),
    *("keys_published", "keys_early", "keys_writing"),
)
"""Counts of an engine that are 0 when it owes its peers nothing."""


def nothing() -> None:
    """There is nothing to do."""


def ignore_readiness(port: int) -> None:
    """Nobody wants to know."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineBackend:
    """What stands behind the HTTP server in one role, made by the launcher.

    `open_channel` is called inside the event loop, where the sockets must be made, and `start` on the main thread,
    before it. `engine_died` says in a sentence which process has ended. `on_ready` gets the HTTP port once requests
    are taken. `own_counters` are shown in `/metrics`, `registered` in `/ready`. `end` blocks until the engine, which
    was told to stop through its channel, has ended; any thread may call it, any number of times. `control_token` is
    what requests may prove; empty: there is none.
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
        """Which halves it does."""
        return self.config.disagg.disaggregation_mode


class EngineInstance:
    """See the file's docstring. `on_trial`: whoever made it sees to it if the engine does not come up.

    Raises:
        ConfigError: a log or tracing, which the configuration wants, cannot be had.
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
        """Begin to listen to the engine."""
        await self._lifespan.__aenter__()

    async def watch(self) -> None:
        """Until the engine is gone by itself; its streams have been told by then."""
        while self.client.alive:
            sentence = self.backend.engine_died()
            if sentence is not None:
                log.error("%s", sentence)
                self.client.fail(EngineDeadError(sentence))
                break
            await asyncio.sleep(ENGINE_WATCH_S)

    async def drain(self, why: RequestError, timeout_s: float, *, for_good: bool = False) -> None:
        """Take nothing new, let what runs end, and after `timeout_s` end the rest with `why`.

        `for_good`: the server ends, and an idle one at once.
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
            "all requests have ended after %.2f s; %.2f s later %s is held",
            ended_s - begun_s,
            quiet_s,
            held or "nothing",
        )

    async def _held(self) -> dict[str, int]:
        """What requests the engine has, and what it owes its peers."""
        state = await self.client.state(QUIET_S)
        counts = {} if state is None or not self.client.alive else state.memory
        return {name: counts[name] for name in HELD if counts.get(name, 0)}

    async def close(self, reason: str) -> None:
        """End what is left with an error that says `reason`, and tell the engine to stop if it is there."""
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
