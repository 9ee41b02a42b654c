"""Tools and reasoning in chat completions, as the real client sees them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from pdserve.protocol.messages import FinishReason
from pdserve.server.openai.chat import delta_fields
from pdserve.server.openai.chat_tools import ChatReader, ReadPlan, ReasoningCounter
from pdserve.server.text.parsers.json_formats import Hermes
from pdserve.server.text.parsers.thinking import THINKING
from pdserve.server.text.tokenizer import Tokenizer, read_template
from tests.unit.server.chat_kit import ASK, HERMES, NOW, WEATHER, long_context, openai_bench
from tests.unit.server.server_kit import tiny_tokenizer, token_ids

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120), pytest.mark.usefixtures("long_context")]
__all__ = ["long_context"]
TOOLS: Any = [WEATHER, NOW]


async def streamed(client: Any, **asked: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message that the chunks of a stream make, put together as OpenAI's documents say, and the chunks."""
    made: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    chunks = [chunk async for chunk in await client.chat.completions.create(model="tiny", stream=True, **asked)]
    for chunk in chunks:
        for choice in chunk.choices:
            made["content"] += choice.delta.content or ""
            made["reasoning"] += (choice.delta.model_extra or {}).get("reasoning_content") or ""
            made["finish"] = choice.finish_reason or made["finish"]
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    assert (call.index, call.type) == (len(made["calls"]), "function")
                    made["calls"].append([call.function.name, ""])
                else:
                    assert (call.type, call.function.name) == (None, None)
                made["calls"][call.index][1] += call.function.arguments
    return made, chunks


async def test_calls_come_whole_and_in_pieces(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, HERMES, tool_call_parser="hermes") as (_, client):
        answer = await client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.content, choice.message.refusal) == (
            "tool_calls", "Let me see 🙂.", None,
        )  # fmt: skip
        calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls]
        assert calls == [["get_weather", '{"city": "東京 e\u0301"}'], ["now", "{}"]]
        ids = [call.id for call in choice.message.tool_calls]
        assert len(set(ids)) == 2 and all(call_id.startswith("call_") for call_id in ids)

        made, chunks = await streamed(client, messages=ASK, tools=TOOLS)
        assert made == {"content": "Let me see 🙂.", "reasoning": "", "calls": calls, "finish": "tool_calls"}
        assert all("tool_call>" not in chunk.model_dump_json().replace("tool_calls", "") for chunk in chunks)
        assert all("\ufffd" not in chunk.model_dump_json() for chunk in chunks)


async def test_deltas_of_single_characters_have_openai_s_shape() -> None:
    reader = ChatReader(ReadPlan({"get_weather": {}, "now": {}}, Hermes))
    deltas = [delta_fields(reader.push(char)) for char in HERMES]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    opened = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]["name"]) for call in opened] == [
        (0, "function", "get_weather"),
        (1, "function", "now"),
    ]
    assert all(set(call) == {"index", "function"} for call in calls if "id" not in call)
    arguments = ["".join(call["function"]["arguments"] for call in calls if call["index"] == i) for i in (0, 1)]
    assert arguments == ['{"city": "東京 e\u0301"}', "{}"]
    assert len(calls) > 10 and reader.called


async def test_the_client_s_own_helpers_understand_streamed_calls(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, HERMES, tool_call_parser="hermes") as (_, client):
        async with client.chat.completions.stream(model="tiny", messages=ASK, tools=TOOLS) as stream:
            final = await stream.get_final_completion()
        message = final.choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["get_weather", "now"]
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "東京 e\u0301"}


async def test_only_one_call_where_the_client_wants_one(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, HERMES, tool_call_parser="hermes") as (_, client):
        answer = await client.chat.completions.create(
            model="tiny", messages=ASK, tools=TOOLS, parallel_tool_calls=False
        )
        assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["get_weather"]


@pytest.mark.parametrize(("serving", "asked"), [
    ({"tool_call_parser": "hermes"}, {"tools": TOOLS, "tool_choice": "none"}),
    ({"tool_call_parser": "hermes"}, {}),
    ({"tool_call_parser": "none"}, {"tools": TOOLS}),
    ({}, {"tools": TOOLS}),
])  # fmt: skip
async def test_without_tools_or_a_known_format_it_is_text(tokenizer: Tokenizer, serving: Any, asked: Any) -> None:
    async with openai_bench(tokenizer, HERMES, **serving) as (_, client):
        answer = await client.chat.completions.create(model="tiny", messages=ASK, **asked)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (HERMES, "stop")
        assert answer.choices[0].message.tool_calls is None


async def test_a_call_that_is_cut_off_ends_with_length(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, HERMES, tool_call_parser="hermes") as (b, client):
        size = len(token_ids(tokenizer, HERMES[: HERMES.index("東")]))
        answer = await client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS, max_tokens=size)
        choice = answer.choices[0]
        assert choice.finish_reason == "length"
        assert [call.function.arguments for call in choice.message.tool_calls] == ['{"city": "']
        made, _ = await streamed(client, messages=ASK, tools=TOOLS, max_tokens=size)
        assert (made["calls"], made["finish"]) == ([["get_weather", '{"city": "']], "length")
        assert b.scheduler.requests[0].sampling.grammar is None


async def test_a_required_call_is_demanded_by_a_grammar(tokenizer: Tokenizer) -> None:
    text = '[{"name": "get_weather", "parameters": {"city": "Rome"}}]'
    async with openai_bench(tokenizer, text) as (b, client):
        answer = await client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS, tool_choice="required")
        assert answer.choices[0].finish_reason == "tool_calls"
        call = answer.choices[0].message.tool_calls[0].function
        assert (call.name, call.arguments) == ("get_weather", '{"city": "Rome"}')
        made, _ = await streamed(client, messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        assert (made["calls"], made["content"]) == ([["get_weather", '{"city": "Rome"}']], "")
        schemas = [json.loads(request.sampling.grammar.text) for request in b.scheduler.requests]
        assert [schema.get("maxItems") for schema in schemas] == [None, 1]
        assert [option["properties"]["name"] for option in schemas[0]["items"]["anyOf"]] == [
            {"const": "get_weather"}, {"const": "now"},
        ]  # fmt: skip


async def test_a_named_call_is_its_arguments(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, '{"city": "Rome"}') as (b, client):
        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        made, _ = await streamed(client, messages=ASK, tools=TOOLS, tool_choice=named)
        assert made == {
            "content": "", "reasoning": "", "calls": [["get_weather", '{"city": "Rome"}']], "finish": "tool_calls",
        }  # fmt: skip
        assert json.loads(b.scheduler.requests[0].sampling.grammar.text)["required"] == ["city"]


async def test_reasoning_comes_apart_and_is_counted(tokenizer: Tokenizer) -> None:
    text = "<think>\nhm 世\n</think>\n\nYes."
    async with openai_bench(tokenizer, text, reasoning_parser="qwen3") as (_, client):
        answer = await client.chat.completions.create(model="tiny", messages=ASK)
        message = answer.choices[0].message
        assert (message.content, message.model_extra["reasoning_content"]) == ("Yes.", "hm 世")
        thoughts = len(token_ids(tokenizer, "<think>\nhm 世\n</think>"))
        assert answer.usage.completion_tokens_details.reasoning_tokens == thoughts
        made, chunks = await streamed(client, messages=ASK, stream_options={"include_usage": True})
        assert (made["content"], made["reasoning"]) == ("Yes.", "hm 世")
        assert chunks[-1].usage == answer.usage

        whole = await client.chat.completions.create(
            model="tiny", messages=ASK, extra_body={"separate_reasoning": False}
        )
        assert whole.choices[0].message.content == text
        _, chunks = await streamed(client, messages=ASK, extra_body={"stream_reasoning": False})
        deltas = [chunk.choices[0].delta.model_extra or {} for chunk in chunks]
        assert [delta["reasoning_content"] for delta in deltas if delta["reasoning_content"]] == ["hm 世"]


@pytest.mark.parametrize(
    ("name", "inside", "text", "thoughts"),
    [
        ("qwen3", None, " <think>hm</think>yes", " <think>hm</think>"),
        ("qwen3", None, "<think>hm", "<think>hm"),
        ("qwen3", None, "<th", ""),
        ("qwen3", None, "yes <think>no</think>", ""),
        ("qwen3", True, "hm 世</think>yes</think>", "hm 世</think>"),
        ("qwen3", False, "<think>hm</think>", ""),
        ("glm45", None, "<think>hm<tool_call>now", "<think>hm<tool_call>"),
    ],
)
async def test_tokens_of_thoughts_are_counted_as_they_come(
    tokenizer: Tokenizer, name: str, inside: bool | None, text: str, thoughts: str
) -> None:
    plan = ReadPlan(thinking=THINKING[name], inside=inside)
    counter = ReasoningCounter(tokenizer, plan)
    ids = token_ids(tokenizer, text)
    counts = [counter.count(ids[:size]) for size in range(len(ids) + 1)]
    assert counts == sorted(counts)
    assert counts[-1] == ReasoningCounter(tokenizer, plan).count(ids) == len(token_ids(tokenizer, thoughts))


async def test_the_prompt_says_that_thoughts_have_begun_or_are_not_wanted(tokenizer: Tokenizer) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{{ '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' }}{{ reasoning_effort }}"
    )
    serving = {"reasoning_parser": "qwen3", "trust_request_chat_template": True}
    async with openai_bench(tokenizer, "hm</think>\nYes", **serving) as (b, client):
        own: dict[str, Any] = {"chat_template": template.replace("{{ reasoning_effort }}", "")}
        answer = await client.chat.completions.create(model="tiny", messages=ASK, extra_body=own)
        message = answer.choices[0].message
        assert (message.content, message.model_extra["reasoning_content"]) == ("Yes", "hm")
        off = {**own, "chat_template_kwargs": {"enable_thinking": False}}
        answer = await client.chat.completions.create(model="tiny", messages=ASK, extra_body=off)
        assert answer.choices[0].message.content == "hm</think>\nYes"
        answer = await client.chat.completions.create(
            model="tiny", messages=ASK, reasoning_effort="none", extra_body=own
        )
        assert answer.choices[0].message.content == "hm</think>\nYes"
        await client.chat.completions.create(
            model="tiny", messages=ASK, reasoning_effort="high", extra_body={"chat_template": template}
        )
        assert tokenizer.decode(b.scheduler.requests[-1].input_ids) == "hi<think>\nhigh"


async def test_reasoning_then_calls_then_grammar(tokenizer: Tokenizer) -> None:
    serving = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    async with openai_bench(tokenizer, f"<think>hm <tool_call></think>{HERMES}", **serving) as (_, client):
        made, _ = await streamed(client, messages=ASK, tools=TOOLS)
        assert (made["reasoning"], made["content"], len(made["calls"])) == ("hm <tool_call>", "Let me see 🙂.", 2)
    async with openai_bench(tokenizer, '<think>hm</think>\n[{"name": "now", "parameters": {}}]', **serving) as (
        b,
        client,
    ):
        made, _ = await streamed(client, messages=ASK, tools=TOOLS, tool_choice="required")
        assert (made["reasoning"], made["calls"]) == ("hm", [["now", "{}"]])
        grammar = b.scheduler.requests[0].sampling.grammar
        assert grammar is not None and grammar.kind == "structural_tag"


async def test_past_calls_are_shown_to_the_model(tokenizer: Tokenizer) -> None:
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "é"}'}},
                {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{broken"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "night"}]},
    ]
    with_tools = tiny_tokenizer(read_template("hermes"))
    async with openai_bench(with_tools, HERMES) as (b, client):
        answer = await client.chat.completions.create(model="tiny", messages=messages, tools=[NOW], max_tokens=200)
        assert answer.choices[0].finish_reason == "tool_calls", "the format is found by the template"
        prompt = with_tools.decode(b.scheduler.requests[0].input_ids, skip_special=False)
        assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
        assert '\n{"type": "function", "function": {"name": "now", "parameters": {' in prompt
        assert prompt.endswith(
            "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
            '<tool_call>\n{"name": "now", "arguments": {"zone": "é"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "now", "arguments": {broken}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\nnoon\n</tool_response>\n<tool_response>\nnight\n</tool_response>"
            "<|im_end|>\n<|im_start|>assistant\n"
        )


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
    ({"tools": [NOW, NOW]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": 7}}}}}],
         "tool_choice": "required"},
        "tools",
    ),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"documents": [1]}, "documents[0]"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
     "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "x", "function": {"name": "f"}}]}]},
     "messages[0].tool_calls[0].type"),
]  # fmt: skip


async def test_bad_tools_are_named(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, "x") as (_, client):
        for body, param in BAD:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="tiny", messages=ASK, extra_body=body)
            assert caught.value.param == param, body


async def test_a_request_s_own_template_that_is_broken_is_refused(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, "x", trust_request_chat_template=True) as (_, client):
        for template in ("{% if", "{{ raise_exception('no') }}", "{{ messages.__class__.__mro__ }}", "{{ 1 / 0 }}"):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="tiny", messages=ASK, extra_body={"chat_template": template})
            assert caught.value.param == "messages", template


async def test_usage_in_every_chunk_where_it_is_wanted(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, "one two") as (_, client):
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        _, chunks = await streamed(client, messages=ASK, stream_options=options)
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == counts[-2] > 2
        assert len({chunk.system_fingerprint for chunk in chunks}) == 1


async def test_fields_that_openai_s_clients_send_do_no_harm(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, "ok") as (_, client):
        answer = await client.chat.completions.create(
            model="tiny", messages=ASK, service_tier="auto", store=True, metadata={"a": "b"}, user="me",
            prompt_cache_key="k", safety_identifier="s", modalities=["text"], verbosity="medium", seed=1, n=2,
            logprobs=True, top_logprobs=1, max_completion_tokens=9,
        )  # fmt: skip
        assert [choice.message.content for choice in answer.choices] == ["ok", "ok"]
        assert answer.choices[0].logprobs.content[0].top_logprobs[0].logprob == -0.5


async def test_an_aborted_answer_is_no_tool_call(tokenizer: Tokenizer) -> None:
    async with openai_bench(tokenizer, HERMES, tool_call_parser="hermes") as (b, client):
        b.scheduler.script = lambda request: FinishReason(type="abort", message="by request", status_code=499)
        answer = await client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
        assert answer.choices[0].message.content == ""
