"""The router's Prometheus metrics, in a registry of their own. Written by the other files of the router.

Series of a worker are removed with the worker, so that /metrics does not grow as workers are added and removed. Series
of the whole router are never removed.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pdserve.router.workers.workers import Pairs, Worker

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class RouterMetrics:
    """One instance per app."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "pdserve_router_requests", "Requests by path and status", ["path", "status"], registry=registry
        )
        self.retries = Counter("pdserve_router_retries", "Attempts after the first one", registry=registry)
        self.stream_retries = Counter(
            "pdserve_router_stream_retries", "Broken streams that were sent to another pair", registry=registry
        )
        self.migrations = Counter(
            "pdserve_router_migrations",
            "Calls that move a running request to another decode worker: moved, gone, later, refused, failed",
            ["result"],
            registry=registry,
        )
        self.attached = Counter(
            "pdserve_router_migrated_streams",
            "Streams of requests that have moved: attached to the new worker, or recomputed at another pair",
            ["result"],
            registry=registry,
        )
        self.disconnects = Counter(
            "pdserve_router_client_disconnects", "Clients that disconnected early", registry=registry
        )
        self.worker_errors = Counter(
            "pdserve_router_worker_errors",
            "Failed calls by worker; kind is 'connection' or the HTTP status",
            ["role", "worker", "kind"],
            registry=registry,
        )
        self.refused = Counter("pdserve_router_refused", "Requests sent to no worker", ["reason"], registry=registry)
        self.queued = Gauge("pdserve_router_queued", "Requests that wait for a slot at a worker", registry=registry)
        self.queue_seconds = Histogram(
            "pdserve_router_queue_seconds", "Time in the queue", buckets=SECONDS, registry=registry
        )
        self.first_byte_seconds = Histogram(
            "pdserve_router_first_byte_seconds",
            "From a request's arrival to the first byte of a worker's answer",
            ["path"],
            buckets=SECONDS,
            registry=registry,
        )
        self.request_seconds = Histogram(
            "pdserve_router_request_seconds",
            "From a request's arrival to the end of its answer",
            ["path"],
            buckets=SECONDS,
            registry=registry,
        )
        self.dispatched = Counter(
            "pdserve_router_dispatched", "Requests sent to each worker", ["role", "worker"], registry=registry
        )
        self.inflight = Gauge(
            "pdserve_router_inflight", "Requests at a worker now", ["role", "worker"], registry=registry
        )
        self.worker_up = Gauge(
            "pdserve_router_worker_up", "1 while a worker is healthy", ["role", "worker"], registry=registry
        )
        self.draining = Gauge(
            "pdserve_router_worker_draining",
            "1 while a worker gets no new requests",
            ["role", "worker"],
            registry=registry,
        )
        self.pair_up = Gauge(
            "pdserve_router_pair_up",
            "0 while no token comes through a pair of healthy workers",
            ["prefill", "decode"],
            registry=registry,
        )
        self.probes = Counter(
            "pdserve_router_pair_probes", "Probes of pairs: ok, failed, no_news", ["result"], registry=registry
        )
        self.discovery_up = Gauge(
            "pdserve_router_discovery_up",
            "1 while the pods of a namespace are watched; empty: of all namespaces",
            ["namespace"],
            registry=registry,
        )
        self.discovery_failures = Counter(
            "pdserve_router_discovery_failures", "Failed calls of the Kubernetes API", ["namespace"], registry=registry
        )
        self._num_dispatched: dict[Worker, int] = {}
        """What `dispatched` counts of each worker."""
        self.breaker = Gauge(
            "pdserve_router_worker_breaker",
            "A worker's circuit breaker: 0 closed, 1 half open, 2 open",
            ["role", "worker"],
            registry=registry,
        )

        self.kv_followed = Gauge(
            "pdserve_router_kv_events_followed",
            "1 while the KV events of a worker are followed (policy kv_aware)",
            ["role", "worker"],
            registry=registry,
        )
        self.kv_blocks = Gauge(
            "pdserve_router_kv_events_blocks",
            "Cached blocks of a worker that the router knows of",
            ["role", "worker"],
            registry=registry,
        )
        self.kv_lag = Gauge(
            "pdserve_router_kv_events_lag_seconds",
            "Age of a worker's last batch of KV events when it was applied; NaN: none has come",
            ["role", "worker"],
            registry=registry,
        )
        self.kv_gaps = Counter(
            "pdserve_router_kv_events_gaps",
            "Gaps in the numbers of a worker's KV events",
            ["role", "worker"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "pdserve_router_prompt_tokens",
            "Requests of policy kv_aware by the source of their token ids: given, tokenized, failed, timeout, none",
            ["source"],
            registry=registry,
        )

    def show(self, workers: Iterable[Worker], num_waiting: int, now: float) -> None:
        """Update all gauges, and `dispatched`; called before each scrape, so that they add no work to requests."""
        self.queued.set(num_waiting)
        for worker in workers:
            labels = (worker.spec.role, worker.spec.url)
            self.inflight.labels(*labels).set(worker.inflight)
            self.worker_up.labels(*labels).set(worker.healthy)
            self.draining.labels(*labels).set(worker.draining)
            num_new = worker.num_sent - self._num_dispatched.get(worker, 0)
            if num_new:
                self.dispatched.labels(*labels).inc(num_new)
                self._num_dispatched[worker] = worker.num_sent
            self.breaker.labels(*labels).set({"closed": 0, "half_open": 1, "open": 2}[worker.breaker.state(now)])

    def show_pairs(self, pairs: Pairs) -> None:
        """Update the gauges of pairs; those of removed workers are dropped."""
        self.pair_up.clear()
        for pair, state in pairs:
            prefill = "" if pair.prefill is None else pair.prefill.spec.url
            self.pair_up.labels(prefill, pair.decode.spec.url).set(not state.down)

    def failed_at(self, worker: Worker, kind: str) -> None:
        """Count a failed call, unless the worker was removed."""
        if not worker.forgotten:
            self.worker_errors.labels(worker.spec.role, worker.spec.url, kind).inc()

    def forget(self, worker: Worker) -> None:
        """Remove all series of a worker."""
        self._num_dispatched.pop(worker, None)
        labels = {"role": worker.spec.role.value, "worker": worker.spec.url}
        gauges = (self.inflight, self.worker_up, self.draining, self.breaker)
        of_events = (self.kv_followed, self.kv_blocks, self.kv_lag, self.kv_gaps)
        for metric in (*gauges, *of_events, self.dispatched, self.worker_errors):
            metric.remove_by_labels(labels)

    def render(self) -> bytes:
        """Render the text exposition format."""
        return generate_latest(self._registry)
