"""Requests that are ended from outside: their worker is silent, or the router itself ends."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import json
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.client_reqrep import ConnectionKey

from pdserve.base.proof import PROOF_HEADER
from pdserve.http.session_proof import REQUIRED
from pdserve.router.app import ROUTER
from pdserve.router.config.config import BreakerConfig, HealthConfig, LimitConfig
from pdserve.router.workers.health import INFO_PATH
from pdserve.router.workers.outcome import is_out_of_descriptors
from tests.unit.router.answers import begin_stream, ok, silent
from tests.waiting import until

Scenario = Callable[[Any], Coroutine[Any, Any, None]]
RunWorld = Callable[[Scenario], None]

CHAT = "/v1/chat/completions"
QUICK = HealthConfig(interval_s=0.05, timeout_s=0.2, failure_threshold=2)
FIRST = b'data: {"n": 1}\n\n'


async def stalled_stream(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin_stream(request)
    await response.write(FIRST)
    return await silent(worker, request, body)


def stop(worker: Any) -> None:
    """From now on it answers no health check, as a process that is stopped."""
    worker.health_gate = asyncio.Event()


def error_in(raw: bytes) -> dict[str, Any]:
    """The error of an answer: of a stream's last event, or of a JSON body."""
    text = raw.rpartition(b"data: ")[2] if b"data: " in raw else raw
    return dict(json.loads(text)["error"])


def test_by_default_a_silent_worker_is_found_within_nine_seconds() -> None:
    """So its streams end within ten."""
    health = HealthConfig()
    assert health.interval_s + health.failure_threshold * health.timeout_s <= 9.0


def test_stream_of_silent_worker_ends_in_an_error_event(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d", stalled_stream)
        async with (
            world.router([prefill], [decode], health=QUICK) as url,
            world.session.post(url + CHAT, json={}) as response,
        ):
            assert await response.content.readany() == FIRST
            stop(decode)
            rest = await response.read()  # ends with the chunked body's proper end
        assert error_in(rest)["code"] == "worker_failed" and "health checks" in error_in(rest)["message"]
        assert decode.num_cancelled == 1

    run_world(scenario)


@pytest.mark.parametrize("victim", ["p", "d"])
def test_request_without_a_byte_goes_to_another_pair(run_world: RunWorld, victim: str) -> None:
    async def scenario(world: Any) -> None:
        prefills = [await world.worker(name, *([silent] if name == victim else [])) for name in ("p", "p2")]
        decodes = [await world.worker(name, *([silent] if victim in ("d", "p") else [])) for name in ("d", "d2")]
        if victim == "p":
            decodes[0].answers = decodes[1].answers = [needs_prefill(prefills)]
        else:
            decodes[1].answers = [ok]
        async with world.router(prefills, decodes, health=QUICK, policy="round_robin") as url:
            dead = next(w for w in (*prefills, *decodes) if w.name == victim)
            asked = asyncio.create_task(ask(world, url))
            await until(lambda: bool(prefills[0].bodies) and bool(decodes[0].bodies))
            stop(dead)
            status, raw, _ = await asked
            assert status == 200, raw
            breakers = await world.session.get(f"{url}/workers")
            states = {one["url"]: one for one in (await breakers.json())["workers"]}
        assert not states[dead.url]["is_healthy"]

    run_world(scenario)


def needs_prefill(prefills: list[Any]) -> Any:
    """Decode answers once the second prefill worker has its half, as it does when KV arrives."""

    async def answer(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await until(lambda: any(one["bootstrap_room"] == body["bootstrap_room"] for one in prefills[1].bodies))
        return await ok(worker, request, body)

    return answer


async def ask(world: Any, url: str, **body: Any) -> tuple[int, bytes, Any]:
    async with world.session.post(url + CHAT, json=body) as response:
        return response.status, await response.read(), response.headers


def test_request_without_another_pair_is_told_to_come_back(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p", silent), await world.worker("d", silent)
        async with world.router([prefill], [decode], health=QUICK) as url:
            asked = [asyncio.create_task(ask(world, url)) for _ in range(12)]
            await until(lambda: len(decode.bodies) == 12)
            stop(decode)
            for status, raw, headers in await asyncio.gather(*asked):
                assert (status, headers["Retry-After"]) == (502, "1"), raw
            decode.health_gate, decode.answers, prefill.answers = None, [ok], [ok]
            await world.until(lambda: world.healthy_urls(url), lambda urls: decode.url in urls)
            status, raw, _ = await ask(world, url)
            assert status == 200, "health found it dead, so that its breaker did not open"

    run_world(scenario)


def test_worker_that_writes_is_not_dead_however_late_its_health_is(run_world: RunWorld) -> None:
    async def steady(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        while worker.health_gate is None or worker.num_health < seen[0] + 4:
            await response.write(FIRST)
            await asyncio.sleep(0.02)
        await response.write(b"data: [DONE]\n\n")
        return response

    seen = [0]

    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d", steady)
        async with (
            world.router([prefill], [decode], health=QUICK) as url,
            world.session.post(url + CHAT, json={}) as response,
        ):
            await response.content.readany()
            seen[0] = decode.num_health
            stop(decode)
            assert (await response.read()).endswith(b"data: [DONE]\n\n")

    run_world(scenario)


def held_stream(go_on: asyncio.Event) -> Any:
    """A worker's answer that sends its first event, and the rest once `go_on` is set."""

    async def answer(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(FIRST)
        await go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    return answer


@pytest.mark.parametrize(("num_broken", "ends"), [(2, False), (1000, True)])  # the client asks twice in a check
def test_streams_end_when_several_health_checks_in_a_row_break(
    run_world: RunWorld, num_broken: int, ends: bool
) -> None:
    go_on = asyncio.Event()

    slow = held_stream(go_on)

    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d", slow)
        async with (
            world.router([prefill], [decode], health=QUICK) as url,
            world.session.post(url + CHAT, json={}) as response,
        ):
            await response.content.readany()
            decode.num_health_to_break = num_broken
            if not ends:
                await world.until(
                    lambda: world.healthy_urls(url),
                    lambda urls: decode.num_health_to_break == 0 and decode.url in urls,
                )
                go_on.set()
            rest = await response.read()
            assert (b"cannot be reached" in rest) is ends, rest

    run_world(scenario)


def test_streams_of_a_worker_that_wants_proofs_end_with_that_reason(run_world: RunWorld) -> None:
    """The worker was dead for a moment, as by a restart behind a proxy that keeps the stream open."""
    wants_proofs = False

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        if wants_proofs and request.path == INFO_PATH:
            return web.Response(status=401, headers={PROOF_HEADER: REQUIRED})
        return await handler(request)

    async def scenario(world: Any) -> None:
        nonlocal wants_proofs
        worker = await world.worker("w", held_stream(asyncio.Event()), guard=guard)
        async with (
            world.router([], [worker], health=QUICK) as url,
            world.session.post(url + CHAT, json={}) as response,
        ):
            await response.content.readany()
            worker.health_status = 503
            await world.until(lambda: world.healthy_urls(url), lambda urls: worker.url not in urls)
            wants_proofs, worker.health_status = True, 200
            rest = await response.read()
            assert b"it accepts only requests that prove the control token" in rest, rest
            assert b"cannot be reached" not in rest, rest

    run_world(scenario)


@pytest.mark.parametrize(("code", "ends"), [("engine_stuck", True), ("server_shutting_down", False)])
def test_ill_worker_keeps_its_streams_unless_its_engine_is_stuck(run_world: RunWorld, code: str, ends: bool) -> None:
    go_on = asyncio.Event()

    slow = held_stream(go_on)

    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d", slow)
        async with (
            world.router([prefill], [decode], health=QUICK) as url,
            world.session.post(url + CHAT, json={}) as response,
        ):
            await response.content.readany()
            decode.health_status, decode.health_body = 503, {"error": {"code": code}}
            await world.until(lambda: world.healthy_urls(url), lambda urls: decode.url not in urls)
            if not ends:
                go_on.set()
            rest = await response.read()
            assert (b"[DONE]" not in rest) is ends
            assert (b"worker_failed" in rest) is ends

    run_world(scenario)


def test_drain_lets_what_runs_end_and_refuses_the_rest(run_world: RunWorld) -> None:
    go_on = asyncio.Event()

    async def slow(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await go_on.wait()
        return await ok(worker, request, body)

    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d", slow)
        async with world.router([prefill], [decode], limits=LimitConfig(max_inflight=1)) as url:
            running = asyncio.create_task(ask(world, url))
            await until(lambda: bool(decode.bodies))
            queued = asyncio.create_task(ask(world, url))
            await until(lambda: world.app[ROUTER].admission.num_waiting == 1)
            draining = asyncio.create_task(world.app[ROUTER].drain(60.0, asyncio.Event()))
            for status, raw, headers in (await queued, await ask(world, url)):
                assert (status, error_in(raw)["code"]) == (503, "router_shutting_down")
                assert headers["Retry-After"] == "1"
            async with world.session.get(f"{url}/readiness") as response:
                assert response.status == 503
            async with world.session.get(f"{url}/liveness") as response:
                assert response.status == 200
            assert not running.done() and not draining.done()
            go_on.set()
            assert (await running)[0] == 200
            await draining

    run_world(scenario)


@pytest.mark.parametrize("by_signal", [False, True])
def test_what_still_runs_at_the_end_of_the_grace_ends_with_an_error(run_world: RunWorld, by_signal: bool) -> None:
    async def by_body(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (stalled_stream if body.get("stream") else silent)(worker, request, body)

    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p", silent), await world.worker("d", by_body)
        async with (
            world.router([prefill], [decode]) as url,
            world.session.post(url + CHAT, json={"stream": True}) as stream,
        ):
            assert await stream.content.readany() == FIRST
            plain = asyncio.create_task(ask(world, url))
            await until(lambda: len(decode.bodies) == 2)
            hurry = asyncio.Event()
            if by_signal:
                hurry.set()
            await world.app[ROUTER].drain(60.0 if by_signal else 0.05, hurry)
            assert error_in(await stream.read())["code"] == "router_shutting_down"
            status, raw, headers = await plain
            assert (status, error_in(raw)["code"]) == (503, "router_shutting_down")
            assert headers["Retry-After"] == "1"
            assert len(decode.bodies) == 2, "nothing is tried again"

    run_world(scenario)


def test_prompt_logprobs_do_not_wait_for_a_silent_prefill(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p", silent), await world.worker("d", ok)
        config = {"health": QUICK, "breaker": BreakerConfig(enabled=False), "max_tries": 1}
        async with world.router([prefill], [decode], **config) as url:
            body = {"input_ids": [1, 2], "return_logprob": True, "logprob_start_len": 0}
            asked = asyncio.create_task(contextlib.AsyncExitStack().enter_async_context(post(world, url, body)))
            await until(lambda: bool(prefill.bodies))
            stop(prefill)
            response = await asked
            assert response.status == 502 and error_in(await response.read())["code"] == "worker_unreachable"

    run_world(scenario)


def post(world: Any, url: str, body: dict[str, Any]) -> Any:
    return world.session.post(url + "/generate", json=body)


def test_worker_is_not_to_blame_where_the_router_has_no_descriptors(
    run_world: RunWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, refused = aiohttp.TCPConnector.connect, collections.Counter[str]()
    ports: set[int] = set()

    async def short(connector: aiohttp.TCPConnector, request: Any, **options: Any) -> Any:
        if request.url.port in ports:
            refused[request.url.path] += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return await connect(connector, request, **options)

    monkeypatch.setattr(aiohttp.TCPConnector, "connect", short)
    monkeypatch.setattr("pdserve.router.workers.health.RECHECK_DEAD_S", 3600.0)

    async def scenario(world: Any) -> None:
        decode = await world.worker("d")
        async with world.router([], [decode], health=QUICK, breaker=BreakerConfig(failure_threshold=1)) as url:
            registry = world.app[ROUTER].registry
            (worker,) = registry.workers
            worker.late_checks = 1  # checks follow one another at once then
            ports.add(worker_port(decode.url))
            await until(lambda: refused["/health"] > 0)
            async with world.session.post(url + CHAT, json={}) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1")
                assert (await response.json())["error"]["code"] == "router_busy"
            assert (refused["/health"], refused[CHAT]) == (1, 3), "the next check comes after a pause"
            ports.clear()
            async with world.session.post(url + CHAT, json={}) as response:
                assert response.status == 200, "its breaker is closed"

    run_world(scenario)


def worker_port(url: str) -> int:
    return int(url.rpartition(":")[2])


def test_a_name_that_is_not_resolved_for_want_of_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver says that it does not know the name."""
    key = ConnectionKey("worker", 1, False, True, None, None, None)
    error = aiohttp.ClientConnectorDNSError(key, OSError(-3, "Temporary failure in name resolution"))
    assert not is_out_of_descriptors(error)

    def no_more(*_: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("pdserve.router.workers.outcome.os.open", no_more)
    assert is_out_of_descriptors(error)
    assert not is_out_of_descriptors(aiohttp.ServerDisconnectedError())


def test_redirects_of_workers_are_not_followed(run_world: RunWorld) -> None:
    """A proof or a key would be good for the path that it leads to, too."""
    told: list[str] = []

    @web.middleware
    async def leads_on(request: web.Request, handler: Any) -> web.StreamResponse:
        told.append(request.path)
        if request.path == "/health" and told.count("/flush_cache"):
            raise web.HTTPFound("/observe")
        if request.method == "POST" and request.path != "/observe":
            raise web.HTTPTemporaryRedirect("/observe")
        return await handler(request)

    async def scenario(world: Any) -> None:
        worker = await world.worker("w", guard=leads_on)
        async with world.router([], [worker], health=QUICK) as url:
            for path in (CHAT, "/flush_cache"):
                async with world.session.post(url + path, json={}, allow_redirects=False) as response:
                    await response.read()
            begun = told.count("/health")
            await until(lambda: told.count("/health") > begun + 2)
        assert {CHAT, "/flush_cache"} <= set(told) and "/observe" not in told

    run_world(scenario)
