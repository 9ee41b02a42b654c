"""What a role answers to the one scheduler loop. A role owns its queues; it never calls the executor's `run`."""

from __future__ import annotations

import abc
from typing import Protocol

from pdserve.executor.interface import BatchPlan, StepHandle, StepResult
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import RequestTiming, WaitsFor
from pdserve.scheduler.batch_planner import BatchPlanner
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.request import Req, WaitingQueue


class SchedulerRole(Protocol):
    """A plan, not a program. Called by the scheduler thread, each step in this order: poll, plan, commit."""

    @property
    def live(self) -> dict[str, Req]:
        """All requests of the role, by rid."""
        ...

    def admit(self, req: Req) -> None:
        """Take a new request into the first queue.

        Raises:
            RequestError: it can never run here, or its room is live; nothing was kept.
        """
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that have not started."""
        ...

    def poll(self) -> None:
        """Move requests between queues according to what transfers say."""
        ...

    @property
    def needs_sync(self) -> bool:
        """True when the next plan can only be made once no step is under way."""
        ...

    def plan(self, step: int) -> BatchPlan | None:
        """What to compute next; None when nothing can be."""
        ...

    def launched(self, handle: StepHandle) -> None:
        """The plan is under way, with layer marks where the scheduler asks for them."""
        ...

    def commit(self, plan: BatchPlan, result: StepResult) -> None:
        """Take the result of a plan. The next one may have been launched already; rows of ended requests are void."""
        ...

    def end(self, req: Req, failure: Failure | None) -> None:
        """End a live request early: with a failure, or quietly (its stop string was seen)."""
        ...

    def retract_all(self) -> None:
        """Take its memory from everything that can be computed again later. No step is under way."""
        ...

    def queues(self) -> dict[str, int]:
        """Queue lengths by SGLang's names."""
        ...

    def waits_for(self, req: Req) -> WaitsFor:
        """What a live request waits for: the other half, memory, its turn to be computed, or KV on its way."""
        ...

    def facts(self) -> dict[str, float]:
        """Numbers that steer the role, for `/get_server_info` and `/metrics`."""
        ...


class MixedBatchRole(abc.ABC):
    """The part of a `SchedulerRole` that is about steps. `waiting` is for requests whose prompt is computed here."""

    def __init__(self, core: SchedulerContext, waiting: WaitingQueue) -> None:
        self._core = core
        self._batch_planner = BatchPlanner(core, waiting, self._headroom_tokens)
        self.live: dict[str, Req] = {}

    @property
    def needs_sync(self) -> bool:
        """See `SchedulerRole.needs_sync`."""
        return self._batch_planner.needs_sync

    def plan(self, step: int) -> BatchPlan | None:
        """Decode rows first, then chunks within the budget: on decode those of retracted requests alone."""
        return self._batch_planner.plan(step)

    def launched(self, handle: StepHandle) -> None:  # noqa: B027
        """Nothing is sent anywhere."""

    def commit(self, plan: BatchPlan, result: StepResult) -> None:
        """Append the tokens; who has ended leaves. Timing goes with the first two tokens and the last."""
        for req, token, finish in self._batch_planner.commit(self.live, plan, result):
            timing = self._timing(req) if finish or req.num_made <= 2 else None
            self._core.outbox.emit(req, (token,), finish, timing)
            if finish is not None:
                self._leave(req)

    def retract_all(self) -> None:
        """See `SchedulerRole.retract_all`."""
        self._batch_planner.retract_all()

    def facts(self) -> dict[str, float]:
        """See `SchedulerRole.facts`."""
        return {"new_token_ratio": self._batch_planner.running.ratio.value}

    @abc.abstractmethod
    def _headroom_tokens(self, req: Req) -> float:
        """What must stay free when `req` starts, or comes back."""

    @abc.abstractmethod
    def _leave(self, req: Req) -> None:
        """Forget it, and give back what it holds."""

    @abc.abstractmethod
    def _timing(self, req: Req) -> RequestTiming:
        """The time to its first token, in parts, as far as is known."""
