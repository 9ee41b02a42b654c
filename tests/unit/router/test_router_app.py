"""Who is alive, what the router says about it, and what it answers itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import pytest
from aiohttp import web

import pdserve
from pdserve.router.proxy.generate import GenerateHandler
from pdserve.router.workers import fanout as fleet
from pdserve.router.workers.fanout import MEMORY_COMMANDS
from tests.waiting import until

RunWorld = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]
GENERATE = "/generate"


def test_without_a_pair_every_request_is_a_503(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        decode.health_status = 503
        async with world.router([prefill], [decode]) as url:
            async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "1")
            for path in ("/health", "/readiness", "/ready"):
                async with world.session.get(url + path) as response:
                    assert response.status == 503
            decode.health_status = 200
            await world.until(lambda: world.healthy_urls(url), lambda urls: len(urls) == 2)
            async with world.session.get(url + "/health") as response:
                assert response.status == 200
        assert not prefill.bodies and not decode.bodies

    run_world(scenario)


def test_a_dead_worker_is_passed_over_and_used_again_once_back(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill = await world.worker("p")
        decodes = [await world.worker("d0"), await world.worker("d1")]
        async with world.router([prefill], decodes, policy="least_loaded") as url:
            port = int(decodes[0].url.rsplit(":", 1)[1])
            await decodes[0].stop()
            for _ in range(8):
                async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                    assert (response.status, (await response.json())["from"]) == (200, "d1")
            await world.until(lambda: world.healthy_urls(url), lambda urls: decodes[0].url not in urls)
            await decodes[0].start(port)
            await world.until(lambda: world.healthy_urls(url), lambda urls: decodes[0].url in urls)
            while not decodes[0].bodies:
                async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                    assert response.status == 200

    run_world(scenario)


def test_the_bootstrap_port_is_asked_again_after_a_restart(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        async with world.router([prefill], [decode]) as url:
            prefill.health_status = 503
            await world.until(lambda: world.healthy_urls(url), lambda urls: prefill.url not in urls)
            prefill.health_status, prefill.bootstrap_port = 200, 7001
            await world.until(lambda: world.healthy_urls(url), lambda urls: prefill.url in urls)
            async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                assert response.status == 200
        assert decode.bodies[0]["bootstrap_port"] == 7001

    run_world(scenario)


def test_a_prefill_that_names_no_port_is_not_used_and_says_why(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        prefill.bootstrap_port = None
        prefill.health_status = 503
        async with world.router([prefill], [decode]) as url:
            prefill.health_status = 200

            async def reason() -> str:
                async with world.session.get(url + "/workers") as response:
                    return str((await response.json())["workers"][0]["last_error"])

            await world.until(reason, lambda text: "disaggregation_bootstrap_port" in text)

    run_world(scenario)


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"text"', b'{"a": NaN}', b"\xff"])
def test_a_body_that_is_no_json_object_is_a_400(run_world: RunWorld, raw: bytes) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        async with world.router([prefill], [decode]) as url:
            async with world.session.post(url + GENERATE, data=raw) as response:
                assert response.status == 400
                assert "message" in (await response.json())["error"]
        assert not prefill.bodies and not decode.bodies

    run_world(scenario)


def test_a_body_beyond_the_limit_is_a_413(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        async with world.router([prefill], [decode], max_request_bytes=1000) as url:
            async with world.session.post(url + GENERATE, json={"text": "a" * 2000}) as response:
                assert response.status == 413
        assert not prefill.bodies

    run_world(scenario)


def test_facts_come_from_decode_and_from_all(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        async with world.router([prefill], [decode]) as url:
            async with world.session.get(url + "/v1/models") as response:
                assert (await response.json())["data"] == [{"id": "d"}]
            async with world.session.get(url + "/get_server_info") as response:
                info = await response.json()
            async with world.session.post(url + "/abort_request", json={"rid": "r"}) as response:
                assert response.status == 200
        assert info["name"] == "d"
        assert [[worker["name"] for worker in info[role]] for role in ("prefill", "decode")] == [["p"], ["d"]]
        assert prefill.bodies == decode.bodies == [{"rid": "r"}]

    run_world(scenario)


def test_the_load_of_all_is_one_list_of_the_workers_own_entries(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode, silent = [await world.worker(name) for name in "pds"]
        prefill.reported, decode.reported = 2, 3
        async with world.router([prefill], [decode, silent]) as url:
            async with world.session.get(url + "/get_load") as response:
                assert await response.json() == [
                    {"dp_rank": 0, "num_reqs": 2, "num_tokens": 20, "worker": prefill.url, "worker_type": "prefill"},
                    {"dp_rank": 0, "num_reqs": 3, "num_tokens": 30, "worker": decode.url, "worker_type": "decode"},
                ]
            async with world.session.get(url + "/version") as response:
                assert await response.json() == {"version": pdserve.__version__}

    run_world(scenario)


def test_what_one_worker_answers_comes_with_its_headers(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        async def full(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({"error": {"message": "busy"}}, status=503, headers={"Retry-After": "7"})

        async with world.router([], [await world.worker("w", full)]) as url:
            async with world.session.post(url + "/tokenize", json={"prompt": "a"}) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "7")
                assert response.headers.getall("Content-Type") == ["application/json; charset=utf-8"]
                assert (await response.json())["error"]["message"] == "busy"

    run_world(scenario)


def test_paths_that_servers_take_either_way_are_taken_either_way(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        workers = [await world.worker(name) for name in "ab"]
        async with world.router([], workers) as url:
            for path in ("/flush_cache", "/start_profile", "/stop_profile", *MEMORY_COMMANDS):
                for method in ("GET", "POST"):
                    async with world.session.request(method, url + path) as response:
                        told = await response.json()
                        assert told["workers"].keys() == {worker.url for worker in workers}, (method, path)

    run_world(scenario)


def test_metrics_count_requests_and_show_what_is_in_flight(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        async with world.router([prefill], [decode]) as url:
            for _ in range(3):
                async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                    assert response.status == 200

            async def lines() -> set[str]:
                async with world.session.get(url + "/metrics") as response:
                    return set((await response.text()).splitlines())

            seen = await world.until(
                lines, lambda found: 'pdserve_router_requests_total{path="/generate",status="200"} 3.0' in found
            )
        assert f'pdserve_router_inflight{{role="decode",worker="{decode.url}"}} 0.0' in seen
        assert f'pdserve_router_worker_up{{role="prefill",worker="{prefill.url}"}} 1.0' in seen

    run_world(scenario)


def test_least_loaded_spreads_over_all_workers(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        gate = asyncio.Event()

        async def waits(worker: Any, request: Any, body: dict[str, Any]) -> Any:
            await gate.wait()
            return web.json_response({})

        prefill = await world.worker("p")
        decodes = [await world.worker(f"d{i}", waits) for i in range(3)]
        async with world.router([prefill], decodes, policy="least_loaded") as url:
            calls = [asyncio.create_task(world.session.post(url + GENERATE, json={"text": "a"})) for _ in range(9)]
            await until(lambda: sum(len(decode.bodies) for decode in decodes) == 9)
            assert [len(decode.bodies) for decode in decodes] == [3, 3, 3]
            gate.set()
            for response in await asyncio.gather(*calls):
                assert response.status == 200
                response.close()

    run_world(scenario)


def test_plain_workers_get_the_body_without_a_room(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w")
        async with world.router([], [worker]) as url:
            async with world.session.post(url + GENERATE, json={"text": "a"}) as response:
                assert (await response.json())["from"] == "w"
        assert worker.bodies == [{"text": "a"}]

    run_world(scenario)


@pytest.mark.parametrize("body", ["[" * 100_000, '{"text":' + "[" * 300 + "]" * 300 + "}"], ids=["open", "closed"])
def test_deep_nesting_is_a_400(run_world: RunWorld, body: str) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        async with (
            world.router([prefill], [decode]) as url,
            world.session.post(url + GENERATE, data=body.encode()) as response,
        ):
            assert response.status == 400
        assert not prefill.bodies and not decode.bodies

    run_world(scenario)


def test_a_flush_reaches_all_and_is_as_bad_as_the_worst_answer(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        async def busy(worker: Any, request: Any, body: dict[str, Any]) -> Any:
            return web.json_response({"message": "2 requests are running"}, status=400)

        prefill, decode = await world.worker("p"), await world.worker("d", busy)
        async with world.router([prefill], [decode]) as url, world.session.post(url + "/flush_cache") as response:
            assert response.status == 400
            answer = await response.json()
            assert answer["workers"] == {prefill.url: 200, decode.url: 400}
            assert answer["error"]["message"] == f"{decode.url} answered 400"
        assert prefill.paths == decode.paths == ["/flush_cache"]

    run_world(scenario)


def test_a_command_that_a_worker_refuses_says_why(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        async def refuses(worker: Any, request: Any, body: dict[str, Any]) -> Any:
            return web.json_response({"error": {"message": "no such mode", "param": "mode", "code": 400}}, status=400)

        prefill, decode = await world.worker("p", refuses), await world.worker("d", refuses)
        async with (
            world.router([prefill], [decode]) as url,
            world.session.post(url + "/pause_generation", json={"mode": "x"}) as response,
        ):
            error = (await response.json())["error"]
        assert error == {"message": "no such mode", "param": "mode", "code": 400, "worker": prefill.url}

    run_world(scenario)


def test_a_flush_that_may_wait_is_waited_for(run_world: RunWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: Any) -> None:
        gate = asyncio.Event()

        async def waits(worker: Any, request: Any, body: dict[str, Any]) -> Any:
            await gate.wait()
            return web.json_response({"waited": request.query.get("timeout")})

        worker = await world.worker("w", waits)
        async with world.router([], [worker]) as url:
            patient = asyncio.create_task(world.session.post(url + "/flush_cache?timeout=60"))
            async with world.session.post(url + "/flush_cache") as response:
                assert response.status == 502, "nobody said that it may take this long"
            gate.set()
            async with await patient as response:
                assert response.status == 200

    monkeypatch.setattr(fleet, "INFO_TIMEOUT_S", 0.2)
    run_world(scenario)


def test_a_client_that_leaves_during_the_last_write_is_no_error(
    run_world: RunWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def leaves(_: GenerateHandler, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(GenerateHandler, "handle", leaves)

    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        async with world.router([prefill], [decode]) as url:
            with pytest.raises(aiohttp.ClientConnectionError):
                await world.session.post(url + "/generate", json={"text": "x"})
            assert (await world.session.get(url + "/health")).status == 200

    run_world(scenario)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
