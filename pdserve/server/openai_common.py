"""What chat and text completions share: choices, usage, and the way from an intake to an answer or a stream."""

from __future__ import annotations

import abc
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response

from pdserve.protocol.messages import FinishReason
from pdserve.server.context import ServerContext
from pdserve.server.generation import Generation, Update
from pdserve.server.intake import Intake
from pdserve.server.json_http import json_response
from pdserve.server.schemas import OpenAIBody
from pdserve.server.streaming import collect, event, stream_response, until_disconnect


def finish_fields(finish: FinishReason | None) -> dict[str, Any]:
    """`finish_reason` and SGLang's `matched_stop` of a choice."""
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": finish.type, "matched_stop": finish.matched}


def timing_fields(updates: Sequence[Update]) -> dict[str, Any]:
    """The `pdserve` extension: timing of the first sequence that has one."""
    for update in updates:
        if update.timing is not None:
            fields = msgspec.to_builtins(update.timing)
            assert isinstance(fields, dict)
            return fields
    return {}


class OpenAICall(abc.ABC):
    """One call of an OpenAI endpoint; subclasses say how a choice looks."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(self, context: ServerContext, body: OpenAIBody, intake: Intake) -> None:
        self.context = context
        self.body = body
        self.intake = intake
        self._head = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model or context.model_name,
        }

    @abc.abstractmethod
    def choice(self, update: Update) -> dict[str, Any]:
        """A whole choice, without its index and finish."""

    @abc.abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice that carries no text, if there is one."""

    @abc.abstractmethod
    def delta(self, update: Update) -> dict[str, Any]:
        """What a chunk's choice says of `update`; with an empty one, of nothing."""

    async def answer(self, request: Request) -> Response:
        """Submit, and answer at once or as a stream. Prefill answers whole: its half is over with the first token."""
        stream = bool(self.body.stream) and self.context.mode != "prefill"
        generation = await self.context.client.submit(self.intake.requests, self.intake.names)
        with generation.closed_on_error():
            if stream:
                return await stream_response(request, self._events(generation))
            updates = await until_disconnect(request, collect(generation, len(self.intake.requests)))
            return json_response(self._whole(updates))

    def _whole(self, updates: list[Update]) -> dict[str, Any]:
        choices = [{"index": u.index, **self.choice(u), **finish_fields(u.finish)} for u in updates]
        extra = {"pdserve": timing_fields(updates)} if self.body.return_meta_info else {}
        return {**self._head, "object": self.object_name, "choices": choices, "usage": self._usage(updates), **extra}

    def _usage(self, updates: Sequence[Update]) -> dict[str, Any]:
        prompt = self.intake.num_prompt_tokens
        completion = sum(len(update.token_ids) for update in updates)
        cached = sum(update.cached_tokens for update in updates if update.index % self.intake.n == 0)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def _events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        seen: dict[int, Update] = {}
        async with generation:
            async for update in generation:
                if update.index not in seen:
                    seen[update.index] = Update(update.index)
                    opening = self.opening(update.index)
                    if opening is not None:
                        yield self._chunk(update.index, opening)
                _count(seen[update.index], update)
                if update.text or update.logprobs:
                    yield self._chunk(update.index, self.delta(update))
                if update.finish is not None:
                    last = len(seen) == len(self.intake.requests) and all(u.finish for u in seen.values())
                    extra = self._extra(list(seen.values())) if last and not self._wants_usage else {}
                    yield self._chunk(update.index, self.delta(Update(update.index)), update.finish, extra)
        if self._wants_usage:
            done = list(seen.values())
            body = {**self._head, "object": self.chunk_name, "choices": [], "usage": self._usage(done)}
            yield event({**body, **self._extra(done)})

    def _chunk(
        self,
        index: int,
        fields: dict[str, Any],
        finish: FinishReason | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, **fields, **finish_fields(finish)}
        usage = {"usage": None} if self._wants_usage else {}
        return event({**self._head, "object": self.chunk_name, "choices": [choice], **usage, **(extra or {})})

    def _extra(self, updates: list[Update]) -> dict[str, Any]:
        return {"pdserve": timing_fields(updates)} if self.body.return_meta_info else {}

    @property
    def _wants_usage(self) -> bool:
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)


def _count(total: Update, update: Update) -> None:
    """Keep what `usage` needs of a stream, but not its text."""
    total.token_ids += update.token_ids
    total.cached_tokens = update.cached_tokens
    total.finish = update.finish
    total.timing = update.timing
