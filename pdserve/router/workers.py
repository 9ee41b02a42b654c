"""Who is alive: the state of every worker, and the health checks that write it.

`WorkerPool` is the only writer of `Worker`. `dispatch` picks pairs, holds workers while a request is there, and
reports broken connections; `app` shows the state.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
from collections.abc import Collection, Iterator

import aiohttp
import orjson

from pdserve.router.config import Role, RouterConfig, WorkerSpec
from pdserve.router.conversation import ConversationKey
from pdserve.router.metrics import RouterMetrics
from pdserve.router.policies import POLICIES, Candidate

log = logging.getLogger(__name__)

RECHECK_DEAD_S = 0.5


@dataclasses.dataclass(eq=False)
class Worker:
    """One worker's state; identity is the object."""

    spec: WorkerSpec
    bootstrap_port: int | None
    healthy: bool = False
    inflight: int = 0
    late_checks: int = 0
    last_error: str | None = "not checked yet"


@dataclasses.dataclass(frozen=True)
class Pair:
    """The workers of one try. `prefill` is None where the other is a regular worker."""

    prefill: Worker | None
    decode: Worker


class WorkerPool:
    """All workers, checked in the background between `start` and `close`."""

    def __init__(
        self, config: RouterConfig, session: aiohttp.ClientSession, metrics: RouterMetrics, rng: random.Random
    ) -> None:
        self._config = config
        self._session = session
        self._metrics = metrics
        self._rng = rng
        self._choose = POLICIES[config.policy]
        self.workers = [Worker(spec=spec, bootstrap_port=spec.bootstrap_port) for spec in config.workers]
        self._monitors: list[asyncio.Task[None]] = []
        self._checks: dict[Worker, asyncio.Task[None]] = {}
        for worker in self.workers:
            self._metrics.worker_up.labels(worker.spec.role, worker.spec.url).set(0)
            self._metrics.inflight.labels(worker.spec.role, worker.spec.url).set(0)

    async def start(self) -> None:
        """Begin checking, and return when every worker was asked once; each counts as dead until a good answer.

        So a router that says it is ready serves at once where its workers do.
        """
        await asyncio.gather(*(self.check(worker) for worker in self.workers))
        self._monitors = [asyncio.create_task(self._monitor(worker)) for worker in self.workers]

    async def close(self) -> None:
        """End all background tasks."""
        tasks = [*self._monitors, *self._checks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def healthy(self, role: Role) -> list[Worker]:
        """The healthy workers of a role."""
        return [worker for worker in self.workers if worker.healthy and worker.spec.role is role]

    def others(self, role: Role, avoid: Collection[Worker]) -> list[Worker]:
        """The healthy workers of a role that are not in `avoid`."""
        return [worker for worker in self.healthy(role) if worker not in avoid]

    def pick(self, avoid: Collection[Worker] = (), key: ConversationKey | None = None) -> Pair | None:
        """The pair for one try, workers in `avoid` only where there is no other; None when no pair is alive.

        `key` is the request's conversation, for the policy that goes by it.
        """
        regular = self._pick_one(Role.REGULAR, avoid, key)
        if regular is not None:
            return Pair(prefill=None, decode=regular)
        prefill, decode = self._pick_one(Role.PREFILL, avoid, key), self._pick_one(Role.DECODE, avoid, key)
        if prefill is None or decode is None:
            return None
        return Pair(prefill=prefill, decode=decode)

    @contextlib.contextmanager
    def hold(self, worker: Worker) -> Iterator[None]:
        """Count a request as in flight at the worker."""
        gauge = self._metrics.inflight.labels(worker.spec.role, worker.spec.url)
        worker.inflight += 1
        gauge.set(worker.inflight)
        try:
            yield
        finally:
            worker.inflight -= 1
            gauge.set(worker.inflight)

    async def check(self, worker: Worker) -> None:
        """Ask the worker for its health now; callers at the same time share one check."""
        running = self._checks.get(worker)
        if running is None:
            running = asyncio.create_task(self._check(worker))
            self._checks[worker] = running
            running.add_done_callback(lambda _: self._checks.pop(worker, None))
        await asyncio.shield(running)

    def _pick_one(self, role: Role, avoid: Collection[Worker], key: ConversationKey | None) -> Worker | None:
        workers = self.others(role, avoid) or self.healthy(role)
        if not workers:
            return None
        candidates = [Candidate(worker.spec.url, worker.inflight) for worker in workers]
        return workers[self._choose(candidates, key, self._rng)]

    async def _monitor(self, worker: Worker) -> None:
        interval = self._config.health_check_interval_s
        while True:
            await self.check(worker)
            await asyncio.sleep(interval if worker.healthy else min(interval, RECHECK_DEAD_S))

    async def _check(self, worker: Worker) -> None:
        timeout = aiohttp.ClientTimeout(total=self._config.health_check_timeout_s)
        try:
            async with self._session.get(f"{worker.spec.url}/health", timeout=timeout) as response:
                status = response.status
            if status == 200 and not worker.healthy and worker.spec.ask_bootstrap_port:
                worker.bootstrap_port = await self._ask_bootstrap_port(worker, timeout)
        except TimeoutError:
            worker.late_checks += 1
            if worker.late_checks >= self._config.health_failure_threshold:
                self._mark_dead(worker, f"no answer to {worker.late_checks} health checks")
            return
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._mark_dead(worker, f"{type(error).__name__}: {error}")
            return
        worker.late_checks = 0
        if status == 200:
            self._mark_healthy(worker)
        else:
            self._mark_dead(worker, f"/health answered {status}")

    async def _ask_bootstrap_port(self, worker: Worker, timeout: aiohttp.ClientTimeout) -> int | None:
        """The port the worker names; asked anew each time it comes back: after a restart it may be another."""
        async with self._session.get(f"{worker.spec.url}/get_server_info", timeout=timeout) as response:
            if response.status != 200:
                raise ValueError(f"/get_server_info answered {response.status}, so the bootstrap port is not known")
            info = orjson.loads(await response.read())
        port = info.get("disaggregation_bootstrap_port") if isinstance(info, dict) else None
        if isinstance(port, bool) or not isinstance(port, int):
            raise ValueError(f"disaggregation_bootstrap_port in /get_server_info is {port!r}, expected a port number")
        return port

    def _mark_healthy(self, worker: Worker) -> None:
        if not worker.healthy:
            log.info("%s %s is up", worker.spec.role, worker.spec.url)
        worker.healthy = True
        worker.last_error = None
        self._metrics.worker_up.labels(worker.spec.role, worker.spec.url).set(1)

    def _mark_dead(self, worker: Worker, reason: str) -> None:
        if worker.healthy:
            log.warning("%s %s is down: %s", worker.spec.role, worker.spec.url, reason)
        worker.healthy = False
        worker.last_error = reason
        self._metrics.worker_up.labels(worker.spec.role, worker.spec.url).set(0)
