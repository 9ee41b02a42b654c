"""Workers that come and go while the router runs, over HTTP, in sglang-router's shapes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import web

from tests.unit.router.answers import begin_stream
from tests.waiting import until

RunWorld = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]
GENERATE = "/generate"


async def call(world: Any, method: str, url: str, body: Any = None) -> tuple[int, Any]:
    async with world.session.request(method, url, json=body) as response:
        return response.status, await response.json()


async def names(world: Any, url: str, count: int) -> list[str]:
    """Who answered each of `count` requests."""
    answers = [await call(world, "POST", url + GENERATE, {"text": "a"}) for _ in range(count)]
    assert {status for status, _ in answers} == {200}
    return [body["from"] for _, body in answers]


def test_the_list_has_sglang_routers_fields(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        async with world.router([prefill], [decode]) as url:
            status, listed = await call(world, "GET", url + "/workers")
            assert status == 200
            assert (listed["total"], listed["stats"]) == (
                2,
                {"prefill_count": 1, "decode_count": 1, "regular_count": 0},
            )
            first = listed["workers"][0]
            expected = {
                "url": prefill.url,
                "worker_type": "prefill",
                "bootstrap_port": 7000,
                "is_healthy": True,
                "load": 0,
                "connection_mode": "HTTP",
                "draining": False,
                "breaker": "closed",
            }
            assert {name: first[name] for name in expected} == expected
            for name in (first["id"], prefill.url, quote(prefill.url, safe="")):
                assert await call(world, "GET", f"{url}/workers/{name}") == (200, first)
            assert (await call(world, "GET", url + "/list_workers"))[1] == {"urls": [prefill.url, decode.url]}

    run_world(scenario)


def test_a_worker_that_is_added_serves_and_one_that_is_removed_does_not(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, old, new = await world.worker("p"), await world.worker("old"), await world.worker("new")
        async with world.router([prefill], [old], policy="round_robin") as url:
            body = {"url": new.url + "/", "worker_type": "decode"}
            status, accepted = await call(world, "POST", url + "/workers", body)
            assert (status, accepted["status"], accepted["url"]) == (202, "accepted", new.url)
            assert accepted["location"] == f"/workers/{accepted['worker_id']}"
            await world.until(lambda: world.healthy_urls(url), lambda urls: new.url in urls)
            assert sorted(await names(world, url, 4)) == ["new", "new", "old", "old"]
            assert (await call(world, "POST", url + "/workers", body))[1]["worker_id"] == accepted["worker_id"]
            status, removed = await call(world, "DELETE", f"{url}/workers/{quote(old.url, safe='')}")
            assert (status, removed["status"]) == (202, "accepted")
            assert await names(world, url, 3) == ["new"] * 3
            assert (await call(world, "GET", f"{url}/workers/{removed['worker_id']}"))[0] == 404
            async with world.session.get(url + "/metrics") as response:
                assert f'pdserve_router_worker_up{{role="decode",worker="{old.url}"}}' not in await response.text()
            checks = old.num_health
            seen = new.num_health
            await until(lambda: new.num_health >= seen + 3)
            assert old.num_health == checks, "nobody asks for it any more"

    run_world(scenario)


def test_a_router_without_workers_becomes_ready_when_a_pair_has_come(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        prefill.bootstrap_port = 7005
        async with world.router([], [], pd=True) as url:
            assert (await call(world, "GET", url + "/readiness"))[0] == 503
            assert (await call(world, "GET", url + "/liveness"))[0] == 200
            assert (await call(world, "POST", url + GENERATE, {"text": "a"}))[0] == 503
            await call(world, "POST", f"{url}/add_worker?url={prefill.url}&worker_type=prefill")
            await call(world, "POST", url + "/workers", {"url": decode.url, "worker_type": "decode"})
            await world.until(lambda: world.healthy_urls(url), lambda urls: len(urls) == 2)
            assert (await call(world, "GET", url + "/readiness"))[0] == 200
            assert await names(world, url, 1) == ["d"]
            assert decode.bodies[0]["bootstrap_port"] == 7005, "it was asked for its port"
            status, _ = await call(world, "POST", f"{url}/remove_worker?url={decode.url}")
            assert status == 202
            assert (await call(world, "GET", url + "/readiness"))[0] == 503

    run_world(scenario)


def test_a_draining_worker_ends_what_it_runs_and_gets_nothing_new(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        gate = asyncio.Event()

        async def stream(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = await begin_stream(request)
            await response.write(b"data: one\n\n")
            await gate.wait()
            await response.write(b"data: two\n\n")
            return response

        prefill = await world.worker("p")
        busy, other = await world.worker("busy", stream), await world.worker("other")
        async with world.router([prefill], [busy]) as url:
            running = await world.session.post(url + GENERATE, json={"text": "a", "stream": True})
            assert await running.content.readany() == b"data: one\n\n"
            await call(world, "POST", url + "/workers", {"url": other.url, "worker_type": "decode"})
            await world.until(lambda: world.healthy_urls(url), lambda urls: other.url in urls)
            _, removed = await call(world, "DELETE", f"{url}/workers/{busy.url}")
            assert "1 requests still run" in removed["message"]
            assert await names(world, url, 3) == ["other"] * 3
            _, state = await call(world, "GET", f"{url}/workers/{removed['worker_id']}")
            assert (state["draining"], state["load"]) == (True, 1)
            gate.set()
            assert await running.content.read() == b"data: two\n\n"
            await world.until(
                lambda: call(world, "GET", f"{url}/workers/{removed['worker_id']}"), lambda seen: seen[0] == 404
            )

    run_world(scenario)


def test_draining_can_be_begun_and_ended_without_removing(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        workers = [await world.worker(f"w{i}") for i in range(2)]
        async with world.router([], workers, policy="round_robin") as url:
            one = f"{url}/workers/{workers[0].url}"
            assert (await call(world, "PUT", one, {"draining": True}))[0] == 202
            assert await names(world, url, 3) == ["w1"] * 3
            assert (await call(world, "GET", one))[1]["draining"] is True
            assert (await call(world, "PUT", one, {"draining": False}))[0] == 202
            assert sorted(await names(world, url, 4)) == ["w0", "w0", "w1", "w1"]

    run_world(scenario)


def test_a_worker_can_be_forgotten_at_once_and_its_requests_go_on(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        gate = asyncio.Event()

        async def waits(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await gate.wait()
            return web.json_response({"from": worker.name})

        prefill, decode = await world.worker("p"), await world.worker("d", waits)
        async with world.router([prefill], [decode]) as url:
            running = asyncio.create_task(names(world, url, 1))
            await until(lambda: bool(decode.bodies))
            assert (await call(world, "DELETE", f"{url}/workers/{decode.url}?force=true"))[0] == 202
            assert (await call(world, "GET", f"{url}/workers/{decode.url}"))[0] == 404
            gate.set()
            assert await running == ["d"]
            async with world.session.get(url + "/metrics") as response:
                assert decode.url not in "".join(
                    line for line in (await response.text()).splitlines() if "inflight{" in line
                )

    run_world(scenario)


def test_metrics_of_a_worker_go_with_it_and_totals_stay(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        gate = asyncio.Event()

        async def fails(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({}, status=500)

        async def fails_late(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await gate.wait()
            return web.json_response({}, status=500)

        async def metrics() -> list[str]:
            async with world.session.get(url + "/metrics") as response:
                return (await response.text()).splitlines()

        total = 'pdserve_router_requests_total{path="/generate",status="500"}'
        prefill, decode = await world.worker("p"), await world.worker("d", fails, fails_late)
        async with world.router([prefill], [decode]) as url:
            assert (await call(world, "POST", url + GENERATE, {"text": "a"}))[0] == 500
            kinds = {line.partition("{")[0] for line in await metrics() if decode.url in line}
            assert {"pdserve_router_worker_errors_total", "pdserve_router_dispatched_total"} <= kinds
            late = asyncio.create_task(call(world, "POST", url + GENERATE, {"text": "a"}))
            await until(lambda: len(decode.bodies) == 2)
            assert (await call(world, "DELETE", f"{url}/workers/{decode.url}?force=true"))[0] == 202
            gate.set()
            assert (await late)[0] == 500
            assert [line for line in await metrics() if decode.url in line] == []
            assert f"{total} 2.0" in await metrics(), "what is counted for the router as a whole stays"
            assert any(prefill.url in line for line in await metrics())

    run_world(scenario)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "url"),
        ({"url": 7, "worker_type": "decode"}, "url"),
        ({"url": "nowhere", "worker_type": "decode"}, "url"),
        ({"url": "http://h:1/v1", "worker_type": "decode"}, "url"),
        ({"url": "http://h:1"}, "worker_type"),
        ({"url": "http://h:1", "worker_type": "regular"}, "worker_type"),
        ({"url": "http://h:1", "worker_type": "banana"}, "worker_type"),
        ({"url": "http://h:1", "worker_type": "prefill", "bootstrap_port": 0}, "bootstrap_port"),
        ({"url": "http://h:1", "worker_type": "decode", "bootstrap_port": 9}, "bootstrap_port"),
        ({"url": "http://h:1", "worker_type": "decode", "priority": 7}, "priority"),
        ({"url": "http://h:1", "worker_type": "decode", "colour": 7}, "colour"),
    ],
)
def test_a_worker_that_cannot_be_is_a_400_that_names_the_field(
    run_world: RunWorld, body: dict[str, Any], field: str
) -> None:
    async def scenario(world: Any) -> None:
        async with world.router([], [], pd=True) as url:
            status, said = await call(world, "POST", url + "/workers", body)
            assert (status, said["error"]["param"]) == (400, field), said
            assert field in said["error"]["message"]
            assert (await call(world, "GET", url + "/workers"))[1]["total"] == 0

    run_world(scenario)


def test_other_mistakes_are_named_too(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        async with world.router([prefill], [decode]) as url:
            status, said = await call(world, "POST", url + "/workers", {"url": prefill.url, "worker_type": "decode"})
            assert (status, said["error"]["code"]) == (409, "worker_exists")
            for method in ("GET", "PUT", "DELETE"):
                status, said = await call(world, method, url + "/workers/nobody", {"draining": True})
                assert (status, said["error"]["code"]) == (404, "worker_not_found")
            status, said = await call(world, "PUT", f"{url}/workers/{decode.url}", {"draining": "yes"})
            assert (status, said["error"]["param"]) == (400, "draining")
            async with world.session.post(url + "/workers", data=b"{") as response:
                assert response.status == 400
            assert (await call(world, "POST", url + "/add_worker"))[0] == 400
            assert (await call(world, "POST", url + "/remove_worker"))[0] == 404
            assert (await call(world, "GET", url + "/no/such/path"))[0] == 404
            status, said = await call(world, "GET", url + GENERATE)
            assert status == 405

    run_world(scenario)
