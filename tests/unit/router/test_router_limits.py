"""Limits, queue and breakers through a real router: what clients see, and what workers are spared."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from aiohttp import web

from pdserve.errors import RequestError
from pdserve.http.access import LARGE_BODY_BYTES, BodyBudget
from pdserve.router.app import ROUTER
from pdserve.router.config.config import BreakerConfig, HealthConfig, LimitConfig
from pdserve.router.proxy.generate import parse_object
from pdserve.router.workers.admission import Admission
from tests.unit.router.answers import begin_stream, ok, silent
from tests.waiting import settle, until

RunWorld = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]
GENERATE = "/generate"


class Gate:
    """Workers that answer when they are told to, and remember how many they had at once."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.inside = 0
        self.most = 0

    async def __call__(self, worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await self.open.wait()
            await settle()
        finally:
            self.inside -= 1
        return web.json_response({"from": worker.name, "text": body.get("text")})


async def status_of(world: Any, url: str, **body: Any) -> int:
    async with world.session.post(url + GENERATE, json={"text": "a", **body}) as response:
        await response.read()
        return int(response.status)


async def metric(world: Any, url: str, name: str) -> float:
    async with world.session.get(url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


class Clock:
    """The router's clock for breakers, moved on by hand."""

    ahead_s = 0.0

    def now(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(Admission, "now", staticmethod(made.now))
    return made


async def failing(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "broken"}}, status=500)


def test_no_worker_gets_more_than_its_share_and_all_who_wait_are_served(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        gate = Gate()
        prefill, decode = await world.worker("p"), await world.worker("d", gate)
        limits = LimitConfig(max_inflight=3, queue_size=50)
        async with world.router([prefill], [decode], limits=limits) as url:
            calls = [asyncio.create_task(status_of(world, url)) for _ in range(20)]
            await world.until(lambda: metric(world, url, "pdserve_router_queued "), lambda count: count == 17)
            gate.open.set()
            assert await asyncio.gather(*calls) == [200] * 20
            assert gate.most == 3
            assert await world.loads(url) == [0, 0]
            assert await metric(world, url, "pdserve_router_queued ") == 0

    run_world(scenario)


def test_one_too_many_is_a_503_with_a_time_to_come_back(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        gate = Gate()
        prefill, decode = await world.worker("p"), await world.worker("d", gate)
        limits = LimitConfig(max_inflight=1, queue_size=1)
        async with world.router([prefill], [decode], limits=limits) as url:
            calls = [asyncio.create_task(status_of(world, url)) for _ in range(2)]
            await world.until(lambda: metric(world, url, "pdserve_router_queued "), lambda count: count == 1)
            async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1")
                assert (await response.json())["error"]["code"] == "queue_full"
            gate.open.set()
            assert await asyncio.gather(*calls) == [200] * 2
            assert await metric(world, url, 'pdserve_router_refused_total{reason="queue_full"}') == 1

    run_world(scenario)


def test_a_queue_time_out_is_a_503_and_the_deadline_a_504(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d", silent)
        limits = LimitConfig(max_inflight=1, queue_timeout_s=0.05)
        async with world.router([prefill], [decode], limits=limits, request_timeout_s=0.5) as url:
            first = asyncio.create_task(status_of(world, url))
            await until(lambda: bool(decode.bodies))
            assert await status_of(world, url) == 503
            assert await first == 504
        assert len(decode.bodies) == 1

    run_world(scenario)


def test_clients_that_hang_up_in_the_queue_never_reach_a_worker(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        gate = Gate()
        prefill, decode = await world.worker("p"), await world.worker("d", gate)
        limits = LimitConfig(max_inflight=1)
        async with world.router([prefill], [decode], limits=limits) as url:
            calls = [asyncio.create_task(status_of(world, url, text=str(number))) for number in range(10)]
            await world.until(lambda: metric(world, url, "pdserve_router_queued "), lambda count: count == 9)
            await until(lambda: bool(decode.bodies))
            running = decode.bodies[0]["text"]
            leave = [call for number, call in enumerate(calls) if str(number) != running][::2]
            for call in leave:
                call.cancel()
            await world.until(
                lambda: metric(world, url, "pdserve_router_queued "), lambda count: count == 9 - len(leave)
            )
            gate.open.set()
            stayed = [call for call in calls if call not in leave]
            assert await asyncio.gather(*stayed) == [200] * len(stayed)
            assert len(decode.bodies) == len(stayed)
            await world.until(lambda: world.loads(url), lambda seen: seen == [0, 0])

    run_world(scenario)


def test_an_abort_reaches_those_who_wait_in_the_router(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        gate = Gate()
        prefill, decode = await world.worker("p", gate, ok), await world.worker("d", gate, ok)
        limits = LimitConfig(max_inflight=1)
        async with world.router([prefill], [decode], limits=limits) as url:
            first = asyncio.create_task(status_of(world, url, rid="one"))
            await until(lambda: bool(decode.bodies))
            second = asyncio.create_task(status_of(world, url, rid="two"))
            await world.until(lambda: metric(world, url, "pdserve_router_queued "), lambda count: count == 1)
            async with world.session.post(url + "/abort_request", json={"rid": "two"}) as response:
                assert response.status == 200
            assert await second == 400
            gate.open.set()
            assert await first == 200
        assert decode.paths.count("/abort_request") == 1

    run_world(scenario)


@pytest.mark.parametrize("sick_role", ["prefill", "decode"])
def test_a_failing_half_opens_its_breaker_spares_the_pair_and_closes_again(
    run_world: RunWorld, clock: Clock, sick_role: str
) -> None:
    async def scenario(world: Any) -> None:
        sick = await world.worker("sick", failing)
        well = await world.worker("well", silent)
        pair = ([sick], [well]) if sick_role == "prefill" else ([well], [sick])
        breaker = BreakerConfig(failure_threshold=3, success_threshold=2, open_s=3600)
        async with world.router(*pair, breaker=breaker) as url:
            for _ in range(3):
                assert await status_of(world, url) == 500
            async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                assert response.status == 503
                assert 3000 < int(response.headers["Retry-After"]) <= 3600
                error = (await response.json())["error"]
                assert error["code"] == "breaker_open"
                assert sick_role in error["message"]
            assert len(sick.bodies) == len(well.bodies) == 3, "nothing was sent to either half"
            sick.answers = well.answers = [ok]
            clock.ahead_s = 4000
            assert [await status_of(world, url) for _ in range(3)] == [200] * 3
            assert await metric(world, url, "pdserve_router_worker_breaker") == 0, "both are closed"
            async with world.session.get(url + "/workers") as response:
                states = {one["url"]: one["breaker"] for one in (await response.json())["workers"]}
            assert set(states.values()) == {"closed"}

    run_world(scenario)


def test_a_probe_that_fails_opens_it_again_and_one_that_hangs_up_does_not(run_world: RunWorld, clock: Clock) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p", silent), await world.worker("d", failing)
        breaker = BreakerConfig(failure_threshold=1, success_threshold=1, open_s=3600)
        async with world.router([prefill], [decode], breaker=breaker) as url:
            assert [await status_of(world, url) for _ in range(2)] == [500, 503]
            clock.ahead_s = 4000
            assert [await status_of(world, url) for _ in range(2)] == [500, 503], "the probe failed"
            clock.ahead_s = 8000
            decode.answers = [silent]
            probe = asyncio.create_task(status_of(world, url))
            await until(lambda: len(decode.bodies) == 3)
            assert await status_of(world, url) == 503, "one probe at a time"
            probe.cancel()
            await world.until(lambda: world.loads(url), lambda loads: loads == [0, 0])
            decode.answers = prefill.answers = [ok]
            assert await status_of(world, url) == 200, "who hung up has said nothing"

    run_world(scenario)


def test_who_comes_back_as_another_process_is_used_at_once_and_who_only_felt_ill_is_not(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p", ok), await world.worker("d", failing, ok)
        breaker = BreakerConfig(failure_threshold=1, open_s=3600)
        async with world.router([prefill], [decode], breaker=breaker) as url:
            assert [await status_of(world, url) for _ in range(2)] == [500, 503]
            decode.health_status = 503
            await world.until(lambda: world.healthy_urls(url), lambda urls: decode.url not in urls)
            decode.health_status = 200
            await world.until(lambda: world.healthy_urls(url), lambda urls: decode.url in urls)
            assert await status_of(world, url) == 503, "the same process, for all that is known"
            port = int(decode.url.rsplit(":", 1)[1])
            await decode.stop()
            await world.until(lambda: world.healthy_urls(url), lambda urls: decode.url not in urls)
            await decode.start(port)
            await world.until(lambda: world.healthy_urls(url), lambda urls: decode.url in urls)
            assert await status_of(world, url) == 200

    run_world(scenario)


def test_what_is_the_clients_fault_or_a_full_worker_opens_no_breaker(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        async def refuse(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            headers = {"Retry-After": "1"} if body["status"] == 503 else None
            return web.json_response({}, status=body["status"], headers=headers)

        prefill, decode = await world.worker("p", silent), await world.worker("d", refuse)
        breaker = BreakerConfig(failure_threshold=1)
        async with world.router([prefill], [decode], breaker=breaker) as url:
            for status in (400, 404, 429, 503, 400):
                assert await status_of(world, url, status=status) == status

    run_world(scenario)


def test_a_pair_that_lets_the_deadline_pass_is_blamed_for_it(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p", ok), await world.worker("d", silent)
        breaker = BreakerConfig(failure_threshold=1)
        async with world.router([prefill], [decode], breaker=breaker, request_timeout_s=0.1) as url:
            assert await status_of(world, url) == 504
            async with world.session.get(url + "/workers") as response:
                states = [one["breaker"] for one in (await response.json())["workers"]]
            assert states == ["closed", "open"], "prefill had answered"

    run_world(scenario)


def test_streams_that_break_count_against_decode_and_good_ones_clear_it(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        async def stream(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = await begin_stream(request)
            await response.write(b"data: one\n\n")
            if body["breaks"]:
                assert request.transport is not None
                request.transport.abort()
            return response

        prefill, decode = await world.worker("p"), await world.worker("d", stream)
        breaker = BreakerConfig(failure_threshold=2)
        async with world.router([prefill], [decode], breaker=breaker) as url:
            for breaks in (True, False, True, False, True):
                assert await status_of(world, url, breaks=breaks) == 200
            await world.until(lambda: world.loads(url), lambda loads: loads == [0, 0])
            assert await status_of(world, url, breaks=True) == 200
            await world.until(lambda: status_of(world, url, breaks=False), lambda status: status == 503)

    run_world(scenario)


def test_a_client_that_leaves_a_stream_says_nothing_of_the_worker(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        async def stream(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = await begin_stream(request)
            await response.write(b"data: one\n\n")
            return await silent(worker, request, body)

        prefill, decode = await world.worker("p"), await world.worker("d", stream)
        breaker = BreakerConfig(failure_threshold=1)
        async with world.router([prefill], [decode], breaker=breaker) as url:
            for _ in range(3):
                response = await world.session.post(url + GENERATE, json={"text": "a", "stream": True})
                assert await response.content.readany()
                response.close()
            await world.until(lambda: world.loads(url), lambda loads: loads == [0, 0])
            response = await world.session.post(url + GENERATE, json={"text": "a"})
            assert response.status == 200
            response.close()

    run_world(scenario)


def test_policies_go_by_what_workers_report(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        workers = [await world.worker(f"w{i}") for i in range(2)]
        workers[0].reported, workers[1].reported = 40, 1
        async with world.router([], workers, policy="least_loaded") as url:
            await until(lambda: all(worker.num_load_asked >= 2 for worker in workers))
            for _ in range(10):
                assert await status_of(world, url) == 200
            assert [len(worker.bodies) for worker in workers] == [0, 10]
            async with world.session.get(url + "/get_loads") as response:
                listed = (await response.json())["workers"]
            assert [one["load"] for one in listed] == [400, 10]
        async with world.router([], workers, policy="round_robin") as url:
            asked = [worker.num_load_asked for worker in workers]
            for _ in range(4):
                assert await status_of(world, url) == 200
            assert [worker.num_load_asked for worker in workers] == asked, "nobody goes by it"

    run_world(scenario)


def test_without_health_checks_workers_are_believed_until_a_connection_breaks(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        workers = [await world.worker(f"w{i}") for i in range(2)]
        async with world.router([], workers, health=HealthConfig(enabled=False), policy="round_robin") as url:
            await workers[0].stop()
            assert [await status_of(world, url) for _ in range(6)] == [200] * 6
        assert [worker.num_health for worker in workers] == [0, 0]

    run_world(scenario)


def test_large_bodies_take_turns_and_small_ones_do_not_wait(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w", ok)
        async with world.router([], [worker]) as url:
            bodies = world.app[ROUTER].bodies
            async with bodies.turn(LARGE_BODY_BYTES + 1):
                large = asyncio.create_task(status_of(world, url, text="a" * LARGE_BODY_BYTES))
                await until(lambda: bodies.held_bytes > LARGE_BODY_BYTES)
                assert [await status_of(world, url) for _ in range(5)] == [200] * 5
                assert len(worker.bodies) == 5, "the large one waits for its turn"
            assert await large == 200
            assert len(worker.bodies[-1]["text"]) == LARGE_BODY_BYTES

    run_world(scenario)


def test_a_large_body_waits_for_its_turn_before_each_reading_of_it(
    run_world: RunWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w", ok)
        async with world.router([], [worker]) as url:
            turns: list[int] = []
            taken = BodyBudget.turn

            def turn(self: BodyBudget, num_bytes: int) -> AbstractAsyncContextManager[None]:
                turns.append(num_bytes)
                return taken(self, num_bytes)

            monkeypatch.setattr(BodyBudget, "turn", turn)
            assert await status_of(world, url, text="a" * LARGE_BODY_BYTES) == 200
            assert len(turns) == 2 and min(turns) > LARGE_BODY_BYTES, "counting its values, and parsing it"

    run_world(scenario)


@pytest.mark.parametrize(
    ("extra", "is_kept"),
    [
        (b'"a": 1', True),
        (b'"pdserve_resume": null', False),
        (b'"pdserve\\u005fresume": {"head": {}}', False),
        (b'"a": [' + b"[]," * 200 + b"[]]", False),
    ],
)
def test_the_json_of_a_large_body_is_kept_if_the_worker_may_see_all_of_it(extra: bytes, is_kept: bool) -> None:
    data = b'{"text": "' + b"a" * LARGE_BODY_BYTES + b'", ' + extra + b"}"
    body, kept = parse_object(data)
    assert kept is not None and json.loads(kept) == body and "pdserve_resume" not in body
    assert (kept is data) is is_kept
    assert parse_object(b'{"text": "a", ' + extra + b"}")[1] is None, "each attempt serializes a small body"


def test_a_large_body_with_too_many_levels_is_refused(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w", ok)
        async with world.router([], [worker]) as url:
            data = b'{"text": "' + b"a" * LARGE_BODY_BYTES + b'", "a": ' + b"[" * 300 + b"]" * 300 + b"}"
            headers = {"Content-Type": "application/json"}
            async with world.session.post(url + GENERATE, data=data, headers=headers) as response:
                assert response.status == 400 and "nested too deeply" in await response.text()
            assert worker.bodies == []

    run_world(scenario)


@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/update_weights_from_tensor"])
def test_an_update_that_is_no_object_or_nested_too_deeply_is_refused(run_world: RunWorld, path: str) -> None:
    async def scenario(world: Any) -> None:
        async with world.router([], [await world.worker("w")]) as url:
            for body in (b"[]", b"{", b'{"tensors": ' + b"[" * 300 + b"]" * 300 + b"}"):
                async with world.session.post(
                    url + path, data=body, headers={"Content-Type": "application/json"}
                ) as response:
                    assert response.status == 400 and (await response.json())["error"]["message"]

    run_world(scenario)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b'{"options": {"seed": NaN}}', "options.seed"),
        (b'{"stop": ["a", {"x": -Infinity}]}', "stop.x"),
        (b'{"a": 1e400}', "a"),
        (b'{"a": ', None),
        (b'{"a": NaN, "b": ' + b"[" * 100_000, None),
    ],
)
def test_a_number_that_is_not_finite_is_named_by_its_path(data: bytes, field: str | None) -> None:
    with pytest.raises(RequestError) as raised:
        parse_object(data)
    assert (raised.value.status, raised.value.field) == (400, field)
