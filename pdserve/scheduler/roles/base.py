"""What a role answers to the one scheduler loop. A role owns its queues; it never calls the executor's `run`."""

from __future__ import annotations

from typing import Protocol

from pdserve.executor.interface import BatchPlan, StepHandle, StepResult
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import WaitsFor
from pdserve.scheduler.req import Req


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
    def must_settle(self) -> bool:
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
