"""`GET /observe`: a snapshot of the whole deployment for the dashboard. Queries servers and adds the router's state.

    requests for /observe ──> at most one round a second ──> GET /observe of every healthy worker
    history ──> a round every five seconds ──> the same

A slow worker delays no answer: after `PATIENCE_S` its previous answer is shown, and the new one in the next snapshot.
Created by `app`; `cluster_snapshot` merges the answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Collection
from typing import Any

import aiohttp
import msgspec
import orjson
from aiohttp import web

import pdserve
from pdserve.observe.history import FailedCall
from pdserve.router.config.config import RouterConfig, WorkerRole
from pdserve.router.dashboard.cluster_snapshot import (
    NUM_REQUESTS,
    ObserveReply,
    join_edges,
    join_requests,
    parse_answer,
)
from pdserve.router.proxy.attempts import Drain
from pdserve.router.workers.admission import Admission
from pdserve.router.workers.api import describe
from pdserve.router.workers.outcome import describe as describe_error
from pdserve.router.workers.outcome import own_headers, read_at_most
from pdserve.router.workers.workers import Registry, Worker

INTERVAL_S = 1.0
PATIENCE_S = 0.4
ASK_TIMEOUT_S = 3.0
"""Timeout of a query; longer than a server waits for its schedulers."""
KEEP_S = 10.0
"""How long the last answer of a worker is shown that no longer answers."""
REFUSED_S = 60.0
"""Seconds after which the history queries a worker again that has no `/observe`, or refuses the router's key."""
MAX_ANSWER_BYTES = 8 << 20
PATH = "/observe"


@dataclasses.dataclass(eq=False)
class WorkerObservation:
    """Last answer of one worker. Times are the event loop's."""

    answer: ObserveReply | None = None
    answered_at: float = 0.0
    error: str | None = None
    endpoints: tuple[str, ...] = ()
    """Control endpoints in the last answer; kept, because peers still report transfers with them."""
    query: asyncio.Task[None] | None = None
    refused_at: float | None = None
    """When the worker last answered with a 4xx; None: it has answered well since."""


class Observer:
    """The handler; one per router. `close` cancels running queries."""

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        admission: Admission,
        session: aiohttp.ClientSession,
        drain: Drain,
        failures: Collection[FailedCall],
    ) -> None:
        self._config = config
        self._registry = registry
        self._admission = admission
        self._session = session
        self._drain = drain
        self._failures = failures
        self._observations: dict[Worker, WorkerObservation] = {}
        self._asked_at: float | None = None
        self._shown: bytes | None = None
        self._started_at = time.time()
        registry.on_forgotten.append(self._forget)

    async def get(self, request: web.Request) -> web.Response:
        """Return a snapshot of the deployment, at most a second old; docs/dashboard.md lists its fields."""
        await self._refresh()
        if self._shown is None:
            self._shown = orjson.dumps(self._snapshot())
        headers = {"Cache-Control": "no-store"}
        return web.Response(body=self._shown, content_type="application/json", headers=headers)

    async def answers(self) -> dict[Worker, ObserveReply | None]:
        """Return the last answer of each worker, at most `INTERVAL_S` old where it answers; None: it has none."""
        await self._refresh(spares_silent=True)
        now = self._admission.now()
        return {
            worker: self._current(worker, self._observations.get(worker, WorkerObservation()), now)
            for worker in self._registry.workers
        }

    async def close(self) -> None:
        """Cancel all running queries."""
        tasks = [observation.query for observation in self._observations.values() if observation.query is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _refresh(self, *, spares_silent: bool = False) -> None:
        """Query all workers if the last round is `INTERVAL_S` old, and wait for the answers, `PATIENCE_S` at most."""
        now = self._admission.now()
        if self._asked_at is None or now - self._asked_at >= INTERVAL_S:
            self._asked_at = now
            self._shown = None
            self._ask_all(spares_silent=spares_silent)
        running = [observation.query for observation in self._observations.values() if observation.query is not None]
        if running:
            await asyncio.wait(running, timeout=max(0.0, self._asked_at + PATIENCE_S - now))

    def _ask_all(self, *, spares_silent: bool) -> None:
        """Query the healthy workers. `spares_silent`: those that have no `/observe`, or refuse the key, only rarely."""
        now = self._admission.now()
        for worker in self._registry.workers:
            observation = self._observations.setdefault(worker, WorkerObservation())
            if spares_silent and observation.refused_at is not None and now - observation.refused_at < REFUSED_S:
                continue
            if worker.healthy and observation.query is None:
                observation.query = asyncio.create_task(self._ask(worker, observation))
                observation.query.add_done_callback(self._ended(observation))

    def _ended(self, observation: WorkerObservation) -> Callable[[asyncio.Task[None]], None]:
        def forget_task(_: asyncio.Task[None]) -> None:
            observation.query = None
            self._shown = None

        return forget_task

    async def _ask(self, worker: Worker, observation: WorkerObservation) -> None:
        """Query one worker and store the answer or the error in `observation`."""
        timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
        headers = own_headers(worker, self._config.access.admin_key_for_workers)
        try:
            url = worker.spec.url + PATH
            async with self._session.get(url, timeout=timeout, headers=headers, allow_redirects=False) as response:
                if response.status != 200:
                    observation.error = f"GET {PATH} answered {response.status}"
                    if 400 <= response.status < 500:
                        observation.refused_at = self._admission.now()
                    return
                answer = parse_answer(await read_at_most(response, MAX_ANSWER_BYTES))
        except TimeoutError:
            observation.error = f"no answer within {ASK_TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            observation.error = describe_error(error)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            observation.error = f"GET {PATH} gave an invalid answer: {error}"
        else:
            observation.answer, observation.error, observation.refused_at = answer, None, None
            observation.endpoints = tuple(answer.endpoints) or observation.endpoints
            observation.answered_at = self._admission.now()

    def _snapshot(self) -> dict[str, Any]:
        now = self._admission.now()
        workers = self._registry.workers
        observations = {worker: self._observations.get(worker, WorkerObservation()) for worker in workers}
        answers = {worker: answer for worker in workers if (answer := self._current(worker, observations[worker], now))}
        owners = {endpoint: worker.spec.url for worker in workers for endpoint in observations[worker].endpoints}
        return {
            "router": self._router() | {"running": self._running(now), "failures": self._failed()},
            "workers": [
                describe(worker, now)
                | {"observed": self._observed(worker, observations[worker], answers.get(worker), now)}
                for worker in workers
            ],
            "pairs": self._admission.pairs.shown(now),
            "edges": join_edges(answers.values(), owners),
            "requests": join_requests((one.spec.role, one.spec.url, answer) for one, answer in answers.items()),
        }

    def _current(self, worker: Worker, observation: WorkerObservation, now: float) -> ObserveReply | None:
        """Return a worker's last answer; None if it is older than `KEEP_S` or the worker is dead."""
        if not worker.healthy or now - observation.answered_at > KEEP_S:
            return None
        return observation.answer

    def _observed(
        self, worker: Worker, observation: WorkerObservation, answer: ObserveReply | None, now: float
    ) -> dict[str, Any]:
        fields = {"error": observation.error if worker.healthy else worker.last_error}
        if answer is None:
            return fields | {"age_s": None, "server": None, "replicas": [], "rates": None}
        return fields | {
            "age_s": now - observation.answered_at,
            "server": msgspec.to_builtins(answer.server),
            "replicas": msgspec.to_builtins(answer.replicas),
            "rates": msgspec.to_builtins(answer.rates),
        }

    def _router(self) -> dict[str, Any]:
        limits = self._config.limits
        return {
            "version": pdserve.__version__,
            "pd": WorkerRole.PREFILL in self._config.roles,
            "time": time.time(),
            "started_at": self._started_at,
            "serving": self._admission.could_serve(),
            "queued": self._admission.num_waiting,
            "queue_size": limits.queue_size,
            "max_inflight": limits.max_inflight,
        }

    def _running(self, now: float) -> list[dict[str, Any]]:
        """Return the oldest `NUM_REQUESTS` running attempts. `rid` None: the router has no name for the request."""
        oldest = sorted(self._drain.attempts, key=lambda one: one.begun)[:NUM_REQUESTS]
        return [
            {
                "rid": one.rids[-1] if one.rids else None,
                "prefill": None if one.pair.prefill is None else one.pair.prefill.spec.url,
                "decode": one.pair.decode.spec.url,
                "age_s": now - one.begun,
            }
            for one in oldest
        ]

    def _failed(self) -> list[dict[str, Any]]:
        """Return the newest failed requests, the newest first."""
        return [msgspec.to_builtins(one) for one in reversed([*self._failures])]

    def _forget(self, worker: Worker) -> None:
        observation = self._observations.pop(worker, None)
        if observation is not None and observation.query is not None:
            observation.query.cancel()
        self._shown = None
