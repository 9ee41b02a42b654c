"""The role of a server without disaggregation: prefill chunks and decode rows share each step (continuous batching).

waiting -> active -> running -> finished
   ^______ retracted __|
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pdserve.protocol.engine_state import WaitsFor
from pdserve.protocol.messages import RequestTiming
from pdserve.scheduler.batch_planner import BatchPlanner
from pdserve.scheduler.context import SchedulerContext, validate_fits
from pdserve.scheduler.request import Req, WaitingQueue
from pdserve.scheduler.roles.base import MixedBatchRole, Queued, refuse_incoming
from pdserve.scheduler.step_log import DecodeStepLog


class MonolithRole(MixedBatchRole):
    """Admits a request when its prompt fits beside the expected growth of the running requests."""

    def __init__(self, context: SchedulerContext, waiting: WaitingQueue, step_log: DecodeStepLog | None = None) -> None:
        super().__init__(context, BatchPlanner(context, waiting, self._headroom_tokens), waiting, step_log)
        self._waiting = waiting

    def admit(self, req: Req) -> None:
        """See `SchedulerRole.admit`."""
        refuse_incoming(req)
        validate_fits(self._context, req.max_len)
        self.live[req.rid] = req
        self._waiting.add(req, resumed=req.saved is not None)

    @property
    def num_waiting(self) -> int:
        """See `SchedulerRole.num_waiting`."""
        return len(self._waiting)

    def is_queued(self, req: Req) -> bool:
        """See `SchedulerRole.is_queued`."""
        return req in self._waiting and req.times.started is None

    def poll(self) -> None:
        """End requests that have waited or run for too long; this role has no transfers."""
        self._end_timed_out()

    def members(self) -> Mapping[str, Queued]:
        """See `SchedulerRole.members`."""
        return {"num_queue_reqs": self._waiting, "num_running_reqs": self._in_batch()}

    def queues(self) -> dict[str, int]:
        """See `SchedulerRole.queues`."""
        return super().queues() | {"num_retracted_reqs": self._waiting.num_resumed}

    def waits_for(self, req: Req) -> WaitsFor:
        """See `SchedulerRole.waits_for`."""
        return "compute"

    def facts(self) -> dict[str, float]:
        """See `SchedulerRole.facts`. Seconds since the arrival of the next request, if it waits for memory."""
        waited_s = 0.0
        if len(self._waiting) and self._context.memory.table.num_free:
            first = self._waiting[0]
            if not self._batch_planner.prefilling.may_start(first):
                waited_s = self._context.clock.now() - first.times.arrived
        return super().facts() | {"memory_wait_s": waited_s}

    def _headroom_tokens(self, req: Req, without: Collection[str]) -> float:
        """See `Headroom`."""
        running, active = self._batch_planner.running, self._batch_planner.prefilling.active
        clip_tokens = self._context.limits.clip_tokens
        others = [other for other in active.values() if other.rid not in without]
        starting: int = sum(min(other.num_remaining, clip_tokens) for other in (req, *others))
        return running.expected_tokens(without) + running.ratio.value * starting

    def _timing(self, req: Req) -> RequestTiming:
        times = req.times
        if times.started is None or times.prefilled is None:
            return RequestTiming()
        first_step = None if times.second_token is None else times.second_token - times.prefilled
        return RequestTiming(
            queue_s=times.started - times.arrived,
            prefill_s=times.prefilled - times.started,
            first_decode_step_s=first_step,
            chunks=req.chunks,
        )
