"""One submitted body as an async iterator of updates, and the state with which another server resumes its stream.

The engine client creates and feeds a `Generation`; one endpoint reads it. Updates of a sequence that the reader has not
taken yet are merged, so the backlog of a slow reader is one update per sequence.

`StreamStates` adds the resume state to the events of a stream, and `Resume` is the state in the body of the resumed
request. `base/stream_state.py` documents the protocol between server and router.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Annotated, Any, Protocol, Self

import msgspec
from fastapi import Request

from pdserve.base.stream_state import RESUME_FIELD, STATE_HEADER, EventState, ShortText
from pdserve.errors import PdserveError
from pdserve.protocol.cached_tokens import CachedTokensDetails
from pdserve.protocol.hidden_states import HiddenStates
from pdserve.protocol.logprobs import PromptLogprobs
from pdserve.protocol.messages import FinishReason, RequestTiming, SpeculationStats, TokenLogprob
from pdserve.protocol.weights import weights_name

ATTACH_FIELD = f"{RESUME_FIELD}.attach"
FORBIDDEN = -3e38
"""Stands for minus infinity, the log probability of a forbidden token, in JSON between servers, which has none."""


def to_wire(lines: Sequence[TokenLogprob]) -> list[TokenLogprob]:
    """Return log probabilities that JSON can carry; `from_wire` restores them."""
    return [
        TokenLogprob(max(line.logprob, FORBIDDEN), line.top, [max(value, FORBIDDEN) for value in line.picked])
        for line in lines
    ]


def from_wire(lines: Sequence[TokenLogprob]) -> list[TokenLogprob]:
    """Return log probabilities as `to_wire` got them."""
    return [
        TokenLogprob(_restored(line.logprob), line.top, [_restored(value) for value in line.picked]) for line in lines
    ]


def _restored(value: float) -> float:
    return value if value > FORBIDDEN else -math.inf


@dataclasses.dataclass
class GenerationUpdate:
    """Update of sequence `index`: its new text and the tokens since the last update.

    `text` never contains the possible beginning of a stop string. `finish` is set in the last update of a sequence;
    `timing` and `speculation` are the newest known. `logprobs` has one entry per token if they were requested.
    `prompt_parts` are the prompt logprobs, in parts; `hidden_parts` the hidden states in order. `cached_details` None:
    all cached tokens were on the device.
    """

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_parts: list[PromptLogprobs] = dataclasses.field(default_factory=list)
    hidden_parts: list[HiddenStates] = dataclasses.field(default_factory=list)
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_details: CachedTokensDetails | None = None
    timing: RequestTiming | None = None
    speculation: SpeculationStats | None = None
    weights: str = ""
    """Version and fingerprint of the weights, see `weights_name`; empty: unknown."""

    @property
    def num_part_tokens(self) -> int:
        """Tokens whose log probabilities or hidden states came in parts."""
        tokens = sum(part.num_tokens for part in self.prompt_parts)
        return tokens + sum(part.num_tokens for part in self.hidden_parts)

    @property
    def cached_by_source(self) -> CachedTokensDetails:
        """Where the tokens of `cached_tokens` were."""
        return self.cached_details or CachedTokensDetails(device=self.cached_tokens, host=0)

    def take_cached(self, other: GenerationUpdate) -> None:
        """Replace the numbers of cached tokens by those of `other`."""
        self.cached_tokens, self.cached_details = other.cached_tokens, other.cached_details

    def absorb(self, newer: GenerationUpdate) -> None:
        """Append a later update of the same sequence."""
        assert newer.index == self.index and self.finish is None
        self.text += newer.text
        self.token_ids += newer.token_ids
        self.logprobs += newer.logprobs
        self.prompt_parts += newer.prompt_parts
        self.hidden_parts += newer.hidden_parts
        self.finish = newer.finish
        self.prompt_tokens = newer.prompt_tokens
        self.take_cached(newer)
        self.timing = newer.timing
        self.speculation = newer.speculation


class HeldUpdates:
    """Merges the updates of one sequence, so that each has `interval` tokens; the first one has a single token.

    The end of the sequence, and log probabilities of its prompt, are not held back.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._num_missing = 1
        self._held: GenerationUpdate | None = None

    def add(self, update: GenerationUpdate) -> GenerationUpdate | None:
        """Add an update; returns the merged update that is due, or None."""
        if self._interval == 1:
            return update
        self._num_missing -= len(update.token_ids)
        if self._held is not None:
            self._held.absorb(update)
            update = self._held
        if self._num_missing > 0 and update.finish is None and update.token_ids:
            self._held = update
            return None
        self._held = None
        if update.token_ids:
            self._num_missing = self._interval
        return update

    def flush(self) -> GenerationUpdate | None:
        """Return the merged update that is held back; None when there is none."""
        held, self._held = self._held, None
        return held


Weights = tuple[str, str]
"""Name of the version, and fingerprint, of an engine's weights."""


class WeightsListener(Protocol):
    """What is told which weights compute a call, such as `HttpCall`."""

    weight_version: str | None


class Generation:
    """The updates of a body's sequences, in order of arrival; ends when every sequence has finished.

    Leaving the `async with` block early aborts the sequences that still run.

    Raises:
        RequestError: while iterating: the scheduler refused a sequence.
        EngineDeadError: while iterating: the engine has exited.
    """

    def __init__(
        self, num_sequences: int, on_close: Callable[[Generation], None], call: WeightsListener | None = None
    ) -> None:
        """`call`: is told the version of the weights before the first output can be read."""
        self.prior_text: dict[int, str] = {}
        """By sequence index: text that another server sent before the stream resumed here; see
        `GenerateRequest.prior_output_ids`.
        """
        self.weights: Weights | None = None
        """The weights that have computed the sequences; None before the first output."""
        self._unfinished = num_sequences
        self._on_close = on_close
        self._call = call
        self._pending: dict[int, GenerationUpdate] = {}
        self._news = asyncio.Event()
        self._error: PdserveError | None = None
        self._last_error: PdserveError | None = None

    def computed_with(self, weights: Weights | None) -> bool:
        """Note the weights of an output; False when other weights have computed an earlier one."""
        self.weights = self.weights or weights
        if self._call is not None and self.weights is not None:
            self._call.weight_version = self.weights[0]
        return self.weights == weights

    def end_with(self, error: PdserveError) -> None:
        """End the generation with `error` once all its updates are read. The engine client calls this."""
        self._last_error = error
        self._news.set()

    def put(self, update: GenerationUpdate) -> None:
        """Add an update. The engine client calls this on the event loop."""
        if self.weights is not None:
            update.weights = weights_name(*self.weights)
        if update.finish is not None:
            self._unfinished -= 1
        waiting = self._pending.get(update.index)
        if waiting is None:
            self._pending[update.index] = update
        else:
            waiting.absorb(update)
        self._news.set()

    def fail(self, error: PdserveError) -> None:
        """End the generation with `error`. The engine client calls this; only the first error is kept."""
        if self._error is None:
            self._error = error
        self._news.set()

    def __aiter__(self) -> AsyncIterator[GenerationUpdate]:
        return self

    async def __anext__(self) -> GenerationUpdate:
        while True:
            if self._error is not None:
                raise self._error
            if self._pending:
                return self._pending.pop(next(iter(self._pending)))
            if self._last_error is not None:
                raise self._last_error
            if self._unfinished == 0:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the generation on an exception between submission and the reader's `async with`.

        A cancelled reader never enters that block.
        """
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort the unfinished sequences and drop their updates."""
        self._on_close(self)


class StreamHead(msgspec.Struct):
    """Fields that all events of a stream share; only OpenAI endpoints set `created`, `model` and
    `system_fingerprint`.
    """

    id: Annotated[str, ShortText]
    created: int | None = None
    model: Annotated[str, ShortText] | None = None
    system_fingerprint: Annotated[str, ShortText] | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that are not None."""
        return {name: value for name, value in msgspec.to_builtins(self).items() if value is not None}


class Resume(msgspec.Struct):
    """`pdserve_resume` of a body: the stream so far. `logprobs` are those of its tokens, if `EventState` has them.

    `attach`: name of the request at this server, which has taken it over from another one; None: it is resumed.
    """

    head: StreamHead
    token_ids: list[int]
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    cached_details: CachedTokensDetails | None = None
    attach: Annotated[str, ShortText] | None = None
    weights: Annotated[str, ShortText] = ""
    """`GenerationUpdate.weights` of the tokens; a server with others does not go on."""

    @property
    def token_logprobs(self) -> list[TokenLogprob]:
        """The log probabilities of the tokens; empty without any."""
        return from_wire(self.logprobs or ())

    def update(self, text: str) -> GenerationUpdate:
        """Return the stream so far as one update. `text` is the text of its tokens."""
        logprobs = self.token_logprobs
        update = GenerationUpdate(0, text, list(self.token_ids), logprobs, cached_tokens=self.cached_tokens)
        update.cached_details = self.cached_details
        return update


class StreamStates:
    """Adds a state line to each event of a stream, if the router requested state lines."""

    def __init__(self, request: Request, head: dict[str, Any], *, num_sequences: int, logprobs: bool = False) -> None:
        """`head`: the fields that all events share. `logprobs`: events repeat the logprobs of earlier tokens."""
        self.wanted = STATE_HEADER in request.headers and num_sequences == 1
        self._head: dict[str, Any] | None = head
        self._logprobs = logprobs
        self._tokens: list[int] = []
        self._lines: list[Any] = []
        self._cached_tokens = 0
        self._cached_details: dict[str, int | None] | None = None
        self._weights = ""

    def with_state(self, update: GenerationUpdate | None, events: list[bytes]) -> Iterator[bytes]:
        """Yield `events` with their state lines. They show the tokens of `update`; None: no tokens.

        The state line of each event of the last update contains all events after it.
        """
        if not self.wanted:
            yield from events
            return
        if update is not None:
            self._tokens += update.token_ids
            self._lines += msgspec.to_builtins(to_wire(update.logprobs)) if self._logprobs else []
            self._cached_tokens, self._weights = update.cached_tokens, update.weights
            self._cached_details = msgspec.to_builtins(update.cached_details)
        ends = update is not None and update.finish is not None
        for position, data in enumerate(events):
            tail = b"".join(events[position + 1 :]).decode() if ends else None
            group = len(events) if position == 0 and not ends else 1
            yield self._line(tail, group) + data

    def rest(self) -> bytes:
        """Return the state line of tokens that no event has shown, or nothing. The event of an error follows.

        The text of these tokens was held back. With them another server goes on behind the last token.
        """
        return self._line(None, 1) if self.wanted and self._head is None and self._tokens else b""

    def _line(self, tail: str | None, group: int) -> bytes:
        state = EventState(
            token_ids=self._tokens,
            head=self._head,
            cached_tokens=self._cached_tokens,
            cached_details=self._cached_details,
            logprobs=self._lines if self._logprobs else None,
            tail=tail,
            group=group,
            weights=self._weights,
        )
        line = state.line()
        self._tokens, self._lines, self._head = [], [], None
        return line
