"""Outputs of `LLM.generate` and `LLM.chat`, with vLLM's names; built from the updates of a request's sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pdserve.errors import PdserveError, RequestError
from pdserve.protocol.cached_tokens import CachedTokensDetails
from pdserve.protocol.messages import FinishReason, GenerateRequest, SpeculationStats
from pdserve.server.generation import GenerationUpdate
from pdserve.server.openai.logprob_format import Pair, PromptToken, prompt_tokens
from pdserve.server.text.tokenizer import Tokenizer


class InvalidRequestError(RequestError, ValueError):
    """An argument is invalid; `field` names it. No token was generated."""

    @classmethod
    def of(cls, error: RequestError, where: str | None = None) -> InvalidRequestError:
        """Convert `error`. `where`: name of the prompt, put in front of the message unless the message has it."""
        message = error.message if where is None or where in error.message else f"{where}: {error.message}"
        return cls(message, field=error.field, status=error.status, code=error.code)


class BatchError(PdserveError):
    """Some requests of a call failed. Raised after all requests have ended.

    `outputs`: one per prompt, in order; None for a failed prompt. `errors`: the error of each failed prompt, by its
    number from 0. The first error is also `__cause__`.
    """

    def __init__(self, outputs: Sequence[Any], errors: Mapping[int, PdserveError]) -> None:
        first = min(errors)
        super().__init__(
            f"{len(errors)} of {len(outputs)} requests failed, first number {first}: {errors[first]} "
            "(the outputs of the other requests are in `outputs` of this error)"
        )
        self.outputs = list(outputs)
        self.errors = dict(sorted(errors.items()))
        self.__cause__ = errors[first]


@dataclasses.dataclass(frozen=True)
class Logprob:
    """Natural log of a token's probability, its rank and its text.

    `rank`: 1 for the most likely token; None: unknown. `decoded_token` None: the model has no tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Log probabilities at one position, by token id: of the token itself, and of the most likely tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One output sequence of a prompt.

    `logprobs` has an entry per token. `cumulative_logprob` is the sum over the output tokens. Both are None unless
    requested. `stop_reason`: the stop string or stop token id that ended the sequence; None for the model's EOS token,
    and for other finish reasons. `speculation`: numbers of draft tokens; None: none were verified.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: Literal["stop", "length", "abort", "suspended"] | None = None
    stop_reason: int | str | None = None
    speculation: SpeculationStats | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The output sequences of one prompt. `prompt` is None if the prompt was given as token ids.

    `prompt_logprobs` has an entry per prompt token, None for the first one. The field is None unless requested.
    `num_cached_tokens`: prompt tokens found in a prefix cache. `cached_tokens_details`: where they were.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    cached_tokens_details: CachedTokensDetails = CachedTokensDetails(device=0, host=0)
    finished: bool = True


@dataclasses.dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the vector."""
        return len(self.embedding)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingRequestOutput:
    """The vector of one prompt. `prompt` is None if the prompt was given as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0
    finished: bool = True


@dataclasses.dataclass(frozen=True)
class ScoringOutput:
    """How well two texts fit together: a cosine, or with a reranker a probability."""

    score: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoringRequestOutput:
    """The score of one pair of texts. `prompt_token_ids`: a reranker's prompt, else both texts one after the other."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    num_cached_tokens: int = 0
    finished: bool = True


@dataclasses.dataclass(frozen=True)
class OutputMaker:
    """Builds outputs for one model with the EOS tokens `eos_token_ids`."""

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
        """Build the output of a prompt from its sequences `requests` and their merged `updates`.

        `prompt` None: the prompt was given as token ids. `top` and `prompt_top`: requested number of most likely tokens
        for output and prompt; None: no log probabilities.
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
            cached_tokens_details=updates[0].cached_by_source,
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
            speculation=update.speculation,
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
        """Build the entry of one position; the token itself is first. `rank` None: its rank among `top`, if any."""
        ranks = {other: place for place, (other, _) in enumerate(top, start=1)}
        line = {token_id: Logprob(logprob, rank or ranks.get(token_id), self._text(token_id))}
        for other, value in top:
            line.setdefault(other, Logprob(value, ranks[other], self._text(other)))
        return line

    def _text(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.token_text(token_id)
