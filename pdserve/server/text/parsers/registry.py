"""Reasoning and tool-call formats by name, and their detection from a chat template. Called at server startup.

To add a format, write its class (or its entry in `THINKING`) and register it here.
"""

from __future__ import annotations

from pdserve.server.text.parsers.harmony import Harmony
from pdserve.server.text.parsers.json_formats import DeepSeek, Hermes, KimiK2, Llama3, Mistral
from pdserve.server.text.parsers.pythonic import Pythonic
from pdserve.server.text.parsers.tag_formats import Glm45, Qwen3Coder
from pdserve.server.text.parsers.thinking import THINKING
from pdserve.server.text.parsers.tool_format import ToolFormat

HARMONY = "gpt-oss"

TOOL_FORMATS: dict[str, type[ToolFormat]] = {
    "deepseekv3": DeepSeek,
    "deepseekv31": DeepSeek,
    "glm": Glm45,
    "glm45": Glm45,
    "glm47": Glm45,
    HARMONY: Harmony,
    "hermes": Hermes,
    "kimi_k2": KimiK2,
    "llama3": Llama3,
    "mimo": Hermes,
    "mistral": Mistral,
    "pythonic": Pythonic,
    "qwen": Hermes,
    "qwen25": Hermes,
    "qwen3_coder": Qwen3Coder,
    "step3p5": Qwen3Coder,
}
"""Tool-call formats by SGLang's names."""

_DETECTED = ("gpt-oss", "kimi_k2", "deepseekv3", "glm45", "qwen3_coder", "pythonic", "mistral", "hermes", "llama3")
"""Detection order: formats with unique markup come first."""

TOOL_NAMES = tuple(sorted(TOOL_FORMATS))
REASONING_NAMES = tuple(sorted([*THINKING, HARMONY]))


def detect_tools(template: str) -> str | None:
    """Return the name of the tool-call format that `template` makes models write; None if `template` shows none."""
    for name in _DETECTED:
        if all(mark in template for mark in TOOL_FORMATS[name].template_marks):
            return name
    return None


def detect_reasoning(template: str) -> str | None:
    """Return the name of the reasoning format that `template` makes models write; None if `template` shows none."""
    if "<|channel|>analysis" in template:
        return HARMONY
    for name in ("kimi", "mistral", "qwen3"):
        if THINKING[name].closing in template:
            return name
    return None
