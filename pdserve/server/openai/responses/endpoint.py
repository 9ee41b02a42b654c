"""`POST /v1/responses`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response

from pdserve.errors import PdserveError
from pdserve.http.background_responses import not_stored
from pdserve.http.errors import HttpRefusal
from pdserve.http.response_store import Recording
from pdserve.protocol.messages import FinishReason
from pdserve.server.context import ServerContext
from pdserve.server.engine_client.live_requests import RequestState
from pdserve.server.generation import Generation, GenerationUpdate
from pdserve.server.http.json_http import (
    EventStream,
    collect,
    convert,
    first_event,
    json_response,
    read_json_object,
    refuse_unsupported,
    until_disconnect,
)
from pdserve.server.openai.chat import prepare_chat
from pdserve.server.openai.chat_tools import ChatReader, ReadPlan, ReasoningCounter
from pdserve.server.openai.logprob_format import chat_logprobs
from pdserve.server.openai.responses.output import OutputWriter
from pdserve.server.openai.responses.schemas import UNSUPPORTED_RESPONSES, ResponsesBody
from pdserve.server.openai.responses.stored import recording_of
from pdserve.server.openai.responses.to_chat import to_chat, with_fields_of
from pdserve.server.request.intake import num_prompt_tokens
from pdserve.server.request.sampling_fields import declared_sampling


class ResponsesCall:
    """One call of `/v1/responses`. Event loop only."""

    def __init__(
        self,
        context: ServerContext,
        body: ResponsesBody,
        states: list[RequestState],
        plan: ReadPlan,
        recording: Recording | None = None,
    ) -> None:
        """`recording`: stores the response; None: it is not stored here."""
        self._context = context
        self._recording = recording
        self._body = body
        self._states = states
        self._plan = plan
        self._reader = ChatReader(plan)
        self._writer = OutputWriter()
        self._fields = _echo(context, body)
        self._sequence = 0

    async def answer(self, request: Request) -> Response:
        """Submit, and return the response, whole or streamed.

        A prefill server never streams, because its part ends with the first token.
        """
        stream = bool(self._body.stream) and self._context.mode != "prefill"
        generation = await self._context.client.submit(self._states)
        with generation.closed_on_error():
            if stream:
                events = self.events(generation)
                return EventStream(await until_disconnect(request, first_event(events)), events, done=b"")
            (update,) = await until_disconnect(request, collect(generation, 1))
        self._writer.push(self._read(update), self._logprobs(update))
        status = _status(update.finish)
        self._writer.finish(_item_status(status))
        return json_response(self._kept(self._response(status, update)))

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Generate the stream. It begins with the first token, so that a refused request gets its own HTTP status."""
        total = GenerationUpdate(0)
        begun = False
        try:
            async with generation:
                async for update in generation:
                    if not begun:
                        begun = True
                        for kind in ("response.created", "response.in_progress"):
                            yield self._event({"type": kind, "response": self._response("in_progress", None)})
                    for event in self._writer.push(self._read(update), self._logprobs(update)):
                        yield self._event(event)
                    update.logprobs = []
                    total.absorb(update)
        except PdserveError as error:
            if not begun:
                raise
            yield self._event({"type": "response.failed", "response": self._failed(error)})
            return
        status = _status(total.finish)
        for event in self._writer.finish(_item_status(status)):
            yield self._event(event)
        response = self._kept(self._response(status, total))
        yield self._event({"type": f"response.{_ENDINGS[status]}", "response": response})

    def _kept(self, response: dict[str, Any]) -> dict[str, Any]:
        """Store the whole response, and return it."""
        if self._recording is not None:
            self._recording.keep(response)
        return response

    def _read(self, update: GenerationUpdate) -> list[Any]:
        deltas = self._reader.push(update.text)
        return [*deltas, *self._reader.finish()] if update.finish is not None else deltas

    def _logprobs(self, update: GenerationUpdate) -> Sequence[dict[str, Any]]:
        if not update.logprobs:
            return ()
        content = chat_logprobs(self._context.tokenizer, update)["content"]
        assert isinstance(content, list)
        return content

    def _event(self, event: dict[str, Any]) -> bytes:
        numbered = {**event, "sequence_number": self._sequence}
        self._sequence += 1
        kind: str = event["type"]
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(numbered) + b"\n\n"

    def _response(self, status: str, update: GenerationUpdate | None) -> dict[str, Any]:
        """Build the response object. `update`: the whole output; None: it has not ended."""
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._fields,
            "status": status,
            "incomplete_details": reason,
            "output": self._writer.items if update is not None else [],
            "usage": self._usage(update) if update is not None else None,
            **self._sglext(update),
        }

    def _sglext(self, update: GenerationUpdate | None) -> dict[str, Any]:
        """Build `sglext` with the sources of the cached tokens, if the body requests it and the output has ended."""
        if update is None or not self._body.return_cached_tokens_details:
            return {}
        backend = self._context.config.storage.hicache_storage_backend
        return {"sglext": {"cached_tokens_details": update.cached_by_source.shown(backend)}}

    def _failed(self, error: PdserveError) -> dict[str, Any]:
        code, message = "server_error", HttpRefusal.of(error).body["message"]
        return {**self._response("failed", None), "error": {"code": code, "message": message}}

    def _usage(self, update: GenerationUpdate) -> dict[str, Any]:
        prompt, completion = num_prompt_tokens(self._states, 1), len(update.token_ids)
        reasoning = ReasoningCounter(self._context.tokenizer, self._plan).count(update.token_ids)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": update.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": prompt + completion,
        }


_ENDINGS = {"completed": "completed", "incomplete": "incomplete", "cancelled": "incomplete"}
"""Name of the last event, by the response's status."""


def _status(finish: FinishReason | None) -> str:
    assert finish is not None
    return {"stop": "completed", "length": "incomplete", "abort": "cancelled", "suspended": "cancelled"}[finish.type]


def _item_status(status: str) -> str:
    return "completed" if status == "completed" else "incomplete"


def _echo(context: ServerContext, body: ResponsesBody) -> dict[str, Any]:
    """Fields of a response that repeat its request. `store`: whether this server or its router stores the response."""
    reasoning, sampling = body.reasoning, declared_sampling(body)
    text_format = body.text.format if body.text is not None else None
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model or context.model_name,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is True,
        "temperature": sampling["temperature"],
        "text": {"format": text_format or {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [{"parameters": None, "strict": False, **tool} for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling["top_p"],
        "truncation": "disabled",
        "user": body.user,
    }


async def responses(context: ServerContext, request: Request) -> Response:
    """Serve `POST /v1/responses`: validate the whole body, then submit. An invalid request allocates nothing.

    Raises:
        RequestError: the body is invalid; the error names the field.
    """
    raw = await read_json_object(request, context.max_body_bytes)
    body, states, plan = await prepare_response(context, raw)
    if body.background:
        raise not_stored()
    return await ResponsesCall(context, body, states, plan, recording_of(request)).answer(request)


async def prepare_response(
    context: ServerContext, raw: dict[str, Any]
) -> tuple[ResponsesBody, list[RequestState], ReadPlan]:
    """Validate the body `raw`, and return it with its sequences. Nothing is submitted.

    Raises:
        RequestError: the body is invalid; the error names the field.
    """
    context.limits()
    body = convert(refuse_unsupported(raw, UNSUPPORTED_RESPONSES), ResponsesBody)
    with with_fields_of(body):
        states, plan = await prepare_chat(context, to_chat(body), "input")
    return body, states, plan
