"""Answers that clients of SGLang rely on: fields, the form of streams, small endpoints. Over a scripted scheduler."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.server.engine_client import client
from pdserve.server.generation import GenerationUpdate, HeldUpdates
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.chat_kit import HERMES, NOW, WEATHER
from tests.unit.server.server_kit import bench, sse
from tests.unit.server.test_stream_states import Unmerged

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]
Ids = Callable[[str], list[int]]
CHANNELS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes"
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream that ended well."""
    parts = sse(text)
    assert parts[-1] == "[DONE]"
    return [json.loads(part) for part in parts[:-1]]


async def test_every_chunk_of_a_completion_has_the_logprobs_of_its_tokens(
    tokenizer: Tokenizer, ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "Generation", Unmerged)
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: ids("abc")
        body = {"prompt": "x", "logprobs": 2, "stream": True, "stream_options": {"include_usage": True}}
        parts = events((await b.http.post(COMPLETIONS, json=body)).text)
        choices = [part["choices"][0] for part in parts if part["choices"]]
        assert [choice["logprobs"]["tokens"] for choice in choices] == [["a"], ["b"], ["c"], ["<|end|>"]]
        assert all(len(choice["logprobs"]["top_logprobs"][0]) >= 2 for choice in choices)
        assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
        assert (parts[-1]["choices"], parts[-1]["usage"]["completion_tokens"]) == ([], 4)


async def test_reasoning_content_is_in_every_message_and_delta(tokenizer: Tokenizer, ids: Ids) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: ids("ab")
        whole = (await b.http.post(CHAT, json=MESSAGES)).json()
        assert whole["choices"][0]["message"]["reasoning_content"] is None
        parts = events((await b.http.post(CHAT, json={**MESSAGES, "stream": True})).text)
        assert [part["choices"][0]["delta"]["reasoning_content"] for part in parts] == [None] * len(parts)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
async def test_the_ids_of_the_prompt_are_in_the_answer_on_request(tokenizer: Tokenizer, ids: Ids, path: str) -> None:
    body: dict[str, Any] = {CHAT: MESSAGES, COMPLETIONS: {"prompt": "xyz"}, GENERATE: {"text": "xyz"}}[path]
    async with bench(tokenizer) as b:
        whole = (await b.http.post(path, json={**body, "return_prompt_token_ids": True})).json()
        found = whole if path == GENERATE else whole["choices"][0]
        assert found["prompt_token_ids"] == b.scheduler.requests[0].input_ids
        plain = (await b.http.post(path, json=body)).json()
        assert "prompt_token_ids" not in (plain if path == GENERATE else plain["choices"][0])
        if path != GENERATE:
            answer = await b.http.post(path, json={**body, "return_prompt_token_ids": True, "stream": True})
            assert (answer.status_code, answer.json()["param"]) == (400, "return_prompt_token_ids")


@pytest.mark.parametrize("prompt", [[[65]], ["a"]])
async def test_a_list_of_one_prompt_is_a_batch(tokenizer: Tokenizer, prompt: list[Any]) -> None:
    field = "text" if isinstance(prompt[0], str) else "input_ids"
    async with bench(tokenizer) as b:
        answer = (await b.http.post(GENERATE, json={field: prompt})).json()
        assert isinstance(answer, list) and len(answer) == 1
        parts = events((await b.http.post(GENERATE, json={field: prompt, "stream": True})).text)
        assert {part["index"] for part in parts} == {0}


async def test_any_model_name_is_served_unless_names_are_strict(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        for path, body in ((CHAT, MESSAGES), (COMPLETIONS, {"prompt": "x"}), (GENERATE, {"text": "a"})):
            answer = await b.http.post(path, json={**body, "model": "gpt-4"})
            assert answer.status_code == 200
            assert path == GENERATE or answer.json()["model"] == "gpt-4"
        assert (await b.http.get("/v1/models/gpt-4")).status_code == 404
        assert (await b.http.get("/v1/models/tiny")).json()["id"] == "tiny"


async def test_events_come_once_for_an_interval_of_tokens(
    tokenizer: Tokenizer, ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "Generation", Unmerged)
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: ids("abcdefg")
        params = {"stream_interval": 3, "max_new_tokens": 60}
        body = {"text": "x", "stream": True, "sampling_params": params, "return_logprob": True}
        parts = events((await b.http.post(GENERATE, json=body)).text)
        assert [part["text"] for part in parts] == ["a", "abcd", "abcdefg", "abcdefg"]
        assert [len(part["meta_info"]["output_token_logprobs"]) for part in parts] == [1, 4, 7, 8]
        body = {"prompt": "x", "stream": True, "stream_interval": 100, "max_tokens": 60}
        parts = events((await b.http.post(COMPLETIONS, json=body)).text)
        assert [part["choices"][0]["text"] for part in parts] == ["a", "bcdefg"]
        whole = (await b.http.post(GENERATE, json={**body, "text": "x", "stream": False})).json()
        assert whole["text"] == "abcdefg"
        refused = await b.http.post(GENERATE, json={"text": "x", "sampling_params": {"stream_interval": 0}})
        assert (refused.status_code, refused.json()["param"]) == (400, "sampling_params.stream_interval")


async def test_updates_without_tokens_are_not_held_back() -> None:
    held = HeldUpdates(4)
    assert held.add(GenerationUpdate(0, prompt_tokens=1)) is not None
    first = held.add(GenerationUpdate(0, text="a", token_ids=[1]))
    assert first is not None and first.text == "a"
    assert held.add(GenerationUpdate(0, text="b", token_ids=[2])) is None
    assert held.add(GenerationUpdate(0, text="cd", token_ids=[3, 4])) is None
    due = held.add(GenerationUpdate(0, text="efg", token_ids=[5, 6, 7]))
    assert due is not None and (due.text, due.token_ids) == ("bcdefg", [2, 3, 4, 5, 6, 7])


async def test_server_info_has_sglangs_names(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, "decode", ready=False) as b:
        starting = (await b.http.get("/server_info")).json()
        assert (starting["status"], starting["max_total_num_tokens"]) == ("not_ready", None)
    async with bench(tokenizer, "decode") as b:
        info = (await b.http.get("/server_info")).json()
        assert info["max_total_num_tokens"] == 1024
        assert (info["context_length"], info["max_req_input_len"]) == (128, 127)
        assert (info["tp_size"], info["page_size"], info["disaggregation_mode"]) == (1, 64, "decode")
        assert (info["served_model_name"], info["status"]) == ("tiny", "ready")
        assert info["version"] and info["speculative_algorithm"] is None
        (state,) = info["internal_states"]
        assert state["max_total_num_tokens"] == state["max_total_tokens"] == state["memory_usage"]["token_capacity"]
        assert state["load"] == state["num_running_reqs"] + state["num_queue_reqs"]
        assert state["last_gen_throughput"] == 0


async def test_a_ping_is_answered_before_the_engine_is_ready(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, ready=False) as b:
        answer = await b.http.get("/ping")
        assert (answer.status_code, answer.content) == (200, b"")


async def test_function_calls_are_parsed_from_text(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        body = {"text": HERMES, "tools": [WEATHER, NOW], "tool_call_parser": "qwen25"}
        answer = await b.http.post("/parse_function_call", json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["normal_text"] == "Let me see 🙂."
        calls = [(call["tool_index"], call["name"], json.loads(call["parameters"])) for call in found["calls"]]
        assert calls == [(0, "get_weather", {"city": "東京 e\u0301"}), (1, "now", {})]
        plain = (await b.http.post("/parse_function_call", json={**body, "text": "no call"})).json()
        assert plain == {"normal_text": "no call", "calls": []}
        for wrong, param in (
            ({"tool_call_parser": "cobol"}, "tool_call_parser"),
            ({"tool_call_parser": None}, "tool_call_parser"),
            ({"text": "x" * 40_000}, "text"),
            ({"text": None}, "text"),
            ({"tools": [{"type": "browser"}]}, "tools[0].type"),
        ):
            answer = await b.http.post("/parse_function_call", json=body | wrong)
            assert (answer.status_code, answer.json()["param"]) == (400, param), wrong


async def test_function_calls_are_parsed_by_the_servers_own_parser(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, tool_call_parser="hermes") as b:
        found = (await b.http.post("/parse_function_call", json={"text": HERMES})).json()
        assert [call["name"] for call in found["calls"]] == ["get_weather", "now"]


@pytest.mark.parametrize(
    ("parser", "text", "reasoning", "rest"),
    [
        ("deepseek-r1", "hm</think>yes", "hm", "yes"),
        ("deepseek-r1", "<think>hm</think>yes", "hm", "yes"),
        ("qwen3", "<think>\nhm</think>\n\nyes", "hm", "yes"),
        ("qwen3", "yes", "", "yes"),
        ("gpt-oss", CHANNELS, "hm", "yes"),
        ("qwen3", "<think>" + "hm " * 2000 + "</think>yes", ("hm " * 2000).rstrip(), "yes"),
    ],
    ids=["from the start", "with the tag", "tag and spaces", "none", "channels", "long"],
)  # fmt: skip
async def test_reasoning_is_separated_from_text(
    tokenizer: Tokenizer, parser: str, text: str, reasoning: str, rest: str
) -> None:
    async with bench(tokenizer) as b:
        answer = await b.http.post("/separate_reasoning", json={"text": text, "reasoning_parser": parser})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert (found["reasoning_text"].strip(), found["text"]) == (reasoning, rest) and len(found) == 2
        for name in ("cobol", None):
            answer = await b.http.post("/separate_reasoning", json={"text": text, "reasoning_parser": name})
            assert (answer.status_code, answer.json()["param"]) == (400, "reasoning_parser")


INTERLEAVED = (
    "<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>commentary<|message|>two<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>three<|end|>"
)


@pytest.mark.parametrize(
    ("parser", "text", "blocks"),
    [
        ("qwen3", "<think>hm</think>yes", [("reasoning", "hm"), ("text", "yes")]),
        ("qwen3", "yes", [("text", "yes")]),
        ("qwen3", "<think>hm", [("reasoning", "hm"), ("text", "")]),
        ("gpt-oss", INTERLEAVED, [("reasoning", "one"), ("text", "two"), ("reasoning", "three"), ("text", "")]),
    ],
    ids=["reasoning first", "text only", "reasoning only", "in turns"],
)
async def test_blocks_of_reasoning_and_text_are_in_the_order_of_the_text(
    tokenizer: Tokenizer, parser: str, text: str, blocks: list[tuple[str, str]]
) -> None:
    async with bench(tokenizer) as b:
        body = {"text": text, "reasoning_parser": parser, "return_blocks": True}
        found = (await b.http.post("/separate_reasoning", json=body)).json()
    assert found["blocks"] == [{"type": kind, "text": text} for kind, text in blocks]
    assert found["reasoning_blocks"] == [text for kind, text in blocks if kind == "reasoning"]
    assert found["text_blocks"] == [text for kind, text in blocks if kind == "text"]
    assert (found["reasoning_text"], found["text"]) == (
        "".join(found["reasoning_blocks"]),
        "".join(found["text_blocks"]),
    )
