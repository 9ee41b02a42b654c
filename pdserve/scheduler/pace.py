"""How fast requests end, so that one that is turned away can be told when to come back. Owned by `Scheduler`."""

from __future__ import annotations

import math
from collections import deque

from pdserve.base.clock import Clock

_SAMPLES, _SAMPLE_S = 30, 1.0
_MOST_S = 60


class Pace:
    """Samples the number of ended requests about once a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)

    def sample(self, num_ended: int) -> None:
        """So many requests have ended so far."""
        now = self._clock.now()
        if not self._samples or now - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now, num_ended))

    def retry_after_s(self, num_ended: int) -> int:
        """Whole seconds, at least 1, until one more request has ended at the pace of the last half minute."""
        if not self._samples:
            return 1
        since, before = self._samples[0]
        if num_ended <= before:
            return min(_MOST_S, max(1, math.ceil(self._clock.now() - since)))
        return min(_MOST_S, max(1, math.ceil((self._clock.now() - since) / (num_ended - before))))
