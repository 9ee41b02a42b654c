"""Ollama's API, as the real `ollama` client sees it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import ollama
import pytest

from pdserve.http.access import OLLAMA_SHOW_PATH, OLLAMA_TAGS_PATH
from pdserve.protocol.messages import FinishReason
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server import server_kit
from tests.unit.server.chat_kit import HERMES, NOW, WEATHER, long_context
from tests.unit.server.server_kit import Bench, bench, tiny_tokenizer, token_ids

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60), pytest.mark.usefixtures("long_context")]
__all__ = ["long_context"]
TEXT = "héllo 👩‍👩‍👧 世界!"
PARSERS = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
HI: Any = [{"role": "user", "content": "hi"}]
CHAT, GENERATE = "/api/chat", "/api/generate"


@contextlib.asynccontextmanager
async def ollama_bench(
    tokenizer: Tokenizer, text: str, **serving: Any
) -> AsyncIterator[tuple[Bench, ollama.AsyncClient]]:
    """A server whose model always writes `text`, and a client of it."""
    async with bench(tokenizer, enable_ollama_api=True, **serving) as b:
        b.scheduler.script = lambda request: token_ids(tokenizer, text)
        client = ollama.AsyncClient(
            host="http://server", transport=httpx.ASGITransport(app=b.app, raise_app_exceptions=False)
        )
        yield b, client


async def test_a_chat_whole_and_streamed(tokenizer: Tokenizer) -> None:
    async with ollama_bench(tokenizer, TEXT) as (b, client):
        options: Any = {"temperature": 0.5, "num_predict": 300, "top_k": 0, "repeat_penalty": 1.1, "num_ctx": 4096}
        whole = await client.chat("tiny", HI, options=options)
        assert (whole.message.content, whole.done, whole.done_reason, whole.model) == (TEXT, True, "stop", "tiny")
        request = b.scheduler.requests[0]
        sampling = request.sampling
        assert (sampling.temperature, sampling.max_new_tokens, sampling.repetition_penalty) == (0.5, 300, 1.1)
        assert whole.prompt_eval_count == len(request.input_ids)
        assert whole.eval_count == len(token_ids(tokenizer, TEXT)) + 1
        assert whole.total_duration >= whole.eval_duration >= 0 and whole.created_at.endswith("Z")
        parts = [part async for part in await client.chat("tiny", HI, stream=True)]
        assert "".join(part.message.content for part in parts) == TEXT
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1].eval_count == whole.eval_count and parts[-1].message.content == ""
        raw = await b.http.post(CHAT, json={"model": "tiny", "messages": HI})
        assert raw.headers["content-type"].startswith("application/x-ndjson"), (
            "a stream, unless the body says otherwise"
        )
        assert json.loads(raw.text.splitlines()[-1])["done"] is True


async def test_thoughts_and_calls(tokenizer: Tokenizer) -> None:
    template = "{{ enable_thinking }}{% for m in messages %}[{{ m | tojson }}]{% endfor %}"
    with_template = tiny_tokenizer(template)
    async with ollama_bench(with_template, f"<think>hm 世</think>\n{HERMES}", **PARSERS) as (b, client):
        whole = await client.chat("tiny", HI, tools=[WEATHER, NOW], think=True)
        assert (whole.message.thinking, whole.message.content) == ("hm 世", "Let me see 🙂.")
        calls = [(call.function.name, dict(call.function.arguments)) for call in whole.message.tool_calls]
        assert calls == [("get_weather", {"city": "東京 e\u0301"}), ("now", {})]
        assert with_template.decode(b.scheduler.requests[-1].input_ids).startswith("True[")
        parts = [part async for part in await client.chat("tiny", HI, tools=[WEATHER, NOW], stream=True)]
        assert "".join(part.message.thinking or "" for part in parts) == "hm 世"
        streamed = [call for part in parts for call in part.message.tool_calls or ()]
        assert [(call.function.name, dict(call.function.arguments)) for call in streamed] == calls
        said: Any = [*HI, whole.message, {"role": "tool", "content": "noon", "tool_name": "now"}]
        await client.chat("tiny", said, think=False)
        prompt = with_template.decode(b.scheduler.requests[-1].input_ids)
        user, assistant, tool = json.loads("[" + prompt.removeprefix("False").replace("][", ",")[1:-1] + "]")
        assert (assistant["reasoning_content"], tool["name"]) == ("hm 世", "now") and user["content"] == "hi"
        assert [call["function"]["name"] for call in assistant["tool_calls"]] == ["get_weather", "now"]


async def test_prompts_with_and_without_a_template(tokenizer: Tokenizer) -> None:
    async with ollama_bench(tokenizer, "one two") as (b, client):
        whole = await client.generate("tiny", "hi", system="Be brief.", options={"stop": [" two"]})
        assert (whole.response, whole.done_reason) == ("one", "stop")
        prompt = tokenizer.decode(b.scheduler.requests[-1].input_ids, skip_special=False)
        assert prompt == "<|user|>system: Be brief.\n<|user|>user: hi\n<|user|>assistant: "
        parts = [part async for part in await client.generate("tiny", "hi", raw=True, stream=True)]
        assert tokenizer.decode(b.scheduler.requests[-1].input_ids) == "hi"
        assert "".join(part.response for part in parts) == "one two"
        cut = await client.generate("tiny", "hi", options={"num_predict": 2})
        assert (cut.done_reason, cut.eval_count) == ("length", 2)
        b.scheduler.script = lambda request: [73] * 4000
        full = await client.generate("tiny", "hi", options={"num_predict": -1})
        assert full.prompt_eval_count + full.eval_count == server_kit.CONTEXT
        num_requests = len(b.scheduler.requests)
        loaded = await client.generate("tiny", "", keep_alive=0)
        assert (loaded.done_reason, len(b.scheduler.requests)) == ("load", num_requests)
        b.scheduler.script = lambda request: token_ids(tokenizer, '{"a": 1}')
        schema: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        for prompt_form in ({"prompt": "hi", "raw": True}, {"prompt": "hi"}):
            await client.generate("tiny", **prompt_form, format=schema)
            grammar = b.scheduler.requests[-1].sampling.grammar
            assert grammar is not None and json.loads(grammar.text)["required"] == ["a"]


async def test_facts_and_a_server_without_the_api(tokenizer: Tokenizer) -> None:
    async with ollama_bench(tokenizer, "x", **PARSERS) as (b, client):
        (model,) = (await client.list()).models
        assert (model.model, model.details.family, model.details.quantization_level) == ("tiny", "llama", "float32")
        (running,) = (await client.ps()).models
        assert (running.model, running.digest, running.context_length) == ("tiny", model.digest, server_kit.CONTEXT)
        assert (await b.http.head("/")).status_code == 200 and (await b.http.get("/")).text == "Ollama is running"
        shown = await client.show("tiny")
        assert shown.capabilities == ["completion", "tools", "thinking"]
        assert shown.modelinfo["llama.context_length"] == server_kit.CONTEXT
        assert (await b.http.get("/api/version")).json()["version"]
    async with bench(tokenizer) as b:
        for method, path in (("POST", CHAT), ("POST", GENERATE), ("GET", OLLAMA_TAGS_PATH), ("POST", OLLAMA_SHOW_PATH)):
            answer = await b.http.request(method, path, json={"prompt": "x"})
            assert answer.status_code == 404 and "--enable-ollama-api" in answer.json()["error"]


BAD: tuple[tuple[str, dict[str, Any], str], ...] = (
    (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["AA"]}]}, "messages[0].images"),
    (CHAT, {"messages": HI, "options": {"num_predict": -3}}, "options.num_predict"),
    (CHAT, {"messages": HI, "options": {"mirostat": 1}}, "options.mirostat"),
    (CHAT, {"messages": HI, "options": {"temperature": -1}}, "options.temperature"),
    (CHAT, {"messages": HI, "options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
    (CHAT, {"messages": HI, "options": {"top_p": "x"}}, "options.top_p"),
    (CHAT, {"messages": HI, "think": "much"}, "think"),
    (CHAT, {"messages": HI, "format": 5}, "format"),
    (GENERATE, {"prompt": "x", "format": "xml"}, "format"),
    (GENERATE, {"prompt": "x", "images": ["AA"]}, "images"),
    (GENERATE, {"prompt": "x", "context": [1]}, "context"),
    (GENERATE, {"prompt": "x", "raw": True, "system": "y"}, "system"),
    (GENERATE, {"prompt": "x" * 5000, "raw": True}, "prompt"),
    (GENERATE, {"prompt": "x", "n": 2}, "n"),
)


async def test_what_is_refused_names_its_field_in_the_form_of_the_api(tokenizer: Tokenizer) -> None:
    async with ollama_bench(tokenizer, "x") as (b, client):
        for path, body, field in BAD:
            answer = await b.http.post(path, json=body)
            told = answer.json()
            assert (answer.status_code, told["param"]) == (400, field), (body, told)
            assert field.rpartition(".")[2] in told["error"]
        assert not b.scheduler.requests
        busy = FinishReason(type="abort", message="full", status_code=503, err_type="queue_full", retry_after_s=1)
        b.scheduler.script = lambda request: busy
        with pytest.raises(ollama.ResponseError) as refused:
            await client.chat("tiny", HI)
        assert (refused.value.status_code, refused.value.error) == (503, "full")
