"""The registry of workers, and the state of each worker. Each field of `Worker` has one writer:

    Registry    the set of workers; draining, leaving, forgotten
    health      healthy, late_checks, good_checks, last_error, bootstrap_port, facts, report
    admission   inflight, breaker
    dispatch    tries, num_heard (through `Attempt`)

`workers.api` adds and removes workers while the router runs:

    add ──> checked, dead ──> healthy ──> draining: no new requests ──> the last request has ended: forgotten

A worker whose role has changed is a new `Worker` at the same URL, without state: see `move`.
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Protocol

from pdserve.router.config.config import BreakerConfig, WorkerRole, WorkerSpec
from pdserve.router.workers.breaker import Breaker

log = logging.getLogger(__name__)

TOKENS_PER_REQUEST = 4096
"""Tokens in a load report that count as one request."""


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """A worker's reported load, and this router's requests there at that time.

    `requests` None: not reported. The report includes requests of other routers.
    """

    requests: int | None
    tokens: int
    inflight_then: int
    at_s: float


class LosesWorker(Protocol):
    """A running attempt at a worker."""

    def lost(self, worker: Worker, reason: str) -> None:
        """End the attempt, because the worker does not answer any more."""

    def num_bytes(self, worker: Worker) -> int:
        """Return the bytes of the answer that the worker has sent so far."""


@dataclasses.dataclass(eq=False)
class Worker:
    """State of one worker; compared by identity."""

    spec: WorkerSpec
    breaker: Breaker
    bootstrap_port: int | None
    id: str = dataclasses.field(default_factory=lambda: str(uuid.uuid4()))
    healthy: bool = False
    draining: bool = False
    leaving: bool = False
    """True: the worker is removed when its last request has ended."""
    forgotten: bool = False
    """True: the worker was removed from the registry; requests may still run there."""
    inflight: int = 0
    late_checks: int = 0
    good_checks: int = 0
    report: LoadReport | None = None
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    last_error: str | None = "not checked yet"
    ended: bool = False
    """True: a connection was refused since the worker was last healthy, so that its process has ended."""
    tries: set[LosesWorker] = dataclasses.field(default_factory=set)
    """Running attempts at this worker."""
    num_heard: int = 0
    """Bytes of answers in ended attempts; a prefill answer counts as one."""

    @property
    def bytes_heard(self) -> int:
        """Bytes of answers in all attempts. A worker whose count grows is alive, even if a health check times out."""
        return self.num_heard + sum(one.num_bytes(self) for one in self.tries)

    def lose(self, reason: str) -> None:
        """End all attempts at a silent worker. After the end of a process its connections break by themselves."""
        for one in list(self.tries):
            one.lost(self, reason)

    @property
    def usable(self) -> bool:
        """Whether the worker may get new requests, regardless of breaker and limits."""
        return self.healthy and not self.draining

    def load(self, now: float, max_age_s: float) -> float:
        """Return the worker's load in requests.

        The load is the report, if it is at most `max_age_s` seconds old, plus requests sent and minus requests ended
        since; at least this router's running requests. Reported tokens are added as `tokens / TOKENS_PER_REQUEST`.
        Without a recent report the load is this router's running requests.
        """
        report = self.report
        if report is None or now - report.at_s > max_age_s:
            return float(self.inflight)
        reported = report.inflight_then if report.requests is None else report.requests
        requests = max(self.inflight, reported + self.inflight - report.inflight_then)
        return requests + report.tokens / TOKENS_PER_REQUEST


@dataclasses.dataclass(frozen=True)
class Pair:
    """The workers of one attempt. `prefill` None: `decode` is a regular worker."""

    prefill: Worker | None
    decode: Worker


class Registry:
    """All workers, in the order in which they were added."""

    def __init__(self, breaker: BreakerConfig) -> None:
        self._breaker = breaker
        self._workers: dict[str, Worker] = {}
        self.on_added: list[Callable[[Worker], None]] = []
        self.on_forgotten: list[Callable[[Worker], None]] = []

    @property
    def workers(self) -> list[Worker]:
        """All workers, including draining ones."""
        return list(self._workers.values())

    def usable(self, role: WorkerRole) -> list[Worker]:
        """Return the workers of a role that are healthy and not draining."""
        return [worker for worker in self._workers.values() if worker.spec.role is role and worker.usable]

    def find(self, name: str) -> Worker | None:
        """Return the worker with this id or URL; None if unknown."""
        by_url = self._workers.get(name.rstrip("/"))
        return by_url or next((worker for worker in self._workers.values() if worker.id == name), None)

    def add(self, spec: WorkerSpec) -> Worker:
        """Add a worker, which counts as dead until it is checked; its URL must be new."""
        assert spec.url not in self._workers, "call `find` first"
        return self._put(Worker(spec=spec, breaker=Breaker(self._breaker), bootstrap_port=spec.bootstrap_port))

    def move(self, worker: Worker, role: WorkerRole) -> Worker | None:
        """Replace a worker whose role has changed by a new one with the same id; it stays drained if it was.

        Returns None if the worker was leaving, which only removes it.
        """
        log.info("%s %s is a %s worker now", worker.spec.role, worker.spec.url, role)
        draining, leaving = worker.draining, worker.leaving
        self.forget(worker)
        if leaving:
            return None
        asks = role is WorkerRole.PREFILL
        spec = dataclasses.replace(worker.spec, role=role, bootstrap_port=None, ask_bootstrap_port=asks)
        moved = Worker(spec=spec, breaker=Breaker(self._breaker), bootstrap_port=None, id=worker.id, draining=draining)
        return self._put(moved)

    def _put(self, worker: Worker) -> Worker:
        self._workers[worker.spec.url] = worker
        for tell in self.on_added:
            tell(worker)
        return worker

    def drain(self, worker: Worker) -> None:
        """Send no new requests to the worker; running requests continue."""
        if not worker.draining:
            log.info("%s %s is draining: %d requests run", worker.spec.role, worker.spec.url, worker.inflight)
        worker.draining = True

    def resume(self, worker: Worker) -> None:
        """Send new requests to the worker again."""
        worker.draining = worker.leaving = False

    def remove(self, worker: Worker) -> None:
        """Drain the worker, and remove it when its last request has ended; at once without running requests."""
        self.drain(worker)
        worker.leaving = True
        self.settle(worker)

    def settle(self, worker: Worker) -> None:
        """Remove a leaving worker without running requests. Called when a request has ended."""
        if worker.leaving and worker.inflight == 0:
            self.forget(worker)

    def forget(self, worker: Worker) -> None:
        """Remove the worker at once; running requests continue."""
        if self._workers.get(worker.spec.url) is not worker:
            return
        del self._workers[worker.spec.url]
        worker.draining = worker.forgotten = True
        log.info("%s %s is removed", worker.spec.role, worker.spec.url)
        for tell in self.on_forgotten:
            tell(worker)
