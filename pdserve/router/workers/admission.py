"""Admission of requests: the choice of a pair, the slots at its workers, and the queue for slots.

    enter ─┬─ a pair with free slots ────────────────────> PairSlots: one slot at each worker, until `close`
           ├─ no healthy worker, or all breakers open ───> Failure
           └─ `Full` ─┬─ room in the queue ──────────────> PairSlots when a slot is free; Failure after a timeout
                      └─ the queue is full ──────────────> Failure at once

Choosing a pair and taking its slots is one step without an await. A request takes the slots of both workers or of none.
So it spends no breaker probe of one worker while the other is unavailable. The queue is first come, first served; only
retries of admitted requests go to its head. Called by `dispatch`. Code that may free slots calls `wake`: health checks,
the worker API, pair probes, the role switch and the application's tick.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import random
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

from pdserve.protocol.failure import Failure
from pdserve.router.config.config import RouterConfig, WorkerRole
from pdserve.router.policies import Candidate, Policy, RoutedRequest, make_policy
from pdserve.router.workers.metrics import RouterMetrics
from pdserve.router.workers.workers import Pair, Pairs, Permit, Registry, Worker

MAX_RETRY_AFTER_S = 60
STALE_LOADS = 3
"""Age in load intervals after which a load report is ignored."""


def own_failure(code: str, message: str, *, retry_after_s: int = 1) -> Failure:
    """Return a 503 of the router itself, not of a worker. `code` is also a metric label."""
    return Failure(code=code, message=message, origin="router", status=503, retry_after_s=retry_after_s)


NO_PAIR = own_failure("no_pair", "no pair of prefill and decode workers serves requests")
OTHER_TOKENS = Failure(
    code="control_token_mismatch",
    message="no pair of prefill and decode workers serves requests: they have different values of "
    "PDSERVE_CONTROL_TOKEN, or some have none; the router's log names them",
    origin="router",
    status=502,
)
ABORTED = Failure(
    code="aborted",
    message="aborted while it waited in the router's queue",
    origin="router",
    retryable=False,
    status=400,
)


@dataclasses.dataclass(frozen=True)
class Full:
    """No pair has free slots now, so the request may wait.

    The router's total limit is reached, all available workers of a role are full, or no pair of free workers serves.
    """


class Slot:
    """A slot for one request at one worker: counted until `close`, and reported to the worker's breaker."""

    def __init__(self, admission: Admission, worker: Worker) -> None:
        self.worker = worker
        self._admission = admission
        self._permit: Permit = worker.breaker.enter(admission.now())
        self._open = True
        worker.inflight += 1

    def answered(self) -> None:
        """A good answer has begun."""
        self._permit = self.worker.breaker.answered(self._permit)

    def completed(self) -> None:
        """A good answer has ended."""
        self.answered()
        self.worker.breaker.completed()

    def failed(self) -> None:
        """The worker failed the request."""
        self.worker.breaker.failed(self._permit, self._admission.now())

    def close(self) -> None:
        """Release the slot."""
        if not self._open:
            return
        self._open = False
        self.worker.inflight -= 1
        self.worker.breaker.leave(self._permit)
        self._admission.on_slot_released(self.worker)


class PairSlots:
    """The slots of one attempt. `prefill` is released as soon as prefill has answered."""

    def __init__(self, admission: Admission, pair: Pair, *, is_pair: bool = True) -> None:
        """Not `is_pair`: a decode worker alone continues a request that has moved there."""
        self._admission = admission
        self._open = True
        self.pair = pair
        self.is_pair = is_pair
        self.prefill = None if pair.prefill is None else Slot(admission, pair.prefill)
        self.decode = Slot(admission, pair.decode)
        admission.num_inside += 1

    def __iter__(self) -> Iterator[Slot]:
        return iter([self.decode] if self.prefill is None else [self.prefill, self.decode])

    def at(self, worker: Worker) -> Slot:
        """Return the slot at one of the two workers."""
        return next(slot for slot in self if slot.worker is worker)

    def close(self) -> None:
        """Release both slots."""
        if self._open:
            self._open = False
            self._admission.num_inside -= 1
            for slot in self:
                slot.close()


@dataclasses.dataclass(eq=False)
class _Waiter:
    request: RoutedRequest
    avoid: Collection[Worker]
    rids: frozenset[str]
    future: asyncio.Future[PairSlots | Failure]


class Admission:
    """Admission of one router; event loop only."""

    def __init__(self, config: RouterConfig, registry: Registry, metrics: RouterMetrics, rng: random.Random) -> None:
        self._config = config
        self._roles = config.roles
        self._limits = config.limits
        self._registry = registry
        self._rng = rng
        self._waiting: deque[_Waiter] = deque()
        self._queue_wait = QueueWaitEstimator()
        self.metrics = metrics
        self.pairs = Pairs(registry)
        self.num_inside = 0
        self.policies: dict[WorkerRole, Policy] = {role: make_policy(config.policies, role) for role in config.roles}

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @staticmethod
    def now() -> float:
        """Return the event loop's time, the clock of breakers, reports and deadlines."""
        return asyncio.get_running_loop().time()

    def could_serve(self) -> bool:
        """Whether a healthy, not draining worker of each role exists, and a pair of them that is not down."""
        usable = {role: self._registry.usable(role) for role in self._roles}
        if not all(usable.values()):
            return False
        if WorkerRole.REGULAR in usable:
            return any(self.pairs.serves(Pair(None, worker)) for worker in usable[WorkerRole.REGULAR])
        return self.pairs.could_serve(usable[WorkerRole.PREFILL], usable[WorkerRole.DECODE])

    def why_no_pair(self) -> Failure:
        """Return the refusal while no pair of healthy workers serves."""
        return OTHER_TOKENS if self.pairs.any_differ else NO_PAIR

    async def enter(
        self,
        request: RoutedRequest,
        avoid: Collection[Worker] = (),
        *,
        again: bool = False,
        rids: frozenset[str] = frozenset(),
    ) -> PairSlots | Failure:
        """Return slots for one attempt. Waits while the choice is `Full`, unless the queue is full.

        Workers in `avoid` are chosen only without an alternative. `again`: a retry, which goes to the queue's head.
        `rids`: the client's request ids, for `abort`. The caller closes the slots.
        """
        if not self._waiting or again:
            entered = self._try_enter(request, avoid)
            if not isinstance(entered, Full):
                return entered
        if len(self._waiting) >= self._limits.queue_size and not again:
            return self._refuse_full(f"{len(self._waiting)} requests wait already", "queue_full")
        return await self._wait(_Waiter(request, avoid, rids, asyncio.get_running_loop().create_future()), again)

    def enter_at(self, worker: Worker) -> PairSlots | None:
        """Take a slot at the decode worker that has a moved request.

        None if the worker was removed or its breaker is open. Limits of requests and failed health checks do not apply:
        the request runs there already.
        """
        admits = not worker.forgotten and worker.breaker.admits(self.now())
        return PairSlots(self, Pair(None, worker), is_pair=False) if admits else None

    def wake(self) -> None:
        """Admit requests from the head of the queue while slots are free."""
        while self._waiting:
            waiter = self._waiting[0]
            if not waiter.future.done():
                entered = self._try_enter(waiter.request, waiter.avoid)
                if isinstance(entered, Full):
                    break
                waiter.future.set_result(entered)
            self._waiting.popleft()

    def abort(self, rid: str | None) -> int:
        """Refuse the queued requests with the id `rid`, or all for None; returns their number."""
        found = [waiter for waiter in self._waiting if rid is None or rid in waiter.rids]
        for waiter in found:
            if not waiter.future.done():
                waiter.future.set_result(ABORTED)
        return len(found)

    def refuse_waiting(self, failure: Failure) -> None:
        """Refuse all queued requests."""
        for waiter in self._waiting:
            if not waiter.future.done():
                waiter.future.set_result(failure)

    def on_slot_released(self, worker: Worker) -> None:
        """A slot was released."""
        self._queue_wait.note(self.now())
        self._registry.remove_if_drained(worker)
        self.wake()

    async def _wait(self, waiter: _Waiter, again: bool) -> PairSlots | Failure:
        (self._waiting.appendleft if again else self._waiting.append)(waiter)
        begun = self.now()
        try:
            async with asyncio.timeout(self._limits.queue_timeout_s):
                return await waiter.future
        except TimeoutError:
            if waiter.future.done() and not waiter.future.cancelled():
                return waiter.future.result()
            return self._refuse_full(f"no slot was free within {self._limits.queue_timeout_s:g} s", "queue_timeout")
        except asyncio.CancelledError:
            self._take_back(waiter)
            raise
        finally:
            self.metrics.queue_seconds.observe(self.now() - begun)
            with contextlib.suppress(ValueError):
                self._waiting.remove(waiter)

    def _take_back(self, waiter: _Waiter) -> None:
        """Release slots that were granted to a request whose client had just disconnected."""
        if waiter.future.done() and not waiter.future.cancelled():
            given = waiter.future.result()
            if isinstance(given, PairSlots):
                given.close()

    def _refuse_full(self, message: str, code: str) -> Failure:
        after_s = self._queue_wait.retry_after_s(self.now(), len(self._waiting))
        return own_failure(code, message, retry_after_s=after_s)

    def _try_enter(self, request: RoutedRequest, avoid: Collection[Worker]) -> PairSlots | Failure | Full:
        limit, now = self._limits.max_concurrent_requests, self.now()
        found = {role: self._free(role, now) for role in self._roles}
        for free in found.values():
            if isinstance(free, Failure):
                return free
        if limit is not None and self.num_inside >= limit:
            return Full()
        lists: dict[WorkerRole, list[Worker]] = {}
        for role, free in found.items():
            if isinstance(free, Full):
                return free
            assert isinstance(free, list)
            lists[role] = free
        chosen: dict[WorkerRole, Worker] = {}
        for role, free in lists.items():
            serving = self._serving(role, free, lists, chosen) if self.pairs.any_down else free
            if not serving:
                return Full() if self.could_serve() else self.why_no_pair()
            wanted = [worker for worker in serving if worker not in avoid] or serving
            chosen[role] = self._choose(role, wanted, request, now)
        for role, worker in chosen.items():
            self.policies[role].chosen(worker.spec.url, request, now)
        return PairSlots(
            self, Pair(chosen.get(WorkerRole.PREFILL), chosen.get(WorkerRole.DECODE) or chosen[WorkerRole.REGULAR])
        )

    def _free(self, role: WorkerRole, now: float) -> list[Worker] | Failure | Full:
        """Return the workers of a role that can take a request now."""
        usable = self._registry.usable(role)
        if not usable:
            return own_failure("no_worker", f"no healthy {role} worker")
        passing = [worker for worker in usable if worker.breaker.admits(now)]
        if not passing:
            after = min(worker.breaker.retry_in_s(now) for worker in usable)
            message = f"the circuit breaker of every {role} worker is open"
            return own_failure("breaker_open", message, retry_after_s=max(1, math.ceil(after)))
        limit = self._limits.max_inflight
        return [worker for worker in passing if limit is None or worker.inflight < limit] or Full()

    def _serving(
        self,
        role: WorkerRole,
        free: list[Worker],
        lists: dict[WorkerRole, list[Worker]],
        chosen: dict[WorkerRole, Worker],
    ) -> list[Worker]:
        """Return the `free` workers of a role whose pair with the chosen, or with a free, partner is not down."""
        if role is WorkerRole.REGULAR:
            return [worker for worker in free if self.pairs.serves(Pair(None, worker))]
        if role is WorkerRole.PREFILL:
            return [worker for worker in free if self.pairs.could_serve([worker], lists[WorkerRole.DECODE])]
        return [worker for worker in free if self.pairs.serves(Pair(chosen[WorkerRole.PREFILL], worker))]

    def _choose(self, role: WorkerRole, workers: list[Worker], request: RoutedRequest, now: float) -> Worker:
        max_age_s = STALE_LOADS * self._config.health.load_interval_s
        candidates = [Candidate(worker.spec.url, worker.load(now, max_age_s)) for worker in workers]
        return workers[self.policies[role].choose(candidates, request, self._rng)]


class QueueWaitEstimator:
    """Estimates `Retry-After` of refused requests from the rate at which slots are released."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=64)

    def note(self, now: float) -> None:
        """Record a released slot."""
        self._times.append(now)

    def retry_after_s(self, now: float, num_waiting: int) -> int:
        """Return whole seconds, 1 to `MAX_RETRY_AFTER_S`, until half of the queue has moved up at the current rate."""
        if len(self._times) < 2 or now <= self._times[0]:
            return 1
        seconds = (now - self._times[0]) / len(self._times) * num_waiting / 2
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(seconds)))


def rids_of(body: dict[str, Any]) -> frozenset[str]:
    """Return the client's ids of a request, from `rid`: one or several."""
    rid = body.get("rid")
    given = rid if isinstance(rid, list) else [rid]
    return frozenset(one for one in given if isinstance(one, str))
