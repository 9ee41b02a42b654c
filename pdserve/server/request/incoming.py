"""Checks of a request that another server sends to `/migrate_in`, before the scheduler gets it.

A request body is checked by its endpoint. Here the request comes as a value, so each of its fields is checked alone.
What this server lacks, such as a logit processor, is refused by its field. A value that passes can do no more than a
body could.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.config.groups import GrammarConfig
from pdserve.errors import RequestError
from pdserve.protocol.messages import MAX_ROOM, GenerateRequest, RoomAddress
from pdserve.protocol.sampling import TOP_K_ALL, CoreSamplingParams, validate_sampling
from pdserve.server.request.custom_params import ANY_TEXT, MAX_PARAMS_BYTES
from pdserve.server.request.intake import MAX_NATIVE_TOP_LOGPROBS, MAX_RID_CHARS, MAX_SALT_CHARS, check_token_ids
from pdserve.server.request.sampling_fields import RequestLimits


def check_incoming(request: GenerateRequest, limits: RequestLimits, grammar: GrammarConfig) -> None:
    """Check a request of another server. `grammar`: what this one has of grammars and logit processors.

    Raises:
        RequestError: 400 naming the field that is wrong; 409 naming what this server does not have.
    """
    if not 0 < len(request.rid) <= MAX_RID_CHARS:
        raise _bad("rid", f"must have 1 to {MAX_RID_CHARS} characters")
    if len(request.migration_id) > MAX_RID_CHARS:
        raise _bad("migration_id", f"must have at most {MAX_RID_CHARS} characters")
    if not request.input_ids:
        raise _bad("input_ids", "must not be empty")
    check_token_ids(request.input_ids, limits.vocab_size, "request.input_ids")
    check_token_ids(request.prior_output_ids, limits.vocab_size, "request.prior_output_ids")
    if request.hidden is not None or request.input_embeds:
        raise _bad("hidden", "and request.input_embeds do not move")
    if request.kv_tokens or request.replica is not None:
        raise _bad("kv_tokens", "and request.replica are not for requests of other servers")
    if len(request.cache_salt) > 2 * MAX_SALT_CHARS + 1:  # see `intake.with_salts`
        raise _bad("cache_salt", f"has {len(request.cache_salt)} characters")
    _check_sampling(request, limits)
    _check_logprobs(request, limits)
    if request.taken_over:
        if request.room is not None or not request.local:
            raise _bad("taken_over", "is for a local request without a room")
    else:
        _check_room(request.room)
    processor, wanted = request.sampling.processor, request.sampling.grammar
    if processor is not None and processor.name not in grammar.processor_names:
        raise _lacks("custom_logit_processor", f"no processor {processor.name!r} (--logit-processors)")
    if grammar.grammar_backend == "none" and wanted is not None and wanted.kind != ANY_TEXT.kind:
        raise _lacks("grammar_backend", "no grammars (--grammar-backend none)")


def _check_sampling(request: GenerateRequest, limits: RequestLimits) -> None:
    sampling, num_prior = request.sampling, len(request.prior_output_ids)
    try:
        validate_sampling(sampling, limits.vocab_size)
    except RequestError as error:
        raise error.renamed(f"request.sampling: {error.message}", f"request.sampling.{error.field}") from error
    if sampling.top_k > TOP_K_ALL:
        raise _bad("sampling.top_k", f"must be at most {TOP_K_ALL}, got {sampling.top_k}")
    if sampling.processor is not None:
        _check_params(sampling.processor.params)
    if sampling.seed is not None and not 0 <= sampling.seed < 1 << 63:
        raise _bad("sampling.seed", "must have 63 bits")
    if num_prior >= max(1, sampling.max_new_tokens):
        raise _bad("prior_output_ids", f"has {num_prior} tokens; the request may generate {sampling.max_new_tokens}")
    _check_budget(sampling, limits)
    num_tokens = len(request.input_ids) + sampling.max_new_tokens
    if num_tokens > limits.capacity:
        raise _lacks("context_length", f"room for {limits.capacity} tokens, the request may have {num_tokens}")


def _check_budget(sampling: CoreSamplingParams, limits: RequestLimits) -> None:
    """Check the thinking budget, and that a row with one or with a processor has a grammar."""
    thinking = sampling.thinking
    if thinking is not None:
        if thinking.num_tokens < 0:
            raise _bad("sampling.thinking.num_tokens", f"is {thinking.num_tokens}")
        check_token_ids(thinking.closing_ids, limits.vocab_size, "request.sampling.thinking.closing_ids")
    if sampling.grammar is None and (thinking is not None or sampling.processor is not None):
        raise _bad("sampling.grammar", "is missing beside thinking or processor")


def _check_params(params: str) -> None:
    """Check the parameters of a logit processor."""
    field = "sampling.processor.params"
    if len(params) > MAX_PARAMS_BYTES:
        raise _bad(field, f"has {len(params)} characters; the maximum is {MAX_PARAMS_BYTES}")
    try:
        msgspec.json.decode(params, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _bad(field, f"must be a JSON object: {error}") from error


def _check_logprobs(request: GenerateRequest, limits: RequestLimits) -> None:
    logprobs = request.logprobs
    if logprobs is None:
        return
    if not 0 <= logprobs.top <= MAX_NATIVE_TOP_LOGPROBS:
        raise _bad("logprobs.top", f"must be in [0, {MAX_NATIVE_TOP_LOGPROBS}], got {logprobs.top}")
    if logprobs.prompt_from is not None:
        raise _bad("logprobs.prompt_from", "must be null: the other server has the prompt's")
    check_token_ids(logprobs.token_ids, limits.vocab_size, "request.logprobs.token_ids")


def _check_room(room: RoomAddress | None) -> None:
    if room is None or room.sender is None:
        raise _bad("room.sender", "is missing")
    if not 0 <= room.room <= MAX_ROOM:
        raise _bad("room.room", f"must be in [0, {MAX_ROOM}], got {room.room}")
    host, _, port = room.sender.endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16 or not room.sender.instance:
        raise _bad("room.sender", f"must be an instance and host:port, got {room.sender.endpoint!r}")


def _lacks(field: str, what: str) -> RequestError:
    message = f"{field}: this server has {what}"
    return RequestError(message, field=field, status=409, code="not_migratable")


def _bad(field: str, what: str) -> RequestError:
    name = f"request.{field}"
    return RequestError(f"{name} {what}", field=name)
