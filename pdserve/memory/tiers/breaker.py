"""The circuit breaker of a store: a store that fails or is slow gets no calls for a while.

closed ── a call fails or exceeds its limit, or several look-ups are lies ──> open
open ── after a pause ──> half open: one probe, which no request waits for ──> closed, or open for twice as long
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
MOST_LIES = 3
"""The breaker opens after this many look-ups in a row that found objects but could read none."""


class StorageBreakerState(enum.StrEnum):
    """States of a `StorageBreaker`."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class StorageBreaker:
    """Counts what calls to a store do. Any thread.

    `limit_s`: seconds that one call may take. A call that still runs then keeps the breaker open until it returns. With
    `starts_open` the store has to answer a probe first.
    """

    def __init__(self, limit_s: float, *, starts_open: bool = False, now: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._now = limit_s, now
        self._lock = threading.Lock()
        self._started: dict[str, float] = {}
        """Start of the running call of each lane."""
        self._open_until = now() if starts_open else None
        self._pause_s = FIRST_PAUSE_S
        self._is_probing = False
        self._lies = 0
        self.num_opened = 0
        """How often it has opened."""
        self.last_error = ""

    @property
    def state(self) -> StorageBreakerState:
        """Its state now."""
        with self._lock:
            if self._open_until is None:
                return StorageBreakerState.OPEN if self._is_stuck() else StorageBreakerState.CLOSED
            return StorageBreakerState.HALF_OPEN if self._is_probing else StorageBreakerState.OPEN

    @property
    def allows(self) -> bool:
        """Whether a request may use the store now."""
        return self.state is StorageBreakerState.CLOSED

    def begin_probe(self) -> bool:
        """Return whether the caller is to probe the store now; it ends the probe by `succeed` or `fail`."""
        with self._lock:
            due = self._open_until is not None and self._now() >= self._open_until
            if due and not self._is_probing and not self._is_stuck():
                self._is_probing = True
                return True
            return False

    def begin(self, lane: str) -> None:
        """A call begins on `lane`, which has one call at a time."""
        with self._lock:
            self._started[lane] = self._now()

    def succeed(self, lane: str) -> None:
        """The call has returned. It counts as failed if it took longer than the limit."""
        with self._lock:
            took = self._now() - self._started.pop(lane)
            if took > self._limit_s:
                self._open(f"a call took {took:.1f} s")
            elif self._is_probing:
                self._open_until, self._is_probing, self._pause_s, self._lies = None, False, FIRST_PAUSE_S, 0

    def fail(self, lane: str, error: str) -> None:
        """The call has failed."""
        with self._lock:
            self._started.pop(lane, None)
            self._open(error)

    def late(self) -> None:
        """A request has given up at its deadline with less than half of what the store said to have."""
        with self._lock:
            self._open("a look-up exceeded its deadline")

    def read(self, *, found: bool) -> None:
        """A look-up said that there are objects; `found`: at least one of them could be read."""
        with self._lock:
            self._lies = 0 if found else self._lies + 1
            if self._lies >= MOST_LIES:
                self._open("the store has named objects that it does not have")

    def _is_stuck(self) -> bool:
        return any(self._now() - start > self._limit_s for start in self._started.values())

    def _open(self, error: str) -> None:
        if self._open_until is None:
            self.num_opened += 1
        elif self._is_probing:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._open_until, self._is_probing, self._lies = self._now() + self._pause_s, False, 0
        self.last_error = error
