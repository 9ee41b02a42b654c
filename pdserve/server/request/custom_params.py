"""`custom_params` of a body: the thinking budget (SGLang's `thinking_budget`).

Endpoints call `ServerContext.take_thinking` once for a body, and `limit_thinking` for each of its prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from pdserve.errors import RequestError
from pdserve.protocol.engine_state import EngineReady
from pdserve.protocol.sampling import CoreSamplingParams, Grammar, ThinkingBudget
from pdserve.server.request.constraints import Constraint, GrammarCheck
from pdserve.server.text.chat_formats import ChatFormats
from pdserve.server.text.parsers.thinking import ReasoningFormat
from pdserve.server.text.tokenizer import Tokenizer

ANY_TEXT = Grammar(kind="any_text", text="")
BUDGET = "thinking_budget"
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


def budget_tokens(custom_params: Mapping[str, Any] | None, field: str) -> int | None:
    """Return `thinking_budget` of the body's `field`, in tokens; None: the reasoning is not limited.

    Raises:
        RequestError: 400 naming the entry that is unknown, or no number.
    """
    given = custom_params or {}
    for name in given:
        if name != BUDGET:
            raise RequestError(f"{field}.{name} is unknown; known: {BUDGET}", field=f"{field}.{name}")
    num_tokens = given.get(BUDGET)
    if num_tokens is None:
        return None
    where = f"{field}.{BUDGET}"
    if type(num_tokens) is not int or num_tokens < 0:
        raise RequestError(f"{where} must be a number of tokens from 0 on, got {num_tokens!r}", field=where)
    return num_tokens


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


async def take_thinking(
    custom_params: Mapping[str, Any] | None,
    field: str,
    formats: ChatFormats,
    tokenizer: Tokenizer | None,
    grammars: GrammarCheck,
    ready: EngineReady,
) -> ThinkingLimit | None:
    """Return the checked limit of the body's `field`; None: the reasoning is not limited. `ready`: see `GrammarCheck`.

    Raises:
        RequestError: as `budget_tokens` and `thinking_limit`, and if this server has no grammars.
    """
    num_tokens = budget_tokens(custom_params, field)
    if num_tokens is None:
        return None
    where = f"{field}.{BUDGET}"
    limit = await thinking_limit(num_tokens, where, formats, tokenizer)
    await grammars.take(Constraint(ANY_TEXT, where), ready)
    return limit


def limit_thinking(
    sampling: CoreSamplingParams, limit: ThinkingLimit | None, inside: bool | None
) -> CoreSamplingParams:
    """Return `sampling` with the budget of `limit`; unchanged where the prompt ends the reasoning (`inside` False)."""
    if limit is None or inside is False:
        return sampling
    budget = msgspec.structs.replace(limit.budget, inside=bool(inside))
    return msgspec.structs.replace(sampling, thinking=budget, grammar=sampling.grammar or ANY_TEXT)
