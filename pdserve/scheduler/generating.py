"""The part of a role that generates text: a running batch and prompts on their way into it, in one step.

Monolith and decode role have one each, see `roles/generating_role`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pdserve.executor.interface import BatchPlan, SampledToken, StepResult
from pdserve.protocol.messages import FinishReason
from pdserve.scheduler.burst import PrefillBudget
from pdserve.scheduler.core import SchedulerContext, plan_of
from pdserve.scheduler.parts import BatchSplitter
from pdserve.scheduler.prefilling import PrefillManager
from pdserve.scheduler.req import Req
from pdserve.scheduler.running import DecodeBatch
from pdserve.scheduler.waiting import WaitingQueue


class BatchPlanner:
    """Owns `DecodeBatch` and `PrefillManager`, and brings retracted requests from one back to the other.

    `headroom_tokens(req)` must stay free when `req` starts.
    """

    def __init__(self, core: SchedulerContext, waiting: WaitingQueue, headroom_tokens: Callable[[Req], float]) -> None:
        self._core = core
        self.running = DecodeBatch(core, self._retract)
        self.prefilling = PrefillManager(core, waiting, headroom_tokens, needs_aux=False)
        self._burst = PrefillBudget(core)
        self._parts = BatchSplitter(core.limits.saturation_tokens)

    @property
    def must_settle(self) -> bool:
        """See `Role.must_settle`."""
        return not self._parts and (self.running.is_short or self.prefilling.restores)

    def plan(self, step: int) -> BatchPlan | None:
        """Decode rows first, then chunks within the budget, in parts."""
        if not self._parts:
            if not self._somebody_streams():
                self._burst.refill()
            beside_streams = self._burst.is_over
            decode, prompts = self.running.plan(), self.prefilling.plan(self._burst.budget)
            if prompts:
                self._burst.take(sum(row.num_tokens for row in prompts))
            elif decode:
                self._burst.end()
            self._parts.put(decode, prompts, beside_streams=beside_streams)
        return plan_of(step, self._parts.take())

    def commit(
        self, live: dict[str, Req], plan: BatchPlan, result: StepResult
    ) -> Iterator[tuple[Req, SampledToken, FinishReason | None]]:
        """The requests that got a token, and how they ended if they did; finished prompts join the running."""
        for index, (row, token) in enumerate(zip(plan.rows, result.tokens, strict=True)):
            req = live.get(row.rid)
            if req is None or req.row != row.row:
                continue
            if index in result.prompts:
                self._core.outbox.emit_prompt(req, result.prompts[index])
            if row.rid in self.running.reqs:
                assert token is not None
                yield req, token, self.running.commit(req, token)
            elif self.prefilling.committed(req, row.end):
                assert token is not None
                finish = self._core.append(req, token)
                if finish is None:
                    self.running.add(req)
                    if len(req.output_ids) > 1:
                        self._burst.end()
                yield req, token, finish

    def remove(self, req: Req) -> None:
        """Forget a request, wherever it stands."""
        self.prefilling.remove(req)
        self.running.reqs.pop(req.rid, None)
        self._parts.drop(req.rid)

    def retract_all(self) -> None:
        """All that runs, and prompts under way, wait again without memory. No step may be under way."""
        taken = [*self.running.reqs.values(), *self.prefilling.active.values()]
        self.running.reqs.clear()
        self.prefilling.active.clear()
        self._parts.clear()
        for req in taken:
            self._core.counters["requests_retracted"] += 1
            self._retract(req)

    def _somebody_streams(self) -> bool:
        """True when somebody waits for a token after the first, which itself may be under way."""
        waits = any(req.planned < req.num_worst for req in self.running.reqs.values())
        return waits or self.prefilling.ends_under_way

    def _retract(self, req: Req) -> None:
        self._core.retract(req)
        self.prefilling.waiting.add(req, resumed=True)
