"""Jobs go to the server with the least to do, never more than it may have; both halves of a pair are looked after."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from pdserve.errors import EngineDeadError, PdserveError, RequestError
from pdserve.llm.outputs import BatchError
from pdserve.llm.runner import Job, OfflineRunner
from pdserve.protocol.messages import FinishReason, GenerateRequest, RoomAddress
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.server.engine_client.live_requests import RequestState
from pdserve.server.generation import Generation, GenerationUpdate
from tests.waiting import settle


@dataclasses.dataclass
class StandIn:
    """A `RunningServer` whose scheduler is the test: `generations` by request id, in the order of arrival."""

    most_requests: int
    num_live: int = 0

    def __post_init__(self) -> None:
        self.server = self.context = self.client = self
        self.generations: dict[str, Generation] = {}
        self.rooms: dict[str, RoomAddress | None] = {}
        self.aborted: list[str] = []

    def room(self) -> RoomAddress:
        return RoomAddress(host="127.0.0.1", port=1, room=len(self.rooms))

    async def submit(self, states: Sequence[RequestState]) -> Generation:
        name = states[0].name
        self.generations[name] = Generation(len(states), lambda _: self.closed(name))
        self.rooms |= {state.request.rid: state.request.room for state in states}
        return self.generations[name]

    def closed(self, name: str) -> None:
        if self.generations.pop(name, None) is not None:
            self.aborted.append(name)

    def finish(self, name: str, count: int = 1) -> None:
        generation = self.generations.pop(name)
        for index in range(count):
            generation.put(GenerationUpdate(index, "text", [1], finish=FinishReason(type="length", length=1)))

    def fail(self, name: str, error: PdserveError) -> None:
        self.generations.pop(name).fail(error)


class Call:
    """`OfflineRunner.run` in progress, and what it has delivered."""

    def __init__(self, runner: OfflineRunner, jobs: Sequence[Job]) -> None:
        self.results: dict[int, list[GenerationUpdate] | PdserveError] = {}
        self.task = asyncio.create_task(runner.run(jobs, self.deliver))

    def deliver(self, job: Job, result: list[GenerationUpdate] | PdserveError) -> None:
        self.results[job.number] = result


def jobs(count: int, n: int = 1) -> list[Job]:
    def request(number: int, j: int) -> GenerateRequest:
        return GenerateRequest(rid=f"{number}.{j}", input_ids=[1], sampling=CoreSamplingParams())

    return [Job(number, str(number), [request(number, j) for j in range(n)]) for number in range(count)]


async def test_no_more_than_fits_is_sent_and_the_idlest_server_gets_the_next() -> None:
    first, second = StandIn(2), StandIn(2)
    call = Call(OfflineRunner([], [first, second]), jobs(6))  # type: ignore[list-item]
    await settle()
    assert (first.num_live, second.num_live) == (2, 2)
    assert sorted([*first.generations, *second.generations]) == ["0", "1", "2", "3"]
    second.finish("3")
    await settle()
    assert sorted(second.generations) == ["1", "4"]
    while first.generations or second.generations:
        for server in (first, second):
            for name in list(server.generations):
                server.finish(name)
        await settle()
    await call.task
    assert sorted(call.results) == list(range(6))
    assert (first.num_live, second.num_live) == (0, 0)


async def test_a_prompt_with_more_answers_than_places_runs_alone() -> None:
    server = StandIn(2)
    call = Call(OfflineRunner([], [server]), jobs(2, n=5))  # type: ignore[list-item]
    await settle()
    assert list(server.generations) == ["0"]
    server.finish("0", 5)
    await settle()
    server.finish("1", 5)
    await call.task
    assert [len(result) for result in call.results.values() if isinstance(result, list)] == [5, 5]


async def test_a_failure_is_delivered_and_the_others_go_on() -> None:
    server = StandIn(4)
    call = Call(OfflineRunner([], [server]), jobs(3))  # type: ignore[list-item]
    await settle()
    refused = RequestError("no such room", status=400)
    server.fail("1", refused)
    await settle()
    assert not call.task.done()
    server.finish("0")
    server.finish("2")
    await call.task
    assert call.results[1] is refused
    assert isinstance(call.results[0], list) and isinstance(call.results[2], list)


async def test_what_may_pass_is_tried_again_under_another_id_and_in_another_room() -> None:
    prefill, decode = StandIn(8), StandIn(8)
    call = Call(OfflineRunner([prefill], [decode], pause_s=0.0), jobs(1))  # type: ignore[list-item]
    for _ in range(2):
        await settle()
        decode.fail("0", RequestError("broken", status=502))
    await settle()
    assert list(decode.rooms) == ["0.0", "0.0.1", "0.0.2"]
    assert decode.rooms == prefill.rooms
    assert len({room.room for room in decode.rooms.values() if room is not None}) == 3
    full = RequestError("full", status=503)
    decode.fail("0", full)
    await call.task
    assert call.results == {0: full}, "three times and no more"


async def test_cancelled_calls_abort_everything_and_give_their_places_back() -> None:
    server = StandIn(2)
    call = Call(OfflineRunner([], [server]), jobs(5))  # type: ignore[list-item]
    await settle()
    call.task.cancel()
    await asyncio.gather(call.task, return_exceptions=True)
    await settle()
    assert sorted(server.aborted) == ["0", "1"]
    assert server.num_live == 0


async def test_both_halves_of_a_pair_meet_in_the_same_rooms() -> None:
    prefill, decode = StandIn(8), StandIn(8)
    call = Call(OfflineRunner([prefill], [decode]), jobs(2, n=2))  # type: ignore[list-item]
    await settle()
    assert prefill.rooms == decode.rooms
    assert len(prefill.rooms) == 4
    assert None not in prefill.rooms.values()
    for server in (prefill, decode):
        for name in list(server.generations):
            server.finish(name, 2)
    await call.task
    assert (prefill.num_live, decode.num_live) == (0, 0)


async def test_prefill_s_failure_ends_decode_unless_decode_has_begun() -> None:
    prefill, decode = StandIn(8), StandIn(8)
    call = Call(OfflineRunner([prefill], [decode]), jobs(2))  # type: ignore[list-item]
    await settle()
    lost = EngineDeadError("gone")
    prefill.fail("0", lost)
    decode.generations["1"].put(GenerationUpdate(0, "t", [1]))
    await settle()
    prefill.fail("1", lost)
    await settle()
    assert call.results == {0: lost}
    assert decode.aborted == ["0"]
    decode.finish("1")
    await call.task
    result = call.results[1]
    assert isinstance(result, list) and result[0].text == "ttext"


async def test_decode_s_failure_ends_prefill() -> None:
    prefill, decode = StandIn(8), StandIn(8)
    call = Call(OfflineRunner([prefill], [decode]), jobs(1))  # type: ignore[list-item]
    await settle()
    lost = EngineDeadError("gone")
    decode.fail("0", lost)
    await call.task
    assert call.results == {0: lost}
    assert prefill.aborted == ["0"]


def test_a_batch_error_names_the_first_failure_and_has_all() -> None:
    errors = {4: RequestError("late"), 2: RequestError("full", status=503)}
    error = BatchError([None] * 6, errors)  # type: ignore[arg-type]
    assert str(error).startswith("2 of 6 requests failed, first number 2: full")
    assert error.__cause__ is errors[2]
    assert list(error.errors) == [2, 4]
