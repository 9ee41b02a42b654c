"""The registry of workers, the state of each worker with its circuit breaker, and the state of pairs of workers.

Each field of `Worker` has one writer:

    Registry    the set of workers; draining, leaving, forgotten
    discovery   pod_ready
    health      healthy, ended, late_checks, good_checks, last_error, bootstrap_port, facts, report
    admission   inflight, breaker (`health` closes it for a new process)
    proxy       attempts, ended_bytes: `Attempt`, and `Dispatcher` for prefill's answers; num_sent; num_moving,
                num_arriving, num_moved_away: `Migrator`

`workers.api` adds and removes workers while the router runs:

    add ──> checked, dead ──> healthy ──> draining: no new requests ──> the last request has ended: forgotten

A worker whose role has changed is a new `Worker` at the same URL, without state: see `move`.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from pdserve.router.config.config import BreakerConfig, WorkerRole, WorkerSpec


class BreakerState(enum.StrEnum):
    """State of a breaker; `OPEN` admits no requests."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclasses.dataclass(frozen=True)
class Permit:
    """Permission to send one request.

    `opening`: the number of the opening during which it is a probe; None: not a probe. `answered`: the probe counted as
    a success, though its request may still fail.
    """

    opening: int | None
    answered: bool = False


class Breaker:
    """The circuit breaker of one worker; all times are arguments, in seconds of one clock.

        CLOSED ── failures without a success between them, within the window ──> OPEN: no requests
        OPEN ── open_s seconds ──> HALF_OPEN: at most as many concurrent requests as successes are missing
        HALF_OPEN ── enough successes ──> CLOSED;   HALF_OPEN ── a request fails ──> OPEN
        any ── the worker's process has ended, and its successor is healthy ──> CLOSED

    `admission` admits a pair if both breakers admit it, and then enters both. So no probe is spent on a pair that the
    other breaker refuses. `health` calls `renew`.
    """

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._failures: deque[float] = deque()
        self._opened_at: float | None = None
        self._openings = 0
        self._successes = 0
        self._probes = 0

    def state(self, now: float) -> BreakerState:
        """Return the state at the time `now`."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._opened_at + self._config.open_s else BreakerState.HALF_OPEN

    def admits(self, now: float) -> bool:
        """Whether a request may be sent."""
        state = self.state(now)
        if state is BreakerState.HALF_OPEN:
            return self._probes < self._config.success_threshold - self._successes
        return state is BreakerState.CLOSED

    def retry_in_s(self, now: float) -> float:
        """Return the seconds until the breaker is half open; 0 unless it is open."""
        return 0.0 if self._opened_at is None else max(0.0, self._opened_at + self._config.open_s - now)

    def enter(self, now: float) -> Permit:
        """Take a permit for a request that the breaker `admits`; return it with `leave` in any case."""
        assert self.admits(now), "call `admits` first"
        if self._opened_at is None:
            return Permit(None)
        self._probes += 1
        return Permit(self._openings)

    def leave(self, held: Permit) -> None:
        """Return a permit. A request without a reported result does not count."""
        if self._is_probe(held) and not held.answered:
            self._probes -= 1

    def answered(self, held: Permit) -> Permit:
        """Report that a good answer has begun, which is a probe's success. Returns the permit to hold from now on."""
        if not self._is_probe(held) or held.answered:
            return held
        self._probes -= 1
        self._successes += 1
        if self._successes >= self._config.success_threshold:
            self._opened_at = None
            self._failures.clear()
            self._successes = self._probes = 0
        return dataclasses.replace(held, answered=True)

    def completed(self) -> None:
        """Report that a good answer has ended, which resets the failure count."""
        if self._opened_at is None:
            self._failures.clear()

    def renew(self) -> None:
        """Close the breaker, because a new process serves at the worker's URL."""
        self._opened_at = None
        self._successes = self._probes = 0
        self._failures.clear()

    def failed(self, held: Permit, now: float) -> None:
        """Report a failed request. Unless the breaker is closed, only probes count."""
        if not self._config.enabled:
            return
        if self._opened_at is not None:
            if self._is_probe(held):
                self._open(now)
            return
        self._failures.append(now)
        while self._failures[0] <= now - self._config.window_s:
            self._failures.popleft()
        if len(self._failures) >= self._config.failure_threshold:
            self._open(now)

    def _open(self, now: float) -> None:
        self._opened_at = now
        self._openings += 1
        self._successes = self._probes = 0
        self._failures.clear()

    def _is_probe(self, held: Permit) -> bool:
        """Whether the permit is a probe of the current opening."""
        return self._opened_at is not None and held.opening == self._openings


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


class RunningAttempt(Protocol):
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
    pod_ready: bool = True
    """False: Kubernetes reports that its pod is not ready; see `Registry.usable`."""
    inflight: int = 0
    num_moving: int = 0
    """Requests that move, or wait to move, to other workers."""
    num_arriving: int = 0
    """Requests of other workers that are being moved to this one."""
    num_moved_away: int = 0
    """Requests that have moved to other workers."""
    num_sent: int = 0
    """Requests that were sent to the worker."""
    late_checks: int = 0
    good_checks: int = 0
    report: LoadReport | None = None
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    token_id: str | None = None
    """The `control_token_id` of its `/get_server_info`; None: not known."""
    last_error: str | None = "not checked yet"
    ended: bool = False
    """True: a connection was refused since the worker was last healthy, so that its process has ended."""
    released: bool = False
    """True: the worker runs and takes no requests, because its memory is released until a command takes it again."""
    attempts: set[RunningAttempt] = dataclasses.field(default_factory=set)
    """Running attempts at this worker."""
    ended_bytes: int = 0
    """Bytes of answers in ended attempts; a prefill answer counts as one."""

    @property
    def bytes_received(self) -> int:
        """Bytes of answers in all attempts. A worker whose count grows is alive, even if a health check times out."""
        return self.ended_bytes + sum(one.num_bytes(self) for one in self.attempts)

    def lose(self, reason: str) -> None:
        """End all attempts at a silent worker. After the end of a process its connections break by themselves."""
        for one in list(self.attempts):
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
        self.on_draining: list[Callable[[Worker], None]] = []

    @property
    def workers(self) -> list[Worker]:
        """All workers, including draining ones."""
        return list(self._workers.values())

    def usable(self, role: WorkerRole) -> list[Worker]:
        """Return the workers of a role that are healthy and not draining.

        Workers whose pods are not ready are left out while another one remains.
        """
        found = [worker for worker in self._workers.values() if worker.spec.role is role and worker.usable]
        return [worker for worker in found if worker.pod_ready] or found

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
        moved = Worker(spec=spec, breaker=Breaker(self._breaker), bootstrap_port=None, id=worker.id)
        moved.draining, moved.pod_ready = draining, worker.pod_ready
        return self._put(moved)

    def _put(self, worker: Worker) -> Worker:
        self._workers[worker.spec.url] = worker
        for notify in self.on_added:
            notify(worker)
        return worker

    def drain(self, worker: Worker) -> None:
        """Send no new requests to the worker; running requests continue."""
        if not worker.draining:
            log.info("%s %s is draining: %d requests run", worker.spec.role, worker.spec.url, worker.inflight)
        worker.draining = True
        for notify in self.on_draining:
            notify(worker)

    def resume(self, worker: Worker) -> None:
        """Send new requests to the worker again."""
        worker.draining = worker.leaving = False

    def remove(self, worker: Worker) -> None:
        """Drain the worker, and remove it when its last request has ended; at once without running requests."""
        self.drain(worker)
        worker.leaving = True
        self.remove_if_drained(worker)

    def remove_if_drained(self, worker: Worker) -> None:
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
        for notify in self.on_forgotten:
            notify(worker)


FAILURES = 2
"""Failed probes in a row after which a pair is down."""


@dataclasses.dataclass(eq=False)
class PairState:
    """State of one pair. Times are the event loop's; None: never."""

    served_at: float | None = None
    """Last time at which an answer to a request or a probe began."""
    probed_at: float | None = None
    """Start of the latest probe."""
    wanted: bool = False
    """True: a request failed, so that a probe is due."""
    num_failed: int = 0
    """Failed probes since the pair last served."""
    down_since: float | None = None
    """Time at which the pair went down; None: it is not down."""
    error: str | None = None
    other_tokens: bool = False
    """True: the pair is down because its workers reported different control tokens."""

    @property
    def down(self) -> bool:
        """Whether the pair gets no requests."""
        return self.down_since is not None


class Pairs:
    """States of all pairs that were used or probed, from the results of requests and probes. Owned by `admission`.

        unknown ── a request or probe succeeds ──> serving ── probes fail ──> down ── one succeeds ──> serving
            └───────────────────────────────────── probes fail ────────────────^

    Both workers may be healthy while their pair fails: a stuck session, or a network that blocks only the peer. An
    unknown pair counts as serving. `dispatch` reports requests, `watchdog` reports probes, `admission` reads the state.
    """

    def __init__(self, registry: Registry) -> None:
        self._states: dict[Pair, PairState] = {}
        self._num_down = 0
        registry.on_forgotten.append(self._forget)

    @property
    def any_down(self) -> bool:
        """Whether at least one pair is down."""
        return self._num_down > 0

    def serves(self, pair: Pair) -> bool:
        """Whether the pair is not down."""
        state = self._states.get(pair)
        return state is None or not state.down

    def could_serve(self, prefills: Iterable[Worker], decodes: Iterable[Worker]) -> bool:
        """Whether at least one pair of these workers is not down."""
        if not self.any_down:
            return True
        others = list(decodes)
        return any(self.serves(Pair(prefill, decode)) for prefill in prefills for decode in others)

    def state(self, pair: Pair) -> PairState:
        """Return the state of a pair, created if unknown; the state of a removed worker's pair is not stored."""
        if pair.decode.forgotten or (pair.prefill is not None and pair.prefill.forgotten):
            return PairState()
        return self._states.setdefault(pair, PairState())

    def served(self, pair: Pair, now: float) -> bool:
        """Report that an answer has begun. True if the pair was down."""
        state = self.state(pair)
        was_down = state.down
        self._num_down -= was_down
        state.served_at, state.num_failed = now, 0
        state.down_since = state.error = None
        state.wanted = state.other_tokens = False
        return was_down

    def suspect(self, pair: Pair) -> None:
        """Report a request that failed through a worker's fault, so that a probe is due."""
        self.state(pair).wanted = True

    def failed(self, pair: Pair, begun: float, error: str, now: float) -> bool:
        """Report a failed probe that began at `begun`. True if the pair went down by it."""
        state = self.state(pair)
        if state.served_at is not None and state.served_at >= begun:
            return False
        state.num_failed += 1
        state.error = state.error if state.other_tokens else error
        if state.down or state.num_failed < FAILURES:
            return False
        state.down_since = now
        self._num_down += 1
        return True

    def differ(self, pair: Pair, error: str, now: float) -> bool:
        """Report that the workers have different control tokens. True if the pair went down by it."""
        state = self.state(pair)
        was_down, state.other_tokens, state.error = state.down, True, error
        if was_down:
            return False
        state.down_since = now
        self._num_down += 1
        return True

    @property
    def any_differ(self) -> bool:
        """Whether a pair of usable workers is down because they have different control tokens."""
        return any(
            state.other_tokens and pair.decode.usable and (pair.prefill is None or pair.prefill.usable)
            for pair, state in self._states.items()
        )

    def _forget(self, worker: Worker) -> None:
        for pair in [pair for pair in self._states if worker in (pair.prefill, pair.decode)]:
            self._num_down -= self._states.pop(pair).down

    def shown(self, now: float) -> list[dict[str, Any]]:
        """Return the state of all known pairs, for `/observe`."""
        return [
            {
                "prefill": None if pair.prefill is None else pair.prefill.spec.url,
                "decode": pair.decode.spec.url,
                "serving": not state.down,
                "served_age_s": None if state.served_at is None else now - state.served_at,
                "down_s": None if state.down_since is None else now - state.down_since,
                "error": state.error,
            }
            for pair, state in self._states.items()
        ]

    def __iter__(self) -> Iterator[tuple[Pair, PairState]]:
        return iter(list(self._states.items()))
