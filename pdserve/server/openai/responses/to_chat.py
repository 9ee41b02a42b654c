"""Converts a responses body to the equivalent chat body, and field names in its errors back. Pure functions."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pdserve.errors import RequestError
from pdserve.server.http.json_http import convert
from pdserve.server.openai.chat import check_num_messages
from pdserve.server.openai.responses.schemas import (
    CallItem,
    CallOutputItem,
    FunctionTool,
    MessageItem,
    Part,
    ReasoningItem,
    ResponsesBody,
)
from pdserve.server.request.schemas import (
    ChatBody,
    ChatMessage,
    FunctionCall,
    FunctionSpec,
    ToolCall,
    ToolSpec,
)

LOGPROBS = "message.output_text.logprobs"
_RENAMED = (
    (re.compile(r"(\btools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"\btool_choice\.allowed_tools\.tools\b"), "tool_choice.tools"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"\bmax_tokens\b"), "max_output_tokens"),
)
"""Pairs of a field's name in chat completions and its name in responses."""
_RESPONSE_FORMAT = (re.compile(r"\bresponse_format(\.json_schema|\.schema)?(?=\W|$)"), "text.format")


def to_chat(body: ResponsesBody) -> ChatBody:
    """Convert `body` to a chat body.

    Raises:
        RequestError: 400 naming the field.
    """
    if body.n not in (None, 1):
        raise RequestError("n must be 1: a response has one output", field="n")
    if body.truncation not in (None, "disabled"):
        raise RequestError("truncation: only 'disabled' is supported", field="truncation", code="unsupported")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise RequestError("text.verbosity is not supported", field="text.verbosity", code="unsupported")
    shared = body.shared_fields()
    shared["max_tokens"] = body.max_output_tokens
    response_format = _response_format(body)
    if response_format is not None:
        if body.response_format is not None:
            message = "text.format and response_format cannot be combined: a response has one format"
            raise RequestError(message, field="response_format")
        shared["response_format"] = response_format
    chat = ChatBody(
        **shared,
        messages=_messages(body),
        logprobs=LOGPROBS in (body.include or ()) or bool(body.top_logprobs),
        top_logprobs=body.top_logprobs,
        tools=_tools(body.tools),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        message = f"max_output_tokens must be at least 1, got {body.max_output_tokens}"
        raise RequestError(message, field="max_output_tokens")
    return chat


@contextlib.contextmanager
def with_fields_of(body: ResponsesBody) -> Iterator[None]:
    """Rename the chat fields in errors of the block to the fields of `body`.

    Raises:
        RequestError: the block's error, with the renamed fields.
    """
    try:
        yield
    except RequestError as error:
        renamed = _RENAMED if body.response_format is not None else (*_RENAMED, _RESPONSE_FORMAT)
        own = error.renamed(error.message, "input") if error.field == "messages" else error
        raise own.with_names(renamed) from error


def _messages(body: ResponsesBody) -> list[ChatMessage]:
    given, history = body.input, body.pdserve_history or []
    if isinstance(given, str | list):
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        check_num_messages([*history, *items], "input")
        made = _from_items([*history, *items], len(history))
    else:
        raise RequestError(f"input must be a string or a list, got {type(given).__name__}", field="input")
    first = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    return [*first, *made]


def _from_items(items: Sequence[Any], num_history: int) -> list[ChatMessage]:
    """Convert items to messages. Reasoning, text and calls of one assistant turn become one message.

    The first `num_history` items are those of the conversation that the request continues.
    """
    made: list[ChatMessage] = []
    turn: ChatMessage | None = None
    for position, item in enumerate(items):
        where = "previous_response_id" if position < num_history else f"input[{position - num_history}]"
        if not isinstance(item, dict):
            raise RequestError(f"{where} must be an object, got {type(item).__name__}", field=where)
        kind = item.get("type", "message")
        if (kind == "message" and item.get("role") != "assistant") or kind == "function_call_output":
            turn = None
            made.append(_message(item, where) if kind == "message" else _call_output(item, where))
            continue
        if kind not in ("message", "function_call", "reasoning"):
            raise RequestError(f"{where}.type {kind!r} is not supported", field=f"{where}.type", code="unsupported")
        if turn is None or (kind == "message" and (turn.content is not None or turn.tool_calls)):
            turn = ChatMessage(role="assistant")
            made.append(turn)
        _add_to_turn(turn, kind, item, where)
    return made


def _add_to_turn(turn: ChatMessage, kind: str, item: dict[str, Any], where: str) -> None:
    if kind == "message":
        turn.content = _message(item, where).content
    elif kind == "function_call":
        call = convert(item, CallItem, prefix=where)
        function = FunctionCall(name=call.name, arguments=call.arguments)
        turn.tool_calls = [*(turn.tool_calls or []), ToolCall(function=function, id=call.call_id, type="function")]
    else:
        reasoning = convert(item, ReasoningItem, prefix=where)
        text = "\n".join(part.text or "" for part in reasoning.content or reasoning.summary or [])
        turn.reasoning_content = "\n".join(filter(None, (turn.reasoning_content, text)))


def _message(item: dict[str, Any], where: str) -> ChatMessage:
    message = convert(item, MessageItem, prefix=where)
    return ChatMessage(role=message.role, content=_text(message.content, f"{where}.content"))


def _call_output(item: dict[str, Any], where: str) -> ChatMessage:
    output = convert(item, CallOutputItem, prefix=where)
    return ChatMessage(role="tool", content=_text(output.output, f"{where}.output"), tool_call_id=output.call_id)


def _text(content: str | list[Part], field: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("input_text", "output_text", "text", "refusal") or text is None:
            raise RequestError(
                f"{field} holds a part of type {part.type!r}; only text is supported", field=field, code="unsupported"
            )
        texts.append(text)
    return "\n".join(texts)


def _tools(tools: list[dict[str, Any]] | None) -> list[ToolSpec] | None:
    if tools is None:
        return None
    made = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.get("type") != "function":
            raise RequestError(
                f"{where}.type must be 'function', got {tool.get('type')!r}", field=f"{where}.type", code="unsupported"
            )
        given = convert(tool, FunctionTool, prefix=where)
        function = FunctionSpec(given.name, given.description, given.parameters, given.strict)
        made.append(ToolSpec(type="function", function=function))
    return made


def _tool_choice(choice: Any) -> Any:
    """Convert `tool_choice` to the form of chat completions. `plan_tools` validates the names."""
    match choice:
        case None | str():
            return choice
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*tools]}:
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    raise RequestError(
        'tool_choice must be none, auto, required, {"type": "function", "name": ...}, or '
        '{"type": "allowed_tools", "mode": "auto" or "required", "tools": [...]}',
        field="tool_choice",
    )


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    """Convert `text.format` to the form of chat completions; None: plain text."""
    given = body.text.format if body.text is not None else None
    if given is None or given.get("type") == "text":
        return None
    if given.get("type") == "json_schema":
        named = {name: value for name, value in given.items() if name != "type"}
        return {"type": "json_schema", "json_schema": named}
    if given.get("type") == "json_object":
        return {"type": "json_object"}
    raise RequestError(
        f"text.format.type must be text, json_object or json_schema, got {given.get('type')!r}",
        field="text.format.type",
    )
