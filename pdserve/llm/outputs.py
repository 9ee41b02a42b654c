"""What `LLM.generate` and `LLM.chat` return, with vLLM's names; made from the updates of a request's sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from pdserve.errors import PdserveError, RequestError
from pdserve.protocol.messages import FinishReason, GenerateRequest
from pdserve.server.generation import GenerationUpdate
from pdserve.server.openai.logprob_format import Pair, PromptToken, prompt_tokens
from pdserve.server.text.tokenizer import Tokenizer


class InvalidRequestError(RequestError, ValueError):
    """An argument is wrong; `field` names it. Nothing was generated."""

    @classmethod
    def of(cls, error: RequestError, where: str | None = None) -> InvalidRequestError:
        """The same as `error`. `where`: which of several it is, unless the message says so."""
        message = error.message if where is None or where in error.message else f"{where}: {error.message}"
        return cls(message, field=error.field, status=error.status, code=error.code)


class BatchError(PdserveError):
    """Requests of a call failed, raised after all others had ended.

    `outputs`: one per prompt in their order, None where it failed. `errors`: why, by the number of the prompt; the
    first of them is also `__cause__`.
    """

    def __init__(self, outputs: Sequence[RequestOutput | None], errors: Mapping[int, PdserveError]) -> None:
        first = min(errors)
        super().__init__(
            f"{len(errors)} of {len(outputs)} requests failed, first number {first}: {errors[first]} "
            "(the answers of the others are in `outputs` of this error)"
        )
        self.outputs = list(outputs)
        self.errors = dict(sorted(errors.items()))
        self.__cause__ = errors[first]


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Natural log of a token's probability; its rank (1: the most likely) where that is known, and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""At one place: of the token that stands there, and of the most likely ones; by token id."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One answer to a prompt.

    `logprobs` has an entry per token, and `cumulative_logprob` is the sum over the answer's own tokens; both None
    unless asked for. `stop_reason`: the stop string or stop token that ended it; None for the model's own end.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The answers to one prompt. `prompt` is None where it was given as token ids.

    `prompt_logprobs` has an entry per token of the prompt, None for the first; None as a whole unless asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = True


@dataclasses.dataclass(frozen=True)
class OutputMaker:
    """Makes outputs for one model. `eos_token_ids` are its ends."""

    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]

    def make(
        self,
        request_id: str,
        prompt: str | None,
        requests: Sequence[GenerateRequest],
        updates: Sequence[GenerationUpdate],
        top: int | None,
        prompt_top: int | None,
    ) -> RequestOutput:
        """The output of a prompt whose sequences are `requests` and have become `updates`.

        `top` and `prompt_top`: most likely tokens that were asked for, of answers and prompt; None: nothing was.
        """
        prompt_logprobs = None
        if prompt_top is not None:
            tokens = prompt_tokens(requests[0], updates[0].prompt_parts)
            prompt_logprobs = [self._prompt_line(token, prompt_top) for token in tokens]
        pairs = zip(requests, updates, strict=True)
        return RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=requests[0].input_ids,
            outputs=[self._answer(i, request, update, top) for i, (request, update) in enumerate(pairs)],
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=updates[0].cached_tokens,
        )

    def _answer(
        self, index: int, request: GenerateRequest, update: GenerationUpdate, top: int | None
    ) -> CompletionOutput:
        finish = update.finish
        lines = None
        if top is not None:
            pairs = zip(update.token_ids, update.logprobs, strict=True)
            lines = [self._line(token_id, line.logprob, line.top[:top]) for token_id, line in pairs]
        return CompletionOutput(
            index=index,
            text=update.text,
            token_ids=update.token_ids,
            cumulative_logprob=None if top is None else sum(line.logprob for line in update.logprobs),
            logprobs=lines,
            finish_reason=None if finish is None else finish.type,
            stop_reason=None if finish is None else self._stop_reason(finish, request),
        )

    def _stop_reason(self, finish: FinishReason, request: GenerateRequest) -> int | str | None:
        matched = finish.matched
        own_end = isinstance(matched, int) and matched in self.eos_token_ids
        return None if own_end and matched not in request.sampling.stop_token_ids else matched

    def _prompt_line(self, token: PromptToken, top: int) -> TokenLogprobs | None:
        if token.logprob is None:
            return None
        return self._line(token.token_id, token.logprob, (token.top or [])[:top], token.rank)

    def _line(self, token_id: int, logprob: float, top: Sequence[Pair], rank: int | None = None) -> TokenLogprobs:
        """The token's own comes first. Its rank is that among the `top`, unless it is known otherwise."""
        ranks = {other: place for place, (other, _) in enumerate(top, start=1)}
        line = {token_id: Logprob(logprob, rank or ranks.get(token_id), self._text(token_id))}
        for other, value in top:
            line.setdefault(other, Logprob(value, ranks[other], self._text(other)))
        return line

    def _text(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.token_text(token_id)
