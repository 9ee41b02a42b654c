"""The decode batch: requests that get one token a step, or several with drafts, the KV pages they grow into, and
retraction when memory runs out.

The monolith and decode roles share it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from pdserve.executor.interface import BatchRow, SampledToken
from pdserve.protocol.messages import FinishReason
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.request import PriorityRules, Req
from pdserve.scheduler.speculation import Speculation

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
        self._speculation = context.speculation
        self.reqs: dict[str, Req] = {}

    def add(self, req: Req) -> None:
        """Decode `req` from the next step on."""
        self.reqs[req.rid] = req

    @property
    def is_short(self) -> bool:
        """True when the next step needs more pages than are available: no step may be under way when it is planned."""
        num_available = self._context.memory.num_available
        return len(self.reqs) > num_available and self._pages_wanted(1) > num_available

    @property
    def needs_sync(self) -> bool:
        """True when no step may be under way at the next plan: pages are short, or drafts may be planned.

        With several pipeline stages a row with drafts only waits for its own results.
        """
        if self.is_short:
            return True
        speculation = self._speculation
        if speculation is None or not self.reqs or self._context.limits.num_stages > 1:
            return False
        return speculation.needs_sync(self.reqs.values())

    def expected_tokens(self, without: Collection[str] = ()) -> float:
        """KV token slots that the running requests are still expected to take, without these rids: whole pages."""
        reqs = [req for req in self.reqs.values() if req.rid not in without]
        left = sum(min(req.num_remaining, self._context.limits.clip_tokens) for req in reqs)
        return self.ratio.value * left + self._context.memory.layout.tokens_in(len(reqs))

    def plan(self, num_prompt_tokens: int = 0) -> list[BatchRow]:
        """Return one row per request that has memory: the row computes the last token and samples the next.

        `num_prompt_tokens`: prompt tokens that the step is likely to compute beside the rows. They make drafts cheaper.

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
            if self._speculation is not None:
                self._add_drafts(self._speculation, rows, num_prompt_tokens)
        return rows

    def commit_drafts(
        self, req: Req, row: BatchRow, sampled: tuple[SampledToken, ...]
    ) -> tuple[tuple[SampledToken, ...], FinishReason | None]:
        """Append the tokens that `row`, which had drafts, has sampled, up to the one that ends the request.

        Returns:
            The appended tokens, and the finish reason of a finished request, which leaves the batch. `computed` counts
            the accepted drafts before the last appended token; KV behind them is never used.
        """
        assert self._speculation is not None and req.computed == row.start and sampled
        finish: FinishReason | None = None
        num_taken = 0
        while finish is None and num_taken < len(sampled):
            finish = self.commit(req, sampled[num_taken])
            num_taken += 1
        req.planned = req.computed
        self._speculation.committed(req, len(row.drafts), len(sampled) - 1, num_taken)
        return sampled[:num_taken], finish

    def commit(self, req: Req, token: SampledToken) -> FinishReason | None:
        """Append the token of this step; a finished request leaves the batch, another one may be due to be stored."""
        req.computed += 1
        finish = self._context.append(req, token)
        if req.times.second_token is None:
            req.times.second_token = self._context.clock.now()
        storage = self._context.storage
        if finish is not None:
            del self.reqs[req.rid]
        elif storage is not None and storage.is_due(req.computed):
            self._context.cache(req)
        return finish

    # ------------------------------------------------------------------ inside

    def _add_drafts(self, speculation: Speculation, rows: list[BatchRow], num_prompt_tokens: int) -> None:
        """Extend the planned `rows` by drafts, where these pay and memory is free: drafts retract no request."""
        num_drafts = 0
        context = self._context
        overlaps = not context.no_step_in_flight and context.limits.num_stages == 1
        if speculation.is_due and not overlaps:
            settled: dict[int, Req] = {}
            most: dict[int, int] = {}
            for index, row in enumerate(rows):
                req = self.reqs[row.rid]
                if row.start == req.computed:
                    settled[index], most[index] = req, req.max_len - row.end
            for index, drafts in speculation.choose(settled, most, len(rows), num_prompt_tokens).items():
                row, req = rows[index], settled[index]
                taken = drafts[: self._grow_for_drafts(req, row.end + len(drafts)) - row.end]
                if taken:
                    rows[index] = self._with_drafts(req, row, taken)
                    num_drafts += len(taken)
        speculation.planned(len(rows), num_drafts, overlaps=overlaps)

    def _with_drafts(self, req: Req, row: BatchRow, drafts: tuple[int, ...]) -> BatchRow:
        end = row.end + len(drafts)
        if self._context.memory.layout.window:
            self._context.cover_window(req, row.start, end)
        req.planned = end
        return msgspec.structs.replace(row, end=end, drafts=drafts)

    def _grow_for_drafts(self, req: Req, num_tokens: int) -> int:
        """Grow the request to `num_tokens` if a page for each running request stays available; returns the tokens, at
        most as many, that its pages hold.
        """
        memory, lease = self._context.memory, req.lease
        assert lease is not None
        held = memory.layout.tokens_in(len(lease.pages))
        num_spare = memory.num_available - len(self.reqs)
        if num_tokens > held and memory.num_pages(num_tokens) - len(lease.pages) <= num_spare:
            self._context.grow(req, num_tokens)
            held = memory.layout.tokens_in(len(lease.pages))
        return min(num_tokens, held)

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
