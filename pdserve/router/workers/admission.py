"""Who may go to which workers, and when: the choice of a pair, the places at its workers, and the queue for them.

    enter ─┬─ a pair with room ──────────────────────────> Places: one at each worker, until `close`
           ├─ nobody alive, every breaker open ──────────> Refused
           └─ all who could take it are full ──> queue ──> Places when somebody leaves; Refused after a while

Choosing a pair and taking its places is one step without an await: a pair is entered as a whole or not at all, and
what a breaker allows for one half is not spent when the other half cannot be had. First come, first served; only a
request that was in already, and is tried again, goes to the head. Called by `dispatch`; `health` and `workers_api`
call `wake` when there may be room.
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

from pdserve.router.config.config import RouterConfig, WorkerRole
from pdserve.router.policies import Candidate, Policy, RoutedRequest, make_policy
from pdserve.router.workers.breaker import Permit
from pdserve.router.workers.metrics import RouterMetrics
from pdserve.router.workers.pairs import Pairs
from pdserve.router.workers.workers import Pair, Registry, Worker

MAX_RETRY_AFTER_S = 60
STALE_LOADS = 3
"""A report older than so many intervals is not believed any more."""


@dataclasses.dataclass(frozen=True)
class Refused:
    """No try could be made. `reason` is a short word for metrics, `message` for the client."""

    reason: str
    message: str
    retry_after_s: int = 1
    status: int = 503


NO_PAIR = Refused("no_pair", "no pair of prefill and decode workers serves requests")


@dataclasses.dataclass(frozen=True)
class Full:
    """Somebody could take it, but not now."""


class Slot:
    """One request at one worker: it counts there until `close`, and tells the worker's breaker how it went."""

    def __init__(self, admission: Admission, worker: Worker) -> None:
        self.worker = worker
        self._admission = admission
        self._pass: Permit = worker.breaker.enter(admission.now())
        self._open = True
        worker.inflight += 1

    def answered(self) -> None:
        """A good answer has begun."""
        self._pass = self.worker.breaker.answered(self._pass)

    def completed(self) -> None:
        """An answer was good to its end."""
        self.answered()
        self.worker.breaker.completed()

    def failed(self) -> None:
        """The worker failed the request."""
        self.worker.breaker.failed(self._pass, self._admission.now())

    def close(self) -> None:
        """The request is not there any more."""
        if not self._open:
            return
        self._open = False
        self.worker.inflight -= 1
        self.worker.breaker.leave(self._pass)
        self._admission.left(self.worker)


class PairSlots:
    """The places of one try. `prefill` is given back as soon as prefill has answered."""

    def __init__(self, admission: Admission, pair: Pair) -> None:
        self._admission = admission
        self._open = True
        self.pair = pair
        self.prefill = None if pair.prefill is None else Slot(admission, pair.prefill)
        self.decode = Slot(admission, pair.decode)
        admission.num_inside += 1

    def __iter__(self) -> Iterator[Slot]:
        return iter([self.decode] if self.prefill is None else [self.prefill, self.decode])

    def at(self, worker: Worker) -> Slot:
        """The place at one of the two workers."""
        return next(place for place in self if place.worker is worker)

    def close(self) -> None:
        """Give all back."""
        if self._open:
            self._open = False
            self._admission.num_inside -= 1
            for place in self:
                place.close()


@dataclasses.dataclass(eq=False)
class _Waiter:
    request: RoutedRequest
    avoid: Collection[Worker]
    rids: frozenset[str]
    future: asyncio.Future[PairSlots | Refused]


class Admission:
    """One per router; event loop only."""

    def __init__(self, config: RouterConfig, registry: Registry, metrics: RouterMetrics, rng: random.Random) -> None:
        self._config = config
        self._limits = config.limits
        self._registry = registry
        self._rng = rng
        self._waiting: deque[_Waiter] = deque()
        self._pace = QueueWaitEstimator()
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
        """The clock of breakers, reports and deadlines."""
        return asyncio.get_running_loop().time()

    def could_serve(self) -> bool:
        """Whether a worker of each role is alive and not drained, and two of them are not known to fail together."""
        usable = {role: self._registry.usable(role) for role in self._config.roles}
        if not all(usable.values()):
            return False
        if WorkerRole.REGULAR in usable:
            return any(self.pairs.serves(Pair(None, worker)) for worker in usable[WorkerRole.REGULAR])
        return self.pairs.could_serve(usable[WorkerRole.PREFILL], usable[WorkerRole.DECODE])

    async def enter(
        self,
        request: RoutedRequest,
        avoid: Collection[Worker] = (),
        *,
        again: bool = False,
        rids: frozenset[str] = frozenset(),
    ) -> PairSlots | Refused:
        """Places for one try, workers in `avoid` only where there is no other. Waits while all are full.

        `again`: not its first try. `rids`: what the client calls it, for `abort`. The caller closes the places.
        """
        if not self._waiting or again:
            entered = self._try_enter(request, avoid)
            if not isinstance(entered, Full):
                return entered
        if len(self._waiting) >= self._limits.queue_size and not again:
            return self._refuse_full(f"{len(self._waiting)} requests wait already", "queue_full")
        return await self._wait(_Waiter(request, avoid, rids, asyncio.get_running_loop().create_future()), again)

    def wake(self) -> None:
        """Let in from the head of the queue as many as there is room for."""
        while self._waiting:
            waiter = self._waiting[0]
            if not waiter.future.done():
                entered = self._try_enter(waiter.request, waiter.avoid)
                if isinstance(entered, Full):
                    break
                waiter.future.set_result(entered)
            self._waiting.popleft()

    def abort(self, rid: str | None) -> int:
        """Refuse those in the queue that are called `rid`, or all; returns how many."""
        found = [waiter for waiter in self._waiting if rid is None or rid in waiter.rids]
        for waiter in found:
            if not waiter.future.done():
                waiter.future.set_result(
                    Refused("aborted", "aborted while it waited in the router's queue", status=400)
                )
        return len(found)

    def refuse_waiting(self, refused: Refused) -> None:
        """Refuse all that wait in the queue."""
        for waiter in self._waiting:
            if not waiter.future.done():
                waiter.future.set_result(refused)

    def left(self, worker: Worker) -> None:
        """A place was given back."""
        self._pace.note(self.now())
        self._registry.settle(worker)
        self.wake()

    async def _wait(self, waiter: _Waiter, again: bool) -> PairSlots | Refused:
        (self._waiting.appendleft if again else self._waiting.append)(waiter)
        begun = self.now()
        try:
            async with asyncio.timeout(self._limits.queue_timeout_s):
                return await waiter.future
        except TimeoutError:
            if waiter.future.done() and not waiter.future.cancelled():
                return waiter.future.result()
            return self._refuse_full(f"no worker had room within {self._limits.queue_timeout_s:g} s", "queue_timeout")
        except asyncio.CancelledError:
            self._take_back(waiter)
            raise
        finally:
            self.metrics.queue_seconds.observe(self.now() - begun)
            with contextlib.suppress(ValueError):
                self._waiting.remove(waiter)

    def _take_back(self, waiter: _Waiter) -> None:
        """The client left in the moment in which its turn came."""
        if waiter.future.done() and not waiter.future.cancelled():
            given = waiter.future.result()
            if isinstance(given, PairSlots):
                given.close()

    def _refuse_full(self, message: str, reason: str) -> Refused:
        return Refused(reason, message, self._pace.retry_after_s(self.now(), len(self._waiting)))

    def _try_enter(self, request: RoutedRequest, avoid: Collection[Worker]) -> PairSlots | Refused | Full:
        limit = self._limits.max_concurrent_requests
        found = {role: self._free(role) for role in self._config.roles}
        for free in found.values():
            if isinstance(free, Refused):
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
                return Full() if self.could_serve() else NO_PAIR
            chosen[role] = self._choose(role, [worker for worker in serving if worker not in avoid] or serving, request)
        for role, worker in chosen.items():
            self.policies[role].chosen(worker.spec.url, request, self.now())
        return PairSlots(
            self, Pair(chosen.get(WorkerRole.PREFILL), chosen.get(WorkerRole.DECODE) or chosen[WorkerRole.REGULAR])
        )

    def _free(self, role: WorkerRole) -> list[Worker] | Refused | Full:
        """The workers of a role that can take a request now."""
        usable = self._registry.usable(role)
        if not usable:
            return Refused("no_worker", f"no healthy {role} worker")
        passing = [worker for worker in usable if worker.breaker.admits(self.now())]
        if not passing:
            after = min(worker.breaker.retry_in_s(self.now()) for worker in usable)
            message = f"every {role} worker failed too often of late"
            return Refused("breaker_open", message, max(1, math.ceil(after)))
        limit = self._limits.max_inflight
        return [worker for worker in passing if limit is None or worker.inflight < limit] or Full()

    def _serving(
        self,
        role: WorkerRole,
        free: list[Worker],
        lists: dict[WorkerRole, list[Worker]],
        chosen: dict[WorkerRole, Worker],
    ) -> list[Worker]:
        """Of the `free` workers of a role those that serve with the one that is chosen, or with a free one."""
        if role is WorkerRole.REGULAR:
            return [worker for worker in free if self.pairs.serves(Pair(None, worker))]
        if role is WorkerRole.PREFILL:
            return [worker for worker in free if self.pairs.could_serve([worker], lists[WorkerRole.DECODE])]
        return [worker for worker in free if self.pairs.serves(Pair(chosen[WorkerRole.PREFILL], worker))]

    def _choose(self, role: WorkerRole, workers: list[Worker], request: RoutedRequest) -> Worker:
        now, max_age_s = self.now(), STALE_LOADS * self._config.health.load_interval_s
        candidates = [Candidate(worker.spec.url, worker.load(now, max_age_s)) for worker in workers]
        return workers[self.policies[role].choose(candidates, request, self._rng)]


class QueueWaitEstimator:
    """How fast places come free, to tell those who are turned away when to come back."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=64)

    def note(self, now: float) -> None:
        """One came free."""
        self._times.append(now)

    def retry_after_s(self, now: float, num_waiting: int) -> int:
        """Whole seconds until the queue has moved up by half, at the latest pace; at least one."""
        if len(self._times) < 2 or now <= self._times[0]:
            return 1
        seconds = (now - self._times[0]) / len(self._times) * num_waiting / 2
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(seconds)))


def rids_of(body: dict[str, Any]) -> frozenset[str]:
    """What the client calls a request: `rid`, one or several."""
    rid = body.get("rid")
    given = rid if isinstance(rid, list) else [rid]
    return frozenset(one for one in given if isinstance(one, str))
