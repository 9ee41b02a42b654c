"""The dashboard page at `/` and `/dashboard`, and `GET /observe/history`: fifteen minutes of the fleet and each worker.

    GenerateHandler ── CallMeter ──> History <── RouterHistory, every 5 s: Observer.answers, the router's queue

The files of `http/page` are read once at start-up. Latencies are those of streams as the router relays them. Created by
`app`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from aiohttp import web

from pdserve.errors import RequestError
from pdserve.http.errors import HttpRefusal
from pdserve.http.page_files import DASHBOARD_PATH, INDEX, PAGE_FILES, read_page_files
from pdserve.observe.history import INTERVAL_S, History, StoreTraffic
from pdserve.router.config.config import WorkerRole
from pdserve.router.dashboard.cluster_snapshot import EdgeSnapshot, ObserveReply, StateSnapshot
from pdserve.router.dashboard.observe import Observer
from pdserve.router.http import json_response, refused
from pdserve.router.workers.admission import Admission
from pdserve.router.workers.workers import Worker

Gauges = dict[str, float | None]
SUMMED = (
    *("running", "queued", "tokens_per_s", "kv_device_used", "kv_device_total", "kv_host_used", "kv_host_total"),
    *("kv_store_read", "kv_store_written"),
)
AVERAGED = ("accept_length", "cache_hit_rate")


class DashboardPage:
    """The handlers of the page; one per app."""

    def __init__(self) -> None:
        self._files = read_page_files()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the page and of its files."""
        return [web.get("/", self.index), web.get(DASHBOARD_PATH, self.index), web.get(PAGE_FILES, self.file)]

    async def index(self, request: web.Request) -> web.Response:
        """Return the dashboard page."""
        return self._answer(request, INDEX)

    async def file(self, request: web.Request) -> web.Response:
        """Return a file of the dashboard page; 404 for any other name."""
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound
        return self._answer(request, name)

    def _answer(self, request: web.Request, name: str) -> web.Response:
        """Return the file, or 304 if the browser has the current version."""
        data, tag, headers = self._files[name]
        if any(known.value == tag for known in request.if_none_match or ()):
            return web.Response(status=304, headers={key: headers[key] for key in headers if key != "Content-Type"})
        return web.Response(body=data, headers=headers)


class RouterHistory:
    """The sampler and the handler; one per router."""

    def __init__(self, observer: Observer, admission: Admission, history: History) -> None:
        self.history = history
        self._observer = observer
        self._admission = admission
        self._traffic: dict[Worker, StoreTraffic] = {}

    async def get(self, request: web.Request) -> web.Response:
        """Return the history of the fleet or of one worker; docs/dashboard.md lists its fields."""
        try:
            body = self.history.answer(request.query, time.time())
        except RequestError as error:
            return refused(HttpRefusal.of(error))
        return json_response(body, headers={"Cache-Control": "no-store"})

    async def run(self) -> None:
        """Record a point every `INTERVAL_S`. Returns only by cancellation."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.sample()

    async def sample(self) -> None:
        """Record a point now."""
        answers = await self._observer.answers()
        now = self._admission.now()
        gauges = {worker: self._gauges(worker, answer, now) for worker, answer in answers.items()}
        self._traffic = {worker: known for worker, known in self._traffic.items() if worker in answers}
        fleet = summed(gauges.values())
        fleet["queued"] = (fleet["queued"] or 0) + self._admission.num_waiting
        fleet["running"] = sum(worker.inflight for worker in answers if worker.spec.role is not WorkerRole.PREFILL)
        known = [answer for answer in answers.values() if answer is not None]
        fleet["kv_transfer"] = transfer_rate([edge for answer in known for edge in answer.edges])
        self.history.record(time.time(), fleet, {worker.spec.url: found for worker, found in gauges.items()})

    def _gauges(self, worker: Worker, answer: ObserveReply | None, now: float) -> Gauges:
        """Return the gauges of a worker; without an answer only the requests that the router has sent there."""
        if answer is None:
            self._traffic.pop(worker, None)
            return {"running": worker.inflight}
        states = [one.state for one in answer.replicas if one.state is not None]
        found = state_gauges(states)
        found["accept_length"] = answer.rates.spec_accept_length or None
        if worker.spec.role is not WorkerRole.PREFILL:
            found["tokens_per_s"] = answer.rates.generation_tokens_per_s
        if worker.spec.role is not WorkerRole.DECODE:
            found["cache_hit_rate"] = answer.rates.cache_hit_rate
        found["kv_transfer"] = transfer_rate(answer.edges)
        tiers = [state.tiers for state in states if state.tiers.store is not None]
        if tiers:
            read = sum(tier.store_read_bytes or 0 for tier in tiers)
            written = sum(tier.store_written_bytes or 0 for tier in tiers)
            found |= self._traffic.setdefault(worker, StoreTraffic()).rates(now, read, written)
        return found


def state_gauges(states: list[StateSnapshot]) -> Gauges:
    """Return queues and KV memory of a server, summed over its replicas; empty before the schedulers' first answer."""
    if not states:
        return {}
    found: Gauges = {
        "running": sum(state.running for state in states),
        "queued": sum(state.waiting for state in states),
        "kv_device_used": sum(state.tokens.used for state in states),
        "kv_device_total": sum(state.tokens.max for state in states),
    }
    if any(state.tiers.host_max for state in states):
        found["kv_host_used"] = sum(state.tiers.host_used or 0 for state in states)
        found["kv_host_total"] = sum(state.tiers.host_max or 0 for state in states)
    return found


def transfer_rate(edges: Iterable[EdgeSnapshot]) -> float | None:
    """Return the bytes a second of all KV transfers; one or two servers report each. None without a report."""
    rates: dict[tuple[str | None, str | None], float] = {}
    for edge in edges:
        ends = edge.source, edge.target
        rates[ends] = max(rates.get(ends, 0.0), edge.gb_per_s * 1e9)
    return sum(rates.values()) if rates else None


def summed(gauges: Iterable[Gauges]) -> Gauges:
    """Return the fleet's gauges: sums, and the means of accept length and hit rate over the workers that have them."""
    found = list(gauges)
    total: Gauges = {}
    for name in SUMMED:
        values = [value for one in found if (value := one.get(name)) is not None]
        total[name] = sum(values) if values else None
    for name in AVERAGED:
        values = [value for one in found if (value := one.get(name)) is not None]
        total[name] = sum(values) / len(values) if values else None
    return total
