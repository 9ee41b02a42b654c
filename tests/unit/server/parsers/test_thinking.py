"""Where thoughts end and answers begin."""

from __future__ import annotations

from typing import get_args

import pytest

from pdserve.config.groups import ReasoningParser, ToolCallParser
from pdserve.server.openai.chat_tools import ParsedAnswer
from pdserve.server.text.chat_formats import REASONING_NAMES, TOOL_NAMES, detect_reasoning, detect_tools
from pdserve.server.text.parsers.thinking import THINKING
from tests.unit.server.parsers.parser_kit import thought_reader, tool_reader, whole


@pytest.mark.parametrize(
    ("name", "inside", "text", "expected"),
    [
        ("qwen3", None, "<think>\nhm, hm\n</think>\n\nYes. ", ParsedAnswer("Yes. ", "hm, hm")),
        ("qwen3", None, "Yes <think>no</think>", ParsedAnswer("Yes <think>no</think>")),
        ("qwen3", True, "hm</think>Yes", ParsedAnswer("Yes", "hm")),
        ("qwen3", False, "<think>x", ParsedAnswer("<think>x")),
        ("qwen3", None, "<think>cut of", ParsedAnswer(None, "cut of")),
        ("qwen3", None, "<thin", ParsedAnswer("<thin")),
        ("qwen3", None, "<think>\n\n</think>\n\nYes", ParsedAnswer("Yes")),
        ("deepseek-r1", True, "<think>hm</think>\nYes", ParsedAnswer("Yes", "hm")),
        ("deepseek-r1", True, "never ends", ParsedAnswer(None, "never ends")),
        ("kimi", None, "◁think▷hm◁/think▷Yes", ParsedAnswer("Yes", "hm")),
        ("mistral", None, "[THINK]hm[/THINK]Yes", ParsedAnswer("Yes", "hm")),
        ("glm45", None, "<think>hm <tool_call>now\n</tool_call>", ParsedAnswer("<tool_call>now\n</tool_call>", "hm")),
    ],
)
def test_thoughts_and_answer(name: str, inside: bool | None, text: str, expected: ParsedAnswer) -> None:
    assert whole(lambda: thought_reader(name, inside), text) == expected


def test_the_prompt_says_whether_thoughts_have_begun() -> None:
    qwen, r1 = THINKING["qwen3"], THINKING["deepseek-r1"]
    for form in (qwen, r1):
        assert form.begins_inside("<|assistant|>\n<think>\n") is True
        assert form.begins_inside("<|assistant|>\n<think>\n\n</think>\n\n") is False
        assert form.begins_inside("<|assistant|>\nI say", "<think>a</think>I say") is False
        assert form.begins_inside("<|assistant|>\n<think>a", "<think>a") is True
    assert qwen.begins_inside("user: <think> please\nassistant:") is None
    assert r1.begins_inside("<|assistant|>\n") is True


def test_harmony_reads_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>think <|end|><|start|>assistant<|channel|>commentary<|message|>Looking.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>more<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    assert whole(lambda: tool_reader("gpt-oss"), text) == ParsedAnswer("Looking.Done.", "think more")


def test_formats_are_found_by_the_chat_template() -> None:
    assert detect_tools("{{ messages }}") is None
    assert detect_tools('<tool_call>\n{"name": ..., "arguments": ...}') == "hermes"
    assert detect_tools("<tool_call>{name}<arg_key>...<arg_value>") == "glm45"
    assert detect_tools("<tool_call><function=f><parameter=p>") == "qwen3_coder"
    assert detect_tools("[TOOL_CALLS] [") == "mistral"
    assert detect_reasoning("{% if '</think>' in content %}") == "qwen3"
    assert detect_reasoning("nothing") is None


def test_the_flags_know_every_format() -> None:
    assert sorted(get_args(ToolCallParser)) == sorted(["auto", "none", *TOOL_NAMES])
    assert sorted(get_args(ReasoningParser)) == sorted(["auto", *REASONING_NAMES])
