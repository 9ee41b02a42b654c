"""Questions that workers answer, and commands that go to all of them: everything but generation. Called by `app`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from pdserve.base.http_rules import error_object
from pdserve.router.config.config import RouterConfig, WorkerRole
from pdserve.router.http.access import BODY, is_admin
from pdserve.router.http.errors import RETRY_AFTER, error_response, json_response
from pdserve.router.workers.health import HealthMonitor
from pdserve.router.workers.outcome import WorkerResponse, forwarded_headers, own_headers, returned_headers
from pdserve.router.workers.workers import Registry, Worker

INFO_TIMEOUT_S = 10.0
GENERATE_TIMEOUT_S = 30.0
MAX_EXTRA_S = 600.0


class WorkerFanout:
    """The handlers that ask workers."""

    def __init__(
        self, config: RouterConfig, registry: Registry, health: HealthMonitor, session: aiohttp.ClientSession
    ) -> None:
        self._config = config
        self._registry = registry
        self._health = health
        self._session = session

    async def proxy(self, request: web.Request) -> web.Response:
        """Answered by one living worker, decode first (its answers are the client's)."""
        body = request[BODY]
        for worker in self._preferred():
            found = await self._call(request, worker, body)
            if found is not None:
                return web.Response(status=found.status, headers=found.headers, body=found.body)
        return error_response(503, "no healthy worker", "no_worker", RETRY_AFTER)

    async def server_info(self, request: web.Request) -> web.Response:
        """One decode worker's facts at the top, and all workers' under their role."""
        workers = self._alive()
        answers = await asyncio.gather(*(self._get_object(request, worker) for worker in workers))
        merged: dict[str, Any] = {}
        by_role: dict[str, list[dict[str, Any]]] = {role.value: [] for role in WorkerRole}
        for worker, info in zip(workers, answers, strict=True):
            by_role[worker.spec.role].append(info | {"url": worker.spec.url})
        for info in [*by_role[WorkerRole.REGULAR], *by_role[WorkerRole.DECODE]][:1]:
            merged |= info
        return json_response(merged | by_role)

    async def document(self, request: web.Request) -> dict[str, Any]:
        """The OpenAPI document of a worker that has one, decode first; `{}` where none has."""
        for worker in self._preferred():
            found = await self._get_object(request, worker)
            if isinstance(found.get("paths"), dict):
                return found
        return {}

    async def loads(self, request: web.Request) -> web.Response:
        """What every living worker holds now, in tokens; -1 where it does not say. SGLang's form and more."""
        workers = self._alive()
        reports = await asyncio.gather(*(self._health.ask_load(worker) for worker in workers))
        listed = [
            {
                "worker": worker.spec.url,
                "worker_type": worker.spec.role.value,
                "load": -1 if report is None else report.tokens,
                "num_reqs": None if report is None else report.requests,
                "inflight": worker.inflight,
            }
            for worker, report in zip(workers, reports, strict=True)
        ]
        return json_response({"workers": listed})

    async def load(self, request: web.Request) -> web.Response:
        """The load of every replica of every living worker, in one list as a server's own, with its worker."""
        workers = self._alive()
        answers = await asyncio.gather(*(self._call(request, worker, None) for worker in workers))
        listed = [
            {**entry, "worker": worker.spec.url, "worker_type": worker.spec.role.value}
            for worker, answer in zip(workers, answers, strict=True)
            for entry in _load_entries(answer)
        ]
        return json_response(listed)

    async def health_generate(self, request: web.Request) -> web.Response:
        """200 when one worker of each role has just generated a token; the body says who has."""
        workers = self._alive()
        found = await asyncio.gather(*(self._call(request, worker, None, GENERATE_TIMEOUT_S) for worker in workers))
        statuses = _statuses(workers, found)
        good = {worker.spec.role for worker in workers if statuses[worker.spec.url] == 200}
        return json_response({"workers": statuses}, status=200 if good >= set(self._config.roles) else 503)

    async def fan_out(self, request: web.Request) -> web.Response:
        """Pass a request on to every living worker; 200 when all said 200, else the worst status."""
        body = request[BODY]
        workers = self._alive()
        if not workers:
            return error_response(503, "no healthy worker", "no_worker", RETRY_AFTER)
        answers = await asyncio.gather(*(self._call(request, worker, body) for worker in workers))
        statuses = _statuses(workers, answers)
        worst = max(statuses.values())
        said = {} if worst < 400 else {"error": _error_of(workers, answers, worst)}
        return json_response({"success": worst < 400, "workers": statuses, **said}, status=worst)

    def _preferred(self) -> list[Worker]:
        """Those that may get new requests, in the order in which they are asked what any of them can answer."""
        return [
            worker
            for role in (WorkerRole.REGULAR, WorkerRole.DECODE, WorkerRole.PREFILL)
            for worker in self._registry.usable(role)
        ]

    def _alive(self) -> list[Worker]:
        """Draining ones too: requests still run there."""
        return [worker for worker in self._registry.workers if worker.healthy]

    async def _get_object(self, request: web.Request, worker: Worker) -> dict[str, Any]:
        """The worker's JSON object; one that says why where there is none."""
        found = await self._call(request, worker, None)
        if found is None or found.status != 200:
            return {"error": "no answer" if found is None else f"status {found.status}"}
        try:
            parsed = orjson.loads(found.body)
        except orjson.JSONDecodeError as error:
            return {"error": f"not JSON: {error}"}
        return parsed if isinstance(parsed, dict) else {"error": f"not an object: {type(parsed).__name__}"}

    async def _call(
        self, request: web.Request, worker: Worker, body: bytes | None, timeout_s: float | None = None
    ) -> WorkerResponse | None:
        """The same request to a worker; None where it does not answer."""
        timeout = _patience(request) if timeout_s is None else aiohttp.ClientTimeout(total=timeout_s)
        headers: CIMultiDict[str] = forwarded_headers(request.headers, request.remote)
        headers.popall("Accept-Encoding", None)
        access = self._config.access
        command = is_admin(request.method, request.path)
        headers.update(own_headers(worker, access.admin_key_for_workers if command else access.key_for_workers))
        url = URL(worker.spec.url + request.path_qs, encoded=True)  # as it came: what was checked is what is asked
        try:
            async with self._session.request(
                request.method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                return WorkerResponse(
                    worker, response.status, returned_headers(response.headers), await response.read()
                )
        except (aiohttp.ClientError, OSError):
            return None


def _statuses(workers: Sequence[Worker], answers: Sequence[WorkerResponse | None]) -> dict[str, int]:
    """By URL; 502 for who did not answer."""
    return {worker.spec.url: 502 if one is None else one.status for worker, one in zip(workers, answers, strict=True)}


def _error_of(workers: Sequence[Worker], answers: Sequence[WorkerResponse | None], status: int) -> dict[str, Any]:
    """OpenAI's error object of the first worker that answered with `status`, and which worker that was."""
    statuses = _statuses(workers, answers)
    worker, answer = next(one for one in zip(workers, answers, strict=True) if statuses[one[0].spec.url] == status)
    said = None if answer is None else _parsed(answer.body)
    error = said.get("error") if isinstance(said, dict) else None
    if not isinstance(error, dict):
        message = f"{worker.spec.url} " + ("does not answer" if answer is None else f"answered {status}")
        error = error_object(message, status, code="worker")["error"]
    return error | {"worker": worker.spec.url}


def _load_entries(answer: WorkerResponse | None) -> list[dict[str, Any]]:
    """What a worker says of its replicas; nothing where it does not say."""
    said = None if answer is None or answer.status != 200 else _parsed(answer.body)
    return [entry for entry in said if isinstance(entry, dict)] if isinstance(said, list) else []


def _parsed(body: bytes) -> Any:
    """None where it is no JSON."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _patience(request: web.Request) -> aiohttp.ClientTimeout:
    """How long a worker may take; longer by the `timeout` in seconds that `/flush_cache` may wait for idle."""
    text = request.query.get("timeout", "")
    extra_s = float(text) if text.replace(".", "", 1).isdecimal() else 0.0
    return aiohttp.ClientTimeout(total=INFO_TIMEOUT_S + min(extra_s, MAX_EXTRA_S))
