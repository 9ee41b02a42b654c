"""Many requests at once through a real router, while clients leave and workers die."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import web

from pdserve.router.config.config import LimitConfig
from tests.unit.router.answers import begin_stream, ok
from tests.waiting import settle, until

RunWorld = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]


async def busy(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "busy"}}, status=503)


def test_clients_that_hang_up_at_random_disturb_nobody_and_leave_nothing(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        rng = random.Random(5)

        async def stream(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = await begin_stream(request)
            for index in range(6):
                await settle(rng.randrange(20))
                await response.write(f"data: {body['text']} {index}\n\n".encode())
            return response

        async def client(number: int, url: str) -> str | None:
            async with world.session.post(url + "/generate", json={"text": str(number)}) as response:
                if number % 10 == 0:
                    for _ in range(rng.randrange(4)):
                        await response.content.readany()
                    response.close()
                    return None
                return str(await response.text())

        prefills = [await world.worker(f"p{i}", busy, ok) for i in range(2)]
        decodes = [await world.worker(f"d{i}", stream) for i in range(2)]
        async with world.router(prefills, decodes, policy="least_loaded") as url:
            answers = await asyncio.gather(*(client(number, url) for number in range(60)))
            await world.until(lambda: world.loads(url), lambda seen: seen == [0, 0, 0, 0])
            for number, answer in enumerate(answers):
                if answer is not None:
                    assert answer == "".join(f"data: {number} {index}\n\n" for index in range(6))
        rooms = [body["bootstrap_room"] for decode in decodes for body in decode.bodies]
        assert len(set(rooms)) == len(rooms) >= 60

    run_world(scenario)


def test_a_worker_that_is_killed_under_load_costs_no_answer_while_another_lives(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        go_on = asyncio.Event()

        async def slow(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await go_on.wait()
            return await ok(worker, request, body)

        prefill = await world.worker("p")
        decodes = [await world.worker(f"d{i}", slow) for i in range(2)]
        async with world.router([prefill], decodes, policy="least_loaded") as url:

            async def client() -> int:
                async with world.session.post(url + "/generate", json={"text": "a"}) as response:
                    return int(response.status)

            calls = [asyncio.create_task(client()) for _ in range(40)]
            await until(lambda: len(decodes[0].bodies) >= 10)
            await decodes[0].stop()
            go_on.set()
            assert set(await asyncio.gather(*calls)) == {200}
            await world.until(lambda: world.loads(url), lambda seen: seen == [0, 0, 0])

    run_world(scenario)


def test_64_streams_while_a_worker_comes_one_is_drained_and_a_third_of_the_clients_leave(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        rng = random.Random(11)

        async def stream(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = await begin_stream(request)
            for index in range(20):
                await settle(rng.randrange(20))
                await response.write(f"data: {body['text']} {index}\n\n".encode())
            return response

        async def client(number: int, url: str) -> None:
            async with world.session.post(url + "/generate", json={"text": str(number)}) as response:
                assert response.status == 200
                if number % 10 < 3:
                    await response.content.readany()
                    response.close()
                    return
                expected = "".join(f"data: {number} {index}\n\n" for index in range(20))
                assert await response.text() == expected

        async def dispatched(worker: Any, url: str) -> float:
            async with world.session.get(url + "/metrics") as response:
                lines = (await response.text()).splitlines()
            (line,) = (line for line in lines if "dispatched_total" in line and worker.url in line)
            return float(line.split()[-1])

        prefill = await world.worker("p")
        old, kept, new = [await world.worker(name, stream) for name in ("old", "kept", "new")]
        limits = LimitConfig(max_inflight=12, queue_size=64)
        async with world.router([prefill], [old, kept], policy="least_loaded", limits=limits) as url:
            calls = [asyncio.create_task(client(number, url)) for number in range(64)]
            await until(lambda: len(old.bodies) >= 5)
            body = {"url": new.url, "worker_type": "decode"}
            async with world.session.post(url + "/workers", json=body) as response:
                assert response.status == 202
            await until(lambda: len(new.bodies) >= 1)
            async with world.session.delete(f"{url}/workers/{old.url}") as response:
                assert response.status == 202
            sent = await dispatched(old, url)
            await asyncio.gather(*calls)
            assert len(old.bodies) == sent, "nothing new"
            await world.until(lambda: world.loads(url), lambda seen: seen == [0, 0, 0])
            assert old.url not in await world.healthy_urls(url)
        assert len(old.bodies) + len(kept.bodies) + len(new.bodies) >= 64

    run_world(scenario)
