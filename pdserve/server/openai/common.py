"""Base classes of the endpoints that generate: the response to prepared requests, whole or streamed, with its usage."""

from __future__ import annotations

import abc
import asyncio
import functools
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, Self

import msgspec
from fastapi import Request
from fastapi.responses import Response

from pdserve.base.stream_state import DONE
from pdserve.errors import PdserveError, RequestError
from pdserve.observe.speculation import request_fields
from pdserve.protocol.cached_tokens import CachedTokensDetails
from pdserve.protocol.logprobs import PromptLogprobs
from pdserve.protocol.messages import FinishReason
from pdserve.server.context import ServerContext
from pdserve.server.engine_client.live_requests import RequestOrigin, RequestState
from pdserve.server.generation import Generation, GenerationUpdate, Resume, StreamStates
from pdserve.server.http.json_http import EVENTS, collect, event, json_response, stream_response, until_disconnect
from pdserve.server.openai.logprob_format import LARGE, prompt_tokens, vllm_prompt_logprobs
from pdserve.server.request.intake import check_top_logprobs, num_prompt_tokens, resume_stream
from pdserve.server.request.schemas import OpenAIBody


def finish_fields(finish: FinishReason | None) -> dict[str, Any]:
    """Build `finish_reason` and SGLang's `matched_stop` of a choice."""
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": finish.type, "matched_stop": finish.matched}


def timing_fields(updates: Sequence[GenerationUpdate]) -> dict[str, Any]:
    """Build the `pdserve` extension: timing and speculation of the first sequence that has a timing."""
    for update in updates:
        if update.timing is not None:
            fields = msgspec.to_builtins(update.timing)
            assert isinstance(fields, dict)
            return fields | request_fields(update.speculation)
    return {}


def prediction_tokens(updates: Sequence[GenerationUpdate]) -> dict[str, int]:
    """Build the fields of `completion_tokens_details` for draft tokens; none if no drafts were verified."""
    found = [update.speculation for update in updates if update.speculation is not None]
    if not found:
        return {}
    accepted = sum(stats.num_accepted for stats in found)
    drafts = sum(stats.num_draft_tokens for stats in found)
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafts - accepted}


def check_prompt_logprobs(body: OpenAIBody) -> int | None:
    """Return the validated `prompt_logprobs`: top tokens per prompt position; None: no prompt log probabilities.

    Raises:
        RequestError: 400 naming `prompt_logprobs`.
    """
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs cannot be streamed; use stream: false", field="prompt_logprobs")
    return check_top_logprobs(body.prompt_logprobs, "prompt_logprobs")


def check_prompt_token_ids(body: OpenAIBody) -> None:
    """Refuse `return_prompt_token_ids` of a stream, as SGLang does.

    Raises:
        RequestError: 400 naming `return_prompt_token_ids`.
    """
    if body.return_prompt_token_ids and body.stream:
        field = "return_prompt_token_ids"
        raise RequestError(f"{field} cannot be streamed; use stream: false", field=field)


class GenerationCall(abc.ABC):
    """One call of an endpoint that generates; subclasses format the answer. Event loop only."""

    id_prefix: str
    stream_end = DONE
    """The last event of a stream."""
    media_type = EVENTS
    """Content type of a stream."""

    def __init__(self, context: ServerContext, body: OpenAIBody, states: list[RequestState], n: int) -> None:
        """`states[p * n + j]` is output j of prompt p."""
        limits, weights = context.limits(), context.weights_in_use
        resume_stream(states, body.pdserve_resume, limits.vocab_size, stream=bool(body.stream), weights=weights)
        self.context = context
        self.body = body
        self.states = states
        self.n = n
        self._num_prompt_tokens = num_prompt_tokens(states, n)
        self.prompt_parts: dict[int, list[PromptLogprobs]] = {}
        self._head = {
            "id": f"{self.id_prefix}{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model or context.model_name,
            "system_fingerprint": context.fingerprint,
            **({} if body.pdserve_resume is None else body.pdserve_resume.head.fields),
            **({} if context.restored is None else context.restored.head()),
        }

    @abc.abstractmethod
    def whole(self, updates: list[GenerationUpdate]) -> dict[str, Any]:
        """Build the answer that is not streamed. `updates` has one complete update per sequence."""

    @abc.abstractmethod
    def opening_events(self, update: GenerationUpdate, seen: dict[int, GenerationUpdate]) -> list[bytes]:
        """Build the events of a sequence before its first output. `update` is its first update.

        `seen`: the output of each sequence so far, without its text.
        """

    @abc.abstractmethod
    def events(self, update: GenerationUpdate, seen: dict[int, GenerationUpdate]) -> Iterator[bytes]:
        """Build the events of `update`, which `seen` includes; the last ones of all sequences end the stream."""

    @abc.abstractmethod
    def replay(self, update: GenerationUpdate) -> None:
        """Restore the state of a resumed stream: another server has sent `update` of its one sequence."""

    async def answer(self, request: Request) -> Response:
        """Submit, and return the response, whole or streamed.

        A prefill server never streams, because its part ends with the first token.
        """
        stream = bool(self.body.stream) and self.context.mode != "prefill"
        generation = await self.context.client.submit(self.states)
        with generation.closed_on_error():
            if stream:
                events = self._events(request, generation)
                return await stream_response(request, events, done=self.stream_end, media_type=self.media_type)
            # The router drops the answer of a prefill server, whose resume state may lack log probabilities.
            is_new = self._resume is None or self.context.mode == "prefill"
            before = None if is_new else self._before(generation)
            updates = await until_disconnect(request, collect(generation, len(self.states), before))
            for update in updates:
                self.prompt_parts[update.index] = update.prompt_parts
            if sum(part.num_tokens for update in updates for part in update.prompt_parts) > LARGE:
                return json_response(await asyncio.to_thread(self.whole, updates))
            return json_response(self.whole(updates))

    async def _events(self, request: Request, generation: Generation) -> AsyncGenerator[bytes, None]:
        seen = self._seen_elsewhere(generation)
        earlier = None if self._resume is None or not self._resume.token_ids else self._resume.update("")
        states = StreamStates(request, self._head, num_sequences=len(self.states))
        self.states[0].has_resume_state = states.wanted
        try:
            async with generation:
                async for update in generation:
                    self.prompt_parts.setdefault(update.index, []).extend(update.prompt_parts)
                    if update.prompt_parts and not update.token_ids and update.finish is None:
                        continue  # more parts of the prompt's log probabilities follow
                    if update.index not in seen:
                        seen[update.index] = GenerationUpdate(update.index)
                        for data in states.with_state(None, self.opening_events(update, seen)):
                            yield data
                    if earlier is not None:
                        update.take_cached(earlier)
                    _count(seen[update.index], update)
                    for data in states.with_state(update, list(self.events(update, seen))):
                        yield data
        except PdserveError:
            rest = states.rest()
            if rest:
                yield rest
            raise

    def _seen_elsewhere(self, generation: Generation) -> dict[int, GenerationUpdate]:
        """The output of a resumed stream that another server has sent, by sequence; empty for a new stream."""
        if self._resume is None:
            return {}
        before = self._before(generation)
        self.prompt_parts[0] = list(before.prompt_parts)
        self.replay(before)
        return {0: before}

    def _before(self, generation: Generation) -> GenerationUpdate:
        """The output of a resumed or restored request so far."""
        text, restored = generation.prior_text.get(0, ""), self.context.restored
        if restored is not None:
            return restored.before(text)
        assert self._resume is not None
        return self._resume.update(text)

    def keep_origin(self, path: str, body: dict[str, Any]) -> Self:
        """Remember the call for a snapshot of its request: the client's `body` at `path`. Returns self."""
        if len(self.states) == 1:
            self.states[0].origin = RequestOrigin(path, body, self._head)
        return self

    @property
    def _resume(self) -> Resume | None:
        """The output before this try; None: there is none."""
        restored = self.context.restored
        return self.body.pdserve_resume if restored is None else restored.resume


class OpenAICall(GenerationCall):
    """One call of chat or text completions; subclasses format the choices. Event loop only."""

    object_name: str
    chunk_name: str
    prompt_logprobs_of_body = True
    """Whether the prompt's log probabilities are a field of the response, not of its choices."""
    finish_with_tokens = False
    """Whether the chunk of the last tokens has the finish reason; else a chunk without tokens follows with it."""

    @abc.abstractmethod
    def choice(self, update: GenerationUpdate) -> dict[str, Any]:
        """Build a whole choice, without its index and finish."""

    @abc.abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """Build the fields of a choice's first chunk, before any output token; None: there is no such chunk."""

    @abc.abstractmethod
    def delta(self, update: GenerationUpdate) -> dict[str, Any]:
        """Build the fields of a chunk's choice for `update`. An empty `update` gives empty fields."""

    def chunk_fields(self, update: GenerationUpdate) -> dict[str, Any] | None:
        """Build the fields of a chunk's choice for the next `update` of a stream; None: no chunk is sent."""
        return self.delta(update) if update.text or update.logprobs else None

    def finish_fields(self, index: int, finish: FinishReason | None) -> dict[str, Any]:
        """Build the finish fields of choice `index`. Called after `choice` or `delta` has read its text."""
        return finish_fields(finish)

    def completion_details(self, updates: Sequence[GenerationUpdate]) -> dict[str, int]:
        """Build `completion_tokens_details` of `usage`; empty: the usage has none."""
        return prediction_tokens(updates)

    def replay(self, update: GenerationUpdate) -> None:
        """Restore the state of a resumed stream: another server has sent `update` of its one sequence."""
        self.delta(update)

    def chosen(self, updates: list[GenerationUpdate]) -> list[GenerationUpdate]:
        """Select the sequences that become choices, in order."""
        return updates

    def prompt_logprobs(self, index: int) -> dict[str, Any]:
        """Build vLLM's `prompt_logprobs` for the prompt of sequence `index`, if the body requests it."""
        if self.body.prompt_logprobs is None:
            return {}
        tokens = prompt_tokens(self.states[index].request, self.prompt_parts.get(index, []))
        return {"prompt_logprobs": vllm_prompt_logprobs(self.context.tokenizer, tokens, self.body.prompt_logprobs)}

    def whole(self, updates: list[GenerationUpdate]) -> dict[str, Any]:
        """See `GenerationCall`."""
        choices = [
            {"index": i, **self.choice(u), **self.finish_fields(u.index, u.finish), **self._prompt_token_ids(u.index)}
            for i, u in enumerate(self.chosen(updates))
        ]
        extra = self._extra(updates) | self._sglext(updates)
        if self.prompt_logprobs_of_body:
            extra |= self.prompt_logprobs(0)
        metadata = {"weight_version": self.states[0].weight_version or self.context.weight_version}
        answer = {**self._head, "object": self.object_name, "choices": choices, "usage": self._usage(updates)}
        return {**answer, "metadata": metadata, **extra}

    def _prompt_token_ids(self, index: int) -> dict[str, Any]:
        """Build `prompt_token_ids` of a choice, if the body requests it."""
        return {"prompt_token_ids": self.states[index].request.input_ids} if self.body.return_prompt_token_ids else {}

    def _usage(self, updates: Sequence[GenerationUpdate]) -> dict[str, Any]:
        prompt = self._num_prompt_tokens
        completion = sum(len(update.token_ids) for update in updates)
        cached = sum(update.cached_tokens for update in updates if update.index % self.n == 0)
        details = self.completion_details(updates)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            **({"completion_tokens_details": details} if details else {}),
        }

    def opening_events(self, update: GenerationUpdate, seen: dict[int, GenerationUpdate]) -> list[bytes]:
        """See `GenerationCall`."""
        opening = self.opening(update.index)
        return [] if opening is None else [self._chunk(update.index, opening, self._running(seen))]

    def events(self, update: GenerationUpdate, seen: dict[int, GenerationUpdate]) -> Iterator[bytes]:
        """See `GenerationCall`. The last one of all sequences is followed by the usage chunk, if requested."""
        chunk_fields = self.chunk_fields(update)
        ends_here = update.finish is not None and self.finish_with_tokens
        if chunk_fields is not None and not ends_here:
            yield self._chunk(update.index, chunk_fields, self._running(seen))
        if update.finish is None:
            return
        last = len(seen) == len(self.states) and all(u.finish for u in seen.values())
        done = list(seen.values())
        extra = self._extra(done) if last and not self._wants_usage else {}
        if chunk_fields is None or not ends_here:
            chunk_fields = self.delta(GenerationUpdate(update.index))
        yield self._chunk(update.index, chunk_fields, {**self._running(seen), **extra}, update.finish)
        sglext = self._sglext(done) if last else {}
        if sglext:
            yield event({**self._head, "object": self.chunk_name, "choices": [], **sglext})
        if last and self._wants_usage:
            body = {**self._head, "object": self.chunk_name, "choices": [], "usage": self._usage(done)}
            yield event({**body, **self._extra(done)})

    def _chunk(
        self,
        index: int,
        fields: dict[str, Any],
        extra: dict[str, Any],
        finish: FinishReason | None = None,
    ) -> bytes:
        choice = {"index": index, **fields, **self.finish_fields(index, finish)}
        return event({**self._head, "object": self.chunk_name, "choices": [choice], **extra})

    def _running(self, seen: dict[int, GenerationUpdate]) -> dict[str, Any]:
        """Build `usage` of a chunk: null, or the usage so far with `continuous_usage_stats`."""
        if not self._wants_usage:
            return {}
        options = self.body.stream_options
        continuous = options is not None and bool(options.continuous_usage_stats)
        return {"usage": self._usage(list(seen.values())) if continuous else None}

    def _extra(self, updates: list[GenerationUpdate]) -> dict[str, Any]:
        return {"pdserve": timing_fields(updates)} if self.body.return_meta_info else {}

    def _sglext(self, updates: Sequence[GenerationUpdate]) -> dict[str, Any]:
        """Build SGLang's `sglext` with the sources of the cached tokens of all prompts, if the body requests it."""
        if not self.body.return_cached_tokens_details:
            return {}
        parts = [update.cached_by_source for update in updates if update.index % self.n == 0]
        total = functools.reduce(CachedTokensDetails.plus, parts)
        backend = self.context.config.storage.hicache_storage_backend
        return {"sglext": {"cached_tokens_details": total.shown(backend)}}

    @property
    def _wants_usage(self) -> bool:
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)


def _count(total: GenerationUpdate, update: GenerationUpdate) -> None:
    """Add to `total` the fields of `update` that `usage` needs, without its text."""
    total.token_ids += update.token_ids
    total.take_cached(update)
    total.finish = update.finish
    total.timing = update.timing
    total.speculation = update.speculation
