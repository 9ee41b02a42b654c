"""Resumable streams: state lines that a router needs to resume a stream at another server, and the resumed request.

Used by the endpoints that stream. `base/stream_state.py` documents the protocol between server and router.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import Request

from pdserve.base.stream_state import RESUME_FIELD, STATE_HEADER, EventState, ShortText
from pdserve.errors import RequestError
from pdserve.protocol.messages import TokenLogprob
from pdserve.server.engine_client.live_requests import RequestState
from pdserve.server.generation import GenerationUpdate
from pdserve.server.request.intake import check_token_ids


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
    """`pdserve_resume` of a body: the stream so far. `logprobs` are those of its tokens, if `EventState` has them."""

    head: StreamHead
    token_ids: list[int]
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None

    def update(self, text: str) -> GenerationUpdate:
        """Return the stream so far as one update. `text` is the text of its tokens."""
        logprobs = list(self.logprobs or ())
        return GenerationUpdate(0, text, list(self.token_ids), logprobs, cached_tokens=self.cached_tokens)


def resume_stream(
    states: Sequence[RequestState], resume: Resume | None, vocab_size: int, *, stream: bool, logprobs: bool = False
) -> None:
    """Give the request the output of an earlier attempt on another server; does nothing if `resume` is None.

    `logprobs`: each event repeats the logprobs of all tokens so far, if the request wants any.

    Raises:
        RequestError: 400, `resume` does not fit the request.
    """
    if resume is None:
        return
    if not stream or len(states) != 1:
        raise RequestError(f"{RESUME_FIELD} needs a stream of one sequence", field=RESUME_FIELD)
    request = states[0].request
    check_token_ids(resume.token_ids, vocab_size, RESUME_FIELD)
    if len(resume.token_ids) >= max(1, request.sampling.max_new_tokens):
        raise RequestError(f"{RESUME_FIELD} has as many tokens as the request may generate", field=RESUME_FIELD)
    needed = len(resume.token_ids) if logprobs and request.logprobs is not None else 0
    if len(resume.logprobs or ()) != needed:
        raise RequestError(f"{RESUME_FIELD}.logprobs must have {needed} entries", field=RESUME_FIELD)
    logprob_params = request.logprobs
    if logprob_params is not None and resume.token_ids:
        logprob_params = msgspec.structs.replace(logprob_params, prompt_from=None)
    states[0].request = msgspec.structs.replace(request, prior_output_ids=resume.token_ids, logprobs=logprob_params)


class StreamStates:
    """Adds a state line to each event of a stream, if the router requested state lines."""

    def __init__(self, request: Request, head: dict[str, Any], *, num_sequences: int, logprobs: bool = False) -> None:
        """`head`: the fields that all events share. `logprobs`: events repeat the logprobs of earlier tokens."""
        self._wanted = STATE_HEADER in request.headers and num_sequences == 1
        self._head: dict[str, Any] | None = head
        self._logprobs = logprobs
        self._tokens: list[int] = []
        self._lines: list[Any] = []
        self._cached_tokens = 0

    def with_state(self, update: GenerationUpdate | None, events: list[bytes]) -> Iterator[bytes]:
        """Yield `events` with their state lines. They show the tokens of `update`; None: no tokens.

        The state line of each event of the last update contains all events after it.
        """
        if not self._wanted:
            yield from events
            return
        if update is not None:
            self._tokens += update.token_ids
            self._lines += msgspec.to_builtins(update.logprobs) if self._logprobs else []
            self._cached_tokens = update.cached_tokens
        ends = update is not None and update.finish is not None
        for position, data in enumerate(events):
            tail = b"".join(events[position + 1 :]).decode() if ends else None
            yield self._line(tail) + data

    def _line(self, tail: str | None) -> bytes:
        state = EventState(self._tokens, self._head, self._cached_tokens, self._lines if self._logprobs else None, tail)
        line = state.line()
        self._tokens, self._lines, self._head = [], [], None
        return line
