"""Selects the reasoning and tool-call formats of this server's model, from flags and chat template, in `create_app`."""

from __future__ import annotations

import dataclasses
import logging

from pdserve.config.groups import ServingConfig
from pdserve.server.text.parsers.registry import HARMONY, TOOL_FORMATS, detect_reasoning, detect_tools
from pdserve.server.text.parsers.thinking import THINKING, ReasoningFormat
from pdserve.server.text.parsers.tool_format import ToolFormat
from pdserve.server.text.tokenizer import Tokenizer

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
