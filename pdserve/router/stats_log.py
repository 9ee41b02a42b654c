"""The statistics line of the router's log: requests and latencies of the last seconds, while requests run.

    ... INFO router[4711] pdserve.router.stats_log: running 8, queued 2; 3.1 requests/s, 1 failed; first byte p50
        0.312 s, p99 0.520 s; whole p50 4.211 s, p99 6.018 s; workers 2 of 2 up

`RouterApp` counts each generating request and runs `log_stats`. Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from pdserve.base.log import about
from pdserve.observe.interval_stats import LatencyBuckets

log = logging.getLogger(__name__)

Gauges = Callable[[], dict[str, int]]
"""Returns the load now: `queued`, `workers`, `workers_up`."""


class RouterStats:
    """Counts the generating requests of the current interval."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._first_byte, self._whole = LatencyBuckets(), LatencyBuckets()
        self._num_running = self._num_begun = self._num_ended = self._num_failed = 0

    def begun(self) -> None:
        """A request has arrived."""
        self._num_running += 1
        self._num_begun += 1

    def first_byte(self, seconds: float) -> None:
        """A worker's answer has begun, `seconds` after the request's arrival."""
        self._first_byte.add(seconds)

    def ended(self, seconds: float, *, failed: bool) -> None:
        """A request has ended, `seconds` after its arrival. `failed`: with a status of 500 or more."""
        self._num_running -= 1
        self._num_ended += 1
        self._num_failed += failed
        self._whole.add(seconds)

    def take(self) -> dict[str, float | None] | None:
        """End the interval and begin the next one; return its numbers. None: no request was live in it.

        Latencies are in seconds; None: no request had one.
        """
        now = time.monotonic()
        numbers: dict[str, float | None] | None = None
        if self._num_running or self._num_begun or self._num_ended:
            numbers = {
                "running": self._num_running,
                "requests_per_s": self._num_ended / max(now - self._began_s, 1e-3),
                "failed": self._num_failed,
                "first_byte_p50_s": self._first_byte.quantile(0.5),
                "first_byte_p99_s": self._first_byte.quantile(0.99),
                "request_p50_s": self._whole.quantile(0.5),
                "request_p99_s": self._whole.quantile(0.99),
            }
        self._began_s = now
        self._first_byte.clear()
        self._whole.clear()
        self._num_begun = self._num_ended = self._num_failed = 0
        return numbers


async def log_stats(stats: RouterStats, gauges: Gauges, interval_s: float) -> None:
    """Log a line every `interval_s` seconds in which a request ran. Returns only by cancellation."""
    while True:
        await asyncio.sleep(interval_s)
        numbers = stats.take()
        if numbers is not None:
            fields = {name: round(value, 6) if isinstance(value, float) else value for name, value in numbers.items()}
            fields |= gauges()
            log.info("%s", sentence(fields), extra=about(fields=fields))


def sentence(fields: dict[str, float | None]) -> str:
    """Format the numbers of a line as text; `-`: None."""

    def seconds(name: str) -> str:
        value = fields[name]
        return "-" if value is None else f"{value:.3f} s"

    return (
        f"running {fields['running']}, queued {fields['queued']}; "
        f"{fields['requests_per_s']:.1f} requests/s, {fields['failed']} failed; "
        f"first byte p50 {seconds('first_byte_p50_s')}, p99 {seconds('first_byte_p99_s')}; "
        f"whole p50 {seconds('request_p50_s')}, p99 {seconds('request_p99_s')}; "
        f"workers {fields['workers_up']} of {fields['workers']} up"
    )
