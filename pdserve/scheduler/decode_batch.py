"""Requests that get one token a step, the memory they grow into, and who gives way when there is none.

Shared by monolith and decode role.
"""

from __future__ import annotations

from collections.abc import Callable

from pdserve.executor.interface import BatchRow, SampledToken
from pdserve.protocol.messages import FinishReason
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.request import Req

RETRACT_STEPS = 16
"""Retraction frees memory for so many further steps of those that stay, so that it does not come every step."""
CLIP_TOKENS = 4096
"""Most output tokens that are reckoned with ahead; few requests use up a larger `max_new_tokens`."""


class NewTokenRatio:
    """The share of their remaining output that running requests are expected to use. Starts high, falls with each
    step that went well, and rises to what was really needed when memory has run out.
    """

    INIT, LEAST, DECAY_STEPS = 0.7, 0.098, 600

    def __init__(self, conservativeness: float) -> None:
        self._init = min(1.0, self.INIT * conservativeness)
        self._least = min(self._init, self.LEAST * conservativeness)
        self._decay = (self._init - self._least) / self.DECAY_STEPS
        self.value = self._init

    def decay(self) -> None:
        """A decode step went well."""
        self.value = max(self._least, self.value - self._decay)

    def reset(self) -> None:
        """Nothing runs: what comes next may be of another kind."""
        self.value = self._init

    def raise_to(self, reqs: list[Req]) -> None:
        """Memory ran out with these running: expect of the others what these have used, and some steps more."""
        used = sum(len(req.output_ids) + RETRACT_STEPS for req in reqs)
        allowed = sum(len(req.output_ids) + min(req.num_left, CLIP_TOKENS) for req in reqs)
        self.value = max(self.value, min(1.0, used / max(1, allowed)))


class DecodeBatch:
    """The running batch. `retract(req)` is told to take a request back that must give way."""

    def __init__(self, core: SchedulerContext, retract: Callable[[Req], None]) -> None:
        self._core = core
        self._retract = retract
        self.ratio = NewTokenRatio(core.limits.conservativeness)
        self.reqs: dict[str, Req] = {}

    def add(self, req: Req) -> None:
        """Decode `req` from the next step on."""
        self.reqs[req.rid] = req

    @property
    def is_short(self) -> bool:
        """True when the next step needs more memory than there is: nothing may be under way when it is planned."""
        num_available = self._core.memory.num_available
        return len(self.reqs) > num_available and self._pages_wanted(1) > num_available

    def expected_tokens(self) -> float:
        """KV token slots that the running requests are still expected to take, whole pages."""
        left = sum(min(req.num_left, CLIP_TOKENS) for req in self.reqs.values())
        return self.ratio.value * left + self._core.memory.layout.page_tokens * len(self.reqs)

    def plan(self) -> list[BatchRow]:
        """One row per request that has memory for it: compute the last token, sample the next.

        With stages, of those that no step under way has, and only their share: every stage gets as many.
        """
        if not self.reqs:
            self.ratio.reset()
            return []
        if self.is_short:
            self._make_room()
        page_tokens = self._core.memory.layout.page_tokens
        num_stages = self._core.limits.num_stages
        share = -(-len(self.reqs) // num_stages)
        rows: list[BatchRow] = []
        for req in self.reqs.values():
            planned, row, lease = req.planned, req.row, req.lease
            assert row is not None and lease is not None
            if planned >= req.max_len or (num_stages > 1 and planned > req.computed):
                continue
            if len(rows) == share:
                break
            if planned >= len(lease.pages) * page_tokens and not self._core.grow(req, planned + 1):
                continue
            rows.append(BatchRow(req.rid, row, planned, planned + 1, sample=True))
            req.planned = planned + 1
        if rows:
            self.ratio.decay()
        return rows

    def commit(self, req: Req, token: SampledToken) -> FinishReason | None:
        """The token of this step; a finished request leaves."""
        req.computed += 1
        finish = self._core.append(req, token)
        if req.times.second_token is None:
            req.times.second_token = self._core.clock.now()
        if finish is not None:
            del self.reqs[req.rid]
        return finish

    # ------------------------------------------------------------------ inside

    def _pages_wanted(self, num_steps: int) -> int:
        """Pages that so many steps of all would take."""
        page_tokens = self._core.memory.layout.page_tokens
        wanted = 0
        for req in self.reqs.values():
            assert req.lease is not None
            end = min(req.planned + num_steps, req.max_len)
            missing = end - len(req.lease.pages) * page_tokens
            if missing > 0:
                wanted += -(-missing // page_tokens)
        return wanted

    def _has_all(self, req: Req) -> bool:
        """True when the request has all the memory that it can need."""
        assert req.lease is not None
        return len(req.lease.pages) >= self._core.memory.num_pages(req.max_len)

    def _make_room(self) -> None:
        """Retract requests, those that are cheapest to bring back first.

        The oldest stays, and those that need no more memory.
        """
        memory = self._core.memory
        oldest = min(self.reqs.values(), key=lambda req: req.times.arrived)
        victims = [req for req in self.reqs.values() if req is not oldest and not self._has_all(req)]
        victims.sort(key=lambda req: (-req.computed, req.times.arrived))
        self.ratio.raise_to(list(self.reqs.values()))
        while victims and self._pages_wanted(RETRACT_STEPS) > memory.num_available:
            req = victims.pop()
            del self.reqs[req.rid]
            req.num_retractions += 1
            self._core.counters["requests_retracted"] += 1
            self._retract(req)
