"""What waits for its first output is bounded in sequences and in prompt tokens, and nothing that runs counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.base.clock import ManualClock
from pdserve.config.groups import ModelConfig, ParallelConfig, ServerConfig
from pdserve.config.schedule_group import ScheduleConfig
from pdserve.errors import RequestError
from pdserve.protocol.messages import GenerateRequest
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.server.engine_client import live_requests as waiting
from pdserve.server.engine_client.live_requests import (
    MAX_WAITING_TOKENS,
    MIN_AHEAD,
    WAITING_CONTEXTS,
    RequestState,
    WaitingRequests,
)
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import Bench, bench
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)
CONTEXT = 100


def requests(count: int, num_tokens: int = 1, name: str = "r") -> list[GenerateRequest]:
    return [
        GenerateRequest(rid=f"{name}{i}", input_ids=[7] * num_tokens, sampling=CoreSamplingParams())
        for i in range(count)
    ]


def states(count: int, name: str = "r") -> list[RequestState]:
    return [RequestState(request=request, name=request.rid) for request in requests(count, name=name)]


def send(bound: WaitingRequests, sent: list[GenerateRequest], capacity: int = CONTEXT) -> None:
    bound.check(sent, capacity)
    for request in sent:
        bound.add(request)


def test_as_many_sequences_wait_as_may_and_each_that_begins_makes_room() -> None:
    bound = WaitingRequests(3, 1, ManualClock())
    send(bound, requests(2))
    with pytest.raises(RequestError, match="2 requests wait already") as refused:
        send(bound, requests(2, name="s"))
    assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (503, "queue_full", 1)
    send(bound, requests(1, name="t"))
    for rid in ("r0", "r1", "r0", "of nobody"):
        bound.discard(rid)
    send(bound, requests(2, name="u"))
    with pytest.raises(RequestError, match="3 requests wait already"):
        send(bound, requests(1, name="v"))


def test_their_prompts_have_no_more_tokens_than_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_WAITING_TOKENS", 4000)
    bound = WaitingRequests(1000, 2, ManualClock())
    send(bound, requests(80, 100))
    with pytest.raises(RequestError, match="requests of 8000 prompt tokens wait already") as refused:
        send(bound, requests(1, name="s"))
    assert (refused.value.status, refused.value.code) == (503, "queue_full")
    bound.discard("r5")
    send(bound, requests(2, 50, name="t"))
    with pytest.raises(RequestError, match="8000 prompt tokens"):
        send(bound, requests(1, name="u"))


def test_long_contexts_may_wait_in_any_case() -> None:
    bound, context = WaitingRequests(1000, 1, ManualClock()), MAX_WAITING_TOKENS
    for i in range(WAITING_CONTEXTS):
        send(bound, requests(1, context, name=f"{i}."), context)
    with pytest.raises(RequestError, match="prompt tokens wait already"):
        send(bound, requests(1, name="s"), context)


def test_one_body_is_never_too_much_where_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_WAITING_TOKENS", 10)
    bound = WaitingRequests(1, 1, ManualClock())
    send(bound, requests(5, 100 * CONTEXT))
    with pytest.raises(RequestError, match="wait already"):
        send(bound, requests(1, name="s"))


def test_when_to_come_back_follows_the_pace() -> None:
    clock = ManualClock()
    bound = WaitingRequests(1, 1, clock)
    for i in range(4):
        send(bound, requests(1, name=f"{i}."))
        clock.advance(5.0)
        if i < 3:
            bound.discard(f"{i}.0")
    with pytest.raises(RequestError) as refused:
        send(bound, requests(1))
    assert refused.value.retry_after_s == 7, "three began in twenty seconds"


def test_the_flag_sets_it_for_all_replicas_or_lifts_it() -> None:
    def config(**schedule: Any) -> ServerConfig:
        return ServerConfig(
            model=ModelConfig(model_path="m"),
            parallel=ParallelConfig(dp_size=2),
            schedule=ScheduleConfig(max_running_requests=8, **schedule),
        )

    assert WaitingRequests.of(config(max_queued_requests=-1)) is None
    bound = WaitingRequests.of(config(max_queued_requests=5))
    assert bound is not None
    most = 2 * (5 + MIN_AHEAD)
    send(bound, requests(most))
    with pytest.raises(RequestError, match=f"{most} requests wait already"):
        send(bound, requests(1, name="s"))


async def ask(b: Bench, num_tokens: int) -> Any:
    return await b.http.post("/generate", json={"input_ids": [9] * num_tokens})


@pytest.mark.asyncio
async def test_a_request_too_many_gets_a_503_and_the_others_their_answers(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "MAX_WAITING_TOKENS", 10)
    monkeypatch.setattr(waiting, "WAITING_CONTEXTS", 0)
    async with bench(tokenizer) as b:
        b.scheduler.hold, b.scheduler.script = True, lambda request: []
        waits = asyncio.create_task(ask(b, 10))
        await until(lambda: len(b.scheduler.requests) == 1)
        for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a", "stream": True})):
            refused = await b.http.post(path, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "queue_full"
        probe = await b.http.get("/health_generate")
        assert (probe.status_code, probe.headers["retry-after"]) == (503, "1")
        b.scheduler.progress_per_state = 1
        assert (await b.http.post("/health_pair", json={"timeout": 0.4})).json()["status"] == "busy"
        assert len(b.scheduler.requests) == 1, "nothing of those was sent"
        assert (
            'pdserve:requests_refused_by_api_total{engine_type="unified",model_name="tiny"} 4.0'
            in (await b.http.get("/metrics")).text
        )
        b.scheduler.finish(b.scheduler.requests[0])
        assert (await waits).status_code == 200
        b.scheduler.script = lambda request: [5, 6, 7]
        runs = [asyncio.create_task(ask(b, 10))]
        await until(lambda: len(b.scheduler.requests) == 2)
        await until(lambda: b.waiting.num_waiting == 0)
        runs.append(asyncio.create_task(ask(b, 10)))
        await until(lambda: len(b.scheduler.requests) == 3)
        for request in b.scheduler.requests[1:]:
            b.scheduler.finish(request)
        assert [answer.status_code for answer in await asyncio.gather(*runs)] == [200, 200]


@pytest.mark.asyncio
async def test_what_is_aborted_counts_until_the_scheduler_has_ended_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "MAX_WAITING_TOKENS", 1)
    monkeypatch.setattr(waiting, "WAITING_CONTEXTS", 0)
    async with bench(tokenizer) as b:
        b.scheduler.hold, b.scheduler.script = True, lambda request: []
        generation = await b.client.submit(states(1))
        generation.close()
        assert b.client.num_live == 0
        with pytest.raises(RequestError, match="wait already"):
            await b.client.submit(states(1, name="s"))
        await until(lambda: b.waiting.num_waiting == 0)
        (await b.client.submit(states(1, name="t"))).close()


@pytest.mark.asyncio
async def test_what_could_not_be_sent_counts_no_longer(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_WAITING_TOKENS", 1)
    monkeypatch.setattr(waiting, "WAITING_CONTEXTS", 0)

    async def fails(_: Any) -> None:
        raise OSError("no way to the scheduler")

    async with bench(tokenizer) as b:
        with monkeypatch.context() as patch:
            patch.setattr(b.channel, "send", fails)
            with pytest.raises(OSError, match="no way"):
                await b.client.submit(states(1))
        (await b.client.submit(states(1, name="s"))).close()
