"""The router's HTTP application: routes, and the objects behind them. `launch_router` runs the result of `make_app`.

The app must run with handler cancellation (`aiohttp.web.AppRunner(..., handler_cancellation=True)`), which ends both
halves of a request when its client disconnects.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator

import aiohttp
import orjson
from aiohttp import web

import pdserve
from pdserve.base.log_ring import PATH as LOGS_PATH
from pdserve.http.access import (
    COUNT_TOKENS_PATH,
    GENERATING,
    OLLAMA_PS_PATH,
    OLLAMA_SHOW_PATH,
    OLLAMA_TAGS_PATH,
    OLLAMA_VERSION_PATH,
    BodyBudget,
)
from pdserve.http.response_store import ResponseStore
from pdserve.http.session_store import OpenSessions
from pdserve.observe.history import PATH as HISTORY_PATH
from pdserve.observe.history import History
from pdserve.observe.interval_stats import RouterStats, log_router_stats
from pdserve.observe.tracing import open_tracing
from pdserve.router.config.config import RouterConfig
from pdserve.router.dashboard.observe import PATH as OBSERVE_PATH
from pdserve.router.dashboard.observe import Observer
from pdserve.router.dashboard.page import DashboardPage, RouterHistory
from pdserve.router.discovery.kube_api import KubeAccess, KubeApi
from pdserve.router.discovery.pods import PodDiscovery, PodWorkers
from pdserve.router.http import (
    BODY,
    RETRY_AFTER,
    Access,
    error_response,
    json_response,
)
from pdserve.router.openapi import PATH as OPENAPI_PATH
from pdserve.router.openapi import OpenApi
from pdserve.router.policies import KVAware
from pdserve.router.proxy.attempts import SHUTTING_DOWN, WRITE_S, Drain
from pdserve.router.proxy.dispatch import Dispatcher
from pdserve.router.proxy.generate import GenerateHandler
from pdserve.router.proxy.migration import PATH as MIGRATE_PATH
from pdserve.router.proxy.migration import Migrator
from pdserve.router.proxy.prompt_tokens import PromptTokenizer
from pdserve.router.proxy.relay import failure_response
from pdserve.router.proxy.replication import PATH as REPLICATE_PATH
from pdserve.router.proxy.replication import PrefixReplication
from pdserve.router.proxy.sessions import RouterSessions
from pdserve.router.proxy.stored_responses import StoredResponses
from pdserve.router.proxy.watchdog import PairWatchdog
from pdserve.router.workers.admission import OTHER_TOKENS, Admission
from pdserve.router.workers.api import WorkersApi
from pdserve.router.workers.engine_metrics import PATH as ENGINE_METRICS_PATH
from pdserve.router.workers.engine_metrics import EngineMetrics
from pdserve.router.workers.fanout import GROUP_COMMANDS, MEMORY_COMMANDS, UPDATES, WorkerFanout
from pdserve.router.workers.health import HealthMonitor
from pdserve.router.workers.kv_events import KVEventSubscriptions
from pdserve.router.workers.metrics import RouterMetrics
from pdserve.router.workers.outcome import make_session
from pdserve.router.workers.role_switch import PATH as ROLE_SWITCH_PATH
from pdserve.router.workers.role_switch import RoleSwitch
from pdserve.router.workers.workers import Registry, Worker

ASKED = (
    *("/v1/models", "/v1/models/{name:.+}", "/get_model_info", "/model_info"),
    *("/get_weight_version", "/weight_version", "/get_weights_by_name"),
    *(OLLAMA_TAGS_PATH, OLLAMA_PS_PATH, OLLAMA_VERSION_PATH),
)
ASKED_WITH_BODY = (
    *("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"),
    *("/parse_function_call", "/separate_reasoning", "/get_weights_by_name", COUNT_TOKENS_PATH, OLLAMA_SHOW_PATH),
)
COMMANDS = (
    *("/flush_cache", "/pause_generation", "/continue_generation", "/start_profile", "/stop_profile"),
    *("/load_lora_adapter", "/unload_lora_adapter"),
    *MEMORY_COMMANDS,
)
FORWARDED = (*GENERATING, *ASKED, *ASKED_WITH_BODY, *COMMANDS, *UPDATES, "/abort_request")
"""Paths that are forwarded to workers with few or no changes."""
TICK_S = 1.0


class RouterApp:
    """The components of one router, and handlers that use several of them. Created inside a running event loop."""

    def __init__(
        self, config: RouterConfig, session: aiohttp.ClientSession, bodies: BodyBudget, kube: KubeAccess | None
    ) -> None:
        rng = random.SystemRandom()
        self.bodies = bodies
        self._config = config
        self.metrics = RouterMetrics()
        self.registry = Registry(config.breaker)
        self.admission = Admission(config, self.registry, self.metrics, rng)
        with_loads = any(policy.uses_load for policy in self.admission.policies.values())
        self.health = HealthMonitor(config, self.registry, session, self.admission.wake, with_loads=with_loads)
        self._drain = Drain()
        self._discovery: PodDiscovery | None = None
        if config.discovery is not None and kube is not None:
            found = PodWorkers(config.discovery, self.registry, self.admission.wake)
            self._discovery = PodDiscovery(config.discovery, KubeApi(kube), found, self.metrics, rng)
        dispatcher = Dispatcher(
            config, self.registry, self.admission, self.health, session, self.metrics, rng, self._drain
        )
        self.watchdog = PairWatchdog(
            config, self.registry, self.admission.pairs, session, self.metrics, self._drain, rng, self.admission.wake
        )
        self.health.on_up.append(self.watchdog.compare_tokens)
        self._fanout = WorkerFanout(config, self.registry, self.health, session, self.watchdog.recheck)
        indexes = {
            role: policy.index for role, policy in self.admission.policies.items() if isinstance(policy, KVAware)
        }
        self.kv_events = KVEventSubscriptions(indexes, self.health, self.metrics)
        self._workers_api = WorkersApi(
            config, self.registry, self.admission.wake, self.admission.now, self.kv_events.describe
        )
        self._role_switch = RoleSwitch(
            config, self.registry, self.health, session, self.admission.wake, self.admission.now
        )
        self._migrator = Migrator(config, self.registry, self.admission, session, self.metrics, self._drain, rng)
        self._replication = PrefixReplication(config, self.registry, session, rng)
        history = History()
        self._observer = Observer(config, self.registry, self.admission, session, self._drain, history.failures)
        self.history = RouterHistory(self._observer, self.admission, history)
        self._engine_metrics = EngineMetrics(config, self.registry, session, self.admission.now)
        self._openapi = OpenApi(self._fanout, FORWARDED, self.routes, with_keys=config.access.keys.some)
        self._page = DashboardPage()
        self._stats = RouterStats()
        self._background: list[asyncio.Task[None]] = []
        endpoint = config.otlp_traces_endpoint
        self._tracing = None if endpoint is None else open_tracing("router", "", endpoint)
        self._responses = StoredResponses(
            ResponseStore(config.responses.limits, time.monotonic), config.access.keys, config.request_timeout_s
        )
        self._sessions = RouterSessions(
            OpenSessions(time.monotonic), config.access.keys, self._fanout, self.admission, self._drain
        )
        uses_tokens = any(policy.uses_tokens for policy in self.admission.policies.values())
        tokenizer = PromptTokenizer(self._fanout, self.metrics, enabled=uses_tokens)
        self._handler = GenerateHandler(
            *(config, dispatcher, self.admission, self.metrics, self._stats, self.history.history, bodies),
            *(self._drain, self._tracing, self._responses, self._sessions, tokenizer),
        )
        for spec in config.workers:
            self.registry.add(spec)

    async def start(self) -> None:
        """Check every worker once, then start the health checks; workers that are added later are checked, too."""
        await self.health.start()
        self.registry.on_added.append(self.health.watch)
        self.registry.on_forgotten.append(self._forget)
        self._background.append(asyncio.create_task(self._tick()))
        self._background.append(asyncio.create_task(self.history.run()))
        if self._config.log_stats_interval_s:
            stats = log_router_stats(self._stats, self._gauges, self._config.log_stats_interval_s)
            self._background.append(asyncio.create_task(stats))
        self.watchdog.start()
        if self._discovery is not None:
            self._discovery.start()

    async def close(self) -> None:
        """Stop all background tasks."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._responses.background.close()
        if self._discovery is not None:
            await self._discovery.close()
        await self._migrator.close()
        await self.watchdog.close()
        await self._observer.close()
        await self._engine_metrics.close()
        await self.health.close()
        await self.kv_events.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def _gauges(self) -> dict[str, int]:
        """Return the load for the statistics line."""
        workers = self.registry.workers
        return {
            "queued": self.admission.num_waiting,
            "workers": len(workers),
            "workers_up": sum(worker.healthy for worker in workers),
        }

    async def drain(self, timeout_s: float, hurry: asyncio.Event) -> None:
        """Refuse new and queued requests; running requests get `timeout_s` seconds, or until `hurry` is set.

        Requests that still run then end with an error. The application serves until its runner stops it.
        """
        self._drain.close()
        self.admission.refuse_waiting(SHUTTING_DOWN)
        told = asyncio.create_task(hurry.wait())
        empty = asyncio.create_task(self._drain.empty(timeout_s))
        await asyncio.wait({told, empty}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        empty.cancel()
        self._drain.abort_all()
        self.admission.refuse_waiting(SHUTTING_DOWN)
        await self._drain.empty(WRITE_S)

    async def abort(self, request: web.Request) -> web.Response:
        """Abort requests: refuse those in the router's queue, and forward the command to every worker."""
        try:
            async with self.bodies.turn(len(request[BODY])):
                body = orjson.loads(request[BODY] or b"{}")
        except orjson.JSONDecodeError as error:
            return error_response(400, f"the body is not JSON: {error}", "invalid_request")
        if isinstance(body, dict):
            rid = body.get("rid")
            if body.get("abort_all") is True:
                self.admission.abort(None)
            elif isinstance(rid, str) and rid:
                self.admission.abort(rid)
        return await self._fanout.fan_out(request)

    async def ready(self, request: web.Request) -> web.Response:
        """200 while requests can be served: a pair of healthy, not draining workers exists that is not down."""
        if self._drain.closed:
            return failure_response(SHUTTING_DOWN)
        if not self.admission.could_serve():
            why = OTHER_TOKENS.message if self.admission.pairs.any_differ else "no healthy pair of workers"
            return error_response(503, why, "no_worker", RETRY_AFTER)
        return json_response({"status": "ok"})

    async def version(self, request: web.Request) -> web.Response:
        """Return the router's version."""
        return json_response({"version": pdserve.__version__})

    async def alive(self, request: web.Request) -> web.Response:
        """Liveness: 200 while the router runs."""
        return json_response({"status": "ok"})

    async def show_metrics(self, request: web.Request) -> web.Response:
        """Return the router's metrics in Prometheus text format."""
        self.metrics.show(self.registry.workers, self.admission.num_waiting, self.admission.now())
        self.metrics.show_pairs(self.admission.pairs)
        self.kv_events.show(self.registry.workers)
        return web.Response(body=self.metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4"})

    def routes(self) -> list[web.RouteDef]:
        """Return all routes of the router."""
        fanout = self._fanout
        return [
            *(web.post(path, self._handler.handle) for path in GENERATING),
            *self._responses.routes(),
            *(web.get(path, fanout.proxy) for path in ASKED),
            *(web.post(path, fanout.proxy) for path in ASKED_WITH_BODY),
            *(web.get(path, fanout.server_info) for path in ("/get_server_info", "/server_info")),
            *(web.get(path, fanout.loads) for path in ("/get_loads", "/v1/loads")),
            web.get("/get_load", fanout.load),
            web.get("/version", self.version),
            *(web.post(path, fanout.fan_out) for path in COMMANDS),
            *(web.post(path, fanout.update_weights) for path in UPDATES),
            *(web.post(path, fanout.refuse_group) for path in GROUP_COMMANDS),
            *(
                web.get(path, fanout.fan_out)
                for path in ("/flush_cache", "/start_profile", "/stop_profile", *MEMORY_COMMANDS)
            ),
            web.post("/abort_request", self.abort),
            *self._sessions.routes(),
            web.get("/health_generate", fanout.health_generate),
            *(web.get(path, self.ready) for path in ("/health", "/readiness", "/ready")),
            *(web.get(path, self.alive) for path in ("/liveness", "/ping")),
            web.get("/metrics", self.show_metrics),
            web.get(ENGINE_METRICS_PATH, self._engine_metrics.get),
            *self._workers_api.routes(),
            web.post(ROLE_SWITCH_PATH, self._role_switch.post),
            web.post(MIGRATE_PATH, self._migrator.post),
            web.post(REPLICATE_PATH, self._replication.post),
            web.get(OPENAPI_PATH, self._openapi.get),
            *self._openapi.page_routes(),
            web.get(OBSERVE_PATH, self._observer.get),
            web.get(LOGS_PATH, self._fanout.logs),
            web.get(HISTORY_PATH, self.history.get),
            *self._page.routes(),
        ]

    def _forget(self, worker: Worker) -> None:
        self.health.unwatch(worker)
        self.kv_events.forget(worker)
        self.metrics.forget(worker)
        for policy in self.admission.policies.values():
            policy.forget(worker.spec.url)

    async def _tick(self) -> None:
        """Call `tick` of the policies every `TICK_S`, and wake the queue, since a breaker may have become half open."""
        while True:
            for policy in self.admission.policies.values():
                policy.tick(self.admission.now())
            self.admission.wake()
            await asyncio.sleep(TICK_S)


ROUTER = web.AppKey("router", RouterApp)


def make_app(config: RouterConfig) -> web.Application:
    """Build the aiohttp application; health checks run from its start-up to its clean-up.

    Raises:
        ConfigError: a certificate is not usable, or service discovery finds no Kubernetes API.
    """
    kube = None if config.discovery is None else KubeAccess.of(config.discovery, os.environ)
    app = web.Application(client_max_size=config.max_request_bytes)
    access = Access(config.access, config.max_request_bytes, logs_access=config.access_log)
    access.install(app)
    session = make_session(config)
    router = RouterApp(config, session, access.bodies, kube)
    app.add_routes(router.routes())
    app[ROUTER] = router

    async def run(_: web.Application) -> AsyncIterator[None]:
        await router.start()
        yield
        await router.close()
        await session.close()

    app.cleanup_ctx.append(run)
    return app
