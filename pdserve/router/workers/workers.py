"""The workers that the router knows, and what it knows of each. Each field has one writer:

    Registry    which workers there are, whether they are drained, leaving or forgotten
    health      healthy, late_checks, good_checks, last_error, bootstrap_port, facts, report
    admission   inflight, breaker
    dispatch    tries, num_heard (through `Attempt`)

`workers_api` adds and removes workers while the router runs:

    add ──> watched, dead ──> healthy ──> draining: no new requests ──> the last one has ended: forgotten

A worker whose role has changed is another worker at the same URL, of which nothing is known yet: see `move`.
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
"""So many tokens that a worker says it holds weigh as much as one request."""


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What a worker said of its load, and how many requests of ours it had then.

    `requests` None: it does not say. Other routers' requests are in it as well as ours.
    """

    requests: int | None
    tokens: int
    inflight_then: int
    at_s: float


class LosesWorker(Protocol):
    """A try under way at a worker."""

    def lost(self, worker: Worker, reason: str) -> None:
        """The worker does not answer any more: end the try."""

    def num_bytes(self, worker: Worker) -> int:
        """What the worker has written of its answer so far."""


@dataclasses.dataclass(eq=False)
class Worker:
    """One worker's state; identity is the object."""

    spec: WorkerSpec
    breaker: Breaker
    bootstrap_port: int | None
    id: str = dataclasses.field(default_factory=lambda: str(uuid.uuid4()))
    healthy: bool = False
    draining: bool = False
    leaving: bool = False
    """Forgotten as soon as its last request has ended."""
    forgotten: bool = False
    """Not in the registry any more, though requests may still run there."""
    inflight: int = 0
    late_checks: int = 0
    good_checks: int = 0
    report: LoadReport | None = None
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    last_error: str | None = "not checked yet"
    ended: bool = False
    """Nobody listened there at some time since it was well last: that process has ended."""
    tries: set[LosesWorker] = dataclasses.field(default_factory=set)
    """Tries that wait for it, or whose answer it still writes."""
    num_heard: int = 0
    """What it has written in tries that have ended, in bytes."""

    @property
    def bytes_heard(self) -> int:
        """What it has written in all tries: a worker that still writes is alive, however late a health check is."""
        return self.num_heard + sum(one.num_bytes(self) for one in self.tries)

    def lose(self, reason: str) -> None:
        """It is silent: end every try there. Where a process has ended its connections break by themselves."""
        for one in list(self.tries):
            one.lost(self, reason)

    @property
    def usable(self) -> bool:
        """Whether it may get new requests, its breaker and its number of requests aside."""
        return self.healthy and not self.draining

    def load(self, now: float, max_age_s: float) -> float:
        """How much it has to do, in requests.

        What it reported at most `max_age_s` ago, plus what was sent since and minus what has ended since; never less
        than what we know to be there. Tokens count a little: of two workers with as many requests the one with
        shorter ones has less to do.
        """
        report = self.report
        if report is None or now - report.at_s > max_age_s:
            return float(self.inflight)
        reported = report.inflight_then if report.requests is None else report.requests
        requests = max(self.inflight, reported + self.inflight - report.inflight_then)
        return requests + report.tokens / TOKENS_PER_REQUEST


@dataclasses.dataclass(frozen=True)
class Pair:
    """The workers of one try. `prefill` is None where the other is a regular worker."""

    prefill: Worker | None
    decode: Worker


class Registry:
    """All workers, in the order in which they came."""

    def __init__(self, breaker: BreakerConfig) -> None:
        self._breaker = breaker
        self._workers: dict[str, Worker] = {}
        self.on_added: list[Callable[[Worker], None]] = []
        self.on_forgotten: list[Callable[[Worker], None]] = []

    @property
    def workers(self) -> list[Worker]:
        """All of them, draining ones too."""
        return list(self._workers.values())

    def usable(self, role: WorkerRole) -> list[Worker]:
        """Workers of a role that are alive and not drained."""
        return [worker for worker in self._workers.values() if worker.spec.role is role and worker.usable]

    def find(self, name: str) -> Worker | None:
        """The worker with this id or URL."""
        by_url = self._workers.get(name.rstrip("/"))
        return by_url or next((worker for worker in self._workers.values() if worker.id == name), None)

    def add(self, spec: WorkerSpec) -> Worker:
        """A new worker, not known to be alive yet; its URL must be new."""
        assert spec.url not in self._workers, "ask `find` first"
        return self._put(Worker(spec=spec, breaker=Breaker(self._breaker), bootstrap_port=spec.bootstrap_port))

    def move(self, worker: Worker, role: WorkerRole) -> Worker | None:
        """It does something else now, and is known anew, by the same id; drained if it was. None: it was leaving."""
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
        """No new requests from now on; those that run go on."""
        if not worker.draining:
            log.info("%s %s is draining: %d requests run", worker.spec.role, worker.spec.url, worker.inflight)
        worker.draining = True

    def resume(self, worker: Worker) -> None:
        """New requests again."""
        worker.draining = worker.leaving = False

    def remove(self, worker: Worker) -> None:
        """Drain it and then forget it, at once where nothing runs there."""
        self.drain(worker)
        worker.leaving = True
        self.settle(worker)

    def settle(self, worker: Worker) -> None:
        """A request has ended there: if it was the last one of a worker that is leaving, the worker is gone."""
        if worker.leaving and worker.inflight == 0:
            self.forget(worker)

    def forget(self, worker: Worker) -> None:
        """Not known any more, whatever runs there; that goes on."""
        if self._workers.get(worker.spec.url) is not worker:
            return
        del self._workers[worker.spec.url]
        worker.draining = worker.forgotten = True
        log.info("%s %s is removed", worker.spec.role, worker.spec.url)
        for tell in self.on_forgotten:
            tell(worker)
