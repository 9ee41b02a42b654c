"""The dashboard of one server: the page at `/dashboard`, and its own `GET /observe/history`. `create_app` installs it.

    live requests ──> ServerMetrics.history <── ServerHistory.run, every 5 s: the schedulers' state

A server behind a router has the page too: it shows this server alone.
"""

from __future__ import annotations

import asyncio
import time

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from pdserve.http.page_files import DASHBOARD_PATH, INDEX, PAGE_FILES, PageFile, read_page_files
from pdserve.observe.history import INTERVAL_S, PATH, StoreTraffic
from pdserve.protocol.engine_state import EngineState
from pdserve.server.context import ServerContext
from pdserve.server.http.json_http import json_response
from pdserve.server.sglang_api.health import STATE_TIMEOUT_S

Gauges = dict[str, float | None]


class ServerHistory:
    """Samples the gauges of one server. Event loop only."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._traffic = StoreTraffic()

    async def run(self) -> None:
        """Record a point every `INTERVAL_S`. Returns only by cancellation."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.sample()

    async def sample(self) -> None:
        """Record a point now."""
        metrics = self._context.metrics
        state = await self._context.client.state(STATE_TIMEOUT_S)
        metrics.speculation.add(state)
        gauges = {} if state is None else self._gauges(state)
        acceptance = metrics.speculation.whole()
        gauges["accept_length"] = None if acceptance is None else acceptance.accept_length
        gauges["tokens_per_s"] = metrics.tokens_per_s
        if self._context.mode != "decode":
            gauges["cache_hit_rate"] = metrics.cache_hit_rate
        metrics.history.record(time.time(), gauges)

    def _gauges(self, state: EngineState) -> Gauges:
        states = state.replicas or [state]
        found: Gauges = {
            "running": state.num_running_reqs,
            "queued": state.num_queue_reqs,
            "kv_device_used": state.num_used_tokens,
            "kv_device_total": state.max_total_tokens,
        }
        flows = [flow for one in states for peer in one.peers for flow in (peer.sent, peer.received)]
        if flows:
            found["kv_transfer"] = sum(flow.recent_bytes_s for flow in flows)
        if any("hicache_host_total_tokens" in one.memory for one in states):
            found["kv_host_used"] = sum(one.memory.get("hicache_host_used_tokens", 0) for one in states)
            found["kv_host_total"] = sum(one.memory.get("hicache_host_total_tokens", 0) for one in states)
        if any("hicache_storage_backend" in one.facts for one in states):
            read, written = (_total(states, f"hicache_storage_bytes_{name}") for name in ("read", "written"))
            found |= self._traffic.rates(time.monotonic(), read, written)
        return found


def _total(states: list[EngineState], name: str) -> float:
    return sum(float(one.facts.get(name) or 0) for one in states)


def install(app: FastAPI, context: ServerContext) -> ServerHistory:
    """Add the routes to `app`, which runs the returned object. The page's files are no part of the API's document."""
    files = read_page_files()

    async def page(request: Request) -> Response:
        return _file(request, files[INDEX])

    async def file(request: Request) -> Response:
        found = files.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return _file(request, found)

    @app.get(PATH, response_model=None)
    async def get_history(request: Request) -> Response:
        return json_response(context.metrics.history.answer(request.query_params, time.time()))

    app.add_route(DASHBOARD_PATH, page, methods=["GET"])
    app.add_route(PAGE_FILES, file, methods=["GET"])
    return ServerHistory(context)


def _file(request: Request, file: PageFile) -> Response:
    """Return the file, or 304 if the browser has the current version."""
    if f'"{file.tag}"' in request.headers.get("If-None-Match", ""):
        return Response(
            status_code=304, headers={name: file.headers[name] for name in file.headers if name != "Content-Type"}
        )
    return Response(file.data, headers=file.headers)
