"""The router's HTTP side: routes, and the parts put together. `launch_router` runs what `make_app` returns.

The app must run with handler cancellation (`aiohttp.web.AppRunner(..., handler_cancellation=True)`): that is how a
client's disconnect ends both halves of its request.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from pdserve.router.config import Role, RouterConfig
from pdserve.router.dispatch import Call, Dispatcher
from pdserve.router.metrics import RouterMetrics
from pdserve.router.relay import RETRY_AFTER, error_response, relay
from pdserve.router.rooms import CHAT_PATH, COMPLETIONS_PATH, GENERATE_PATH
from pdserve.router.upstream import forwarded_headers, make_session
from pdserve.router.workers import Worker, WorkerPool

INFO_TIMEOUT_S = 10.0
INFO_TIMEOUT = aiohttp.ClientTimeout(total=INFO_TIMEOUT_S)
MAX_EXTRA_S = 600.0
CLIENT_GONE = "499"


def explain_not_json(data: bytes, error: orjson.JSONDecodeError) -> str:
    """Why `data` is refused. NaN and Infinity, which Python clients write though JSON lacks them, by their field."""
    try:
        field = _non_finite(json.loads(data))
    except (ValueError, RecursionError):
        field = None
    return f"the body is not JSON: {error}" if field is None else f"{field} must be a finite number"


def _non_finite(value: object, name: str = "the body") -> str | None:
    """The name of the first field in `value` that is NaN or infinite."""
    if isinstance(value, float):
        return None if math.isfinite(value) else name
    items = value.items() if isinstance(value, dict) else [(name, v) for v in value] if isinstance(value, list) else ()
    return next((found for key, item in items if (found := _non_finite(item, key)) is not None), None)


class RouterApp:
    """The handlers of one router. Created inside a running event loop."""

    def __init__(self, config: RouterConfig, session: aiohttp.ClientSession) -> None:
        rng = random.SystemRandom()
        self._config = config
        self._session = session
        self._metrics = RouterMetrics()
        self.pool = WorkerPool(config, session, self._metrics, rng)
        self._dispatcher = Dispatcher(config, self.pool, session, self._metrics, rng)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST of the three generating paths."""
        try:
            response = await self._generate(request)
        except (asyncio.CancelledError, ConnectionError):
            self._metrics.disconnects.inc()
            self._metrics.requests.labels(request.path, CLIENT_GONE).inc()
            raise
        self._metrics.requests.labels(request.path, str(response.status)).inc()
        return response

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        deadline = asyncio.get_running_loop().time() + self._config.request_timeout_s
        try:
            data = await request.read()
            body = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            return error_response(400, explain_not_json(data, error), "invalid_request")
        except web.HTTPRequestEntityTooLarge:
            text = f"the body is larger than {self._config.max_request_bytes} bytes"
            return error_response(413, text, "invalid_request")
        if not isinstance(body, dict):
            return error_response(400, f"the body must be a JSON object, got {type(body).__name__}", "invalid_request")
        call = Call(request.path, body, forwarded_headers(request.headers))
        try:
            async with asyncio.timeout_at(deadline) as limit, self._dispatcher.answer(call) as outcome:
                limit.reschedule(None)
                return await relay(request, outcome, deadline)
        except orjson.JSONEncodeError as error:
            return error_response(400, f"the body is nested too deeply: {error}", "invalid_request")
        except TimeoutError:
            text = f"no answer within the router's --request-timeout of {self._config.request_timeout_s:g} s"
            return error_response(504, text, "timeout")

    async def proxy(self, request: web.Request) -> web.Response:
        """GET answered by one healthy worker, decode first (its answers are the client's)."""
        workers = [worker for role in (Role.REGULAR, Role.DECODE, Role.PREFILL) for worker in self.pool.healthy(role)]
        for worker in workers:
            found = await self._get(worker, request.path)
            if found is not None:
                status, body = found
                return web.Response(status=status, body=body, content_type="application/json")
        return error_response(503, "no healthy worker", "no_worker", RETRY_AFTER)

    async def server_info(self, request: web.Request) -> web.Response:
        """One decode worker's facts at the top, and all workers' under their role."""
        workers = [worker for worker in self.pool.workers if worker.healthy]
        answers = await asyncio.gather(*(self._get_object(worker, "/get_server_info") for worker in workers))
        merged: dict[str, Any] = {}
        by_role: dict[str, list[dict[str, Any]]] = {role.value: [] for role in Role}
        for worker, info in zip(workers, answers, strict=True):
            by_role[worker.spec.role].append(info | {"url": worker.spec.url})
        for info in [*by_role[Role.REGULAR], *by_role[Role.DECODE]][:1]:
            merged |= info
        return _json(merged | by_role)

    async def fan_out(self, request: web.Request) -> web.Response:
        """Pass a request on to every healthy worker; 200 when all said 200, else the worst status."""
        body = await request.read()
        workers = [worker for worker in self.pool.workers if worker.healthy]
        if not workers:
            return error_response(503, "no healthy worker", "no_worker", RETRY_AFTER)
        statuses = await asyncio.gather(*(self._pass_on(request, worker, body) for worker in workers))
        answers = {worker.spec.url: status for worker, status in zip(workers, statuses, strict=True)}
        return _json({"success": max(statuses) < 400, "workers": answers}, status=max(statuses))

    async def health(self, request: web.Request) -> web.Response:
        """200 while a request could be served: at least one pair is alive."""
        if self.pool.pick() is None:
            return error_response(503, "no healthy pair of workers", "no_worker", RETRY_AFTER)
        return _json({"status": "ok"})

    async def workers(self, request: web.Request) -> web.Response:
        """The state of every worker."""
        return _json({"workers": [_describe(worker) for worker in self.pool.workers]})

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text."""
        return web.Response(body=self._metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4"})

    def routes(self) -> list[web.RouteDef]:
        """Every path that the router serves."""
        generating = (CHAT_PATH, COMPLETIONS_PATH, GENERATE_PATH)
        proxied = ("/v1/models", "/get_model_info", "/model_info")
        return [
            *(web.post(path, self.generate) for path in generating),
            *(web.get(path, self.proxy) for path in proxied),
            *(web.get(path, self.server_info) for path in ("/get_server_info", "/server_info")),
            *(web.get(path, self.health) for path in ("/health", "/readiness")),
            *(web.post(path, self.fan_out) for path in ("/flush_cache", "/abort_request")),
            web.get("/flush_cache", self.fan_out),
            web.get("/workers", self.workers),
            web.get("/metrics", self.metrics),
        ]

    async def _get(self, worker: Worker, path: str) -> tuple[int, bytes] | None:
        """Status and body; None where the worker does not answer."""
        try:
            async with self._session.get(worker.spec.url + path, timeout=INFO_TIMEOUT) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError):
            return None

    async def _get_object(self, worker: Worker, path: str) -> dict[str, Any]:
        """The worker's JSON object; one that says why where there is none."""
        found = await self._get(worker, path)
        if found is None or found[0] != 200:
            return {"error": "no answer" if found is None else f"status {found[0]}"}
        try:
            parsed = orjson.loads(found[1])
        except orjson.JSONDecodeError as error:
            return {"error": f"not JSON: {error}"}
        return parsed if isinstance(parsed, dict) else {"error": f"not an object: {type(parsed).__name__}"}

    async def _pass_on(self, request: web.Request, worker: Worker, body: bytes) -> int:
        """The worker's status; 502 where it does not answer."""
        try:
            async with self._session.request(
                request.method,
                worker.spec.url + request.path_qs,
                data=body,
                headers=forwarded_headers(request.headers),
                timeout=_patience(request),
            ) as response:
                return response.status
        except (aiohttp.ClientError, OSError):
            return 502


def make_app(config: RouterConfig) -> web.Application:
    """The aiohttp application; workers are watched from its start-up to its clean-up."""
    app = web.Application(client_max_size=config.max_request_bytes)
    session = make_session(config)
    router = RouterApp(config, session)
    app.add_routes(router.routes())

    async def watch(_: web.Application) -> AsyncIterator[None]:
        await router.pool.start()
        yield
        await router.pool.close()
        await session.close()

    app.cleanup_ctx.append(watch)
    return app


def _patience(request: web.Request) -> aiohttp.ClientTimeout:
    """How long a worker may take; longer by the `timeout` in seconds that `/flush_cache` may wait for idle."""
    text = request.query.get("timeout", "")
    extra_s = float(text) if text.replace(".", "", 1).isdecimal() else 0.0
    return aiohttp.ClientTimeout(total=INFO_TIMEOUT_S + min(extra_s, MAX_EXTRA_S))


def _describe(worker: Worker) -> dict[str, Any]:
    return {
        "url": worker.spec.url,
        "worker_type": worker.spec.role.value,
        "bootstrap_port": worker.bootstrap_port,
        "is_healthy": worker.healthy,
        "load": worker.inflight,
        "last_error": worker.last_error,
    }


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json")
