"""What a body of `/generate` asks of log probabilities, field by field as SGLang does. Pure; called by `native`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdserve.errors import RequestError
from pdserve.protocol.logprobs import Logprobs
from pdserve.server.intake import check_token_ids, check_top_logprobs
from pdserve.server.json_http import scalar_or_list
from pdserve.server.schemas import GenerateBody

MAX_TOKEN_IDS = 1024
"""Token ids that a request may ask for at every position."""


def native_wishes(
    body: GenerateBody, prompts: Sequence[Sequence[int]], vocab_size: int, *, listed: bool
) -> list[Logprobs | None]:
    """The wish of every prompt. `listed`: the answer is a list.

    The prompt's log probabilities are in prefill's answer, of which routers take `input_token_logprobs` if the answer
    is no list; what they do not take is handed over to decode.

    Raises:
        RequestError: 400 naming the field.
    """
    count = len(prompts)
    wanted = scalar_or_list(body.return_logprob, count, "return_logprob", bool)
    tops = scalar_or_list(body.top_logprobs_num, count, "top_logprobs_num", int)
    starts = scalar_or_list(body.logprob_start_len, count, "logprob_start_len", int)
    picks = _token_ids(body.token_ids_logprob, count, vocab_size)
    return [
        _wish(top or 0, -1 if start is None else start, ids, len(prompt), listed) if want else None
        for want, top, start, ids, prompt in zip(wanted, tops, starts, picks, prompts, strict=True)
    ]


def _wish(top: int, start: int, token_ids: tuple[int, ...], num_prompt: int, listed: bool) -> Logprobs:
    check_top_logprobs(top, "top_logprobs_num")
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
    """`token_ids_logprob` of every prompt: a list of ids for all, or one (or null) for each."""
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
