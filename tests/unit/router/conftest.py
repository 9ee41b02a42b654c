"""Fake workers and a router on real sockets (loopback, port 0) for the router's tests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pdserve.base.stream_state import ROLE_HEADER
from pdserve.router.app import make_app
from pdserve.router.config.config import HealthConfig, PolicyConfig, RetryConfig, RouterConfig, WorkerRole, WorkerSpec
from tests.waiting import seen_until

DEADLINE_S = 20.0

Answer = Callable[["FakeWorker", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


async def answer_ok(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A small JSON answer that names the worker."""
    return web.json_response(
        {"from": worker.name, "room": body.get("bootstrap_room")}, headers={"X-Worker": worker.name}
    )


@dataclasses.dataclass
class FakeWorker:
    """A worker on a port of its own; `answers` are used in turn, the last one for ever."""

    name: str
    answers: list[Answer]
    bodies: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    headers: list[dict[str, str]] = dataclasses.field(default_factory=list)
    paths: list[str] = dataclasses.field(default_factory=list)
    url: str = ""
    health_status: int = 200
    health_body: dict[str, Any] | None = None
    health_gate: asyncio.Event | None = None
    mode: str | None = None
    told_mode: str | None = None
    bootstrap_port: int | None = 7000
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    """More of its `/get_server_info`."""
    reported: int | None = None
    num_health: int = 0
    num_health_to_break: int = 0
    """So many of the next health checks lose their connection."""
    num_load_asked: int = 0
    pair: dict[str, Any] | None = None
    pair_status: int = 200
    on_pair: Callable[[web.Request], Awaitable[web.Response]] | None = None
    pair_bodies: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    document: Any = None
    exported: str | None = None
    metrics_gate: asyncio.Event | None = None
    num_scraped: int = 0
    observed: dict[str, Any] | None = None
    observe_gate: asyncio.Event | None = None
    num_observed: int = 0
    observe_keys: list[str | None] = dataclasses.field(default_factory=list)
    num_cancelled: int = 0
    num_done: int = 0
    guard: Any = None
    """A middleware before all of it."""
    runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 28, middlewares=[] if self.guard is None else [self.guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/get_server_info", self._info)
        app.router.add_get("/get_load", self._load)
        app.router.add_get("/observe", self._observe)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/openapi.json", self._document)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health_generate", self._health)
        app.router.add_post("/health_pair", self._pair)
        app.router.add_post("/{path:.*}", self._post)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def _health(self, request: web.Request) -> web.Response:
        self.num_health += 1
        if self.num_health_to_break > 0:
            self.num_health_to_break -= 1
            assert request.transport is not None
            request.transport.abort()
        if self.health_gate is not None:
            await self.health_gate.wait()
        headers = None if self.mode is None else {ROLE_HEADER: self.mode}
        if self.health_body is not None:
            return web.json_response(self.health_body, status=self.health_status, headers=headers)
        return web.Response(status=self.health_status, headers=headers)

    async def _pair(self, request: web.Request) -> web.Response:
        if self.on_pair is not None:
            return await self.on_pair(request)
        if self.pair is None:
            raise web.HTTPNotFound
        self.pair_bodies.append(await request.json())
        return web.json_response(self.pair, status=self.pair_status)

    async def _info(self, request: web.Request) -> web.Response:
        told = {} if self.told_mode is None else {"disaggregation_mode": self.told_mode}
        told |= self.facts
        return web.json_response({"name": self.name, "disaggregation_bootstrap_port": self.bootstrap_port, **told})

    async def _load(self, request: web.Request) -> web.Response:
        if self.reported is None:
            raise web.HTTPNotFound
        self.num_load_asked += 1
        return web.json_response([{"dp_rank": 0, "num_reqs": self.reported, "num_tokens": 10 * self.reported}])

    async def _document(self, request: web.Request) -> web.Response:
        if self.document is None:
            raise web.HTTPNotFound
        return web.json_response(self.document)

    async def _metrics(self, request: web.Request) -> web.Response:
        self.num_scraped += 1
        if self.metrics_gate is not None:
            await self.metrics_gate.wait()
        if self.exported is None:
            raise web.HTTPNotFound
        return web.Response(text=self.exported)

    async def _observe(self, request: web.Request) -> web.Response:
        self.num_observed += 1
        self.observe_keys.append(request.headers.get("Authorization"))
        if self.observe_gate is not None:
            await self.observe_gate.wait()
        if self.observed is None:
            raise web.HTTPNotFound
        return web.json_response(self.observed)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.name}]})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = await request.json() if raw else {}
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        answer = self.answers[min(len(self.bodies), len(self.answers)) - 1]
        try:
            response = await answer(self, request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.num_cancelled += 1
            raise
        self.num_done += 1
        return response


class World:
    """Fake workers, one router, one client session."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session
        self.workers: list[FakeWorker] = []
        self.url = ""
        self.config: RouterConfig | None = None
        self.app: web.Application | None = None
        """That of the newest router."""

    async def worker(self, name: str, *answers: Answer, guard: Any = None) -> FakeWorker:
        worker = FakeWorker(name=name, answers=list(answers) or [answer_ok], guard=guard)
        await worker.start()
        self.workers.append(worker)
        return worker

    @contextlib.asynccontextmanager
    async def router(
        self,
        prefills: list[FakeWorker],
        decodes: list[FakeWorker],
        *,
        policy: str = "cache_aware",
        max_tries: int = 3,
        check_interval_s: float = 0.05,
        wait_key: str | None = None,
        **options: Any,
    ) -> AsyncIterator[str]:
        """A router over these workers, ready when it has seen each of them answer a health check.

        `wait_key` is the key that it is asked with meanwhile.
        """
        specs = [WorkerSpec(role=WorkerRole.PREFILL, url=w.url, ask_bootstrap_port=True) for w in prefills]
        role = WorkerRole.DECODE if prefills else WorkerRole.REGULAR
        specs += [WorkerSpec(role=role, url=w.url) for w in decodes]
        settings: dict[str, Any] = {
            "pd": bool(prefills),
            "workers": tuple(specs),
            "policies": PolicyConfig(policy=policy),
            "retry": RetryConfig(max_tries=max_tries, first_backoff_s=0.0),
            "health": HealthConfig(interval_s=check_interval_s, load_interval_s=0.05),
        }
        runner = web.AppRunner(
            make_app(RouterConfig(**settings | options)),
            handler_cancellation=True,
            auto_decompress=False,
            shutdown_timeout=0.1,
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.app = runner.app
        expected = {w.url for w in [*prefills, *decodes] if w.health_status == 200 and w.runner is not None}
        try:
            await self.until(lambda: self.healthy_urls(url, wait_key), lambda urls: urls >= expected)
            yield url
        finally:
            await runner.cleanup()

    async def healthy_urls(self, url: str, key: str | None = None) -> set[str]:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with self.session.get(f"{url}/workers", headers=headers) as response:
            listed = (await response.json())["workers"]
        return {entry["url"] for entry in listed if entry["is_healthy"]}

    async def loads(self, url: str) -> list[int]:
        """Requests in flight by worker, as the router counts them."""
        async with self.session.get(f"{url}/workers") as response:
            return [entry["load"] for entry in (await response.json())["workers"]]

    async def until(self, look: Callable[[], Awaitable[Any]], good: Callable[[Any], bool]) -> Any:
        return await seen_until(look, good)


@pytest.fixture
def run_world() -> Callable[[Callable[[World], Coroutine[Any, Any, None]]], None]:
    """Run a scenario against a fresh world, within `DEADLINE_S`."""

    async def bounded(scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        async with aiohttp.ClientSession() as session:
            world = World(session)
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await scenario(world)
            finally:
                await asyncio.gather(*(worker.stop() for worker in world.workers))

    return lambda scenario: asyncio.run(bounded(scenario))
