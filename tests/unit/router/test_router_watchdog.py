"""Pairs that serve no request are found by probes and left out, however healthy their workers are."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import pytest
from aiohttp import ClientSession, web

from pdserve.router.app import ROUTER
from pdserve.router.config.config import BreakerConfig, HealthConfig, ProbeConfig, RouterConfig, WorkerRole, WorkerSpec
from pdserve.router.proxy import watchdog
from pdserve.router.proxy.attempts import Drain
from pdserve.router.proxy.watchdog import (
    MAX_AT_ONCE,
    SLACK_S,
    TICK_S,
    PairWatchdog,
    ProbeFailure,
    ProbeResult,
    probe_outcome,
    rotation,
)
from pdserve.router.workers.metrics import RouterMetrics
from pdserve.router.workers.workers import Pair, Pairs, Registry
from tests.waiting import settle, until

Scenario = Callable[[Any], Coroutine[Any, Any, None]]
RunWorld = Callable[[Scenario], None]

COMPLETIONS, RESUME = "/v1/completions", "/resume_memory_occupation"
QUICK = ProbeConfig(interval_s=0.1, timeout_s=0.3)
OK, BUSY = {"status": "ok"}, {"status": "busy"}
NO_TOKEN = {"error": {"code": "no_token"}}
STALLED = {"error": {"code": "stalled", "message": "the probe waits for KV memory"}}


def says(worker: Any, body: dict[str, Any] | None, status: int = 200) -> None:
    """What it answers to probes from now on."""
    worker.pair, worker.pair_status = body, status


async def pairs(world: Any, url: str) -> dict[tuple[str, str], Any]:
    """What `/observe` says of each pair."""
    async with world.session.get(f"{url}/observe") as response:
        shown = (await response.json())["pairs"]
    return {(one["prefill"], one["decode"]): one for one in shown}


async def readiness(world: Any, url: str) -> int:
    async with world.session.get(f"{url}/readiness") as response:
        return int(response.status)


async def listed(world: Any, url: str) -> Any:
    async with world.session.get(f"{url}/workers") as response:
        return await response.json()


async def ask(world: Any, url: str) -> tuple[int, dict[str, Any], Any]:
    async with world.session.post(url + COMPLETIONS, json={"prompt": "x"}) as response:
        return response.status, await response.json(), response.headers


def test_pair_that_serves_nothing_is_not_ready_until_a_probe_succeeds(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        says(prefill, OK)
        says(decode, OK)
        async with world.router([prefill], [decode], probes=QUICK) as url:
            await until(lambda: len(decode.pair_bodies) >= 2)
            assert await readiness(world, url) == 200
            half, other = decode.pair_bodies[0], prefill.pair_bodies[0]
            assert half == other and half["bootstrap_host"] == "127.0.0.1" and half["bootstrap_port"] == 7000
            says(decode, NO_TOKEN, 503)
            says(prefill, NO_TOKEN, 503)
            await world.until(lambda: readiness(world, url), lambda status: status == 503)
            status, body, headers = await ask(world, url)
            assert (status, body["error"]["code"]) == (503, "no_pair") and headers["Retry-After"] == "1"
            assert await world.healthy_urls(url) == {prefill.url, decode.url}
            (shown,) = (await pairs(world, url)).values()
            assert not shown["serving"] and "no_token" in shown["error"]
            async with world.session.get(f"{url}/metrics") as response:
                text = await response.text()
            line = f'pdserve_router_pair_up{{decode="{decode.url}",prefill="{prefill.url}"}}'
            assert f"{line} 0.0" in text
            says(decode, OK)
            says(prefill, OK)
            await world.until(lambda: readiness(world, url), lambda status: status == 200)
            assert (await ask(world, url))[0] == 200
            async with world.session.get(f"{url}/metrics") as response:
                assert f"{line} 1.0" in await response.text()

    run_world(scenario)


@pytest.mark.parametrize(
    ("of_prefill", "of_decode", "what"),
    [("1f", "2e", "tokens differ"), ("none", "2e", "has no control token"), ("1f", "none", "has no control token")],
)
def test_workers_with_different_control_tokens_are_no_pair_before_any_request(
    run_world: RunWorld, caplog: pytest.LogCaptureFixture, of_prefill: str, of_decode: str, what: str
) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        prefill.facts, decode.facts = {"control_token_id": of_prefill}, {"control_token_id": of_decode}
        says(prefill, {"error": {"code": "no_token"}}, 503)
        says(decode, {"error": {"code": "prefill_not_found"}}, 503)
        async with world.router([prefill], [decode], probes=QUICK) as url:
            assert await readiness(world, url) == 503
            status, body, headers = await ask(world, url)
            assert (status, body["error"]["code"]) == (502, "control_token_mismatch")
            assert "PDSERVE_CONTROL_TOKEN" in body["error"]["message"] and "Retry-After" not in headers
            assert not prefill.bodies and not decode.bodies
            await until(lambda: len(decode.pair_bodies) >= 2)
            (shown,) = (await pairs(world, url)).values()
            assert not shown["serving"] and what in shown["error"] and "prefill_not_found" not in shown["error"]
            assert "control_token" not in str(await listed(world, url)), "ids are for the router only"
            says(prefill, OK)
            says(decode, OK)  # it was restarted with the right token
            await world.until(lambda: readiness(world, url), lambda status: status == 200)
            assert (await ask(world, url))[0] == 200

    run_world(scenario)
    assert what in caplog.text and "set PDSERVE_CONTROL_TOKEN to the same value" in caplog.text


def test_a_token_that_is_corrected_is_seen_when_the_worker_is_up_again(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode, other = [await world.worker(name) for name in ("p", "d", "d2")]
        for worker, told in ((prefill, "1f"), (decode, "1f"), (other, "2e")):
            worker.facts = {"control_token_id": told}
            says(worker, BUSY)  # probes say nothing
        async with world.router([prefill], [decode, other], probes=QUICK, policy="round_robin") as url:
            found = {ends[1]: pair["serving"] for ends, pair in (await pairs(world, url)).items()}
            assert found[other.url] is False and found.get(decode.url, True)
            assert [(await ask(world, url))[1]["from"] for _ in range(4)] == ["d"] * 4
            other.facts, other.health_status = {"control_token_id": "1f"}, 503
            await world.until(lambda: world.healthy_urls(url), lambda urls: other.url not in urls)
            other.health_status = 200
            await world.until(lambda: pairs(world, url), lambda shown: shown[prefill.url, other.url]["serving"])
            assert {(await ask(world, url))[1]["from"] for _ in range(4)} == {"d", "d2"}

    run_world(scenario)


@pytest.mark.parametrize("command", ["/update_weights_from_disk", "/update_weight_version", RESUME])
def test_a_pair_that_a_command_has_repaired_serves_the_next_request(
    run_world: RunWorld, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(watchdog, "RECHECK_S", 600.0)

    async def repair(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path == command and not body.get("prepare_only"):
            says(worker, OK)
        return web.json_response({"from": worker.name})

    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p", repair), await world.worker("d", repair)
        for worker in (prefill, decode):
            says(worker, NO_TOKEN, 503)
        async with world.router([prefill], [decode], probes=QUICK) as url:
            await world.until(lambda: readiness(world, url), lambda status: status == 503)
            async with world.session.post(url + "/flush_cache", json={}) as response:
                assert response.status == 200
            assert (await ask(world, url))[1]["error"]["code"] == "no_pair"
            async with world.session.post(url + command, json={}) as response:
                assert response.status == 200
            assert (await ask(world, url))[0] == 200

    run_world(scenario)


def test_a_probe_that_ran_during_a_command_is_repeated(run_world: RunWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "RECHECK_S", 0.0)

    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        for worker in (prefill, decode):
            says(worker, NO_TOKEN, 503)
        async with world.router([prefill], [decode], probes=ProbeConfig(interval_s=0.1, timeout_s=10.0)) as url:
            await world.until(lambda: readiness(world, url), lambda status: status == 503)
            begun, gate = asyncio.Event(), asyncio.Event()

            async def slow(request: web.Request) -> web.Response:
                begun.set()
                await gate.wait()
                return web.json_response(NO_TOKEN, status=503)

            decode.on_pair = slow
            await begun.wait()

            async def update() -> int:
                async with world.session.post(f"{url}/update_weight_version", json={}) as response:
                    return int(response.status)

            command = asyncio.create_task(update())
            await until(lambda: decode.paths)
            decode.on_pair = None
            says(prefill, OK)
            says(decode, OK)
            gate.set()
            assert await command == 200
            assert (await ask(world, url))[0] == 200

    run_world(scenario)


def test_a_check_behind_a_command_begins_after_it(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        worker = await world.worker("w")
        health = HealthConfig(interval_s=600.0, success_threshold=3)
        async with world.router([], [worker], health=health) as url:
            router = world.app[ROUTER]
            (known,) = router.registry.workers
            worker.health_gate, count = asyncio.Event(), worker.num_health
            early = asyncio.create_task(router.health.check(known))
            await until(lambda: worker.num_health == count + 1)
            late = asyncio.create_task(router.health.recheck(known))
            await settle()
            worker.health_gate.set()
            await asyncio.gather(early, late)
            assert worker.num_health == count + 2
            worker.health_status = 503
            await router.health.recheck(known)
            assert not known.healthy and worker.num_health == count + 3
            worker.health_status = 200
            await router.health.recheck(known)
            assert worker.url in await world.healthy_urls(url)

    run_world(scenario)


def test_only_usable_workers_with_other_tokens_are_blamed() -> None:
    _, states, (pair,) = make_pairs()
    assert pair.prefill is not None
    for worker in (pair.prefill, pair.decode):
        worker.healthy = True
    assert not states.any_differ
    assert states.differ(pair, "their control tokens differ", 1.0) and states.any_differ and not states.serves(pair)
    assert not states.differ(pair, "their control tokens differ", 2.0), "it is down already"
    pair.decode.healthy = False
    assert not states.any_differ and not states.serves(pair)
    assert states.served(pair, 3.0) and states.serves(pair) and not states.any_down


def test_without_probes_a_difference_is_logged_only(run_world: RunWorld, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        prefill.facts, decode.facts = {"control_token_id": "none"}, {"control_token_id": "2e"}
        async with world.router([prefill], [decode], probes=ProbeConfig(enabled=False)) as url:
            assert (await ask(world, url))[0] == 200

    run_world(scenario)
    assert "has no control token, and the other has one" in caplog.text


def test_only_the_broken_pair_is_left_out_and_its_requests_go_elsewhere(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefills = [await world.worker(name) for name in ("p", "p2")]
        decodes = [await world.worker(name) for name in ("d", "d2")]

        async def is_with_first(room: int, name: str) -> bool:
            def came(prefill: Any) -> bool:
                return any(one["bootstrap_room"] == room for one in getattr(prefill, name))

            await until(lambda: any(map(came, prefills)))
            return came(prefills[0])

        async def hangs_with_first(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if await is_with_first(body["bootstrap_room"], "bodies"):
                await asyncio.Event().wait()
            return web.json_response({"from": worker.name})

        async def probed(request: web.Request) -> web.Response:
            """No token comes through p and d."""
            bad = await is_with_first((await request.json())["bootstrap_room"], "pair_bodies")
            return web.json_response(NO_TOKEN if bad else OK, status=503 if bad else 200)

        for worker in (*prefills, decodes[1]):
            says(worker, OK)
        decodes[0].on_pair = probed
        decodes[0].answers = [hangs_with_first]
        async with world.router(prefills, decodes, probes=QUICK, policy="round_robin") as url:
            asked = [asyncio.create_task(ask(world, url)) for _ in range(8)]
            answers = await asyncio.gather(*asked)
            assert [status for status, _, _ in answers] == [200] * 8, "those that hung were tried elsewhere"
            shown = await pairs(world, url)
            assert {key for key, one in shown.items() if not one["serving"]} == {(prefills[0].url, decodes[0].url)}
            assert await readiness(world, url) == 200
            before = len(prefills[0].bodies)
            assert [(await ask(world, url))[0] for _ in range(8)] == [200] * 8
            assert len(prefills[0].bodies) > before, "it serves with the other decode worker"
            assert all("from" in body for _, body, _ in answers)

    run_world(scenario)


@pytest.mark.parametrize(
    ("body", "status"), [(BUSY, 200), (None, 200), ({"error": {"code": "engine_starting"}}, 503), ({}, 401)]
)
def test_busy_workers_and_those_that_cannot_be_probed_are_not_left_out(
    run_world: RunWorld, body: dict[str, Any] | None, status: int
) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        says(prefill, body, status)
        says(decode, NO_TOKEN, 503)
        async with world.router([prefill], [decode], probes=QUICK) as url:
            asked = 4 if status == 200 and body else 1
            await until(lambda: len(decode.pair_bodies) >= asked)
            assert await readiness(world, url) == 200
            assert (await ask(world, url))[0] == 200

    run_world(scenario)


@pytest.mark.parametrize("stalled", ["p", "d"])
def test_pair_with_a_half_that_stands_still_is_left_out_though_the_other_half_is_busy(
    run_world: RunWorld, stalled: str
) -> None:
    async def scenario(world: Any) -> None:
        workers = {name: await world.worker(name) for name in "pd"}
        for name, worker in workers.items():
            says(worker, *((STALLED, 503) if name == stalled else (BUSY, 200)))
        async with world.router([workers["p"]], [workers["d"]], probes=QUICK) as url:
            await world.until(lambda: readiness(world, url), lambda status: status == 503)
            (shown,) = (await pairs(world, url)).values()
            assert not shown["serving"] and "waits for KV memory" in shown["error"]

    run_world(scenario)


FAILED, CONCLUSIVE = ProbeFailure("no token"), ProbeFailure("stalled", conclusive=True)


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ([ProbeResult.OK, ProbeResult.OK], "ok"),
        ([CONCLUSIVE, ProbeResult.OK], "ok"),
        ([FAILED, FAILED], "failed"),
        ([ProbeResult.OK, FAILED], "failed"),
        ([ProbeResult.NO_NEWS, FAILED], "no_news"),
        ([FAILED, ProbeResult.NO_NEWS], "no_news"),
        ([ProbeResult.NO_NEWS, CONCLUSIVE], "failed"),
        ([CONCLUSIVE, ProbeResult.NO_NEWS], "failed"),
        ([ProbeResult.CANNOT, CONCLUSIVE], "no_news"),
        ([CONCLUSIVE], "failed"),
        ([ProbeResult.NO_NEWS], "no_news"),
    ],
)
def test_the_outcome_of_a_probe_follows_from_both_halves(
    answers: list[ProbeResult | ProbeFailure], outcome: str
) -> None:
    assert probe_outcome(answers) == outcome


def test_pair_that_serves_requests_is_not_probed(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        says(prefill, OK)
        says(decode, OK)
        async with world.router([prefill], [decode], probes=ProbeConfig(interval_s=1000.0)) as url:
            await until(lambda: len(decode.pair_bodies) == 1)
            router = world.app[ROUTER]
            assert (await ask(world, url))[0] == 200
            now = router.admission.now()
            assert router.watchdog.due(now + 400) == []
            assert len(router.watchdog.due(now + 1001)) == 1, "it has served nothing since"

    run_world(scenario)


def test_workers_that_do_both_halves_are_probed_alone(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        good, bad = await world.worker("a"), await world.worker("b")
        says(good, OK)
        says(bad, NO_TOKEN, 503)
        async with world.router([], [good, bad], probes=QUICK, policy="round_robin") as url:
            await world.until(lambda: pairs(world, url), lambda found: not found.get((None, bad.url), OK)["serving"])
            assert "bootstrap_room" not in good.pair_bodies[0]
            names = {(await ask(world, url))[1]["from"] for _ in range(4)}
            assert names == {"a"} and await readiness(world, url) == 200

    run_world(scenario)


def make_pairs(count: int = 1) -> tuple[Registry, Pairs, list[Pair]]:
    registry = Registry(BreakerConfig())
    known = Pairs(registry)
    prefills = [registry.add(WorkerSpec(role=WorkerRole.PREFILL, url=f"http://p{i}")) for i in range(count)]
    decode = registry.add(WorkerSpec(role=WorkerRole.DECODE, url="http://d"))
    return registry, known, [Pair(prefill, decode) for prefill in prefills]


def test_a_pair_that_has_served_since_a_probe_began_has_not_failed() -> None:
    _, known, (pair,) = make_pairs()
    known.served(pair, 10.0)
    assert not known.failed(pair, 9.0, "late", 11.0) and not known.failed(pair, 9.5, "late", 11.5)
    assert known.serves(pair) and not known.any_down
    assert not known.failed(pair, 12.0, "once", 13.0) and known.serves(pair)
    assert known.failed(pair, 13.0, "twice", 14.0) and not known.serves(pair)
    assert not known.failed(pair, 14.0, "again", 15.0), "that is known already"
    assert known.served(pair, 16.0) and known.serves(pair) and not known.any_down


def test_pairs_of_a_worker_that_is_gone_are_forgotten() -> None:
    registry, known, (one, two) = make_pairs(2)
    for pair in (one, two):
        known.failed(pair, 1.0, "no", 2.0)
        known.failed(pair, 2.0, "no", 3.0)
    decode = one.decode
    prefills = [pair.prefill for pair in (one, two) if pair.prefill is not None]
    assert not known.could_serve(prefills, [decode])
    registry.forget(prefills[0])
    assert known.any_down and [json.loads(json.dumps(entry))["prefill"] for entry in known.shown(4.0)] == ["http://p1"]
    registry.forget(decode)
    assert not known.any_down and known.shown(4.0) == []


PROMISE_S = 15.0
"""After which a pair through which nothing comes is not ready, where there are up to 64 pairs."""


def seconds_until_all_are_down(
    num_prefill: int, num_decode: int, served_until: float, answers: Sequence[ProbeResult | ProbeFailure]
) -> float:
    """After all pairs have served until then, on a clock of its own. Every probe takes as long as it may."""
    registry = Registry(BreakerConfig())
    prefills, decodes = (
        [registry.add(WorkerSpec(role=role, url=f"http://{role}{i}")) for i in range(count)]
        for role, count in ((WorkerRole.PREFILL, num_prefill), (WorkerRole.DECODE, num_decode))
    )
    for worker in (*prefills, *decodes):
        worker.healthy = True
    known, everyone = Pairs(registry), [Pair(prefill, decode) for prefill in prefills for decode in decodes]
    config, session = RouterConfig(pd=True), cast(ClientSession, None)
    watchdog = PairWatchdog(
        config, registry, known, session, RouterMetrics(), Drain(), random.Random(1), on_change=lambda: None
    )
    running: dict[Pair, float] = {}
    now = 0.0
    while any(known.serves(pair) for pair in everyone):
        for pair, begun in list(running.items()):
            if now >= begun + config.probes.timeout_s + SLACK_S:
                del running[pair]
                if probe_outcome(answers) == "failed":
                    known.failed(pair, begun, "nothing came", now)
        for pair in everyone if now <= served_until else ():
            known.served(pair, now)
        idle = [pair for pair in watchdog.due(now) if pair not in running]
        for pair in idle[: MAX_AT_ONCE - len(running)]:
            known.state(pair).probed_at = running[pair] = now
        now += TICK_S
        assert now < 1000
    return now - TICK_S - served_until


@pytest.mark.parametrize("answers", [(FAILED, FAILED), (ProbeResult.NO_NEWS, CONCLUSIVE)])
@pytest.mark.parametrize("size", [(1, 1), (8, 8), (1, 64), (64, 1)])
def test_by_default_pairs_through_which_nothing_comes_are_left_out_in_time(
    size: tuple[int, int], answers: Sequence[ProbeResult | ProbeFailure]
) -> None:
    moments = [TICK_S * i for i in range(1 + int(ProbeConfig().interval_s / TICK_S))]
    assert max(seconds_until_all_are_down(*size, moment, answers) for moment in moments) <= PROMISE_S


def test_pairs_that_are_down_keep_no_others_from_being_probed() -> None:
    assert seconds_until_all_are_down(10, 10, 0.0, [FAILED, FAILED]) < 10 * PROMISE_S


def test_each_of_many_workers_is_in_every_round() -> None:
    prefills, decodes = [f"p{i}" for i in range(4)], [f"d{i}" for i in range(20)]
    seen = set()
    for number in range(20):
        found = rotation(prefills, decodes, number)
        assert {one for one, _ in found} == set(prefills) and {two for _, two in found} == set(decodes)
        assert len(found) == 20
        seen |= set(found)
    assert len(seen) == 80, "all pairs have their turn"
    assert rotation(prefills, [], 1) == []
    assert rotation(["p"], ["d"], 1) == [("p", "d")]
