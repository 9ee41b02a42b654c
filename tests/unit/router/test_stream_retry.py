"""Streams whose decode worker dies go on from another one; the client sees one stream. Workers are scripted."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from aiohttp import web

from pdserve.base.stream_state import DONE, RESUME_FIELD, STATE_HEADER, EventState
from pdserve.protocol.failure import RUNNING_TIMEOUT
from pdserve.router.app import ROUTER
from pdserve.router.config.config import HealthConfig, RetryConfig
from pdserve.router.proxy.stream_retry import StreamProgress, can_go_on, with_seed
from tests.unit.router.answers import begin_stream
from tests.unit.router.conftest import answer_ok
from tests.waiting import settle, until

Scenario = Callable[[Any], Coroutine[Any, Any, None]]
RunWorld = Callable[[Scenario], None]

CHAT, GENERATE, COMPLETIONS = "/v1/chat/completions", "/generate", "/v1/completions"
QUICK = HealthConfig(interval_s=0.05, timeout_s=0.2, failure_threshold=2)
RETRY = RetryConfig(max_tries=3, first_backoff_s=0.0, stream_retries=2)
BODY = {"messages": [], "stream": True}
TOKENS = list(range(8))
TAIL = b'data: {"usage": 8}\n\n'


def event(token: int) -> bytes:
    return b"data: " + json.dumps({"token": token}).encode() + b"\n\n"


def writer(end: int, how: str = "cut", *, sends_state: bool = True, weights: str = "") -> Any:
    """A decode worker that writes the tokens up to `end`, of 8, and then breaks off by `how`, unless it has all."""

    async def answer(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        told = sends_state and STATE_HEADER in request.headers
        prior = body.get(RESUME_FIELD, {}).get("token_ids", [])
        for token in TOKENS[len(prior) : end]:
            tail = TAIL.decode() if token == TOKENS[-1] else None
            state = EventState([token], {"id": "one"} if token == len(prior) else None, 3, None, tail, weights=weights)
            await response.write((state.line() if told else b"") + event(token))
        if end == len(TOKENS) and how == "end":
            await response.write((EventState(tail="").line() if told else b"") + TAIL + DONE)
            await response.write_eof()
        elif how == "cut":
            await response.write(b'data: {"token": 9')
            assert request.transport is not None
            request.transport.abort()
        elif how == "silent":
            await asyncio.Event().wait()
        else:
            code = how if how == RUNNING_TIMEOUT else "engine_dead"
            error = {"error": {"message": "no", "code": code}, "code": 400 if how == "final" else 503}
            await response.write(b"data: " + json.dumps(error, separators=(",", ":")).encode() + b"\n\n" + DONE)
            await response.write_eof()
        return response

    return answer


WHOLE = b"".join(map(event, TOKENS)) + TAIL + DONE


async def ask(world: Any, url: str, body: dict[str, Any] = BODY, path: str = CHAT) -> bytes:
    async with world.session.post(url + path, json=body, headers={STATE_HEADER: "1"}) as response:
        assert response.status == 200
        return bytes(await response.read())


@pytest.mark.parametrize("how", ["cut", "silent", "retryable"])
@pytest.mark.parametrize("end", [0, 5, 8])
def test_the_client_sees_one_stream(run_world: RunWorld, how: str, end: int) -> None:
    async def scenario(world: Any) -> None:
        prefill = await world.worker("p")
        first, other = await world.worker("d", writer(end, how)), await world.worker("d2", writer(8, "end"))
        async with world.router([prefill], [first, other], health=QUICK, retry=RETRY, policy="round_robin") as url:
            asked = asyncio.create_task(ask(world, url))
            await until(lambda: bool(first.bodies))
            if how == "silent":
                first.health_gate = asyncio.Event()
            raw = await asked
            assert raw == WHOLE
            assert not world.app[ROUTER].history.history.failures, "a stream that goes on has not failed"
            metrics = await (await world.session.get(f"{url}/metrics")).text()
        resumed = [body for body in other.bodies if RESUME_FIELD in body]
        if end in (0, 8):
            assert not resumed  # nothing was said, or all
        else:
            (body,) = resumed
            assert body[RESUME_FIELD] == {"head": {"id": "one"}, "token_ids": TOKENS[:end], "cached_tokens": 3}
            assert "pdserve_router_stream_retries_total 1.0" in metrics
            rooms = [one["bootstrap_room"] for one in (*first.bodies, body)]
            assert len(set(rooms)) == len(rooms) and body["seed"] == first.bodies[0]["seed"]
            assert prefill.bodies[-1][RESUME_FIELD] == body[RESUME_FIELD], "prefill computes prompt and output"

    run_world(scenario)


def error_of(raw: bytes) -> dict[str, Any]:
    """The error that a stream ends with; there is one, behind whole events."""
    *events, last = [part for part in raw.split(b"\n\n") if part and part + b"\n\n" != DONE]
    assert b"\n\n".join(events).startswith(b"\n\n".join(one.rstrip() for one in map(event, range(2))))
    return dict(json.loads(last.removeprefix(b"data: "))["error"])


@pytest.mark.parametrize(
    ("how", "body", "sends_state"),
    [
        ("final", BODY, True),  # an error that another try does not help
        (RUNNING_TIMEOUT, BODY, True),  # another pair would take as long
        ("cut", {**BODY, "n": 2}, True),
        ("cut", BODY, False),  # a worker that does not tell what it takes
    ],
)
def test_what_cannot_go_on_ends_in_an_error(
    run_world: RunWorld, how: str, body: dict[str, Any], sends_state: bool
) -> None:
    async def scenario(world: Any) -> None:
        prefill = await world.worker("p")
        decodes = [await world.worker(name, writer(5, how, sends_state=sends_state)) for name in ("d", "d2")]
        async with world.router([prefill], decodes, retry=RETRY) as url:
            raw = await ask(world, url, body)
        codes = {"final": "engine_dead", "cut": "worker_failed"}
        assert error_of(raw)["code"] == codes.get(how, how)
        assert sum(len(worker.bodies) for worker in decodes) == 1

    run_world(scenario)


@pytest.mark.parametrize("how", ["cut", "retryable"])
def test_a_stream_is_retried_so_often_and_its_error_is_the_last(run_world: RunWorld, how: str) -> None:
    async def scenario(world: Any) -> None:
        prefill = await world.worker("p")
        decodes = [await world.worker(name, writer(2, how), writer(4, how), writer(6, how)) for name in ("d", "d2")]
        async with world.router([prefill], decodes, retry=RETRY, policy="round_robin") as url:
            raw = await ask(world, url)
            assert await world.until(lambda: world.loads(url), lambda loads: not any(loads)) == [0, 0, 0]
        assert error_of(raw)["code"] == ("engine_dead" if how == "retryable" else "worker_failed")
        asked = [body for worker in decodes for body in worker.bodies]
        assert len(asked) == 1 + RETRY.stream_retries

    run_world(scenario)


async def with_other_weights(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A worker that refuses tokens of former weights."""
    error = {"message": "v2@b here, v1@a of the tokens so far", "code": "weights_mismatch"}
    return web.json_response({"error": error}, status=503, headers={"Retry-After": "1"})


def test_a_stream_waits_for_a_pair_with_the_weights_of_its_tokens(run_world: RunWorld) -> None:
    """The other pair has other weights at first, and is asked again without a count."""

    async def scenario(world: Any) -> None:
        prefill, first = await world.worker("p"), await world.worker("d", writer(5, weights="v1@a"))
        other = await world.worker("d2", *[with_other_weights] * 5, writer(8, "end", weights="v1@a"))
        async with world.router([prefill], [first, other], retry=RETRY, policy="round_robin") as url:
            raw = await ask(world, url)
            if not other.bodies:  # the stream began at the other worker
                raw = await ask(world, url)
        assert raw == WHOLE
        resumed = [body[RESUME_FIELD] for body in other.bodies if RESUME_FIELD in body]
        assert len(resumed) == 6 and all(one["weights"] == "v1@a" for one in resumed)

    run_world(scenario)


def test_a_stream_whose_weights_are_gone_ends_without_a_token_of_others(
    run_world: RunWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.router.proxy.attempts.WEIGHTS_PATIENCE_S", 0.3)

    async def scenario(world: Any) -> None:
        prefill, first = await world.worker("p"), await world.worker("d", writer(5, weights="v1@a"))
        other = await world.worker("d2", *[with_other_weights] * 40)
        async with world.router([prefill], [first, other], retry=RETRY, policy="round_robin") as url:
            raw = await ask(world, url)
        assert error_of(raw)["code"] == "worker_failed" and raw.startswith(b"".join(map(event, TOKENS[:5])))
        assert not any(event(token) in raw for token in TOKENS[5:])

    run_world(scenario)


def test_without_the_flag_nothing_is_asked_for_and_nothing_goes_on(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d", writer(5))
        async with world.router([prefill], [decode]) as url:
            raw = await ask(world, url, {**BODY, RESUME_FIELD: {"token_ids": [1]}})
        assert b"worker_failed" in raw
        assert STATE_HEADER not in decode.headers[0] and RESUME_FIELD not in decode.bodies[0]
        assert "seed" not in decode.bodies[0]

    run_world(scenario)


def test_a_router_that_ends_does_not_try_again(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill = await world.worker("p")
        decodes = [await world.worker(name, writer(5, "silent")) for name in ("d", "d2")]
        async with world.router([prefill], decodes, retry=RETRY) as url:
            asked = asyncio.create_task(ask(world, url))
            await until(lambda: any(worker.bodies for worker in decodes))
            await world.app[ROUTER].drain(0.0, asyncio.Event())
            assert error_of(await asked)["code"] == "router_shutting_down"
        assert sum(len(worker.bodies) for worker in decodes) == 1

    run_world(scenario)


def test_which_requests_can_go_on_and_their_seeds() -> None:
    rng = random.Random(0)
    assert can_go_on(GENERATE, {"text": "a", "stream": True, "sampling_params": {"n": 1}})
    assert can_go_on(COMPLETIONS, {"prompt": ["a"], "stream": True})
    assert can_go_on("/api/chat", {"messages": []}) and not can_go_on("/api/chat", {"messages": [], "stream": False})
    for path, body in (
        (GENERATE, {"text": ["a"], "stream": True}),
        (GENERATE, {"text": "a", "stream": True, "return_logprob": True, "logprob_start_len": 0}),
        (COMPLETIONS, {"prompt": ["a", "b"], "stream": True}),
        (CHAT, {"messages": []}),
        ("/v1/responses", {"input": "a", "stream": True}),
    ):
        assert not can_go_on(path, body), (path, body)
    assert 0 <= with_seed(CHAT, {}, rng)["seed"] < 1 << 63
    assert with_seed(CHAT, {"seed": 3}, rng) == {"seed": 3}
    params = with_seed(GENERATE, {"sampling_params": {"top_k": 2}}, rng)["sampling_params"]
    assert params["top_k"] == 2 and 0 <= params["sampling_seed"] < 1 << 63
    assert with_seed(GENERATE, {"sampling_params": {"seed": 4}}, rng) == {"sampling_params": {"seed": 4}}


def refusing(status: int) -> Any:
    async def answer(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=status)

    return answer


@pytest.mark.parametrize(
    ("policy", "num_prefills", "expected"), [("recompute", 1, "d"), ("fail", 1, None), ("recompute", 2, "d")]
)
def test_decode_goes_on_without_prefill_where_it_recomputes_and_no_other_is_left(
    run_world: RunWorld, policy: str, num_prefills: int, expected: str | None
) -> None:
    async def scenario(world: Any) -> None:
        prefills = [await world.worker(f"p{i}", refusing(502)) for i in range(num_prefills)]
        if num_prefills > 1:
            prefills[1].answers = [answer_ok]

        async def late(worker: Any, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            """Decode finds out by itself that the KV does not come, and answers."""
            room = body["bootstrap_room"]
            await until(lambda: any(half["bootstrap_room"] == room for prefill in prefills for half in prefill.bodies))
            await settle()
            return web.json_response({"from": worker.name})

        decode = await world.worker("d", late)
        decode.facts = {"disaggregation_load_failure_policy": policy}
        async with world.router(prefills, [decode], retry=RETRY, policy="round_robin") as url:
            async with world.session.post(url + CHAT, json={"messages": []}) as response:
                assert response.status == (502 if expected is None else 200)
            expected_tries = {("recompute", 1): 1, ("fail", 1): RETRY.max_tries, ("recompute", 2): 2}
            assert len(decode.bodies) == expected_tries[policy, num_prefills]

    run_world(scenario)


def test_a_stream_that_breaks_behind_its_last_event_needs_no_more() -> None:
    async def again(*_: Any) -> None:
        raise AssertionError("nothing is left to be told")

    stream = StreamProgress({}, 1, again)
    told = EventState([1], {"id": "one"}).line() + event(1) + EventState([2], None, 0, None, "").line() + event(2)
    assert stream.feed(told) == event(1) + event(2) and stream.ending == DONE
    assert stream.feed(DONE) == DONE and stream.ending == b""
