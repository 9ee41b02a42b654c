"""The circuit breaker of a store: a store that fails or is slow gets no calls for a while.

closed ── a call fails or exceeds its limit, a read is late, or several look-ups are lies ──> open
open ── after a pause ──> half open: one probe, which no request waits for ──> closed, or open for twice as long

A good probe leaves the next pause as long as it is: a store that soon fails again is left alone for twice as long as
before. Each read in time halves the next pause, and a store that was used for `LONGEST_PAUSE_S` begins with the first.
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
        self._closed_at = now()
        self._pause_s = self._next_pause_s = FIRST_PAUSE_S
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

    @property
    def next_pause_s(self) -> float:
        """Seconds for which it opens when the store fails next."""
        with self._lock:
            return self._next_pause_s

    def begin_probe(self) -> bool:
        """Return whether the caller is to probe the store now: it calls `begin`, the store, and then `end_probe`."""
        with self._lock:
            due = self._open_until is not None and self._now() >= self._open_until
            if due and not self._is_probing and not self._is_stuck():
                self._is_probing = True
                return True
            return False

    def end_probe(self, lane: str, error: str | None) -> None:
        """The probe has ended: the breaker closes, or stays open for twice as long because of `error`."""
        with self._lock:
            took = self._now() - self._started.pop(lane)
            if error is None and took > self._limit_s:
                error = _took(took)
            if error is not None:
                self._open(error)
            elif self._is_probing:  # else a call on the other lane has failed meanwhile
                self._open_until, self._is_probing, self._lies = None, False, 0
                self._closed_at = self._now()

    def begin(self, lane: str) -> None:
        """A call begins on `lane`, which has one call at a time."""
        with self._lock:
            self._started[lane] = self._now()

    def succeed(self, lane: str) -> None:
        """The call has returned. It counts as failed if it took longer than the limit."""
        with self._lock:
            took = self._now() - self._started.pop(lane)
            if took > self._limit_s:
                self._open(_took(took))

    def fail(self, lane: str, error: str) -> None:
        """The call has failed."""
        with self._lock:
            self._started.pop(lane, None)
            self._open(error)

    def late(self) -> None:
        """A request has given up at its deadline with less than half of what the store said to have."""
        with self._lock:
            if self._open_until is None:
                self._open("a look-up exceeded its deadline")

    def read(self, *, found: bool) -> None:
        """A look-up said that there are objects; `found`: at least one of them could be read, and none was late."""
        with self._lock:
            if found:
                self._lies, self._next_pause_s = 0, max(FIRST_PAUSE_S, self._next_pause_s / 2)
                return
            self._lies += 1
            if self._lies >= MOST_LIES:
                self._open("the store has named objects that it does not have")

    def _is_stuck(self) -> bool:
        return any(self._now() - start > self._limit_s for start in self._started.values())

    def _open(self, error: str) -> None:
        if self._open_until is None:
            self.num_opened += 1
            if self._now() - self._closed_at >= LONGEST_PAUSE_S:
                self._next_pause_s = FIRST_PAUSE_S
        if self._open_until is None or self._is_probing:
            self._pause_s = self._next_pause_s
            self._next_pause_s = min(2 * self._next_pause_s, LONGEST_PAUSE_S)
        self._open_until, self._is_probing, self._lies = self._now() + self._pause_s, False, 0
        self.last_error = error


def _took(seconds: float) -> str:
    return f"a call took {seconds:.1f} s"
