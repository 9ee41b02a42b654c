"""Log probabilities in the three forms clients know: chat, completions, native. All are natural logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdserve.server.generation import Update
from pdserve.server.tokenizer import Tokenizer


def _raw(tokenizer: Tokenizer | None, token_id: int) -> bytes:
    return f"token_id:{token_id}".encode() if tokenizer is None else tokenizer.token_bytes(token_id)


def _chat_token(tokenizer: Tokenizer | None, token_id: int, logprob: float) -> dict[str, Any]:
    raw = _raw(tokenizer, token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


def chat_logprobs(tokenizer: Tokenizer | None, update: Update) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions, for the tokens of `update`."""
    content = []
    for token_id, logprob in zip(update.token_ids, update.logprobs, strict=True):
        top = [_chat_token(tokenizer, other, value) for other, value in logprob.top]
        content.append({**_chat_token(tokenizer, token_id, logprob.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _completion_token(tokenizer: Tokenizer | None, token_id: int) -> str:
    """Text of a token; `bytes:\\x..` where its bytes are no whole character, so that no two tokens look the same."""
    raw = _raw(tokenizer, token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def completion_logprobs(tokenizer: Tokenizer | None, update: Update, offset: int) -> dict[str, Any]:
    """`choices[].logprobs` of completions; `offset` is the number of characters of the choice's earlier tokens."""
    tokens = [_completion_token(tokenizer, token_id) for token_id in update.token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    tops = [
        {_completion_token(tokenizer, other): value for other, value in logprob.top} or None
        for logprob in update.logprobs
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [logprob.logprob for logprob in update.logprobs],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def tokens_length(tokenizer: Tokenizer | None, token_ids: Sequence[int]) -> int:
    """Characters that these tokens add to `text_offset`."""
    return sum(len(_completion_token(tokenizer, token_id)) for token_id in token_ids)


def native_logprobs(tokenizer: Tokenizer | None, update: Update, *, top: bool, text: bool) -> dict[str, Any]:
    """SGLang's `meta_info` keys: `[logprob, token id, text or null]` per token. Input lists are empty: a router
    puts prefill's in front of them."""

    def row(token_id: int, logprob: float) -> list[Any]:
        return [logprob, token_id, tokenizer.token_text(token_id) if text and tokenizer is not None else None]

    pairs = list(zip(update.token_ids, update.logprobs, strict=True))
    fields: dict[str, Any] = {
        "input_token_logprobs": [],
        "output_token_logprobs": [row(token_id, entry.logprob) for token_id, entry in pairs],
    }
    if top:
        fields["input_top_logprobs"] = []
        fields["output_top_logprobs"] = [[row(other, value) for other, value in entry.top] for _, entry in pairs]
    return fields
