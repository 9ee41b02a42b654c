"""Converts bodies of Ollama's API to the equivalent chat body. Pure functions."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pdserve.errors import RequestError
from pdserve.server.ollama_api.schemas import (
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaOptions,
)
from pdserve.server.request.schemas import ChatBody, ChatMessage, FunctionCall, ToolCall

NO_LIMIT = (1 << 31) - 1
"""`num_predict` of a body without a limit: what fits the context is generated."""
_NEUTRAL = {"mirostat": 0, "tfs_z": 1.0, "typical_p": 1.0}
_OPTIONS = {
    "seed": "seed",
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "stop": "stop",
}
"""Sampling fields of a chat by the option's name."""
_RENAMED = (
    *((ours, f"options.{theirs}") for theirs, ours in _OPTIONS.items()),
    ("top_k", "options.top_k"), ("max_tokens", "options.num_predict"), ("reasoning_effort", "think"),
)  # fmt: skip
_FORMAT = re.compile(r"\bresponse_format(\.json_schema|\.schema)*(?=\W|$)")


def chat_of(body: OllamaChatBody) -> ChatBody:
    """Convert a body of `/api/chat`.

    Raises:
        RequestError: 400 naming the field.
    """
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(body.messages or ())]
    return _chat(body, messages, tools=body.tools)


def chat_of_prompt(body: OllamaGenerateBody) -> ChatBody:
    """Convert a body of `/api/generate`: the prompt is the user's message.

    Raises:
        RequestError: 400 naming the field.
    """
    system = [ChatMessage(role="system", content=body.system)] if body.system else []
    return _chat(body, [*system, ChatMessage(role="user", content=body.prompt or "")])


def num_predict(body: OllamaBody) -> int:
    """Return the maximum number of output tokens, which is cut to what fits.

    Raises:
        RequestError: 400 naming `options.num_predict`.
    """
    given = body.options.num_predict if body.options is not None else None
    if given is not None and given < -2:
        field = "options.num_predict"
        raise RequestError(f"{field} must be at least -2, got {given}", field=field)
    return NO_LIMIT if given is None or given < 0 else given


@contextlib.contextmanager
def with_ollama_fields(body: OllamaBody) -> Iterator[None]:
    """Rename the chat fields in errors of the block to those of Ollama.

    Raises:
        RequestError: the block's error, with the renamed fields.
    """
    try:
        yield
    except RequestError as error:
        message, field = error.message, error.field or ""
        for ours, theirs in _RENAMED:
            if field == ours:
                message, field = re.sub(rf"\b{ours}\b", theirs, message), theirs
                break
        if body.response_format is None:
            message, field = _FORMAT.sub("format", message), _FORMAT.sub("format", field)
        raise error.renamed(message, field or None) from error


def _chat(body: OllamaBody, messages: Sequence[ChatMessage], **fields: Any) -> ChatBody:
    if body.n not in (None, 1):
        raise RequestError("n must be 1: an answer is one output", field="n")
    shared = body.shared_fields()
    shared |= {"max_tokens": None, "stream": body.stream is not False}
    if body.options is not None:
        shared |= _sampling(body.options)
    response_format = _format(body)
    if response_format is not None:
        shared["response_format"] = response_format
    variables = None if body.think is None else {"enable_thinking": bool(body.think), "thinking": bool(body.think)}
    effort = body.think if isinstance(body.think, str) else None
    return ChatBody(
        **shared, **fields, messages=list(messages), chat_template_kwargs=variables, reasoning_effort=effort
    )


def _sampling(options: OllamaOptions) -> dict[str, Any]:
    for name, neutral in _NEUTRAL.items():
        if getattr(options, name) not in (None, neutral):
            field = f"options.{name}"
            raise RequestError(f"{field} is not supported by this server", field=field, code="unsupported")
    given = {ours: getattr(options, theirs) for theirs, ours in _OPTIONS.items()}
    if options.top_k is not None:
        given["top_k"] = options.top_k or -1
    return {name: value for name, value in given.items() if value is not None}


def _format(body: OllamaBody) -> dict[str, Any] | None:
    """Convert `format` to `response_format`; None: plain text."""
    given = body.format
    if given in (None, ""):
        return None
    if body.response_format is not None:
        raise RequestError("format and response_format cannot be combined", field="format")
    if given == "json":
        return {"type": "json_object"}
    if isinstance(given, dict):
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": given}}
    raise RequestError("format must be 'json' or a JSON schema", field="format")


def _message(message: OllamaMessage, where: str) -> ChatMessage:
    if message.images:
        field = f"{where}.images"
        raise RequestError(f"{field} is not supported by this server", field=field, code="unsupported")
    calls = [
        ToolCall(FunctionCall(call.function.name, call.function.arguments or {}), call.id, "function")
        for call in message.tool_calls or ()
    ]
    return ChatMessage(
        role=message.role,
        content=message.content or "",
        name=message.tool_name if message.role == "tool" else None,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
        reasoning_content=message.thinking,
    )
