"""The service with a timetable: any round of requests has the same times, and its stream is whole."""

from __future__ import annotations

import itertools
import json

import pytest
from aiohttp.test_utils import TestClient, TestServer

from benchmarks import steady_server as steady


@pytest.mark.parametrize("first", [0, 1, 13])
def test_any_round_of_requests_has_the_same_times(first: int) -> None:
    count = len(steady.FIRST_S) * len(steady.GAPS_S)
    found = sorted(tuple(steady.timetable(index, 8)) for index in range(first, first + count))
    assert found == sorted(tuple(steady.timetable(index, 8)) for index in range(count))
    assert len(set(found)) == count


def test_a_timetable_has_the_first_token_the_gaps_and_one_pause() -> None:
    times_s = steady.timetable(9, 4)
    gaps = [later - sooner for sooner, later in itertools.pairwise(times_s)]
    assert times_s[0] == steady.FIRST_S[1]
    assert gaps == pytest.approx([steady.GAPS_S[1], steady.PAUSE_S, steady.GAPS_S[1]])


@pytest.mark.parametrize("with_usage", [True, False])
async def test_a_stream_has_each_token_and_the_usage_that_was_asked_for(with_usage: bool) -> None:
    body = {"prompt": "three words here", "max_tokens": 3, "stream": True}
    if with_usage:
        body["stream_options"] = {"include_usage": True}
    async with TestClient(TestServer(steady.SteadyService("tiny").app())) as client:
        assert (await (await client.get("/v1/models")).json())["data"][0]["id"] == "tiny"
        text = await (await client.post("/v1/completions", json=body)).text()
    *events, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    found = [json.loads(event) for event in events]
    choices = [choice for event in found for choice in event["choices"]]
    assert done == "[DONE]" and [choice["text"] for choice in choices] == [" word"] * 3
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert [event["usage"] for event in found if "usage" in event] == ([usage] if with_usage else [])
