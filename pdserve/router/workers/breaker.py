"""A circuit breaker: a worker that keeps failing gets no requests for a while, then a few, then all again.

    CLOSED ── failures without a success between them, within the window ──> OPEN
    OPEN ── time ──> HALF_OPEN: as many requests at a time as successes are still missing
    HALF_OPEN ── successes ──> CLOSED;   HALF_OPEN ── one of its requests fails ──> OPEN
    any ── its process has ended, and another one is well ──> CLOSED

Time is an argument. Owned by `Worker`. `admission` calls it: it lets a pair in when both breakers admit it, and then
enters both, so that a probe is never spent on a pair that the other half's breaker refuses. `health` calls `renew`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque

from pdserve.router.config.config import BreakerConfig


class BreakerState(enum.StrEnum):
    """`OPEN` admits nothing."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclasses.dataclass(frozen=True)
class Permit:
    """Leave to send one request. `opening` numbers the opening that it probes the end of; None: not a probe.

    `answered`: the probe has shown what it was to show, though it may still fail.
    """

    opening: int | None
    answered: bool = False


class Breaker:
    """One worker's; all times in seconds of one clock."""

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._failures: deque[float] = deque()
        self._opened_at: float | None = None
        self._openings = 0
        self._successes = 0
        self._probes = 0

    def state(self, now: float) -> BreakerState:
        """What it does at the time `now`."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._opened_at + self._config.open_s else BreakerState.HALF_OPEN

    def admits(self, now: float) -> bool:
        """Whether a request may be sent."""
        state = self.state(now)
        if state is BreakerState.HALF_OPEN:
            return self._probes < self._config.success_threshold - self._successes
        return state is BreakerState.CLOSED

    def retry_in_s(self, now: float) -> float:
        """Seconds until it may admit something; 0 unless it is open."""
        return 0.0 if self._opened_at is None else max(0.0, self._opened_at + self._config.open_s - now)

    def enter(self, now: float) -> Permit:
        """Take leave to send a request that it `admits`; give it back with `leave` whatever comes of it."""
        assert self.admits(now), "ask first"
        if self._opened_at is None:
            return Permit(None)
        self._probes += 1
        return Permit(self._openings)

    def leave(self, held: Permit) -> None:
        """The request has ended. Without a verdict before, it says nothing about the worker."""
        if self._is_probe(held) and not held.answered:
            self._probes -= 1

    def answered(self, held: Permit) -> Permit:
        """The worker has begun a good answer: what a probe is to show. Returns what is held from now on."""
        if not self._is_probe(held) or held.answered:
            return held
        self._probes -= 1
        self._successes += 1
        if self._successes >= self._config.success_threshold:
            self._opened_at = None
            self._failures.clear()
            self._successes = self._probes = 0
        return dataclasses.replace(held, answered=True)

    def completed(self) -> None:
        """An answer was good to its end: failures before it do not count any more."""
        if self._opened_at is None:
            self._failures.clear()

    def renew(self) -> None:
        """Another process serves there now: what the one before it failed says nothing of it."""
        self._opened_at = None
        self._successes = self._probes = 0
        self._failures.clear()

    def failed(self, held: Permit, now: float) -> None:
        """The worker has failed a request. While it is open, only its probes count."""
        if not self._config.enabled:
            return
        if self._opened_at is not None:
            if self._is_probe(held):
                self._open(now)
            return
        self._failures.append(now)
        while self._failures[0] <= now - self._config.window_s:
            self._failures.popleft()
        if len(self._failures) >= self._config.failure_threshold:
            self._open(now)

    def _open(self, now: float) -> None:
        self._opened_at = now
        self._openings += 1
        self._successes = self._probes = 0
        self._failures.clear()

    def _is_probe(self, held: Permit) -> bool:
        """A probe of this opening, not of an earlier one."""
        return self._opened_at is not None and held.opening == self._openings
