"""Bodies of Ollama's API as typed structs."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from pdserve.server.request.schemas import MAX_MESSAGES, UNSUPPORTED_OPENAI, OpenAIBody, ToolSpec

UNSUPPORTED_OLLAMA = (
    *UNSUPPORTED_OPENAI,
    "context", "images", "logprobs", "prompt_logprobs", "suffix", "template", "top_logprobs",
)  # fmt: skip


class OllamaOptions(msgspec.Struct):
    """`options`: sampling fields. Options for loading a model (`num_ctx`, `num_gpu`, ...) are ignored."""

    seed: int | None = None
    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    mirostat: int | None = None
    tfs_z: float | None = None
    typical_p: float | None = None


class OllamaFunction(msgspec.Struct):
    """Function and arguments of a past tool call."""

    name: str
    arguments: dict[str, Any] | None = None


class OllamaToolCall(msgspec.Struct):
    """A tool call of an earlier assistant message."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct):
    """One message of a conversation. `tool_name`: the tool whose result the message is."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaBody(OpenAIBody):
    """Fields that `/api/chat` and `/api/generate` share. `stream` null: true."""

    format: Annotated[Any, msgspec.Meta(extra_json_schema={"anyOf": [{"type": ["string", "object", "null"]}]})] = None
    options: OllamaOptions | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None


class OllamaChatBody(OllamaBody):
    """`POST /api/chat`."""

    messages: Annotated[list[OllamaMessage], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    tools: list[ToolSpec] | None = None


class OllamaGenerateBody(OllamaBody):
    """`POST /api/generate`. `raw`: the prompt is used without the chat template."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaShowBody(msgspec.Struct):
    """`POST /api/show`. Older clients call `model` `name`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
