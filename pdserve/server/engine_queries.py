"""Questions to the scheduler that have one answer: its state, and whether it obeyed a command.

Owned by the engine client.
"""

from __future__ import annotations

import asyncio
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
    StateQuery,
    StateReply,
)


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
