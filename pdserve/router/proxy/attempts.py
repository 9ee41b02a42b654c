"""Attempts at a pair: the bootstrap rooms of their bodies, and their end by a lost worker or the router's shutdown.

    Attempt   health, watchdog ── lost ──┐
              Drain ── abort ────────────┴──> `reason` ──> `dispatch` waits for it; `generate` gets the exception
    Drain     open ── close ──> 503 for new requests, running requests continue ── abort_all ──> they end

An attempt without a first byte ends like any other failure: the request is retried, or answered with an error. A stream
that has begun ends with an error event. Made by `dispatch` and `app`. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import orjson

from pdserve.http.access import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    GENERATE_PATH,
    MESSAGES_PATH,
    OLLAMA_CHAT_PATH,
    OLLAMA_GENERATE_PATH,
    RESPONSES_PATH,
)
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import MAX_ROOM
from pdserve.router.workers.admission import own_failure
from pdserve.router.workers.outcome import ConnectionFailed, EndedError, WorkerStream, worker_failed
from pdserve.router.workers.workers import Pair, Worker

SHUTTING_DOWN = own_failure("router_shutting_down", "the router is shutting down; send the request again")
WRITE_S = 2.0
"""Seconds for clients to read the error that ends their request at shutdown."""


MAX_SEQUENCES = 8192
"""Maximum `n`, and maximum number of prompts, for which rooms are made: workers refuse a larger body anyway."""


def batch_size(path: str, body: dict[str, Any]) -> int | None:
    """Return the number of bootstrap rooms that a batch needs as a list; None for a single room.

    Invalid types count as a single room: the worker refuses them.
    """
    if path in (RESPONSES_PATH, MESSAGES_PATH, OLLAMA_CHAT_PATH, OLLAMA_GENERATE_PATH):
        return None
    if path == CHAT_PATH:
        sequences = num_sequences(body)
        return sequences if sequences > 1 else None
    if path == COMPLETIONS_PATH:
        prompts = body.get("prompt")
    else:
        prompts = body.get("text") if body.get("input_ids") is None else body["input_ids"]
        if prompts is None:
            prompts = _prompts_of_embeds(body.get("input_embeds"))
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], (str, list)):
        return len(prompts) if len(prompts) <= MAX_SEQUENCES else None
    return None


def _prompts_of_embeds(embeds: Any) -> Any:
    """Return `input_embeds` if it has several prompts, each a text or float lists; None for a single one."""
    first = embeds[0] if isinstance(embeds, list) and embeds else None
    is_batch = isinstance(first, str) or (isinstance(first, list) and bool(first) and isinstance(first[0], list))
    return embeds if is_batch else None


def num_sequences(body: dict[str, Any]) -> int:
    """Return `n` of a request (for `/generate` from `sampling_params`); 1 if absent or invalid."""
    params = body.get("sampling_params")
    n = params.get("n", 1) if isinstance(params, dict) else body.get("n", 1)
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_SEQUENCES:
        return 1
    return n


def mint(rng: random.Random, sequences: int) -> int:
    """Return a random bootstrap room such that room + i fits 63 bits for every sequence i."""
    return rng.randrange(MAX_ROOM - sequences + 2)


def with_rooms(
    path: str, body: dict[str, Any], data: bytes | None, host: str, port: int | None, rng: random.Random
) -> bytes:
    """Return the JSON of `body` with new `bootstrap_host`, `bootstrap_port` and `bootstrap_room`.

    The client's fields of these names are replaced. `data`: the JSON of `body`, which is copied, because that takes
    less time than to serialize `body`; None: `body` is serialized.
    """
    size = batch_size(path, body)
    sequences = num_sequences(body)
    fields: dict[str, Any]
    if size is None:
        fields = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": mint(rng, sequences)}
    else:
        rooms = [mint(rng, sequences) for _ in range(size)]
        fields = {"bootstrap_host": [host] * size, "bootstrap_port": [port] * size, "bootstrap_room": rooms}
    if data is None or not body or not fields.keys().isdisjoint(body):
        return orjson.dumps(body | fields)
    end = data.rindex(b"}")
    return b"".join((memoryview(data)[:end], b",", memoryview(orjson.dumps(fields))[1:]))


def merges_prefill(path: str, body: dict[str, Any]) -> bool:
    """Whether prefill's answer has a part of the client's: log probabilities, or hidden states, of the prompt."""
    if path != GENERATE_PATH:
        return False
    start = body.get("logprob_start_len")
    wants_logprobs = isinstance(start, list) or (isinstance(start, int) and start >= 0)
    return _is_set(body.get("return_hidden_states")) or (wants_logprobs and _is_set(body.get("return_logprob")))


def _is_set(flag: Any) -> bool:
    """Whether a flag of `/generate` is true for a prompt."""
    return flag is True or (isinstance(flag, list) and any(one is True for one in flag))


WEIGHTS_PATIENCE_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.5


class Attempt:
    """One attempt at a pair, which lasts as long as its `with` block.

    `reason` is set when a lost worker or the shutdown ended the attempt.
    """

    __slots__ = (
        *("_can_recompute", "_changed", "_drain", "_upstream", "attaches", "begun", "pair", "reason", "rids"),
        "turn",
    )

    def __init__(
        self,
        pair: Pair,
        drain: Drain,
        can_recompute: Callable[[Pair], bool] = lambda pair: False,
        rids: tuple[str, ...] = (),
        *,
        attaches: bool = False,
        turn: str | None = None,
    ) -> None:
        """`can_recompute`: whether decode computes the prompt itself when the pair's prefill server is lost.

        `rids`: names of the request at decode, the newest last; empty: none names it alone. `attaches`: the router
        opens the rest of the stream at the worker to which the request moves. `turn`: see `ProxiedCall`.
        """
        self._can_recompute = can_recompute
        self.rids = rids
        self.attaches = attaches
        self.turn = turn
        self.pair = pair
        self.begun = asyncio.get_running_loop().time()
        self._drain = drain
        self._upstream: WorkerStream | None = None
        self._changed: asyncio.Future[None] | None = None
        self.reason: ConnectionFailed | Failure | None = None

    def __enter__(self) -> Self:
        pair = self.pair
        pair.decode.attempts.add(self)
        if pair.prefill is not None:
            pair.prefill.attempts.add(self)
        self._drain.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        pair = self.pair
        pair.decode.attempts.discard(self)
        if pair.prefill is not None:
            pair.prefill.attempts.discard(self)
        if self._upstream is not None:
            self._upstream.worker.ended_bytes += self.num_bytes(self._upstream.worker)
        self._drain.leave(self)

    @property
    def waits(self) -> bool:
        """Whether no answer has begun and the attempt was not ended."""
        return self._upstream is None and self.reason is None

    async def change(self) -> None:
        """Wait for the next call of `wake`."""
        self._changed = asyncio.get_running_loop().create_future()
        try:
            await self._changed
        finally:
            self._changed = None

    def wake(self, _: object = None) -> None:
        """End the wait in `change`, because a half or the attempt has ended; usable as callback of a task."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def lost(self, worker: Worker, reason: str) -> None:
        """End the attempt, see `RunningAttempt`. A lost prefill does not end an answer that decode has begun."""
        if worker is self.pair.prefill and self._can_recompute(self.pair):
            return
        if self._upstream is None or self._upstream.worker is worker:
            self._end(ConnectionFailed(worker, reason, lost=True))

    def abort(self, why: Failure = SHUTTING_DOWN) -> None:
        """End the attempt, by default because the router shuts down."""
        self._end(why)

    def answers(self, upstream: WorkerStream) -> None:
        """Register decode's answer, so that `lost` and `abort` can end it."""
        self._upstream = upstream
        if self.reason is not None:
            self._break(upstream, self.reason)

    def num_bytes(self, worker: Worker) -> int:
        """Return the bytes of the answer that `worker` has sent so far."""
        upstream = self._upstream
        return 0 if upstream is None or upstream.worker is not worker else upstream.response.content.total_bytes

    def _end(self, why: ConnectionFailed | Failure) -> None:
        if self.reason is None:
            self.reason = why
            self.wake()
            if self._upstream is not None:
                self._break(self._upstream, why)

    @staticmethod
    def _break(upstream: WorkerStream, why: ConnectionFailed | Failure) -> None:
        """Make the reader of the answer get an `EndedError`."""
        if upstream.response.content.is_eof():
            return
        if isinstance(why, Failure):
            error = EndedError(why)
        else:
            error = worker_failed(f"the router ended the request at the {why.worker.spec.role} worker: {why.message}")
        upstream.response.content.set_exception(error)


class WeightsPatience:
    """Waits of one request for a pair whose servers have the same weights, at most `WEIGHTS_PATIENCE_S` in all.

    `now`: time of the event loop in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until: float | None = None
        self._pause_s = FIRST_PAUSE_S

    async def wait(self) -> bool:
        """Wait before the next attempt, longer each time; False: the request has waited long enough."""
        if self._until is None:
            self._until = self._now() + WEIGHTS_PATIENCE_S
        if self._now() + self._pause_s > self._until:
            return False
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return True


class Drain:
    """The shutdown of one router: see the module's docstring."""

    def __init__(self) -> None:
        self.attempts: set[Attempt] = set()
        """All running attempts."""
        self._num_calls = 0
        self._left = asyncio.Event()
        self.closed = False
        """True: new requests are refused with `SHUTTING_DOWN`."""
        self.is_aborted = False
        """True: running requests were ended with `SHUTTING_DOWN`."""

    def close(self) -> None:
        """Refuse new requests from now on."""
        self.closed = True

    def abort_all(self) -> None:
        """End all running attempts."""
        self.closed = self.is_aborted = True
        for one in list(self.attempts):
            one.abort()

    def end(self, turn: str, why: Failure) -> None:
        """End the attempts of a session's request. `turn`: see `ProxiedCall`."""
        for one in list(self.attempts):
            if one.turn == turn:
                one.abort(why)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Count a client's request for the duration of the `with` block."""
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            self._left.set()

    async def empty(self, timeout_s: float) -> bool:
        """Wait until no request runs; False if requests still run after `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._num_calls:
                    self._left.clear()
                    await self._left.wait()
        return self._num_calls == 0

    def enter(self, one: Attempt) -> None:
        """Add an attempt; called by the attempt."""
        self.attempts.add(one)
        if self.is_aborted:
            one.abort()

    def leave(self, one: Attempt) -> None:
        """Remove an attempt; called by the attempt."""
        self.attempts.discard(one)
