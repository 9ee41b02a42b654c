"""Continues streams at another pair when their decode worker dies. Made by `dispatch`, used by `generate`.

    worker ── events with resume state ──> StreamProgress ── complete events ──> client
    broken ──> the state has the end of the stream: the router sends it
               the client has received nothing: the request is retried from its start
               else: the body with the resume state ──> another pair ──> the rest of the stream

For streams of one sequence. Streams with `n` above 1, batches, streams with merged prompt log probabilities, and
`/v1/responses` are not continued. `base/stream_state.py` defines the resume state.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from pdserve.base.stream_state import DONE, EVENT_END, RESUME_FIELD, split_event
from pdserve.http.access import CHAT_PATH, COMPLETIONS_PATH, GENERATE_PATH
from pdserve.protocol.failure import RUNNING_TIMEOUT, Failure
from pdserve.router.proxy.attempts import batch_size, num_sequences, wants_prompt_logprobs
from pdserve.router.workers.outcome import WORKER_FAILED, WorkerStream, worker_failed

RETRYABLE_STATUSES = frozenset({502, 503, 504})
"""HTTP statuses in error events after which a stream is continued."""
_ERROR = b'data: {"error":'

Body = dict[str, Any]
Again = Callable[[Body, Failure], Awaitable[WorkerStream | None]]
"""Sends a body to another pair after the stream broke; None if no pair answers."""


def can_go_on(path: str, body: Body) -> bool:
    """Whether a request is for a stream of one sequence that another pair can continue."""
    if body.get("stream") is not True or num_sequences(body) != 1 or wants_prompt_logprobs(path, body):
        return False
    size = batch_size(path, body)
    return (size is None and path in (CHAT_PATH, GENERATE_PATH)) or (size in (None, 1) and path == COMPLETIONS_PATH)


def with_seed(path: str, body: Body, rng: random.Random) -> Body:
    """Return the body with a seed, so that every pair generates the same tokens.

    A seed of the client is kept; bodies with invalid types are unchanged.
    """
    seed = rng.randrange(1 << 63)
    if path != GENERATE_PATH:
        return body if body.get("seed") is not None else body | {"seed": seed}
    params = body.get("sampling_params") or {}
    if not isinstance(params, dict) or any(params.get(name) is not None for name in ("seed", "sampling_seed")):
        return body
    return body | {"sampling_params": params | {"sampling_seed": seed}}


class StreamProgress:
    """Progress of one client's stream across workers."""

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
        """The worker's retryable error event, and the stream's end; empty without such an event."""
        self.failure: Failure | None = None
        """The worker's retryable failure; None without one."""
        self._done = False

    def feed(self, chunk: bytes) -> bytes:
        """Take the worker's next bytes; returns complete events for the client."""
        *events, self._rest = (self._rest + chunk).split(EVENT_END)
        shown = b"".join(self._take(event) for event in events)
        self._passed_on = self._passed_on or bool(shown)
        return shown

    def end(self) -> bytes:
        """Handle the end of the worker's answer; returns the remaining bytes.

        Raises:
            EndedError: the last event is missing.
        """
        if self._head is not None and not self._done:
            raise worker_failed("the decode worker's answer ended before its last event")
        return self._rest

    @property
    def ending(self) -> bytes | None:
        """The rest of a broken stream whose tokens are complete, possibly empty; None: tokens are missing."""
        if self._done:
            return b""
        return None if self._tail is None else self._tail.encode() + DONE

    async def go_on(self, failure: Failure) -> WorkerStream | None:
        """Continue the stream after `failure`; returns the next answer, or None if the stream cannot be continued."""
        can = self._num_left > 0 and self._may_go_on
        if not can or failure.code not in (WORKER_FAILED, *([self.failure.code] if self.failure else [])):
            return None
        self._num_left -= 1
        upstream = await self._again(self._resumed_body(), failure)
        if upstream is not None:
            self._rest, self.failure, self.error_event = b"", None, b""
        return upstream

    @property
    def _may_go_on(self) -> bool:
        """Whether the worker sends resume state, or the client has received nothing yet."""
        return self._head is not None or not self._passed_on

    def _resumed_body(self) -> Body:
        if self._head is None:
            return self._body
        resume = {"head": self._head, "token_ids": self._token_ids, "cached_tokens": self._cached_tokens}
        if self._logprobs:
            resume["logprobs"] = self._logprobs
        return self._body | {RESUME_FIELD: resume}

    def _take(self, event: bytes) -> bytes:
        """Record an event's resume state; returns the event for the client, empty after a failure."""
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


def _retryable(event: bytes) -> Failure | None:
    """Parse an error event; None if a retry does not help."""
    try:
        body = orjson.loads(event.removeprefix(b"data: "))
    except orjson.JSONDecodeError:
        return None
    status, error = body.get("code"), body["error"]
    if status not in RETRYABLE_STATUSES or not isinstance(error, dict) or error.get("code") == RUNNING_TIMEOUT:
        return None
    return Failure(code=str(error.get("code")), message=str(error.get("message")), origin="worker", status=status)
