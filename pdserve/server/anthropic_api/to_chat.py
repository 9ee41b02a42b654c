"""Converts a body of the Messages API to the equivalent chat body, and field names in its errors back. Pure functions.

One turn of the client becomes one or more messages: each `tool_result` block is a message of its own, with the role
`tool`, between the texts before and after it. Consecutive turns of one role become one message, as at Anthropic.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pdserve.errors import RequestError
from pdserve.http.access import BILLING_HEADER
from pdserve.server.anthropic_api.schemas import (
    Blocks,
    MessageParam,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    ToolChoiceParam,
    ToolParam,
    ToolResultBlock,
    ToolUseBlock,
)
from pdserve.server.http.json_http import convert
from pdserve.server.request.custom_params import BUDGET
from pdserve.server.request.schemas import (
    ChatBody,
    ChatMessage,
    ContentPart,
    FunctionCall,
    FunctionSpec,
    ToolCall,
    ToolSpec,
)

THINKING_ON = ("enabled", "adaptive", "between_tools")
_RENAMED = (
    (re.compile(r"(\btools\[\d+\])\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"(\btools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"\breasoning_effort\b"), "output_config.effort"),
)
"""Pairs of a field's name in chat completions and its name in the Messages API."""
_STOP = (re.compile(r"\bstop\b"), "stop_sequences")
_BUDGET = (re.compile(r"\bcustom_params\.thinking_budget\b"), "thinking.budget_tokens")
_FORMAT = (re.compile(r"\bresponse_format(\.json_schema|\.schema)*(?=\W|$)"), "output_config.format")


def to_chat(body: MessagesBody) -> ChatBody:
    """Convert `body` to a chat body without a limit of output tokens.

    Raises:
        RequestError: 400 naming the field.
    """
    if body.n not in (None, 1):
        raise RequestError("n must be 1: a message is one output", field="n")
    if body.stop is not None and body.stop_sequences is not None:
        raise RequestError("stop and stop_sequences cannot be combined", field="stop_sequences")
    fields = body.shared_fields()
    fields["max_tokens"] = None
    if fields.get("top_k") == 0:
        fields["top_k"] = -1  # as at Anthropic: all tokens
    fields["custom_params"] = _custom_params(body)
    if body.stop_sequences is not None:
        fields["stop"] = body.stop_sequences
    if body.metadata is not None and body.user is None:
        fields["user"] = body.metadata.user_id
    output_format = _output_format(body)
    if output_format is not None:
        fields["response_format"] = output_format
    messages = _messages(body)
    choice, parallel = _tool_choice(body.tool_choice)
    goes_on = messages[-1].role == "assistant" if messages else False
    if goes_on and messages[-1].tool_calls:
        field = f"messages[{len(body.messages) - 1}]"
        raise RequestError(f"{field}: an assistant turn that the model continues must hold no tool_use", field=field)
    return ChatBody(
        **fields,
        messages=messages,
        tools=_tools(body.tools),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        reasoning_effort=body.output_config.effort if body.output_config is not None else None,
        continue_final_message=True if goes_on else None,
        chat_template_kwargs=_template_variables(body),
    )


def _custom_params(body: MessagesBody) -> dict[str, Any] | None:
    """The body's `custom_params`, with `thinking.budget_tokens` as its thinking budget."""
    thinking = body.thinking
    if thinking is None or thinking.budget_tokens is None or thinking.type == "disabled":
        return body.custom_params
    given = body.custom_params or {}
    if BUDGET in given:
        message = f"custom_params.{BUDGET} and thinking.budget_tokens cannot be combined"
        raise RequestError(message, field=f"custom_params.{BUDGET}")
    return {**given, BUDGET: thinking.budget_tokens}


@contextlib.contextmanager
def with_fields_of(body: MessagesBody) -> Iterator[None]:
    """Rename the chat fields in errors of the block to the fields of `body`.

    Raises:
        RequestError: the block's error, with the renamed fields.
    """
    try:
        yield
    except RequestError as error:
        renamed = list(_RENAMED)
        if body.stop_sequences is not None and error.field == "stop":
            renamed.append(_STOP)
        if body.response_format is None:
            renamed.append(_FORMAT)
        if body.thinking is not None and body.thinking.budget_tokens is not None:
            renamed.append(_BUDGET)
        raise error.with_names(renamed) from error


def _messages(body: MessagesBody) -> list[ChatMessage]:
    made: list[ChatMessage] = []
    if body.system:
        parts = [part for part in _texts(body.system, "system") if not (part.text or "").startswith(BILLING_HEADER)]
        if parts:
            made.append(ChatMessage(role="system", content=parts))
    for position, message in enumerate(body.messages):
        _add(made, message, f"messages[{position}]")
    return made


def _add(made: list[ChatMessage], message: MessageParam, where: str) -> None:
    """Append the turn `message` to `made`; a turn of the role of the last message is joined to it."""
    if message.role not in ("user", "assistant", "system"):
        field = f"{where}.role"
        raise RequestError(f"{field} must be user, assistant or system, got {message.role!r}", field=field)
    content: Sequence[dict[str, Any]]
    content = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
    if not content and message.role != "assistant":
        field = f"{where}.content"
        raise RequestError(f"{field} must not be empty", field=field)
    last = made[-1] if made else None
    for i, block in enumerate(content):
        if last is None or last.role != message.role:
            last = ChatMessage(role=message.role, content=[])
        field = f"{where}.content[{i}]"
        if block.get("type") == "tool_result" and message.role == "user":
            made.append(_tool_result(block, field))
            last = None
            continue
        _add_block(last, block, field)
        if not made or made[-1] is not last:
            made.append(last)
    if not content and message.role == "assistant" and (last is None or last.role != "assistant"):
        made.append(ChatMessage(role="assistant", content=[]))


def _add_block(message: ChatMessage, block: dict[str, Any], where: str) -> None:
    assert isinstance(message.content, list)
    kind = block.get("type")
    if kind == "text":
        message.content.append(_text(block, where))
    elif kind == "thinking" and message.role == "assistant":
        text = convert(block, ThinkingBlock, prefix=where).thinking
        message.reasoning_content = "\n".join(filter(None, (message.reasoning_content, text)))
    elif kind == "redacted_thinking" and message.role == "assistant":
        pass  # encrypted by another server
    elif kind == "tool_use" and message.role == "assistant":
        call = convert(block, ToolUseBlock, prefix=where)
        function = FunctionCall(name=call.name, arguments=call.input)
        message.tool_calls = [*(message.tool_calls or []), ToolCall(function=function, id=call.id, type="function")]
    else:
        raise _unsupported(block, where, message.role)


def _tool_result(block: dict[str, Any], where: str) -> ChatMessage:
    result = convert(block, ToolResultBlock, prefix=where)
    parts = _texts(result.content or "", f"{where}.content")
    return ChatMessage(role="tool", content=parts, tool_call_id=result.tool_use_id)


def _texts(content: Blocks, where: str) -> list[ContentPart]:
    """Convert content that may hold text only."""
    if isinstance(content, str):
        return [ContentPart(type="text", text=content)]
    parts = []
    for i, block in enumerate(content):
        if block.get("type") != "text":
            raise _unsupported(block, f"{where}[{i}]", "this field")
        parts.append(_text(block, f"{where}[{i}]"))
    return parts


def _text(block: dict[str, Any], where: str) -> ContentPart:
    return ContentPart(type="text", text=convert(block, TextBlock, prefix=where).text)


def _unsupported(block: dict[str, Any], where: str, owner: str) -> RequestError:
    return RequestError(
        f"{where} is a block of type {block.get('type')!r}, which is not supported in {owner}",
        field=where,
        code="unsupported",
    )


def _tools(tools: list[ToolParam] | None) -> list[ToolSpec] | None:
    if tools is None:
        return None
    made = []
    for i, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            field = f"tools[{i}].type"
            message = f"{field} {tool.type!r} is not supported: only custom tools are"
            raise RequestError(message, field=field, code="unsupported")
        function = FunctionSpec(tool.name, tool.description, tool.input_schema, tool.strict)
        made.append(ToolSpec(type="function", function=function))
    return made


def _tool_choice(choice: ToolChoiceParam | None) -> tuple[Any, bool | None]:
    """Convert `tool_choice` to the chat fields `tool_choice` and `parallel_tool_calls`."""
    if choice is None:
        return None, None
    parallel = False if choice.disable_parallel_tool_use else None
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError("tool_choice.name is missing", field="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}, parallel
    made = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    if made is None:
        field = "tool_choice.type"
        raise RequestError(f"{field} must be auto, any, tool or none, got {choice.type!r}", field=field)
    return made, parallel


def _template_variables(body: MessagesBody) -> dict[str, Any] | None:
    """The template's variables: those that most templates have for `thinking`, and the body's own, which override."""
    thinking = body.thinking
    if thinking is None:
        return body.chat_template_kwargs
    if thinking.type not in (*THINKING_ON, "disabled"):
        field = "thinking.type"
        raise RequestError(f"{field} must be {', '.join(THINKING_ON)} or disabled, got {thinking.type!r}", field=field)
    on = thinking.type != "disabled"
    return {"enable_thinking": on, "thinking": on, **(body.chat_template_kwargs or {})}


def _output_format(body: MessagesBody) -> dict[str, Any] | None:
    """Convert `output_config.format`, or the older `output_format`, to `response_format`; None: plain text."""
    given = body.output_config.format if body.output_config is not None else None
    field = "output_config.format"
    if given is None:
        given, field = body.output_format, "output_format"
    if given is None:
        return None
    if body.response_format is not None:
        raise RequestError(f"{field} and response_format cannot be combined", field=field)
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise RequestError(f'{field} must be {{"type": "json_schema", "schema": {{...}}}}', field=field)
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given["schema"]}}
