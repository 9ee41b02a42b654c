"""The part of a role that generates text: a running batch and prompts on their way into it, in one step.

Monolith and decode role have one each, see `roles/generating_role`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pdserve.executor.interface import BatchPlan, SampledToken, StepResult
from pdserve.protocol.messages import FinishReason
from pdserve.scheduler.core import Core, plan_of
from pdserve.scheduler.parts import StepInParts
from pdserve.scheduler.prefilling import Prefilling
from pdserve.scheduler.req import Req
from pdserve.scheduler.running import Running
from pdserve.scheduler.waiting import WaitingQueue


class Generating:
    """Owns `Running` and `Prefilling`, and brings retracted requests from one back to the other.

    `headroom_tokens(req)` must stay free when `req` starts.
    """

    def __init__(self, core: Core, waiting: WaitingQueue, headroom_tokens: Callable[[Req], float]) -> None:
        self._core = core
        self.running = Running(core, self._retract)
        self.prefilling = Prefilling(core, waiting, headroom_tokens, needs_aux=False)
        self._parts = StepInParts(core.limits.saturation_tokens)

    @property
    def must_settle(self) -> bool:
        """See `Role.must_settle`."""
        return not self._parts and (self.running.is_short or self.prefilling.restores)

    def plan(self, step: int) -> BatchPlan | None:
        """Decode rows first, then chunks within the budget; in parts where nobody streams."""
        if not self._parts:
            streams = self._has_streams()
            self._parts.put(self.running.plan(), self.prefilling.plan(beside_streams=streams), together=streams)
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

    def _has_streams(self) -> bool:
        """True when somebody waits for more than a second token, be it in a step under way.

        Who has only just had the first may belong to a burst, whose next step then takes as many as the first.
        """
        return any(req.num_prompt < req.planned < req.num_worst for req in self.running.reqs.values())

    def _retract(self, req: Req) -> None:
        self._core.retract(req)
        self.prefilling.waiting.add(req, resumed=True)
