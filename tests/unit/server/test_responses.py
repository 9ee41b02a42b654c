"""`/v1/responses`, as the real client sees it."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pydantic
import pytest

from pdserve.errors import RequestError
from pdserve.protocol.messages import FinishReason
from pdserve.server.app import make_metrics
from pdserve.server.context import ServerContext
from pdserve.server.generation import Generation, GenerationUpdate
from pdserve.server.http.json_http import convert
from pdserve.server.openai.chat import prepare_chat
from pdserve.server.openai.responses.endpoint import ResponsesCall
from pdserve.server.openai.responses.schemas import ResponsesBody
from pdserve.server.openai.responses.to_chat import to_chat
from pdserve.server.request.constraints import GrammarCheck
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.chat_kit import HERMES, NOW, WEATHER, long_context, openai_bench
from tests.unit.server.server_kit import tiny_tokenizer

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120), pytest.mark.usefixtures("long_context")]
__all__ = ["long_context"]
TOOLS: Any = [{"type": "function", **tool["function"]} for tool in (WEATHER, NOW)]
TEXT = "héllo 👩‍👩‍👧 世界 e\u0301!"


async def test_text_whole_and_streamed(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, TEXT) as (b, client):
        whole = await client.responses.create(model="tiny", input="hi", instructions="Be brief.", store=True)
        assert (whole.output_text, whole.status, whole.object, whole.store) == (TEXT, "completed", "response", True)
        prompt = tokenizer.decode(b.scheduler.requests[0].input_ids, skip_special=False)
        assert prompt == "<|user|>system: Be brief.\n<|user|>user: hi\n<|user|>assistant: "
        usage = whole.usage
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (3, 0)

        events = [event async for event in await client.responses.create(model="tiny", input="hi", stream=True)]
        kinds = [event.type for event in events]
        assert kinds[:4] == [
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        ]  # fmt: skip
        assert kinds[-4:] == [
            "response.output_text.done", "response.content_part.done", "response.output_item.done",
            "response.completed",
        ]  # fmt: skip
        assert set(kinds[4:-4]) == {"response.output_text.delta"}
        assert "".join(event.delta for event in events[4:-4]) == TEXT == events[-1].response.output_text
        assert "\ufffd" not in events[-1].model_dump_json()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert {event.response.id for event in (events[0], events[1], events[-1])} == {events[0].response.id}
        assert events[0].response.output == [] and events[0].response.status == "in_progress"
        assert events[-1].response.usage.output_tokens == usage.output_tokens


async def test_thoughts_words_and_calls_are_items(tokenizer: Tokenizer) -> None:
    serving = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    async with openai_bench(tokenizer, f"<think>hm 世</think>\n{HERMES}", **serving) as (_, client):
        whole = await client.responses.create(model="tiny", input="hi", tools=TOOLS)
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
        thoughts, message, weather, now = whole.output
        assert (thoughts.content[0].text, message.content[0].text) == ("hm 世", "Let me see 🙂.")
        assert (weather.name, weather.arguments, now.arguments) == ("get_weather", '{"city": "東京 e\u0301"}', "{}")
        assert whole.usage.output_tokens_details.reasoning_tokens > 5

        async with client.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()

        def shown(item: Any) -> Any:
            fields = item.model_dump(exclude={"id", "call_id", "parsed_arguments"})
            for part in fields.get("content") or []:
                part.pop("parsed", None)
            return fields

        assert [shown(item) for item in final.output] == [shown(item) for item in whole.output]
        arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
        assert arguments == weather.arguments + now.arguments
        ids = {event.output_index: event.item.id for event in events if event.type == "response.output_item.added"}
        assert list(ids) == [0, 1, 2, 3]
        assert all(event.item_id == ids[event.output_index] for event in events if event.type.endswith("delta"))


async def test_a_second_turn_with_what_the_first_gave(tokenizer: Tokenizer) -> None:
    template = "{% for m in messages %}[{{ m | tojson }}]{% endfor %}"
    with_template = tiny_tokenizer(template)
    serving = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    async with openai_bench(with_template, f"<think>hm</think>{HERMES}", **serving) as (b, client):
        first = await client.responses.create(model="tiny", input="hi", tools=TOOLS, max_output_tokens=300)
        turn: Any = [{"role": "user", "content": "hi"}, *first.output]
        turn += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "noon"}
            for item in first.output
            if item.type == "function_call"
        ]
        await client.responses.create(model="tiny", input=turn, tools=TOOLS, max_output_tokens=100)
        prompt = with_template.decode(b.scheduler.requests[-1].input_ids)
        user, assistant, *outputs = json.loads("[" + prompt.replace("][", ",")[1:-1] + "]")
        assert user == {"role": "user", "content": "hi"}
        assert (assistant["content"], assistant["reasoning_content"]) == ("Let me see 🙂.", "hm")
        assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"city": "東京 e\u0301"}, {}]
        assert [(output["role"], output["name"]) for output in outputs] == [("tool", "get_weather"), ("tool", "now")]


async def test_a_pydantic_model_is_parsed(tokenizer: Tokenizer) -> None:
    class City(pydantic.BaseModel):
        name: str

    async with openai_bench(tokenizer, '{"name": "Rome"}') as (b, client):
        answer = await client.responses.parse(model="tiny", input="hi", text_format=City)
        assert answer.output_parsed == City(name="Rome")
        assert json.loads(b.scheduler.requests[0].sampling.grammar.text)["properties"] == {
            "name": {"title": "Name", "type": "string"}
        }


async def test_named_and_required_tools(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, '{"city": "Rome"}') as (_, client):
        choice: Any = {"type": "function", "name": "get_weather"}
        answer = await client.responses.create(model="tiny", input="hi", tools=TOOLS, tool_choice=choice)
        assert (answer.output[0].name, answer.output[0].arguments) == ("get_weather", '{"city": "Rome"}')
    async with openai_bench(tokenizer, '[{"name": "now", "parameters": {}}]') as (_, client):
        answer = await client.responses.create(model="tiny", input="hi", tools=TOOLS, tool_choice="required")
        assert [(item.type, item.name) for item in answer.output] == [("function_call", "now")]


async def test_an_answer_that_is_cut_off_is_incomplete(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, TEXT) as (_, client):
        answer = await client.responses.create(model="tiny", input="hi", max_output_tokens=3)
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.output[0].status == "incomplete"
        stream = await client.responses.create(model="tiny", input="hi", max_output_tokens=3, stream=True)
        assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_logprobs_where_they_are_included(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, "ok") as (_, client):
        asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
        whole = await client.responses.create(model="tiny", input="hi", **asked)
        logprobs = whole.output[0].content[0].logprobs
        assert logprobs[0].logprob == -0.25 and len(logprobs[0].top_logprobs) == 1
        events = [
            event async for event in await client.responses.create(model="tiny", input="hi", stream=True, **asked)
        ]
        streamed = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
        assert [entry.token for entry in streamed] == [entry.token for entry in logprobs][: len(streamed)]


async def test_a_refused_request_has_its_status(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, TEXT) as (b, client):
        b.scheduler.script = lambda request: FinishReason(type="abort", message="full", status_code=503)
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError):
                await client.responses.create(model="tiny", input="hi", stream=stream)


async def test_a_failure_after_the_first_token_is_an_event(tokenizer: Tokenizer) -> None:
    body = convert({"input": "hi", "stream": True}, ResponsesBody)
    async with openai_bench(tokenizer, TEXT) as (b, _):
        grammars = GrammarCheck(b.config.grammar, tokenizer)
        context = ServerContext(b.config, b.client, tokenizer, make_metrics(b.config), 0, grammars)
        states, plan = await prepare_chat(context, to_chat(body), "input")
        generation = Generation(1, lambda generation: None)
        generation.put(GenerationUpdate(0, text="so far", token_ids=[1]))
        kinds = []
        async for event in ResponsesCall(context, body, states, plan).events(generation):
            name, data = event.decode().splitlines()[:2]
            kinds.append(name.removeprefix("event: "))
            generation.fail(RequestError("the other half is gone", status=503))
        assert kinds[-2:] == ["response.output_text.delta", "response.failed"]
        failed = json.loads(data.removeprefix("data: "))["response"]
        assert (failed["status"], failed["error"]["message"]) == ("failed", "the other half is gone")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": 5}, "previous_response_id"),
    ({"store": "yes"}, "store"),
    ({"background": "yes"}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": 5}]}, "tools[0].name"),
    ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice"),
    ({"truncation": "auto"}, "truncation"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 99}, "top_logprobs"),
    ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    ({"text": {"format": 5}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "s"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "s", "schema": 5}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "nothing"}}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": 5, "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "schema": {}, "strict": "yes"}}}, "text.format.strict"),
    ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex"),
    ({"text": {"format": {"type": "json_object"}}, "response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}, "response_format.json_schema.schema"),
    ({"tools": [{"type": "function", "name": "no spaces"}]}, "tools[0].name"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].name"),
    (
        {
            "tools": [
                {**TOOLS[0], "parameters": {"type": "object", "properties": {"a": {"type": "nothing"}}}, "strict": True}
            ],
            "tool_choice": {"type": "function", "name": "get_weather"},
        },
        "tools[0].parameters",
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [5]}}, "tool_choice"),
    ({"max_output_tokens": 10**9}, "max_output_tokens"),
    ({"max_output_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"n": 2}, "n"),
    ({"metadata": {"a": 5}}, "metadata[...]"),
]


CHAT_WORDS = re.compile(
    r"response_format|json_schema\.|\bfunction(\.|\": {)|reasoning_effort|messages|max(_completion)?_tokens"
)
"""What the same things are called in chat completions."""


async def test_a_template_that_refuses_names_the_input(tokenizer: Tokenizer) -> None:
    refusing = tiny_tokenizer("{{ raise_exception('not these') }}")
    async with openai_bench(refusing, "x") as (b, _):
        answer = await b.http.post("/v1/responses", json={"model": "tiny", "input": "hi"})
        assert (answer.status_code, answer.json()["param"]) == (400, "input")
        assert "not these" in answer.json()["message"]


async def test_bad_fields_are_named(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, "x") as (b, _):
        for body, param in BAD:
            answer = await b.http.post("/v1/responses", json={"model": "tiny", "input": "hi", **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body
            if "response_format" not in body:
                assert not CHAT_WORDS.search(answer.json()["message"]), answer.json()["message"]


async def test_items_of_one_turn_become_one_message() -> None:
    items = [
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "message", "role": "assistant", "content": "c"},
        {"role": "developer", "content": "d"},
    ]
    messages = to_chat(convert({"input": items}, ResponsesBody)).messages
    assert [(message.role, message.content) for message in messages] == [
        ("assistant", "b"), ("assistant", "c"), ("developer", "d"),
    ]  # fmt: skip
    assert messages[0].reasoning_content == "a"
    assert [call.function.name for call in messages[0].tool_calls or []] == ["f", "g"]
