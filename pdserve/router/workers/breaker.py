"""The circuit breaker of a worker.

    CLOSED ── failures without a success between them, within the window ──> OPEN: no requests
    OPEN ── open_s seconds ──> HALF_OPEN: at most as many concurrent requests as successes are missing
    HALF_OPEN ── enough successes ──> CLOSED;   HALF_OPEN ── a request fails ──> OPEN
    any ── the worker's process has ended, and its successor is healthy ──> CLOSED

Time is an argument. Owned by `Worker`. `admission` admits a pair if both breakers admit it, and then enters both, so
that no probe is spent on a pair that the other breaker refuses. `health` calls `renew`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque

from pdserve.router.config.config import BreakerConfig


class BreakerState(enum.StrEnum):
    """State of a breaker; `OPEN` admits no requests."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclasses.dataclass(frozen=True)
class Permit:
    """Permission to send one request.

    `opening`: the number of the opening during which it is a probe; None: not a probe. `answered`: the probe counted as
    a success, though its request may still fail.
    """

    opening: int | None
    answered: bool = False


class Breaker:
    """The breaker of one worker; all times in seconds of one clock."""

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._failures: deque[float] = deque()
        self._opened_at: float | None = None
        self._openings = 0
        self._successes = 0
        self._probes = 0

    def state(self, now: float) -> BreakerState:
        """Return the state at the time `now`."""
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
        """Return the seconds until the breaker is half open; 0 unless it is open."""
        return 0.0 if self._opened_at is None else max(0.0, self._opened_at + self._config.open_s - now)

    def enter(self, now: float) -> Permit:
        """Take a permit for a request that the breaker `admits`; return it with `leave` in any case."""
        assert self.admits(now), "call `admits` first"
        if self._opened_at is None:
            return Permit(None)
        self._probes += 1
        return Permit(self._openings)

    def leave(self, held: Permit) -> None:
        """Return a permit. A request without a reported result does not count."""
        if self._is_probe(held) and not held.answered:
            self._probes -= 1

    def answered(self, held: Permit) -> Permit:
        """Report that a good answer has begun, which is a probe's success. Returns the permit to hold from now on."""
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
        """Report that a good answer has ended, which resets the failure count."""
        if self._opened_at is None:
            self._failures.clear()

    def renew(self) -> None:
        """Close the breaker, because a new process serves at the worker's URL."""
        self._opened_at = None
        self._successes = self._probes = 0
        self._failures.clear()

    def failed(self, held: Permit, now: float) -> None:
        """Report a failed request. Unless the breaker is closed, only probes count."""
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
        """Whether the permit is a probe of the current opening."""
        return self._opened_at is not None and held.opening == self._openings
