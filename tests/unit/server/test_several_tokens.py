"""Outputs of several tokens at once, as verify steps make them: an answer does not depend on how its tokens come."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pdserve.protocol.messages import SpeculationStats
from pdserve.server.engine_client import client as engine_client
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.observe.test_server_metrics import scrape, value
from tests.unit.server.chat_kit import ASK, HERMES, NOW, WEATHER, long_context
from tests.unit.server.server_kit import EOS, Bench, bench, sse, token_ids
from tests.unit.server.test_stream_states import Unmerged, client_view, shown
from tests.waiting import until

__all__ = ["long_context"]
pytestmark = pytest.mark.timeout(60)
GENERATE, COMPLETIONS, CHAT, RESPONSES = "/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses"
TEXT = "Größe: 10 🙂 and END of it"
ANSWER = f"<think>\nhm 🙂\n</think>\n{HERMES}"
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [9, 4]}
USAGE = {"stream_options": {"include_usage": True}}


def native(**sampling: Any) -> dict[str, Any]:
    return {"text": "a", "sampling_params": {"max_new_tokens": 90, **sampling}, **LOGPROBS}


CALLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "whole": (GENERATE, TEXT, native()),
    "cut at the limit": (GENERATE, TEXT, native(max_new_tokens=11)),
    "stop string": (GENERATE, TEXT, native(stop=["END"])),
    "stop string kept": (GENERATE, TEXT, native(stop=["D of"], no_stop_trim=True)),
    "late stop string": (GENERATE, TEXT + TEXT, native(stop=["END"], min_new_tokens=30)),
    "stop pattern": (GENERATE, TEXT, native(stop_regex="EN[A-Z]+ o")),
    "stop string in the last output": (GENERATE, TEXT, native(stop=["it"])),
    "held back to the end": (GENERATE, TEXT, native(stop=["it was"])),
    "several answers": (GENERATE, TEXT, native(n=3, stop=["END"])),
    "completion": (COMPLETIONS, TEXT, {"prompt": "a", "logprobs": 2, "echo": True, "max_tokens": 90, **USAGE}),
    "completion with a stop": (COMPLETIONS, TEXT, {"prompt": "a", "logprobs": 1, "stop": "END", "max_tokens": 90}),
    "chat": (CHAT, TEXT, {"messages": ASK, "logprobs": True, "top_logprobs": 2, "stop": "END", **USAGE}),
    "tools": (CHAT, ANSWER, {"messages": ASK, "tools": [WEATHER, NOW], "logprobs": True, **USAGE}),
    "late thoughts": (CHAT, ANSWER, {"messages": ASK, "stream_reasoning": False, **USAGE}),
}


def plain(body: dict[str, Any]) -> Any:
    """A whole answer without what differs between two runs of one request."""
    for choice in body.get("choices", []):
        for call in choice.get("message", {}).get("tool_calls", []):
            del call["id"]
    return shown([b"data: " + json.dumps(body).encode()])[0]


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_does_not_depend_on_how_many_tokens_an_output_has(
    name: str, tokenizer: Tokenizer, long_context: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, text, body = CALLS[name]
    monkeypatch.setattr(engine_client, "Generation", Unmerged)

    async def answers(b: Bench, size: int) -> tuple[Any, Any]:
        b.scheduler.tokens_per_output = size
        whole = (await b.http.post(path, json=body)).json()
        answer = await b.http.post(path, json={**body, "stream": True})
        assert answer.status_code == 200, answer.text
        events = shown([event.encode() for event in answer.text.split("\n\n") if event])
        results = whole if isinstance(whole, list) else [whole]
        if isinstance(whole, list):
            last = {event["index"]: event for event in events}
            return [plain(one) for one in results], [last[index] for index in sorted(last)]
        return plain(whole), client_view(path, events)

    async def scenario() -> None:
        async with bench(tokenizer, reasoning_parser="qwen3", tool_call_parser="hermes") as b:
            b.scheduler.script = lambda request: token_ids(tokenizer, text)
            b.scheduler.logprob = lambda token_id: -token_id / 1000
            expected = await answers(b, 1)
            for size in (2, 3, 7, 1000):
                found = await answers(b, size)
                assert found == expected, f"{size} tokens an output"

    asyncio.run(scenario())


async def test_nothing_behind_a_stop_string_is_sent_and_the_scheduler_is_told(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: token_ids(tokenizer, "one END two three")
        b.scheduler.tokens_per_output = 9
        params = {"stop": ["END"], "max_new_tokens": 60}
        body = {"text": "a", "sampling_params": params, "return_logprob": True}
        found = (await b.http.post(GENERATE, json=body)).json()
        upto = token_ids(tokenizer, "one END")
        assert (found["text"], found["output_ids"]) == ("one ", upto)
        assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": "END"}
        assert found["meta_info"]["completion_tokens"] == len(upto)
        assert [token for _, token, _ in found["meta_info"]["output_token_logprobs"]] == upto
        await until(lambda: b.scheduler.aborts)
        assert [abort.reason for abort in b.scheduler.aborts] == ["stop"]


async def test_events_have_an_interval_of_tokens_or_all_of_an_output(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "Generation", Unmerged)
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: token_ids(tokenizer, "abcdefghijk")
        b.scheduler.tokens_per_output = 3
        body = {"prompt": "x", "stream": True, "stream_interval": 4, "max_tokens": 60, "logprobs": 0}
        events = [json.loads(part) for part in sse((await b.http.post(COMPLETIONS, json=body)).text)[:-1]]
        pieces = [event["choices"][0] for event in events]
        assert [piece["text"] for piece in pieces] == ["abc", "defghi", "jk"]
        assert [len(piece["logprobs"]["tokens"]) for piece in pieces] == [3, 6, 3], "EOS is in the last"


async def test_the_time_between_outputs_is_spread_over_their_tokens(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: token_ids(tokenizer, "abcdefghijk")
        b.scheduler.tokens_per_output = 4
        body = {"text": "x", "sampling_params": {"max_new_tokens": 11}}
        assert (await b.http.post(GENERATE, json=body)).json()["meta_info"]["completion_tokens"] == 11
        samples = await scrape(b)
        assert value(samples, "sglang:generation_tokens_total") == 11
        assert value(samples, "sglang:generation_tokens_histogram_sum") == 11
        assert value(samples, "sglang:inter_token_latency_seconds_count") == 11 - 4, "those behind the first output"
        assert value(samples, "sglang:time_to_first_token_seconds_count") == 1


STATS = SpeculationStats(num_verify_steps=4, num_draft_tokens=10, accepted_by_position=(3, 2, 1))
FIELDS = {
    "spec_accept_rate": 0.6,
    "spec_accept_length": 2.5,
    "spec_accept_token_num": 6,
    "spec_draft_token_num": 10,
    "spec_verify_ct": 4,
    "spec_accept_histogram": [1, 1, 1, 1],
}
PREDICTION = {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 4}


async def test_the_answer_has_what_was_drafted_and_accepted(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, reasoning_parser="qwen3") as b:
        b.scheduler.script = lambda request: token_ids(tokenizer, "<think>hm</think>yes")
        b.scheduler.speculation = STATS
        native_answer = (await b.http.post(GENERATE, json={"text": "x"})).json()
        assert FIELDS.items() <= native_answer["meta_info"].items()
        events = sse((await b.http.post(GENERATE, json={"text": "x", "stream": True})).text)
        assert FIELDS.items() <= json.loads(events[-2])["meta_info"].items()
        two = {"prompt": "x", "n": 2, "max_tokens": 60, "return_meta_info": True}
        answer = (await b.http.post(COMPLETIONS, json=two)).json()
        assert answer["usage"]["completion_tokens_details"] == {name: 2 * count for name, count in PREDICTION.items()}
        assert FIELDS.items() <= answer["pdserve"].items()
        chat = (await b.http.post(CHAT, json={"messages": ASK, "max_tokens": 60})).json()
        details = chat["usage"]["completion_tokens_details"]
        assert PREDICTION.items() <= details.items() and details["reasoning_tokens"] > 0
        body = {"messages": ASK, "stream": True, "max_tokens": 60, **USAGE}
        events = sse((await b.http.post(CHAT, json=body)).text)
        assert json.loads(events[-2])["usage"]["completion_tokens_details"] == details


async def test_an_answer_without_drafts_has_no_fields_of_them(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: [73, EOS]
        meta = (await b.http.post(GENERATE, json={"text": "x"})).json()["meta_info"]
        assert not [name for name in meta if name.startswith("spec")]
        answer = (await b.http.post(COMPLETIONS, json={"prompt": "x"})).json()
        assert "completion_tokens_details" not in answer["usage"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, {"text": "x", "sampling_params": {"speculative": False}}),
        (COMPLETIONS, {"prompt": "x", "speculative": False}),
        (CHAT, {"messages": ASK, "speculative": False}),
        (RESPONSES, {"input": "x", "speculative": False}),
    ],
)
async def test_a_request_can_turn_drafts_off(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    async with bench(tokenizer) as b:
        assert (await b.http.post(path, json=body)).status_code == 200
        on = {name: value for name, value in body.items() if name not in ("speculative", "sampling_params")}
        assert (await b.http.post(path, json=on)).status_code == 200
        assert [request.sampling.speculative for request in b.scheduler.requests] == [False, True]
        wrong = body | ({"sampling_params": {"speculative": "no"}} if path == GENERATE else {"speculative": "no"})
        refused = await b.http.post(path, json=wrong)
        assert refused.status_code == 400 and "speculative" in refused.json()["param"]


async def test_the_server_says_how_long_accepted_runs_are(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        (state,) = (await b.http.get("/get_server_info")).json()["internal_states"]
        assert "avg_spec_accept_length" not in state
        assert (await b.http.get("/observe")).json()["rates"]["spec_accept_length"] is None
        assert ("sglang:spec_accept_length", frozenset()) not in await scrape(b)
        b.scheduler.facts = {"spec_is_drafting": 1.0, "spec_draft_length": 2.5}
        assert (await b.http.get("/observe")).json()["rates"]["spec_accept_length"] == 0, "no drafts yet"
        assert value(await scrape(b), "pdserve:spec_verify_steps_total") == 0
        b.scheduler.counters = {"spec_verify_steps": 4.0, "spec_draft_tokens": 10.0, "spec_accepted_tokens": 6.0}
        b.scheduler.counters |= {"spec_accepted_at.1": 4.0, "spec_accepted_at.2": 2.0}
        (state,) = (await b.http.get("/get_server_info")).json()["internal_states"]
        assert state["avg_spec_accept_length"] == 2.5
        rates = (await b.http.get("/observe")).json()["rates"]
        assert (rates["spec_accept_length"], rates["spec_accept_rate"]) == (2.5, 0.6)
        samples = await scrape(b)
        assert value(samples, "sglang:spec_accept_length") == 2.5
        assert value(samples, "sglang:spec_accept_rate") == 0.6
        assert value(samples, "pdserve:spec_verify_steps_total") == 4
        assert value(samples, "pdserve:spec_accepted_tokens_total") == 6
        assert value(samples, "pdserve:spec_accepted_at_total", position="2") == 2
        assert value(samples, "pdserve:spec_is_drafting") == 1
        assert value(samples, "pdserve:spec_draft_length") == 2.5
