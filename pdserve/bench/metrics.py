"""Summaries of a run: the fields of `vllm bench serve`, and those it does not have.

Percentiles interpolate linearly between values, as numpy does.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.bench.client import BenchRecord
from pdserve.errors import ConfigError

Json = dict[str, Any]
METRICS = {
    "ttft": "Time to First Token",
    "ttst": "Time to Second Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
WHOLE_ANSWERS = ("tpot", "e2el")
"""Metrics of answers that came to their end."""
SLO_METRICS = ("ttft", "ttst", "tpot", "e2el")
PERCENTILES = (50.0, 90.0, 95.0, 99.0)
MAX_ERRORS_SHOWN = 10
TIMELINE_BUCKETS = 60


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile (0 to 100) with linear interpolation; NaN of no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclasses.dataclass(frozen=True)
class Slo:
    """Limits of a good request in milliseconds, by metric of `SLO_METRICS`. Without limits every answer is good."""

    limits_ms: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def parse(cls, words: Sequence[str]) -> Slo:
        """Parse words such as `ttft:200`. Raises ConfigError naming the metric."""
        limits = {}
        for word in words:
            found = re.fullmatch(r"([a-z0-9]+):([0-9.]+)", word)
            if found is None or found[1] not in SLO_METRICS:
                known = ", ".join(SLO_METRICS)
                raise ConfigError(f"--goodput {word}: give METRIC:MILLISECONDS with one of {known}", field="goodput")
            try:
                limits[found[1]] = float(found[2])
            except ValueError:
                raise ConfigError(f"--goodput {word}: {found[2]} is not a number", field="goodput") from None
            if limits[found[1]] <= 0:
                raise ConfigError(f"--goodput {word}: the limit must be above 0", field="goodput")
        return cls(limits)

    def holds(self, record: BenchRecord) -> bool:
        """Whether a request has a whole answer within every limit. A metric that the answer lacks is within."""
        if not record.whole:
            return False
        found = {name: value_s(record, name) for name in self.limits_ms}
        return all(value is None or value * 1e3 <= self.limits_ms[name] for name, value in found.items())


def value_s(record: BenchRecord, metric: str) -> float | None:
    """Return one of `SLO_METRICS` of a request in seconds; None where the answer is too short for it."""
    return {"ttft": record.ttft_s, "ttst": record.ttst_s, "tpot": record.tpot_s, "e2el": record.end_s}[metric]


def metric_values_s(records: Sequence[BenchRecord], metric: str, since_s: float = 0.0) -> list[float]:
    """Return all values of one of `METRICS` in seconds: one per request, or for ITL one per gap.

    A request that began before `since_s` of the run has only the gaps that end later. A request that was cut has no
    TPOT and no E2E latency.
    """
    if metric == "itl":
        return [
            later - earlier
            for record in records
            for earlier, later in itertools.pairwise(record.arrivals_s)
            if record.start_s + later >= since_s
        ]
    used = [record for record in records if record.arrivals_s and record.start_s >= since_s]
    values = [value_s(record, metric) for record in used if record.whole or metric not in WHOLE_ANSWERS]
    return [value for value in values if value is not None]


def tokens_since(record: BenchRecord, since_s: float) -> int:
    """Return a request's output tokens from `since_s` of the run on; of one that began before, the events with text."""
    if record.start_s >= since_s:
        return record.output_tokens
    return sum(record.start_s + at >= since_s for at in record.arrivals_s)


def percentile_name(percent: float) -> str:
    """Return the prefix of a percentile's field, such as `p99` or `p99.9`."""
    return f"p{percent:g}"


def summarize(
    records: Sequence[BenchRecord],
    duration_s: float,
    *,
    since_s: float = 0.0,
    slo: Slo | None = None,
    metrics: Sequence[str] = tuple(METRICS),
    percentiles: Sequence[float] = PERCENTILES,
) -> Json:
    """Return the figures of a run. Latencies are in milliseconds; None where no request has one.

    Args:
        duration_s: seconds from the start of the run to its end, above 0.
        since_s: seconds at the start of the run that do not count. `duration` is what is left, at least 1 ns; peaks and
            the course over time are those of the whole run. A failed request counts whenever it failed.
    """
    good = [record for record in records if record.error_kind is None]
    failed = [record for record in records if record.error_kind is not None]
    completed = [record for record in good if record.whole and record.start_s + record.end_s >= since_s]
    begun = [record for record in good if record.start_s >= since_s]
    total_input = sum(record.prompt_tokens for record in begun)
    total_output = sum(tokens_since(record, since_s) for record in good)
    counted_s = max(duration_s - since_s, 1e-9)
    values = {name: metric_values_s(good, name, since_s) for name in metrics}
    found: Json = {
        "duration": counted_s,
        "completed": len(completed),
        "failed": len(failed),
        "unfinished": sum(record.unfinished for record in good),
        "total_input_tokens": total_input,
        "total_cached_tokens": sum(record.cached_tokens for record in begun),
        "total_output_tokens": total_output,
        "request_throughput": len(completed) / counted_s,
        "output_throughput": total_output / counted_s,
        "total_token_throughput": (total_input + total_output) / counted_s,
        "max_output_tokens_per_s": peak_tokens_per_s(good),
        "max_concurrent_requests": peak_concurrency(records),
        "timeline": timeline(records, duration_s),
        "distributions_ms": {name: distribution_ms(values[name]) for name in metrics},
        "output_tokens_counted_by": sorted({record.counted_by for record in good}),
        "error_kinds": dict(collections.Counter(record.error_kind for record in failed).most_common()),
        "error_messages": sorted({f"{record.error_kind}: {record.error}" for record in failed})[:MAX_ERRORS_SHOWN],
    }
    if slo is not None and slo.limits_ms:
        within = sum(slo.holds(record) for record in completed)
        found["request_goodput"] = within / counted_s
        found["goodput_share"] = within / (len(completed) + len(failed)) if completed or failed else 0.0
        found["goodput_slo_ms"] = dict(slo.limits_ms)
    for name in metrics:
        found |= _spread(name, values[name], percentiles)
    return found


def summarize_background(records: Sequence[BenchRecord], duration_s: float, since_s: float = 0.0) -> Json:
    """Return the figures of the requests beside a run's, with `background_` before their names."""
    found = summarize(records, duration_s, since_s=since_s, metrics=("ttft", "e2el"))
    kept = ("completed", "failed", "unfinished", "total_input_tokens", "request_throughput", "error_kinds")
    names = [name for name in found if name in kept or name.endswith(("_ttft_ms", "_e2el_ms"))]
    return {f"background_{name}": found[name] for name in names}


def _spread(name: str, values_s: Sequence[float], percentiles: Sequence[float]) -> Json:
    values = [value * 1e3 for value in values_s]
    found: Json = {
        f"mean_{name}_ms": statistics.fmean(values) if values else None,
        f"median_{name}_ms": percentile(values, 50) if values else None,
        f"std_{name}_ms": statistics.pstdev(values) if values else None,
    }
    for percent in percentiles:
        found[f"{percentile_name(percent)}_{name}_ms"] = percentile(values, percent) if values else None
    return found


def peak_tokens_per_s(records: Sequence[BenchRecord]) -> float:
    """Return the largest number of events with text in one second, in whole seconds after the first request's start."""
    first_s = min((record.start_s for record in records), default=0.0)
    seconds = collections.Counter(int(record.start_s + at - first_s) for record in records for at in record.arrivals_s)
    return float(max(seconds.values(), default=0))


def peak_concurrency(records: Sequence[BenchRecord]) -> int:
    """Return the largest number of requests in flight at one time."""
    ends = [(record.start_s + record.end_s, -1) for record in records]
    running = peak = 0
    for _, change in sorted([*((record.start_s, 1) for record in records), *ends]):
        running += change
        peak = max(peak, running)
    return peak


def distribution_ms(values_s: Sequence[float]) -> list[float]:
    """Return the percentiles 0 to 100 in milliseconds; nothing of no values."""
    ordered = sorted(values_s)
    return [percentile(ordered, percent) * 1e3 for percent in range(101)] if ordered else []


def timeline(records: Sequence[BenchRecord], duration_s: float) -> Json:
    """Return events with text, and the mean number of requests in flight, in `TIMELINE_BUCKETS` equal parts of the run.

    `bucket_s`: seconds of a part.
    """
    size = max(duration_s / TIMELINE_BUCKETS, 1e-9)
    tokens, busy = [0] * TIMELINE_BUCKETS, [0.0] * TIMELINE_BUCKETS
    for record in records:
        for at in record.arrivals_s:
            tokens[min(TIMELINE_BUCKETS - 1, int((record.start_s + at) / size))] += 1
        end = record.start_s + record.end_s
        for index in range(int(record.start_s / size), min(TIMELINE_BUCKETS, int(end / size) + 1)):
            inside = min(end, (index + 1) * size) - max(record.start_s, index * size)
            busy[index] += max(0.0, inside) / size
    return {"bucket_s": size, "output_tokens": tokens, "in_flight": [round(value, 3) for value in busy]}


def detailed(records: Sequence[BenchRecord]) -> Json:
    """Return the values of each request, under the names of `vllm bench serve --save-detailed`; seconds."""
    return {
        "start_times": [record.start_s for record in records],
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "ttfts": [record.ttft_s for record in records],
        "itls": [record.itls_s for record in records],
        "e2els": [record.end_s for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [
            "unfinished"
            if record.unfinished
            else ""
            if record.error_kind is None
            else f"{record.error_kind}: {record.error}"
            for record in records
        ],
    }
