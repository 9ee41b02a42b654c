"""Continues streams at another worker when their decode worker dies or their request has moved. Made by `dispatch`.

    worker ── events with resume state ──> StreamProgress ── complete events ──> client
    broken ──> the state has the end of the stream: the router sends it
               the client has received nothing: the request is retried from its start
               else: the body with the resume state ──> another pair ──> the rest of the stream
    moved  ──> the worker ends the stream with the event `migrated`: the body with the resume state and `attach` ──> the
               worker that has the request now; where that fails, another pair computes the rest

For streams of one sequence. Streams with `n` above 1, batches, streams with merged prompt log probabilities, and
`/v1/responses` are not continued. `base/stream_state.py` defines the resume state.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from pdserve.base.stream_state import (
    ANTHROPIC_STREAM,
    MARK,
    OLLAMA_STREAM,
    OPENAI_STREAM,
    RESUME_FIELD,
    EventState,
    StreamForm,
    split_event,
)
from pdserve.http.access import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    GENERATE_PATH,
    MESSAGES_PATH,
    OLLAMA_CHAT_PATH,
    OLLAMA_GENERATE_PATH,
)
from pdserve.http.error_forms import inner_error
from pdserve.protocol.failure import RUNNING_TIMEOUT, Failure
from pdserve.router.proxy.attempts import batch_size, merges_prefill, num_sequences
from pdserve.router.workers.outcome import WORKER_FAILED, WorkerStream, worker_failed

RETRYABLE_STATUSES = frozenset({502, 503, 504})
"""HTTP statuses in error events after which a stream is continued."""

log = logging.getLogger(__name__)

Body = dict[str, Any]
Again = Callable[[Body, Failure], Awaitable[WorkerStream | None]]
"""Sends a body to another pair after the stream broke; None if no pair answers."""
MIGRATED = "migrated"
"""Error code of a stream whose request has moved to another decode worker."""


@dataclasses.dataclass(frozen=True)
class Moved:
    """Where a request goes on: at the worker with the URL `to`, under the name `rid`, behind `num_tokens` tokens."""

    to: str
    rid: str
    num_tokens: int


Attach = Callable[[Body, Moved], Awaitable[WorkerStream | None]]
"""Sends a body to the worker that has the request; None if that does not answer with the stream."""


def can_go_on(path: str, body: Body) -> bool:
    """Whether a request is for a stream of one sequence that another pair can continue."""
    is_ollama = path in (OLLAMA_CHAT_PATH, OLLAMA_GENERATE_PATH)
    streams = body.get("stream") in (None, True) if is_ollama else body.get("stream") is True
    if not streams or num_sequences(body) != 1 or merges_prefill(path, body):
        return False
    size = batch_size(path, body)
    if size is None and (is_ollama or path in (CHAT_PATH, GENERATE_PATH, MESSAGES_PATH)):
        return True
    return size in (None, 1) and path == COMPLETIONS_PATH


def with_seed(path: str, body: Body, rng: random.Random) -> Body:
    """Return the body with a seed, so that every pair generates the same tokens.

    A seed of the client is kept; bodies with invalid types are unchanged. `options.seed` of Ollama's API counts more
    than the field that is added.
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

    def __init__(
        self,
        body: Body,
        max_retries: int,
        again: Again,
        attach: Attach | None = None,
        form: StreamForm = OPENAI_STREAM,
    ) -> None:
        """`attach` None: a request that has moved is computed again at another pair. `form`: the events of its API."""
        self._form = form
        self._body = body
        self._again = again
        self._attach = attach
        self._moved: Moved | None = None
        self._num_left = max_retries
        self._rest = b""
        self._state_line = b""
        """The resume state of the next line of a stream of lines, with its line break; empty: none has come."""
        self._held: list[bytes] = []
        self._held_state: EventState | None = None
        """The state of the held events, which are the first ones of a group; None: no events are held."""
        self._head: dict[str, Any] | None = None
        self._token_ids: list[int] = []
        self._cached_tokens = 0
        self._cached_details: dict[str, int | None] | None = None
        self._weights = ""
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
        *events, self._rest = (self._rest + chunk).split(self._form.end)
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
        return None if self._tail is None else self._tail.encode() + self._form.last

    async def go_on(self, failure: Failure) -> WorkerStream | None:
        """Continue the stream after `failure`; returns the next answer, or None if the stream cannot be continued."""
        moved, self._moved = self._moved, None
        if moved is not None:
            self._num_left = max(1, self._num_left)  # a migration that fails costs the client no stream
            num_tokens = len(self._token_ids)
            if self._attach is not None and self._head is not None and num_tokens != moved.num_tokens:
                log.warning("%s has %d tokens, the client's stream %d", moved.rid, moved.num_tokens, num_tokens)
            elif self._attach is not None and self._head is not None:
                upstream = await self._attach(self._resumed_body(moved.rid), moved)
                if upstream is not None:
                    self._reset()
                    return upstream
        can = self._num_left > 0 and self._may_go_on
        if not can or failure.code not in (WORKER_FAILED, *([self.failure.code] if self.failure else [])):
            return None
        self._num_left -= 1
        upstream = await self._again(self._resumed_body(), failure)
        if upstream is not None:
            self._reset()
        return upstream

    def _reset(self) -> None:
        """Drop what the broken answer has left, because another answer follows."""
        self._rest, self._state_line, self.failure, self.error_event = b"", b"", None, b""
        self._held, self._held_state = [], None

    @property
    def _may_go_on(self) -> bool:
        """Whether the worker sends resume state, or the client has received nothing yet."""
        return self._head is not None or not self._passed_on

    def _resumed_body(self, attach: str | None = None) -> Body:
        """Return the body with the resume state. `attach`: name of the request at the worker that gets the body."""
        if self._head is None:
            return self._body
        resume: dict[str, Any] = {} if attach is None else {"attach": attach}
        resume |= {"head": self._head, "token_ids": self._token_ids, "cached_tokens": self._cached_tokens}
        if self._cached_details is not None:
            resume["cached_details"] = self._cached_details
        if self._weights:
            resume["weights"] = self._weights
        if self._logprobs:
            resume["logprobs"] = self._logprobs
        return self._body | {RESUME_FIELD: resume}

    def _take(self, event: bytes) -> bytes:
        """Record an event's resume state; returns the event for the client, empty after a failure."""
        end = self._form.end
        if end == b"\n":
            if event.startswith(MARK):
                self._state_line = event + end
                return b""
            event, self._state_line = self._state_line + event, b""
        state, shown = split_event(event)
        if self._held_state is not None:
            self._held.append(shown)
            if len(self._held) < self._held_state.group:
                return b""
            state, shown = self._held_state, end.join(self._held)
            self._held, self._held_state = [], None
        elif state is not None and state.group > 1:
            self._held, self._held_state = [shown], state
            return b""
        if state is not None:
            self._head = self._head or state.head
            self._token_ids += state.token_ids
            self._logprobs += state.logprobs or []
            self._cached_tokens, self._tail = state.cached_tokens, state.tail
            self._cached_details, self._weights = state.cached_details, state.weights or self._weights
        if self.failure is None and self._may_go_on and shown.startswith(self._form.error):
            self.failure = _retryable(shown)
            self._moved = None if self.failure is None or self.failure.code != MIGRATED else _moved(shown)
            self.error_event = b"" if self.failure is None else shown + end + self._form.after_error
        if self.failure is not None:
            return b""
        self._done = self._done or self._form.is_last(shown)
        return shown + end if shown else b""


def stream_form(path: str) -> StreamForm:
    """Return the form of the streams at `path`."""
    if path in (OLLAMA_CHAT_PATH, OLLAMA_GENERATE_PATH):
        return OLLAMA_STREAM
    return ANTHROPIC_STREAM if path == MESSAGES_PATH else OPENAI_STREAM


def _data(event: bytes) -> bytes:
    """Return the data of an event, which may begin with its name; a line of Ollama's API is data as a whole."""
    return event if event.startswith(b"{") else event.partition(b"data: ")[2]


def _moved(event: bytes) -> Moved | None:
    """Parse the error event of a request that has moved; None if it lacks a field."""
    error = inner_error(orjson.loads(_data(event)))
    to, rid, num_tokens = (error.get(name) for name in ("to", "migrated_rid", "next_token_index"))
    if isinstance(to, str) and isinstance(rid, str) and isinstance(num_tokens, int):
        return Moved(to, rid, num_tokens)
    return None


def _retryable(event: bytes) -> Failure | None:
    """Parse an error event; None if a retry does not help."""
    try:
        body = orjson.loads(_data(event))
    except orjson.JSONDecodeError:
        return None
    status, error = body.get("code"), inner_error(body)
    if status not in RETRYABLE_STATUSES or not error or error.get("code") == RUNNING_TIMEOUT:
        return None
    return Failure(code=str(error.get("code")), message=str(error.get("message")), origin="worker", status=status)
