"""How many prompt tokens were cached: in the usage of each API, and in the metrics."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.observe.metrics import HitRate
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import Bench, bench, sse

pytestmark = [pytest.mark.timeout(60)]

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


async def last_usage(b: Bench, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The usage chunk of a stream."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = sse((await b.http.post(path, json=body)).text)
    assert events[-1] == "[DONE]"
    usage: dict[str, Any] = json.loads(events[-2])["usage"]
    return usage


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hello"})])
async def test_usage_says_it_whole_and_streamed(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.cached = lambda request: len(request.input_ids) - 1
        usage = (await b.http.post(path, json=body)).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": usage["prompt_tokens"] - 1}
        assert await last_usage(b, path, body) == usage


@pytest.mark.asyncio
async def test_a_batch_is_summed_and_n_answers_count_their_prompt_once(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.cached = lambda request: request.input_ids[0]
        body = {"prompt": [[5] * 20, [7] * 30], "n": 3, "max_tokens": 2}
        usage = (await b.http.post("/v1/completions", json=body)).json()["usage"]
        assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (50, {"cached_tokens": 12})
        assert await last_usage(b, "/v1/completions", body) == usage


@pytest.mark.asyncio
async def test_of_n_answers_the_first_says_what_the_prompt_cost(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.cached = lambda request: 0 if request is b.scheduler.requests[0] else len(request.input_ids)
        usage = (await b.http.post("/v1/completions", json={"prompt": "hello", "n": 4})).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.asyncio
async def test_generate_says_it_for_each_prompt(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.cached = lambda request: request.input_ids[0]
        body = {"input_ids": [[5] * 8, [7] * 9]}
        results = (await b.http.post("/generate", json=body)).json()
        assert [result["meta_info"]["cached_tokens"] for result in results] == [5, 7]
        events = [
            json.loads(event)
            for event in sse((await b.http.post("/generate", json={**body, "stream": True})).text)[:-1]
        ]
        assert {(event["index"], event["meta_info"]["cached_tokens"]) for event in events} == {(0, 5), (1, 7)}


@pytest.mark.asyncio
async def test_metrics_count_each_prompt_once(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        assert (
            'sglang:cache_hit_rate{engine_type="unified",model_name="tiny"} 0.0' in (await b.http.get("/metrics")).text
        )
        b.scheduler.cached = lambda request: 4
        for stream in (False, True):
            answer = await b.http.post("/v1/completions", json={"prompt": [5] * 8, "stream": stream})
            assert answer.status_code == 200
        text = (await b.http.get("/metrics")).text
        assert 'sglang:cached_tokens_total{cache_source="device",engine_type="unified",model_name="tiny"} 8.0' in text
        assert 'sglang:cache_hit_rate{engine_type="unified",model_name="tiny"} 0.5' in text


def test_the_hit_rate_is_weighted_by_tokens_and_forgets() -> None:
    rate = HitRate(2)
    assert rate.value() == 0.0
    rate.add(0, 0)
    assert rate.value() == 0.0
    rate.add(100, 100)
    rate.add(300, 0)
    assert rate.value() == 0.25
    rate.add(100, 0)
    assert rate.value() == 0.0
