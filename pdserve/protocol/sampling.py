"""Sampling parameters of one request, with SGLang's names and defaults, and their validation.

`CoreSamplingParams` declares each parameter once: name, type, default and range. The fields of request bodies
(`server/request/schemas.py`), their OpenAPI document and the validation are generated from it.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Annotated, Any, Literal

import msgspec

from pdserve.errors import RequestError

TOP_K_ALL = 1 << 30
"""`top_k` value that keeps the whole vocabulary (SGLang's -1 is turned into this)."""


MAX_STREAM_INTERVAL = 1 << 20
GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag", "any_text"]
"""`any_text`: every output follows it. Requests with nothing but a thinking budget have it."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """Grammar of structured output. `text`: a JSON schema, structural tag, regular expression, GBNF or Lark grammar.

    The matcher state is never sent. Each server that samples rebuilds it from the grammar and the output ids.
    """

    kind: GrammarKind
    text: str


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Limit of the reasoning of an output: behind `num_tokens` tokens of it, `closing_ids` are forced.

    `opening`: text that begins the reasoning; `ends`: texts that end it by themselves. `inside`: the output begins
    inside the reasoning; False: only if it begins with `opening`.
    """

    num_tokens: int
    closing_ids: tuple[int, ...]
    opening: str
    ends: tuple[str, ...]
    inside: bool


class ProcessorParams(msgspec.Struct, frozen=True, kw_only=True):
    """The logit processor of a request: its name, and the request's `custom_params` as JSON."""

    name: str
    params: str = "{}"


@dataclasses.dataclass(frozen=True)
class BodyField:
    """Marks a parameter that request bodies have under the same name and with the same type; null is the default.

    Numbers from `low` to `high` are valid, without `low` if `low_open`.
    """

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False

    def check(self, name: str, value: float) -> None:
        """Check `value` of the parameter `name`.

        Raises:
            RequestError: 400 naming the field, for NaN and values out of range.
        """
        above = self.low < value if self.low_open else self.low <= value
        if not (above and value <= self.high):
            bracket = "(" if self.low_open else "["
            raise RequestError(f"{name} must be in {bracket}{self.low}, {self.high}], got {value}", field=name)


class CoreSamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling and stop parameters of one request, in the form that the scheduler takes.

    `temperature` 0 means greedy. `seed` makes the request's tokens reproducible in any batch; None: no fixed seed.
    The API process matches `stop` strings and `stop_regex` on text. The scheduler matches `stop_token_ids`.
    `max_new_tokens` 0: the prompt is computed, and no output token is sent. The API process sends an event of a stream
    for the first token and then for every `stream_interval` tokens.
    With a `grammar`, an EOS token is sampled only where the grammar may end, and then always ends the request.
    `ignore_eos` and `min_new_tokens` suppress EOS only while the grammar can continue.
    With `thinking` or a `processor` there is a `grammar` too, if only `any_text`.
    `speculative` False: the scheduler plans no draft tokens for the request. Its tokens are the same either way.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: Annotated[float, BodyField(0.0, 1e6)] = 1.0
    top_p: Annotated[float, BodyField(0.0, 1.0, low_open=True)] = 1.0
    top_k: Annotated[int, BodyField()] = TOP_K_ALL
    min_p: Annotated[float, BodyField(0.0, 1.0)] = 0.0
    repetition_penalty: Annotated[float, BodyField(0.0, 2.0, low_open=True)] = 1.0
    frequency_penalty: Annotated[float, BodyField(-2.0, 2.0)] = 0.0
    presence_penalty: Annotated[float, BodyField(-2.0, 2.0)] = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    ignore_eos: Annotated[bool, BodyField()] = False
    skip_special_tokens: Annotated[bool, BodyField()] = True
    spaces_between_special_tokens: Annotated[bool, BodyField()] = True
    no_stop_trim: Annotated[bool, BodyField()] = False
    stream_interval: Annotated[int, BodyField(1, MAX_STREAM_INTERVAL)] = 1
    logit_bias: dict[int, float] | None = None
    grammar: Grammar | None = None
    thinking: ThinkingBudget | None = None
    processor: ProcessorParams | None = None
    speculative: Annotated[bool, BodyField()] = True

    @property
    def greedy(self) -> bool:
        """True when sampling always takes the most likely token."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_text_stops(self) -> bool:
        """True when text may end the request, which the API process matches."""
        return bool(self.stop or self.stop_regex)

    @property
    def needs_history(self) -> bool:
        """True when a penalty makes the logits depend on earlier tokens."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


_HINTS = typing.get_type_hints(CoreSamplingParams, include_extras=True)
_MARKS: dict[str, BodyField] = {
    name: hint.__metadata__[0] for name, hint in _HINTS.items() if hasattr(hint, "__metadata__")
}
BODY_FIELDS: dict[str, Any] = {name: _HINTS[name].__origin__ for name in _MARKS}
"""Types of the parameters that are marked as `BodyField`, by name."""
BODY_DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in msgspec.structs.fields(CoreSamplingParams) if field.name in _MARKS
}
"""Their defaults."""


def validate_sampling(params: CoreSamplingParams, vocab_size: int) -> CoreSamplingParams:
    """Return `params` when every field is in range.

    Raises:
        RequestError: 400 naming the field, for NaN, infinite, negative or out-of-range values.
    """
    for name, mark in _MARKS.items():
        mark.check(name, getattr(params, name))
    if params.top_k < 1:
        raise RequestError(f"top_k must be at least 1, or -1 for all, got {params.top_k}", field="top_k")
    if params.max_new_tokens < 0:
        raise RequestError(f"max_new_tokens must be at least 0, got {params.max_new_tokens}", field="max_new_tokens")
    if not 0 <= params.min_new_tokens <= params.max_new_tokens:
        raise RequestError(
            f"min_new_tokens must be in [0, max_new_tokens={params.max_new_tokens}], got {params.min_new_tokens}",
            field="min_new_tokens",
        )
    for token in params.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(f"stop_token_ids must be in [0, {vocab_size}), got {token}", field="stop_token_ids")
    for text in params.stop:
        if not text:
            raise RequestError("stop must not hold an empty string", field="stop")
    for token, bias in (params.logit_bias or {}).items():
        if not 0 <= token < vocab_size:
            raise RequestError(f"logit_bias token must be in [0, {vocab_size}), got {token}", field="logit_bias")
        if not math.isfinite(bias):
            raise RequestError(f"logit_bias value must be finite, got {bias}", field="logit_bias")
    return params
