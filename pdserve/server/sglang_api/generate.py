"""`POST /generate`, SGLang's native API: text or token ids, single or batch, whole or streamed.

Each event of a stream has all text so far, or with `--incremental-streaming-output` only the new text.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response

from pdserve.errors import RequestError
from pdserve.http.access import GENERATE_PATH
from pdserve.http.session_store import SessionTurn
from pdserve.observe.speculation import request_fields
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.messages import GenerateRequest
from pdserve.protocol.sampling import Grammar
from pdserve.server.context import ServerContext
from pdserve.server.engine_client.live_requests import RequestOrigin, RequestState
from pdserve.server.generation import Generation, GenerationUpdate, StreamStates
from pdserve.server.http.json_http import (
    PARSED_BODY,
    collect,
    convert,
    event,
    json_response,
    read_json_object,
    refuse_unsupported,
    scalar_or_list,
    stream_response,
    until_disconnect,
)
from pdserve.server.openai.logprob_format import LARGE, NativeFormat, prompt_tokens
from pdserve.server.request.constraints import native_constraint
from pdserve.server.request.intake import (
    MAX_NATIVE_TOP_LOGPROBS,
    as_prompts,
    check_token_ids,
    check_top_logprobs,
    prompt_field,
    prompt_request,
    resume_stream,
)
from pdserve.server.request.sampling_fields import NativeNames, RequestLimits, check_listed, count_n, native_sampling
from pdserve.server.request.schemas import UNSUPPORTED_NATIVE, GenerateBody, NativeSampling
from pdserve.server.sglang_api.hidden_states import hidden_states, with_hidden_states
from pdserve.server.sglang_api.input_embeds import FIELD as EMBEDS_FIELD
from pdserve.server.sglang_api.input_embeds import check_embeds_alone, embeds_of, is_batch, placeholders, with_embeds
from pdserve.server.sglang_api.sessions import begin_turn, no_sessions

TURN = "pdserve.session_turn"
"""Key in an ASGI scope of the `SessionTurn` of the request, whose body has the whole prompt."""
Handle = Callable[[Request], Awaitable[Response]]
MAX_TOKEN_IDS = 1024
"""Maximum number of ids in `token_ids_logprob` of a prompt."""


def native_logprob_params(
    body: GenerateBody, prompts: Sequence[Sequence[int]], vocab_size: int, *, listed: bool
) -> list[Logprobs | None]:
    """Return the log probability parameters of every prompt; None: it wants none. `listed`: the response is a list.

    Prefill's response has the prompt's log probabilities. Routers merge `input_token_logprobs` from it, unless the
    response is a list. Prefill sends all other prompt log probabilities to decode, and all of a request without router.

    Raises:
        RequestError: 400 naming the field.
    """
    count = len(prompts)
    wanted = scalar_or_list(body.return_logprob, count, "return_logprob", bool)
    tops = scalar_or_list(body.top_logprobs_num, count, "top_logprobs_num", int)
    starts = scalar_or_list(body.logprob_start_len, count, "logprob_start_len", int)
    picks = _token_ids(body.token_ids_logprob, count, vocab_size)
    return [
        _logprob_params(top or 0, -1 if start is None else start, ids, len(prompt), listed) if want else None
        for want, top, start, ids, prompt in zip(wanted, tops, starts, picks, prompts, strict=True)
    ]


def _logprob_params(top: int, start: int, token_ids: tuple[int, ...], num_prompt: int, listed: bool) -> Logprobs:
    check_top_logprobs(top, "top_logprobs_num", MAX_NATIVE_TOP_LOGPROBS)
    if not -1 <= start <= num_prompt:
        raise RequestError(
            f"logprob_start_len must be -1 (the output only) or in [0, {num_prompt}] (the prompt), got {start}",
            field="logprob_start_len",
        )
    return Logprobs(
        top=top,
        token_ids=token_ids,
        prompt_from=None if start in (-1, num_prompt) else start,
        to_decode=listed or top > 0 or bool(token_ids),
    )


def _token_ids(value: Any, count: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Parse `token_ids_logprob` of every prompt: a list of ids for all, or one list (or null) for each."""
    field = "token_ids_logprob"
    if value is None:
        return [()] * count
    if not isinstance(value, list):
        raise RequestError(f"{field} must be a list of token ids, got {type(value).__name__}", field=field)
    shared = bool(value) and not any(entry is None or isinstance(entry, list) for entry in value)
    lists = [value] * count if shared or not value else value
    if len(lists) != count:
        raise RequestError(f"{field} has {len(lists)} entries for {count} prompts", field=field)
    for ids in lists:
        if ids is not None and not isinstance(ids, list):
            raise RequestError(f"{field} mixes token ids and lists", field=field)
        if ids is not None and len(ids) > MAX_TOKEN_IDS:
            raise RequestError(f"{field} takes at most {MAX_TOKEN_IDS} token ids, got {len(ids)}", field=field)
        check_token_ids(ids or (), vocab_size, field)
    return [tuple(ids or ()) for ids in lists]


@dataclasses.dataclass(frozen=True)
class GenerateCall:
    """One call of `/generate`: `body`, validated, and its sequences, ready to be submitted.

    `listed`: the response is a list. `started_s`: monotonic seconds.
    """

    context: ServerContext
    body: GenerateBody
    states: list[RequestState]
    listed: bool
    started_s: float
    turn: SessionTurn | None = None
    """The place of the request in its session; None without one."""

    async def answer(self, request: Request) -> Response:
        """Submit, and return the response, whole or streamed.

        A prefill server never streams, because its part ends with the first token.
        """
        with contextlib.nullcontext() if self.turn is None else self.turn.running():
            return await self._answer(request)

    async def _answer(self, request: Request) -> Response:
        generation = await self.context.client.submit(self.states)
        with generation.closed_on_error():
            if self.body.stream and self.context.mode != "prefill":
                return await stream_response(request, self._events(request, generation))
            updates = await until_disconnect(request, collect(generation, len(self.states), self.before(generation)))
            if self.turn is not None:
                self.turn.ended(updates[0].token_ids)
            if sum(update.num_part_tokens for update in updates) > LARGE:
                return await asyncio.to_thread(self._whole, updates)
            return self._whole(updates)

    def before(self, generation: Generation) -> GenerationUpdate | None:
        """Return the output of a resumed or restored request so far; None for a new one."""
        text, restored, resume = generation.prior_text.get(0, ""), self.context.restored, self.body.pdserve_resume
        if restored is not None:
            return restored.before(text)
        return None if resume is None else resume.update(text)

    def _whole(self, updates: list[GenerationUpdate]) -> Response:
        results = [self._result(update, update, self._input_logprobs(update)) for update in updates]
        return json_response(results if self.listed else results[0])

    async def _events(self, request: Request, generation: Generation) -> AsyncGenerator[bytes, None]:
        totals = [GenerationUpdate(index) for index in range(len(self.states))]
        before = self.before(generation)
        if before is not None:
            totals[0] = before
        inputs: dict[int, dict[str, Any]] = {}
        incremental = self.context.config.serving.incremental_streaming_output
        states = StreamStates(
            request,
            {"id": self.states[0].name},
            num_sequences=2 if self.listed else 1,
            logprobs=self.states[0].request.logprobs is not None and not incremental,
        )
        self.states[0].has_resume_state = states.wanted
        async with self._in_session(), generation:
            async for update in generation:
                total = totals[update.index]
                if before is not None and before.token_ids:
                    update.take_cached(before)
                total.absorb(update)
                if self.turn is not None and update.finish is not None:
                    self.turn.ended(total.token_ids)
                if not update.token_ids and update.finish is None:
                    continue  # only a part of the prompt's log probabilities
                if update.index not in inputs:
                    inputs[update.index] = await asyncio.to_thread(self._input_logprobs, total)
                result = self._result(total, update if incremental else total, inputs[update.index])
                for data in states.with_state(
                    update, [event({"index": update.index, **result} if self.listed else result)]
                ):
                    yield data

    @contextlib.asynccontextmanager
    async def _in_session(self) -> AsyncIterator[None]:
        """A stream in its session, which forgets one that its client has left."""
        try:
            yield
        finally:
            if self.turn is not None:
                self.turn.left()

    def _format(self, logprob_params: Logprobs) -> NativeFormat:
        with_text = bool(self.body.return_text_in_logprobs)
        return NativeFormat(self.context.tokenizer, logprob_params.top > 0, bool(logprob_params.token_ids), with_text)

    def _input_logprobs(self, update: GenerationUpdate) -> dict[str, Any]:
        """The prompt's log probability fields. Decode leaves `input_token_logprobs` empty, as routers fill it in.

        Routers do so only if the response is not a list.
        """
        request = self.states[update.index].request
        if request.logprobs is None:
            return {}
        fields = self._format(request.logprobs).input(prompt_tokens(request, update.prompt_parts))
        if self.context.mode == "decode" and not self.listed and not self.body.pdserve_single_request:
            fields["input_token_logprobs"] = []
        return fields

    def _result(
        self, total: GenerationUpdate, shown: GenerationUpdate, input_logprobs: dict[str, Any]
    ) -> dict[str, Any]:
        """Build the result. `total`: the sequence so far. `shown`: tokens and text of this response or event."""
        state = self.states[total.index]
        request = state.request
        meta: dict[str, Any] = {
            "id": state.name,
            "finish_reason": _finish(total),
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": len(total.token_ids),
            "cached_tokens": total.cached_tokens,
            "weight_version": state.weight_version or self.context.weight_version,
            "e2e_latency": time.monotonic() - self.started_s,
            "timing": msgspec.to_builtins(total.timing) if total.timing is not None else {},
        }
        if total.cached_details is not None:
            backend = self.context.config.storage.hicache_storage_backend
            meta["cached_tokens_details"] = total.cached_details.shown(backend)
        meta |= request_fields(total.speculation)
        if request.logprobs is not None:
            meta |= input_logprobs | self._format(request.logprobs).output(shown, request.logprobs.token_ids)
        if request.hidden is not None and total.finish is not None:
            meta["hidden_states"] = hidden_states(request, total.hidden_parts, len(total.token_ids))
        result: dict[str, Any] = {"text": shown.text, "output_ids": shown.token_ids, "meta_info": meta}
        if self.body.return_prompt_token_ids:
            result["prompt_token_ids"] = request.input_ids
        return result


def _finish(update: GenerationUpdate) -> dict[str, Any] | None:
    finish = update.finish
    if finish is None:
        return None
    match finish.type:
        case "stop":
            return {"type": "stop", "matched": finish.matched}
        case "length":
            return {"type": "length", "length": finish.length or len(update.token_ids)}
        case "suspended":
            return {"type": "suspended", "message": finish.message}
        case "abort":
            return {
                "type": "abort",
                "message": finish.message or "aborted",
                "status_code": finish.status_code,
                "err_type": finish.err_type,
            }


async def _prompts(context: ServerContext, body: GenerateBody) -> tuple[list[list[int]], str, bool]:
    """Return the token ids of every prompt, the name of their field, and whether the field is a batch."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("exactly one of text, input_ids and input_embeds must be given", field="text")
    field = "text" if body.text is not None else "input_ids"
    value = body.text if body.text is not None else body.input_ids
    prompts, batch = as_prompts(value, field, allow_text=field == "text", allow_ids=field == "input_ids")
    return await context.token_ids(prompts, field, batch=batch), field, batch


def _samplings(value: Any, names: list[NativeNames]) -> list[NativeSampling]:
    """Parse `sampling_params` of every prompt: one object for all, or a list."""
    given = scalar_or_list({} if value is None else value, len(names), "sampling_params", dict)
    if not isinstance(value, list):
        return [_sampling(given[0], names[0])] * len(names)
    return [_sampling(entry, name) for entry, name in zip(given, names, strict=True)]


def _sampling(entry: dict[str, Any] | None, name: NativeNames) -> NativeSampling:
    return convert(entry or {}, NativeSampling, prefix=name.sampling)


def _count_n(samplings: list[NativeSampling], names: list[NativeNames]) -> int:
    counts = set()
    for sampling, name in zip(samplings, names, strict=True):
        with name.inside():
            counts.add(count_n(sampling.n))
    if len(counts) > 1:
        raise RequestError("sampling_params.n must be the same for all prompts of a batch", field="sampling_params.n")
    return counts.pop()


async def _customized(
    context: ServerContext, request: GenerateRequest, fields: NativeSampling, name: NativeNames, processor: str | None
) -> GenerateRequest:
    """Return `request` with what `custom_params` of its `sampling_params` and its logit processor ask for."""
    custom = await context.take_custom(fields.custom_params, f"{name.sampling}.custom_params", processor)
    sampling = custom.apply(request.sampling, context.begins_inside(custom, request.input_ids))
    return msgspec.structs.replace(request, sampling=sampling)


def _prompt_requests(
    prompts: list[list[int]],
    samplings: list[NativeSampling],
    grammars: list[Grammar | None],
    prompt_logprob_params: list[Logprobs | None],
    limits: RequestLimits,
    names: list[NativeNames],
) -> list[GenerateRequest]:
    return [
        prompt_request(ids, native_sampling(sampling, len(ids), limits, name, grammar), logprob_params)
        for ids, sampling, grammar, logprob_params, name in zip(
            prompts, samplings, grammars, prompt_logprob_params, names, strict=True
        )
    ]


async def _grammar(context: ServerContext, sampling: NativeSampling, name: NativeNames) -> Grammar | None:
    with name.inside():
        return await context.take_grammar(native_constraint(sampling, name.sampling), sampling.stop_regex)


async def generate(context: ServerContext, request: Request) -> Response:
    """Serve `POST /generate`: validate the whole body, then submit. An invalid request allocates nothing.

    Raises:
        RequestError: the body is invalid; the error names the field.
    """
    started_s = time.monotonic()
    raw = await read_json_object(request, context.max_body_bytes)
    return await (await prepare_generate(context, raw, started_s, request)).answer(request)


def in_session(context: ServerContext, handle: Handle) -> Handle:
    """Return a handler of `/generate` at a decode server that sends the prefill half itself: both halves get the prompt
    of a request of a session as a whole. The requests of `handle` find their turn in the scope.
    """

    async def answer(request: Request) -> Response:
        raw = await read_json_object(request, context.max_body_bytes)
        request.scope[PARSED_BODY] = raw
        if raw.get("session_params") is None or raw.get("bootstrap_room") is not None:
            return await handle(request)
        body = convert(refuse_unsupported(raw, UNSUPPORTED_NATIVE), GenerateBody)
        if body.input_embeds is not None:
            check_embeds_alone(body)
        prompts, field, batch = await _prompts(context, body)
        names = [NativeNames(field, "sampling_params")] * len(prompts)
        n = _count_n(_samplings(body.sampling_params, names), names)
        turn = begin_turn(context, request, body.session_params, body.rid, prompts, n)
        whole = {"text": None, "input_ids": [turn.prompt] if batch else turn.prompt, "session_params": None}
        request.scope[PARSED_BODY] = {**raw, **whole, "rid": turn.node.rid}
        request.scope[TURN] = turn
        return await handle(request)

    return answer


async def prepare_generate(
    context: ServerContext, raw: dict[str, Any], started_s: float, request: Request | None = None
) -> GenerateCall:
    """Validate the body `raw` and prepare the call. `started_s`: see `GenerateCall`. `request`: whose sessions it uses.

    Raises:
        RequestError: the body is invalid; the error names the field.
    """
    limits = context.limits()
    body = convert(refuse_unsupported(raw, UNSUPPORTED_NATIVE), GenerateBody)
    context.check_model(body.model)
    if body.lora_path is not None and not context.config.lora.is_on:
        raise RequestError("lora_path: this server has no LoRA adapters (--enable-lora)", field="lora_path")
    embeds: list[bytes] = []
    if body.input_embeds is None:
        prompts, field, batch = await _prompts(context, body)
    else:
        check_embeds_alone(body)
        embeds, field, batch = await embeds_of(context, body.input_embeds), EMBEDS_FIELD, is_batch(body.input_embeds)
        prompts = placeholders(context, embeds)
    several = isinstance(body.sampling_params, list)
    names = [
        NativeNames(prompt_field(field, i, batch=batch), prompt_field("sampling_params", i, batch=several))
        for i in range(len(prompts))
    ]
    samplings = _samplings(body.sampling_params, names)
    n = _count_n(samplings, names)
    turn: SessionTurn | None = None if request is None else request.scope.get(TURN)
    if body.session_params is not None:
        if context.mode != "null":
            raise no_sessions(context, "session_params")
        turn = begin_turn(context, request, body.session_params, body.rid, prompts, n)
        body.rid, prompts = turn.node.rid, [turn.prompt]
        raw = {**raw, "text": None, "input_ids": prompts[0], "session_params": None}  # snapshots repeat the body
    with names[0].inside():
        check_listed(samplings, len(samplings) * n)
    grammars = [await _grammar(context, sampling, name) for sampling, name in zip(samplings, names, strict=True)]
    listed = batch or n > 1
    no_merge = listed or bool(body.pdserve_single_request)
    prompt_logprob_params = native_logprob_params(body, prompts, limits.vocab_size, listed=no_merge)
    prompt_requests = [
        await _customized(context, request, sampling, name, processor)
        for request, sampling, name, processor in zip(
            _prompt_requests(prompts, samplings, grammars, prompt_logprob_params, limits, names), samplings, names,
            scalar_or_list(body.custom_logit_processor, len(prompts), "custom_logit_processor", str), strict=True,
        )
    ]  # fmt: skip
    if body.pdserve_resume is not None:
        body.rid = body.rid or body.pdserve_resume.head.id
    if embeds:
        prompt_requests = with_embeds(prompt_requests, embeds)
    prompt_requests = with_hidden_states(context, body, prompt_requests, n, listed=listed)
    with NativeNames(field, "sampling_params").inside():
        states = context.make_requests(prompt_requests, n, body, field, stream=bool(body.stream))
    repeats = not context.config.serving.incremental_streaming_output
    one = bool(body.stream) and not listed
    resume = body.pdserve_resume
    resume_stream(states, resume, limits.vocab_size, stream=one, weights=context.weights_in_use, logprobs=repeats)
    if len(states) == 1:
        states[0].origin = RequestOrigin(GENERATE_PATH, raw, {"id": states[0].name})
    return GenerateCall(context, body, states, listed, started_s, turn)
