"""The formats by name, and which of them a chat template makes models write. Called when the server starts.

To add one, write its class (or its line in `THINKING`) and name it here.
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
"""By SGLang's names."""

_DETECTED = ("gpt-oss", "kimi_k2", "deepseekv3", "glm45", "qwen3_coder", "pythonic", "mistral", "hermes", "llama3")
"""In this order: markup that only one format has comes first."""

TOOL_NAMES = tuple(sorted(TOOL_FORMATS))
REASONING_NAMES = tuple(sorted([*THINKING, HARMONY]))


def detect_tools(template: str) -> str | None:
    """The name of the tool format that `template` makes models write; None where it shows none."""
    for name in _DETECTED:
        if all(mark in template for mark in TOOL_FORMATS[name].template_marks):
            return name
    return None


def detect_reasoning(template: str) -> str | None:
    """The name of the reasoning format that `template` makes models write; None where it shows none."""
    if "<|channel|>analysis" in template:
        return HARMONY
    for name in ("kimi", "mistral", "qwen3"):
        if THINKING[name].closing in template:
            return name
    return None
