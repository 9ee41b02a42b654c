"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import Response

from pdserve.errors import RequestError
from pdserve.server.context import ServerContext
from pdserve.server.generation import Update
from pdserve.server.intake import PromptSpec, check_token_ids, check_top_logprobs, make_intake
from pdserve.server.json_http import convert, read_json_object, refuse_unsupported
from pdserve.server.logprob_format import chat_logprobs
from pdserve.server.openai_common import OpenAICall
from pdserve.server.sampling_fields import MAX_CHAT_TOKENS, Ask, count_n, openai_sampling
from pdserve.server.schemas import UNSUPPORTED_CHAT, ChatBody, ChatMessage

_HARMLESS: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}
"""Values of unsupported fields that ask for nothing."""

_RESERVED_TEMPLATE_NAMES = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip


class ChatCall(OpenAICall):
    """A chat completion."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def choice(self, update: Update) -> dict[str, Any]:
        """See `OpenAICall`."""
        return {"message": {"role": "assistant", "content": update.text}, "logprobs": self._logprobs(update)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """See `OpenAICall`."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def delta(self, update: Update) -> dict[str, Any]:
        """See `OpenAICall`."""
        fields = {"content": update.text} if update.token_ids else {}
        return {"delta": fields, "logprobs": self._logprobs(update)}

    def _logprobs(self, update: Update) -> dict[str, Any] | None:
        return chat_logprobs(self.context.tokenizer, update) if update.logprobs else None


def _message(message: ChatMessage, position: int) -> dict[str, Any]:
    """A message as templates take it: the content as one string."""
    field = f"messages[{position}]"
    if message.tool_calls:
        raise RequestError(f"{field}.tool_calls is not supported", field=f"{field}.tool_calls", code="unsupported")
    if isinstance(message.content, list):
        for part in message.content:
            if part.type != "text" or part.text is None:
                raise RequestError(
                    f"{field}.content holds a part of type {part.type!r}; only text is supported",
                    field=f"{field}.content",
                    code="unsupported",
                )
        content = "\n".join(part.text or "" for part in message.content)
    elif message.content is None and message.role != "assistant":
        raise RequestError(f"{field}.content is missing", field=f"{field}.content")
    else:
        content = message.content or ""
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content, **({"name": message.name} if message.name else {})}


def _template_options(body: ChatBody) -> dict[str, Any]:
    extra = body.chat_template_kwargs or {}
    reserved = sorted(_RESERVED_TEMPLATE_NAMES & extra.keys())
    if reserved:
        raise RequestError(f"chat_template_kwargs must not set {reserved[0]}", field="chat_template_kwargs")
    go_on = bool(body.continue_final_message)
    generation_prompt = not go_on if body.add_generation_prompt is None else body.add_generation_prompt
    if go_on and generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other", field="continue_final_message"
        )
    return {"add_generation_prompt": generation_prompt, "continue_final_message": go_on, **extra}


def _ask(body: ChatBody) -> Ask:
    if body.max_completion_tokens is not None:
        return Ask(body.max_completion_tokens, MAX_CHAT_TOKENS, "max_completion_tokens")
    return Ask(body.max_tokens, MAX_CHAT_TOKENS, "max_tokens")


def _top_logprobs(body: ChatBody) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise RequestError("top_logprobs needs logprobs: true", field="top_logprobs")
        return None
    return check_top_logprobs(body.top_logprobs or 0, "top_logprobs")


async def chat_completions(context: ServerContext, request: Request) -> Response:
    """Check everything, then submit; nothing is allocated for a bad request.

    Raises:
        RequestError: what was wrong with the body.
    """
    raw = await read_json_object(request, context.max_body_bytes)
    limits = context.limits()
    asked = {name: value for name, value in raw.items() if value not in _HARMLESS.get(name, ())}
    body = convert(refuse_unsupported(asked, UNSUPPORTED_CHAT), ChatBody)
    context.check_model(body.model)
    if not body.messages:
        raise RequestError("messages must not be empty", field="messages")
    n = count_n(body.n)
    top_logprobs = _top_logprobs(body)
    messages = [_message(message, position) for position, message in enumerate(body.messages)]
    options = _template_options(body)
    input_ids = await context.require_tokenizer("messages").encode_chat(messages, options)
    if not input_ids:
        raise RequestError("messages make an empty prompt", field="messages")
    check_token_ids(input_ids, limits.vocab_size, "messages")
    sampling = openai_sampling(body, _ask(body), len(input_ids), limits, "messages")
    spec = PromptSpec(input_ids, sampling, top_logprobs)
    intake = make_intake([spec], n, body, context.mode, stream=bool(body.stream))
    return await ChatCall(context, body, intake).answer(request)
