"""Bounds the sequences that were sent to the scheduler and have no output yet, by number and by prompt tokens.

The API process counts them, because the scheduler's own bound covers only its queues. This count also covers the
channel, the scheduler's mailbox during a long step, and the grammar gate. Owned by the engine client, on its event
loop.

An aborted sequence counts until the scheduler has ended it, because its message may be in the channel until then.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.base.clock import Clock, MonotonicClock, RetryAfterEstimator
from pdserve.config import ServerConfig
from pdserve.config.resolve import MAX_RUNNING_REQUESTS
from pdserve.errors import RequestError
from pdserve.protocol.messages import GenerateRequest

QUEUE_FULL = "queue_full"
"""Error code of the refusal, here and in the scheduler."""
MAX_WAITING_TOKENS = 1 << 24
"""Prompt tokens per replica: about 1.2 GB, as a token takes about 36 bytes here and as many in the scheduler."""
WAITING_CONTEXTS = 16
"""Full contexts per replica that may always wait."""
ROWS_AHEAD = 4
"""Sequences without an output per row of a replica, in addition to the queue: those that are being computed or
transferred, and those whose end is not reported yet."""
MIN_AHEAD = 1024
"""Minimum of `ROWS_AHEAD` times rows: a prefill server reuses a row before the transfer of its prompt has ended."""


class WaitingRequests:
    """See the file's docstring. `most`: maximum number of waiting sequences."""

    def __init__(self, most: int, num_replicas: int, clock: Clock) -> None:
        self._most = most
        self._num_replicas = num_replicas
        self._pace = RetryAfterEstimator(clock)
        self._tokens: dict[str, int] = {}
        """Prompt tokens of each waiting sequence, by rid."""
        self._num_tokens = 0
        self._num_begun = 0
        self._num_refused = 0

    @classmethod
    def of(cls, config: ServerConfig) -> WaitingRequests | None:
        """Create the bounds for a server; None when `--max-queued-requests` disables them."""
        most_queued = config.schedule.most_queued
        if most_queued is None:
            return None
        rows = config.schedule.max_running_requests or MAX_RUNNING_REQUESTS
        num_replicas = config.parallel.dp_size
        ahead = max(ROWS_AHEAD * rows, MIN_AHEAD)
        return cls(num_replicas * (most_queued + ahead), num_replicas, MonotonicClock())

    def check(self, requests: Sequence[GenerateRequest], capacity: int) -> None:
        """Check that the sequences of one body may wait. `capacity`: tokens of a full context.

        A server with no waiting sequence takes any body.

        Raises:
            RequestError: 503 with `retry_after_s` when too many sequences or prompt tokens wait.
        """
        if not self._tokens:
            return
        most_tokens = self._num_replicas * max(MAX_WAITING_TOKENS, WAITING_CONTEXTS * capacity)
        if len(self._tokens) + len(requests) > self._most:
            message = f"{len(self._tokens)} requests wait already"
        elif self._num_tokens + sum(len(request.given_ids) for request in requests) > most_tokens:
            message = f"requests of {self._num_tokens} prompt tokens wait already"
        else:
            return
        self._num_refused += len(requests)
        retry_after_s = self._pace.retry_after_s(self._num_begun)
        raise RequestError(message, status=503, code=QUEUE_FULL, retry_after_s=retry_after_s)

    def counters(self) -> dict[str, float]:
        """Return the counters for `/metrics`."""
        return {"requests_refused_by_api": float(self._num_refused)}

    def add(self, request: GenerateRequest) -> None:
        """Count a sequence that is sent to the scheduler."""
        self._pace.sample(self._num_begun)
        num_tokens = self._tokens[request.rid] = len(request.given_ids)
        self._num_tokens += num_tokens

    def heard(self, rid: str) -> None:
        """Stop counting a sequence: the scheduler has sent its first output, or its end."""
        num_tokens = self._tokens.pop(rid, None)
        if num_tokens is not None:
            self._num_tokens -= num_tokens
            self._num_begun += 1
