"""Queries and commands to the scheduler, each with one reply, and the watchdogs of the scheduler processes.

Owned by the engine client, on its event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Sequence

from pdserve.base import process_use, startup_times
from pdserve.errors import EngineDeadError, RequestError
from pdserve.protocol.channel import ApiChannel
from pdserve.protocol.engine_state import EngineReady, EngineState, SchedulerHeartbeat
from pdserve.protocol.messages import (
    Command,
    CommandReply,
    ContinueGeneration,
    ExtractReply,
    ExtractRequest,
    KVPart,
    PauseGeneration,
    StateQuery,
    StateReply,
    SwitchRole,
)
from pdserve.server.generation import Weights

log = logging.getLogger(__name__)

SILENT_S = 10.0
"""Seconds without a heartbeat after which a scheduler process counts as dead."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaVitals:
    """Health of one replica's scheduler.

    `age_s`: seconds since its last heartbeat. `turn_s`: duration of the current loop iteration in seconds; None: the
    loop sleeps. `num_turns`: iterations that computed a step and have ended.
    """

    dp_rank: int
    age_s: float
    turn_s: float | None
    num_turns: int

    @property
    def silent(self) -> bool:
        """True when the last heartbeat is older than `SILENT_S`: the process does not run."""
        return self.age_s > SILENT_S

    def trouble(self, max_turn_s: float) -> str | None:
        """The reason for which the scheduler counts as dead or stuck, as a sentence; None when it is healthy.

        `max_turn_s`: seconds after which an iteration counts as stuck.
        """
        if self.silent:
            return f"the scheduler of replica {self.dp_rank} is silent for {self.age_s:.0f} s"
        if self.turn_s is not None and self.turn_s > max_turn_s:
            return f"the scheduler of replica {self.dp_rank} is stuck in one step for {self.turn_s:.0f} s"
        return None


class SchedulerWatchdog:
    """The newest heartbeat of each replica. Event loop only."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._newest: dict[int, tuple[float, SchedulerHeartbeat]] = {}

    def begin(self) -> None:
        """Start the watchdogs: all schedulers run from now on."""
        self._began_s = time.monotonic()

    def on_beat(self, beat: SchedulerHeartbeat) -> None:
        """Record a heartbeat."""
        self._newest[beat.dp_rank] = (time.monotonic(), beat)

    def heartbeats(self, dp_size: int) -> list[ReplicaVitals]:
        """Return the health of each of `dp_size` replicas; an empty list before `begin`."""
        if self._began_s is None:
            return []
        now = time.monotonic()
        return [self._vitals(rank, now, self._began_s) for rank in range(dp_size)]

    def _vitals(self, rank: int, now: float, began_s: float) -> ReplicaVitals:
        heard_s, beat = self._newest.get(rank, (began_s, SchedulerHeartbeat(dp_rank=rank, turn_s=None, num_turns=0)))
        age_s = max(0.0, now - max(heard_s, began_s))
        turn_s = None if beat.turn_s is None else beat.turn_s + now - heard_s
        return ReplicaVitals(rank, age_s, turn_s, beat.num_turns)


@dataclasses.dataclass(frozen=True, slots=True)
class Extracted:
    """The state of a request, and the bytes of each layout group of its KV, in parts."""

    reply: ExtractReply
    kv: Sequence[Sequence[bytes]]


class EngineQueries:
    """Matches replies to the queries that wait for them."""

    def __init__(self, channel: ApiChannel) -> None:
        self._channel = channel
        self._states: dict[str, asyncio.Future[EngineState]] = {}
        self._commands: dict[str, asyncio.Future[CommandReply]] = {}
        self._extractions: dict[str, tuple[asyncio.Future[ExtractReply], dict[int, list[bytes]]]] = {}
        """By rid: the reply that is awaited, and the KV bytes of each group so far."""
        self.last_state: EngineState | None = None
        self.last_state_at: float | None = None
        """Monotonic seconds at which `last_state` arrived; None before the first state."""
        self.paused = False
        """Whether the last successful pause or continue command was a pause."""

    async def state(self, timeout_s: float, *, audit: bool = False) -> EngineState | None:
        """Query the scheduler's state. `audit`: after a self-audit.

        Returns the last state received when no reply arrives within `timeout_s` seconds or the engine dies.
        """
        query_id = uuid.uuid4().hex
        answer = self._states[query_id] = asyncio.get_running_loop().create_future()
        try:
            await self._channel.send(StateQuery(query_id=query_id, audit=audit))
            return await asyncio.wait_for(answer, timeout_s)
        except (TimeoutError, EngineDeadError):
            return self.last_state
        finally:
            del self._states[query_id]

    async def command(self, make: Callable[[str], Command | SwitchRole], timeout_s: float) -> CommandReply:
        """Send the command that `make` builds from a query id, and return the scheduler's reply.

        Raises:
            RequestError: 503 when no reply arrives within `timeout_s` seconds.
            EngineDeadError: the engine is dead.
        """
        query_id = uuid.uuid4().hex
        answer = self._commands[query_id] = asyncio.get_running_loop().create_future()
        try:
            command = make(query_id)
            await self._channel.send(command)
            reply: CommandReply = await asyncio.wait_for(answer, timeout_s)
        except TimeoutError as error:
            raise RequestError("the engine did not answer in time", status=503, code="engine_busy") from error
        finally:
            del self._commands[query_id]
        if reply.ok and isinstance(command, PauseGeneration | ContinueGeneration):
            self.paused = isinstance(command, PauseGeneration)
        return reply

    def on_reply(self, reply: StateReply | CommandReply) -> None:
        """Resolve the waiting query. Called by the engine client's reader; a reply without a waiter is dropped."""
        if isinstance(reply, StateReply):
            self.last_state, self.last_state_at = reply.state, time.monotonic()
            state = self._states.get(reply.query_id)
            if state is not None and not state.done():
                state.set_result(reply.state)
        else:
            flush = self._commands.get(reply.query_id)
            if flush is not None and not flush.done():
                flush.set_result(reply)

    async def extract(self, rid: str, *, with_kv: bool, keep: bool) -> Extracted:
        """Send an `ExtractRequest` and return the reply.

        Raises:
            RequestError: 404, the request has ended; 409, another extraction of it is under way.
            EngineDeadError: the engine is dead.
        """
        if rid in self._extractions:
            raise RequestError("a snapshot of this request is being taken", field="rid", status=409, code="busy")
        answer: asyncio.Future[ExtractReply] = asyncio.get_running_loop().create_future()
        self._extractions[rid] = answer, {}
        try:
            request = ExtractRequest(query_id=uuid.uuid4().hex, rid=rid, with_kv=with_kv, keep=keep)
            await self._channel.send(request)
            reply = await answer
            parts = self._extractions[rid][1]
        finally:
            del self._extractions[rid]
        if reply.failure is not None:
            raise reply.failure.error()
        return Extracted(reply, [parts.get(group, []) for group in range(len(reply.kv_pages))])

    def on_extracted(self, message: ExtractReply | KVPart) -> None:
        """Take an answer to an `ExtractRequest`, or KV bytes that come before it."""
        waiting = self._extractions.get(message.rid)
        if waiting is None:
            return
        answer, parts = waiting
        if isinstance(message, KVPart):
            parts.setdefault(message.group, []).append(message.data)
        elif not answer.done():
            answer.set_result(message)

    def fail(self, error: EngineDeadError) -> None:
        """Fail all waiting queries and commands with `error`."""
        for answer, _ in self._extractions.values():
            if not answer.done():
                answer.set_exception(error)
        for state in self._states.values():
            if not state.done():
                state.set_exception(error)
        for flush in self._commands.values():
            if not flush.done():
                flush.set_exception(error)


def weights_of(ready: EngineReady) -> Weights:
    """Return the weights that an engine computes with."""
    return str(ready.facts.get("weight_version") or ""), str(ready.facts.get("weights_fingerprint") or "")


def log_startup(ready: EngineReady) -> None:
    """Log the durations of start-up and the memory of each process, when the scheduler has sent `EngineReady`.

    With several replicas the times are those of the first replica.
    """
    times = startup_times.describe(startup_times.read_facts(ready.facts))
    log.info("the engine is ready%s; memory: %s", times, process_use.describe(process_use.own_processes()))
