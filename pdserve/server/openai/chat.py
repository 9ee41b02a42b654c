"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from pdserve.protocol.messages import FinishReason
from pdserve.server.context import ServerContext
from pdserve.server.engine_client.live_requests import RequestState
from pdserve.server.generation import GenerationUpdate
from pdserve.server.http.json_http import convert, read_json_object, refuse_unsupported
from pdserve.server.openai.chat_request import prepare_chat
from pdserve.server.openai.chat_tools import ChatReader, ReadPlan, ReasoningCounter
from pdserve.server.openai.common import OpenAICall
from pdserve.server.openai.logprob_format import chat_logprobs
from pdserve.server.request.schemas import UNSUPPORTED_CHAT, ChatBody
from pdserve.server.text.parsers.feed import CallArguments, CallOpened, Content, Delta, Reasoning, join_deltas

_HARMLESS: dict[str, tuple[Any, ...]] = {"modalities": (["text"],), "verbosity": ("medium",)}
"""Values of unsupported fields that are accepted because they equal the default."""


class ChatCall(OpenAICall):
    """A chat completion."""

    id_prefix = "chatcmpl"
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
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if whole.reasoning is not None:
            message["reasoning_content"] = whole.reasoning
        if whole.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in whole.calls
            ]
        return {"message": message, "logprobs": self._logprobs(update)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """See `OpenAICall`."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def delta(self, update: GenerationUpdate) -> dict[str, Any]:
        """See `OpenAICall`."""
        reader = self._reader(update.index)
        deltas = reader.push(update.text)
        if update.finish is not None:
            deltas += reader.finish()
        return {"delta": delta_fields(deltas), "logprobs": self._logprobs(update)}

    def chunk_fields(self, update: GenerationUpdate) -> dict[str, Any] | None:
        """See `OpenAICall`: None while the parser holds the text back. The last update releases held text."""
        fields = self.delta(update)
        return fields if fields["delta"] or fields["logprobs"] else None

    def finish_fields(self, index: int, finish: FinishReason | None) -> dict[str, Any]:
        """See `OpenAICall`: `tool_calls` instead of `stop` when the output has tool calls."""
        fields = super().finish_fields(index, finish)
        if finish is not None and finish.type == "stop" and self._reader(index).called:
            fields["finish_reason"] = "tool_calls"
        return fields

    def usage_details(self, updates: Sequence[GenerationUpdate]) -> dict[str, Any]:
        """See `OpenAICall`."""
        if self._plan.thinking is None:
            return {}
        for update in updates:
            if update.index not in self._counters:
                self._counters[update.index] = ReasoningCounter(self.context.tokenizer, self._plan)
        tokens = sum(self._counters[update.index].count(update.token_ids) for update in updates)
        return {"completion_tokens_details": {"reasoning_tokens": tokens}}

    def _reader(self, index: int) -> ChatReader:
        if index not in self._readers:
            self._readers[index] = ChatReader(self._plan)
        return self._readers[index]

    def _logprobs(self, update: GenerationUpdate) -> dict[str, Any] | None:
        return chat_logprobs(self.context.tokenizer, update) if update.logprobs else None


def delta_fields(deltas: Sequence[Delta]) -> dict[str, Any]:
    """Build `delta` of a chunk from `deltas`: one field per kind of delta, one `tool_calls` entry per call."""
    fields: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        match delta:
            case Content(text):
                fields["content"] = fields.get("content", "") + text
            case Reasoning(text):
                fields["reasoning_content"] = fields.get("reasoning_content", "") + text
            case CallOpened(index, name, call_id):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case CallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    return {**fields, **({"tool_calls": list(calls.values())} if calls else {})}


async def chat_completions(context: ServerContext, request: Request) -> Response:
    """Serve `POST /v1/chat/completions`: validate the whole body, then submit. An invalid request allocates nothing.

    Raises:
        RequestError: the body is invalid; the error names the field.
    """
    raw = await read_json_object(request, context.max_body_bytes)
    context.limits()
    asked = {name: value for name, value in raw.items() if value not in _HARMLESS.get(name, ())}
    body = convert(refuse_unsupported(asked, UNSUPPORTED_CHAT), ChatBody)
    states, plan = await prepare_chat(context, body)
    return await ChatCall(context, body, states, plan).answer(request)
