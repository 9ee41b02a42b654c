"""`POST /v1/chat/completions`: a chat body with its messages to scheduler requests, and their outputs to messages.

Chat completions and responses call `prepare_chat`. `ChatCall` makes the answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response

from pdserve.errors import RequestError
from pdserve.http.access import CHAT_PATH
from pdserve.protocol.messages import FinishReason
from pdserve.server.context import ServerContext
from pdserve.server.engine_client.live_requests import RequestState
from pdserve.server.generation import GenerationUpdate
from pdserve.server.http.json_http import convert, read_json_object, refuse_unsupported
from pdserve.server.openai.chat_tools import ChatReader, ReadPlan, ReasoningCounter, ToolPlan, join_deltas, plan_tools
from pdserve.server.openai.common import OpenAICall, check_prompt_logprobs, check_prompt_token_ids
from pdserve.server.openai.logprob_format import chat_logprobs
from pdserve.server.request.constraints import Constraint, openai_constraint, reasoning_grammar
from pdserve.server.request.intake import check_token_ids, check_top_logprobs, openai_logprobs, prompt_request
from pdserve.server.request.sampling_fields import (
    MAX_CHAT_TOKENS,
    check_listed,
    check_prompt_fits,
    count_n,
    is_constrained,
    openai_sampling,
)
from pdserve.server.request.schemas import (
    MAX_MESSAGES,
    UNSUPPORTED_CHAT,
    ChatBody,
    ChatMessage,
    ContentPart,
    FunctionCall,
    ToolCall,
)
from pdserve.server.text.parsers.feed import CallArguments, CallOpened, Content, Delta, Reasoning
from pdserve.server.text.tokenizer import TemplateFacts, Tokenizer

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
        message = f"{field} hold {num_parts} parts and tool calls; the maximum is {MAX_PARTS}"
        raise RequestError(message, field=field)
    num_variables = len(body.chat_template_kwargs or ())
    if num_variables > MAX_VARIABLES:
        message = f"chat_template_kwargs has {num_variables} names; the maximum is {MAX_VARIABLES}"
        raise RequestError(message, field="chat_template_kwargs")
    for name in ("tools", "documents", "chat_template_kwargs"):
        value = getattr(body, name)
        size = len(msgspec.json.encode(value)) if value else 0
        if size > MAX_SHOWN_BYTES:
            message = f"{name} has {size} bytes of JSON; the maximum is {MAX_SHOWN_BYTES}"
            raise RequestError(message, field=name)


def check_num_messages(messages: Sequence[Any], field: str) -> None:
    """Refuse too many messages, or items that become messages.

    Raises:
        RequestError: 400 naming `field`.
    """
    if len(messages) > MAX_MESSAGES:
        message = f"{field} holds {len(messages)} messages; the maximum is {MAX_MESSAGES}"
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
                raise RequestError(
                    f"{where}.tool_calls: only assistant messages have tool calls", field=f"{where}.tool_calls"
                )
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
    if part.type in ("text", "refusal"):
        raise RequestError(f"{where}.content holds a part without {part.type}", field=f"{where}.content")
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


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_RESERVED_TEMPLATE_NAMES = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens",
    "tokenize", "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip


async def prepare_chat(
    context: ServerContext, body: ChatBody, field: str = "messages", *, default_tokens: int = MAX_CHAT_TOKENS
) -> tuple[list[RequestState], ReadPlan]:
    """Validate `body` and prepare its sequences and the parser of their outputs. An invalid request allocates nothing.

    `field`: name of the messages in the client's body. `default_tokens`: maximum output tokens of a body without a
    limit, less where the context has less room.

    Raises:
        RequestError: the body is invalid; the error names the field.
    """
    limits = context.limits()
    context.check_model(body.model)
    check_prompt_token_ids(body)
    if not body.messages:
        raise RequestError(f"{field} must not be empty", field=field)
    check_chat_size(body, field)
    n = count_n(body.n)
    check_listed([body], n)
    logprobs = openai_logprobs(_top_logprobs(body), check_prompt_logprobs(body))
    tools = plan_tools(body, context.formats.tools)
    prompt = await chat_prompt(context, body, tools, field)
    input_ids = await context.require_tokenizer(field).encode(
        prompt, field=field, add_special_tokens=False, most_tokens=limits.most_prompt_tokens
    )
    if not input_ids:
        raise RequestError(f"{field} render to an empty prompt", field=field)
    check_prompt_fits(len(input_ids), limits, field)
    check_token_ids(input_ids, limits.vocab_size, field)
    plan = _read_plan(context, body, tools, prompt)
    grammar = await context.take_grammar(_constraint(context, body, tools, plan), body.stop_regex)
    custom = await context.take_custom(body.custom_params, "custom_params", body.custom_logit_processor)
    sampling = openai_sampling(body, default_tokens, len(input_ids), limits, field, grammar)
    sampling = custom.apply(sampling, None if context.formats.thinking is None else plan.inside)
    if plan.special_tokens:
        sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
    prompt_requests = [prompt_request(input_ids, sampling, logprobs)]
    return context.make_requests(prompt_requests, n, body, field, stream=bool(body.stream)), plan


async def chat_prompt(context: ServerContext, body: ChatBody, tools: ToolPlan, field: str) -> str:
    """Render the messages of `body` with the chat template.

    Raises:
        RequestError: 400, the template cannot render the messages.
    """
    tokenizer = context.require_tokenizer(field)
    template = _template(context, body, tokenizer, tools)
    messages = template_messages(body.messages, tokenizer.chat.facts(template), field)
    return await tokenizer.render_chat(messages, template, _template_options(body, tools))


def _top_logprobs(body: ChatBody) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise RequestError("top_logprobs needs logprobs: true", field="top_logprobs")
        return None
    return check_top_logprobs(body.top_logprobs or 0, "top_logprobs")


def _template(context: ServerContext, body: ChatBody, tokenizer: Tokenizer, tools: ToolPlan) -> str:
    if not body.chat_template:
        return tokenizer.require_template(tools=tools.shown is not None)
    if not context.config.serving.trust_request_chat_template:
        raise RequestError(
            "chat_template: this server takes no templates from requests (--trust-request-chat-template)",
            field="chat_template",
            code="unsupported",
        )
    return body.chat_template


def _template_options(body: ChatBody, tools: ToolPlan) -> dict[str, Any]:
    """Variables for the template. The body's `chat_template_kwargs` override the variables of other fields."""
    extra = body.chat_template_kwargs or {}
    reserved = sorted(_RESERVED_TEMPLATE_NAMES & extra.keys())
    if reserved:
        raise RequestError(f"chat_template_kwargs must not set {reserved[0]}", field="chat_template_kwargs")
    go_on = bool(body.continue_final_message)
    generation_prompt = not go_on if body.add_generation_prompt is None else body.add_generation_prompt
    if go_on and generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt cannot be combined", field="continue_final_message"
        )
    options: dict[str, Any] = {"add_generation_prompt": generation_prompt, "continue_final_message": go_on}
    if tools.shown is not None:
        options["tools"] = tools.shown
    if body.documents:
        options["documents"] = body.documents
    return {**options, **_effort_options(body), **extra}


def _effort_options(body: ChatBody) -> dict[str, Any]:
    """Template variables of `reasoning_effort`: its value, or for `none` the off switches of most templates."""
    effort = body.reasoning_effort
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise RequestError(
            f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {effort!r}", field="reasoning_effort"
        )
    if effort == "none":
        return {"enable_thinking": False, "thinking": False}
    return {"reasoning_effort": effort}


def _begins_inside(context: ServerContext, body: ChatBody, prompt: str) -> bool | None:
    """See `ReasoningFormat.begins_inside`; False for a model without a known reasoning format."""
    thinking = context.formats.thinking
    if thinking is None:
        return False
    continued = final_text(body.messages[-1]) if body.continue_final_message else None
    return thinking.begins_inside(prompt, continued)


def _read_plan(context: ServerContext, body: ChatBody, tools: ToolPlan, prompt: str) -> ReadPlan:
    """Plan the parser. With `separate_reasoning` false, reasoning stays in the content.

    It is still parsed if a grammar constrains the tool calls, because it precedes them.
    """
    formats = context.formats
    separate = body.separate_reasoning is not False
    own_reading = tools.constraint is None
    return ReadPlan(
        tools=tools.schemas,
        reading=tools.reading,
        native=formats.tools,
        thinking=formats.thinking if separate or not own_reading else None,
        inside=_begins_inside(context, body, prompt),
        harmony=formats.harmony and own_reading,
        show_reasoning=separate,
        stream_reasoning=body.stream_reasoning is not False,
        one_call=body.parallel_tool_calls is False,
    )


def _constraint(context: ServerContext, body: ChatBody, tools: ToolPlan, plan: ReadPlan) -> Constraint | None:
    """The grammar constraint of the output, which applies after the reasoning; None: none."""
    asked = openai_constraint(body) if is_constrained(body) else None
    if asked is not None and tools.constraint is not None:
        raise RequestError(
            f"{asked.field} and tool_choice cannot be combined: a request accepts one grammar", field="tool_choice"
        )
    constraint = asked or tools.constraint
    thinking = context.formats.thinking
    if constraint is None or thinking is None:
        return constraint
    return reasoning_grammar(constraint, thinking, plan.inside)


_HARMLESS: dict[str, tuple[Any, ...]] = {"modalities": (["text"],), "verbosity": ("medium",)}
"""Values of unsupported fields that are accepted because they equal the default."""


class ChatCall(OpenAICall):
    """A chat completion."""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, context: ServerContext, body: ChatBody, states: list[RequestState], plan: ReadPlan) -> None:
        """`states`: the outputs of the chat's one prompt, which `plan` parses."""
        super().__init__(context, body, states, len(states))
        self._plan = plan
        self._readers: dict[int, ChatReader] = {}
        self._counters: dict[int, ReasoningCounter] = {}

    def choice(self, update: GenerationUpdate) -> dict[str, Any]:
        """See `OpenAICall`."""
        reader = self._reader(update.index)
        whole = join_deltas([*reader.push(update.text), *reader.finish()])
        content = whole.content
        if content is None and whole.reasoning is None and not whole.calls:
            content = ""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content,
            "refusal": None,
            "reasoning_content": whole.reasoning,
        }
        if whole.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in whole.calls
            ]
        return {"message": message, "logprobs": self._logprobs(update)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """See `OpenAICall`."""
        return {"delta": {"role": "assistant", "content": "", "reasoning_content": None}, "logprobs": None}

    def delta(self, update: GenerationUpdate) -> dict[str, Any]:
        """See `OpenAICall`."""
        return self._delta(self._read(update), update)

    def chunk_fields(self, update: GenerationUpdate) -> dict[str, Any] | None:
        """See `OpenAICall`: None while the parser holds the text back. The last update releases held text."""
        deltas = self._read(update)
        return self._delta(deltas, update) if deltas or update.logprobs else None

    def finish_fields(self, index: int, finish: FinishReason | None) -> dict[str, Any]:
        """See `OpenAICall`: `tool_calls` instead of `stop` when the output has tool calls."""
        fields = super().finish_fields(index, finish)
        if finish is not None and finish.type == "stop" and self._reader(index).called:
            fields["finish_reason"] = "tool_calls"
        return fields

    def completion_details(self, updates: Sequence[GenerationUpdate]) -> dict[str, int]:
        """See `OpenAICall`: also the reasoning tokens, of a model with a reasoning format."""
        details = super().completion_details(updates)
        if self._plan.thinking is None:
            return details
        for update in updates:
            if update.index not in self._counters:
                self._counters[update.index] = ReasoningCounter(self.context.tokenizer, self._plan)
        tokens = sum(self._counters[update.index].count(update.token_ids) for update in updates)
        return {"reasoning_tokens": tokens, **details}

    def _reader(self, index: int) -> ChatReader:
        if index not in self._readers:
            self._readers[index] = ChatReader(self._plan)
        return self._readers[index]

    def _read(self, update: GenerationUpdate) -> list[Delta]:
        reader = self._reader(update.index)
        deltas = reader.push(update.text)
        ends = update.finish is not None and update.finish.type != "suspended"
        return [*deltas, *reader.finish()] if ends else deltas

    def _delta(self, deltas: Sequence[Delta], update: GenerationUpdate) -> dict[str, Any]:
        return {"delta": delta_fields(deltas), "logprobs": self._logprobs(update)}

    def _logprobs(self, update: GenerationUpdate) -> dict[str, Any] | None:
        return chat_logprobs(self.context.tokenizer, update) if update.logprobs else None


def delta_fields(deltas: Sequence[Delta]) -> dict[str, Any]:
    """Build `delta` of a chunk from `deltas`: one field per kind of delta, one `tool_calls` entry per call.

    As in SGLang `reasoning_content` is always present, null without reasoning.
    """
    fields: dict[str, Any] = {}
    reasoning: str | None = None
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        match delta:
            case Content(text):
                fields["content"] = fields.get("content", "") + text
            case Reasoning(text):
                reasoning = (reasoning or "") + text
            case CallOpened(index, name, call_id):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case CallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    fields["reasoning_content"] = reasoning
    return {**fields, **({"tool_calls": list(calls.values())} if calls else {})}


async def chat_completions(context: ServerContext, request: Request) -> Response:
    """Serve `POST /v1/chat/completions`: validate the whole body, then submit. An invalid request allocates nothing.

    Raises:
        RequestError: the body is invalid; the error names the field.
    """
    raw = await read_json_object(request, context.max_body_bytes)
    return await (await prepare_chat_call(context, raw)).answer(request)


async def prepare_chat_call(context: ServerContext, raw: dict[str, Any]) -> ChatCall:
    """Validate the body `raw` and prepare the call.

    Raises:
        RequestError: the body is invalid; the error names the field.
    """
    context.limits()
    asked = {name: value for name, value in raw.items() if value not in _HARMLESS.get(name, ())}
    body = convert(refuse_unsupported(asked, UNSUPPORTED_CHAT), ChatBody)
    states, plan = await prepare_chat(context, body)
    return ChatCall(context, body, states, plan).keep_origin(CHAT_PATH, raw)
