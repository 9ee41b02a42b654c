"""The deployment in one answer: asked of the workers at most once a second, whatever they say or do not say."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from aiohttp import web

from pdserve.base import log_ring
from pdserve.base.log_ring import LogRing
from pdserve.router.app import ROUTER
from pdserve.router.config.config import RouterAccessConfig, WorkerRole
from pdserve.router.dashboard.cluster_snapshot import ObserveReply, join_edges, join_requests, parse_answer
from tests.unit.router.answers import begin_stream

RunWorld = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]


def edge(source: str, target: str, **fields: Any) -> dict[str, Any]:
    return {"from": source, "to": target, "peer_state": "ready"} | fields


def told(endpoint: str, *, edges: list[dict[str, Any]] = [], requests: list[dict[str, Any]] = []) -> dict[str, Any]:  # noqa: B006
    """What a server with one replica says at `/observe`, with a field that the router does not know."""
    pages = {"total": 8, "free": 5, "evictable": 1, "locked": 0, "leased": 2}
    state = {"endpoint": endpoint, "queues": {"num_running_reqs": 2}, "pages": pages, "of_tomorrow": [1]}
    return {
        "server": {"model": "m", "status": "ready"},
        "replicas": [{"dp_rank": 0, "trouble": None, "state": state}],
        "edges": edges,
        "requests": requests,
    }


async def get(world: Any, url: str, key: str | None = None) -> dict[str, Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with world.session.get(url + "/observe", headers=headers) as response:
        assert response.status == 200
        assert response.headers["Cache-Control"] == "no-store"
        return dict(await response.json())


def by_url(picture: dict[str, Any]) -> dict[str, Any]:
    return {worker["url"]: worker for worker in picture["workers"]}


def test_workers_edges_and_requests_are_put_together(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        one = edge("p:1", "d:1", bytes=7, in_flight=1)
        half = {"room": "5", "arrived_at": 3.0, "ttft_s": 0.5}
        prefill.observed = told("p:1", edges=[one], requests=[half | {"id": "a"}])
        decode.observed = told("d:1", edges=[one | {"bytes": 9, "in_flight": 0}], requests=[half | {"id": "b"}])
        decode.observed["rates"] = {"spec_accept_length": 2.5, "spec_accept_rate": 0.5}
        async with world.router([prefill], [decode]) as url:
            picture = await get(world, url)
        router, workers = picture["router"], by_url(picture)
        assert (router["pd"], router["serving"], router["queued"]) == (True, True, 0)
        seen = workers[prefill.url]
        assert (seen["worker_type"], seen["is_healthy"], seen["breaker"], seen["load"]) == (
            "prefill",
            True,
            "closed",
            0,
        )
        assert seen["observed"]["error"] is None and seen["observed"]["server"]["model"] == "m"
        assert seen["observed"]["replicas"][0]["state"]["pages"] == prefill.observed["replicas"][0]["state"]["pages"]
        rates = [workers[one.url]["observed"]["rates"]["spec_accept_length"] for one in (prefill, decode)]
        assert rates == [None, 2.5], "a server without a drafter has none"
        (joined,) = picture["edges"]
        assert (joined["from_url"], joined["to_url"]) == (prefill.url, decode.url)
        assert (joined["bytes"], joined["in_flight"], joined["reports"]) == (9, 1, 2)
        (request,) = picture["requests"]
        assert {role: half["id"] for role, half in request["halves"].items()} == {"prefill": "a", "decode": "b"}

    run_world(scenario)


def test_workers_are_asked_once_a_second_however_many_look(
    run_world: RunWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w")
        worker.observed = told("w:1")
        monkeypatch.setattr("pdserve.router.dashboard.observe.INTERVAL_S", 3600.0)
        async with world.router([], [worker]) as url:
            assert worker.num_observed == 0
            pictures = await asyncio.gather(*(get(world, url) for _ in range(20)))
            assert worker.num_observed == 1
            assert all(by_url(one)[worker.url]["observed"]["replicas"] for one in pictures), (
                "all wait for the one answer"
            )
            monkeypatch.setattr("pdserve.router.dashboard.observe.INTERVAL_S", 0.0)
            await get(world, url)
            assert worker.num_observed == 2

    run_world(scenario)


def test_a_silent_worker_holds_nobody_up_and_one_that_is_dead_has_no_numbers(
    run_world: RunWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.router.dashboard.observe.INTERVAL_S", 0.0)
    monkeypatch.setattr("pdserve.router.dashboard.observe.PATIENCE_S", 0.05)

    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        prefill.observed = told("p:1")
        decode.observed = told("d:1", edges=[edge("p:1", "d:1")])
        async with world.router([prefill], [decode]) as url:
            await get(world, url)
            prefill.observe_gate = asyncio.Event()
            for _ in range(3):
                seen = by_url(await get(world, url))
                assert seen[prefill.url]["observed"]["replicas"], "its last answer is shown"
            assert prefill.num_observed == 2, "nobody asks again before it has answered"
            prefill.observe_gate.set()
            await prefill.stop()
            await world.until(lambda: world.healthy_urls(url), lambda urls: prefill.url not in urls)
            picture = await get(world, url)
            dead = by_url(picture)[prefill.url]
            assert dead["is_healthy"] is False and dead["last_error"]
            assert dead["observed"]["replicas"] == [] and dead["observed"]["error"] == dead["last_error"]
            assert picture["edges"][0]["from_url"] == prefill.url, "peers still tell of it"
            assert picture["router"]["serving"] is False

    run_world(scenario)


def test_what_is_no_picture_is_an_error_of_that_worker_alone(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        workers = [await world.worker(name) for name in ("good", "foreign", "odd")]
        good, foreign, odd = workers
        good.observed, odd.observed = told("g:1"), told("o:1") | {"edges": [{"in_flight": "<b>many</b>"}]}
        async with world.router([], workers) as url:
            seen = by_url(await get(world, url))
        assert seen[good.url]["observed"]["error"] is None
        assert seen[foreign.url]["observed"]["error"] == "GET /observe answered 404"
        assert "$.edges[0].in_flight" in seen[odd.url]["observed"]["error"]
        assert seen[odd.url]["is_healthy"] is True

    run_world(scenario)


def test_workers_are_sent_the_routers_key_and_never_the_visitors(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w")
        worker.observed = told("w:1")
        access = RouterAccessConfig(api_key="k", worker_api_key="inner")
        async with world.router([], [worker], wait_key="k", access=access) as url:
            async with world.session.get(url + "/observe") as response:
                assert response.status == 401
            await get(world, url, "k")
            assert worker.observe_keys == ["Bearer inner"]
        async with world.router([], [worker]) as url:
            await get(world, url, "somebody's")
            assert worker.observe_keys[1:] == [None], "one answer is for all who look"

    run_world(scenario)


def test_the_page_is_public_and_bound_to_its_own_origin(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w")
        async with world.router([], [worker], wait_key="k", access=RouterAccessConfig(api_key="k")) as url:
            for path, kind in (("/", "html"), ("/page/app.js", "javascript"), ("/page/style.css", "css")):
                async with world.session.get(url + path) as response:
                    assert response.status == 200 and kind in response.headers["Content-Type"]
                    policy = dict(
                        rule.split(" ", 1) for rule in response.headers["Content-Security-Policy"].split("; ")
                    )
                    tag = response.headers["ETag"]
                    assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert policy["default-src"] == "'none'"
                assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
                assert policy["require-trusted-types-for"] == "'script'", "strings cannot become markup"
                async with world.session.get(url + path, headers={"If-None-Match": tag}) as response:
                    assert response.status == 304
            for path in ("/page/", "/page/none.js", "/page/..%2Fapp.py", "/page/../app.py", "/page/a/b"):
                async with world.session.get(web_url(url + path)) as response:
                    assert response.status in (401, 404), path
            async with world.session.post(url + "/") as response:
                assert response.status == 405

    run_world(scenario)


def web_url(text: str) -> Any:
    """Sent as it is written."""
    from yarl import URL

    return URL(text, encoded=True)


def test_edges_of_unknown_servers_and_of_silent_peers_are_told_as_such() -> None:
    raw = told("d:1", edges=[edge("x:9", "d:1", peer_state="silent"), edge("p:1", "d:1", gb_per_s_writing=2.0)])
    answers = [parse_answer(msgspec.json.encode(raw)), ObserveReply()]
    known, unknown = join_edges(answers, {"d:1": "http://d", "p:1": "http://p"})
    assert (known["from_url"], known["gb_per_s_writing"], known["peer_state"]) == ("http://p", 2.0, "ready")
    assert (unknown["from_url"], unknown["to_url"], unknown["peer_state"]) == (None, "http://d", "silent")


def test_requests_without_a_room_are_told_apart_by_server() -> None:
    answer = parse_answer(msgspec.json.encode(told("r:1", requests=[{"id": "same", "arrived_at": 1.0}])))
    found = join_requests([(WorkerRole.REGULAR, "http://a", answer), (WorkerRole.REGULAR, "http://b", answer)])
    assert sorted(one["halves"]["regular"]["url"] for one in found) == ["http://a", "http://b"]


async def history(world: Any, url: str, query: str = "") -> dict[str, Any]:
    async with world.session.get(f"{url}/observe/history{query}") as response:
        assert response.headers["Cache-Control"] == "no-store"
        return dict(await response.json())


async def stream(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Three events, and an error as the last one if the body wants it."""
    response = await begin_stream(request)
    for number in range(3):
        await response.write(b"data: {%d}\n\n" % number)
    await response.write(b'data: {"error":{"message":"lost"}}\n\n' if body.get("breaks") else b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def refuses(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no memory"}}, status=500)


def test_the_history_has_latencies_of_streams_failures_and_memory(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d", stream)
        moved = edge("p:1", "d:1") | {"gb_per_s": 0.5}
        prefill.observed = told("p:1", edges=[moved, edge("p:1", "d:2") | {"gb_per_s": 0.25}])
        prefill.observed["rates"] = {"cache_hit_rate": 0.5}
        decode.observed = told("d:1", edges=[moved | {"gb_per_s": 0.4}])
        state = decode.observed["replicas"][0]["state"]
        store = {"store": "file", "store_read_bytes": 100, "store_written_bytes": 5}
        state |= {"tokens": {"used": 5, "max": 64}, "running": 2, "waiting": 1}
        state["tiers"] = {"host_used": 7, "host_max": 90, **store}
        decode.observed["rates"] = {"spec_accept_length": 2.5, "spec_accept_rate": 0.5, "generation_tokens_per_s": 9.0}
        async with world.router([prefill], [decode]) as url:
            for body in ({"text": "x"}, {"text": "x", "breaks": True}):
                async with world.session.post(url + "/generate", json=body) as response:
                    await response.read()
            await world.app[ROUTER].history.sample()
            fleet, one = (await history(world, url))["series"], await history(world, url, f"?worker={decode.url}")
            for series in (fleet, one["series"]):
                assert (series["requests"], series["failed"]) == ([2], [1])
                assert series["ttft_p50_s"][0] > 0
                assert (series["kv_host_used"], series["kv_host_total"], series["accept_length"]) == ([7], [90], [2.5])
                assert series["tokens_per_s"] == [9.0]
            assert (one["series"]["running"], one["series"]["queued"], one["series"]["kv_device_used"]) == (
                [2],
                [1],
                [5],
            )
            assert fleet["running"] == [0], "of the router's own requests none runs"
            assert (fleet["kv_transfer"], fleet["cache_hit_rate"]) == ([0.75e9], [0.5]), "both ends report an edge"
            assert one["series"]["kv_transfer"] == [0.4e9] and "cache_hit_rate" not in one["series"]
            assert set(one["workers"]) == {prefill.url, decode.url}
            (failure,) = (await get(world, url))["router"]["failures"]
            assert (failure["path"], failure["worker"], failure["status"]) == ("/generate", decode.url, 200)
            assert failure["error"] == "lost" and failure["id"]
            decode.answers = [refuses]
            async with world.session.post(url + "/generate", json={"text": "x"}) as response:
                assert response.status == 500
            failure = world.app[ROUTER].history.history.failures[-1]
            assert (failure.status, failure.error) == (500, "no memory")
            async with world.session.get(url + "/observe/history?seconds=x") as response:
                assert response.status == 400 and "seconds" in (await response.json())["error"]["message"]
            async with world.session.get(url + "/observe/history?worker=http://none") as response:
                assert response.status == 404

    run_world(scenario)


def test_the_history_asks_a_worker_without_the_path_rarely(
    run_world: RunWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.router.dashboard.observe.INTERVAL_S", 0.0)

    async def scenario(world: Any) -> None:
        foreign = await world.worker("w")
        async with world.router([], [foreign]) as url:
            for _ in range(3):
                await world.app[ROUTER].history.sample()
            assert foreign.num_observed == 1
            await get(world, url)
            assert foreign.num_observed == 2, "the page asks as before"
            assert (await history(world, url, f"?worker={foreign.url}"))["series"]["running"] == [0, 0, 0]

    run_world(scenario)


def test_the_log_lines_of_router_and_workers(run_world: RunWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_ring, "_rings", deque([LogRing.create("router")]))
    log_ring._rings[0].write("started with k1234567")

    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        access = RouterAccessConfig(admin_api_key="k1234567")
        async with world.router([prefill], [decode], access=access) as url:
            async with world.session.get(f"{url}/logs") as response:
                assert response.status == 401
            headers = {"Authorization": "Bearer k1234567"}
            async with world.session.get(f"{url}/logs?lines=9", headers=headers) as response:
                answer = await response.json()
            async with world.session.get(f"{url}/logs?lines=x", headers=headers) as response:
                assert response.status == 400 and (await response.json())["error"]["param"] == "lines"
        assert answer["processes"] == [{"name": "router", "lines": ["started with [redacted]"]}]
        assert answer["workers"] == {worker.url: {"error": "status 405"} for worker in (prefill, decode)}

    run_world(scenario)


def test_the_history_needs_the_admin_key(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w")
        access = RouterAccessConfig(api_key="k", admin_api_key="a")
        async with world.router([], [worker], wait_key="k", access=access) as url:
            for key, status in (("k", 401), ("a", 200)):
                headers = {"Authorization": f"Bearer {key}"}
                async with world.session.get(url + "/observe/history", headers=headers) as response:
                    assert response.status == status

    run_world(scenario)
