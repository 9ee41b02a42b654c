"""`GET /engine_metrics`: the `/metrics` of all workers in one answer; each sample has the label `worker_addr`.

    scrapes ──> at most one round a second ──> GET /metrics of every healthy worker, at most `ASK_TIMEOUT_S`

A worker without a valid answer is missing, and its `pdserve_router_engine_up` is 0. Created by `app`. Path, label and
semantics are sglang-router's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

import aiohttp
from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from pdserve.router.config.config import RouterConfig
from pdserve.router.workers.outcome import describe, own_headers, read_at_most
from pdserve.router.workers.workers import Registry, Worker

log = logging.getLogger(__name__)

PATH = "/engine_metrics"
WORKER_PATH = "/metrics"
INTERVAL_S = 1.0
ASK_TIMEOUT_S = 3.0
"""Well below Prometheus' default scrape timeout of 10 s."""
MAX_ANSWER_BYTES = 8 << 20
LABEL = "worker_addr"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class EngineMetrics:
    """The handler; one per router. `close` cancels a running round."""

    def __init__(
        self, config: RouterConfig, registry: Registry, session: aiohttp.ClientSession, now: Callable[[], float]
    ) -> None:
        self._key = config.access.key_for_workers
        self._registry = registry
        self._session = session
        self._now = now
        self._round: asyncio.Task[bytes] | None = None
        self._begun_at = 0.0

    async def get(self, request: web.Request) -> web.Response:
        """Return the metrics of all workers, at most a second old; 200 even if workers do not answer."""
        if self._round is None or (self._round.done() and self._now() - self._begun_at >= INTERVAL_S):
            self._begun_at = self._now()
            self._round = asyncio.create_task(self._ask_all())
        return web.Response(body=await asyncio.shield(self._round), headers={"Content-Type": CONTENT_TYPE})

    async def close(self) -> None:
        """Cancel a running round."""
        if self._round is not None:
            self._round.cancel()
            await asyncio.gather(self._round, return_exceptions=True)

    async def _ask_all(self) -> bytes:
        workers = self._registry.workers
        texts = await asyncio.gather(*(self._ask(worker) for worker in workers))
        expositions = [
            (worker.spec.role.value, worker.spec.url, text) for worker, text in zip(workers, texts, strict=True)
        ]
        return await asyncio.to_thread(merge_expositions, expositions)

    async def _ask(self, worker: Worker) -> str | None:
        """Return a worker's metrics as text; None if they are not available."""
        if not worker.healthy:
            return None
        timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
        headers = {"Accept": "text/plain; version=0.0.4", **own_headers(worker, self._key)}
        try:
            url = worker.spec.url + WORKER_PATH
            async with self._session.get(url, timeout=timeout, headers=headers, allow_redirects=False) as response:
                if response.status == 200:
                    return (await read_at_most(response, MAX_ANSWER_BYTES)).decode()
                error = f"status {response.status}"
        except (aiohttp.ClientError, OSError, UnicodeDecodeError) as problem:
            error = describe(problem)
        log.info("%s %s: no metrics: %s", worker.spec.role, worker.spec.url, error)
        return None


def merge_expositions(expositions: Sequence[tuple[str, str, str | None]]) -> bytes:
    """Merge the expositions of workers (role, URL, exposition) into one, with all samples of a metric together.

    If workers differ in a metric's type, the first worker's type counts, and samples of other types are dropped.
    """
    up = GaugeMetricFamily("pdserve_router_engine_up", "1 if a worker's metrics are available", labels=["role", LABEL])
    families: dict[str, Metric] = {}
    for role, url, text in expositions:
        found = None if text is None else _parse(url, text)
        up.add_metric([role, url], float(found is not None))
        for family in found or ():
            seen = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            if seen.type == family.type:
                seen.samples += [sample._replace(labels=_with_address(sample.labels, url)) for sample in family.samples]
    return generate_latest(_Families([up, *families.values()]))


def _parse(url: str, text: str) -> list[Metric] | None:
    """Parse an exposition; None if it is invalid."""
    try:
        return list(text_string_to_metric_families(text))
    except (ValueError, KeyError, IndexError) as error:
        log.info("%s: the metrics cannot be parsed: %s", url, error)
        return None


def _with_address(labels: dict[str, str], url: str) -> dict[str, str]:
    """Add the worker's URL as label; an existing label is renamed to `exported_*`, as Prometheus does."""
    if LABEL not in labels:
        return labels | {LABEL: url}
    return labels | {f"exported_{LABEL}": labels[LABEL], LABEL: url}


class _Families(Collector):
    """A collector of given metric families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self._families
