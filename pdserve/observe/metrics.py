"""Statistics of one server: the record of each sequence, and Prometheus metrics under SGLang's names where they exist.

Owned by the API process. The engine client writes a `RequestRecord` from a sequence's arrival to its end. Metrics, the
list of recent requests, request logs and traces read it. Metrics without a name in SGLang begin with `pdserve:`. The
scheduler's part is a snapshot (`EngineState`), which `engine_metrics` turns into gauges and counters on each scrape of
`/metrics`.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from pdserve.base.clock import TokenRate
from pdserve.observe.engine_metrics import EngineCollector
from pdserve.observe.history import History
from pdserve.observe.http_calls import HttpMetrics, RoutingKeyCollector
from pdserve.observe.interval_stats import IntervalStats
from pdserve.observe.request_series import SECONDS, SeriesByPriority
from pdserve.observe.speculation import RecentAcceptance
from pdserve.protocol.cached_tokens import CachedTokensDetails
from pdserve.protocol.engine_state import EngineState
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import GenerateRequest, RequestTiming, SpeculationStats

_MILLIS = (0.1, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 10000, 60000)
_GB_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 200, 400)
_MB = (0.1, 0.5, 1, 5, 10, 50, 100, 250, 500, 1000, 2500, 5000, 10000)

HIT_RATE_PROMPTS = 128
"""Number of newest prompts in `sglang:cache_hit_rate`."""


class RequestMetrics(Protocol):
    """Receives the engine client's reports. All durations in seconds."""

    def started(self, record: RequestRecord) -> None:
        """A sequence was submitted."""
        ...

    def first_token(self, record: RequestRecord) -> None:
        """A sequence has its first token, or the end of its prompt if it requests no token. `ttft_s` is set."""
        ...

    def prompt_done(
        self, record: RequestRecord, prompt_tokens: int, cached_tokens: int, details: CachedTokensDetails | None
    ) -> None:
        """A sequence's prompt is in the KV cache; `cached_tokens` of it came from the prefix cache.

        `details`: where these tokens were; None: on the device.
        """
        ...

    def next_tokens(self, record: RequestRecord, gap_s: float, num_tokens: int) -> None:
        """`num_tokens` tokens after the first arrived, at intervals of `gap_s` seconds."""
        ...

    def generated(self, record: RequestRecord, num_tokens: int) -> None:
        """`num_tokens` tokens arrived, first or later ones."""
        ...

    def ended(self, record: RequestRecord) -> None:
        """A sequence ended."""
        ...


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


class ServerMetrics:
    """All metrics of a server, in a separate registry. Implements `RequestMetrics`. Event loop only."""

    def __init__(
        self,
        model_name: str,
        engine_type: str,
        own_counters: Callable[[], Mapping[str, float]] = dict,
        *,
        by_priority: bool = False,
        storage_backend: str | None = None,
    ) -> None:
        """`engine_type`: `unified`, `prefill` or `decode`. It and `model_name` are labels of every sample.

        `own_counters` returns totals of the API process, shown beside the scheduler's. With `by_priority` the metrics
        of `RequestSeries` have a label `priority`. `storage_backend`: see `CachedTokensCounters`.
        """
        self._registry = CollectorRegistry(auto_describe=False)
        self._labels = {"model_name": model_name, "engine_type": engine_type}
        self._series = SeriesByPriority(
            self._registry, self._labels, by_priority=by_priority, storage_backend=storage_backend
        )
        self._aborted = self._counter("sglang:num_aborted_requests_total", "sequences that ended as aborted")
        self._parts = self._family("pdserve:ttft_part_seconds", "named parts of the time to the first token; their sum "
                                   "is that time", SECONDS, ("part",))  # fmt: skip
        self._queue = self._histogram("sglang:queue_time_seconds", "from entering the queue to the first chunk")
        self._kv_latency = self._histogram(
            "sglang:kv_transfer_latency_ms", "from computed prompt to last byte", _MILLIS
        )
        self._kv_bootstrap = self._histogram(
            "sglang:kv_transfer_bootstrap_ms", "until decode's pages are known", _MILLIS
        )
        self._kv_speed = self._histogram("sglang:kv_transfer_speed_gb_s", "gigabytes a second while writing", _GB_S)
        self._kv_size = self._histogram("sglang:kv_transfer_total_mb", "megabytes of a transfer", _MB)
        self._ended = self._family_of_counters("pdserve:requests_ended_total", "sequences by how they ended", "outcome")
        self._hit_rate, self._rate = HitRate(HIT_RATE_PROMPTS), TokenRate()
        text = f"share of cached tokens in the newest {HIT_RATE_PROMPTS} prompts"
        self._gauge("sglang:cache_hit_rate", text).set_function(self._hit_rate.value)
        self._gauge("sglang:gen_throughput", "tokens a second, recently").set_function(self._rate.value)
        self._live = self._gauge("pdserve:live_requests", "sequences in progress in the API process")
        for part in TTFT_PARTS:
            self._parts.labels(**self._labels, part=part)
        for outcome in ("stop", "length", "abort", "suspended"):
            self._ended.labels(**self._labels, outcome=outcome)
        self.interval = IntervalStats()
        """The same statistics of the last seconds, for the log."""
        self.history = History()
        """The same of the last fifteen minutes, for the page."""
        self.speculation = RecentAcceptance()
        """Acceptance of draft tokens, from the states that `render` and other readers take."""
        self._engine = EngineCollector(self._labels, own_counters, self.speculation, by_priority=by_priority)
        self._registry.register(self._engine)
        self.http = HttpMetrics(self._registry, self._labels)
        """Of HTTP calls; written by the server's middleware."""
        self._routing_keys = RoutingKeyCollector(self._labels)
        self._registry.register(self._routing_keys)

    @property
    def tokens_per_s(self) -> float:
        """See `TokenRate`."""
        return self._rate.value()

    @property
    def cache_hit_rate(self) -> float:
        """See `HitRate`."""
        return self._hit_rate.value()

    @property
    def labels(self) -> dict[str, str]:
        """The labels of every sample."""
        return dict(self._labels)

    def add(self, collector: Collector) -> None:
        """Add a collector to every scrape. Its samples must have `labels`."""
        self._registry.register(collector)

    def show(self, own_counters: Callable[[], Mapping[str, float]]) -> None:
        """Add totals of the API process to every scrape."""
        self._engine.own_counters.append(own_counters)

    def set_api_startup(self, seconds: float) -> None:
        """Set the seconds from the creation of the API process until its application was built."""
        self._engine.api_startup_s = seconds

    def started(self, record: RequestRecord) -> None:
        """See `RequestMetrics`."""
        self._series.of(record.request.priority).requests.inc()
        self._live.inc()
        self.interval.started()
        if record.routing_key is not None:
            self._routing_keys.requests[id(record)] = record

    def first_token(self, record: RequestRecord) -> None:
        """See `RequestMetrics`."""
        assert record.ttft_s is not None
        self._series.of(record.request.priority).ttft.observe(record.ttft_s)
        self.interval.first_token(record.ttft_s)
        self.history.samples().ttft.add(record.ttft_s)
        for name, seconds in record.parts.items():
            self._parts.labels(**self._labels, part=name).observe(seconds)

    def prompt_done(
        self, record: RequestRecord, prompt_tokens: int, cached_tokens: int, details: CachedTokensDetails | None = None
    ) -> None:
        """See `RequestMetrics`."""
        series = self._series.of(record.request.priority)
        series.prompt_tokens.inc(prompt_tokens)
        series.cached_tokens.add(details or CachedTokensDetails(device=cached_tokens, host=0))
        self._hit_rate.add(prompt_tokens, cached_tokens)
        self.interval.prompt_done(prompt_tokens, cached_tokens)

    def next_tokens(self, record: RequestRecord, gap_s: float, num_tokens: int) -> None:
        """See `RequestMetrics`."""
        itl = self._series.of(record.request.priority).itl
        for _ in range(num_tokens):
            itl.observe(gap_s)
        self.interval.next_tokens(gap_s, num_tokens)
        samples = self.history.samples()
        samples.itl.add(gap_s, num_tokens)
        if record.completion_tokens == 1 and record.ttft_s is not None:
            samples.second_token.add(record.ttft_s + gap_s)

    def generated(self, record: RequestRecord, num_tokens: int) -> None:
        """See `RequestMetrics`."""
        self._series.of(record.request.priority).generation_tokens.inc(num_tokens)
        self._rate.add(num_tokens)
        self.interval.generated(num_tokens)

    def ended(self, record: RequestRecord) -> None:
        """See `RequestMetrics`."""
        self._live.dec()
        self.interval.ended()
        samples = self.history.samples()
        samples.requests += 1
        samples.failed += record.failure is not None and record.failure.status >= 500
        self._routing_keys.requests.pop(id(record), None)
        self._ended.labels(**self._labels, outcome=record.outcome).inc()
        if record.outcome == "abort":
            self._aborted.inc()
            return
        series = self._series.of(record.request.priority)
        series.e2e.observe(record.e2e_s)
        series.prompts.observe(record.prompt_tokens)
        series.outputs.observe(record.completion_tokens)
        if record.timing is not None:
            self._transfer(record.timing)

    def render(self, state: EngineState | None, alive: Mapping[int, bool] | None = None) -> bytes:
        """Return the body of `/metrics`. `state` None omits the scheduler's part. `alive` is by replica."""
        self._engine.state, self._engine.alive = state, alive or {}
        self.speculation.add(state)
        return generate_latest(self._registry)

    def _transfer(self, timing: RequestTiming) -> None:
        if timing.queue_s is not None:
            self._queue.observe(timing.queue_s)
        if timing.kv_bytes is None or timing.transfer_s is None:
            return
        self._kv_latency.observe(timing.transfer_s * 1e3)
        self._kv_size.observe(timing.kv_bytes / 1e6)
        if timing.bootstrap_s is not None:
            self._kv_bootstrap.observe(timing.bootstrap_s * 1e3)
        if timing.kv_transfer_s:
            self._kv_speed.observe(timing.kv_bytes / timing.kv_transfer_s / 1e9)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, tuple(self._labels), registry=self._registry).labels(**self._labels)

    def _family_of_counters(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, (*self._labels, label), registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, tuple(self._labels), registry=self._registry).labels(**self._labels)

    def _family(self, name: str, text: str, buckets: Sequence[float], labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(name, text, (*self._labels, *labels), registry=self._registry, buckets=tuple(buckets))

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        return self._family(name, text, buckets).labels(**self._labels)


TTFT_PARTS = ("intake", "bootstrap", "queue", "prefill", "transfer", "delivery")
"""Parts of TTFT in order of time; see `ttft_parts`."""
NUM_RECENT = 64
"""Most records that `RecentRequests` keeps."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class RequestRecord:
    """Statistics of one sequence, written until it ends. Its message `request` has prompt and parameters.

    `name` is the client's id of the sequence; `request.rid` is the server's, unique for all requests.
    Of the HTTP call: `path`, `request_id` (equal on both servers of a pair and in the client's response), `traceparent`
    of the parent span (None without tracing), `routing_key`; all None without a call.
    `arrived_at` is wall time in seconds since 1970, `arrived_s` monotonic seconds; `intake_s` are the seconds from the
    arrival to the submission. Other seconds count from the arrival. `ttft_s` lasts until the first token, or the
    prompt's end if no token was requested; None if it ended before that. `seen_s` is the monotonic time of the newest
    token. `e2e_s` and `outcome` (a `FinishReason.type`) are those of the end. `matched` is the stop string or
    token, `failure` the reason of a failure. `output_ids` and `texts` stay empty unless a listener has `keeps_output`.
    """

    request: GenerateRequest
    name: str
    path: str | None = None
    request_id: str | None = None
    traceparent: str | None = None
    routing_key: str | None = None
    arrived_at: float = 0.0
    arrived_s: float = 0.0
    intake_s: float = 0.0
    ttft_s: float | None = None
    seen_s: float | None = None
    e2e_s: float = 0.0
    outcome: str = ""
    cached_tokens: int = 0
    completion_tokens: int = 0
    timing: RequestTiming | None = None
    """The newest one that the scheduler sent. A stop string ends the sequence before the scheduler's last output."""
    speculation: SpeculationStats | None = None
    """The newest one that the scheduler sent; None: no drafts were verified."""
    matched: int | str | None = None
    failure: Failure | None = None
    output_ids: list[int] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)

    @property
    def room(self) -> int | None:
        """The bootstrap room; None in a monolith."""
        return None if self.request.room is None else self.request.room.room

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.input_ids)

    @property
    def parts(self) -> dict[str, float]:
        """See `ttft_parts`; empty without a `ttft_s`."""
        return {} if self.ttft_s is None else ttft_parts(self.ttft_s, self.intake_s, self.timing)


class RequestListener(Protocol):
    """Is notified of sequences on the event loop; must not block."""

    @property
    def keeps_output(self) -> bool:
        """True when records must have `output_ids` and `text`."""
        ...

    def started(self, record: RequestRecord) -> None:
        """A sequence was submitted."""
        ...

    def ended(self, record: RequestRecord) -> None:
        """A sequence has ended."""
        ...


def ttft_parts(ttft_s: float, intake_s: float, timing: RequestTiming | None) -> dict[str, float]:
    """Split the time from a request's arrival at this server to its first token into parts that add up to it.

        intake      parsing, chat template, tokenizing
        bootstrap   prefill: until decode's pages are known; decode: session, handshake, waiting for memory
        queue       until the first chunk was planned
        prefill     until the prompt was computed
        transfer    prefill: until every byte had landed; decode: the remaining time until KV and first token arrived
        delivery    from the scheduler to the API process, and the remainder

    All in seconds. The scheduler's parts come from other clocks than `ttft_s`, so a part is cut where the sum would
    exceed `ttft_s`. Parts without a share on this server are 0.
    """
    told: Mapping[str, float | None] = (
        {}
        if timing is None
        else {
            "bootstrap": timing.bootstrap_s,
            "queue": timing.queue_s,
            "prefill": timing.prefill_s,
            "transfer": timing.transfer_s,
        }
    )
    parts: dict[str, float] = {}
    left_s = ttft_s
    for name in TTFT_PARTS[:-1]:
        wanted_s = intake_s if name == "intake" else told.get(name) or 0.0
        parts[name] = min(max(wanted_s, 0.0), left_s)
        left_s -= parts[name]
    parts["delivery"] = left_s
    return parts


class RecentRequests:
    """A `RequestListener` that keeps the `NUM_RECENT` newest records of HTTP calls."""

    keeps_output = False

    def __init__(self) -> None:
        self._records: deque[dict[str, Any]] = deque(maxlen=NUM_RECENT)
        """As JSON objects: a record holds its prompt and, in the server, the state of its stream."""

    def started(self, record: RequestRecord) -> None:
        """See `RequestListener`."""

    def ended(self, record: RequestRecord) -> None:
        """See `RequestListener`."""
        if record.path is not None:
            self._records.append(_fields(record))

    def as_json(self) -> list[dict[str, Any]]:
        """Return the records as JSON objects, the newest first."""
        return list(reversed(self._records))


def _fields(record: RequestRecord) -> dict[str, Any]:
    timing = record.timing
    return {
        "id": record.name,
        "path": record.path,
        "room": None if record.room is None else str(record.room),
        "arrived_at": record.arrived_at,
        "outcome": record.outcome,
        "error": None if record.failure is None else record.failure.message,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "ttft_s": record.ttft_s,
        "ttft_parts": record.parts,
        "e2e_s": record.e2e_s,
        "kv_bytes": None if timing is None else timing.kv_bytes,
        "kv_transfer_s": None if timing is None else timing.kv_transfer_s,
    }
