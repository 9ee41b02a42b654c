"""Commands that change the weights of all workers through the router: all prepare, and then all install, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from aiohttp import web

from pdserve.router.config.config import RouterAccessConfig
from pdserve.router.workers.fanout import GROUP_COMMANDS
from tests.unit.router.conftest import FakeWorker, World
from tests.waiting import settle, until

Run = Callable[[Callable[[World], Coroutine[Any, Any, None]]], None]
PATHS = ("/update_weights_from_disk", "/update_weights_from_tensor")
BODIES: list[dict[str, Any]] = [
    {"model_path": "/models/next", "weight_version": "step-1"},
    {"tensors": "AA==", "weight_version": "step-1"},
]


async def succeed(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"success": True})


async def refuse_to_prepare(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if not body.get("prepare_only"):
        return await succeed(worker, request, body)
    error = {"message": "model_path: there is no model", "param": "model_path", "code": "weights"}
    return web.json_response({"success": False, "error": error}, status=400)


async def send(world: World, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with world.session.post(url, json=body) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(("path", "body"), list(zip(PATHS, BODIES, strict=True)))
def test_a_failed_preparation_installs_nowhere(run_world: Run, path: str, body: dict[str, Any]) -> None:
    async def scenario(world: World) -> None:
        prefill, decode = await world.worker("prefill", succeed), await world.worker("decode", refuse_to_prepare)
        async with world.router([prefill], [decode]) as url:
            status, answer = await send(world, url + path, body)
            assert (status, answer["success"]) == (400, False)
            assert (answer["error"]["param"], answer["error"]["worker"]) == ("model_path", decode.url)
            assert answer["workers"] == {prefill.url: 200, decode.url: 400}
            assert prefill.bodies == decode.bodies == [body | {"prepare_only": True}]

    run_world(scenario)


def test_all_have_prepared_before_one_installs(run_world: Run) -> None:
    async def scenario(world: World) -> None:
        gate = asyncio.Event()

        async def slow(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await gate.wait()
            return await succeed(worker, request, body)

        prefill, decode = await world.worker("prefill", succeed), await world.worker("decode", slow, succeed)
        async with world.router([prefill], [decode]) as url:
            for path, body in zip(PATHS, BODIES, strict=True):
                running = asyncio.create_task(send(world, url + path, body))
                await until(lambda: prefill.num_done and decode.bodies)
                if not gate.is_set():
                    await settle()
                    assert len(prefill.bodies) == 1, "it waits for the other worker"
                gate.set()
                assert (await running)[0] == 200
            steps = [made for body in BODIES for made in (body | {"prepare_only": True}, body)]
            assert prefill.bodies == decode.bodies == steps
            assert (await send(world, url + PATHS[0], BODIES[0] | {"prepare_only": True}))[0] == 200
            assert prefill.bodies == decode.bodies == [*steps, steps[0]], "prepared once, and not installed"
            named = {"new_version": "step-2"}
            assert (await send(world, f"{url}/update_weight_version", named))[0] == 200
            assert prefill.bodies[5:] == decode.bodies[5:] == [named], "nothing to prepare"

    run_world(scenario)


def test_a_worker_that_ends_while_it_prepares_installs_nowhere(run_world: Run) -> None:
    async def scenario(world: World) -> None:
        async def end(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()

        prefill, decode = await world.worker("prefill", succeed), await world.worker("decode", end)
        async with world.router([prefill], [decode]) as url:
            status, answer = await send(world, url + PATHS[0], BODIES[0])
            assert (status, answer["error"]["worker"]) == (502, decode.url)
            assert prefill.bodies == [BODIES[0] | {"prepare_only": True}]

    run_world(scenario)


def test_commands_about_a_group_say_that_each_server_takes_them(run_world: Run) -> None:
    async def scenario(world: World) -> None:
        prefill, decode = await world.worker("prefill"), await world.worker("decode")
        access = RouterAccessConfig(admin_api_key="root")
        async with world.router([prefill], [decode], access=access) as url:
            for path in GROUP_COMMANDS:
                assert (await send(world, url + path, {}))[0] == 401
                headers = {"Authorization": "Bearer root"}
                async with world.session.post(url + path, json={}, headers=headers) as response:
                    error = (await response.json())["error"]
                    assert (response.status, error["code"]) == (400, "call_each_server")
                    assert path in error["message"] and "rank_offset" in error["message"]
            assert prefill.bodies == decode.bodies == []

    run_world(scenario)
