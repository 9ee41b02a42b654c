"""The request metrics that SGLang labels: with `priority`, and cached tokens with the place where they were.

`ServerMetrics` writes them. Event loop only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from pdserve.observe.engine_metrics import PriorityLabels
from pdserve.protocol.cached_tokens import CachedTokensDetails

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Buckets of durations, in seconds."""
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class CachedTokensCounters:
    """The samples of `sglang:cached_tokens_total` with the same labels beside `cache_source`."""

    def __init__(self, family: Counter, labels: Mapping[str, str], storage_backend: str | None) -> None:
        """`storage_backend`: of this server; None without one, where a peer can still have read tokens from a store."""
        self._device = family.labels(**labels, cache_source="device")
        self._family = family
        self._labels = dict(labels)
        self._storage = f"storage_{storage_backend or 'unknown'}"

    def add(self, details: CachedTokensDetails) -> None:
        """Count one prompt. A source beside the device has a sample once tokens came from it, as in SGLang."""
        self._device.inc(details.device)
        for source, num_tokens in (("host", details.host), (self._storage, details.storage)):
            if num_tokens:
                self._family.labels(**self._labels, cache_source=source).inc(num_tokens)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestSeries:
    """The samples of requests of one priority, or of all requests."""

    requests: Counter
    prompt_tokens: Counter
    cached_tokens: CachedTokensCounters
    generation_tokens: Counter
    ttft: Histogram
    itl: Histogram
    e2e: Histogram
    prompts: Histogram
    outputs: Histogram


class SeriesByPriority:
    """The metrics that SGLang labels with `priority` where `--enable-priority-scheduling` is set."""

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: Mapping[str, str],
        *,
        by_priority: bool,
        storage_backend: str | None = None,
    ) -> None:
        """`storage_backend`: see `CachedTokensCounters`."""
        self._labels = labels
        self._storage_backend = storage_backend
        names = (*labels, "priority") if by_priority else tuple(labels)

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, (*names, *more), registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float] = SECONDS) -> Histogram:
            return Histogram(name, text, names, registry=registry, buckets=tuple(buckets))

        self._families = {
            "requests": counter("sglang:num_requests_total", "sequences taken"),
            "prompt_tokens": counter("sglang:prompt_tokens_total", "tokens of prompts that were read"),
            "generation_tokens": counter("sglang:generation_tokens_total", "tokens generated"),
            "ttft": histogram("sglang:time_to_first_token_seconds", "from arrival to the first token"),
            "itl": histogram("sglang:inter_token_latency_seconds", "between tokens"),
            "e2e": histogram("sglang:e2e_request_latency_seconds", "from arrival to the end"),
            "prompts": histogram("sglang:prompt_tokens_histogram", "prompt tokens of a sequence", _TOKENS),
            "outputs": histogram("sglang:generation_tokens_histogram", "output tokens of a sequence", _TOKENS),
        }
        text = "prompt tokens whose KV came from the prefix cache"
        self._cached = counter("sglang:cached_tokens_total", text, "cache_source")
        self._priorities = PriorityLabels("") if by_priority else None
        self._all = self._of({"priority": ""} if by_priority else {})
        self._series = {"": self._all}

    def of(self, priority: int) -> RequestSeries:
        """Return the samples that a request of this priority counts in."""
        if self._priorities is None:
            return self._all
        label = self._priorities.label(priority)
        if label not in self._series:
            self._series[label] = self._of({"priority": label})
        return self._series[label]

    def _of(self, priority: Mapping[str, str]) -> RequestSeries:
        labels = {**self._labels, **priority}
        children: dict[str, Any] = {name: family.labels(**labels) for name, family in self._families.items()}
        cached = CachedTokensCounters(self._cached, labels, self._storage_backend)
        return RequestSeries(**children, cached_tokens=cached)
