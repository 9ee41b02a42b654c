"""Workers that change their role: the router sees it, moves them, and sends them nothing that they cannot serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web

from pdserve.base.stream_state import MEMORY_RELEASED, NO_ROLE, ROLE_HEADER
from pdserve.router.app import ROUTER
from pdserve.router.config.config import BreakerConfig, RouterAccessConfig
from tests.unit.router.conftest import FakeWorker, World, answer_ok
from tests.waiting import until

Run = Callable[[Callable[[World], Coroutine[Any, Any, None]]], None]
PATH = "/pd_role_switch"


async def answer_by_role(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """As pdserve's servers do: refuses what is for another role."""
    if request.path == PATH:
        worker.mode = body["new_role"]
        return web.json_response({"success": True, "new_role": worker.mode})
    if request.headers[ROLE_HEADER] != worker.mode:
        headers = {ROLE_HEADER: worker.mode or "", "Retry-After": "1"}
        return web.json_response({"error": {"code": "wrong_role"}}, status=503, headers=headers)
    return await answer_ok(worker, request, body)


async def servers(world: World, *modes: str) -> list[FakeWorker]:
    made = [await world.worker(f"{mode}-{number}", answer_by_role) for number, mode in enumerate(modes)]
    for worker, mode in zip(made, modes, strict=True):
        worker.mode = mode
    return made


async def pools(world: World, url: str) -> dict[str, list[str]]:
    """The names of the usable workers by their role."""
    async with world.session.get(f"{url}/workers") as response:
        listed = (await response.json())["workers"]
    names = {worker.url: worker.name for worker in world.workers}
    usable = [entry for entry in listed if entry["is_healthy"] and not entry["draining"]]
    return {
        role: sorted(names[entry["url"]] for entry in usable if entry["worker_type"] == role)
        for role in ("prefill", "decode", "regular")
    }


async def ask(world: World, url: str) -> tuple[int, dict[str, Any]]:
    async with world.session.post(f"{url}/generate", json={"text": "x"}) as response:
        return response.status, await response.json()


async def switch(world: World, url: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with world.session.post(url + PATH, json=body) as response:
        return response.status, await response.json()


def test_a_worker_that_says_another_role_moves_by_itself_and_all_that_was_known_of_it_is_gone(run_world: Run) -> None:
    async def scenario(world: World) -> None:
        prefill, first, second = await servers(world, "prefill", "decode", "decode")
        breaker = BreakerConfig(failure_threshold=1, open_s=600.0)
        async with world.router([prefill], [first, second], breaker=breaker, policy="round_robin") as url:

            async def fail(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
                return web.json_response({"error": {"code": "bug"}}, status=500)

            second.answers = [fail]
            while (await ask(world, url))[0] == 200:
                pass
            async with world.session.get(f"{url}/workers/{second.url}") as response:
                before = await response.json()
            assert before["breaker"] == "open"
            second.answers, second.mode, second.bootstrap_port = [answer_by_role], "prefill", 7777
            await world.until(lambda: pools(world, url), lambda now: now["prefill"] == ["decode-2", "prefill-0"])
            assert (await pools(world, url))["decode"] == ["decode-1"]
            async with world.session.get(f"{url}/workers/{before['id']}") as response:
                after = await response.json()
            assert (after["url"], after["breaker"], after["bootstrap_port"]) == (second.url, "closed", 7777)
            second.bodies.clear()
            assert [(await ask(world, url))[0] for _ in range(4)] == [200] * 4
            assert {body["bootstrap_port"] for body in second.bodies} == {7777}
            async with world.session.get(f"{url}/metrics") as response:
                lines = [line for line in (await response.text()).splitlines() if second.url in line]
            now = ('role="prefill"', f'prefill="{second.url}"')
            assert lines and all(any(text in line for text in now) for line in lines)

    run_world(scenario)


def test_a_request_that_comes_too_early_for_the_health_check_goes_elsewhere(run_world: Run) -> None:
    async def scenario(world: World) -> None:
        prefill, first, second = await servers(world, "prefill", "decode", "decode")
        async with world.router([prefill], [first, second], check_interval_s=600.0, policy="round_robin") as url:
            second.mode = "prefill"
            answers = [await ask(world, url) for _ in range(4)]
            assert [(status, body.get("from")) for status, body in answers] == [(200, first.name)] * 4
            assert (await pools(world, url))["prefill"] == ["decode-2", "prefill-0"]
            assert sum(headers[ROLE_HEADER] == "decode" for headers in second.headers) == 1, "refused once, then known"

    run_world(scenario)


def test_a_worker_takes_no_requests_while_its_role_changes(run_world: Run) -> None:
    async def scenario(world: World) -> None:
        prefill, decode = await servers(world, "prefill", "decode")
        async with world.router([prefill], [decode]) as url:
            decode.mode = NO_ROLE
            await world.until(lambda: pools(world, url), lambda now: now["decode"] == [])
            assert (await ask(world, url))[0] == 503
            async with world.session.get(f"{url}/workers/{decode.url}") as response:
                assert "role" in (await response.json())["last_error"]
            decode.mode = "prefill"
            await world.until(lambda: pools(world, url), lambda now: len(now["prefill"]) == 2)
            status, body = await ask(world, url)
            assert (status, body["error"]["code"]) == (503, "no_worker"), "the pool of decode workers is empty"
            decode.mode = "null"
            await world.until(lambda: pools(world, url), lambda now: now["prefill"] == ["prefill-0"])
            decode.mode = "decode"
            await world.until(lambda: pools(world, url), lambda now: now["decode"] == ["decode-1"])
            assert (await ask(world, url))[0] == 200

    run_world(scenario)


def test_a_server_that_says_its_mode_only_when_asked_is_moved_when_it_comes_back(run_world: Run) -> None:
    async def scenario(world: World) -> None:
        prefill, decode = await world.worker("prefill"), await world.worker("decode")
        async with world.router([prefill], [decode]) as url:
            decode.health_status = 503
            await world.until(lambda: pools(world, url), lambda now: now["decode"] == [])
            decode.health_status, decode.told_mode = 200, "prefill"
            await world.until(lambda: pools(world, url), lambda now: now["prefill"] == ["decode", "prefill"])

    run_world(scenario)


def test_the_router_drains_a_worker_has_it_changed_and_moves_it(run_world: Run) -> None:
    async def scenario(world: World) -> None:
        prefill, first, second = await servers(world, "prefill", "decode", "decode")
        gate = asyncio.Event()

        async def slow(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if request.path != PATH:
                await gate.wait()
            return await answer_by_role(worker, request, body)

        second.answers = [slow]
        access = RouterAccessConfig(worker_admin_api_key="root")
        async with world.router([prefill], [first, second], policy="round_robin", access=access) as url:
            running = [asyncio.create_task(ask(world, url)) for _ in range(2)]
            await until(lambda: len(second.bodies) == 1)
            changing = asyncio.create_task(switch(world, url, worker_url=second.url, new_role="prefill"))
            await world.until(lambda: pools(world, url), lambda now: now["decode"] == [first.name])
            assert (await ask(world, url))[1]["from"] == first.name
            assert second.paths == ["/generate"], "not asked before ours has ended"
            gate.set()
            assert [status for status, _ in await asyncio.gather(*running)] == [200, 200]
            assert await changing == (200, {"success": True, "new_role": "prefill"})
            assert second.headers[-1]["Authorization"] == "Bearer root"
            assert 0 < second.bodies[-1]["drain_timeout_secs"] <= 300
            assert await pools(world, url) == {
                "prefill": [second.name, prefill.name],
                "decode": [first.name],
                "regular": [],
            }
            assert (await ask(world, url))[0] == 200

    run_world(scenario)


def test_what_the_worker_refuses_changes_nothing_and_bad_input_names_its_field(run_world: Run) -> None:
    async def scenario(world: World) -> None:
        prefill, decode = await servers(world, "prefill", "decode")

        async def refuse(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if request.path == PATH:
                return web.json_response({"error": {"param": "new_role"}}, status=409)
            return await answer_by_role(worker, request, body)

        decode.answers = [refuse]
        async with world.router([prefill], [decode]) as url:
            assert (await switch(world, url, worker_url=decode.url, new_role="prefill"))[0] == 409
            assert (await pools(world, url))["decode"] == [decode.name]
            assert (await ask(world, url))[0] == 200
            good = {"worker_url": decode.url, "new_role": "prefill"}
            for change, status, field in (
                ({"worker_url": "http://127.0.0.1:1"}, 404, "worker_url"),
                ({"worker_url": 5}, 400, "worker_url"),
                ({"new_role": "null"}, 400, "new_role"),
                ({"new_role": "x"}, 400, "new_role"),
                ({"drain_timeout_secs": -1}, 400, "drain_timeout_secs"),
                ({"drain_timeout_secs": 1e9}, 400, "drain_timeout_secs"),
                ({"bogus": 1}, 400, "bogus"),
            ):
                answer, body = await switch(world, url, **good | change)
                assert (answer, body["error"]["param"]) == (status, field), change
            await decode.stop()
            assert (await switch(world, url, **good))[0] == 502

    run_world(scenario)


def test_it_is_a_command(run_world: Run) -> None:
    async def scenario(world: World) -> None:
        prefill, decode = await servers(world, "prefill", "decode")
        access = RouterAccessConfig(api_key="key", admin_api_key="root")
        async with world.router([prefill], [decode], access=access, wait_key="key") as url:
            for key, status in (("key", 401), ("root", 404)):
                headers = {"Authorization": f"Bearer {key}"}
                body = {"worker_url": "http://nowhere", "new_role": "prefill"}
                async with world.session.post(url + PATH, json=body, headers=headers) as response:
                    assert response.status == status

    run_world(scenario)


def test_released_workers_get_commands_until_they_are_back(run_world: Run) -> None:
    async def worker_with_memory(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path == "/release_memory_occupation":
            worker.mode, worker.health_body = NO_ROLE, {"status": MEMORY_RELEASED}
        elif request.path == "/resume_memory_occupation":
            worker.mode, worker.health_body = worker.name, None
        return web.json_response({"success": True})

    async def scenario(world: Any) -> None:
        prefill, decode = [await world.worker(name, worker_with_memory) for name in ("prefill", "decode")]
        async with world.router([prefill], [decode], check_interval_s=30.0) as url:

            async def ask(path: str) -> int:
                async with world.session.post(url + path, json={}) as response:
                    assert set((await response.json()).get("workers", {})) <= {prefill.url, decode.url}
                    return int(response.status)

            assert await ask("/release_memory_occupation") == 200 and await world.healthy_urls(url) == set()
            commands = ["/update_weights_from_disk", "/flush_cache", "/resume_memory_occupation"]
            assert [await ask(path) for path in commands] == [200] * 3
            assert await world.healthy_urls(url) == {prefill.url, decode.url}
            for worker in (prefill, decode):
                assert worker.paths == ["/release_memory_occupation", *commands[:1], *commands]
            prefill.mode, prefill.health_body = NO_ROLE, {"status": MEMORY_RELEASED}
            await world.app[ROUTER].health.check(world.app[ROUTER].registry.workers[0])
            await prefill.stop()
            assert await ask("/resume_memory_occupation") == 502, "it has ended, which the command finds"
            assert await ask("/resume_memory_occupation") == 200, "the other one"

    run_world(scenario)
