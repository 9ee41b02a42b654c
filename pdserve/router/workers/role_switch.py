"""`POST /pd_role_switch`: changes a worker's role and moves it to the other pool, as SGLang's mini load balancer does.

    {"worker_url": URL or id, "new_role": "prefill" | "decode", "drain_timeout_secs": 300, "reload": false}

    drain: no new requests ──> the router's requests there have ended, or timeout ──> POST to the worker ──> moved

The answer is the worker's, after its switch. If a server is switched directly, `health` detects the new role and moves
the worker. Called by `app`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from pdserve.router.config.config import RouterConfig, WorkerRole
from pdserve.router.http import BODY, error_response
from pdserve.router.workers.api import BadBody, parse_body
from pdserve.router.workers.health import HealthMonitor
from pdserve.router.workers.outcome import describe, forwarded_headers, own_headers, returned_headers
from pdserve.router.workers.workers import Registry, Worker

PATH = "/pd_role_switch"
DRAIN_S = 300.0
MAX_DRAIN_S = 86_400.0
POLL_S = 0.02


class SwitchBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /pd_role_switch`; `worker_url` may be an id. `reload`: the worker starts another engine."""

    worker_url: str
    new_role: str
    drain_timeout_secs: float | None = None
    reload: bool | None = None


class RoleSwitch:
    """The handler."""

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        health: HealthMonitor,
        session: aiohttp.ClientSession,
        on_change: Callable[[], None],
        now: Callable[[], float],
    ) -> None:
        self._config = config
        self._registry = registry
        self._health = health
        self._session = session
        self._on_change = on_change
        self._now = now

    async def post(self, request: web.Request) -> web.Response:
        """Switch a worker between prefill and decode. Answers after the switch."""
        try:
            body = parse_body(request[BODY], SwitchBody)
            role, drain_s = self._role(body), _drain_s(body)
        except BadBody as error:
            return error_response(400, str(error), "invalid_request", param=error.field)
        worker = self._registry.find(body.worker_url)
        if worker is None:
            text = f"no worker has the id or URL {body.worker_url!r}"
            return error_response(404, text, "worker_not_found", param="worker_url")
        was_draining = worker.draining
        self._registry.drain(worker)
        try:
            return await self._switch(request, worker, role, drain_s, reload=body.reload is True)
        finally:
            now = self._registry.find(worker.id)
            if now is not None and not now.leaving and not was_draining:
                self._registry.resume(now)
                self._on_change()

    async def _switch(
        self, request: web.Request, worker: Worker, role: WorkerRole, drain_s: float, *, reload: bool
    ) -> web.Response:
        deadline = self._now() + drain_s
        while worker.inflight and self._now() < deadline:
            await asyncio.sleep(POLL_S)
        command: dict[str, Any] = {"new_role": role.mode, "drain_timeout_secs": max(0.0, deadline - self._now())}
        if reload:
            command["reload"] = True
        try:
            answer = await self._ask(request, worker, command)
        except (aiohttp.ClientError, OSError) as error:
            return error_response(502, f"{worker.spec.url} does not answer: {describe(error)}", "worker")
        if answer.status == 200:
            await self._health.on_reported_role(worker, role.mode)
        now = self._registry.find(worker.id)
        if now is not None:  # a new object after a move, which has not been checked yet
            await self._health.recheck(now)
        return answer

    async def _ask(self, request: web.Request, worker: Worker, command: dict[str, Any]) -> web.Response:
        headers = forwarded_headers(request.headers, request.remote)
        headers.popall("Accept-Encoding", None)
        headers.update(own_headers(worker, self._config.access.admin_key_for_workers))
        async with self._session.post(
            worker.spec.url + PATH, json=command, headers=headers, allow_redirects=False
        ) as response:
            kept = returned_headers(response.headers)
            return web.Response(status=response.status, headers=kept, body=await response.read())

    def _role(self, body: SwitchBody) -> WorkerRole:
        role = WorkerRole.of_mode(body.new_role)
        if role is None or role not in self._config.roles:
            modes = " or ".join(one.mode for one in self._config.roles)
            raise BadBody(f"new_role must be {modes} here, got {body.new_role!r}", "new_role")
        return role


def _drain_s(body: SwitchBody) -> float:
    drain_s = DRAIN_S if body.drain_timeout_secs is None else body.drain_timeout_secs
    if not 0 <= drain_s <= MAX_DRAIN_S:
        message = f"drain_timeout_secs must be 0 to {MAX_DRAIN_S:g} seconds, got {drain_s}"
        raise BadBody(message, "drain_timeout_secs")
    return drain_s
