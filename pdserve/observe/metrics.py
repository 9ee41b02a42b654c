"""Prometheus metrics of one server, under SGLang's names where it has one, else under `pdserve:`.

Owned by the API process. `RequestMetrics` is written by the engine client as tokens pass; the scheduler's side is a
snapshot (`EngineState`), turned into gauges and counters when `/metrics` is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pdserve.protocol.messages import EngineState

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

SGLANG_QUEUES = (
    "num_prefill_bootstrap_queue_reqs",
    "num_prefill_inflight_queue_reqs",
    "num_decode_prealloc_queue_reqs",
    "num_decode_transfer_queue_reqs",
    "num_retracted_reqs",
)
"""Queues with a gauge of their own, shown at 0 by roles that lack them."""

NEW_TOKEN_RATIO = "new_token_ratio"
"""The fact that is shown as `sglang:new_token_ratio`, where the scheduler has it."""

SGLANG_COUNTERS = {
    "bootstrap_failed": "num_bootstrap_failed_reqs",
    "copies_failed": "num_transfer_failed_reqs",
    "requests_retracted": "num_retracted_requests",
}
"""The scheduler's counters that SGLang has under another name; shown at 0 before the first event."""

HIT_RATE_PROMPTS = 128
"""Prompts that `sglang:cache_hit_rate` looks back on."""


class RequestMetrics(Protocol):
    """What the engine client reports. All durations in seconds."""

    def started(self, prompt_tokens: int) -> None:
        """A sequence was submitted."""
        ...

    def first_token(self, ttft_s: float) -> None:
        """A sequence's first token came."""
        ...

    def prompt_done(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A sequence's prompt is in the KV cache; `cached_tokens` of it were there before."""
        ...

    def next_tokens(self, gap_s: float) -> None:
        """Later tokens came, `gap_s` apart each."""
        ...

    def generated(self, num_tokens: int) -> None:
        """Tokens came, the first or later ones."""
        ...

    def finished(self, outcome: str, e2e_s: float) -> None:
        """A sequence ended: `stop`, `length` or `abort`."""
        ...


class HitRate:
    """The share of the newest prompts' tokens that were cached."""

    def __init__(self, num_prompts: int) -> None:
        """Looks back on `num_prompts` prompts."""
        self._newest: deque[tuple[int, int]] = deque(maxlen=num_prompts)

    def add(self, prompt_tokens: int, cached_tokens: int) -> None:
        """One more prompt."""
        self._newest.append((prompt_tokens, cached_tokens))

    def value(self) -> float:
        """Between 0 and 1; 0 before the first prompt."""
        prompt_tokens = sum(prompt for prompt, _ in self._newest)
        return sum(cached for _, cached in self._newest) / prompt_tokens if prompt_tokens else 0.0


class ServerMetrics:
    """All metrics of a server, in a registry of its own; implements `RequestMetrics`."""

    def __init__(
        self, model_name: str, engine_type: str, own_counters: Callable[[], Mapping[str, float]] = dict
    ) -> None:
        """`engine_type`: `unified`, `prefill` or `decode`. Both become labels of every sample.

        `own_counters` are totals of this process, shown beside the scheduler's.
        """
        self._registry = CollectorRegistry(auto_describe=False)
        labels = {"model_name": model_name, "engine_type": engine_type}
        names = tuple(labels)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"sglang:{name}", text, names, registry=self._registry).labels(**labels)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, names, registry=self._registry).labels(**labels)

        def histogram(name: str, text: str) -> Histogram:
            made = Histogram(f"sglang:{name}", text, names, registry=self._registry, buckets=_SECONDS)
            return made.labels(**labels)

        self._prompt_tokens = counter("prompt_tokens_total", "prompt tokens taken")
        self._generation_tokens = counter("generation_tokens_total", "tokens generated")
        self._requests = counter("num_requests_total", "sequences taken")
        self._aborted = counter("num_aborted_requests_total", "sequences that ended as aborted")
        self._ttft = histogram("time_to_first_token_seconds", "from submission to the first token")
        self._itl = histogram("inter_token_latency_seconds", "between tokens")
        self._e2e = histogram("e2e_request_latency_seconds", "from submission to the end")
        cached = Counter("sglang:cached_tokens_total", "prompt tokens whose KV was there already",
                         (*names, "cache_source"), registry=self._registry)  # fmt: skip
        self._cached_tokens = cached.labels(**labels, cache_source="device")
        self._hit_rate = HitRate(HIT_RATE_PROMPTS)
        hit_rate = gauge("sglang:cache_hit_rate", f"share of cached tokens in the newest {HIT_RATE_PROMPTS} prompts")
        hit_rate.set_function(self._hit_rate.value)
        self._live = gauge("pdserve:live_requests", "sequences in progress in the API process")
        self._engine = _EngineCollector(labels, own_counters)
        self._registry.register(self._engine)

    def started(self, prompt_tokens: int) -> None:
        """See `RequestMetrics`."""
        self._requests.inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._live.inc()

    def first_token(self, ttft_s: float) -> None:
        """See `RequestMetrics`."""
        self._ttft.observe(ttft_s)

    def prompt_done(self, prompt_tokens: int, cached_tokens: int) -> None:
        """See `RequestMetrics`."""
        self._cached_tokens.inc(cached_tokens)
        self._hit_rate.add(prompt_tokens, cached_tokens)

    def next_tokens(self, gap_s: float) -> None:
        """See `RequestMetrics`."""
        self._itl.observe(gap_s)

    def generated(self, num_tokens: int) -> None:
        """See `RequestMetrics`."""
        self._generation_tokens.inc(num_tokens)

    def finished(self, outcome: str, e2e_s: float) -> None:
        """See `RequestMetrics`."""
        self._live.dec()
        if outcome == "abort":
            self._aborted.inc()
        else:
            self._e2e.observe(e2e_s)

    def render(self, state: EngineState | None) -> bytes:
        """The text that `/metrics` answers; `state` None leaves the scheduler's part out."""
        self._engine.state = state
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Turns the newest `EngineState` into metric families."""

    def __init__(self, labels: dict[str, str], own_counters: Callable[[], Mapping[str, float]]) -> None:
        self._names = list(labels)
        self._values = list(labels.values())
        self._own_counters = own_counters
        self.state: EngineState | None = None

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Called by the registry."""
        for name, total in sorted(self._own_counters().items()):
            yield self._counter(name, total)
        if self.state is None:
            return
        yield from self._load(self.state)
        yield from self._queues(self.state)
        for name, count in sorted(self.state.memory.items()):
            yield self._gauge(f"pdserve:{name}", f"KV memory: {name}", count)
        text = "what the self-audit found: pages, rows, slots and rooms with no owner or two"
        yield self._gauge("pdserve:audit_differences", text, len(self.state.audit))
        zeros = dict.fromkeys(SGLANG_COUNTERS, 0.0)
        for name, total in sorted({**zeros, **self.state.counters}.items()):
            yield self._counter(name, total)

    def _load(self, state: EngineState) -> Iterator[GaugeMetricFamily]:
        usage = state.num_used_tokens / state.max_total_tokens if state.max_total_tokens else 0.0
        yield self._gauge("sglang:num_running_reqs", "requests in the running batch", state.num_running_reqs)
        yield self._gauge("sglang:num_queue_reqs", "requests that wait", state.num_queue_reqs)
        yield self._gauge("sglang:num_used_tokens", "token slots in use", state.num_used_tokens)
        yield self._gauge("sglang:max_total_num_tokens", "token slots in all", state.max_total_tokens)
        yield self._gauge("sglang:token_usage", "share of token slots in use", usage)
        ratio = state.facts.get(NEW_TOKEN_RATIO)
        if isinstance(ratio, float | int):
            text = "share of a running request's remaining tokens that memory is kept free for"
            yield self._gauge("sglang:new_token_ratio", text, ratio)

    def _queues(self, state: EngineState) -> Iterator[GaugeMetricFamily]:
        for queue in SGLANG_QUEUES:
            yield self._gauge(f"sglang:{queue}", "requests in this queue", state.queues.get(queue, 0))
        family = GaugeMetricFamily("pdserve:queue_reqs", "length of a queue", labels=[*self._names, "queue"])
        for queue, length in sorted(state.queues.items()):
            family.add_metric([*self._values, queue], length)
        yield family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, total: float) -> CounterMetricFamily:
        known = SGLANG_COUNTERS.get(name, name if name.startswith("kv_transfer_") else None)
        full = f"pdserve:{name}" if known is None else f"sglang:{known}"
        family = CounterMetricFamily(full, name.replace("_", " "), labels=self._names)
        family.add_metric(self._values, total)
        return family
