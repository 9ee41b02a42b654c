"""Log probabilities in response formats: chat, completions, native, vLLM's `prompt_logprobs`. All are natural logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from pdserve.protocol.logprobs import PromptLogprobs, join
from pdserve.protocol.messages import GenerateRequest
from pdserve.server.generation import GenerationUpdate
from pdserve.server.text.tokenizer import Tokenizer

LARGE = 5000
"""Number of tokens above which log probabilities are formatted in a thread, not on the event loop."""

Pair = tuple[int, float]
"""Token id and its log probability."""


def _raw(tokenizer: Tokenizer | None, token_id: int) -> bytes:
    return f"token_id:{token_id}".encode() if tokenizer is None else tokenizer.token_bytes(token_id)


# chat ----------------------------------------------------------------------------------------------------------------


def _chat_token(tokenizer: Tokenizer | None, token_id: int, logprob: float) -> dict[str, Any]:
    raw = _raw(tokenizer, token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


def chat_logprobs(tokenizer: Tokenizer | None, update: GenerationUpdate) -> dict[str, Any]:
    """Build `choices[].logprobs` of chat completions, for the tokens of `update`."""
    content = []
    for token_id, logprob in zip(update.token_ids, update.logprobs, strict=True):
        top = [_chat_token(tokenizer, other, value) for other, value in logprob.top]
        content.append({**_chat_token(tokenizer, token_id, logprob.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


# prompts -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PromptToken:
    """One prompt token. The first token of the requested range has no log probability, only its id."""

    token_id: int
    logprob: float | None = None
    rank: int | None = None
    top: list[Pair] | None = None
    picked: list[Pair] | None = None


def prompt_tokens(request: GenerateRequest, parts: Sequence[PromptLogprobs]) -> list[PromptToken]:
    """Build one entry per prompt token of `request` from position `prompt_from` on, from `parts`.

    The entries have no log probabilities if parts are missing: the request ended early, or it is a probe.
    """
    logprob_params = request.logprobs
    if logprob_params is None or logprob_params.prompt_from is None:
        return []
    asked = request.input_ids[logprob_params.prompt_from :]
    whole = join(parts, logprob_params.prompt_from + 1, len(request.input_ids))
    if whole is None:
        return [PromptToken(token_id) for token_id in asked]
    own, ranks, top_ids, top, picked = (array.tolist() for array in whole.arrays())
    rest = [
        PromptToken(
            token_id,
            own[i],
            ranks[i],
            list(zip(top_ids[i], top[i], strict=True)),
            list(zip(logprob_params.token_ids, picked[i], strict=True)),
        )
        for i, token_id in enumerate(asked[1:])
    ]
    return [PromptToken(asked[0]), *rest]


def vllm_prompt_logprobs(
    tokenizer: Tokenizer | None, tokens: Sequence[PromptToken], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Build vLLM's `prompt_logprobs`: for each token, itself and the `num_top` most likely tokens, by token id."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": _readable(tokenizer, token_id)}

    lines: list[dict[str, dict[str, Any]] | None] = []
    for token in tokens:
        if token.logprob is None or token.rank is None:
            lines.append(None)
            continue
        line = {str(token.token_id): entry(token.token_id, token.logprob, token.rank)}
        for rank, (other, value) in enumerate((token.top or [])[:num_top], start=1):
            line.setdefault(str(other), entry(other, value, rank))
        lines.append(line)
    return lines


# completions ---------------------------------------------------------------------------------------------------------


def _completion_token(tokenizer: Tokenizer | None, token_id: int) -> str:
    """Text of a token; `bytes:\\x..` if its bytes are not valid UTF-8, so that no two tokens have the same text."""
    raw = _raw(tokenizer, token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _completion_lines(
    tokenizer: Tokenizer | None, lines: Iterator[tuple[int, float | None, Sequence[Pair]]], offset: int
) -> dict[str, Any]:
    tokens: list[str] = []
    own: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, logprob, top in lines:
        text = _completion_token(tokenizer, token_id)
        best = {_completion_token(tokenizer, other): value for other, value in top}
        if best and logprob is not None:
            best.setdefault(text, logprob)
        tokens.append(text)
        own.append(logprob)
        tops.append(best or None)
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets}


def completion_logprobs(
    tokenizer: Tokenizer | None, update: GenerationUpdate, offset: int, num_top: int
) -> dict[str, Any]:
    """Build `choices[].logprobs` of completions. `offset`: number of characters of the choice's earlier tokens."""
    pairs = zip(update.token_ids, update.logprobs, strict=True)
    return _completion_lines(tokenizer, ((i, line.logprob, line.top[:num_top]) for i, line in pairs), offset)


def completion_prompt_logprobs(
    tokenizer: Tokenizer | None, tokens: Sequence[PromptToken], num_top: int
) -> dict[str, Any]:
    """Build `choices[].logprobs` of an echoed prompt, with the `num_top` most likely tokens."""
    lines = ((token.token_id, token.logprob, (token.top or [])[:num_top]) for token in tokens)
    return _completion_lines(tokenizer, lines, 0)


def tokens_length(tokenizer: Tokenizer | None, token_ids: Sequence[int]) -> int:
    """Number of characters that `token_ids` add to `text_offset`."""
    return sum(len(_completion_token(tokenizer, token_id)) for token_id in token_ids)


# native --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class NativeFormat:
    """SGLang's `meta_info` keys: `[logprob, token id, text or null]` per token.

    `top`, `picked`, `text`: the request wants top tokens, `token_ids_logprob`, and token text.
    """

    tokenizer: Tokenizer | None
    top: bool
    picked: bool
    text: bool

    def output(self, update: GenerationUpdate, token_ids: Sequence[int]) -> dict[str, Any]:
        """Build the keys of the output. `token_ids`: the request's `token_ids_logprob`."""
        pairs = list(zip(update.token_ids, update.logprobs, strict=True))
        fields: dict[str, Any] = {"output_token_logprobs": [self._row(i, line.logprob) for i, line in pairs]}
        if self.top:
            fields["output_top_logprobs"] = [self._rows(line.top) for _, line in pairs]
        if self.picked:
            lists = [list(zip(token_ids, line.picked, strict=False)) for _, line in pairs]
            fields["output_token_ids_logprobs"] = [self._rows(one) for one in lists]
        return fields

    def input(self, tokens: Sequence[PromptToken]) -> dict[str, Any]:
        """Build the keys of the prompt."""
        fields: dict[str, Any] = {"input_token_logprobs": [self._row(one.token_id, one.logprob) for one in tokens]}
        if self.top:
            fields["input_top_logprobs"] = [None if token.top is None else self._rows(token.top) for token in tokens]
        if self.picked:
            lists = [None if token.picked is None else self._rows(token.picked) for token in tokens]
            fields["input_token_ids_logprobs"] = lists
        return fields

    def _rows(self, pairs: Sequence[Pair]) -> list[list[Any]]:
        return [self._row(token_id, logprob) for token_id, logprob in pairs]

    def _row(self, token_id: int, logprob: float | None) -> list[Any]:
        return [logprob, token_id, _readable(self.tokenizer, token_id) if self.text else None]


def _readable(tokenizer: Tokenizer | None, token_id: int) -> str | None:
    return None if tokenizer is None else tokenizer.token_text(token_id)
