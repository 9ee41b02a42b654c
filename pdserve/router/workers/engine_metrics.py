"""`GET /engine_metrics`: the `/metrics` of all workers in one answer, each sample with `worker_addr`, for one scrape.

    many scrapers ──> one round a second at most ──> GET /metrics of every living worker, at most `ASK_TIMEOUT_S`

A worker that does not answer, or with something else than metrics, is missing, and its `pdserve_router_engine_up` is 0.
Created by `app`. Path, label and meaning are sglang-router's.
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
"""Well below the 10 s after which Prometheus gives up."""
MAX_ANSWER_BYTES = 8 << 20
LABEL = "worker_addr"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class EngineMetrics:
    """One per router. `close` ends what is under way."""

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
        """All that workers said, at most a second before; 200 whoever is silent."""
        if self._round is None or (self._round.done() and self._now() - self._begun_at >= INTERVAL_S):
            self._begun_at = self._now()
            self._round = asyncio.create_task(self._ask_all())
        return web.Response(body=await asyncio.shield(self._round), headers={"Content-Type": CONTENT_TYPE})

    async def close(self) -> None:
        """End the round that is under way."""
        if self._round is not None:
            self._round.cancel()
            await asyncio.gather(self._round, return_exceptions=True)

    async def _ask_all(self) -> bytes:
        workers = self._registry.workers
        texts = await asyncio.gather(*(self._ask(worker) for worker in workers))
        told = [(worker.spec.role.value, worker.spec.url, text) for worker, text in zip(workers, texts, strict=True)]
        return await asyncio.to_thread(together, told)

    async def _ask(self, worker: Worker) -> str | None:
        """What a worker exports; None where that cannot be had."""
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


def together(told: Sequence[tuple[str, str, str | None]]) -> bytes:
    """One exposition of what workers (role, URL, exposition) export: a metric's samples of all of them side by side.

    Where workers differ in a metric's type, the first one's is taken, and the others' samples are left out.
    """
    up = GaugeMetricFamily(
        "pdserve_router_engine_up", "1 where a worker's metrics could be had", labels=["role", LABEL]
    )
    families: dict[str, Metric] = {}
    for role, url, text in told:
        found = None if text is None else _parse(url, text)
        up.add_metric([role, url], float(found is not None))
        for family in found or ():
            seen = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            if seen.type == family.type:
                seen.samples += [sample._replace(labels=_with_address(sample.labels, url)) for sample in family.samples]
    return generate_latest(_Families([up, *families.values()]))


def _parse(url: str, text: str) -> list[Metric] | None:
    """Its families; None where it is not an exposition."""
    try:
        return list(text_string_to_metric_families(text))
    except (ValueError, KeyError, IndexError) as error:
        log.info("%s: what it exports cannot be read: %s", url, error)
        return None


def _with_address(labels: dict[str, str], url: str) -> dict[str, str]:
    """An address that is there already is kept as Prometheus does."""
    if LABEL not in labels:
        return labels | {LABEL: url}
    return labels | {f"exported_{LABEL}": labels[LABEL], LABEL: url}


class _Families(Collector):
    """Families as something that can be rendered."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        return self._families
