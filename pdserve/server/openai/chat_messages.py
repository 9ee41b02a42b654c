"""Converts messages of a body to the form of chat templates. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from pdserve.errors import RequestError
from pdserve.server.request.schemas import MAX_MESSAGES, ChatBody, ChatMessage, ContentPart, FunctionCall, ToolCall
from pdserve.server.text.chat_template import TemplateFacts

MAX_PARTS = 16384
MAX_VARIABLES = 1024
"""Maximum number of names in `chat_template_kwargs`."""
MAX_SHOWN_BYTES = 1 << 20
"""Maximum bytes of each of tools, documents and variables, which templates write into the prompt as JSON."""


def check_chat_size(body: ChatBody, field: str) -> None:
    """Refuse a body that takes too long to render. Called before the messages are converted.

    `field`: name of the messages in the client's body.

    Raises:
        RequestError: 400 naming `field`, `tools`, `documents` or `chat_template_kwargs`.
    """
    check_num_messages(body.messages, field)
    num_parts = sum(
        len(message.tool_calls or ()) + (len(message.content) if isinstance(message.content, list) else 0)
        for message in body.messages
    )
    if num_parts > MAX_PARTS:
        message = f"{field} hold {num_parts} parts and tool calls, at most {MAX_PARTS} are taken"
        raise RequestError(message, field=field)
    num_variables = len(body.chat_template_kwargs or ())
    if num_variables > MAX_VARIABLES:
        message = f"chat_template_kwargs has {num_variables} names, at most {MAX_VARIABLES} are taken"
        raise RequestError(message, field="chat_template_kwargs")
    for name in ("tools", "documents", "chat_template_kwargs"):
        value = getattr(body, name)
        size = len(msgspec.json.encode(value)) if value else 0
        if size > MAX_SHOWN_BYTES:
            message = f"{name} has {size} bytes of JSON, at most {MAX_SHOWN_BYTES} are taken"
            raise RequestError(message, field=name)


def check_num_messages(messages: Sequence[Any], field: str) -> None:
    """Refuse too many messages, or items that become messages.

    Raises:
        RequestError: 400 naming `field`.
    """
    if len(messages) > MAX_MESSAGES:
        message = f"{field} holds {len(messages)} messages, at most {MAX_MESSAGES} are taken"
        raise RequestError(message, field=field)


def template_messages(messages: Sequence[ChatMessage], facts: TemplateFacts, field: str) -> list[dict[str, Any]]:
    """Convert `messages` of the body's `field` to the form of a template with these `facts`.

    Raises:
        RequestError: 400 naming the message and its field.
    """
    names: dict[str, str] = {}
    made = []
    for position, message in enumerate(messages):
        where = f"{field}[{position}]"
        entry: dict[str, Any] = {"role": _role(message, facts), "content": _content(message, facts, where)}
        name = message.name
        if message.role == "tool" and message.tool_call_id is not None:
            name = name or names.get(message.tool_call_id)
            entry["tool_call_id"] = message.tool_call_id
        if name:
            entry["name"] = name
        reasoning = message.reasoning_content or message.reasoning
        if reasoning:
            entry["reasoning_content"] = reasoning
        if message.tool_calls:
            if message.role != "assistant":
                raise RequestError(f"{where}.tool_calls: only an assistant calls tools", field=f"{where}.tool_calls")
            entry["tool_calls"] = [
                _tool_call(call, facts, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
            ]
            names |= {call.id: call.function.name for call in message.tool_calls if call.id is not None}
        made.append(entry)
    return made


def final_text(message: ChatMessage) -> str:
    """The text of a message that the model continues (`continue_final_message`)."""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text or "" for part in message.content or [])


def _role(message: ChatMessage, facts: TemplateFacts) -> str:
    return "system" if message.role == "developer" and not facts.developer else message.role


def _content(message: ChatMessage, facts: TemplateFacts, where: str) -> str | list[dict[str, Any]]:
    if isinstance(message.content, list):
        texts = [_part_text(part, where) for part in message.content]
    elif message.content is not None:
        texts = [message.content]
    elif message.refusal is not None:
        texts = [message.refusal]
    elif message.role == "assistant":
        texts = []
    else:
        raise RequestError(f"{where}.content is missing", field=f"{where}.content")
    return [{"type": "text", "text": text} for text in texts] if facts.parts else "\n".join(texts)


def _part_text(part: ContentPart, where: str) -> str:
    if part.type == "text" and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    raise RequestError(
        f"{where}.content holds a part of type {part.type!r}; only text is supported",
        field=f"{where}.content",
        code="unsupported",
    )


def _tool_call(call: ToolCall, facts: TemplateFacts, where: str) -> dict[str, Any]:
    if call.type not in (None, "function"):
        raise RequestError(
            f"{where}.type must be 'function', got {call.type!r}", field=f"{where}.type", code="unsupported"
        )
    function = {"name": call.function.name, "arguments": _arguments(call.function, facts)}
    return {**({"id": call.id} if call.id is not None else {}), "type": "function", "function": function}


def _arguments(function: FunctionCall, facts: TemplateFacts) -> str | dict[str, Any]:
    """Convert call arguments to text or an object, as the template expects.

    Text that is not a JSON object stays text: models generate such arguments, and clients send them back.
    """
    arguments = {} if function.arguments in (None, "") else function.arguments
    if facts.text_arguments:
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return value if isinstance(value, dict) else arguments
    assert arguments is not None
    return arguments
