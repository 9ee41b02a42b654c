"""The interface between the scheduler loop and a role. A role owns its queues; it never calls the executor's `run`."""

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
    """Plans batches and commits their results. The scheduler thread calls, in each step: `poll`, `plan`, `commit`."""

    @property
    def live(self) -> dict[str, Req]:
        """All requests of the role, by rid."""
        ...

    def admit(self, req: Req) -> None:
        """Put a new request into the first queue.

        Raises:
            RequestError: the request can never run here, or its bootstrap room is live; nothing was kept.
        """
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that have not started."""
        ...

    def poll(self) -> None:
        """Move requests between queues according to the state of their transfers."""
        ...

    @property
    def needs_sync(self) -> bool:
        """True when the next plan requires that no step is under way."""
        ...

    def plan(self, step: int) -> BatchPlan | None:
        """Return the batch of step `step`; None when there is nothing to compute."""
        ...

    def launched(self, handle: StepHandle) -> None:
        """Called once the plan is launched; `handle.marks` is set where the scheduler requests layer events."""
        ...

    def commit(self, plan: BatchPlan, result: StepResult) -> None:
        """Take the result of a plan. The next plan may be launched already; rows of ended requests are ignored."""
        ...

    def end(self, req: Req, failure: Failure | None) -> None:
        """End a live request early: with a failure, or as stopped by a stop string when `failure` is None."""
        ...

    def retract_all(self) -> None:
        """Release the memory of every request that can be computed again later. No step is under way."""
        ...

    def queues(self) -> dict[str, int]:
        """Queue lengths by SGLang's names."""
        ...

    def waits_for(self, req: Req) -> WaitsFor:
        """Return what a live request waits for: the peer, memory, compute, or the KV transfer."""
        ...

    def facts(self) -> dict[str, float]:
        """Numbers that steer the role, for `/get_server_info` and `/metrics`."""
        ...


class MixedBatchRole(abc.ABC):
    """Methods shared by the monolith and decode roles, which both plan mixed batches.

    `waiting` is the queue of requests whose prompt is computed on this server.
    """

    def __init__(self, core: SchedulerContext, waiting: WaitingQueue) -> None:
        self._core = core
        self._batch_planner = BatchPlanner(core, waiting, self._headroom_tokens)
        self.live: dict[str, Req] = {}

    @property
    def needs_sync(self) -> bool:
        """See `SchedulerRole.needs_sync`."""
        return self._batch_planner.needs_sync

    def plan(self, step: int) -> BatchPlan | None:
        """Decode rows first, then prefill chunks within the budget. On decode only retracted requests have chunks."""
        return self._batch_planner.plan(step)

    def launched(self, handle: StepHandle) -> None:  # noqa: B027
        """Do nothing: these roles send no KV."""

    def commit(self, plan: BatchPlan, result: StepResult) -> None:
        """Append the tokens and release finished requests. The first two tokens and the last one carry timing."""
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
        """Token slots that must stay free when `req` starts or resumes."""

    @abc.abstractmethod
    def _leave(self, req: Req) -> None:
        """Remove the request from all queues and release its memory."""

    @abc.abstractmethod
    def _timing(self, req: Req) -> RequestTiming:
        """The TTFT of the request, in parts, as far as they are known."""
