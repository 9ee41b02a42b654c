"""What a parser makes of a text does not depend on how the text was cut, whatever the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.server.openai.chat_tools import join_deltas
from pdserve.server.text.chat_formats import TOOL_FORMATS
from pdserve.server.text.parsers.json_formats import JsonArguments, JsonList
from pdserve.server.text.parsers.thinking import THINKING
from pdserve.server.text.parsers.tool_format import ToolFormat
from tests.unit.server.parsers.parser_kit import read, thought_reader, tool_reader
from tests.unit.server.parsers.test_tool_formats import WRITTEN

COMMON = [
    "get_weather", "now", "city", '{"name": "now", "arguments": {}}', '{"name": "get_weather", "parameters": {"a": 1}}',
    '{"arguments": "{}", "name": "now"}', '"', "\\", "{", "}", "[", "]", "(", ")", "=", ",", ";", ":", " ", "\n",
    "null", "'", "1", "é", "🙂", "e\u0301", "<", ">", "<|", "</", "```", "text",
]  # fmt: skip
MARKUP = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "llama3": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
    "deepseekv3": [
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json\n",
    ],
    "qwen3_coder": ["<tool_call>", "<function=", "<parameter=", "</parameter>", "</function>", "</tool_call>"],
    "glm45": ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "kimi_k2": ["<|tool_call_begin|>", "functions.now:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>"],
    "pythonic": ["[now(", "get_weather(", "<|python_start|>", "<|python_end|>", ")]"],
    "gpt-oss": ["<|channel|>", "analysis", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "to=functions.now "],
}  # fmt: skip


def texts(name: str) -> st.SearchStrategy[list[str]]:
    """Texts of a format as pieces: fragments, each whole or cut."""
    written = WRITTEN.get(name, "")
    fragment = st.sampled_from([*COMMON, *MARKUP.get(name, [])])
    part = st.tuples(st.integers(0, len(written)), st.integers(0, len(written))).map(lambda ij: written[ij[0] : ij[1]])
    full = st.lists(st.one_of(fragment, fragment, part), max_size=14).map("".join)
    return st.tuples(full, st.lists(st.integers(0, 200), max_size=12)).map(lambda pair: cut(*pair))


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place for place in places if place < len(text)} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


FORMATS: dict[str, str | type[ToolFormat]] = {
    **{name: name for name in MARKUP},
    "list": JsonList,
    "args": JsonArguments,
}


@pytest.mark.parametrize("name", FORMATS)
def test_calls_and_content_do_not_depend_on_cuts(name: str) -> None:
    kind = FORMATS[name]

    @settings(max_examples=150, deadline=None)
    @given(texts(name))
    def check(pieces: list[str]) -> None:
        assert join_deltas(read(lambda: tool_reader(kind), pieces)) == join_deltas(
            read(lambda: tool_reader(kind), ["".join(pieces)])
        )

    check()


def test_every_format_is_cut_here() -> None:
    assert {TOOL_FORMATS[name] for name in MARKUP} == set(TOOL_FORMATS.values())


@pytest.mark.parametrize("name", ["qwen3", "kimi", "glm45"])
@pytest.mark.parametrize("inside", [None, True, False])
def test_reasoning_does_not_depend_on_cuts(name: str, inside: bool | None) -> None:
    form = THINKING[name]
    fragment = st.sampled_from([form.opening, form.closing, *form.calls, " ", "\n", "thought", "é", "🙂", "<", "</"])

    @settings(max_examples=100, deadline=None)
    @given(st.lists(fragment, max_size=12).map("".join), st.lists(st.integers(0, 100), max_size=10))
    def check(text: str, places: list[int]) -> None:
        def made(pieces: list[str]) -> object:
            return join_deltas(read(lambda: thought_reader(name, inside), pieces))

        assert made(cut(text, places)) == made([text])

    check()
