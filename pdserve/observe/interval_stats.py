"""Recent throughput and cache hits, and the statistics line of the log (`--log-stats-interval`).

`ServerMetrics` feeds `IntervalStats`; `server/stats_log.py` takes an `Interval` every few seconds. Event loop only.
Latencies are counted in buckets, so a busy interval needs no more memory and time than an idle one. Schedulers have
a `TokenRate` of their own.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter, deque
from collections.abc import Callable

WINDOW_S = 10
"""Seconds over which `TokenRate` averages."""
_GROWTH = math.log(1.05)


class TokenRate:
    """Tokens per second over the last `WINDOW_S` whole seconds. `now` returns monotonic seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seconds: deque[tuple[int, int]] = deque(maxlen=WINDOW_S + 1)

    def add(self, num_tokens: int) -> None:
        """Count `num_tokens` generated now."""
        second = int(self._now())
        if self._seconds and self._seconds[-1][0] == second:
            num_tokens += self._seconds.pop()[1]
        self._seconds.append((second, num_tokens))

    def value(self) -> float:
        """Tokens per second, without the current second."""
        now = int(self._now())
        return sum(count for second, count in self._seconds if now - WINDOW_S <= second < now) / WINDOW_S


class HitRate:
    """The share of cached tokens in the newest prompts."""

    def __init__(self, num_prompts: int) -> None:
        """Average over the `num_prompts` newest prompts."""
        self._newest: deque[tuple[int, int]] = deque(maxlen=num_prompts)

    def add(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Count one prompt."""
        self._newest.append((prompt_tokens, cached_tokens))

    def value(self) -> float:
        """The share, between 0 and 1; 0 before the first prompt."""
        prompt_tokens = sum(prompt for prompt, _ in self._newest)
        return sum(cached for _, cached in self._newest) / prompt_tokens if prompt_tokens else 0.0


class LatencyBuckets:
    """Counts durations in buckets whose bounds grow by 5 %, so a quantile is within 2.5 %."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a duration `count` times. Durations below a microsecond count as one."""
        self._counts[math.floor(math.log(max(seconds, 1e-6)) / _GROWTH)] += count

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
