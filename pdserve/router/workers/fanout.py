"""Requests other than generation: queries to one or all workers, and commands to all workers. Called by `app`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from pdserve.base.log_ring import last_lines, parse_num_lines
from pdserve.base.redaction import Redactor, secrets_of
from pdserve.errors import RequestError
from pdserve.http.errors import HttpRefusal, error_object
from pdserve.router.config.config import RouterConfig, WorkerRole
from pdserve.router.http import BODY, RETRY_AFTER, error_response, is_admin, json_response, refused
from pdserve.router.workers.health import HealthMonitor
from pdserve.router.workers.outcome import WorkerResponse, forwarded_headers, own_headers, returned_headers
from pdserve.router.workers.workers import Registry, Worker

INFO_TIMEOUT_S = 10.0
GENERATE_TIMEOUT_S = 30.0
MAX_EXTRA_S = 600.0
UPDATE_TIMEOUT_S = 4000.0
"""For a load, and the time that requests have to end by default."""
MAX_DRAIN_S = 86_400.0
"""A worker refuses a longer `drain_timeout_secs`."""
UPDATE_FROM_DISK_PATH = "/update_weights_from_disk"
UPDATE_FROM_TENSOR_PATH = "/update_weights_from_tensor"
UPDATES = (UPDATE_FROM_DISK_PATH, UPDATE_FROM_TENSOR_PATH, "/update_weight_version")
"""Commands that change the weights of all workers, or their version."""
GROUP_COMMANDS = (
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/destroy_weights_update_group",
)
"""Commands about a trainer's process group, in which each worker has ranks of its own. The router refuses them."""
MEMORY_COMMANDS = ("/release_memory_occupation", "/resume_memory_occupation")
MEMORY_TIMEOUT_S = 630.0
"""For the copy of the weights, which a worker writes or reads."""


class WorkerFanout:
    """The handlers that send requests to workers."""

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        health: HealthMonitor,
        session: aiohttp.ClientSession,
        probe_pairs: Callable[[], Awaitable[None]],
    ) -> None:
        """`probe_pairs`: probes the pairs that serve no requests."""
        self._config = config
        self._registry = registry
        self._health = health
        self._session = session
        self._probe_pairs = probe_pairs
        self._num_spread = 0

    async def proxy(self, request: web.Request) -> web.Response:
        """Forward to one usable worker, decode workers first, since clients get decode's answers.

        A worker that refuses the key is passed over. Its 401 is the answer only if the key is the client's.
        """
        found = await self._first(request, request[BODY])
        if found is None:
            return error_response(503, "no healthy worker", "no_worker", RETRY_AFTER)
        if found.status == 401 and self._own_headers(request.method, request.path, found.worker):
            text = f"the worker {found.worker.spec.url} refuses the router's key (--worker-api-key)"
            return error_response(502, text, "worker_key_refused")
        return web.Response(status=found.status, headers=found.headers, body=found.body)

    async def query(
        self, request: web.Request, path: str, body: bytes, *, spread: bool = False
    ) -> WorkerResponse | None:
        """POST `body` to `path` of one usable worker on behalf of `request`; None if none answers, or takes the key.

        `spread`: the workers of a role take turns.
        """
        self._num_spread += spread
        found = await self._first(request, body, path, self._num_spread if spread else 0)
        return None if found is not None and found.status == 401 else found

    async def _first(
        self, request: web.Request, body: bytes, path: str | None = None, turn: int = 0
    ) -> WorkerResponse | None:
        """Return the answer of the first worker that takes the key, else a 401; None if no worker answers."""
        refusal: WorkerResponse | None = None
        for worker in self._preferred(turn):
            found = await self._call(request, worker, body, path=path)
            if found is not None and found.status != 401:
                return found
            refusal = found or refusal
        return refusal

    async def server_info(self, request: web.Request) -> web.Response:
        """Return one decode worker's facts at the top level, and the facts of all workers by role."""
        workers = self._alive()
        answers = await asyncio.gather(*(self._get_object(request, worker) for worker in workers))
        merged: dict[str, Any] = {}
        by_role: dict[str, list[dict[str, Any]]] = {role.value: [] for role in WorkerRole}
        for worker, info in zip(workers, answers, strict=True):
            by_role[worker.spec.role].append(info | {"url": worker.spec.url})
        for info in [*by_role[WorkerRole.REGULAR], *by_role[WorkerRole.DECODE]][:1]:
            merged |= info
        return json_response(merged | by_role)

    async def logs(self, request: web.Request) -> web.Response:
        """Return the last log lines of the router, and of each healthy worker by its URL, without secrets."""
        try:
            most = parse_num_lines(request.query.get("lines"))
        except RequestError as error:
            return refused(HttpRefusal.of(error))
        workers, access = self._alive(), self._config.access
        given = (access.api_key, access.admin_api_key, access.worker_api_key, access.worker_admin_api_key)
        redactor = Redactor([*(key for key in given if key is not None), *secrets_of(os.environ)])
        answers = await asyncio.gather(*(self._get_object(request, worker) for worker in workers))
        found = {worker.spec.url: answer for worker, answer in zip(workers, answers, strict=True)}
        own = await asyncio.to_thread(last_lines, most, redactor)
        return json_response({"processes": own, "workers": found}, headers={"Cache-Control": "no-store"})

    async def document(self, request: web.Request) -> dict[str, Any]:
        """Return the OpenAPI document of a worker that has one, decode workers first; `{}` if none has."""
        for worker in self._preferred():
            found = await self._get_object(request, worker)
            if isinstance(found.get("paths"), dict):
                return found
        return {}

    async def loads(self, request: web.Request) -> web.Response:
        """Return the load of every healthy worker in tokens, -1 if unknown; SGLang's schema with more fields."""
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
        """Return the load of every replica of all healthy workers, in a server's schema plus the worker."""
        workers = self._alive()
        answers = await asyncio.gather(*(self._call(request, worker, None) for worker in workers))
        listed = [
            {**entry, "worker": worker.spec.url, "worker_type": worker.spec.role.value}
            for worker, answer in zip(workers, answers, strict=True)
            for entry in _load_entries(answer)
        ]
        return json_response(listed)

    async def health_generate(self, request: web.Request) -> web.Response:
        """Return 200 if at least one worker of each role generated a token; the body lists the statuses."""
        workers = self._alive()
        found = await asyncio.gather(*(self._call(request, worker, None, GENERATE_TIMEOUT_S) for worker in workers))
        statuses = _statuses(workers, found)
        good = {worker.spec.role for worker in workers if statuses[worker.spec.url] == 200}
        return json_response({"workers": statuses}, status=200 if good >= set(self._config.roles) else 503)

    async def fan_out(self, request: web.Request) -> web.Response:
        """Forward a request to every healthy worker; 200 if all answered 200, else the highest status."""
        body, of_memory = request[BODY], request.path in MEMORY_COMMANDS
        workers = await self._asked_again() if of_memory else self._alive()
        if not workers:
            return error_response(503, "no healthy worker", "no_worker", RETRY_AFTER)
        timeout_s = MEMORY_TIMEOUT_S if of_memory else None
        answers = await asyncio.gather(*(self._call(request, worker, body, timeout_s) for worker in workers))
        if of_memory:
            await self._recheck(workers)
        return _answer_of_all(workers, answers)

    async def update_weights(self, request: web.Request) -> web.Response:
        """Change the weights of all healthy workers: all prepare them first, so that they change at about one time.

        The answer comes when the router has checked them again.
        """
        try:
            fields = orjson.loads(request[BODY])
        except orjson.JSONDecodeError as error:
            return error_response(400, f"the body is not JSON: {error}", "invalid_json")
        if not isinstance(fields, dict):
            return error_response(400, "the body must be a JSON object", "invalid_json")
        try:
            prepare = orjson.dumps(fields | {"prepare_only": True})
        except orjson.JSONEncodeError:
            return error_response(400, "the body is nested too deeply", "invalid_json")
        workers = await self._asked_again()
        if not workers:
            return error_response(503, "no healthy worker", "no_worker", RETRY_AFTER)
        drain_s = fields.get("drain_timeout_secs")
        timeout_s = UPDATE_TIMEOUT_S + min(max(drain_s if isinstance(drain_s, int | float) else 0, 0), MAX_DRAIN_S)
        if request.path in (UPDATE_FROM_DISK_PATH, UPDATE_FROM_TENSOR_PATH):
            prepared = await asyncio.gather(*(self._call(request, worker, prepare, timeout_s) for worker in workers))
            if fields.get("prepare_only") or max(_statuses(workers, prepared).values()) >= 400:
                return _answer_of_all(workers, prepared)
        calls = (self._call(request, worker, request[BODY], timeout_s) for worker in workers)
        answers = await asyncio.gather(*calls)
        await self._recheck(workers)
        return _answer_of_all(workers, answers)

    async def _recheck(self, workers: Sequence[Worker]) -> None:
        """Check the workers of a command, and then their pairs, so that the next request finds those that serve."""
        await asyncio.gather(*map(self._health.recheck, workers))
        await self._probe_pairs()

    async def refuse_group(self, request: web.Request) -> web.Response:
        """Refuse a command about a trainer's process group: each server has ranks of its own in it."""
        message = (
            f"{request.path} is not sent to the workers of a router: each server of a process group has ranks of its "
            "own. Send it to each server (GET /workers lists them), to /init_weights_update_group with its rank_offset"
        )
        return error_response(400, message, "call_each_server")

    def _own_headers(self, method: str, path: str, worker: Worker) -> dict[str, str]:
        """Return the header with the router's own key for `worker`; empty: the client's header is forwarded."""
        access = self._config.access
        command = is_admin(method, path)
        return own_headers(worker, access.admin_key_for_workers if command else access.key_for_workers)

    def _preferred(self, turn: int = 0) -> list[Worker]:
        """Return the usable workers, in the order in which they are tried for queries that any worker answers.

        Those of a role are rotated by `turn`.
        """
        found: list[Worker] = []
        for role in (WorkerRole.REGULAR, WorkerRole.DECODE, WorkerRole.PREFILL):
            usable = self._registry.usable(role)
            at = turn % max(1, len(usable))
            found += usable[at:] + usable[:at]
        return found

    def _alive(self) -> list[Worker]:
        """Return the healthy workers, including draining ones, where requests still run, and those that take no
        requests because their memory is released.
        """
        return [worker for worker in self._registry.workers if worker.healthy or worker.released]

    async def _asked_again(self) -> list[Worker]:
        """Like `_alive`, after another check of the other workers, whose memory may have been released just now."""
        others = [one for one in self._registry.workers if not (one.healthy or one.released)]
        await asyncio.gather(*map(self._health.check, others))
        return self._alive()

    async def _get_object(self, request: web.Request, worker: Worker) -> dict[str, Any]:
        """Return the worker's JSON object, or an object with the field `error`."""
        found = await self._call(request, worker, None)
        if found is None or found.status != 200:
            return {"error": "no answer" if found is None else f"status {found.status}"}
        try:
            parsed = orjson.loads(found.body)
        except orjson.JSONDecodeError as error:
            return {"error": f"not JSON: {error}"}
        return parsed if isinstance(parsed, dict) else {"error": f"not an object: {type(parsed).__name__}"}

    async def _call(
        self,
        request: web.Request,
        worker: Worker,
        body: bytes | None,
        timeout_s: float | None = None,
        *,
        path: str | None = None,
    ) -> WorkerResponse | None:
        """Send the same request to a worker, or `body` to another `path`; None if it does not answer."""
        timeout = _patience(request) if timeout_s is None else aiohttp.ClientTimeout(total=timeout_s)
        headers: CIMultiDict[str] = forwarded_headers(request.headers, request.remote)
        headers.popall("Accept-Encoding", None)
        headers.update(self._own_headers(request.method, path or request.path, worker))
        url = URL(worker.spec.url + (path or request.path_qs), encoded=True)  # the path as it was checked
        try:
            async with self._session.request(
                request.method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                return WorkerResponse(
                    worker, response.status, returned_headers(response.headers), await response.read()
                )
        except (aiohttp.ClientError, OSError):
            return None


def _answer_of_all(workers: Sequence[Worker], answers: Sequence[WorkerResponse | None]) -> web.Response:
    """Return 200 if all workers answered so, else the highest status with its worker's error."""
    statuses = _statuses(workers, answers)
    worst = max(statuses.values())
    said = {} if worst < 400 else {"error": _error_of(workers, answers, worst)}
    return json_response({"success": worst < 400, "workers": statuses, **said}, status=worst)


def _statuses(workers: Sequence[Worker], answers: Sequence[WorkerResponse | None]) -> dict[str, int]:
    """Return the statuses by URL; 502 for workers that did not answer."""
    return {worker.spec.url: 502 if one is None else one.status for worker, one in zip(workers, answers, strict=True)}


def _error_of(workers: Sequence[Worker], answers: Sequence[WorkerResponse | None], status: int) -> dict[str, Any]:
    """Return OpenAI's error object of the first worker with `status`, plus the worker's URL."""
    statuses = _statuses(workers, answers)
    worker, answer = next(one for one in zip(workers, answers, strict=True) if statuses[one[0].spec.url] == status)
    said = None if answer is None else _parsed(answer.body)
    error = said.get("error") if isinstance(said, dict) else None
    if not isinstance(error, dict):
        message = f"{worker.spec.url} " + ("does not answer" if answer is None else f"answered {status}")
        error = error_object(message, status, code="worker")["error"]
    return error | {"worker": worker.spec.url}


def _load_entries(answer: WorkerResponse | None) -> list[dict[str, Any]]:
    """Return the load entries of a worker's replicas; empty without a valid answer."""
    said = None if answer is None or answer.status != 200 else _parsed(answer.body)
    return [entry for entry in said if isinstance(entry, dict)] if isinstance(said, list) else []


def _parsed(body: bytes) -> Any:
    """Parse JSON; None if it is invalid."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _patience(request: web.Request) -> aiohttp.ClientTimeout:
    """Return the timeout of a call, plus the query's `timeout` in seconds, for which `/flush_cache` waits for idle."""
    text = request.query.get("timeout", "")
    extra_s = float(text) if text.replace(".", "", 1).isdecimal() else 0.0
    return aiohttp.ClientTimeout(total=INFO_TIMEOUT_S + min(extra_s, MAX_EXTRA_S))
