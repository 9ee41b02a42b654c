"""Reasoning and tool-call formats by name, their detection from a chat template, and the choice for this server.

To add a format, write its class (or its entry in `THINKING`) and register it here. Called by `create_app`.
"""

from __future__ import annotations

import dataclasses
import logging

from pdserve.config.groups import ServingConfig
from pdserve.server.text.parsers.json_formats import DeepSeek, Hermes, KimiK2, Llama3, Mistral
from pdserve.server.text.parsers.pythonic import Pythonic
from pdserve.server.text.parsers.tag_formats import Glm45, Harmony, Qwen3Coder
from pdserve.server.text.parsers.thinking import THINKING, ReasoningFormat
from pdserve.server.text.parsers.tool_format import ToolFormat
from pdserve.server.text.tokenizer import Tokenizer

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


log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ChatFormats:
    """Formats of a model's output.

    `tools`: the tool-call format; None: unknown, so calls remain content. `thinking`: the reasoning format; None:
    reasoning remains content. `harmony`: the gpt-oss format, which covers both.
    """

    tools: type[ToolFormat] | None = None
    thinking: ReasoningFormat | None = None
    harmony: bool = False

    @property
    def reasons(self) -> bool:
        """Whether the model has a known reasoning format."""
        return self.thinking is not None or self.harmony

    @classmethod
    def of(cls, serving: ServingConfig, tokenizer: Tokenizer | None) -> ChatFormats:
        """Select the formats that the flags name; `auto` detects them from the chat template."""
        template = (tokenizer.chat.text(tools=True) if tokenizer is not None else None) or ""
        tools: str | None = serving.tool_call_parser
        reasoning: str | None = serving.reasoning_parser
        if tools == "auto":
            tools = detect_tools(template)
            log.info("tool-call parser from the chat template: %s (--tool-call-parser)", tools or "none")
        if reasoning == "auto":
            reasoning = detect_reasoning(template)
            log.info("reasoning parser from the chat template: %s (--reasoning-parser)", reasoning or "none")
        return cls(
            TOOL_FORMATS[tools] if tools is not None and tools != "none" else None,
            THINKING.get(reasoning) if reasoning is not None else None,
            reasoning == HARMONY,
        )
