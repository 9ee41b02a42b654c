"""Health checks and load queries: checks every worker and writes the results into `Worker`.

One task for each worker, from `watch` to its removal. `dispatch` requests a check when a connection broke.

A silent worker is lost: its running requests end at once, because its connections never break by themselves. A worker
that refuses connections, or reports itself unhealthy, only gets no new requests. Its running requests end with their
connections.

A server may change its role while it runs. Its good answers to health checks, and its refusals of requests, state the
current role. The registry moves a worker with a new role. During a role switch a worker has no role and counts as dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson

from pdserve.base.log import SparingLog, no_request
from pdserve.base.proof import PROOF_HEADER
from pdserve.base.stream_state import MEMORY_RELEASED, NO_ROLE, ROLE_HEADER
from pdserve.http.session_proof import REQUIRED
from pdserve.router.config.config import RouterConfig, WorkerRole
from pdserve.router.workers.outcome import describe, error_of, is_out_of_descriptors, own_headers, read_at_most
from pdserve.router.workers.workers import LoadReport, Registry, Worker

log = logging.getLogger(__name__)

RECHECK_DEAD_S = 0.5
UNCHECKED_RETRY_S = 1.0
INFO_PATH = "/get_server_info"
STALLED_S = 1.0
"""A check that ends this late after its timeout is ignored: the router itself was stalled."""
STUCK = "engine_stuck"
"""Error code of a server whose API process runs and whose engine does not."""
MAX_ERROR_BYTES = 1 << 16
LOAD_FAILURE_POLICY = "disaggregation_load_failure_policy"
FACTS = (LOAD_FAILURE_POLICY, "served_model_name", "model_path", "disaggregation_mode", "tp_size", "dp_size", "version")
"""Fields of `/get_server_info` that are kept in `Worker.facts`."""
PAIR = (WorkerRole.PREFILL, WorkerRole.DECODE)
NO_PROOFS = (
    "it accepts only requests that prove the control token; set PDSERVE_CONTROL_TOKEN or PDSERVE_WORKER_PROOF_KEY at "
    "the router, or start the server with --api-key, or with --no-require-control-proof"
)


class ProofRequiredError(ValueError):
    """A worker accepts only requests with a proof of the control token, and the router sends none."""


class HealthMonitor:
    """The health checks of one router. `on_change` is called whenever a worker becomes healthy or dead, or moves."""

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        session: aiohttp.ClientSession,
        on_change: Callable[[], None],
        *,
        with_loads: bool,
    ) -> None:
        self._config = config
        self._health = config.health
        self._warnings = SparingLog(log)
        self._registry = registry
        self._session = session
        self._on_change = on_change
        self._with_loads = with_loads
        self._tasks: dict[Worker, list[asyncio.Task[None]]] = {}
        self._checks: dict[Worker, asyncio.Task[None]] = {}
        self.on_up: list[Callable[[Worker], None]] = []
        """Called whenever a worker becomes healthy, after its `/get_server_info` was read."""
        self.on_down: list[Callable[[Worker], None]] = []
        """Called whenever a healthy worker becomes dead."""

    async def start(self) -> None:
        """Start the checks; returns when every worker was checked once. Workers count as dead until a good answer.

        So a router that reports ready can serve at once if its workers can.
        """
        await asyncio.gather(*(self.check(worker) for worker in self._registry.workers))
        for worker in self._registry.workers:
            self.watch(worker)

    async def close(self) -> None:
        """Cancel all tasks."""
        tasks = [task for group in self._tasks.values() for task in group] + list(self._checks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def watch(self, worker: Worker) -> None:
        """Check the worker periodically until `unwatch`, starting now."""
        if worker in self._tasks:
            return
        self._tasks[worker] = [asyncio.create_task(self._monitor(worker), context=no_request())]
        if self._with_loads:
            self._tasks[worker].append(asyncio.create_task(self._ask_loads(worker), context=no_request()))

    def unwatch(self, worker: Worker) -> None:
        """Stop checking a removed worker."""
        for task in self._tasks.pop(worker, []):
            task.cancel()

    async def check(self, worker: Worker) -> None:
        """Check the worker now; concurrent callers share one check."""
        running = self._checks.get(worker)
        if running is None:
            running = asyncio.create_task(self._check(worker), context=no_request())
            self._checks[worker] = running
            running.add_done_callback(lambda _: self._checks.pop(worker, None))
        await asyncio.shield(running)

    async def recheck(self, worker: Worker) -> None:
        """Check the worker with a check that begins now, because a command has changed it.

        A dead worker that answers well is checked as often as it must answer to be healthy.
        """
        if (running := self._checks.get(worker)) is not None:
            await asyncio.wait({running})
        for _ in range(self._health.success_threshold):
            await self.check(worker)
            if worker.healthy or worker.forgotten or not worker.good_checks:
                return

    async def on_reported_role(self, worker: Worker, reported: str) -> None:
        """Handle a role that a worker reported: a `--disaggregation-mode`, or `NO_ROLE`."""
        if worker.forgotten or reported == worker.spec.role.mode:
            return
        role = WorkerRole.of_mode(reported)
        if reported == NO_ROLE:
            why = "its memory is released" if worker.released else "its role is being changed, or it shuts down"
            self._mark_dead(worker, f"it accepts no requests: {why}")
        elif role is None or role not in self._config.roles:
            here = " and ".join(self._config.roles)
            self._mark_dead(worker, f"its --disaggregation-mode is {reported} now, and this router needs {here}")
        else:
            moved = self._registry.move(worker, role)
            self._on_change()
            if moved is not None:
                await self.check(moved)

    def connection_broke(self, worker: Worker, reason: str) -> None:
        """Mark the worker dead after a broken connection, if health checks are disabled."""
        if not self._health.enabled:
            self._mark_dead(worker, reason)

    async def _monitor(self, worker: Worker) -> None:
        while True:
            await self.check(worker)
            if worker.healthy and worker.late_checks:
                continue  # the last check has waited for its timeout
            interval = self._health.interval_s if self._health.enabled else UNCHECKED_RETRY_S
            await asyncio.sleep(interval if worker.healthy else min(interval, RECHECK_DEAD_S))

    async def _check(self, worker: Worker) -> None:
        timeout = aiohttp.ClientTimeout(total=self._health.timeout_s)
        begun, received_before = asyncio.get_running_loop().time(), worker.bytes_received
        try:
            status, reported = await self._ask_health(worker, timeout)
            if status == 200 and not worker.healthy and reported in (None, worker.spec.role.mode):
                reported = await self._learn(worker, timeout) or reported
        except TimeoutError:
            stalled = asyncio.get_running_loop().time() - begun > self._health.timeout_s + STALLED_S
            if not stalled and worker.bytes_received == received_before:
                self._was_late(worker)
            return
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if is_out_of_descriptors(error):
                self._warnings.warning("%s cannot be checked: %s", worker.spec.url, describe(error))
                await asyncio.sleep(RECHECK_DEAD_S)
                return
            worker.released = False
            worker.ended = worker.ended or _is_refused(error)
            self._mark_dead(worker, describe(error))
            if not _is_refused(error):
                worker.late_checks += 1
                if worker.late_checks >= self._health.failure_threshold:  # a single broken connection ends no streams
                    worker.lose(_why_lost(error))
            return
        worker.late_checks = 0
        if status != 200:
            self._mark_dead(worker, f"{self._health.endpoint} answered {status}")
            if reported == STUCK:
                worker.lose("its engine does not run")
            return
        if reported is not None and reported != worker.spec.role.mode:
            await self.on_reported_role(worker, reported)
            return
        worker.good_checks += 1
        if worker.healthy or worker.good_checks >= self._health.success_threshold:
            self._mark_healthy(worker)

    async def _ask_health(self, worker: Worker, timeout: aiohttp.ClientTimeout) -> tuple[int, str | None]:
        """Return (200, reported role or None), or (status, error code or None) of an unhealthy worker.

        If health checks are disabled, a healthy worker is not checked, and any answer of a dead worker counts as 200.
        """
        if not self._health.enabled and worker.healthy:
            return 200, None
        url = worker.spec.url + (self._health.endpoint if self._health.enabled else INFO_PATH)
        async with self._session.get(
            url, timeout=timeout, headers=self._headers(worker), allow_redirects=False
        ) as response:
            if response.status == 200 or not self._health.enabled:
                role = response.headers.get(ROLE_HEADER)
                worker.released = role == NO_ROLE and _is_released(await read_at_most(response, MAX_ERROR_BYTES))
                return 200, role
            worker.released = False
            return response.status, error_of(await read_at_most(response, MAX_ERROR_BYTES))[0]

    async def _learn(self, worker: Worker, timeout: aiohttp.ClientTimeout) -> str | None:
        """Read the worker's `/get_server_info`, each time it becomes healthy, since a restart may change the answer.

        Only the bootstrap port is required, if it was not given: without it the worker counts as dead. So does a worker
        that requires proofs, if the router sends none. Returns the mode if a prefill worker is a decode server now, or
        vice versa, for servers that report no role with their health.
        """
        try:
            info = await self.ask_info(worker, timeout)
        except ProofRequiredError:
            self._warnings.warning("%s %s is not used: %s", worker.spec.role, worker.spec.url, NO_PROOFS)
            raise
        except (aiohttp.ClientError, OSError, ValueError):
            if worker.spec.ask_bootstrap_port:
                raise
            return None
        mode = info.get("disaggregation_mode")
        if worker.spec.role in PAIR and mode in PAIR and mode != worker.spec.role:
            return str(mode)
        if worker.spec.ask_bootstrap_port:
            port = info.get("disaggregation_bootstrap_port")
            if isinstance(port, bool) or not isinstance(port, int):
                text = f"disaggregation_bootstrap_port in /get_server_info is {port!r}, expected a port number"
                raise ValueError(text)
            worker.bootstrap_port = port
        token_id = info.get("control_token_id")
        worker.token_id = token_id if isinstance(token_id, str) else None
        worker.facts = {name: str(info[name]) for name in FACTS if info.get(name) is not None}
        return None

    async def ask_info(self, worker: Worker, timeout: aiohttp.ClientTimeout) -> dict[str, Any]:
        """Return the worker's `/get_server_info`.

        Raises:
            aiohttp.ClientError, OSError, ValueError: there is no valid answer.
        """
        url = worker.spec.url + INFO_PATH
        async with self._session.get(
            url, timeout=timeout, headers=self._headers(worker), allow_redirects=False
        ) as response:
            if response.status == 401 and response.headers.get(PROOF_HEADER) == REQUIRED:
                raise ProofRequiredError(NO_PROOFS)
            if response.status != 200:
                raise ValueError(f"/get_server_info answered {response.status}, so the bootstrap port is not known")
            info = orjson.loads(await response.read())
        if not isinstance(info, dict):
            raise ValueError(f"/get_server_info is a {type(info).__name__}, expected an object")
        return info

    async def _ask_loads(self, worker: Worker) -> None:
        """Query the load periodically. A worker without an answer is rated by the router's own request count."""
        while True:
            if worker.healthy:
                worker.report = await self.ask_load(worker)
            await asyncio.sleep(self._health.load_interval_s)

    async def ask_load(self, worker: Worker) -> LoadReport | None:
        """Query the worker's `/get_load`, a list with an entry for each replica; None without a valid answer."""
        timeout = aiohttp.ClientTimeout(total=self._health.timeout_s)
        try:
            url = f"{worker.spec.url}/get_load"
            async with self._session.get(
                url, timeout=timeout, headers=self._headers(worker), allow_redirects=False
            ) as response:
                body = orjson.loads(await response.read()) if response.status == 200 else None
        except (aiohttp.ClientError, OSError, ValueError):
            return None
        return parse_load(body, worker.inflight, asyncio.get_running_loop().time())

    def _headers(self, worker: Worker) -> dict[str, str]:
        return own_headers(worker, self._config.access.key_for_workers)

    def _was_late(self, worker: Worker) -> None:
        """Count a timed-out check of a worker that sent no other bytes during the check."""
        worker.late_checks += 1
        worker.good_checks = 0
        if worker.late_checks >= self._health.failure_threshold:
            reason = f"no answer to {worker.late_checks} health checks"
            self._mark_dead(worker, reason)
            worker.lose(reason)

    def _mark_healthy(self, worker: Worker) -> None:
        worker.last_error = None
        if not worker.healthy:
            log.info("%s %s is up", worker.spec.role, worker.spec.url)
            worker.healthy = True
            if worker.ended:
                worker.ended = False
                worker.breaker.renew()
            for notify in self.on_up:
                notify(worker)
            self._on_change()

    def _mark_dead(self, worker: Worker, reason: str) -> None:
        worker.last_error = reason
        worker.good_checks = 0
        worker.report = None
        if worker.healthy:
            log.warning("%s %s is down: %s", worker.spec.role, worker.spec.url, reason)
            worker.healthy = False
            for notify in self.on_down:
                notify(worker)
            self._on_change()


def _is_released(health: bytes) -> bool:
    """Whether an answer of `/health` says that memory is released."""
    try:
        found = orjson.loads(health)
    except orjson.JSONDecodeError:
        return False
    return isinstance(found, dict) and found.get("status") == MEMORY_RELEASED


def _why_lost(error: Exception) -> str:
    """Say what is wrong with a worker whose checks fail by `error`: no answer came, or one that rules its use out."""
    if isinstance(error, aiohttp.ClientError | OSError):
        return f"it cannot be reached: {describe(error)}"
    return str(error) if isinstance(error, ProofRequiredError) else f"its answer to a check is not valid: {error}"


def _is_refused(error: Exception) -> bool:
    """Whether the connection was refused, so that no process listens there."""
    return isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError)


def parse_load(body: Any, inflight: int, now: float) -> LoadReport | None:
    """Parse a `/get_load` answer by summing its entries; None if it is invalid. Missing numbers are unknown."""
    entries = body if isinstance(body, list) else [body]
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        return None
    tokens = [_count(entry.get("num_tokens")) for entry in entries]
    requests = [_count(entry.get("num_reqs")) for entry in entries]
    if None in tokens and None in requests:
        return None
    total = None if None in requests else sum(count for count in requests if count is not None)
    return LoadReport(total, sum(count for count in tokens if count is not None), inflight, now)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
