"""Several schedulers, the replicas of one model, as one channel. Owned by the API process when `dp_size` is above 1.

A request goes to the replica that its room names (room % dp_size: the other half of a pair finds it by the same rule),
without a room to the one with the fewest requests. Questions go to all, and have one answer when all have answered.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence

import msgspec

from pdserve.errors import EngineDeadError, ProtocolError
from pdserve.protocol.channel import ApiChannel
from pdserve.protocol.messages import (
    AbortRequest,
    EngineReady,
    EngineState,
    FlushReply,
    GenerateRequest,
    OutputBatch,
    StateReply,
    ToApi,
    ToScheduler,
)

Answer = StateReply | FlushReply
MAX_OPEN_QUERIES = 64
"""Questions that some replica has not answered: the oldest is forgotten beyond these, whoever asked has gone."""


class ReplicatedChannel:
    """`ApiChannel` over one channel per replica; make it inside the event loop. Closes them."""

    def __init__(self, channels: Sequence[ApiChannel]) -> None:
        assert len(channels) > 1
        self._channels = list(channels)
        self._replica_of: dict[str, int] = {}
        """Of each live request."""
        self._num_live = [0] * len(channels)
        self._ready: dict[int, EngineReady] = {}
        self._answers: dict[str, dict[int, Answer]] = {}
        self._arrived: asyncio.Queue[ToApi | ProtocolError | EngineDeadError] = asyncio.Queue()
        self._readers = [asyncio.create_task(self._read(index)) for index in range(len(channels))]

    async def send(self, message: ToScheduler) -> None:
        """See `ApiChannel.send`."""
        if isinstance(message, GenerateRequest):
            replica = self._choose(message)
            self._replica_of[message.rid] = replica
            self._num_live[replica] += 1
            await self._channels[replica].send(message)
        elif isinstance(message, AbortRequest) and message.rid is not None:
            asked = self._replica_of.get(message.rid)
            if asked is not None:
                await self._channels[asked].send(message)
        else:
            for channel in self._channels:
                await channel.send(message)

    async def recv(self) -> ToApi:
        """See `ApiChannel.recv`."""
        message = await self._arrived.get()
        if isinstance(message, ProtocolError | EngineDeadError):
            raise message
        return message

    def close(self) -> None:
        """See `ApiChannel.close`."""
        for reader in self._readers:
            reader.cancel()
        for channel in self._channels:
            channel.close()

    def _choose(self, request: GenerateRequest) -> int:
        if request.replica is not None:
            return request.replica
        if request.room is not None:
            return request.room.room % len(self._channels)
        return min(range(len(self._channels)), key=lambda index: self._num_live[index])

    async def _read(self, index: int) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                try:
                    message = await self._channels[index].recv()
                except ProtocolError as error:
                    self._arrived.put_nowait(error)
                    continue
                except EngineDeadError as error:
                    self._arrived.put_nowait(error)
                    return
                heard = self._hear(index, message)
                if heard is not None:
                    self._arrived.put_nowait(heard)

    def _hear(self, index: int, message: ToApi) -> ToApi | None:
        match message:
            case OutputBatch():
                for output in message.outputs:
                    if output.finish is not None and self._replica_of.pop(output.rid, None) is not None:
                        self._num_live[index] -= 1
                return message
            case EngineReady():
                self._ready[index] = message
                return _all_ready(self._ready) if len(self._ready) == len(self._channels) else None
            case StateReply() | FlushReply():
                return self._collect(index, message)

    def _collect(self, index: int, answer: Answer) -> Answer | None:
        answers = self._answers.setdefault(answer.query_id, {})
        answers[index] = answer
        if len(answers) < len(self._channels):
            while len(self._answers) > MAX_OPEN_QUERIES:
                del self._answers[next(iter(self._answers))]
            return None
        del self._answers[answer.query_id]
        ordered = [answers[replica] for replica in range(len(self._channels))]
        states = [one.state for one in ordered if isinstance(one, StateReply)]
        if states:
            return StateReply(query_id=answer.query_id, state=merge_states(states))
        flushed = [one for one in ordered if isinstance(one, FlushReply)]
        return FlushReply(
            query_id=answer.query_id,
            ok=all(one.ok for one in flushed),
            message="; ".join(f"replica {number}: {one.message}" for number, one in enumerate(flushed)),
        )


def merge_states(states: Sequence[EngineState]) -> EngineState:
    """The sums of the replicas, which are kept as `replicas`; facts that differ are those of the first that has one."""
    queues, memory = Counter[str](), Counter[str]()
    totals: dict[str, float] = {}
    for state in states:
        queues.update(state.queues)
        memory.update(state.memory)
        for name, value in state.counters.items():
            totals[name] = totals.get(name, 0.0) + value
    return EngineState(
        queues=dict(queues),
        memory=dict(memory),
        counters=totals,
        facts={
            name: next((state.facts[name] for state in states if state.facts.get(name) is not None), None)
            for name in states[0].facts
        },
        num_running_reqs=sum(state.num_running_reqs for state in states),
        num_queue_reqs=sum(state.num_queue_reqs for state in states),
        num_used_tokens=sum(state.num_used_tokens for state in states),
        max_total_tokens=sum(state.max_total_tokens for state in states),
        audit=[f"replica {number}: {found}" for number, state in enumerate(states) for found in state.audit],
        replicas=list(states),
    )


def _all_ready(ready: dict[int, EngineReady]) -> EngineReady:
    """What all can do: a request may come to any of them."""
    first = ready[0]
    return msgspec.structs.replace(
        first,
        context_length=min(one.context_length for one in ready.values()),
        max_total_tokens=min(one.max_total_tokens for one in ready.values()),
    )
