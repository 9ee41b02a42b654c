"""Which formats the answers of this server's model come in. Made once by `create_app`, from flags and chat template."""

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
    """`tools`: how calls are written, None: the server cannot tell, and answers stay text.

    `thinking`: how thoughts are, None: they are content. `harmony`: one format for both.
    """

    tools: type[ToolFormat] | None = None
    thinking: ReasoningFormat | None = None
    harmony: bool = False

    @classmethod
    def of(cls, serving: ServingConfig, tokenizer: Tokenizer | None) -> ChatFormats:
        """What the flags name; `auto` is looked up in the chat template."""
        template = (tokenizer.chat.text(tools=True) if tokenizer is not None else None) or ""
        tools: str | None = serving.tool_call_parser
        reasoning: str | None = serving.reasoning_parser
        if tools == "auto":
            tools = detect_tools(template)
            log.info("tool calls are read as %s, by the chat template (--tool-call-parser)", tools or "text")
        if reasoning == "auto":
            reasoning = detect_reasoning(template)
            log.info("reasoning is read as %s, by the chat template (--reasoning-parser)", reasoning or "content")
        return cls(
            TOOL_FORMATS[tools] if tools is not None and tools != "none" else None,
            THINKING.get(reasoning) if reasoning is not None else None,
            reasoning == HARMONY,
        )
