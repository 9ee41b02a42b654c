"""Every tool-call format on what its models write, and on what they should not."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.server.openai.chat_tools import ParsedAnswer
from pdserve.server.text.chat_formats import TOOL_FORMATS
from pdserve.server.text.parsers.feed import CallArguments
from pdserve.server.text.parsers.json_formats import JsonArguments, JsonList
from tests.unit.server.parsers.parser_kit import calls, read, tool_reader, whole

PARIS = ("get_weather", {"city": "Paris"})
TWO = [PARIS, ("now", {})]
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

WRITTEN = {
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now"}\n</tool_call>'
    ),
    "llama3": (
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}'
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]'
    ),
    "deepseekv3": (
        f'<｜tool▁calls▁begin｜>{BEGIN}function{SEP}get_weather\n```json\n{{"city": "Paris"}}\n```{END}\n'
        f"{BEGIN}function{SEP}now\n```json\n{{}}\n```{END}<｜tool▁calls▁end｜>"
    ),
    "deepseekv31": (
        f'<｜tool▁calls▁begin｜>{BEGIN}get_weather{SEP}{{"city": "Paris"}}{END}'
        f"{BEGIN}now{SEP}{{}}{END}<｜tool▁calls▁end｜>"
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "glm45": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>\n"
        "<tool_call>now\n</tool_call>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "pythonic": '[get_weather(city="Paris"), now()]',
    "gpt-oss": (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Paris"}<|call|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>'
    ),
}
"""The same two calls, in each format."""


@pytest.mark.parametrize("name", WRITTEN)
def test_two_calls(name: str) -> None:
    made = whole(lambda: tool_reader(name), WRITTEN[name])
    assert calls(made) == TWO
    assert (made.content, made.reasoning) == (None, None)


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"gpt-oss"}))
def test_text_before_calls_is_content_without_the_space_between(name: str) -> None:
    made = whole(lambda: tool_reader(name), "Let me <look>. [1] {x}\n\n" + WRITTEN[name])
    assert (made.content, calls(made)) == ("Let me <look>. [1] {x}", TWO)


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "plain text\n",
        '{"a": 1}',
        "[1, 2]",
        "x < y [get",
        '{"name": "Bob", "age": 5}',
        "<|x|> 🙂 e\u0301 世界  ",
    ],
)
def test_text_without_calls_stays_as_it_is(name: str, text: str) -> None:
    assert whole(lambda: tool_reader(name), text) == ParsedAnswer(content=text or None)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_text_cut_off_anywhere_shows_no_markup(name: str) -> None:
    text = WRITTEN[name]
    for size in range(len(text)):
        made = whole(lambda: tool_reader(name), text[:size])
        assert len(made.calls) <= 2
        # What may still be ordinary text is shown: a beginning of the first marker, or of a bare call.
        shown = made.content or ""
        assert text.startswith(shown)
        assert not shown or (made.calls == [] and len(shown) < 30)


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"pythonic"}))
def test_arguments_come_in_pieces(name: str) -> None:
    long = WRITTEN[name].replace("Paris", "Llanfairpwllgwyngyll " * 20)
    pieces = read(lambda: tool_reader(name), [long[i : i + 7] for i in range(0, len(long), 7)])
    assert sum(isinstance(piece, CallArguments) and piece.index == 0 for piece in pieces) > 20


ODD: list[tuple[str, str, Any, str | None]] = [
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', [PARIS], None),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        [PARIS],
        None,
    ),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call> done', [("now", {})], "done"),
    ("hermes", '<tool_call>{"name": "other", "arguments": {"a": [1, "}"]}}', [("other", {"a": [1, "}"]})], None),
    ("hermes", 'a <tool_call>{"name": "now"}</tool_call> b', [("now", {})], "a  b"),
    ("hermes", "The tag <tool_call> opens a call.", [], "The tag <tool_call> opens a call."),
    ("hermes", '<tool_call><tool_call>{"name": "now"}</tool_call>', [("now", {})], "<tool_call>"),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', [], '<tool_call>{"name": 5}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', [("\ufffd", {})], None),
    ("llama3", '{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS], None),
    ("llama3", '{"type": "function", "name": "now", "parameters": {}}', [("now", {})], None),
    ("llama3", '{"name": "unknown", "parameters": {}}', [], '{"name": "unknown", "parameters": {}}'),
    ("llama3", "<|python_tag|>print(1)", [], "<|python_tag|>print(1)"),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}', TWO, None),
    ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{"city": "Paris"}', [PARIS], None),
    ("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}', [PARIS], None),
    ("mistral", '[TOOL_CALLS]{"name": "now"}', [("now", {})], None),
    ("pythonic", "[now(), oops", [("now", {})], None),
    ("pythonic", "[get_weather('Paris')]", [PARIS], None),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", [("now", {})], None),
    ("pythonic", "[get_weather(city=x)]", [], "[get_weather(city=x)]"),
    (
        "pythonic",
        "[get_weather(city='a)\\'(', days=-3, exact=true, tags=[None, {'k': (1, 2)}])]",
        [("get_weather", {"city": "a)'(", "days": -3, "exact": True, "tags": [None, {"k": [1, 2]}]})],
        None,
    ),
    ("kimi_k2", "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>", [("now", {})], None),
    ("deepseekv3", f"{BEGIN} is a token", [], None),
    ("gpt-oss", "no channels", [], "no channels"),
]


@pytest.mark.parametrize(("name", "text", "expected", "content"), ODD)
def test_odd_calls(name: str, text: str, expected: Any, content: str | None) -> None:
    made = whole(lambda: tool_reader(name), text)
    assert (calls(made), made.content) == (expected, content)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=get_weather><parameter=city>\n7\n\n</parameter><parameter=days>\n7\n</parameter>"
        "<parameter=exact>True</parameter><parameter=tags>['a', \"b\"]</parameter><parameter=note>null</parameter>"
        "<parameter=free>[1]</parameter></function></tool_call>",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>7\n</arg_value><arg_key>days</arg_key><arg_value>7"
        "</arg_value><arg_key>exact</arg_key><arg_value>True</arg_value><arg_key>tags</arg_key>"
        "<arg_value>['a', \"b\"]</arg_value><arg_key>note</arg_key><arg_value>null</arg_value>"
        "<arg_key>free</arg_key><arg_value>[1]</arg_value></tool_call>",
    ],
)
def test_plain_values_become_json_by_the_declared_types(text: str) -> None:
    name = "qwen3_coder" if "<function" in text else "glm45"
    expected = {"city": "7\n", "days": 7, "exact": True, "tags": ["a", "b"], "note": None, "free": [1]}
    assert calls(whole(lambda: tool_reader(name), text)) == [("get_weather", expected)]


def test_tags_that_are_left_out_still_end_a_value() -> None:
    text = '<function=get_weather><parameter=city>a "b" \\ 世<parameter=days>x</function> after'
    made = whole(lambda: tool_reader("qwen3_coder"), text)
    assert calls(made) == [("get_weather", {"city": 'a "b" \\ 世', "days": "x"})]
    assert made.content == "after"


def test_kimi_keeps_its_ids() -> None:
    assert [call.id for call in whole(lambda: tool_reader("kimi_k2"), WRITTEN["kimi_k2"]).calls] == [
        "functions.get_weather:0",
        "functions.now:1",
    ]


def test_what_grammars_make_models_write() -> None:
    text = ' [{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name":"now","parameters":{}}]\n'
    assert calls(whole(lambda: tool_reader(JsonList), text)) == TWO
    made = whole(lambda: tool_reader(JsonArguments), ' {"city": "Paris"} ')
    assert calls(made) == [PARIS]
    assert whole(lambda: tool_reader(JsonList), "no list") == ParsedAnswer(content="no list")
    assert whole(lambda: tool_reader(JsonArguments), " ") == ParsedAnswer()
