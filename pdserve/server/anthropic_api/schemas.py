"""Bodies of Anthropic's Messages API as typed structs. Content blocks are converted by `to_chat`, by their type."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from pdserve.server.request.schemas import MAX_MESSAGES, UNSUPPORTED_OPENAI, OpenAIBody

UNSUPPORTED_MESSAGES = ("container", "fallbacks", "mcp_servers", *UNSUPPORTED_OPENAI, "prompt_logprobs")

Blocks = str | list[dict[str, Any]]
"""A text, or content blocks."""


class MessageParam(msgspec.Struct):
    """One turn of a conversation; `role` is `user`, `assistant` or `system`."""

    role: str
    content: Blocks


class ToolParam(msgspec.Struct):
    """A tool that the client runs. `type` null: `custom`; all other types are tools of Anthropic."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceParam(msgspec.Struct):
    """`tool_choice`: `type` is `auto`, `any`, `tool` or `none`; `name` is the tool's."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(msgspec.Struct):
    """`thinking`: `type` is `enabled`, `adaptive`, `between_tools` or `disabled`."""

    type: str
    budget_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    display: str | None = None


class MetadataParam(msgspec.Struct):
    """`metadata`: the client's user."""

    user_id: str | None = None


class OutputConfigParam(msgspec.Struct):
    """`output_config`: the reasoning effort, and the format of the output."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesBody(OpenAIBody):
    """Body of `POST /v1/messages` and `/v1/messages/count_tokens`; `max_tokens` is required by the former."""

    messages: Annotated[list[MessageParam], msgspec.Meta(max_length=MAX_MESSAGES)] = msgspec.field(default_factory=list)
    system: Blocks | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    stop_sequences: list[str] | None = None
    thinking: ThinkingParam | None = None
    metadata: MetadataParam | None = None
    output_config: OutputConfigParam | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TextBlock(msgspec.Struct):
    """A text of any role."""

    text: str


class ThinkingBlock(msgspec.Struct):
    """Reasoning of an earlier assistant turn. Its signature is not checked."""

    thinking: str


class ToolUseBlock(msgspec.Struct):
    """A tool call of an earlier assistant turn."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct):
    """The result of a tool call, in a user turn."""

    tool_use_id: str
    content: Blocks | None = None
    is_error: bool | None = None
