"""How fast requests end, so that one that is turned away can be told when to come back.

Owned by `Scheduler` and by `WaitingRequests`.
"""

from __future__ import annotations

import math
from collections import deque

from pdserve.base.clock import Clock

_WINDOW_S, _SAMPLE_S = 30.0, 1.0


class RetryAfterEstimator:
    """Samples the number of ended requests about once a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()

    def sample(self, num_ended: int) -> None:
        """So many requests have ended so far."""
        now = self._forget()
        if not self._samples or now - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now, num_ended))

    def retry_after_s(self, num_ended: int) -> int:
        """Whole seconds, 1 to 30, until one more request has ended at the pace of the last half minute."""
        now = self._forget()
        if not self._samples:
            return 1
        since, before = self._samples[0]
        return max(1, math.ceil((now - since) / max(1, num_ended - before)))

    def _forget(self) -> float:
        """Drop samples that are too old; the time now."""
        now = self._clock.now()
        while self._samples and now - self._samples[0][0] > _WINDOW_S:
            self._samples.popleft()
        return now
