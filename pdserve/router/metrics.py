"""The router's Prometheus metrics, in a registry of its own. Written by `app`, `dispatch`, `workers`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class RouterMetrics:
    """One instance per app."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "pdserve_router_requests", "Requests by path and status", ["path", "status"], registry=self._registry
        )
        self.retries = Counter("pdserve_router_retries", "Tries after the first one", registry=self._registry)
        self.disconnects = Counter(
            "pdserve_router_client_disconnects", "Clients gone before their answer", registry=self._registry
        )
        self.worker_errors = Counter(
            "pdserve_router_worker_errors",
            "Failed calls by worker; kind is 'connection' or the HTTP status",
            ["role", "worker", "kind"],
            registry=self._registry,
        )
        self.inflight = Gauge(
            "pdserve_router_inflight", "Requests at a worker now", ["role", "worker"], registry=self._registry
        )
        self.worker_up = Gauge(
            "pdserve_router_worker_up", "1 while a worker is healthy", ["role", "worker"], registry=self._registry
        )

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)
