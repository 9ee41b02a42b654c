"""One channel over the schedulers of all data-parallel replicas. Owned by the API process when `dp_size` is above 1.

A request is sent to the replica with the fewest live requests. On a prefill server the room names the replica (room %
dp_size), to which decode connects. If that replica holds over `REDIRECT_TOKENS` more prompt tokens than the least
loaded one, the latter gets the request. The named replica then receives a `RedirectReceiver` and redirects decode. A
request for a live room is sent to that room's replica, which refuses it. Queries are sent to all replicas and answered
when all have replied, or one with `CommandReply.is_final`. A command to move a request is sent to the replica that has
it. The stages of a migration from another server, and the request itself, are sent to one replica, whose prefix cache
then has the stages.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Sequence

import msgspec

from pdserve.errors import EngineDeadError, ProtocolError
from pdserve.protocol.channel import ApiChannel
from pdserve.protocol.engine_state import EngineReady, EngineState, SchedulerHeartbeat
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import (
    AbortRequest,
    CommandReply,
    EndMigration,
    ExtractReply,
    ExtractRequest,
    GenerateRequest,
    KVPart,
    MigrateOut,
    OutputBatch,
    RedirectReceiver,
    SendPrefix,
    StateReply,
    ToApi,
    ToScheduler,
)

Answer = StateReply | CommandReply
PROBE_HOST = "2.2.2.2"
"""Bootstrap host of requests that transfer no KV; no decode server connects for them."""
REDIRECT_TOKENS = 2048
"""Prompt tokens by which the named replica's load may exceed the least one: prefilling more takes longer than the
redirect."""
MAX_ARRIVING = 4096
"""Migrations to here with a stage and without their end. Beyond this number the oldest is forgotten."""
MAX_OPEN_QUERIES = 64
"""Queries that some replica has not answered. Beyond this number the oldest is dropped; its caller has timed out."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Live:
    """A live request: the index of its replica, its bootstrap room, and the length of its prompt in tokens."""

    replica: int
    room: int | None
    num_tokens: int


class ReplicatedChannel:
    """`ApiChannel` over one channel per replica, which it closes. Construct it inside the event loop.

    `named`: bootstrap rooms name their replica, as on a prefill server.
    """

    def __init__(self, channels: Sequence[ApiChannel], *, named: bool) -> None:
        assert len(channels) > 1
        self._channels = list(channels)
        self._named = named
        self._live: dict[str, _Live] = {}
        self._rooms: dict[int, str] = {}
        """rid of the first request of each live room."""
        self._num_live = [0] * len(channels)
        self._num_tokens = [0] * len(channels)
        """Prompt tokens of live requests, by replica."""
        self._placed: dict[str, int] = {}
        """Replicas of requests whose KV was sent before them, by rid."""
        self._arriving: dict[str, int] = {}
        """Replicas of migrations to here, by `migration_id`; a migration ends with the request itself."""
        self._ready: dict[int, EngineReady] = {}
        self._answers: dict[str, dict[int, Answer]] = {}
        self._answered: set[str] = set()
        """Those in `_answers` that have failed, and were answered before all replicas have replied."""
        self._single: dict[str, None] = {}
        """Queries that one replica alone answers: it has the request."""
        self._arrived: asyncio.Queue[ToApi | ProtocolError | EngineDeadError] = asyncio.Queue()
        self._readers = [asyncio.create_task(self._read(index)) for index in range(len(channels))]

    async def send(self, message: ToScheduler) -> None:
        """See `ApiChannel.send`."""
        if isinstance(message, GenerateRequest):
            await self._start(message)
        elif isinstance(message, KVPart):
            if message.rid not in self._placed:
                self._placed[message.rid] = self._least_loaded()
            await self._channels[self._placed[message.rid]].send(message)
        elif isinstance(message, ExtractRequest) and message.rid not in self._live:
            gone = Failure(code="not_live", message="the request has ended", status=404, origin="client")
            self._arrived.put_nowait(ExtractReply(query_id=message.query_id, rid=message.rid, failure=gone))
        elif isinstance(message, ExtractRequest) or (isinstance(message, AbortRequest) and message.rid is not None):
            assert message.rid is not None
            live = self._live.get(message.rid)
            if live is not None:
                await self._channels[live.replica].send(message)
        elif isinstance(message, MigrateOut | EndMigration | SendPrefix):
            live = self._live.get(message.rid)
            self._single[message.query_id] = None
            if len(self._single) > MAX_OPEN_QUERIES:
                del self._single[next(iter(self._single))]
            await self._channels[0 if live is None else live.replica].send(message)
        else:
            for channel in self._channels:
                await channel.send(message)

    async def recv(self) -> ToApi:
        """See `ApiChannel.recv`."""
        message = await self._arrived.get()
        if isinstance(message, ProtocolError | EngineDeadError):
            raise message
        return message

    def begin_role(self, *, named: bool) -> None:
        """Fit the channel to another role of the server. `named`: see the class."""
        self._named = named

    def close(self) -> None:
        """See `ApiChannel.close`."""
        for reader in self._readers:
            reader.cancel()
        for channel in self._channels:
            channel.close()

    async def _start(self, request: GenerateRequest) -> None:
        room = None if request.room is None else request.room.room
        replica = self._choose(request, room)
        self._live.setdefault(request.rid, _Live(replica, room, len(request.given_ids)))
        self._num_live[replica] += 1
        self._num_tokens[replica] += len(request.given_ids)
        if room is not None:
            self._rooms.setdefault(room, request.rid)
            named = room % len(self._channels)
            if self._named and named != replica and not is_probe(request):
                redirect = RedirectReceiver(room=room, input_ids=request.given_ids, replica=replica, lora=request.lora)
                await self._channels[named].send(redirect)
        await self._channels[replica].send(request)

    def _choose(self, request: GenerateRequest, room: int | None) -> int:
        if room is not None and room in self._rooms:
            return self._live[self._rooms[room]].replica
        placed = self._placed.pop(request.rid, None)
        if placed is not None:
            return placed
        if request.replica is not None:
            return request.replica
        if request.migration_id:
            return self._choose_for_migration(request)
        load = self._num_tokens if self._named else self._num_live
        least = self._least_loaded()
        if room is None or not self._named:
            return least
        named = room % len(self._channels)
        return least if load[named] - load[least] > REDIRECT_TOKENS else named

    def _choose_for_migration(self, request: GenerateRequest) -> int:
        """Return the replica of a stage, which generates no token, or of the request behind it."""
        replica = self._arriving.pop(request.migration_id, None)
        if replica is None:
            replica = self._least_loaded()
        if request.sampling.max_new_tokens == 0:
            self._arriving[request.migration_id] = replica
            if len(self._arriving) > MAX_ARRIVING:
                del self._arriving[next(iter(self._arriving))]
        return replica

    def _least_loaded(self) -> int:
        load = self._num_tokens if self._named else self._num_live
        return min(range(len(self._channels)), key=lambda index: load[index])

    def _ended(self, rid: str) -> None:
        live = self._live.pop(rid, None)
        if live is None:
            return
        self._num_live[live.replica] -= 1
        self._num_tokens[live.replica] -= live.num_tokens
        if live.room is not None and self._rooms.get(live.room) == rid:
            del self._rooms[live.room]

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
                    if output.finish is not None:
                        self._ended(output.rid)
                return message
            case SchedulerHeartbeat() | ExtractReply() | KVPart():
                return message
            case EngineReady():
                self._ready[index] = message
                if len(self._ready) < len(self._channels):
                    return None
                ready, self._ready = self._ready, {}  # each replica sends another one with each role change
                return _all_ready(ready)
            case StateReply() | CommandReply():
                return self._collect(index, message)

    def _collect(self, index: int, answer: Answer) -> Answer | None:
        if answer.query_id in self._single:
            del self._single[answer.query_id]
            return answer
        answers = self._answers.setdefault(answer.query_id, {})
        answers[index] = answer
        was_answered = answer.query_id in self._answered
        if len(answers) == len(self._channels):
            self._forget(answer.query_id)
        else:
            is_final = isinstance(answer, CommandReply) and answer.is_final
            if is_final:
                self._answered.add(answer.query_id)
            while len(self._answers) > MAX_OPEN_QUERIES:
                self._forget(next(iter(self._answers)))
            if not is_final:
                return None
        if was_answered:
            return None
        ordered = sorted(answers.items())
        states = [one.state for _, one in ordered if isinstance(one, StateReply)]
        if states:
            return StateReply(query_id=answer.query_id, state=merge_states(states))
        replies = [(replica, one) for replica, one in ordered if isinstance(one, CommandReply)]
        return CommandReply(
            query_id=answer.query_id,
            ok=all(one.ok for _, one in replies),
            message="; ".join(f"replica {replica}: {one.message}" for replica, one in replies),
            payload=replies[0][1].payload,
            is_final=any(one.is_final for _, one in replies),
        )

    def _forget(self, query_id: str) -> None:
        del self._answers[query_id]
        self._answered.discard(query_id)


def is_probe(request: GenerateRequest) -> bool:
    """Whether `request` has the fake bootstrap host, so that no decode server connects for it."""
    return request.room is not None and request.room.host == PROBE_HOST


def merge_states(states: Sequence[EngineState]) -> EngineState:
    """Sum the states of all replicas and keep them as `replicas`.

    A fact is that of the first replica whose value is not None. `oldest_orphan_s` is the maximum.
    """
    queues, memory = Counter[str](), Counter[str]()
    totals: dict[str, float] = {}
    failures = Counter[str]()
    by_priority: dict[str, Counter[int]] = {}
    for state in states:
        for queue, numbers in state.by_priority.items():
            by_priority.setdefault(queue, Counter()).update(numbers)
        failures.update(state.failures)
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
        failures=dict(failures),
        peers=[peer for state in states for peer in state.peers],
        oldest_orphan_s=max(state.oldest_orphan_s for state in states),
        by_priority={queue: dict(numbers) for queue, numbers in by_priority.items()},
        gen_throughput=sum(state.gen_throughput for state in states),
        progress=sum(state.progress for state in states),
        probes={rid: why for state in states for rid, why in state.probes.items()},
        replicas=list(states),
    )


def _all_ready(ready: dict[int, EngineReady]) -> EngineReady:
    """Limits that hold on every replica: the smallest context and KV pool."""
    first = ready[0]
    return msgspec.structs.replace(
        first,
        context_length=min(one.context_length for one in ready.values()),
        max_total_tokens=min(one.max_total_tokens for one in ready.values()),
    )
