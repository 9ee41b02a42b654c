"""Sampling parameters of one request, with SGLang's names and defaults, and their validation."""

from __future__ import annotations

import math

import msgspec

from pdserve.errors import RequestError
from pdserve.protocol.grammar import Grammar

TOP_K_ALL = 1 << 30
"""`top_k` value that keeps the whole vocabulary (SGLang's -1 is turned into this)."""


class CoreSamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling and stop parameters of one request, in the form that the scheduler takes.

    `temperature` 0 means greedy. `seed` makes the request's tokens reproducible in any batch; None: no fixed seed.
    The API process matches `stop` strings and `stop_regex` on text. The scheduler matches `stop_token_ids`.
    `max_new_tokens` 0: the prompt is computed, and no output token is sent.
    With a `grammar`, an EOS token is sampled only where the grammar may end, and then always ends the request.
    `ignore_eos` and `min_new_tokens` suppress EOS only while the grammar can continue.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: dict[int, float] | None = None
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        """True when sampling always takes the most likely token."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def needs_history(self) -> bool:
        """True when a penalty makes the logits depend on earlier tokens."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


def validate_sampling(params: CoreSamplingParams, vocab_size: int) -> CoreSamplingParams:
    """Return `params` when every field is in range.

    Raises:
        RequestError: 400 naming the field, for NaN, infinite, negative or out-of-range values.
    """
    for field, low, high, low_open in (
        ("temperature", 0.0, 1e6, False),
        ("top_p", 0.0, 1.0, True),
        ("min_p", 0.0, 1.0, False),
        ("repetition_penalty", 0.0, 2.0, True),
        ("frequency_penalty", -2.0, 2.0, False),
        ("presence_penalty", -2.0, 2.0, False),
    ):
        value = getattr(params, field)
        if not math.isfinite(value) or value > high or (value <= low if low_open else value < low):
            bracket = "(" if low_open else "["
            raise RequestError(f"{field} must be in {bracket}{low}, {high}], got {value}", field=field)
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
