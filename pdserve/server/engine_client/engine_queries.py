"""Questions to the scheduler that have one answer: its state, and whether it obeyed a command.

Owned by the engine client.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Callable

from pdserve.errors import EngineDeadError, RequestError
from pdserve.protocol.channel import ApiChannel
from pdserve.protocol.messages import (
    Command,
    CommandReply,
    ContinueGeneration,
    EngineState,
    PauseGeneration,
    SchedulerBeat,
    StateQuery,
    StateReply,
)

SILENT_S = 10.0
"""A scheduler that was not heard for so long does not run."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaVitals:
    """One replica's scheduler now. `age_s` since it was heard, `turn_s` of the loop's turn under way, if any."""

    dp_rank: int
    age_s: float
    turn_s: float | None
    num_turns: int

    @property
    def silent(self) -> bool:
        """Its process does not run."""
        return self.age_s > SILENT_S

    def trouble(self, max_turn_s: float) -> str | None:
        """Why it cannot be alive, as a sentence; None when it may be."""
        if self.silent:
            return f"the scheduler of replica {self.dp_rank} is silent for {self.age_s:.0f} s"
        if self.turn_s is not None and self.turn_s > max_turn_s:
            return f"the scheduler of replica {self.dp_rank} is stuck in one step for {self.turn_s:.0f} s"
        return None


class Watchdogs:
    """The newest beat of each replica. Event loop only."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._newest: dict[int, tuple[float, SchedulerBeat]] = {}

    def begin(self) -> None:
        """All schedulers run from now on."""
        self._began_s = time.monotonic()

    def heard(self, beat: SchedulerBeat) -> None:
        """One beat."""
        self._newest[beat.dp_rank] = (time.monotonic(), beat)

    def heartbeats(self, dp_size: int) -> list[ReplicaVitals]:
        """Of each of `dp_size` replicas; none before `begin`."""
        if self._began_s is None:
            return []
        now = time.monotonic()
        return [self._vitals(rank, now, self._began_s) for rank in range(dp_size)]

    def _vitals(self, rank: int, now: float, began_s: float) -> ReplicaVitals:
        heard_s, beat = self._newest.get(rank, (began_s, SchedulerBeat(dp_rank=rank, turn_s=None, num_turns=0)))
        age_s = max(0.0, now - max(heard_s, began_s))
        turn_s = None if beat.turn_s is None else beat.turn_s + now - heard_s
        return ReplicaVitals(rank, age_s, turn_s, beat.num_turns)


class EngineQueries:
    """Pairs replies with the questions that wait for them."""

    def __init__(self, channel: ApiChannel) -> None:
        self._channel = channel
        self._states: dict[str, asyncio.Future[EngineState]] = {}
        self._commands: dict[str, asyncio.Future[CommandReply]] = {}
        self.last_state: EngineState | None = None
        self.last_state_at: float | None = None
        """When it came (monotonic)."""
        self.paused = False
        """Whether the last command of these two that was obeyed was to pause, not to go on."""

    async def state(self, timeout_s: float, *, audit: bool = False) -> EngineState | None:
        """The state now, or the last one seen when no answer comes in `timeout_s` or the engine goes.

        `audit`: after a self-audit.
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

    async def command(self, make: Callable[[str], Command], timeout_s: float) -> CommandReply:
        """The scheduler's answer to the command that `make` makes of a query id.

        Raises:
            RequestError: 503 when it does not answer in `timeout_s`.
            EngineDeadError: the engine is gone.
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
        """Called by the engine client's reader; a reply that nobody waits for any more is dropped."""
        if isinstance(reply, StateReply):
            self.last_state, self.last_state_at = reply.state, time.monotonic()
            state = self._states.get(reply.query_id)
            if state is not None and not state.done():
                state.set_result(reply.state)
        else:
            flush = self._commands.get(reply.query_id)
            if flush is not None and not flush.done():
                flush.set_result(reply)

    def fail(self, error: EngineDeadError) -> None:
        """End all that wait."""
        for state in self._states.values():
            if not state.done():
                state.set_exception(error)
        for flush in self._commands.values():
            if not flush.done():
                flush.set_exception(error)
