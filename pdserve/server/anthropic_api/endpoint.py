"""`POST /v1/messages` and `/v1/messages/count_tokens`.

    MessagesBody ─> to_chat ─> ChatBody ─> prepare_chat ─> MessagesCall ─> ContentWriter ─> message, or its events

The API counts cached prompt tokens apart: the prompt has `input_tokens` plus `cache_read_input_tokens` tokens.
`max_tokens` beyond the context is cut to what fits, as at Anthropic; the answer then ends with
`model_context_window_exceeded`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response

from pdserve.base.stream_state import MESSAGE_STOP
from pdserve.errors import RequestError
from pdserve.protocol.messages import FinishReason
from pdserve.server.anthropic_api.output import ContentWriter, Event
from pdserve.server.anthropic_api.schemas import UNSUPPORTED_MESSAGES, MessagesBody
from pdserve.server.anthropic_api.to_chat import to_chat, with_fields_of
from pdserve.server.context import ServerContext
from pdserve.server.engine_client.live_requests import RequestState
from pdserve.server.generation import GenerationUpdate
from pdserve.server.http.json_http import convert, json_response, read_json_object, refuse_unsupported
from pdserve.server.openai.chat import chat_prompt, check_chat_size, prepare_chat
from pdserve.server.openai.chat_tools import ChatReader, ReadPlan, ReasoningCounter, plan_tools
from pdserve.server.openai.common import GenerationCall
from pdserve.server.request.schemas import ChatBody
from pdserve.server.sglang_api.tokenize import MAX_TOKENS

PING: Event = {"type": "ping"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": "pause_turn", "suspended": "pause_turn"}


class MessagesCall(GenerationCall):
    """One call of `/v1/messages`. Event loop only."""

    id_prefix = "msg_"
    stream_end = MESSAGE_STOP

    def __init__(
        self, context: ServerContext, body: MessagesBody, chat: ChatBody, states: list[RequestState], plan: ReadPlan
    ) -> None:
        """`chat`: the chat body of `body`. `states`: the one output, which `plan` parses."""
        super().__init__(context, chat, states, 1)
        self._stop_sequences = body.stop_sequences or ()
        self._is_cut = states[0].request.sampling.max_new_tokens < (body.max_tokens or 0)
        self._thinks = plan.thinking is not None
        self._reader = ChatReader(plan)
        self._counter = ReasoningCounter(context.tokenizer, plan)
        self._writer = ContentWriter()

    def whole(self, updates: list[GenerationUpdate]) -> dict[str, Any]:
        """See `GenerationCall`."""
        (update,) = updates
        self._writer.push([*self._reader.push(update.text), *self._reader.finish()])
        self._writer.finish()
        usage = self._usage(update.cached_tokens, update.token_ids) | {"service_tier": "standard"}
        return {**self._message(self._writer.blocks), **self._stop(update.finish), "usage": usage}

    def opening_events(self, update: GenerationUpdate, seen: dict[int, GenerationUpdate]) -> list[bytes]:
        """See `GenerationCall`."""
        usage = self._usage(update.cached_tokens, []) | {"service_tier": "standard"}
        message = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [_encode({"type": "message_start", "message": message}), _encode(PING)]

    def events(self, update: GenerationUpdate, seen: dict[int, GenerationUpdate]) -> Iterator[bytes]:
        """See `GenerationCall`. `message_stop` is `stream_end`."""
        ends = update.finish is not None and update.finish.type != "suspended"
        deltas = [*self._reader.push(update.text), *(self._reader.finish() if ends else [])]
        yield from map(_encode, self._writer.push(deltas))
        if update.finish is None:
            return
        yield from map(_encode, self._writer.finish())
        total = seen[update.index]
        usage = self._usage(total.cached_tokens, total.token_ids)
        yield _encode({"type": "message_delta", "delta": self._stop(update.finish), "usage": usage})

    def replay(self, update: GenerationUpdate) -> None:
        """See `GenerationCall`."""
        self._writer.push(self._reader.push(update.text))

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._head["id"], "type": "message", "role": "assistant", "model": self._head["model"]}
        return {**head, "content": content}

    def _stop(self, finish: FinishReason | None) -> dict[str, Any]:
        """Build `stop_reason` and `stop_sequence`."""
        assert finish is not None
        if finish.type == "stop" and self._writer.has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if finish.type == "stop" and finish.matched in self._stop_sequences:
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.matched}
        if finish.type == "length" and self._is_cut:
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
        return {"stop_reason": _STOP_REASONS[finish.type], "stop_sequence": None}

    def _usage(self, cached_tokens: int, output_ids: list[int]) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "input_tokens": self._num_prompt_tokens - cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached_tokens,
            "output_tokens": len(output_ids),
        }
        if self._thinks:
            usage["output_tokens_details"] = {"thinking_tokens": self._counter.count(output_ids)}
        return usage


def _encode(event: Event) -> bytes:
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"


async def messages(context: ServerContext, request: Request) -> Response:
    """Serve `POST /v1/messages`: validate the whole body, then submit. An invalid request allocates nothing.

    Raises:
        RequestError: the body is invalid; the error names the field.
    """
    context.limits()
    body = await _read(context, request)
    max_tokens = body.max_tokens
    if max_tokens is None or max_tokens < 0:
        text = "max_tokens is missing" if max_tokens is None else f"max_tokens must be at least 0, got {max_tokens}"
        raise RequestError(text, field="max_tokens")
    if not context.formats.reasons and body.thinking is not None:
        body.thinking.budget_tokens = None  # clients ask every model for thinking; without a known format there is none
    chat = to_chat(body)
    with with_fields_of(body):
        states, plan = await prepare_chat(context, chat, default_tokens=max_tokens)
    return await MessagesCall(context, body, chat, states, plan).answer(request)


async def count_tokens(context: ServerContext, request: Request) -> Response:
    """Serve `POST /v1/messages/count_tokens`: the number of tokens of the prompt that `/v1/messages` would make.

    Raises:
        RequestError: the body is invalid; the error names the field.
    """
    capacity = context.limits().capacity
    body = await _read(context, request)
    context.check_model(body.model)
    chat = to_chat(body)
    with with_fields_of(body):
        check_chat_size(chat, "messages")
        prompt = await chat_prompt(context, chat, plan_tools(chat, context.formats.tools), "messages")
        tokenizer, most = context.require_tokenizer("messages"), max(MAX_TOKENS, capacity)
        input_ids = await tokenizer.encode(prompt, field="messages", add_special_tokens=False, most_tokens=most)
    return json_response({"input_tokens": len(input_ids)})


async def _read(context: ServerContext, request: Request) -> MessagesBody:
    raw = await read_json_object(request, context.max_body_bytes)
    body = convert(refuse_unsupported(raw, UNSUPPORTED_MESSAGES), MessagesBody)
    if not body.messages:
        raise RequestError("messages must not be empty", field="messages")
    return body
