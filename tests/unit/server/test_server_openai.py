"""The OpenAI endpoints over a scripted scheduler."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.protocol.messages import AbortRequest, FinishReason
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import bench, sse
from tests.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]
Ids = Callable[[str], list[int]]
TEXT = "héllo 👩‍👩‍👧 世界 e\u0301!"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def chunks(text: str) -> list[dict[str, Any]]:
    events = sse(text)
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


async def test_chat_answers_and_streams_the_same_text(tokenizer: Tokenizer, ids: Ids) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: ids(TEXT)
        whole = (await b.http.post("/v1/chat/completions", json=CHAT)).json()
        prompt = ids("<|user|>user: hi\n<|user|>assistant: ")
        assert b.scheduler.requests[0].input_ids == prompt
        assert whole["object"] == "chat.completion"
        choice = whole["choices"][0]
        message = {"role": "assistant", "content": TEXT, "refusal": None, "reasoning_content": None}
        assert choice["message"] == message
        assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", 0)
        count = len(ids(TEXT)) + 1
        assert whole["usage"]["prompt_tokens"] == len(prompt)
        assert whole["usage"]["completion_tokens"] == count
        assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        assert "pdserve" not in whole

        body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "return_meta_info": True}
        answer = await b.http.post("/v1/chat/completions", json=body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        parts = chunks(answer.text)
        deltas = [part["choices"][0]["delta"] for part in parts if part["choices"]]
        assert deltas[0] == {"role": "assistant", "content": "", "reasoning_content": None}
        assert "".join(delta.get("content", "") for delta in deltas) == TEXT
        assert "\ufffd" not in answer.text
        assert [p["choices"][0]["finish_reason"] for p in parts if p["choices"]][-1] == "stop"
        assert parts[-1]["usage"] == whole["usage"]
        assert parts[-1]["pdserve"]["kv_bytes"] == 1024
        assert parts[0]["usage"] is None


async def test_meta_info_without_usage_rides_on_the_last_chunk(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        body = {**CHAT, "return_meta_info": True}
        whole = (await b.http.post("/v1/chat/completions", json=body)).json()
        assert whole["pdserve"]["queue_s"] == 0.5
        parts = chunks((await b.http.post("/v1/chat/completions", json={**body, "stream": True})).text)
        assert parts[-1]["pdserve"]["kv_pages"] == 2
        assert all("pdserve" not in part for part in parts[:-1])


async def test_a_stop_string_across_tokens_ends_and_aborts_as_stop(tokenizer: Tokenizer, ids: Ids) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: ids("one two STOP three")
        b.scheduler.hold = True
        body = {"prompt": "x", "stop": ["STOP", "never"], "max_tokens": 60}
        whole = (await b.http.post("/v1/completions", json=body)).json()
        choice = whole["choices"][0]
        assert choice["text"] == "one two "
        assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", "STOP")
        assert whole["usage"]["completion_tokens"] == len(ids("one two STOP"))
        await until(lambda: bool(b.scheduler.aborts))
        assert b.scheduler.aborts == [AbortRequest(rid=b.scheduler.requests[0].rid, reason="stop")]
        parts = chunks((await b.http.post("/v1/completions", json={**body, "stream": True})).text)
        assert "".join(part["choices"][0]["text"] for part in parts) == "one two "


async def test_completions_take_text_tokens_and_lists_of_both(tokenizer: Tokenizer, ids: Ids) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: request.input_ids
        for prompt, texts in (
            ("hello", ["hello"]),
            (["hello", "fox"], ["hello", "fox"]),
            (ids("fox"), ["fox"]),
            ([ids("fox"), ids("世")], ["fox", "世"]),
        ):
            answer = (await b.http.post("/v1/completions", json={"prompt": prompt})).json()
            assert [choice["text"] for choice in answer["choices"]] == texts
            assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))


async def test_n_answers_per_prompt_have_their_own_seeds(tokenizer: Tokenizer, ids: Ids) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: [*request.input_ids, 30 + (request.sampling.seed or 0)]
        body = {"prompt": ["a", "b"], "n": 2, "seed": 5}
        answer = (await b.http.post("/v1/completions", json=body)).json()
        texts = [choice["text"] for choice in answer["choices"]]
        assert [text[0] for text in texts] == ["a", "a", "b", "b"]
        assert texts[0][1] != texts[1][1]
        assert answer["usage"]["prompt_tokens"] == 2
        streamed: dict[int, str] = {}
        for part in chunks((await b.http.post("/v1/completions", json={**body, "stream": True})).text):
            choice = part["choices"][0]
            streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["text"]
        assert [streamed[i] for i in range(4)] == texts


async def test_logprobs_of_output_tokens(tokenizer: Tokenizer, ids: Ids) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: ids("世a")
        chat = (await b.http.post("/v1/chat/completions", json={**CHAT, "logprobs": True, "top_logprobs": 2})).json()
        content = chat["choices"][0]["logprobs"]["content"]
        assert len(content) == 5
        assert b"".join(bytes(entry["bytes"]) for entry in content[:4]).decode() == "世a"
        assert all(entry["logprob"] == -0.25 and len(entry["top_logprobs"]) == 2 for entry in content)
        body = {"prompt": "x", "logprobs": 1}
        done = (await b.http.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
        assert done["tokens"][0] == "bytes:\\xe4"
        assert done["token_logprobs"] == [-0.25] * 5
        assert len(done["text_offset"]) == 5
        assert all(len(top) == 2 for top in done["top_logprobs"]), "the most likely one and the one that was chosen"
        parts = chunks((await b.http.post("/v1/completions", json={**body, "stream": True})).text)
        streamed = [part["choices"][0]["logprobs"] for part in parts if part["choices"][0]["logprobs"]]
        assert [token for entry in streamed for token in entry["tokens"]] == done["tokens"]
        assert [offset for entry in streamed for offset in entry["text_offset"]] == done["text_offset"]


async def test_sampling_fields_reach_the_scheduler(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        body = {
            **CHAT,
            "max_tokens": 3,
            "max_completion_tokens": 7,
            "temperature": 0.10000000149,
            "top_p": 0.9,
            "top_k": -1,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "frequency_penalty": 0.5,
            "presence_penalty": -0.5,
            "seed": -1,
            "ignore_eos": True,
            "min_tokens": 2,
            "stop_token_ids": [9],
            "skip_special_tokens": False,
            "logit_bias": {"5": 2},
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "user": "me",
            "best_effort": "unknown fields are ignored",
        }
        assert (await b.http.post("/v1/chat/completions", json=body)).status_code == 200
        sampling = b.scheduler.requests[0].sampling
        assert (sampling.max_new_tokens, sampling.min_new_tokens) == (7, 2)
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.10000000149, 0.9, 1 << 30)
        assert (sampling.seed, sampling.stop_token_ids, sampling.logit_bias) == ((1 << 63) - 1, (9,), {5: 2.0})
        assert sampling.ignore_eos
        assert not sampling.skip_special_tokens


async def test_defaults_of_max_tokens(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        await b.http.post("/v1/completions", json={"prompt": "x"})
        await b.http.post("/v1/completions", json={"prompt": [5] * 120})
        await b.http.post("/v1/chat/completions", json=CHAT)
        limits = [request.sampling.max_new_tokens for request in b.scheduler.requests]
        assert limits == [16, 8, 128 - len(b.scheduler.requests[2].input_ids)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 409, 500, 503])
async def test_a_refusal_of_the_scheduler_keeps_its_status(tokenizer: Tokenizer, stream: bool, status: int) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.script = lambda request: FinishReason(
            type="abort", message="room 7 is live", status_code=status, err_type="room_live"
        )
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "x"})):
            answer = await b.http.post(path, json={**body, "stream": stream})
            assert answer.status_code == status
            assert answer.json()["error"]["message"] == "room 7 is live"
            assert answer.json()["error"]["code"] == "room_live"


async def test_one_failed_sequence_aborts_the_others(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        b.scheduler.hold = True
        refusal = FinishReason(type="abort", message="no", status_code=503)
        b.scheduler.script = lambda request: refusal if request.input_ids == [9] else [5]
        answer = await b.http.post("/v1/completions", json={"prompt": [[7], [8], [9]]})
        assert answer.status_code == 503
        await until(lambda: len(b.scheduler.aborts) == 2)
        assert {abort.rid for abort in b.scheduler.aborts} == {r.rid for r in b.scheduler.requests[:2]}


async def test_models(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer) as b:
        card = (await b.http.get("/v1/models")).json()["data"][0]
        assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 128)
        assert (await b.http.get("/v1/models/tiny")).json()["id"] == "tiny"
        assert (await b.http.get("/v1/models/other")).status_code == 404
        for name in (None, "unknown", "default", "tiny", "/models/tiny"):
            body = {"prompt": "x", "model": name}
            assert (await b.http.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 0}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 0, "logprobs": 1}),
        ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}),
    ],
)
async def test_no_tokens_may_be_asked_for(tokenizer: Tokenizer, path: str, body: dict[str, Any], stream: bool) -> None:
    """As SGLang takes it: the prompt is read, nothing is said, and the length is why."""
    async with bench(tokenizer) as b:
        answer = await b.http.post(path, json={**body, "stream": stream})
        assert answer.status_code == 200, answer.text
        if stream:
            assert sse(answer.text)[-1] == "[DONE]"
            last = json.loads(sse(answer.text)[-2])
            texts = [json.loads(event) for event in sse(answer.text)[:-1]]
            said = [one["choices"][0].get("delta", one["choices"][0]) for one in texts if "choices" in one]
            assert not [one for one in said if one.get("content") or one.get("text")]
        else:
            last = answer.json()
        if path == "/generate":
            assert (last["text"], last["output_ids"]) == ("", [])
            assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
            assert last["meta_info"]["completion_tokens"] == 0
        else:
            assert last["choices"][0]["finish_reason"] == "length"
            assert stream or last["usage"]["completion_tokens"] == 0
        refused = await b.http.post(path, json=json.loads(json.dumps(body).replace(": 0", ": -1")))
        assert refused.status_code == 400 and "at least 0" in refused.text
