"""`/v1/messages`, as the real `anthropic` client sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import pydantic
import pytest
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from pdserve.config.access_group import AccessConfig
from pdserve.config.lora_group import LoraConfig
from pdserve.protocol.messages import FinishReason
from pdserve.server.anthropic_api import endpoint
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server import server_kit
from tests.unit.server.chat_kit import HERMES, long_context
from tests.unit.server.server_kit import Bench, bench, sse, tiny_tokenizer, token_ids
from tests.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60), pytest.mark.usefixtures("long_context")]
__all__ = ["long_context"]
PATH = "/v1/messages"
TEXT = "héllo 👩‍👩‍👧 世界 e\u0301!"
PARSERS = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
AS_JSON = "{% for m in messages %}[{{ m | tojson }}]{% endfor %}"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"name": "get_weather", "description": "The weather somewhere", "input_schema": CITY},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
HI: Any = [{"role": "user", "content": "hi"}]
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 400, "messages": HI}


@contextlib.asynccontextmanager
async def anthropic_bench(
    tokenizer: Tokenizer, text: str, **serving: Any
) -> AsyncIterator[tuple[Bench, anthropic.AsyncAnthropic]]:
    """A server whose model always writes `text`, and a client of it."""
    async with bench(tokenizer, **serving) as b:
        b.scheduler.script = lambda request: token_ids(tokenizer, text)
        transport = httpx2.ASGITransport(app=b.app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport) as http:
            yield (
                b,
                anthropic.AsyncAnthropic(
                    base_url="http://server", api_key="none", max_retries=0, timeout=30.0, http_client=http
                ),
            )


def strict_events(raw: str) -> list[Any]:
    """The events of a stream but for pings, each with the name and exactly the types that the SDK has for it."""
    known: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    events = [event.partition("\ndata: ") for event in sse(raw)]
    assert all(name == f"event: {json.loads(data)['type']}" for name, _, data in events)
    return [known.validate_json(data, strict=True) for name, _, data in events if name != "event: ping"]


def turns(b: Bench, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The messages of the last request's prompt, with the template `AS_JSON`."""
    prompt = tokenizer.decode(b.scheduler.requests[-1].input_ids)
    return list(json.loads("[" + prompt.replace("][", ",")[1:-1] + "]"))


async def test_text_whole_and_streamed(tokenizer: Tokenizer) -> None:
    async with anthropic_bench(tokenizer, TEXT) as (b, client):
        whole = await client.messages.create(**ASK, system="Be brief.", extra_body={"temperature": 0.5, "top_k": 5})
        assert [block.to_dict() for block in whole.content] == [{"type": "text", "text": TEXT}]
        assert (whole.role, whole.stop_reason, whole.stop_sequence) == ("assistant", "end_turn", None)
        assert whole.id.startswith("msg_") and whole._request_id
        request = b.scheduler.requests[0]
        prompt = tokenizer.decode(request.input_ids, skip_special=False)
        assert prompt == "<|user|>system: Be brief.\n<|user|>user: hi\n<|user|>assistant: "
        assert (request.sampling.temperature, request.sampling.top_k, request.sampling.max_new_tokens) == (0.5, 5, 400)
        usage = whole.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens) == (len(request.input_ids) - 3, 3)
        assert usage.output_tokens == len(token_ids(tokenizer, TEXT)) + 1

        stream = await client.messages.create(**ASK, stream=True)
        events = [event async for event in stream]
        kinds = [event.type for event in events]
        assert kinds[:2] == ["message_start", "content_block_start"] and set(kinds[2:-3]) == {"content_block_delta"}
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert "".join(event.delta.text for event in events if event.type == "content_block_delta") == TEXT
        assert events[0].message.content == [] and events[0].message.usage.cache_read_input_tokens == 3
        assert events[-2].usage.output_tokens == usage.output_tokens
        raw = (await b.http.post(PATH, json={**ASK, "stream": True})).text
        assert "event: ping\ndata: {" in raw and "[DONE]" not in raw
        strict_events(raw)


async def test_thoughts_words_and_calls_are_blocks(tokenizer: Tokenizer) -> None:
    async with anthropic_bench(tokenizer, f"<think>hm 世</think>\n{HERMES}", **PARSERS) as (b, client):
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        whole = await client.messages.create(**ASK, tools=TOOLS, thinking=thinking)
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
        thought, text, weather, now = whole.content
        assert (thought.thinking, text.text) == ("hm 世", "Let me see 🙂.")
        assert len(thought.signature) == 48
        assert (weather.name, weather.input, now.input) == ("get_weather", {"city": "東京 e\u0301"}, {})
        assert whole.stop_reason == "tool_use" and whole.usage.output_tokens_details.thinking_tokens > 5

        async with client.messages.stream(**ASK, tools=TOOLS, thinking=thinking) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
        assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
        assert final.usage.output_tokens == whole.usage.output_tokens and final.stop_reason == "tool_use"
        ids = [[block.to_dict() | {"id": ""} for block in message.content] for message in (whole, final)]
        assert ids[0] == ids[1]
        body = {**ASK, "tools": TOOLS, "thinking": thinking, "stream": True}
        events = strict_events((await b.http.post(PATH, json=body)).text)
        assert [event.content_block.type for event in events if event.type == "content_block_start"] == [
            "thinking", "text", "tool_use", "tool_use",
        ]  # fmt: skip
        deltas = {event.delta.type for event in events if event.type == "content_block_delta"}
        assert deltas == {"thinking_delta", "signature_delta", "text_delta", "input_json_delta"}
        assert events[-2].delta.stop_reason == "tool_use"


async def test_a_second_turn_with_what_the_first_gave() -> None:
    tokenizer = tiny_tokenizer(AS_JSON)
    async with anthropic_bench(tokenizer, f"<think>hm</think>{HERMES}", **PARSERS) as (b, client):
        first = await client.messages.create(**ASK, tools=TOOLS)
        results: Any = [
            {"type": "tool_result", "tool_use_id": block.id, "content": content, "is_error": True}
            for block, content in zip(
                [block for block in first.content if block.type == "tool_use"],
                ["noon", [{"type": "text", "text": "12"}, {"type": "text", "text": "h"}]],
                strict=True,
            )
        ]
        results += [{"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}}]
        said: Any = [*HI, first.to_param(), {"role": "user", "content": results}, {"role": "user", "content": "now"}]
        await client.messages.create(**ASK | {"messages": said}, tools=TOOLS)
        user, assistant, *outputs, last = turns(b, tokenizer)
        assert user == {"role": "user", "content": "hi"}
        assert (assistant["content"], assistant["reasoning_content"]) == ("Let me see 🙂.", "hm")
        assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"city": "東京 e\u0301"}, {}]
        assert [(each["role"], each["name"], each["content"]) for each in outputs] == [
            ("tool", "get_weather", "noon"), ("tool", "now", "12\nh"),
        ]  # fmt: skip
        assert last == {"role": "user", "content": "go on\nnow"}


async def test_stop_reasons(tokenizer: Tokenizer) -> None:
    async with anthropic_bench(tokenizer, "one two three") as (b, client):
        stopped = await client.messages.create(**ASK, stop_sequences=["x", "two"])
        assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "two", "one ")
        cut = await client.messages.create(**ASK | {"max_tokens": 2})
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
        b.scheduler.script = lambda request: [73] * 4000
        full = await client.messages.create(**ASK | {"max_tokens": 32000})
        assert full.stop_reason == "model_context_window_exceeded"
        assert full.usage.input_tokens + 3 + full.usage.output_tokens == server_kit.CONTEXT
        nothing = await client.messages.create(**ASK | {"max_tokens": 0})
        assert (nothing.content, nothing.stop_reason) == ([], "max_tokens")


async def test_a_call_that_the_limit_cuts_off_has_no_input(tokenizer: Tokenizer) -> None:
    async with anthropic_bench(tokenizer, HERMES, **PARSERS) as (_, client):
        limit = len(token_ids(tokenizer, HERMES[: HERMES.index("東京")]))
        cut = await client.messages.create(**ASK | {"max_tokens": limit}, tools=TOOLS)
        assert (cut.content[-1].type, cut.content[-1].input, cut.stop_reason) == ("tool_use", {}, "max_tokens")


async def test_tool_choice_and_its_grammar(tokenizer: Tokenizer) -> None:
    async with anthropic_bench(tokenizer, '{"city": "x"}', **PARSERS) as (b, client):
        named = await client.messages.create(**ASK, tools=TOOLS, tool_choice={"type": "tool", "name": "get_weather"})
        assert (named.content[0].name, named.content[0].input, named.stop_reason) == (
            "get_weather", {"city": "x"}, "tool_use",
        )  # fmt: skip
        assert b.scheduler.requests[-1].sampling.grammar is not None
        calls = '[{"name": "now", "parameters": {}}]'
        b.scheduler.script = lambda request: token_ids(tokenizer, calls)
        any_tool = await client.messages.create(
            **ASK, tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True}
        )
        assert [block.name for block in any_tool.content] == ["now"]
        grammar = b.scheduler.requests[-1].sampling.grammar
        assert grammar is not None and '"maxItems":1' in grammar.text.replace(" ", "")
        await client.messages.create(**ASK, tools=TOOLS, tool_choice={"type": "none"})
        assert b.scheduler.requests[-1].sampling.grammar is None


async def test_the_shapes_of_claude_code() -> None:
    tokenizer = tiny_tokenizer("{{ enable_thinking }}" + AS_JSON + "{{ tools | length }}")
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ]
    tools = [{**TOOLS[0], "name": f"tool_{i}", "eager_input_streaming": True} for i in range(60)]
    body = {
        **ASK,
        "max_tokens": 32000,
        "system": system,
        "tools": tools,
        "stream": True,
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,interleaved-thinking"}
    async with anthropic_bench(tokenizer, "yes", **PARSERS) as (b, _):
        answer = await b.http.post(f"{PATH}?beta=true", json=body, headers=headers)
        assert answer.status_code == 200 and '"model_context' not in answer.text
        prompt = tokenizer.decode(b.scheduler.requests[-1].input_ids)
        assert prompt.startswith("True[") and prompt.endswith("]60")
        first, *_ = json.loads(f"[{prompt[5:-3].replace('][', ',')}]")
        assert first == {"role": "system", "content": "You are Claude Code.\nBe brief."}
        counted = await b.http.post(f"{PATH}/count_tokens?beta=true", json={**body, "thinking": {"type": "disabled"}})
        assert counted.json() == {"input_tokens": len(b.scheduler.requests[-1].input_ids) + 1}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
USE = {"type": "tool_use", "id": "a", "name": "now", "input": {}}
DRAFT_7 = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "url": {"type": "string", "format": "uri"},
        "timeout": {"type": "number", "exclusiveMinimum": 0, "maximum": 600000},
        "env": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        "edits": {
            "type": "array", "minItems": 1,
            "items": {"type": "object", "properties": {"all": {"type": "boolean", "default": False}}},
        },
        "page": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["url"],
    "additionalProperties": False,
}  # fmt: skip
FETCH = {"name": "Fetch", "input_schema": DRAFT_7}
LONG_NAME = "mcp__plugin_some_server__" + "x" * 95
PAST_CALL: Any = [*HI, {"role": "assistant", "content": [{**USE, "caller": {"type": "direct"}}]}]
ACCEPTED: tuple[dict[str, Any], ...] = (
    {"mcp_servers": [], "container": None, "metadata": None, "system": "", "stop_sequences": [], "top_k": 0},
    {"tools": [], "tool_choice": {"type": "auto"}},
    {"tools": [{"name": LONG_NAME, "input_schema": CITY, "cache_control": {"type": "ephemeral"}}]},
    {"tools": [FETCH], "tool_choice": {"type": "any"}},
    {"tools": [{**FETCH, "strict": True}]},
    {"tools": [{"name": "x", "defer_loading": True, "allowed_callers": ["direct"], "input_examples": [{}]}]},
    {"max_tokens": 1, "messages": [{"role": "user", "content": "quota"}], "metadata": {"user_id": '{"device": "a"}'}},
    {"thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "max"}},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}, "speed": "fast", "inference_geo": "us"},
    {"messages": [*HI, {"role": "system", "content": "now"}, {"role": "user", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "gone", "content": "x"}]}]},
    {"messages": [*PAST_CALL, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
    {
        "messages": [
            *HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "of another server"},
                    {"type": "redacted_thinking", "data": "x"},
                ],
            },
            {"role": "user", "content": [{"type": "text", "text": "", "citations": None}]},
        ]
    },
)


async def test_more_shapes_of_coding_tools(tokenizer: Tokenizer) -> None:
    async with anthropic_bench(tokenizer, '[{"name": "Fetch", "parameters": {"url": "x"}}]', **PARSERS) as (b, client):
        for changes in ACCEPTED:
            for path in (PATH, f"{PATH}/count_tokens"):
                answer = await b.http.post(f"{path}?beta=true", json={**ASK, **changes})
                assert answer.status_code == 200, (changes, answer.text)
        system = [{"type": "text", "text": f"{number}", "cache_control": {"type": "ephemeral"}} for number in range(60)]
        await client.messages.create(**ASK, system=system)
        prompt = tokenizer.decode(b.scheduler.requests[-1].input_ids)
        assert "\n".join(map(str, range(60))) in prompt


async def test_count_tokens_and_an_answer_to_go_on_with(tokenizer: Tokenizer) -> None:
    template = server_kit.TEMPLATE.replace("{{ m.content }}\n", "{{ m.content }}")
    tokenizer = tiny_tokenizer(template)
    async with anthropic_bench(tokenizer, "c") as (b, client):
        said: Any = [*HI, {"role": "assistant", "content": "a b"}]
        counted = await client.messages.count_tokens(model="tiny", messages=said)
        await client.messages.create(**ASK | {"messages": said})
        request = b.scheduler.requests[-1]
        assert tokenizer.decode(request.input_ids, skip_special=False).endswith("assistant: a b")
        assert counted.input_tokens == len(request.input_ids)


async def test_a_format_becomes_a_grammar(tokenizer: Tokenizer) -> None:
    async with anthropic_bench(tokenizer, '{"city": "x"}') as (b, client):
        await client.messages.create(**ASK, output_config={"format": {"type": "json_schema", "schema": CITY}})
        grammar = b.scheduler.requests[-1].sampling.grammar
        assert grammar is not None and json.loads(grammar.text)["required"] == ["city"]


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*HI, {"role": "user", "content": []}]}, "messages[1].content"),
    ({"messages": [*HI, {"role": "assistant", "content": [{**USE, "input": "{}"}]}]}, "messages[1].content[0].input"),
    (
        {"messages": [*HI, {"role": "assistant", "content": [{**USE, "type": "server_tool_use"}]}]},
        "messages[1].content[0]",
    ),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0]"),
    ({"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "messages[1]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}]},
        "messages[0].content[0].content[0]",
    ),
    ({"system": [IMAGE]}, "system[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"thinking": {"type": "much"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
    ({"stop_sequences": ["a"], "stop": "b"}, "stop_sequences"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"temperature": -1}, "temperature"),
    ({"n": 2}, "n"),
)


async def test_what_is_refused_names_its_field_in_the_form_of_the_api(tokenizer: Tokenizer) -> None:
    async with anthropic_bench(tokenizer, "x") as (b, client):
        for changes, field in BAD:
            answer = await b.http.post(PATH, json={**ASK, **changes})
            told = answer.json()
            assert (answer.status_code, told["type"], told["error"]["type"]) == (400, "error", "invalid_request_error")
            assert told["error"]["param"] == field and field in told["error"]["message"], (changes, told)
            assert told["request_id"] == answer.headers["request-id"]
        assert not b.scheduler.requests
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**ASK | {"messages": []})
        assert (refused.value.type, refused.value.api_message) == (
            "invalid_request_error",
            "messages must not be empty",
        )
        assert (await b.http.post(PATH, content=b"no")).json()["type"] == "error"
        assert (await b.http.get(PATH)).json()["error"]["type"] == "invalid_request_error"
        for answer in (await b.http.get(PATH + "/batches"), await b.http.post(PATH + "/batches/a/cancel", json={})):
            told = answer.json()
            assert (answer.status_code, told["type"], told["error"]["type"]) == (404, "error", "not_found_error")
            assert told["request_id"] == answer.headers["request-id"]


async def test_failures_before_and_within_a_stream(tokenizer: Tokenizer) -> None:
    async with anthropic_bench(tokenizer, "x") as (b, client):
        busy = FinishReason(type="abort", message="full", status_code=503, err_type="queue_full", retry_after_s=1)
        b.scheduler.script = lambda request: busy
        with pytest.raises(anthropic.APIStatusError) as refused:
            await client.messages.create(**ASK, stream=True)
        assert (refused.value.status_code, refused.value.type) == (503, "overloaded_error")
        assert refused.value.response.headers["retry-after"] == "1"
        b.scheduler.script, b.scheduler.hold = lambda request: [73, 74], True
        asked = asyncio.create_task(client.messages.create(**ASK, stream=True))
        await until(lambda: len(b.scheduler.requests) == 2)
        failed = FinishReason(type="abort", message="lost", status_code=500, err_type="engine_error")
        b.scheduler.refuse(b.scheduler.requests[-1], failed)
        stream, seen = await asked, list[str]()

        async def read() -> None:
            async for event in stream:
                seen.append(event.type)

        with pytest.raises(anthropic.APIStatusError) as lost:
            await read()
        assert seen == ["message_start", "content_block_start", "content_block_delta"]
        assert (lost.value.type, lost.value.api_message) == ("api_error", "lost")


async def test_a_bug_is_told_in_the_form_of_the_api(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(endpoint, "prepare_chat", broken)
    async with anthropic_bench(tokenizer, "x") as (_, client):
        with pytest.raises(anthropic.InternalServerError) as raised:
            await client.messages.create(**ASK)
    request_id = raised.value.response.headers["x-request-id"]
    assert request_id and raised.value.request_id == request_id
    assert raised.value.body == {
        "type": "error",
        "error": {
            "type": "api_error", "message": "internal error: ZeroDivisionError", "param": None,
            "code": "internal_error",
        },
        "code": 500,
        "request_id": request_id,
    }  # fmt: skip


async def test_keys_of_both_kinds(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, access=AccessConfig(api_key="k")) as b:
        for headers, status in (
            ({}, 401), ({"x-api-key": "j"}, 401), ({"x-api-key": "k"}, 200), ({"Authorization": "Bearer k"}, 200),
            ({"Authorization": "Bearer j", "x-api-key": "k"}, 401),
        ):  # fmt: skip
            answer = await b.http.post(PATH, json={**ASK, "max_tokens": 1}, headers=headers)
            assert answer.status_code == status
            if status == 401:
                assert answer.json()["error"]["type"] == "authentication_error"
        assert (await b.http.get("/v1/models", headers={"X-Api-Key": "k"})).status_code == 200


async def test_models_in_the_form_of_the_api(tokenizer: Tokenizer) -> None:
    async with anthropic_bench(tokenizer, "x", lora=LoraConfig(lora_paths="sql=/sql,fr=/fr")) as (b, client):
        page = await client.models.list(limit=2)
        assert [model.id for model in page.data] == ["tiny", "sql"] and page.has_more
        card = page.data[0]
        assert (card.type, card.display_name, card.lifecycle) == ("model", "tiny", "active")
        assert card.max_input_tokens == server_kit.CONTEXT and card.created_at.tzinfo is not None
        assert [model.id async for model in client.models.list(limit=1)] == ["tiny", "sql", "fr"]
        assert [model.id async for model in client.models.list(limit=1, before_id="fr")] == ["sql", "tiny"]
        assert (await client.models.list(after_id="gone")).data == []
        assert (await client.models.retrieve("sql")).id == "sql"
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.models.retrieve("other")
        assert unknown.value.type == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match="limit must be 1 to 1000"):
            await client.models.list(limit=0)
        assert (await b.http.get("/v1/models")).json()["object"] == "list"


class City(pydantic.BaseModel):
    """What a client wants parsed."""

    city: str


async def test_the_sdk_runs_tools_and_parses_by_the_beta_paths(tokenizer: Tokenizer) -> None:
    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather somewhere."""
        return f"sun in {city}"

    calls = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    async with anthropic_bench(tokenizer, "", **PARSERS) as (b, client):
        answers = iter((calls, "It is sunny.", '{"city": "x"}', "one"))
        b.scheduler.script = lambda request: token_ids(tokenizer, next(answers))
        runner = client.beta.messages.tool_runner(**ASK, tools=[get_weather], betas=["interleaved-thinking-2025-05-14"])
        used, said = [message.content[0].to_dict() async for message in runner]
        assert (used["name"], used["input"]) == ("get_weather", {"city": "Paris"}) and said["text"] == "It is sunny."
        assert "sun in Paris" in tokenizer.decode(b.scheduler.requests[-1].input_ids)
        assert (await client.messages.parse(**ASK, output_format=City)).parsed_output == City(city="x")
        others: Any = {"system": [], "stop_sequences": [], "service_tier": "auto", "extra_body": {"speed": "fast"}}
        async with client.beta.messages.stream(**ASK, betas=["a", "b"], **others) as stream:
            assert (await stream.get_final_message()).stop_reason == "end_turn"
