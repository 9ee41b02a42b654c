"""Sequences that were sent to the scheduler and have had no output yet: how many, and how many prompt tokens.

Counted here, not only in the scheduler: this covers all places where they wait. Those are the channel, the scheduler's
mailbox during a long step, the grammar gate, and the queues of the roles. Owned by the engine client, on its event
loop.

A sequence that is aborted counts until the scheduler has ended it. Its message may lie in the channel until then.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.base.clock import Clock, MonotonicClock, RetryAfterEstimator
from pdserve.config import ServerConfig
from pdserve.config.resolve import MAX_RUNNING_REQUESTS
from pdserve.errors import RequestError
from pdserve.protocol.messages import GenerateRequest

QUEUE_FULL = "queue_full"
"""Code of the refusal, here and in the scheduler."""
MAX_WAITING_TOKENS = 1 << 24
"""Prompt tokens for each replica: about 1.2 GB, as a token takes some 36 bytes here and as many in the scheduler."""
WAITING_CONTEXTS = 16
"""Full contexts that may wait in any case, for each replica."""
ROWS_AHEAD = 4
"""Sequences without an output that each row of a replica may have beside the queue: those that are being computed or
transferred, and those whose end has not been reported yet."""
MIN_AHEAD = 1024
"""The least number of these: a prefill server gives a row away before the transfer of its prompt has ended."""


class WaitingRequests:
    """See the file's docstring. `most`: sequences."""

    def __init__(self, most: int, num_replicas: int, clock: Clock) -> None:
        self._most = most
        self._num_replicas = num_replicas
        self._pace = RetryAfterEstimator(clock)
        self._tokens: dict[str, int] = {}
        """Of each sequence, by rid."""
        self._num_tokens = 0
        self._num_begun = 0
        self._num_refused = 0

    @classmethod
    def of(cls, config: ServerConfig) -> WaitingRequests | None:
        """None: `--max-queued-requests` lifts the bounds."""
        most_queued = config.schedule.most_queued
        if most_queued is None:
            return None
        rows = config.schedule.max_running_requests or MAX_RUNNING_REQUESTS
        num_replicas = config.parallel.dp_size
        ahead = max(ROWS_AHEAD * rows, MIN_AHEAD)
        return cls(num_replicas * (most_queued + ahead), num_replicas, MonotonicClock())

    def check(self, requests: Sequence[GenerateRequest], capacity: int) -> None:
        """Refuse `requests`, the sequences of one body, where too much waits already. `capacity`: tokens of a context.

        Raises:
            RequestError: 503 with a time to come back.
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
        """Totals for `/metrics`."""
        return {"requests_refused_by_api": float(self._num_refused)}

    def add(self, request: GenerateRequest) -> None:
        """It is sent."""
        self._pace.sample(self._num_begun)
        num_tokens = self._tokens[request.rid] = len(request.given_ids)
        self._num_tokens += num_tokens

    def heard(self, rid: str) -> None:
        """The scheduler has sent an output of it, or its end."""
        num_tokens = self._tokens.pop(rid, None)
        if num_tokens is not None:
            self._num_tokens -= num_tokens
            self._num_begun += 1
