"""The decode batch: requests that get one token a step, the KV pages they grow into, and retraction when memory runs
out.

The monolith and decode roles share it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from pdserve.executor.interface import BatchRow, SampledToken
from pdserve.protocol.messages import FinishReason
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.request import PriorityRules, Req

RETRACT_STEPS = 16
"""Retraction frees enough memory for this many further steps of the remaining requests, so that it stays rare."""


class NewTokenRatio:
    """The share of their remaining output that running requests are expected to use (as SGLang's `new_token_ratio`).

    The ratio starts high, at `init` times `conservativeness`, and falls with each decode step. Retraction raises it to
    the measured use. `clip_tokens`: see `StepLimits`.
    """

    LEAST_SHARE, DECAY_STEPS = 0.14, 600

    def __init__(self, init: float, conservativeness: float, clip_tokens: int) -> None:
        self._clip_tokens = clip_tokens
        self._init = min(1.0, init * conservativeness)
        self._least = min(self._init, self.LEAST_SHARE * init * conservativeness)
        self._decay = (self._init - self._least) / self.DECAY_STEPS
        self.value = self._init

    def decay(self) -> None:
        """Lower the ratio by one step; called for each planned decode step."""
        self.value = max(self._least, self.value - self._decay)

    def reset(self) -> None:
        """Set the ratio to its initial value: the decode batch is empty."""
        self.value = self._init

    def raise_to(self, reqs: list[Req]) -> None:
        """Raise the ratio after memory ran out while `reqs` ran.

        The new value is the share of the allowed output that these requests have used, `RETRACT_STEPS` more tokens
        each.
        """
        used = sum(len(req.output_ids) + RETRACT_STEPS for req in reqs)
        allowed = sum(len(req.output_ids) + min(req.num_remaining, self._clip_tokens) for req in reqs)
        self.value = max(self.value, min(1.0, used / max(1, allowed)))


class DecodeBatch:
    """The decode batch. `retract(req)` releases the memory of a retracted request and queues the request again."""

    def __init__(self, context: SchedulerContext, retract: Callable[[Req], None], rules: PriorityRules) -> None:
        self._context = context
        self._retract = retract
        self._rules = rules
        limits = context.limits
        self.ratio = NewTokenRatio(limits.init_new_token_ratio, limits.conservativeness, limits.clip_tokens)
        self.reqs: dict[str, Req] = {}

    def add(self, req: Req) -> None:
        """Decode `req` from the next step on."""
        self.reqs[req.rid] = req

    @property
    def is_short(self) -> bool:
        """True when the next step needs more pages than are available: no step may be under way when it is planned."""
        num_available = self._context.memory.num_available
        return len(self.reqs) > num_available and self._pages_wanted(1) > num_available

    def expected_tokens(self, without: Collection[str] = ()) -> float:
        """KV token slots that the running requests are still expected to take, without these rids: whole pages."""
        reqs = [req for req in self.reqs.values() if req.rid not in without]
        left = sum(min(req.num_remaining, self._context.limits.clip_tokens) for req in reqs)
        return self.ratio.value * left + self._context.memory.layout.tokens_in(len(reqs))

    def plan(self) -> list[BatchRow]:
        """Return one row per request that has memory: the row computes the last token and samples the next.

        With several pipeline stages, the rows come only from requests in no step under way. A step takes an equal share
        of the batch, so that every stage gets as many rows.
        """
        if not self.reqs:
            self.ratio.reset()
            return []
        if self.is_short:
            self._make_room()
        page_tokens = self._context.memory.layout.tokens_in(1)
        has_window = self._context.memory.layout.window > 0
        num_stages = self._context.limits.num_stages
        share = -(-len(self.reqs) // num_stages)
        rows: list[BatchRow] = []
        for req in self.reqs.values():
            planned, row, lease = req.planned, req.row, req.lease
            assert row is not None and lease is not None
            if planned >= req.max_len or (num_stages > 1 and planned > req.computed):
                continue
            if len(rows) == share:
                break
            if planned >= len(lease.pages) * page_tokens and not self._context.grow(req, planned + 1):
                continue
            if has_window:
                self._context.cover_window(req, planned, planned + 1)
            rows.append(BatchRow(req.rid, row, planned, planned + 1, sample=True))
            req.planned = planned + 1
        if rows:
            self.ratio.decay()
        return rows

    def commit(self, req: Req, token: SampledToken) -> FinishReason | None:
        """Append the token of this step; a finished request leaves the batch."""
        req.computed += 1
        finish = self._context.append(req, token)
        if req.times.second_token is None:
            req.times.second_token = self._context.clock.now()
        if finish is not None:
            del self.reqs[req.rid]
        return finish

    # ------------------------------------------------------------------ inside

    def _pages_wanted(self, num_steps: int) -> int:
        """Return the pages that `num_steps` further steps of all requests would take."""
        page_tokens = self._context.memory.layout.tokens_in(1)
        wanted = 0
        for req in self.reqs.values():
            assert req.lease is not None
            missing = min(req.planned + num_steps, req.max_len) - len(req.lease.pages) * page_tokens
            if missing > 0:
                wanted += self._context.memory.num_pages(missing)
        return wanted

    def _has_all(self, req: Req) -> bool:
        """True when the request has all the memory that it can need."""
        assert req.lease is not None
        return len(req.lease.pages) >= self._context.memory.num_pages(req.max_len)

    def _make_room(self) -> None:
        """Retract requests until `RETRACT_STEPS` further steps fit; those with the least computed KV go first.

        The oldest request stays, and so do requests that need no more memory. With priority scheduling the least urgent
        go first, and the oldest of the most urgent ones stays.
        """
        memory, level = self._context.memory, self._rules.level
        first = min(self.reqs.values(), key=lambda req: (level(req.spec), req.times.arrived))
        victims = [req for req in self.reqs.values() if req is not first and not self._has_all(req)]
        victims.sort(key=lambda req: (level(req.spec), -req.computed, req.times.arrived))
        self.ratio.raise_to(list(self.reqs.values()))
        while victims and self._pages_wanted(RETRACT_STEPS) > memory.num_available:
            req = victims.pop()
            del self.reqs[req.rid]
            req.num_retractions += 1
            self._context.counters["requests_retracted"] += 1
            self._retract(req)
