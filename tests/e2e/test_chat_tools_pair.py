"""Tools, reasoning and responses of a real model through the router and a pair, with the real clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import requests
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from pdserve.server.text.tokenizer import read_template
from tests.e2e.harness import Pair, assert_idle, running_pair

FLAGS = (
    "--served-model-name", "smollm2", "--max-total-tokens", "4096", "--dtype", "float32",
    "--reasoning-parser", "qwen3", "--disaggregation-transfer-backend", "shm",
)  # fmt: skip
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def pair(smollm2_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The model with a template for tools, which closes the thoughts where none are wanted, as Qwen3's does."""
    template = tmp_path_factory.mktemp("template") / "thinking.jinja"
    closed = "{{- '<think></think>' if add_generation_prompt and enable_thinking is false else '' }}"
    template.write_text(read_template("hermes") + closed)
    with running_pair(str(smollm2_directory), *FLAGS, "--chat-template", str(template)) as started:
        yield started


@pytest.fixture
def api(pair: Pair) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{pair.router.url}/v1", api_key="none", max_retries=0, timeout=200)


def test_a_call_that_must_be_and_its_answer(pair: Pair, api: openai.OpenAI) -> None:
    asked: Any = {
        "model": "smollm2",
        "temperature": 0,
        "max_tokens": 60,
        "tools": [WEATHER],
        "reasoning_effort": "none",
    }
    whole = api.chat.completions.create(**asked, messages=ASK, tool_choice="required", parallel_tool_calls=False)
    choice = whole.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}

    stream = api.chat.completions.create(
        **asked, messages=ASK, tool_choice="required", parallel_tool_calls=False, stream=True
    )
    pieces = [delta for chunk in stream for c in chunk.choices for delta in c.delta.tool_calls or []]
    assert pieces[0].function is not None and pieces[0].function.name == "get_weather"
    assert "".join(p.function.arguments or "" for p in pieces if p.function) == call.function.arguments
    assert len(pieces) > 3

    turn = [*ASK, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = api.chat.completions.create(**asked, messages=turn)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None and answer.usage.prompt_tokens > (whole.usage.prompt_tokens if whole.usage else 0)
    assert_idle(pair.prefill, pair.decode)


def test_responses_whole_and_streamed(pair: Pair, api: openai.OpenAI) -> None:
    asked: Any = {"model": "smollm2", "temperature": 0, "max_output_tokens": 60, "input": "Name a colour."}
    whole = api.responses.create(**asked)
    assert whole.output_text and whole.usage is not None
    with api.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text
    schema = {"type": "object", "properties": {"colour": {"type": "string", "maxLength": 12}}, "required": ["colour"]}
    text_format: Any = {"format": {"type": "json_schema", "name": "colour", "schema": schema}}
    parsed = api.responses.create(**asked, text=text_format, reasoning={"effort": "none"})
    assert isinstance(json.loads(parsed.output_text)["colour"], str)
    assert_idle(pair.prefill, pair.decode)


def test_thoughts_that_a_message_begins_are_gone_on_with(pair: Pair, api: openai.OpenAI) -> None:
    """The grammar holds from where the thoughts are closed: here before the model writes anything, or not at all."""
    for content, closed in (("<think>It is easy.</think>", True), ("<think>It is", False)):
        answer = api.chat.completions.create(
            model="smollm2",
            temperature=0,
            max_tokens=12,
            response_format={"type": "json_object"},
            messages=[*ASK, {"role": "assistant", "content": content}],
            extra_body={"continue_final_message": True},
        )
        message = answer.choices[0].message
        thoughts = (message.model_extra or {}).get("reasoning_content")
        assert (message.content or "").lstrip().startswith("{") is closed
        assert (thoughts is None) is closed
    with pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(model="smollm2", messages=ASK, extra_body={"chat_template": "{{ 1 }}"})
    assert refused.value.param == "chat_template"
    assert_idle(pair.prefill, pair.decode)


def strict_events(pair: Pair, body: dict[str, Any]) -> list[Any]:
    """The events of a stream of `/v1/messages` but for pings, each with exactly the types that the SDK has for it."""
    answer = requests.post(f"{pair.url}/v1/messages", json=body | {"stream": True}, timeout=200)
    assert answer.status_code == 200, answer.text
    known: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    events = [event.partition("\ndata: ") for event in answer.text.split("\n\n") if event]
    assert all(name == f"event: {json.loads(data)['type']}" for name, _, data in events)
    return [known.validate_json(data, strict=True) for name, _, data in events if name != "event: ping"]


def deltas(events: list[Any]) -> list[str]:
    """The kinds of deltas, each once, in the order of their first."""
    return list(dict.fromkeys(event.delta.type for event in events if event.type == "content_block_delta"))


@pytest.fixture
def claude(pair: Pair) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=pair.url, api_key="none", max_retries=0, timeout=200) as client:
        yield client


def test_messages_with_a_call_that_must_be(pair: Pair, claude: anthropic.Anthropic) -> None:
    function = WEATHER["function"]
    tool = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}
    asked: Any = {
        "model": "smollm2", "max_tokens": 60, "tools": [tool], "messages": ASK,
        "tool_choice": {"type": "tool", "name": "get_weather"}, "thinking": {"type": "disabled"},
    }  # fmt: skip
    greedy: Any = {"temperature": 0}
    whole = claude.messages.create(**asked, extra_body=greedy)
    (call,) = whole.content
    assert call.type == "tool_use" and (call.name, whole.stop_reason) == ("get_weather", "tool_use")
    assert set(call.input) == {"city", "unit"}

    with claude.messages.stream(**asked, extra_body=greedy) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert [block.to_dict() | {"id": ""} for block in final.content] == [call.to_dict() | {"id": ""}]
    assert json.loads("".join(pieces)) == call.input and len(pieces) > 3
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    events = strict_events(pair, asked | greedy)
    assert deltas(events) == ["input_json_delta"] and events[1].content_block.name == "get_weather"

    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]}
    turn = [*ASK, final.to_param(), result]
    after = claude.messages.create(**asked | {"messages": turn, "tool_choice": {"type": "auto"}}, extra_body=greedy)
    assert after.stop_reason in ("end_turn", "max_tokens", "tool_use")
    assert after.usage.input_tokens + (after.usage.cache_read_input_tokens or 0) > whole.usage.input_tokens
    assert_idle(pair.prefill, pair.decode)


def test_messages_with_thoughts(pair: Pair, claude: anthropic.Anthropic) -> None:
    """The model goes on with thoughts that a message begins, until their budget is used."""
    begun: Any = [*ASK, {"role": "assistant", "content": "<think>It is"}]
    thinking = {"type": "enabled", "budget_tokens": 9}
    asked: Any = {"model": "smollm2", "max_tokens": 40, "messages": begun, "thinking": thinking}
    greedy: Any = {"temperature": 0, "ignore_eos": True}
    whole = claude.messages.create(**asked, extra_body=greedy)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    with claude.messages.stream(**asked, extra_body=greedy) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"thinking", "signature", "text"} <= kinds
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert final.usage.output_tokens_details == whole.usage.output_tokens_details
    assert deltas(strict_events(pair, asked | greedy)) == ["thinking_delta", "signature_delta", "text_delta"]
    assert_idle(pair.prefill, pair.decode)


def test_messages_that_a_stop_sequence_ends(pair: Pair, claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": "smollm2", "max_tokens": 30, "messages": ASK, "thinking": {"type": "disabled"}}
    greedy: Any = {"temperature": 0, "ignore_eos": True}
    (block,) = claude.messages.create(**asked, extra_body=greedy).content
    assert block.type == "text"
    stop = block.text.split()[4]
    asked["stop_sequences"] = ["\0", stop]
    whole = claude.messages.create(**asked, extra_body=greedy)
    with claude.messages.stream(**asked, extra_body=greedy) as stream:
        final = stream.get_final_message()
    for message in (whole, final):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
        assert [one.to_dict() for one in message.content] == [{"type": "text", "text": block.text.partition(stop)[0]}]
    last = strict_events(pair, asked | greedy)[-2]
    assert (last.delta.stop_reason, last.delta.stop_sequence) == ("stop_sequence", stop)
    assert_idle(pair.prefill, pair.decode)
