"""Streams that go on at another pair when the decode worker that writes them dies. Made by `dispatch`, read by `relay`.

    worker ── events with what is told of them ──> StreamSoFar ── whole events ──> client
    broken ──> the end was told: the router writes it itself
               nothing was passed on: the request begins anew
               else: the body, with the stream so far ──> another pair ──> the rest of the stream

One sequence only: with `n` above 1 and with batches nothing goes on, nor where the prompt's log probabilities are
merged in, nor on `/v1/responses`. `base/stream_state.py` says what is told.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from pdserve.base.stream_state import DONE, EVENT_END, RESUME_FIELD, split_event
from pdserve.router.proxy.merge import wants_prompt_logprobs
from pdserve.router.request_fields import CHAT_PATH, COMPLETIONS_PATH, GENERATE_PATH, batch_size, num_sequences
from pdserve.router.workers.outcome import WORKER_FAILED, EndedError, WorkerStream

RETRYABLE_STATUSES = frozenset({502, 503, 504})
"""Of error events."""
_ERROR = b'data: {"error":'

Body = dict[str, Any]
Again = Callable[[Body, EndedError], Awaitable[WorkerStream | None]]
"""Sends a body to another pair after the stream broke; None where none answers."""


def can_go_on(path: str, body: Body) -> bool:
    """Whether a request is for a stream of one sequence that another pair can go on with."""
    if body.get("stream") is not True or num_sequences(body) != 1 or wants_prompt_logprobs(path, body):
        return False
    size = batch_size(path, body)
    return (size is None and path in (CHAT_PATH, GENERATE_PATH)) or (size in (None, 1) and path == COMPLETIONS_PATH)


def with_seed(path: str, body: Body, rng: random.Random) -> Body:
    """The body with a seed, where it has none: the same tokens come from any pair. Wrong types are left alone."""
    seed = rng.randrange(1 << 63)
    if path != GENERATE_PATH:
        return body if body.get("seed") is not None else body | {"seed": seed}
    params = body.get("sampling_params") or {}
    if not isinstance(params, dict) or any(params.get(name) is not None for name in ("seed", "sampling_seed")):
        return body
    return body | {"sampling_params": params | {"sampling_seed": seed}}


class StreamProgress:
    """One client's stream, whichever workers write it."""

    def __init__(self, body: Body, max_retries: int, again: Again) -> None:
        self._body = body
        self._again = again
        self._num_left = max_retries
        self._rest = b""
        self._head: dict[str, Any] | None = None
        self._token_ids: list[int] = []
        self._cached_tokens = 0
        self._logprobs: list[Any] = []
        self._tail: str | None = None
        self._passed_on = False
        self.error_event = b""
        """What the worker said of its failure, and the stream's end; empty where it said nothing."""
        self.failure: EndedError | None = None
        """The worker said that the stream has failed and that another try may help."""
        self._done = False

    def feed(self, chunk: bytes) -> bytes:
        """The worker's next bytes; returns whole events for the client."""
        *events, self._rest = (self._rest + chunk).split(EVENT_END)
        shown = b"".join(self._take(event) for event in events)
        self._passed_on = self._passed_on or bool(shown)
        return shown

    def end(self) -> bytes:
        """The worker's answer is at its end; returns the rest.

        Raises:
            EndedError: its last event is missing.
        """
        if self._head is not None and not self._done:
            raise EndedError("the decode worker's answer ended before its last event", 502, WORKER_FAILED)
        return self._rest

    @property
    def ending(self) -> bytes | None:
        """What is left of a broken stream whose tokens are all here, perhaps nothing; None: more were to come."""
        if self._done:
            return b""
        return None if self._tail is None else self._tail.encode() + DONE

    async def go_on(self, error: EndedError) -> WorkerStream | None:
        """The answer that the stream goes on with; None where it cannot."""
        can = self._num_left > 0 and self._may_go_on
        if not can or error.code not in (WORKER_FAILED, *([self.failure.code] if self.failure else [])):
            return None
        self._num_left -= 1
        live = await self._again(self._resumed_body(), error)
        if live is not None:
            self._rest, self.failure, self.error_event = b"", None, b""
        return live

    @property
    def _may_go_on(self) -> bool:
        """The worker tells what it takes, or the client has seen nothing yet."""
        return self._head is not None or not self._passed_on

    def _resumed_body(self) -> Body:
        if self._head is None:
            return self._body
        resume = {"head": self._head, "token_ids": self._token_ids, "cached_tokens": self._cached_tokens}
        if self._logprobs:
            resume["logprobs"] = self._logprobs
        return self._body | {RESUME_FIELD: resume}

    def _take(self, event: bytes) -> bytes:
        """Keep what is told of an event; returns the event for the client, nothing behind a failure."""
        state, shown = split_event(event)
        if state is not None:
            self._head = self._head or state.head
            self._token_ids += state.token_ids
            self._logprobs += state.logprobs or []
            self._cached_tokens, self._tail = state.cached_tokens, state.tail
        if self.failure is None and self._may_go_on and shown.startswith(_ERROR):
            self.failure = _retryable(shown)
            self.error_event = b"" if self.failure is None else shown + EVENT_END + DONE
        if self.failure is not None:
            return b""
        self._done = self._done or shown + EVENT_END == DONE
        return shown + EVENT_END if shown else b""


def _retryable(event: bytes) -> EndedError | None:
    """An error event as an error, where another try may help."""
    try:
        body = orjson.loads(event.removeprefix(b"data: "))
    except orjson.JSONDecodeError:
        return None
    status, error = body.get("code"), body["error"]
    if status not in RETRYABLE_STATUSES or not isinstance(error, dict):
        return None
    return EndedError(str(error.get("message")), status, str(error.get("code")))
