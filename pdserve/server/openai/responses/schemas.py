"""Bodies of `/v1/responses` as typed structs."""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.server.request.field_types import Input, ResponsesToolChoice
from pdserve.server.request.schemas import UNSUPPORTED_OPENAI, OpenAIBody

STATEFUL = ("conversation", "prompt")
"""Fields of server-side state that is not stored here."""
UNSUPPORTED_RESPONSES = (*STATEFUL, *UNSUPPORTED_OPENAI, "prompt_logprobs")


class ReasoningFields(msgspec.Struct):
    """`reasoning`: the reasoning effort. Reasoning is returned in full, never as a summary."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFields(msgspec.Struct):
    """`text`: the format of the output."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(OpenAIBody):
    """Body of `POST /v1/responses`."""

    input: Input = None
    previous_response_id: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ResponsesToolChoice = None
    parallel_tool_calls: bool | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    max_tool_calls: int | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    pdserve_history: list[dict[str, Any]] | None = None
    """The items of the conversation before `input`, from the store of a router or of this server."""


class Part(msgspec.Struct):
    """A part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class MessageItem(msgspec.Struct):
    """A message of the conversation."""

    role: str
    content: str | list[Part]
    type: str = "message"


class CallItem(msgspec.Struct):
    """A function call by the model."""

    call_id: str
    name: str
    arguments: str


class CallOutputItem(msgspec.Struct):
    """The output of a function call."""

    call_id: str
    output: str | list[Part]


class ReasoningItem(msgspec.Struct):
    """Reasoning of an earlier turn. Encrypted reasoning is another server's and is ignored."""

    content: list[Part] | None = None
    summary: list[Part] | None = None


class FunctionTool(msgspec.Struct):
    """A function tool."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
