"""The newest ended requests, for the dashboard, and the token rate, for throughput gauges."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from pdserve.observe.record import RequestRecord

NUM_REQUESTS = 64
WINDOW_S = 10
"""Seconds over which `TokenRate` averages."""


class TokenRate:
    """Tokens per second over the last `WINDOW_S` whole seconds."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque(maxlen=WINDOW_S + 1)

    def add(self, num_tokens: int) -> None:
        """Count `num_tokens` generated now."""
        second = int(time.monotonic())
        if self._seconds and self._seconds[-1][0] == second:
            num_tokens += self._seconds.pop()[1]
        self._seconds.append((second, num_tokens))

    def value(self) -> float:
        """Tokens per second, without the current second."""
        now = int(time.monotonic())
        return sum(count for second, count in self._seconds if now - WINDOW_S <= second < now) / WINDOW_S


class RecentRequests:
    """A `RequestListener` that keeps the `NUM_REQUESTS` newest records of HTTP calls."""

    keeps_output = False

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=NUM_REQUESTS)

    def started(self, record: RequestRecord) -> None:
        """See `RequestListener`."""

    def ended(self, record: RequestRecord) -> None:
        """See `RequestListener`."""
        if record.path is not None:
            self._records.append(record)

    def as_json(self) -> list[dict[str, Any]]:
        """Return the records as JSON objects, the newest first."""
        return [_fields(record) for record in reversed(self._records)]


def _fields(record: RequestRecord) -> dict[str, Any]:
    timing = record.timing
    return {
        "id": record.name,
        "path": record.path,
        "room": None if record.room is None else str(record.room),
        "arrived_at": record.arrived_at,
        "outcome": record.outcome,
        "error": None if record.failure is None else record.failure.message,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "ttft_s": record.ttft_s,
        "ttft_parts": record.parts,
        "e2e_s": record.e2e_s,
        "kv_bytes": None if timing is None else timing.kv_bytes,
        "kv_transfer_s": None if timing is None else timing.kv_transfer_s,
    }
