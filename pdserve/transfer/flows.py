"""What went to a peer, or came from it: totals, and how fast of late. Written by the two sides of the manager."""

from __future__ import annotations

from collections import deque

from pdserve.protocol.messages import Flow

WINDOW_S = 5.0
"""`Flow.recent_bytes_s` looks back so far."""


class FlowMeter:
    """One direction of one peer. Scheduler thread only; constant time and memory."""

    def __init__(self) -> None:
        self._bytes = 0
        self._transfers = 0
        self._failures = 0
        self._write_s = 0.0
        self._recent: deque[tuple[int, int]] = deque()
        """Whole seconds, and the bytes that were moved in each."""

    def moved(self, num_bytes: int, write_s: float, now: float) -> None:
        """So many bytes have landed, which took the sender's transport `write_s`."""
        self._bytes += num_bytes
        self._write_s += write_s
        second = int(now)
        if self._recent and self._recent[-1][0] == second:
            num_bytes += self._recent.pop()[1]
        self._recent.append((second, num_bytes))
        self._forget(now)

    def ended(self, *, well: bool) -> None:
        """A transfer has ended."""
        self._transfers += well
        self._failures += not well

    def flow(self, in_flight: int, now: float) -> Flow:
        """All of it as a message."""
        self._forget(now)
        return Flow(
            bytes=self._bytes,
            transfers=self._transfers,
            failures=self._failures,
            write_s=self._write_s,
            in_flight=in_flight,
            recent_bytes_s=sum(count for _, count in self._recent) / WINDOW_S,
        )

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] <= now - WINDOW_S:
            self._recent.popleft()
