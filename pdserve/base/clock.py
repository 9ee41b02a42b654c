"""Clocks, and rates over the last seconds. Code that waits or times out takes a `Clock`; tests pass a `ManualClock`."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds with an arbitrary origin. Called from any thread."""

    def now(self) -> float:
        """Seconds; never goes back."""
        ...


class MonotonicClock:
    """The real clock of this process."""

    def now(self) -> float:
        """`time.monotonic()`."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only by `advance`. One thread advances it."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """The seconds reached so far."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`, which must not be negative."""
        assert seconds >= 0, f"a monotonic clock cannot go back by {-seconds} s"
        self._now += seconds


_WINDOW_S, _SAMPLE_S = 30.0, 1.0


class RetryAfterEstimator:
    """Estimates `Retry-After` from the number of finished requests, sampled about once a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()

    def sample(self, num_ended: int) -> None:
        """Record `num_ended`, the total of requests that have finished so far."""
        now = self._forget()
        if not self._samples or now - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now, num_ended))

    def retry_after_s(self, num_ended: int) -> int:
        """Whole seconds, 1 to 30, until one more request finishes at the rate of the last 30 seconds."""
        now = self._forget()
        if not self._samples:
            return 1
        since, before = self._samples[0]
        return max(1, math.ceil((now - since) / max(1, num_ended - before)))

    def _forget(self) -> float:
        """Drop samples older than the window; return the time now."""
        now = self._clock.now()
        while self._samples and now - self._samples[0][0] > _WINDOW_S:
            self._samples.popleft()
        return now


RATE_WINDOW_S = 10
"""Seconds over which `TokenRate` averages."""


class TokenRate:
    """Tokens per second over the last `RATE_WINDOW_S` whole seconds. `now` returns monotonic seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seconds: deque[tuple[int, int]] = deque(maxlen=RATE_WINDOW_S + 1)

    def add(self, num_tokens: int) -> None:
        """Count `num_tokens` generated now."""
        second = int(self._now())
        if self._seconds and self._seconds[-1][0] == second:
            num_tokens += self._seconds.pop()[1]
        self._seconds.append((second, num_tokens))

    def value(self) -> float:
        """Tokens per second, without the current second."""
        now = int(self._now())
        counted = (count for second, count in self._seconds if now - RATE_WINDOW_S <= second < now)
        return sum(counted) / RATE_WINDOW_S
