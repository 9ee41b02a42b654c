"""Fifteen minutes of a server or a router, a point every five seconds, for the page and `GET /observe/history`.

    requests ──> LatencySamples of the current interval ──┐
    gauges (queues, KV memory, drafts) ───────────────────┴── every INTERVAL_S: History.record ──> one point a series

A router has a series for each worker and one for the fleet; a server has the fleet's alone. Memory is bounded: a series
has `NUM_POINTS` points of 8 bytes a field. Quantiles of the time windows come from merged buckets, not from the points.
Event loop only.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from pdserve.errors import RequestError
from pdserve.observe.interval_stats import LatencyBuckets

INTERVAL_S = 5.0
"""Seconds between two points."""
KEPT_S = 900.0
"""Seconds of history that are kept."""
NUM_POINTS = int(KEPT_S / INTERVAL_S)
WINDOWS_S = (60, 300, 900)
"""Time windows of the summaries, in seconds."""
PATH = "/observe/history"

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
LATENCIES = ("ttft", "second_token", "itl")
COUNTS = ("requests", "failed")
GAUGES = (
    *("queued", "running", "tokens_per_s", "kv_device_used", "kv_device_total", "kv_host_used", "kv_host_total"),
    *("kv_store_read", "kv_store_written", "kv_transfer", "cache_hit_rate", "accept_length"),
)
FIELDS = (*COUNTS, *(f"{name}_{quantile}_s" for name in LATENCIES for quantile in QUANTILES), *GAUGES)
"""Fields of a point. Latencies are seconds; `kv_store_*` and `kv_transfer` bytes a second; device and host memory
tokens."""

STREAM_ENDS = b"data: [DONE]"
ERROR_EVENTS = (b'data: {"error":', b"event: error")
"""What an error event begins with. A quotation mark in an answer's text is escaped, so the text cannot contain it."""
ERROR_LINE = b'{"error":'
"""What the line of an error begins with in streams of Ollama's API."""
MAX_ERROR_BYTES = 2000
NUM_FAILURES = 64
"""Failed requests that a router keeps for the page."""
ENDS = (STREAM_ENDS, *ERROR_EVENTS, ERROR_LINE)
NO_VALUE = math.nan


class LatencySamples:
    """Requests and latencies of one interval, of one worker."""

    __slots__ = ("failed", "itl", "requests", "second_token", "ttft")

    def __init__(self) -> None:
        self.requests = self.failed = 0
        self.ttft, self.second_token, self.itl = LatencyBuckets(), LatencyBuckets(), LatencyBuckets()

    def merge(self, other: LatencySamples) -> None:
        """Add the requests and latencies of `other`."""
        self.requests += other.requests
        self.failed += other.failed
        self.ttft.merge(other.ttft)
        self.second_token.merge(other.second_token)
        self.itl.merge(other.itl)

    def numbers(self) -> dict[str, float | None]:
        """Return counts and quantiles by name; None: there was no such latency."""
        found: dict[str, float | None] = {"requests": self.requests, "failed": self.failed}
        for name in LATENCIES:
            buckets: LatencyBuckets = getattr(self, name)
            found |= {f"{name}_{quantile}_s": buckets.quantile(share) for quantile, share in QUANTILES.items()}
        return found


class StoreTraffic:
    """Turns the totals of the storage tier into rates."""

    def __init__(self) -> None:
        self._before: tuple[float, float, float] | None = None

    def rates(self, now_s: float, read: float, written: float) -> dict[str, float]:
        """Return the bytes a second since the last call, from totals in bytes; empty at first and after a restart."""
        before, self._before = self._before, (now_s, read, written)
        if before is None or now_s <= before[0] or read < before[1] or written < before[2]:
            return {}
        seconds = now_s - before[0]
        return {"kv_store_read": (read - before[1]) / seconds, "kv_store_written": (written - before[2]) / seconds}


class CallMeter:
    """Measures one request of a router: its end, and the pieces of its stream. It is written to one worker's samples.

    The samples of an interval are replaced at its end, so they are looked up at each piece.
    """

    __slots__ = ("_arrived_s", "_history", "_num", "_seen_s", "error_event", "is_broken", "name")

    def __init__(self, history: History, arrived_s: float) -> None:
        self._history, self._arrived_s = history, arrived_s
        self._num, self._seen_s = 0, arrived_s
        self.name = ""
        """URL of the worker that answers; set anew when another worker continues the stream."""
        self.is_broken = False
        """True: the stream ended with an error event, or broke off."""
        self.error_event = b""
        """That event, cut to `MAX_ERROR_BYTES`; empty without one."""

    def piece(self, piece: bytes, now_s: float) -> None:
        """Count the next events of a stream, which arrived together at `now_s`, monotonic seconds.

        An error event makes the stream a broken one. The last event, with no token, is not counted.
        """
        if piece.startswith(ENDS):
            if not piece.startswith(STREAM_ENDS):
                self.broke(piece)
            return
        if ERROR_EVENTS[0] in piece or ERROR_EVENTS[1] in piece or b"\n" + ERROR_LINE in piece:
            self.broke(piece[max(piece.find(mark) for mark in (*ERROR_EVENTS, ERROR_LINE)) :])
        samples = self._history.samples(self.name)
        if self._num == 0:
            samples.ttft.add(now_s - self._arrived_s)
        else:
            samples.itl.add(now_s - self._seen_s)
            if self._num == 1:
                samples.second_token.add(now_s - self._arrived_s)
        self._num += 1
        self._seen_s = now_s

    def broke(self, error_event: bytes) -> None:
        """Mark the stream as broken. The first error event is kept."""
        self.is_broken = True
        self.error_event = self.error_event or error_event[:MAX_ERROR_BYTES]

    def mended(self) -> None:
        """Take `broke` back: another worker continues the stream, or the router has its end."""
        self.is_broken, self.error_event = False, b""

    def ended(self, *, failed: bool) -> None:
        """Count the request. `failed`: by its status; a broken stream counts as failed, too."""
        samples = self._history.samples(self.name)
        samples.requests += 1
        samples.failed += failed or self.is_broken


class Series:
    """The points of one worker or of the fleet, the oldest first; `NO_VALUE` where a field is not known."""

    def __init__(self, num_points: int) -> None:
        """Begin with `num_points` points without values."""
        self.columns = {name: array("d", [NO_VALUE] * num_points) for name in FIELDS}

    def add(self, point: Mapping[str, float | None]) -> None:
        """Append a point; fields that it lacks, or that are None, have no value."""
        for name, column in self.columns.items():
            value = point.get(name)
            column.append(NO_VALUE if value is None else value)
            if len(column) > NUM_POINTS:
                del column[0]

    def since(self, first: int) -> dict[str, list[float | None]]:
        """Return the values by field from point `first` on. Fields without any value are absent."""
        found = {}
        for name, column in self.columns.items():
            values = column[first:]
            if not all(map(math.isnan, values)):
                found[name] = [None if math.isnan(value) else round(value, 6) for value in values]
        return found


class FailedCall(msgspec.Struct, frozen=True):
    """A request that failed at a router. `time`: its end, seconds since 1970. `worker`: URL, empty without one."""

    time: float
    path: str
    id: str
    worker: str
    status: int
    error: str
    seconds: float


class History:
    """The points of a server or router. `samples` is written by requests, `record` called every `INTERVAL_S`."""

    def __init__(self) -> None:
        self.failures: deque[FailedCall] = deque(maxlen=NUM_FAILURES)
        """The newest failed requests of a router, the oldest first."""
        self._current: dict[str, LatencySamples] = {}
        self._times: deque[float] = deque(maxlen=NUM_POINTS)
        self._fleet = Series(0)
        self._intervals: deque[LatencySamples] = deque(maxlen=NUM_POINTS)
        self._series: dict[str, Series] = {}
        self._windows: dict[str, dict[str, float | None]] | None = None

    def samples(self, name: str = "") -> LatencySamples:
        """Return the current interval of a worker, which `record` ends; `""`: of requests at no worker."""
        found = self._current.get(name)
        if found is None:
            found = self._current[name] = LatencySamples()
        return found

    def meter(self, arrived_s: float) -> CallMeter:
        """Return a meter for a request that arrived at `arrived_s`, monotonic seconds."""
        return CallMeter(self, arrived_s)

    def record(
        self,
        time_s: float,
        fleet: Mapping[str, float | None],
        workers: Mapping[str, Mapping[str, float | None]] | None = None,
    ) -> None:
        """End the interval at `time_s`, seconds since 1970. `fleet` and `workers` are the gauges of this moment.

        A worker that is not in `workers` loses its series; requests that it has served stay in the fleet's.
        """
        current, self._current = self._current, {}
        whole = LatencySamples()
        for samples in current.values():
            whole.merge(samples)
        for name in [name for name in self._series if name not in (workers or {})]:
            del self._series[name]
        for name, gauges in (workers or {}).items():
            series = self._series.setdefault(name, Series(len(self._times)))
            series.add({**current.get(name, LatencySamples()).numbers(), **gauges})
        self._fleet.add({**whole.numbers(), **fleet})
        self._intervals.append(whole)
        self._times.append(round(time_s, 3))
        self._windows = None

    def answer(self, query: Mapping[str, str], time_s: float) -> dict[str, Any]:
        """Return the body of `GET /observe/history`; docs/dashboard.md lists its fields.

        Raises:
            RequestError: 400, a query parameter is invalid, or 404, no worker has this URL.
        """
        since_s = max(_number(query, "since", 0.0), time_s - _number(query, "seconds", KEPT_S))
        worker = query.get("worker") or None
        series = self._fleet if worker is None else self._series.get(worker)
        if series is None:
            raise RequestError(
                f"worker: no worker {worker!r} has a history", field="worker", status=404, code="not_found"
            )
        first = next((place for place, at in enumerate(self._times) if at > since_s), len(self._times))
        return {
            "interval_s": INTERVAL_S,
            "kept_s": KEPT_S,
            "time": time_s,
            "worker": worker,
            "workers": list(self._series),
            "times": list(self._times)[first:],
            "series": series.since(first),
            "windows": self._summaries(),
        }

    def _summaries(self) -> dict[str, dict[str, float | None]]:
        """Return counts and quantiles of the fleet over each of `WINDOWS_S`, by its seconds."""
        if self._windows is None:
            self._windows = {
                str(seconds): _rounded(merged(list(self._intervals)[-int(seconds / INTERVAL_S) :]).numbers())
                for seconds in WINDOWS_S
            }
        return self._windows


def merged(intervals: Iterable[LatencySamples]) -> LatencySamples:
    """Return the requests and latencies of all intervals together."""
    whole = LatencySamples()
    for samples in intervals:
        whole.merge(samples)
    return whole


def _rounded(numbers: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in numbers.items()}


def _number(query: Mapping[str, str], name: str, default: float) -> float:
    """Return a query parameter as a number of at least 0."""
    text = query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise RequestError(f"{name} must be a number of seconds of at least 0, got {text!r}", field=name)
    return value
