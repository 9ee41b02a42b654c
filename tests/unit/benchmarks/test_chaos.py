"""The chaos run judges rightly: it tells wrong, lost and late answers apart, and each fails the run. So does a
secret that a stranger gets.
"""

from __future__ import annotations

import asyncio
import json
import random
import types
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from benchmarks.chaos import HealthWatch
from benchmarks.chaos_farm import Use
from benchmarks.chaos_faults import Injected
from benchmarks.chaos_hostile import Trap
from benchmarks.chaos_load import (
    ABORTED,
    CHAT,
    COMPLETIONS,
    ERROR,
    GENERATE,
    GOOD,
    HUNG,
    LEFT,
    LOST,
    WRONG,
    Client,
    Ending,
    Question,
    make_questions,
)
from benchmarks.chaos_report import Outcome, Sample, render
from tests.waiting import until

QUESTION = Question("completion", COMPLETIONS, {"prompt": "a"}, ("one two",))
CHATTED = Question("chat", CHAT, {"messages": []}, ("one two",))
IDS = Question("ids", GENERATE, {"input_ids": [1]}, ("one two",))
DEADLINE_S = 1.5
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def whole(text: str) -> Answer:
    """A plain answer to a completion."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [{"index": 0, "text": text, "finish_reason": "length"}]})

    return answer


def streamed(*events: Any) -> Answer:
    """A stream of events, texts being sent as they are; "hang" waits for ever, "cut" breaks the connection."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            if event == "cut":
                assert request.transport is not None
                request.transport.abort()
                break
            data = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {data}\n\n".encode())
        return response

    return answer


def piece(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text}]}


def said(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def so_far(text: str, finish: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"text": text, "meta_info": {"finish_reason": finish}}


FAILED = {"error": {"message": "decode is gone", "type": "server_error"}}


async def refusing(request: web.Request) -> web.StreamResponse:
    return web.json_response(FAILED, status=503)


async def plain_text_500(request: web.Request) -> web.StreamResponse:
    return web.Response(text="Internal Server Error", status=500)


async def bad_request(request: web.Request) -> web.StreamResponse:
    return web.json_response(FAILED, status=400)


async def silent(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.fixture
async def ask() -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """`ask(answer, question, manner)`: the verdict on a server that answers so."""
    running: list[web.AppRunner] = []

    async def resolve_outcome(answer: Answer, question: Question = QUESTION, manner: str = "plain") -> str:
        app = web.Application()
        app.router.add_post("/abort_request", whole(""))
        app.router.add_post("/{path:.*}", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        running.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:
            return (await Client(session, url, DEADLINE_S).ask(question, manner, random.Random(3))).verdict

    yield resolve_outcome
    for runner in running:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (whole("one two"), GOOD),
        (whole("one too"), WRONG),
        (whole("one"), WRONG),
        (refusing, ERROR),
        (plain_text_500, WRONG),
        (bad_request, WRONG),
        (silent, HUNG),
        (streamed("cut"), LOST),
    ],
)
async def test_plain_answers(ask: Callable[..., Awaitable[str]], answer: Answer, verdict: str) -> None:
    assert await ask(answer) == verdict


@pytest.mark.parametrize(
    ("question", "events", "manner", "verdict"),
    [
        (QUESTION, (piece("one"), piece(" two"), "[DONE]"), "stream", GOOD),
        (CHATTED, (said("one"), said(" two"), "[DONE]"), "stream", GOOD),
        (IDS, (so_far("one"), so_far("one two", {"type": "length"}), "[DONE]"), "stream", GOOD),
        (QUESTION, (piece("one"), FAILED), "stream", ERROR),
        (QUESTION, (piece("two"), FAILED), "stream", WRONG),
        (QUESTION, (piece("one"),), "stream", LOST),
        (QUESTION, (piece("one"), piece(" two")), "stream", LOST),
        (QUESTION, (piece("one"), "cut"), "stream", LOST),
        (QUESTION, (piece("one"), "[DONE]"), "stream", WRONG),
        (QUESTION, (piece("one"), "{nonsense"), "stream", WRONG),
        (QUESTION, [piece(letter) for letter in ("one two", *[""] * 12)], "hang-up", LEFT),
        (IDS, (*([so_far("one")] * 12), so_far("one", {"type": "abort"}), "[DONE]"), "abort", ABORTED),
    ],
)
async def test_streams(
    ask: Callable[..., Awaitable[str]], question: Question, events: Any, manner: str, verdict: str
) -> None:
    assert await ask(streamed(*events), question, manner) == verdict


USE = Use(100.0, 50, 10)


def outcome(**changes: Any) -> Outcome:
    """A run in which all was well, but for `changes`."""
    sound: dict[str, Any] = {
        "endings": [Ending("chat", "plain", GOOD, 0.0, 1.0)],
        "hostile": [],
        "faults": [Injected("cut link", "decode-0", 0.0, 1.0, 2.0)],
        "problems": [],
        "worst_health": {"router": 0.25},
        "failed_health": Counter(),
        "settled_s": 0.1,
        "held": {},
        "before": {"router": USE},
        "after": {"router": USE},
        "samples": [],
        "num_trapped": 0,
        "num_secrets": 0,
        "links": "proxy",
        "seconds": 1.0,
        "recovery_limit_s": 10.0,
    }
    return Outcome(**(sound | changes))


def test_a_run_in_which_all_was_well_fails_for_nothing() -> None:
    assert outcome().failures(soak=False) == []
    assert outcome().slowest_recovery_s == 2.0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"endings": [Ending("chat", "plain", ERROR, 0.0, 1.0)]}, "no good answer"),
        *(({"endings": [Ending("a", "b", v, 0.0, 1.0)]}, v) for v in (WRONG, LOST, HUNG)),
        ({"hostile": [Ending("bomb", "router", HUNG, 0.0, 1.0)]}, "hostile"),
        ({"faults": [Injected("cut link", "decode-0", 0.0, 1.0, None)]}, "not at all"),
        ({"faults": [Injected("cut link", "decode-0", 0.0, 1.0, 11.0)]}, "11.0 s"),
        ({"held": {"decode-0": {"pages": 3}}}, "pages"),
        ({"num_secrets": 1}, "token"),
        ({"worst_health": {"router": 0.1, "decode-0": None}}, "/health of decode-0 was never measured"),
        ({"worst_health": {}}, "/health of no server"),
        ({"failed_health": Counter({"router: status 503": 2})}, "failed 2 times: router: status 503"),
        ({"leftovers": {"files": ["pdserve-x"]}}, "pdserve-x"),
        ({"after": {"router": Use(100.0, 500, 10)}}, "descriptors"),
        ({"after": {"router": Use(100.0, 50, 99)}}, "threads"),
        ({"after": {"router": Use(900.0, 50, 10)}}, "RSS"),
    ],
)
def test_each_thing_that_goes_wrong_fails_the_run(changes: dict[str, Any], why: str) -> None:
    assert any(why in failure for failure in outcome(**changes).failures(soak=False))


def test_memory_that_grows_fails_a_soak() -> None:
    def samples(rise: float) -> list[Sample]:
        return [Sample(float(t), {"router": Use(100 + rise * t, 50, 10)}, {"decode-0": 5}) for t in range(40)]

    flat, rising = outcome(samples=samples(0.0)), outcome(samples=samples(1.0))
    assert flat.failures(soak=True) == []
    assert "router grows" in rising.failures(soak=True)
    assert rising.trends()[0][:4] == ["router", "RSS MB", "104.5", "134.5"]
    machine = {"cpu_model": "x", "cpus": 1, "platform": "y", "load_1m": 0.0}
    text = render(rising, {"machine": machine, "revision": "r", "duration_s": 1.0, "command": "c"}, soak=True)
    assert "# Soak" in text and "router grows" in text
    assert "under no fault itself: router 0.25 s." in text


def test_questions_are_the_same_for_a_seed_and_of_every_kind() -> None:
    questions = make_questions(5, "m", 28, 100)
    assert questions == make_questions(5, "m", 28, 100) != make_questions(6, "m", 28, 100)
    assert len({question.kind for question in questions}) == 8


async def test_health_is_measured_of_each_server_that_is_under_no_fault_itself() -> None:
    """Faults come back to back, so one server or another is always under one."""
    turns: Counter[str] = Counter({"stopped": 1})

    async def answer(request: web.Request) -> web.StreamResponse:
        name = request.path.split("/")[1]
        if name == "hit":  # a fault that begins and ends while the answer is awaited
            turns["hit"] += 2
        return web.Response(status=503 if name in ("stopped", "hit", "broken") else 200)

    app = web.Application()
    app.router.add_get("/{name}/health", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    names = ("sound", "stopped", "hit", "broken")
    members: Any = [types.SimpleNamespace(name=name, url=f"{url}/{name}") for name in names]
    watch = HealthWatch(members, turns)
    running = asyncio.create_task(watch.run())
    await until(lambda: watch.worst["sound"] is not None and watch.failures)
    watch.stopping = True
    await running
    await runner.cleanup()
    assert {name for name, took in watch.worst.items() if took is not None} == {"sound", "broken"}
    assert set(watch.failures) == {"broken: status 503"}


@pytest.mark.parametrize(
    ("second_part", "num_secrets"),
    [(b"X: y", 0), (b"Authorization: Bearer The-Token", 1), (b"pdserve-PROOF: 1", 1), (b"A: The-Token, The-Token", 1)],
)
async def test_a_secret_is_seen_in_all_that_a_visitor_sends(second_part: bytes, num_secrets: int) -> None:
    trap = Trap("The-Token")
    await trap.open("127.0.0.1")
    reader, writer = await asyncio.open_connection("127.0.0.1", trap.port)
    writer.write(b"GET /challenge HTTP/1.1\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert (trap.num_visits, trap.num_secrets) == (1, 0)
    half = len(second_part) // 2
    writer.write(second_part[:half])
    await writer.drain()
    writer.write(second_part[half:] + b"\r\n\r\n")
    writer.write_eof()
    await reader.read()  # the trap has ended the visit
    assert trap.num_secrets == num_secrets
    writer.close()
    await trap.close()
