"""Several schedulers as one channel: who gets what, and one answer of many."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from pdserve.errors import EngineDeadError, ProtocolError
from pdserve.protocol.engine_state import EngineReady, EngineState
from pdserve.protocol.messages import (
    AbortRequest,
    CommandReply,
    EndMigration,
    EngineCoreOutput,
    FinishReason,
    FlushCache,
    GenerateRequest,
    MigrateOut,
    OutputBatch,
    RedirectReceiver,
    RoomAddress,
    SendPrefix,
    Shutdown,
    StateQuery,
    StateReply,
    ToApi,
    ToScheduler,
)
from pdserve.protocol.replicas import MAX_ARRIVING, MAX_OPEN_QUERIES, PROBE_HOST, REDIRECT_TOKENS, ReplicatedChannel
from pdserve.protocol.sampling import CoreSamplingParams

ENDED = FinishReason(type="length", length=1)


class Pipe:
    """`ApiChannel` to a scheduler that the test plays."""

    def __init__(self) -> None:
        self.sent: list[ToScheduler] = []
        self.up: asyncio.Queue[ToApi | Exception] = asyncio.Queue()
        self.closed = False

    async def send(self, message: ToScheduler) -> None:
        self.sent.append(message)

    async def recv(self) -> ToApi:
        message = await self.up.get()
        if isinstance(message, Exception):
            raise message
        return message

    def close(self) -> None:
        self.closed = True


def request(rid: str, room: int | None = None, num_tokens: int = 1) -> GenerateRequest:
    where = None if room is None else RoomAddress(host="h", port=1, room=room)
    return GenerateRequest(rid=rid, input_ids=[1] * num_tokens, sampling=CoreSamplingParams(), room=where)


def test_a_client_may_choose_the_replica_and_decode_is_sent_there() -> None:
    async def story(channel: ReplicatedChannel, pipes: list[Pipe]) -> None:
        chosen = msgspec.structs.replace(request("r", 7), replica=2)
        await channel.send(chosen)
        probe = RoomAddress(host=PROBE_HOST, port=None, room=8)
        await channel.send(msgspec.structs.replace(request("probe", 8), room=probe, replica=0))
        await channel.send(msgspec.structs.replace(request("again", 7), replica=0))

    pipes = play(story)
    assert asked(pipes) == [["probe"], [], ["r", "again"]], "a room that is in use stays where it is, to be refused"
    redirects = [[(m.room, m.replica) for m in pipe.sent if isinstance(m, RedirectReceiver)] for pipe in pipes]
    assert redirects[1][0] == (7, 2) and not redirects[0] and not redirects[2]


def asked(pipes: list[Pipe]) -> list[list[str]]:
    """Requests by replica."""
    return [[m.rid for m in pipe.sent if isinstance(m, GenerateRequest)] for pipe in pipes]


def state(num_running: int, **counters: float) -> EngineState:
    return EngineState(
        queues={"num_running_reqs": num_running},
        memory={"pages_total": 10},
        counters=counters,
        facts={"dtype": "float32"},
        num_running_reqs=num_running,
        num_queue_reqs=1,
        num_used_tokens=2,
        max_total_tokens=160,
        audit=["a page is lost"] if num_running == 5 else [],
        by_priority={"num_running_reqs": {num_running % 2: num_running}},
        gen_throughput=0.5,
    )


def ready(context_length: int) -> EngineReady:
    return EngineReady(
        model_type="llama",
        architectures=["L"],
        vocab_size=8,
        context_length=context_length,
        max_total_tokens=160,
        eos_token_ids=[2],
        facts={},
    )


def play(
    story: Callable[[ReplicatedChannel, list[Pipe]], Awaitable[None]], count: int = 3, *, named: bool = True
) -> list[Pipe]:
    async def run() -> list[Pipe]:
        pipes = [Pipe() for _ in range(count)]
        channel = ReplicatedChannel(pipes, named=named)
        await asyncio.wait_for(story(channel, pipes), 10)
        channel.close()
        return pipes

    return asyncio.run(run())


def test_a_room_names_its_replica_and_what_has_none_goes_where_least_is() -> None:
    async def story(channel: ReplicatedChannel, pipes: list[Pipe]) -> None:
        for rid, room in (("a", 4), ("b", 6), ("c", None), ("d", None)):
            await channel.send(request(rid, room))
        done = EngineCoreOutput(rid="a", token_ids=[3], finish=FinishReason(type="length", length=1))
        pipes[1].up.put_nowait(OutputBatch(outputs=[done]))
        assert isinstance(await channel.recv(), OutputBatch)
        await channel.send(request("e"))
        await channel.send(AbortRequest(rid="d"))
        await channel.send(AbortRequest(rid="a"))

    pipes = play(story)
    found = asked(pipes)
    assert found == [["b"], ["a", "e"], ["c", "d"]] or found == [["b", "d"], ["a", "e"], ["c"]], found
    aborts = [[m.rid for m in pipe.sent if isinstance(m, AbortRequest)] for pipe in pipes]
    assert sorted(aborts) == [[], [], ["d"]] and "d" in found[aborts.index(["d"])], "to its own replica; a has ended"


def test_a_probe_goes_to_the_replica_that_it_is_for() -> None:
    async def story(channel: ReplicatedChannel, pipes: list[Pipe]) -> None:
        for replica in (2, 0, 1):
            await channel.send(msgspec.structs.replace(request(f"probe-{replica}", 7 + replica), replica=replica))

    assert asked(play(story)) == [["probe-0"], ["probe-1"], ["probe-2"]]


def test_a_room_goes_elsewhere_when_its_replica_has_far_more_in_hand_and_that_one_is_told() -> None:
    async def story(channel: ReplicatedChannel, pipes: list[Pipe]) -> None:
        await channel.send(request("a", 3, REDIRECT_TOKENS))
        await channel.send(request("b", 6, 5))
        await channel.send(request("c", 9, 7))
        await channel.send(request("again", 9, 7))
        pipes[0].up.put_nowait(OutputBatch(outputs=[EngineCoreOutput(rid="a", token_ids=[3], finish=ENDED)]))
        assert isinstance(await channel.recv(), OutputBatch)
        await channel.send(request("d", 12))

    pipes = play(story)
    assert asked(pipes) == [["a", "b", "d"], ["c", "again"], []], "a room that is live stays where it is"
    redirects = [[(m.room, m.replica) for m in pipe.sent if isinstance(m, RedirectReceiver)] for pipe in pipes]
    assert redirects == [[(9, 1), (9, 1)], [], []]


def test_decode_s_rooms_go_where_the_fewest_requests_are() -> None:
    async def story(channel: ReplicatedChannel, pipes: list[Pipe]) -> None:
        for number in range(6):
            await channel.send(request(str(number), 3 * number))
        await channel.send(request("again", 3))

    pipes = play(story, named=False)
    assert asked(pipes) == [["0", "3"], ["1", "4", "again"], ["2", "5"]]
    assert not any(isinstance(m, RedirectReceiver) for pipe in pipes for m in pipe.sent)


def test_what_concerns_all_goes_to_all() -> None:
    async def story(channel: ReplicatedChannel, pipes: list[Pipe]) -> None:
        for message in (AbortRequest(rid=None), StateQuery(query_id="q"), FlushCache(query_id="f"), Shutdown()):
            await channel.send(message)

    pipes = play(story)
    assert all(len(pipe.sent) == 4 for pipe in pipes) and all(pipe.closed for pipe in pipes)


def test_one_answer_of_many() -> None:
    async def story(channel: ReplicatedChannel, pipes: list[Pipe]) -> None:
        pipes[2].up.put_nowait(StateReply(query_id="q", state=state(5, steps=1.0)))
        pipes[0].up.put_nowait(StateReply(query_id="q", state=state(1, steps=2.0, aborts=1.0)))
        pipes[1].up.put_nowait(StateReply(query_id="q", state=state(2)))
        reply = await channel.recv()
        assert isinstance(reply, StateReply) and reply.query_id == "q"
        merged = reply.state
        assert (merged.num_running_reqs, merged.num_queue_reqs, merged.max_total_tokens) == (8, 3, 480)
        assert merged.memory == {"pages_total": 30} and merged.counters == {"steps": 3.0, "aborts": 1.0}
        assert [one.num_running_reqs for one in merged.replicas] == [1, 2, 5]
        assert merged.audit == ["replica 2: a page is lost"]
        assert merged.by_priority == {"num_running_reqs": {1: 6, 0: 2}} and merged.gen_throughput == 1.5
        for pipe, ok in zip(pipes, (True, False, True), strict=True):
            pipe.up.put_nowait(CommandReply(query_id="f", ok=ok, message="m"))
        flushed = await channel.recv()
        assert isinstance(flushed, CommandReply) and not flushed.ok and "replica 1: m" in flushed.message

    play(story)


def test_a_final_failure_is_answered_at_once_and_only_once() -> None:
    async def story(channel: ReplicatedChannel, pipes: list[Pipe]) -> None:
        pipes[1].up.put_nowait(CommandReply(query_id="f", ok=False, message="busy", is_final=True))
        reply = await channel.recv()
        assert isinstance(reply, CommandReply) and not reply.ok and reply.is_final
        assert reply.message == "replica 1: busy"
        for number in (0, 2):
            pipes[number].up.put_nowait(CommandReply(query_id="f", ok=not number, message="m", is_final=bool(number)))
        for pipe in pipes:
            pipe.up.put_nowait(CommandReply(query_id="g", ok=True, message="m"))
        reply = await channel.recv()
        assert isinstance(reply, CommandReply) and reply.query_id == "g" and reply.ok and not reply.is_final

    play(story)


def test_it_is_ready_when_all_are_and_what_they_all_can_counts() -> None:
    async def story(channel: ReplicatedChannel, pipes: list[Pipe]) -> None:
        for pipe, length in zip(pipes, (64, 32), strict=True):
            pipe.up.put_nowait(ready(length))
        message = await channel.recv()
        assert isinstance(message, EngineReady) and message.context_length == 32

    play(story, count=2)


def test_errors_of_any_replica_come_through() -> None:
    async def story(channel: ReplicatedChannel, pipes: list[Pipe]) -> None:
        for error in (ProtocolError("junk"), EngineDeadError("gone")):
            pipes[1].up.put_nowait(error)
            with pytest.raises(type(error)) as caught:
                await channel.recv()
            assert caught.value is error

    play(story)


def test_questions_that_are_never_answered_are_forgotten() -> None:
    async def story(channel: ReplicatedChannel, pipes: list[Pipe]) -> None:
        for number in range(200):
            pipes[0].up.put_nowait(StateReply(query_id=str(number), state=state(1)))
        for pipe in pipes:
            pipe.up.put_nowait(StateReply(query_id="last", state=state(1)))
        reply = await channel.recv()
        assert isinstance(reply, StateReply) and reply.query_id == "last"
        for number in reversed(range(200)):
            pipes[1].up.put_nowait(StateReply(query_id=str(number), state=state(1)))
        for pipe in reversed(pipes):
            pipe.up.put_nowait(StateReply(query_id="end", state=state(1)))
        answered = []
        while isinstance(reply := await channel.recv(), StateReply) and reply.query_id != "end":
            answered.append(reply.query_id)
        assert answered == [str(number) for number in range(199, 199 - len(answered), -1)], "the newest are kept"
        assert 0 < len(answered) <= MAX_OPEN_QUERIES

    play(story, count=2)


def test_commands_of_a_migration_go_to_the_replica_that_has_the_request_and_it_alone_answers() -> None:
    def commands(rid: str) -> list[MigrateOut | EndMigration | SendPrefix]:
        return [
            SendPrefix(query_id=f"prefix {rid}", rid=rid, room=9),
            MigrateOut(query_id=f"out {rid}", rid=rid, room=9),
            EndMigration(query_id=f"end {rid}", rid=rid, commit=True),
        ]

    async def story(channel: ReplicatedChannel, pipes: list[Pipe]) -> None:
        for number in range(3):
            await channel.send(request(f"r{number}"))
        for number in (2, 0, 1):
            for command in commands(f"r{number}"):
                await channel.send(command)
                assert pipes[number].sent[-1] is command
                pipes[number].up.put_nowait(CommandReply(query_id=command.query_id, ok=True, message="m"))
                reply = await channel.recv()
                assert isinstance(reply, CommandReply) and reply.query_id == command.query_id
        for command in commands("unknown"):
            await channel.send(command)

    pipes = play(story, named=False)
    sent = [[m.rid for m in pipe.sent if isinstance(m, MigrateOut | EndMigration | SendPrefix)] for pipe in pipes]
    assert sent == [["r0"] * 3 + ["unknown"] * 3, ["r1"] * 3, ["r2"] * 3], "some replica must refuse an unknown rid"


def arriving(rid: str, name: str, num_new: int) -> GenerateRequest:
    return msgspec.structs.replace(
        request(rid, 11), sampling=CoreSamplingParams(max_new_tokens=num_new), migration_id=name
    )


def test_stages_and_the_request_behind_them_go_to_one_replica() -> None:
    async def story(channel: ReplicatedChannel, pipes: list[Pipe]) -> None:
        await channel.send(msgspec.structs.replace(arriving("a1", "a", 0), room=None))
        await channel.send(msgspec.structs.replace(arriving("b1", "b", 0), room=None))
        for pipe, rid in zip(pipes, ("a1", "b1"), strict=False):
            pipe.up.put_nowait(OutputBatch(outputs=[EngineCoreOutput(rid=rid, token_ids=[], finish=ENDED)]))
            assert isinstance(await channel.recv(), OutputBatch)
        await channel.send(request("busy"))  # the first replica is the least loaded one no more
        for rid, name, num_new in (("b2", "b", 0), ("a2", "a", 5), ("b3", "b", 5), ("a3", "a", 5)):
            await channel.send(msgspec.structs.replace(arriving(rid, name, num_new), room=None))

    found = asked(play(story, named=False))
    assert found == [["a1", "busy", "a2"], ["b1", "b2", "b3"], ["a3"]], "the migration of a ended with a2"


def test_migrations_that_never_end_are_forgotten() -> None:
    async def story(channel: ReplicatedChannel, pipes: list[Pipe]) -> None:
        for number in range(MAX_ARRIVING + 10):
            await channel.send(msgspec.structs.replace(arriving(f"s{number}", f"m{number}", 0), room=None))
        assert len(channel._arriving) == MAX_ARRIVING and "m9" not in channel._arriving

    play(story, named=False)
