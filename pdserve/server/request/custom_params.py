"""`custom_params` and `custom_logit_processor` of a body: the thinking budget, a logit processor and its parameters.

Endpoints call `ServerContext.take_custom` once for a body, and `CustomSampling.apply` for each of its prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pdserve.errors import RequestError
from pdserve.protocol.sampling import CoreSamplingParams, Grammar, ProcessorParams, ThinkingBudget
from pdserve.server.text.chat_formats import ChatFormats
from pdserve.server.text.parsers.thinking import ReasoningFormat
from pdserve.server.text.tokenizer import Tokenizer

ANY_TEXT = Grammar(kind="any_text", text="")
BUDGET = "thinking_budget"
MAX_PARAMS_BYTES = 1 << 16
"""Most bytes of `custom_params` as JSON."""
MAX_PROCESSOR_CHARS = 256
TAIL_TOKENS = 64
"""Tokens at the end of a prompt in which its opening or closing tag is looked for."""
_HARMONY_OPENING = "<|channel|>analysis<|message|>"
_HARMONY_END = "<|end|>"
_HARMONY_CLOSING = f"{_HARMONY_END}<|start|>assistant<|channel|>final<|message|>"


@dataclasses.dataclass(frozen=True)
class ThinkingLimit:
    """The thinking budget of a body. `format`: the model's reasoning format; None: gpt-oss's."""

    budget: ThinkingBudget
    format: ReasoningFormat | None

    def begins_inside(self, prompt: str) -> bool | None:
        """See `ReasoningFormat.begins_inside`."""
        return None if self.format is None else self.format.begins_inside(prompt)


@dataclasses.dataclass(frozen=True)
class CustomSampling:
    """What a body's `custom_params` and `custom_logit_processor` ask for; None: nothing."""

    thinking: ThinkingLimit | None = None
    processor: ProcessorParams | None = None

    def apply(self, sampling: CoreSamplingParams, inside: bool | None) -> CoreSamplingParams:
        """Return `sampling` with both. `inside`: see `ReasoningFormat.begins_inside`; with False nothing is limited."""
        budget = None
        if self.thinking is not None and inside is not False:
            budget = msgspec.structs.replace(self.thinking.budget, inside=bool(inside))
        if budget is None and self.processor is None:
            return sampling
        grammar = sampling.grammar or ANY_TEXT
        return msgspec.structs.replace(sampling, thinking=budget, processor=self.processor, grammar=grammar)


NOTHING_CUSTOM = CustomSampling()


def budget_tokens(custom_params: Mapping[str, Any], field: str) -> int | None:
    """Return `thinking_budget` of the body's `field`, in tokens; None: the reasoning is not limited.

    Raises:
        RequestError: 400 naming the entry, if it is no number.
    """
    num_tokens = custom_params.get(BUDGET)
    if num_tokens is None:
        return None
    where = f"{field}.{BUDGET}"
    if type(num_tokens) is not int or num_tokens < 0:
        raise RequestError(f"{where} must be a number of tokens from 0 on, got {num_tokens!r}", field=where)
    return num_tokens


def processor_params(
    name: str | None, custom_params: Mapping[str, Any], field: str, known: Sequence[str]
) -> ProcessorParams | None:
    """Return the processor `name` with `custom_params`, the body's `field`, as its parameters; None: no processor.

    `known`: the processors of this server.

    Raises:
        RequestError: 400 naming the field: there is no such processor, its parameters are too large, or entries of
            `field` are for no processor.
    """
    if not name:
        for entry in custom_params:
            if entry != BUDGET:
                where = f"{field}.{entry}"
                message = f"{where} is a parameter of no processor; without custom_logit_processor there is {BUDGET}"
                raise RequestError(message, field=where)
        return None
    if name not in known:
        raise _no_such_processor(name, known)
    params = msgspec.json.encode(custom_params)
    if len(params) > MAX_PARAMS_BYTES:
        message = f"{field} has {len(params)} bytes of JSON; the maximum is {MAX_PARAMS_BYTES}"
        raise RequestError(message, field=field)
    return ProcessorParams(name=name, params=params.decode())


def _no_such_processor(name: str, known: Sequence[str]) -> RequestError:
    field = "custom_logit_processor"
    if name.lstrip().startswith("{") or len(name) > MAX_PROCESSOR_CHARS:
        message = f"{field} must be the name of a processor: this server takes no code from requests"
        return RequestError(message, field=field, code="unsupported")
    there_is = f"there is {', '.join(known)}" if known else "this server has none (--logit-processors)"
    return RequestError(f"{field} {name!r} does not exist; {there_is}", field=field)


async def thinking_limit(
    num_tokens: int, field: str, formats: ChatFormats, tokenizer: Tokenizer | None
) -> ThinkingLimit:
    """Return the limit of `num_tokens` tokens that the body's `field` sets.

    Raises:
        RequestError: 400 naming `field`: this server has no reasoning parser, or no tokenizer.
    """
    thinking = formats.thinking
    if tokenizer is None or not formats.reasons:
        missing = "tokenizer" if tokenizer is None else "reasoning parser (--reasoning-parser)"
        raise RequestError(f"{field}: this server has no {missing}, which ends the reasoning", field=field)
    ends: tuple[str, ...]
    if thinking is None:
        opening, ends, closing = _HARMONY_OPENING, (_HARMONY_END,), _HARMONY_CLOSING
    else:  # a line break before the tag, as models write it
        opening, ends, closing = thinking.opening, (thinking.closing, *thinking.calls), f"\n{thinking.closing}"
    ids = await tokenizer.encode(closing, field=field, add_special_tokens=False)
    budget = ThinkingBudget(num_tokens=num_tokens, closing_ids=tuple(ids), opening=opening, ends=ends, inside=False)
    return ThinkingLimit(budget, thinking)
