"""Which request goes first, and what a client hears when there is no room for it."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.config.schedule_group import ScheduleConfig
from pdserve.protocol.messages import FinishReason
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import bench

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
    (COMPLETIONS, {"prompt": "hi"}),
    (GENERATE, {"text": "hi"}),
]
FULL = FinishReason(
    type="abort", message="9 requests wait already", status_code=503, err_type="queue_full", retry_after_s=7
)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_priority_reaches_the_scheduler(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    async with bench(tokenizer) as b:
        given: list[dict[str, Any]] = [{}, {"priority": None}, {"priority": 7}, {"priority": -(1 << 31)}]
        for extra in given:
            assert (await b.http.post(path, json=body | extra)).status_code == 200
        assert [request.priority for request in b.scheduler.requests] == [0, 0, 7, -(1 << 31)]


async def test_all_prompts_and_answers_of_a_body_have_its_priority(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        await b.http.post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 2, "priority": 3})
        assert [request.priority for request in b.scheduler.requests] == [3] * 4


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_without_a_priority_a_request_has_the_default_one(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    async with bench(tokenizer, schedule=ScheduleConfig(enable_priority_scheduling=True)) as b:
        for extra in ({}, {"priority": 0}):
            assert (await b.http.post(path, json=body | extra)).status_code == 200
        assert [request.priority for request in b.scheduler.requests] == [-(1 << 31), 0]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_priority_is_refused_where_it_acts_on_no_queue_and_the_flag_says_so(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    async with bench(tokenizer, schedule=ScheduleConfig(abort_on_priority_when_disabled=True)) as b:
        assert (await b.http.post(path, json=body)).status_code == 200
        answer = await b.http.post(path, json=body | {"priority": 0})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "priority_disabled")
        assert "Using priority is disabled" in answer.json()["message"]
        assert int(answer.headers["Retry-After"]) > 0, "without it a router counts a failure of the server"
    for used in ({"enable_priority_scheduling": True}, {"schedule_policy": "priority"}):
        schedule = ScheduleConfig(abort_on_priority_when_disabled=True, **used)  # type: ignore[arg-type]
        async with bench(tokenizer, schedule=schedule) as b:
            assert (await b.http.post(path, json=body | {"priority": 0})).status_code == 200


@pytest.mark.parametrize("priority", ["5", True, 1.5, [1], {}, 1 << 31, -(1 << 31) - 1, 1 << 80])
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_another_priority_is_refused_by_name(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], priority: Any
) -> None:
    async with bench(tokenizer) as b:
        answer = await b.http.post(path, json=body | {"priority": priority})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
        assert b.scheduler.requests == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_full_queue_says_when_to_come_back(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], stream: bool
) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: FULL
        answer = await b.http.post(path, json=body | {"stream": stream})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
        assert answer.json()["error"]["code"] == "queue_full"


async def test_without_a_time_there_is_no_header(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: FinishReason(type="abort", message="gone", status_code=503)
        answer = await b.http.post(COMPLETIONS, json={"prompt": "hi"})
        assert answer.status_code == 503 and "retry-after" not in answer.headers


async def test_a_prompt_that_finds_no_room_takes_its_body_along(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: FULL if request.input_ids == [9] else [5]
        answer = await b.http.post(COMPLETIONS, json={"prompt": [[8], [9]], "stream": False})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")


async def test_the_probe_of_a_full_server_says_when_to_come_back(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: FULL
        answer = await b.http.get("/health_generate")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")


async def test_a_server_that_starts_says_to_come_back(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, ready=False) as b:
        for path, body in BODIES:
            answer = await b.http.post(path, json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
