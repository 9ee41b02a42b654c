"""Runs of a given duration and requests in the background: what is cut, what counts, and whose figures it is in."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pdserve.bench.campaign import BenchPlan, BenchService, Campaign
from pdserve.bench.client import BenchClient, BenchRecord, BenchTarget
from pdserve.bench.load import BackgroundLoad, BenchTurn, Sleep, run_load, single
from pdserve.bench.metrics import Slo, detailed, summarize, summarize_background
from pdserve.cli import bench, bench_compare
from pdserve.errors import ConfigError
from tests.unit.bench.kit import WAIT_S, FakeService, Json, SteppedClock, piece, plain, serving, usage
from tests.unit.bench.test_bench_command import parsed, run


class Endless:
    """A service that streams until its client goes; it tells when `num` requests have had two pieces."""

    def __init__(self, num: int) -> None:
        self.all_run, self.all_gone = asyncio.Event(), asyncio.Event()
        self._num, self._running = num, 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(piece(" a"))
        await response.write(piece(" b"))
        self._running += 1
        if self._running == self._num:
            self.all_run.set()
        try:
            await asyncio.Event().wait()
        finally:
            self._running -= 1
            if self._running == 0:
                self.all_gone.set()
        return response


@contextlib.asynccontextmanager
async def endless(num: int) -> AsyncIterator[tuple[BenchClient, Sleep]]:
    """A client of such a service, and a sleep that ends when `num` requests run; at the end all have gone."""
    service = Endless(num)
    app = web.Application()
    app.router.add_post("/v1/completions", service.handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()

    async def until_all_run(seconds: float) -> None:
        await asyncio.wait_for(service.all_run.wait(), WAIT_S)

    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with BenchClient(BenchTarget(base_url=url, model="m")) as client:
            yield client, until_all_run
            await asyncio.wait_for(service.all_gone.wait(), WAIT_S)
    finally:
        await runner.cleanup()


async def test_requests_that_run_at_the_end_are_cut() -> None:
    async with endless(3) as (client, sleep):
        background = BackgroundLoad(turns=itertools.repeat(BenchTurn(prompt=[7], output_len=9)), concurrency=1)
        outcome = await run_load(
            client, single([[1], [2], [3]], 9), arrivals_s=[0, 0, 0], max_concurrency=2, duration_s=5.0,
            background=background, sleep=sleep,
        )  # fmt: skip
    assert len(outcome.records) == 2 and len(outcome.background) == 1, "the third one was not sent"
    assert all(one.unfinished and one.error_kind is None for one in outcome.records + outcome.background)
    assert all(one.end_s >= one.arrivals_s[-1] for one in outcome.records)
    assert {one.counted_by for one in outcome.records} == {"events"}
    found = summarize(outcome.records, outcome.duration_s, slo=Slo.parse(["ttft:9"]))
    assert (found["completed"], found["unfinished"], found["failed"], found["goodput_share"]) == (0, 2, 0, 0.0)
    assert found["total_output_tokens"] >= 2 and found["median_ttft_ms"] and found["median_e2el_ms"] is None
    assert detailed(outcome.records)["errors"] == ["unfinished"] * 2


async def test_background_requests_go_on_until_the_last_answer_and_wait_after_a_failure() -> None:
    clock = SteppedClock()
    long = 0

    def answer(body: Json, path: str) -> Any:
        nonlocal long
        if body["prompt"] == [7]:
            long += 1
            if long == 1:
                return web.Response(status=503, text="no")
            return [(0.0, piece(" x") + usage(1, 1))]
        return [(0.5, piece(" a")), (0.5, piece(" b") + usage(2, 2))]

    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0)

    async with serving(FakeService(answer)) as service:
        async with BenchClient(BenchTarget(base_url=service.url, model="m"), clock) as client:
            background = BackgroundLoad(
                turns=itertools.repeat(BenchTurn(prompt=[7], output_len=1)), concurrency=1, start_s=2.0
            )
            outcome = await run_load(
                client, single([[1]] * 20, 2), arrivals_s=[0] * 20, max_concurrency=1, background=background,
                clock=clock, sleep=sleep,
            )  # fmt: skip
    assert len(outcome.records) == 20 and all(one.whole for one in outcome.records)
    assert slept[:2] == [2.0, 1.0], "its start, and the pause after a failure"
    assert outcome.background[0].error_kind == "http_503" and outcome.background[1].whole
    assert sum(one.unfinished for one in outcome.background) <= 1


async def test_background_prompts_are_made_beside_the_requests() -> None:
    answered = threading.Event()

    def turns() -> Iterator[BenchTurn]:
        for _ in range(4):
            assert answered.wait(WAIT_S), "the requests wait for the making of a prompt"
            yield BenchTurn(prompt=[7], output_len=1)

    async with serving(FakeService(plain)) as service:
        async with BenchClient(BenchTarget(base_url=service.url, model="m")) as client:
            outcome = await run_load(
                client, single([[1]], 2), arrivals_s=[0], background=BackgroundLoad(turns=turns(), concurrency=2),
                on_done=lambda _: answered.set(),
            )  # fmt: skip
    assert outcome.records[0].whole and answered.is_set()


async def test_a_background_that_cannot_be_sent_ends_the_run() -> None:
    async with serving(FakeService(plain)) as service:
        target = BenchTarget(base_url=service.url, model="m", backend="openai-chat")
        async with BenchClient(target) as client:
            background = BackgroundLoad(turns=itertools.repeat(BenchTurn(prompt=[7], output_len=1)), concurrency=1)
            with pytest.raises(ConfigError, match="chat takes text"):
                await run_load(client, single(["a"], 2), arrivals_s=[60.0], background=background)


def stream(start_s: float, arrivals_s: list[float], *, cut: bool = False) -> BenchRecord:
    return BenchRecord(
        start_s=start_s, arrivals_s=arrivals_s, end_s=arrivals_s[-1], prompt_tokens=10, output_tokens=len(arrivals_s),
        unfinished=cut,
    )  # fmt: skip


def test_what_came_before_the_warm_up_ended_does_not_count() -> None:
    records = [
        stream(0.0, [1.0, 2.5, 3.0, 3.5], cut=True),  # three of its events, and its gaps
        stream(0.0, [0.5, 1.5]),  # ended before
        stream(1.0, [0.5, 1.5]),  # ended in time; begun before
        stream(2.5, [0.25, 0.5]),  # all of it
    ]
    found = summarize(records, 4.0, since_s=2.0)
    assert found["duration"] == 2.0 and (found["completed"], found["unfinished"]) == (2, 1)
    assert (found["total_output_tokens"], found["output_throughput"]) == (3 + 0 + 1 + 2, 3.0)
    assert found["total_input_tokens"] == 10 and found["request_throughput"] == 1.0
    assert found["mean_ttft_ms"] == 250 and found["mean_tpot_ms"] == 250 and found["mean_e2el_ms"] == 500
    assert found["mean_itl_ms"] == pytest.approx((1500 + 500 + 500 + 1000 + 250) / 5), "gaps that end later"
    assert sum(found["timeline"]["output_tokens"]) == 10, "the course is that of the whole run"
    beside = summarize_background(records, 4.0, 2.0)
    assert beside["background_median_ttft_ms"] == 250 and beside["background_unfinished"] == 1
    assert not {"background_duration", "background_p99_itl_ms"} & set(beside)
    whole = summarize(records, 4.0)
    assert (whole["completed"], whole["total_output_tokens"], whole["duration"]) == (3, 10, 4.0)


async def test_a_sweep_of_the_background_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    async with serving(FakeService(plain)) as service:
        words = ["--max-concurrency", "1", "3", "--prompts-per-concurrency", "4", "--background-concurrency", "0", "2"]
        words += ["--background-input-len", "50", "--background-output-len", "5", "--num-warmups", "0"]
        await run(service, *words, "--duration", "60", "--label", "a", "--output-json", str(out))
        longs = [tuple(body["prompt"]) for body in service.bodies if len(body["prompt"]) == 50]
        assert {body["max_tokens"] for body in service.bodies if len(body["prompt"]) == 50} == {5}
    results = json.loads(out.read_text())["results"]
    loads = [(one["max_concurrency"], one["background_concurrency"], one["completed"]) for one in results]
    assert loads == [(1, 0, 4), (1, 2, 4), (3, 0, 12), (3, 2, 12)]
    assert [one.get("background_failed") for one in results] == [None, 0, None, 0]
    assert len(longs) == len(set(longs)) >= 2, "no prompt is in a cache"
    assert {one["background_input_len"] for one in results} == {50}
    assert "bg TTFT p50" in capsys.readouterr().out
    bench_compare.main([str(out)])
    assert " 3           2 " in capsys.readouterr().out, "in flight, and background clients"


async def test_a_warm_up_ends_with_the_duration_of_a_run() -> None:
    async with endless(1) as (client, sleep):
        plan = BenchPlan(sessions=lambda seed, point: single([[1]], 9), duration_s=5.0)
        await Campaign(plan, [BenchService(label="a", client=client)], sleep=sleep).warm_up()


async def test_a_run_that_was_cut_is_over_before_the_next_one() -> None:
    asked: list[Any] = []

    def answer(body: Json, path: str) -> Any:
        asked.append(body["prompt"])
        return plain(body, path)

    async def at_once(seconds: float) -> None:
        pass

    async with serving(FakeService(answer)) as service:
        async with BenchClient(BenchTarget(base_url=service.url, model="m")) as client:
            plan = BenchPlan(sessions=lambda seed, point: single([[seed]] * 9, 2), duration_s=5.0, warmups=0, rounds=2)
            results = await Campaign(plan, [BenchService(label="a", client=client)], sleep=at_once).run()
    assert all(one["unfinished"] for one in results)
    assert [one for one in asked if one == "Hello"] == ["Hello"] * 2 and asked[-1] == "Hello"


async def test_one_run_shows_the_background(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeService(plain)) as service:
        await run(service, "--num-prompts", "30", "--max-concurrency", "1", "--background-concurrency", "1")
    text = capsys.readouterr().out
    assert "Failed background requests:               0" in text and "Median background TTFT (ms):" in text


async def test_a_run_that_was_cut_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    head: Json = {"label": "a", "request_rate": 1.0, "completed": 0, "failed": 0, "error_kinds": {}}
    head |= {"error_messages": [], "max_concurrency": None, "round": 0}
    results = [head | {"unfinished": 1, "total_output_tokens": 3}] * 2

    async def measured(args: Any, progress: Any) -> Json:
        return {"results": results}

    monkeypatch.setattr(bench, "run", measured)
    monkeypatch.setattr(bench.asyncio, "run", lambda made: (made.close(), {"results": results})[1])
    assert bench.main([]) == 0
    results[:] = [head | {"unfinished": 1, "total_output_tokens": 0}] * 2
    assert bench.main([]) == bench.FAILED


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--duration 0", "duration"),
        ("--duration inf", "duration"),
        ("--warmup-duration 1", "warmup_duration"),
        ("--warmup-duration -1", "warmup_duration"),
        ("--duration 2 --warmup-duration 2", "warmup_duration"),
        ("--background-concurrency 1 -1", "background_concurrency"),
        ("--background-input-len 5", "background_input_len"),
        ("--background-output-len 5", "background_output_len"),
        ("--background-concurrency 1 --background-output-len 0", "background_output_len"),
        ("--prompts-per-concurrency 2", "prompts_per_concurrency"),
        ("--prompts-per-concurrency 0 --max-concurrency 1", "prompts_per_concurrency"),
        ("--goodput ttft:1 --search-goodput --background-concurrency 0 1", "search_goodput"),
    ],
)
def test_a_wrong_flag_of_the_load_is_named(words: str, field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parsed(*words.split())
    assert raised.value.field == field and f"--{field.replace('_', '-')}" in str(raised.value)
