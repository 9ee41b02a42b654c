"""Time as an argument. Everything that waits or times out is given a `Clock`; tests and the simulator give a manual
one.
"""

from __future__ import annotations

import time
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
    """A clock that moves only when told. One thread advances it."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """The seconds reached so far."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`, which must not be negative."""
        assert seconds >= 0, f"a monotonic clock cannot go back by {-seconds} s"
        self._now += seconds
