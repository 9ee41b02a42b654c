"""The aggregated server: prefill chunks and decode rows share each step (continuous batching).

waiting -> prefilling -> running -> finished
"""

from __future__ import annotations

from pdserve.errors import RequestError
from pdserve.executor.interface import BatchPlan, StepResult
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import FinishReason, RequestTiming
from pdserve.scheduler.core import Core, Prefilling, Running, plan_of
from pdserve.scheduler.req import Req, finish_for_failure


class MonolithRole:
    """Reserves a request's worst case when it starts, so that a running request can always finish."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._prefilling = Prefilling(core, lambda req: req.num_worst, needs_aux=False)
        self._running = Running(core)
        self.live: dict[str, Req] = {}

    def admit(self, req: Req) -> None:
        """See `Role.admit`."""
        check_fits(self._core, req.num_worst)
        self.live[req.rid] = req
        self._prefilling.waiting.append(req)

    def poll(self) -> None:
        """Nothing to wait for."""

    def plan(self, step: int) -> BatchPlan | None:
        """Decode rows first, then chunks within the budget."""
        return plan_of(step, self._running.plan() + self._prefilling.plan())

    def commit(self, plan: BatchPlan, result: StepResult) -> None:
        """Append sampled tokens; finished prompts join the running."""
        for row, token in zip(plan.rows, result.tokens, strict=True):
            req = self.live[row.rid]
            if row.rid in self._running.reqs:
                assert token is not None
                finish = self._running.commit(req, token)
            else:
                if not self._prefilling.committed(req, row.end):
                    continue
                assert token is not None
                finish = self._core.append(req, token)
                if finish is None:
                    self._running.add(req)
            timing = self._timing(req) if finish or len(req.output_ids) <= 2 else None
            self._core.outbox.emit(req, (token,), finish, timing)
            if finish is not None:
                self._leave(req)

    def end(self, req: Req, failure: Failure | None) -> None:
        """See `Role.end`."""
        self._prefilling.remove(req)
        self._running.reqs.pop(req.rid, None)
        self._leave(req)
        finish = FinishReason(type="stop") if failure is None else finish_for_failure(failure)
        self._core.outbox.emit(req, (), finish, self._timing(req))

    def queues(self) -> dict[str, int]:
        """See `Role.queues`."""
        return {
            "num_queue_reqs": len(self._prefilling.waiting),
            "num_running_reqs": len(self._prefilling.active) + len(self._running.reqs),
        }

    def _leave(self, req: Req) -> None:
        del self.live[req.rid]
        self._core.release(req)

    def _timing(self, req: Req) -> RequestTiming:
        times = req.times
        if times.started is None or times.prefilled is None:
            return RequestTiming()
        first_step = None if times.second_token is None else times.second_token - times.prefilled
        return RequestTiming(
            queue_s=times.started - times.arrived,
            prefill_s=times.prefilled - times.started,
            first_decode_step_s=first_step,
        )


def check_fits(core: Core, num_tokens: int) -> None:
    """Refuse what could never run, however long it waits.

    Raises:
        RequestError: 400.
    """
    if core.memory.num_pages(num_tokens) > core.memory.pages.num_total:
        raise RequestError(
            f"prompt and max_new_tokens need {num_tokens} tokens of KV memory, the pool has {core.memory.max_tokens}",
            field="max_new_tokens",
        )
    if core.memory.num_pages(num_tokens) > core.memory.table.max_pages_per_row:
        longest = core.memory.table.max_pages_per_row * core.memory.layout.page_tokens
        raise RequestError(
            f"prompt and max_new_tokens are {num_tokens} tokens, a request can have {longest}", field="max_new_tokens"
        )
