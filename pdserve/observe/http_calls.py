"""HTTP calls: their metrics and those of routing keys, under SGLang's names, and the access log of servers and router.

A routing key is the header `X-SMG-Routing-Key`, which routers use to keep the requests of one conversation on one
server. The metrics are owned by the API process. Event loop only.
"""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import prometheus_client as prometheus
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pdserve.base.log import about, escaped

log = logging.getLogger("pdserve.access")

ROUTING_KEY_HEADER = b"x-smg-routing-key"
MAX_KEY_BYTES = 256
"""Longer routing keys are cut to this length."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
KEY_BOUNDS = (1, 2, 3, 5, 7, 10, 20, 50, 100, 200)
"""Upper bounds of the buckets of requests by routing key; a last bucket has no bound."""


def routing_key_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the routing key in the headers of an ASGI scope; None without one."""
    given = next((value for name, value in headers if name == ROUTING_KEY_HEADER), b"")
    return given[:MAX_KEY_BYTES].decode("latin-1") or None


class HttpMetrics:
    """Calls by endpoint and method: totals, responses by status, and those that are active."""

    def __init__(self, registry: prometheus.CollectorRegistry, labels: Mapping[str, str]) -> None:
        """`labels`: those of every sample."""
        self._labels = dict(labels)
        names = [*labels, "endpoint", "method"]
        self._requests = prometheus.Counter(
            "sglang:http_requests_total", "HTTP calls by endpoint and method", names, registry=registry
        )
        self._responses = prometheus.Counter(
            "sglang:http_responses_total", "HTTP responses by status", [*names, "status_code"], registry=registry
        )
        self._active = prometheus.Gauge(
            "sglang:http_requests_active", "HTTP calls whose response has not ended", names, registry=registry
        )
        keys = prometheus.Gauge(
            "sglang:routing_keys_active", "routing keys of active HTTP calls", [*labels], registry=registry
        )
        self._keys: Counter[str] = Counter()
        keys.labels(**self._labels).set_function(lambda: len(self._keys))

    def began(self, endpoint: str, method: str, key: str | None) -> None:
        """Count a call. `endpoint`: the path of a route. `key`: its routing key."""
        where = self._where(endpoint, method)
        self._requests.labels(**where).inc()
        self._active.labels(**where).inc()
        if key is not None:
            self._keys[key] += 1

    def answered(self, endpoint: str, method: str, status: int) -> None:
        """Count the beginning of a response."""
        self._responses.labels(**self._where(endpoint, method), status_code=str(status)).inc()

    def ended(self, endpoint: str, method: str, key: str | None) -> None:
        """Count the end of a call."""
        self._active.labels(**self._where(endpoint, method)).dec()
        if key is not None:
            self._keys[key] -= 1
            if not self._keys[key]:
                del self._keys[key]

    def _where(self, endpoint: str, method: str) -> dict[str, str]:
        return {**self._labels, "endpoint": endpoint, "method": method if method in METHODS else "other"}


class KeyedRequest(Protocol):
    """A sequence in progress."""

    @property
    def routing_key(self) -> str | None:
        """The routing key of its HTTP call."""
        ...

    @property
    def ttft_s(self) -> float | None:
        """None until it has its first token."""
        ...


class RoutingKeyCollector(Collector):
    """Distributions of routing keys by their requests in progress: all of them, and those that have output."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self.requests: dict[int, KeyedRequest] = {}
        """Sequences in progress that have a routing key, by identity."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the families; called by the registry."""
        every = Counter(request.routing_key for request in self.requests.values())
        running = Counter(request.routing_key for request in self.requests.values() if request.ttft_s is not None)
        family = GaugeMetricFamily(
            "sglang:num_unique_running_routing_keys", "routing keys of requests with output", labels=[*self._labels]
        )
        family.add_metric([*self._labels.values()], len(running))
        yield family
        for name, counts in (("running", running), ("all", every)):
            yield self._distribution(f"sglang:routing_key_{name}_req_count", counts.values())

    def _distribution(self, name: str, counts: Iterable[int]) -> GaugeMetricFamily:
        """Return the number of keys by bucket: more requests than `gt`, at most `le`. Buckets do not add up."""
        text = "routing keys by their number of requests in progress (gt < number <= le)"
        family = GaugeMetricFamily(name, text, labels=[*self._labels, "gt", "le"])
        filled = Counter(bisect.bisect_left(KEY_BOUNDS, count) for count in counts)
        lower = (0, *KEY_BOUNDS)
        for place, bound in enumerate((*map(str, KEY_BOUNDS), "+Inf")):
            family.add_metric([*self._labels.values(), str(lower[place]), bound], filled[place])
        return family


POLLED_PATHS = frozenset(
    {
        *("/health", "/health_generate", "/health_pair", "/ready", "/readiness", "/liveness"),
        *(
            "/metrics",
            "/engine_metrics",
            "/get_load",
            "/v1/loads",
            "/control_challenge",
            "/observe",
            "/observe/history",
        ),
    }
)
"""Paths that programs poll."""
CLIENT_GONE = 499
"""Status of a request whose client disconnected before the answer began."""


def log_access(
    *, client: str, method: str, path: str, status: int, seconds: float, request_id: str, complete: bool = True
) -> None:
    """Log one request at its end (`--access-log`): `127.0.0.1 POST /v1/chat/completions 200 812.3 ms`.

    Requests of load balancers, routers and Prometheus that succeed are logged at level debug only, since they come
    every few seconds. `client` is an address; a key is never logged. `seconds`: until the last byte was sent.
    `complete` False: the answer was cut off.
    """
    level = logging.DEBUG if path in POLLED_PATHS and status < 400 else logging.INFO
    if not log.isEnabledFor(level):
        return
    fields = {
        "client": client,
        "method": method,
        "path": path,
        "status": status,
        "duration_ms": round(1000 * seconds, 1),
        "complete": complete,
    }
    text = f"{escaped(client)} {escaped(method)} {escaped(path)} {status} {1000 * seconds:.1f} ms"
    log.log(level, "%s%s", text, "" if complete else ", cut off", extra=about(request_id, fields=fields))
