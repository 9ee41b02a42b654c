"""How many prompt tokens were cached: in the usage of each API, and in the metrics."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.observe.metrics import HitRate
from pdserve.protocol.cached_tokens import CachedTokensDetails
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
@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
async def test_requests_have_the_cache_salt_of_their_body(tokenizer: Tokenizer, field: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"},
        "/generate": {"text": "x"},
    }  # fmt: skip
    async with bench(tokenizer) as b:
        for path, body in bodies.items():
            for given, expected in (("s", "s"), (None, "")):
                answer = await b.http.post(path, json={**body, field: given})
                assert answer.status_code == 200 and b.scheduler.requests[-1].cache_salt == expected
        answer = await b.http.post("/generate", json={"text": ["x", "y"], field: ["s", None]})
        assert answer.status_code == 200
        assert [request.cache_salt for request in b.scheduler.requests[-2:]] == ["s", ""]
        for wrong in ("", "a\0", "a" * 1025, 5, ["a", "b"]):
            answer = await b.http.post("/generate", json={"text": "x", field: wrong})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == field
        answer = await b.http.post("/generate", json={"text": "x", "cache_salt": "s", "extra_key": "k"})
        assert b.scheduler.requests[-1].cache_salt == "s\0k"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": [[5] * 20, [7] * 30], "n": 2, "max_tokens": 2})],
)
async def test_an_openai_answer_has_the_sources_that_its_body_asks_for(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.cached = lambda request: 12
        b.scheduler.cached_details = lambda request: CachedTokensDetails(device=1, host=4, storage=7)
        count = len(body.get("prompt", [0]))
        expected = {"cached_tokens_details": {"device": count, "host": 4 * count, "storage": 7 * count}}
        plain = (await b.http.post(path, json=body)).json()
        assert "sglext" not in plain and "sglext" not in (await b.http.post(path, json={**body, "stream": True})).text
        body = {**body, "return_cached_tokens_details": True}
        whole = (await b.http.post(path, json=body)).json()
        assert whole["sglext"] == expected and whole["usage"] == plain["usage"]
        for usage in (False, True):
            options = {"stream": True, "stream_options": {"include_usage": usage}}
            *_, last = events = [
                json.loads(one) for one in sse((await b.http.post(path, json=body | options)).text)[:-1]
            ]
            (told,) = [one for one in events if "sglext" in one]
            assert told["sglext"] == expected and told["choices"] == []
            assert (last is not told and last["usage"] == whole["usage"]) if usage else last is told
        b.scheduler.cached_details = lambda request: None
        whole = (await b.http.post(path, json=body)).json()
        assert whole["sglext"] == {"cached_tokens_details": {"device": 12 * count, "host": 0}}


@pytest.mark.asyncio
async def test_a_response_has_the_sources_that_its_body_asks_for(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.cached_details = lambda request: CachedTokensDetails(device=1, host=2)
        body = {"input": "x", "return_cached_tokens_details": True}
        expected = {"cached_tokens_details": {"device": 1, "host": 2}}
        assert (await b.http.post("/v1/responses", json=body)).json()["sglext"] == expected
        assert "sglext" not in (await b.http.post("/v1/responses", json={"input": "x"})).json()
        streamed = (await b.http.post("/v1/responses", json={**body, "stream": True})).text
        last = json.loads(streamed.rstrip().rpartition("data: ")[2])
        assert last["type"] == "response.completed" and last["response"]["sglext"] == expected


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
