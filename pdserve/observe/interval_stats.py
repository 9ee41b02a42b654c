"""The statistics line of the log (`--log-stats-interval`): the last seconds of a server or router that had requests.

    ... INFO decode[4711] pdserve.server.stats_log: running 8, queued 2; in 98.3 tok/s, out 301.0 tok/s; KV used 12.4 %;
        prefix hits 40.0 %; TTFT p50 0.31 s, p99 0.52 s; ITL p50 24 ms, p99 41 ms; accept length 2.31, rate 43.7 %
    ... INFO router[4711] pdserve.router.stats_log: running 8, queued 2; 3.1 requests/s, 1 failed; first byte p50
        0.312 s, p99 0.520 s; whole p50 4.211 s, p99 6.018 s; workers 2 of 2 up

A server's API process counts in `IntervalStats`, which `ServerMetrics` feeds, and queries the schedulers once a line;
replicas are summed. A router counts in `RouterStats`. The last line follows the end of the last request; an idle server
logs nothing. Event loop only. Latencies are counted in buckets, so a busy interval needs no more memory and time than
an idle one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from pdserve.base.log import about
from pdserve.observe.speculation import Acceptance
from pdserve.protocol.engine_state import EngineState

_SERVER_LOG = logging.getLogger("pdserve.server.stats_log")
_ROUTER_LOG = logging.getLogger("pdserve.router.stats_log")
STATE_TIMEOUT_S = 1.0
"""Seconds to wait for the schedulers; after that the line has the newest state that is known."""

_GROWTH = math.log(1.05)


class LatencyBuckets:
    """Counts durations in buckets whose bounds grow by 5 %, so a quantile is within 2.5 %."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a duration `count` times. Durations below a microsecond count as one."""
        self._counts[math.floor(math.log(max(seconds, 1e-6)) / _GROWTH)] += count

    def merge(self, other: LatencyBuckets) -> None:
        """Add the durations of `other`."""
        self._counts.update(other._counts)

    @property
    def count(self) -> int:
        """The number of durations."""
        return self._counts.total()

    def quantile(self, share: float) -> float | None:
        """Return the duration in seconds that `share` of all durations do not exceed; None without durations."""
        rank = share * self._counts.total()
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                return math.exp((bucket + 0.5) * _GROWTH)
        return None

    def clear(self) -> None:
        """Forget all durations."""
        self._counts.clear()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Statistics of `seconds` seconds. Latencies are in seconds; None: no request had one.

    `prompt_tokens` are those of prompts that were finished, `cached_tokens` the part of them from the prefix cache.
    """

    seconds: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.seconds

    @property
    def generated_tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.generated_tokens / self.seconds

    @property
    def hit_rate(self) -> float | None:
        """The share of cached prompt tokens, 0 to 1; None without prompts."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


class IntervalStats:
    """Collects the statistics of the current interval."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._ttft, self._itl = LatencyBuckets(), LatencyBuckets()
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._num_live = self._num_events = 0

    def started(self) -> None:
        """A sequence was submitted."""
        self._num_live += 1
        self._num_events += 1

    def ended(self) -> None:
        """A sequence ended."""
        self._num_live -= 1
        self._num_events += 1

    def first_token(self, ttft_s: float) -> None:
        """A sequence has its first token."""
        self._ttft.add(ttft_s)

    def prompt_done(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A prompt is in the KV cache."""
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens

    def next_tokens(self, gap_s: float, num_tokens: int) -> None:
        """`num_tokens` tokens after the first arrived, at intervals of `gap_s` seconds."""
        self._itl.add(gap_s, num_tokens)

    def generated(self, num_tokens: int) -> None:
        """`num_tokens` tokens arrived, first or later ones."""
        self._generated_tokens += num_tokens

    def take(self) -> Interval | None:
        """End the interval and begin the next one. None: no sequence was live in it."""
        now = time.monotonic()
        interval = None
        if self._num_live or self._num_events:
            interval = Interval(
                seconds=max(now - self._began_s, 1e-3),
                prompt_tokens=self._prompt_tokens,
                cached_tokens=self._cached_tokens,
                generated_tokens=self._generated_tokens,
                ttft_p50_s=self._ttft.quantile(0.5),
                ttft_p99_s=self._ttft.quantile(0.99),
                itl_p50_s=self._itl.quantile(0.5),
                itl_p99_s=self._itl.quantile(0.99),
            )
        self._began_s = now
        self._ttft.clear()
        self._itl.clear()
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = self._num_events = 0
        return interval


async def log_server_stats(
    stats: IntervalStats, state: Callable[[float], Awaitable[EngineState | None]], interval_s: float
) -> None:
    """Log a line every `interval_s` seconds in which a request ran. Returns only by cancellation.

    `state(timeout_s)` queries the schedulers.
    """
    counted = Acceptance()
    while True:
        await asyncio.sleep(interval_s)
        interval = stats.take()
        if interval is None:
            continue
        newest = await state(STATE_TIMEOUT_S)
        total = None if newest is None else Acceptance.of_state(newest)
        fields = server_fields(interval, newest, None if total is None else total.since(counted))
        counted = total or counted
        _SERVER_LOG.info("%s", server_sentence(fields), extra=about(fields=fields))


def server_fields(
    interval: Interval, state: EngineState | None, acceptance: Acceptance | None = None
) -> dict[str, float | None]:
    """Return the numbers of a line by name. Shares are 0 to 1, latencies in seconds; None: not known, or no request.

    `state` None: no scheduler has answered yet. `acceptance`: that of the interval; None: no speculation.
    """
    used = None if state is None or not state.max_total_tokens else state.num_used_tokens / state.max_total_tokens
    numbers: dict[str, float | None] = {
        "running": None if state is None else state.num_running_reqs,
        "queued": None if state is None else state.num_queue_reqs,
        "prompt_tokens_per_s": interval.prompt_tokens_per_s,
        "generated_tokens_per_s": interval.generated_tokens_per_s,
        "kv_used": used,
        "cache_hit_rate": interval.hit_rate,
        "ttft_p50_s": interval.ttft_p50_s,
        "ttft_p99_s": interval.ttft_p99_s,
        "itl_p50_s": interval.itl_p50_s,
        "itl_p99_s": interval.itl_p99_s,
    }
    if acceptance is not None:
        numbers |= {"accept_length": acceptance.accept_length, "accept_rate": acceptance.accept_rate}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in numbers.items()}


def server_sentence(fields: dict[str, float | None]) -> str:
    """Format the numbers of `server_fields` as text; `-`: None, as the accept length of an interval without drafts."""

    def number(name: str, unit: str, digits: int = 0, factor: float = 1) -> str:
        value = fields[name]
        return "-" if value is None else f"{value * factor:.{digits}f}{unit}"

    speculation = ""
    if "accept_length" in fields:
        speculation = f"; accept length {number('accept_length', '', 2)}, rate {number('accept_rate', ' %', 1, 100)}"
    return (
        f"running {number('running', '')}, queued {number('queued', '')}; "
        f"in {number('prompt_tokens_per_s', ' tok/s', 1)}, out {number('generated_tokens_per_s', ' tok/s', 1)}; "
        f"KV used {number('kv_used', ' %', 1, 100)}; prefix hits {number('cache_hit_rate', ' %', 1, 100)}; "
        f"TTFT p50 {number('ttft_p50_s', ' s', 3)}, p99 {number('ttft_p99_s', ' s', 3)}; "
        f"ITL p50 {number('itl_p50_s', ' ms', 1, 1000)}, p99 {number('itl_p99_s', ' ms', 1, 1000)}{speculation}"
    )


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


async def log_router_stats(stats: RouterStats, gauges: Callable[[], dict[str, int]], interval_s: float) -> None:
    """Log a line every `interval_s` seconds in which a request ran. Returns only by cancellation.

    `gauges()` returns the load now: `queued`, `workers`, `workers_up`.
    """
    while True:
        await asyncio.sleep(interval_s)
        numbers = stats.take()
        if numbers is not None:
            fields = {name: round(value, 6) if isinstance(value, float) else value for name, value in numbers.items()}
            fields |= gauges()
            _ROUTER_LOG.info("%s", router_sentence(fields), extra=about(fields=fields))


def router_sentence(fields: dict[str, float | None]) -> str:
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
