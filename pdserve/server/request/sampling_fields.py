"""Converts sampling fields of the native and OpenAI APIs to `CoreSamplingParams` with their final `max_new_tokens`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from pdserve.config.groups import DisaggMode
from pdserve.errors import RequestError
from pdserve.protocol.engine_state import EngineReady
from pdserve.protocol.sampling import BODY_DEFAULTS, TOP_K_ALL, CoreSamplingParams, Grammar, validate_sampling
from pdserve.server.request.schemas import (
    CONSTRAINTS,
    ChatBody,
    ConstraintFields,
    NativeSampling,
    OpenAIBody,
    SharedSampling,
)
from pdserve.server.text.stop_regex import MAX_STOP_CHARS, check_stop_regex

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_LOGIT_BIAS = 4096
MAX_LISTED = 1 << 18
"""Maximum entries of `logit_bias`, and of `stop_token_ids`, over all sequences of a body."""
MAX_BODY_TOKENS = 1 << 20
BODY_PROMPTS = 8
"""A body may have `MAX_BODY_TOKENS` prompt tokens, and always this many prompts of maximum length."""
MAX_CHAT_TOKENS = 2048
"""Default `max_tokens` of a chat; less if the context has less room."""
NATIVE_TOKENS = CoreSamplingParams().max_new_tokens
COMPLETION_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """Limits of a request on this server. `context_length` and `max_total_tokens` (the KV pool's size) are in
    tokens.
    """

    mode: DisaggMode
    vocab_size: int
    context_length: int
    max_total_tokens: int

    @classmethod
    def of(cls, ready: EngineReady, mode: DisaggMode) -> RequestLimits:
        """Return the limits that the scheduler announced."""
        return cls(mode, ready.vocab_size, ready.context_length, ready.max_total_tokens)

    @property
    def capacity(self) -> int:
        """Maximum tokens of a sequence, prompt and output together."""
        return min(self.context_length, self.max_total_tokens)

    @property
    def most_prompt_tokens(self) -> int:
        """Maximum tokens of a prompt, which leaves room for one output token."""
        return self.capacity - 1

    @property
    def most_body_tokens(self) -> int:
        """Maximum prompt tokens of one body: each prompt counts once per sequence generated from it."""
        return max(MAX_BODY_TOKENS, BODY_PROMPTS * self.capacity)


@dataclasses.dataclass(frozen=True)
class NativeNames:
    """Names of a `/generate` prompt and its parameters in errors: `text[1]`, `sampling_params[1]`."""

    prompt: str
    sampling: str

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Prefix the parameter names in errors of the block with `sampling`.

        Raises:
            RequestError: the block's, with the longer name.
        """
        try:
            yield
        except RequestError as error:
            if error.field not in NativeSampling.__struct_fields__:
                raise
            field = f"{self.sampling}.{error.field}"
            message = error.message.replace(error.field, field, 1)
            raise error.renamed(message, field) from error


def check_prompt_fits(num_prompt: int, limits: RequestLimits, prompt_field: str) -> None:
    """Check that a prompt leaves room for one output token.

    Raises:
        RequestError: 400 naming the prompt.
    """
    if num_prompt > limits.most_prompt_tokens:
        raise RequestError(
            f"{prompt_field} has {num_prompt} tokens; at most {limits.most_prompt_tokens} fit "
            f"(context {limits.context_length}, KV pool {limits.max_total_tokens})",
            field=prompt_field,
            code="context_length_exceeded",
        )


def fit_max_tokens(
    num_prompt: int, prompt_field: str, given: int | None, field: str, default: int, limits: RequestLimits
) -> int:
    """Return the number of tokens to generate for a prompt of `num_prompt` tokens.

    `given` is the client's limit in `field`; None: `default`. A default shrinks to what fits; the client's limit is
    refused if it does not fit. A prefill server holds the prompt and one token, so only the context length limits the
    output there.

    Raises:
        RequestError: 400 naming the prompt or the client's limit.
    """
    check_prompt_fits(num_prompt, limits, prompt_field)
    longest = limits.context_length if limits.mode == "prefill" else limits.capacity
    if given is None:
        return min(default, longest - num_prompt)
    if given < 0:
        raise RequestError(f"{field} must be at least 0, got {given}", field=field)
    if num_prompt + given > longest:
        raise RequestError(
            f"{num_prompt} prompt tokens and {field}={given} exceed the {longest} tokens that fit "
            f"(context {limits.context_length}, KV pool {limits.max_total_tokens})",
            field=field,
            code="context_length_exceeded",
        )
    return given


def count_n(n: int | None) -> int:
    """Return the number of sequences per prompt; 1 for None.

    Raises:
        RequestError: 400 naming `n`.
    """
    if n is None:
        return 1
    if not 1 <= n <= MAX_N:
        raise RequestError(f"n must be in [1, {MAX_N}], got {n}", field="n")
    return n


def check_listed(fields: Sequence[SharedSampling], num_sequences: int) -> None:
    """Check the total length of `logit_bias` and `stop_token_ids`: every sequence carries its own copy.

    `fields` has one entry for all sequences, or one for each of equally large groups of sequences.

    Raises:
        RequestError: 400 naming the field.
    """
    for name in ("logit_bias", "stop_token_ids"):
        num_entries = sum(len(getattr(each, name) or ()) for each in fields) * num_sequences // len(fields)
        if num_entries > MAX_LISTED:
            message = f"{name} of {num_sequences} sequences has {num_entries} entries; the maximum is {MAX_LISTED}"
            raise RequestError(message, field=name)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_CHARS for text in stops):
        raise RequestError(
            f"stop takes at most {MAX_STOP_STRINGS} strings of {MAX_STOP_CHARS} characters", field="stop"
        )
    return stops


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    if len(bias) > MAX_LOGIT_BIAS:
        message = f"logit_bias has {len(bias)} tokens; the maximum is {MAX_LOGIT_BIAS}"
        raise RequestError(message, field="logit_bias")
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError as error:  # not an integer, or more digits than int() reads
        raise RequestError(f"logit_bias keys must be token ids: {error}", field="logit_bias") from error


def _seed(seed: int | None, field: str) -> int | None:
    if seed is None:
        return None
    if not -(1 << 63) <= seed < 1 << 63:
        raise RequestError(f"{field} must fit into 64 bits, got {seed}", field=field)
    return seed & ((1 << 63) - 1)


def declared_sampling(body: SharedSampling) -> dict[str, Any]:
    """Return the values of the fields of `BODY_FIELDS`, with the default for null."""
    return {
        name: default if (value := getattr(body, name)) is None else value for name, default in BODY_DEFAULTS.items()
    }


def is_constrained(body: ConstraintFields) -> bool:
    """Whether a body has a field that may constrain its output, for `constraints.openai_constraint`."""
    return any(getattr(body, name) is not None for name in CONSTRAINTS)


def _output_limit(body: OpenAIBody) -> tuple[str, int | None]:
    """Return name and value of the client's limit of output tokens; None: the endpoint's default."""
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def _build(
    body: NativeSampling | OpenAIBody, max_tokens: int, min_tokens: int, seed: int | None, grammar: Grammar | None
) -> CoreSamplingParams:
    declared = declared_sampling(body)
    top_k = declared.pop("top_k")
    return CoreSamplingParams(
        **declared,
        top_k=TOP_K_ALL if top_k == -1 else min(top_k, TOP_K_ALL),
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens,
        seed=seed,
        stop=_stops(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        stop_regex=() if body.stop_regex is None else check_stop_regex(body.stop_regex),
        logit_bias=_logit_bias(body.logit_bias),
        grammar=grammar,
    )


def native_sampling(
    body: NativeSampling, num_prompt: int, limits: RequestLimits, names: NativeNames, grammar: Grammar | None = None
) -> CoreSamplingParams:
    """Build and check the parameters of a `/generate` prompt of `num_prompt` tokens.

    Raises:
        RequestError: 400 naming the field.
    """
    min_tokens = body.min_new_tokens or 0
    default = max(NATIVE_TOKENS, min_tokens)
    with names.inside():
        seed = _seed(body.seed, "seed") if body.sampling_seed is None else _seed(body.sampling_seed, "sampling_seed")
        max_tokens = fit_max_tokens(num_prompt, names.prompt, body.max_new_tokens, "max_new_tokens", default, limits)
        return validate_sampling(_build(body, max_tokens, min_tokens, seed, grammar), limits.vocab_size)


def openai_sampling(
    body: OpenAIBody,
    default_tokens: int,
    num_prompt: int,
    limits: RequestLimits,
    prompt_field: str,
    grammar: Grammar | None = None,
) -> CoreSamplingParams:
    """Build and check the parameters of an OpenAI prompt of `num_prompt` tokens.

    `default_tokens`: tokens to generate for a body without a limit.

    Raises:
        RequestError: 400 naming the field by its OpenAI name.
    """
    min_tokens = body.min_tokens or 0
    limit_field, given = _output_limit(body)
    default = max(default_tokens, min_tokens)
    max_tokens = fit_max_tokens(num_prompt, prompt_field, given, limit_field, default, limits)
    try:
        built = _build(body, max_tokens, min_tokens, _seed(body.seed, "seed"), grammar)
        return validate_sampling(built, limits.vocab_size)
    except RequestError as error:
        message, names = error.message, {"max_new_tokens": limit_field, "min_new_tokens": "min_tokens"}
        for ours, theirs in names.items():
            message = message.replace(ours, theirs)
        raise error.renamed(message, names.get(error.field or "", error.field)) from error
