"""Running requests of a draining decode worker move to another one; the client sees one stream."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from aiohttp import web

from pdserve.base.stream_state import DONE, RESUME_FIELD, STATE_HEADER, EventState
from pdserve.router.app import ROUTER
from pdserve.router.proxy import migration
from tests.unit.router.answers import begin_stream
from tests.waiting import settle, until

Scenario = Callable[[Any], Coroutine[Any, Any, None]]
RunWorld = Callable[[Scenario], None]
CHAT = "/v1/chat/completions"
BODY = {"messages": [], "stream": True}
NUM_TOKENS = 8


def event(token: int) -> bytes:
    return b"data: " + json.dumps({"token": token}).encode() + b"\n\n"


WHOLE = b"".join(map(event, range(NUM_TOKENS))) + DONE


@dataclasses.dataclass
class Decode:
    """A decode worker with the contract of `docs/migration.md`: it generates a token at each `step`.

    `refusals`: the next answers to `/migrate`, as (status, code, param). `loses`: it has no request to attach to.
    """

    refusals: list[tuple[int, str, str]] = dataclasses.field(default_factory=list)
    loses: bool = False
    taken: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    streams: dict[str, asyncio.Queue[dict[str, Any] | None]] = dataclasses.field(default_factory=dict)
    others: dict[str, Decode] = dataclasses.field(default_factory=dict)
    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    keys: list[str | None] = dataclasses.field(default_factory=list)
    num_moving: int = 0
    most_moving: int = 0
    gate: asyncio.Event | None = None
    index_shift: int = 0

    async def __call__(self, worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path == "/migrate":
            return await self.migrate(request, body)
        resume = body.get(RESUME_FIELD, {})
        name = resume.get("attach", body.get("rid"))
        if "attach" in resume and (self.loses or name not in self.taken):
            error = {"message": "no", "code": "no_such_request", "param": "pdserve_resume.attach"}
            return web.json_response({"error": error}, status=404)
        tokens = list(resume.get("token_ids", []))
        if not body.get("stream"):
            self.streams[name] = asyncio.Queue()
            await self.streams[name].get()
            return web.json_response({"whole": True})
        self.streams[name] = asyncio.Queue()
        response = await begin_stream(request)
        while len(tokens) < NUM_TOKENS:
            moved = None if "attach" in resume else await self.streams[name].get()
            if moved is not None:
                error: dict[str, Any] = {
                    "message": "moved",
                    "code": "migrated",
                    "next_token_index": len(tokens) + self.index_shift,
                }
                raw = json.dumps({"error": error | moved, "code": 503}, separators=(",", ":"))
                await response.write(b"data: " + raw.encode() + b"\n\n" + DONE)
                return response
            state = EventState([len(tokens)], {"id": "one"} if not tokens else None, 0)
            told = STATE_HEADER in request.headers
            await response.write((state.line() if told else b"") + event(len(tokens)))
            tokens.append(len(tokens))
        await response.write((EventState(tail="").line() if STATE_HEADER in request.headers else b"") + DONE)
        return response

    async def migrate(self, request: web.Request, body: dict[str, Any]) -> web.Response:
        self.calls.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.num_moving += 1
        self.most_moving = max(self.most_moving, self.num_moving)
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.refusals:
                status, code, param = self.refusals.pop(0)
                return web.json_response({"error": {"message": "no", "code": code, "param": param}}, status=status)
            if body["rid"] not in self.streams:
                return web.json_response({"error": {"message": "?", "code": "no_such_request"}}, status=404)
            name = f"m-{body['rid']}"
            self.others[body["to"]].taken[name] = []
            if body["attach"]:
                self.streams[body["rid"]].put_nowait({"to": body["to"], "migrated_rid": name})
            return web.json_response({"success": True, "migrated_rid": name})
        finally:
            self.num_moving -= 1

    def step(self) -> None:
        for queue in self.streams.values():
            queue.put_nowait(None)


@dataclasses.dataclass
class Two:
    """A prefill worker and decode workers, each with its script."""

    world: Any
    prefill: Any
    workers: list[Any]
    scripts: list[Decode]

    @classmethod
    async def start(cls, world: Any, *scripts: Decode) -> Two:
        workers = [await world.worker(f"d{number}", script) for number, script in enumerate(scripts)]
        for script in scripts:
            script.others = {worker.url: other for worker, other in zip(workers, scripts, strict=True)}
        return cls(world, await world.worker("p"), workers, list(scripts))

    def router(self, **options: Any) -> Any:
        return self.world.router(
            [self.prefill], self.workers, **{"drain_migrate": True, "policy": "round_robin"} | options
        )

    async def ask(self, url: str, body: dict[str, Any] = BODY, path: str = CHAT) -> bytes:
        async with self.world.session.post(url + path, json=body) as response:
            assert response.status == 200, await response.text()
            return bytes(await response.read())

    async def drain(self, url: str, number: int, *, draining: bool = True) -> None:
        body = {"draining": draining}
        async with self.world.session.put(f"{url}/workers/{self.workers[number].url}", json=body) as response:
            assert response.status == 202

    async def metrics(self, url: str) -> str:
        return str(await (await self.world.session.get(f"{url}/metrics")).text())


async def begun(two: Two, url: str, num_tokens: int = 3, **more: Any) -> tuple[asyncio.Task[bytes], int]:
    """A stream with some tokens, and the number of its decode worker."""
    before = [len(worker.bodies) for worker in two.workers]
    task = asyncio.create_task(two.ask(url, {**BODY, **more}))
    await until(lambda: [len(worker.bodies) for worker in two.workers] != before)
    (number,) = [n for n, worker in enumerate(two.workers) if len(worker.bodies) > before[n]]
    await until(lambda: len(two.scripts[number].streams) > 0)
    for _ in range(num_tokens):
        two.scripts[number].step()
    await settle()
    return task, number


def test_a_drain_moves_a_stream_and_the_client_sees_one(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        two = await Two.start(world, Decode(), Decode())
        async with two.router() as url:
            task, number = await begun(two, url, rid="mine")
            await two.drain(url, number)
            assert await task == WHOLE
            source, target = two.scripts[number], two.workers[1 - number]
            assert source.calls == [{"rid": "mine", "to": target.url, "attach": True}]
            resume = target.bodies[-1][RESUME_FIELD]
            assert resume["attach"] == "m-mine" and resume["head"] == {"id": "one"}
            assert resume["token_ids"] == list(range(len(resume["token_ids"]))) and target.bodies[-1]["rid"] == "mine"
            assert "bootstrap_room" not in target.bodies[-1] and len(two.prefill.bodies) == 1
            metrics = await two.metrics(url)
            assert 'pdserve_router_migrations_total{result="moved"} 1.0' in metrics
            assert 'pdserve_router_migrated_streams_total{result="attached"} 1.0' in metrics
            assert 'prefill=""' not in metrics, "an attached stream is no pair"
            (shown,) = [w for w in (await listed(two, url)) if w["url"] == two.workers[number].url]
            assert (shown["num_moved_away"], shown["num_moving"], shown["load"]) == (1, 0, 0)
            assert set(await world.loads(url)) == {0}

    run_world(scenario)


async def listed(two: Two, url: str) -> list[dict[str, Any]]:
    found = await (await two.world.session.get(f"{url}/workers")).json()
    return list(found["workers"])


@pytest.mark.parametrize("how", ["loses", "shift", "unknown"])
def test_where_the_new_worker_lacks_the_request_another_pair_computes_the_rest(run_world: RunWorld, how: str) -> None:
    async def scenario(world: Any) -> None:
        two = await Two.start(world, Decode(), Decode())
        for script in two.scripts:
            script.loses, script.index_shift = how == "loses", int(how == "shift")
        async with two.router() as url:
            task, number = await begun(two, url)
            if how == "unknown":
                two.scripts[number].others = {worker.url: Decode() for worker in two.workers}
                two.scripts[1 - number].loses = True
            await two.drain(url, number)
            other = two.workers[1 - number]
            await until(lambda: any(RESUME_FIELD in b and "attach" not in b[RESUME_FIELD] for b in other.bodies))
            two.scripts[1 - number].streams.popitem()[1]  # the recomputed request steps like any other
            task.cancel()
            assert len(two.prefill.bodies) == 2, "prefill computes prompt and output"
            assert 'streams_total{result="recomputed"} 1.0' in await two.metrics(url)

    run_world(scenario)


def test_what_cannot_move_now_is_tried_again_and_a_refusal_leaves_it_where_it_is(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        two = await Two.start(world, Decode(), Decode())
        async with two.router() as url:
            task, number = await begun(two, url)
            source = two.scripts[number]
            source.refusals = [
                (404, "no_such_request", "rid"),
                (409, "not_migratable", "rid"),
                (503, "migration_no_room", "to"),
                (409, "migration_refused", "page_size"),
            ]
            await two.drain(url, number)
            await until(lambda: not source.refusals)
            await settle()
            assert len(source.calls) == 4, "no other worker is left to ask"
            for _ in range(NUM_TOKENS):
                source.step()
            assert await task == WHOLE
            metrics = await two.metrics(url)
            for result, count in (("gone", 1), ("later", 2), ("refused", 1)):
                assert f'pdserve_router_migrations_total{{result="{result}"}} {count}.0' in metrics

    run_world(scenario)


def test_few_requests_move_at_a_time_and_a_worker_in_use_keeps_its_own(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        gate = asyncio.Event()
        two = await Two.start(world, Decode(gate=gate), Decode(gate=gate))
        async with two.router() as url:
            tasks = [asyncio.create_task(two.ask(url, {**BODY, "rid": f"r{n}"})) for n in range(20)]
            await until(lambda: sum(len(script.streams) for script in two.scripts) == 20)
            for script in two.scripts:
                script.step()
            await settle()
            await two.drain(url, 0)
            source = two.scripts[0]
            await until(lambda: len(source.calls) == migration.MOST_AT_ONCE)
            await settle()
            assert len(source.calls) == migration.MOST_AT_ONCE
            await two.drain(url, 0, draining=False)
            gate.set()
            await until(lambda: source.num_moving == 0)
            await settle()
            num_moved = len(source.calls)
            assert num_moved < 10, "a worker that serves again moves no more"
            await two.drain(url, 0)
            await until(lambda: len(source.calls) == 10)
            assert source.most_moving == migration.MOST_AT_ONCE
            for _ in range(NUM_TOKENS):
                two.scripts[1].step()
            assert await asyncio.gather(*tasks) == [WHOLE] * 20

    run_world(scenario)


def test_an_answer_in_one_piece_is_passed_on_by_the_worker_that_had_it(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        two = await Two.start(world, Decode(), Decode())
        async with two.router() as url:
            task = asyncio.create_task(two.ask(url, {"messages": []}))
            batch = asyncio.create_task(two.ask(url, {"messages": [], "n": 2, "rid": "two"}))
            await until(lambda: sum(len(script.streams) for script in two.scripts) == 2)
            number = next(n for n, worker in enumerate(two.workers) if any("n" not in body for body in worker.bodies))
            await two.drain(url, number)
            await until(lambda: bool(two.scripts[number].calls))
            await settle()
            (call,) = [*two.scripts[0].calls, *two.scripts[1].calls]
            assert call["attach"] is False and len(call["rid"]) == 32, "the router names it"
            for script in two.scripts:
                script.step()
            assert json.loads(await task) == json.loads(await batch) == {"whole": True}

    run_world(scenario)


def test_without_the_flag_nothing_moves_unless_it_is_asked_for(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        two = await Two.start(world, Decode(), Decode())
        async with two.router(drain_migrate=False) as url:
            task, number = await begun(two, url, rid="mine")
            await two.drain(url, number)
            source, target = two.scripts[number], two.workers[1 - number]
            assert STATE_HEADER not in two.workers[number].headers[-1] and not source.calls

            async def move(**body: Any) -> tuple[int, dict[str, Any]]:
                async with world.session.post(f"{url}/migrate", json=body) as response:
                    return response.status, await response.json()

            for body, param in (
                ({}, "rid"), ({"rid": "other"}, "rid"), ({"rid": "mine", "to": "http://no"}, "to"),
                ({"rid": "mine", "to": two.workers[number].url}, "to"), ({"rid": "mine", "to": two.prefill.url}, "to"),
                ({"rid": "mine", "too": 1}, "too"),
            ):  # fmt: skip
                status, answer = await move(**body)
                assert status in (400, 404) and answer["error"]["param"] == param, body
            source.refusals = [(409, "migration_refused", "page_size")]
            status, answer = await move(rid="mine")
            assert (status, answer["error"]["param"]) == (409, "page_size")
            status, answer = await move(rid="mine", to=target.url)
            assert (status, answer["migrated_rid"]) == (200, "m-mine")
            assert source.calls[-1] == {"rid": "mine", "to": target.url, "attach": False}
            for _ in range(NUM_TOKENS):
                source.step()
            assert await task == WHOLE
            assert world.app[ROUTER].registry.find(target.url).num_arriving == 0

    run_world(scenario)
