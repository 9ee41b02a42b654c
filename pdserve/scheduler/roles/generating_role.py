"""What monolith and decode role answer alike: their steps are `BatchPlanner`'s. Each adds where requests come from."""

from __future__ import annotations

import abc

from pdserve.executor.interface import BatchPlan, StepHandle, StepResult
from pdserve.protocol.messages import RequestTiming
from pdserve.scheduler.core import SchedulerContext
from pdserve.scheduler.generating import BatchPlanner
from pdserve.scheduler.req import Req
from pdserve.scheduler.waiting import WaitingQueue


class MixedBatchRole(abc.ABC):
    """The part of a `Role` that is about steps. `waiting` is for requests whose prompt is computed here."""

    def __init__(self, core: SchedulerContext, waiting: WaitingQueue) -> None:
        self._core = core
        self._generating = BatchPlanner(core, waiting, self._headroom_tokens)
        self.live: dict[str, Req] = {}

    @property
    def must_settle(self) -> bool:
        """See `Role.must_settle`."""
        return self._generating.must_settle

    def plan(self, step: int) -> BatchPlan | None:
        """Decode rows first, then chunks within the budget: on decode those of retracted requests alone."""
        return self._generating.plan(step)

    def launched(self, handle: StepHandle) -> None:  # noqa: B027
        """Nothing is sent anywhere."""

    def commit(self, plan: BatchPlan, result: StepResult) -> None:
        """Append the tokens; who has ended leaves. Timing goes with the first two tokens and the last."""
        for req, token, finish in self._generating.commit(self.live, plan, result):
            timing = self._timing(req) if finish or req.num_made <= 2 else None
            self._core.outbox.emit(req, (token,), finish, timing)
            if finish is not None:
                self._leave(req)

    def retract_all(self) -> None:
        """See `Role.retract_all`."""
        self._generating.retract_all()

    def facts(self) -> dict[str, float]:
        """See `Role.facts`."""
        return {"new_token_ratio": self._generating.running.ratio.value}

    @abc.abstractmethod
    def _headroom_tokens(self, req: Req) -> float:
        """What must stay free when `req` starts, or comes back."""

    @abc.abstractmethod
    def _leave(self, req: Req) -> None:
        """Forget it, and give back what it holds."""

    @abc.abstractmethod
    def _timing(self, req: Req) -> RequestTiming:
        """The time to its first token, in parts, as far as is known."""
