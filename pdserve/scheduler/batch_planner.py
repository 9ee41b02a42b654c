"""Prompts on their way through the model, in chunks. Shared by all roles (decode: retracted requests only).

waiting   no memory yet, in the order of the policy
   v
active    has a lease over all its known tokens and a row; what started, always goes on

A step has a budget of prompt tokens. The oldest active prompt comes first, but one that does not fit the step leaves up
to half of it to shorter prompts: those that can be finished in it, and then one that is at most half as long as what
is left of the long one. So a long prompt at most doubles its own time and holds nobody back for all of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator

from pdserve.executor.interface import BatchPlan, BatchRow, SampledToken, StepResult
from pdserve.protocol.messages import FinishReason
from pdserve.scheduler.context import SchedulerContext, plan_of
from pdserve.scheduler.decode_batch import DecodeBatch
from pdserve.scheduler.request import Req, WaitingQueue

BURST_STEPS = 2
"""Full steps of a burst: those that come together rarely are all there when the first is planned."""


class PrefillBudget:
    """Starts with a whole burst ahead."""

    def __init__(self, core: SchedulerContext) -> None:
        self._core = core
        self._left = 0
        self.refill()

    def refill(self) -> None:
        """Nobody streams: a burst may begin."""
        self._left = BURST_STEPS * self._core.limits.step_tokens

    def end(self) -> None:
        """Somebody does, whom no prompt of a burst may hold up."""
        self._left = 0

    def take(self, num_tokens: int) -> None:
        """The next step has so many tokens of prompts; who ends before they are computed gives none back."""
        self._left -= num_tokens

    @property
    def is_over(self) -> bool:
        """True when the next step is beside streams: the burst has less left than such a step may take."""
        return self._left < self._core.limits.mixed_step_tokens

    @property
    def budget(self) -> int:
        """Tokens of prompts that the next step may take."""
        limits = self._core.limits
        return limits.mixed_step_tokens if self.is_over else min(limits.step_tokens, self._left)


TIMES_BESIDE_STREAMS = 2
"""So many times as large is a part where streams pause."""


class BatchSplitter:
    """Rows of the step that was planned last and that no part has had yet. False when there are none."""

    def __init__(self, saturation_tokens: int | None) -> None:
        """See `StepLimits.saturation_tokens`. A part has at least half as many tokens: then it is nearly as efficient."""
        self._saturation_tokens = saturation_tokens
        self._most: float = math.inf
        self._prompts: deque[BatchRow] = deque()
        self._decode: list[BatchRow] = []

    def __bool__(self) -> bool:
        return bool(self._prompts or self._decode)

    def put(self, decode: list[BatchRow], prompts: list[BatchRow], *, beside_streams: bool = False) -> None:
        """The next step, when nothing is left of the last one."""
        assert not self
        self._decode, self._prompts = decode, deque(prompts)
        if self._saturation_tokens is not None:
            self._most = self._saturation_tokens * (TIMES_BESIDE_STREAMS if beside_streams else 1)

    def take(self) -> list[BatchRow]:
        """The next part: chunks of prompts, in turn; with the last of them the rows that decode, which come first."""
        part: list[BatchRow] = []
        taken, left = 0, sum(row.num_tokens for row in self._prompts)
        while self._prompts and not self._is_full(taken, left):
            row = self._prompts.popleft()
            part.append(row)
            taken, left = taken + row.num_tokens, left - row.num_tokens
        if self._prompts:
            return part
        decode, self._decode = self._decode, []
        return decode + part

    def drop(self, rid: str) -> None:
        """A request has ended, or gave way."""
        self._decode = [row for row in self._decode if row.rid != rid]
        self._prompts = deque(row for row in self._prompts if row.rid != rid)

    def clear(self) -> None:
        """All have."""
        self._decode, self._prompts = [], deque()

    def _is_full(self, taken: int, left: int) -> bool:
        """True when the next chunk is better off in the next part, behind `taken` tokens in this and with `left`."""
        return min(taken, left) >= self._most / 2 and taken + self._prompts[0].num_tokens > self._most


LOOK_AHEAD = 32
"""Waiting requests that a step looks at in vain: so many new ones, and so many of those that waited for a page."""
SCAN = 1024
"""Places of the queue that a step passes at most."""


class PrefillManager:
    """Admission and chunks. `headroom_tokens(req)` is memory that must stay free for what runs if `req` starts."""

    def __init__(
        self, core: SchedulerContext, waiting: WaitingQueue, headroom_tokens: Callable[[Req], float], *, needs_aux: bool
    ) -> None:
        self._core = core
        self._headroom_tokens = headroom_tokens
        self._needs_aux = needs_aux
        self.waiting = waiting
        self.active: dict[str, Req] = {}
        self._waits_for: dict[str, bytes] = {}
        """Waiting requests that would compute what an active one computes: the tokens up to the end of that page."""

    def plan(self, budget: int) -> list[BatchRow]:
        """The next chunks, at most `budget` tokens if prompts are cut; admits what waits while that, memory and rows
        last.
        """
        if not self.active and not len(self.waiting):
            return []
        whole = self._core.limits.chunk_tokens is None
        rows: list[BatchRow] = []
        long = next((req for req in self.active.values() if _left(req) > budget), None)
        if long is not None:
            spent = self._short_ones(budget // 2, long, rows)
            self._chunk(long, rows, budget - spent)
            return rows
        for req in self.active.values():
            budget -= self._chunk(req, rows, budget)
        for req in self._candidates():
            if budget <= 0 or (whole and rows and req.seq_len > budget):
                break
            if not self._start(req):
                break
            budget -= self._chunk(req, rows, _left(req) if whole else budget)
        return rows

    @property
    def ends_under_way(self) -> bool:
        """True while a step under way computes the last chunk of a prompt that gets more than one token."""
        return any(req.seq_len == req.planned < req.max_len for req in self.active.values())

    @property
    def restores(self) -> bool:
        """True when a request can come back whose KV is in host memory: nothing may be under way when it does."""
        if not self.waiting.num_resumed:
            return False
        head = self.waiting[0]
        return head.saved is not None and self._may_start(head)

    def committed(self, req: Req, end: int) -> bool:
        """The chunk up to `end` is computed; True when all is (the request leaves `active`)."""
        req.computed = end
        if req.spec.traced and req.times.prefilled is None:
            self._note_chunk(req, end)
        self._core.cache(req)
        if end < req.seq_len:
            return False
        del self.active[req.rid]
        if req.times.prefilled is None:
            if not req.spec.probe:
                self._core.counters["prompt_tokens"] += req.num_prompt
                self._core.counters["cached_tokens"] += req.num_cached
            req.times.prefilled = self._core.clock.now()
        return True

    def remove(self, req: Req) -> None:
        """Forget a request that ends early."""
        if req in self.waiting:
            self.waiting.remove(req)
        self.active.pop(req.rid, None)
        self._waits_for.pop(req.rid, None)

    # ------------------------------------------------------------------ inside

    def _note_chunk(self, req: Req, end: int) -> None:
        assert req.times.started is not None
        req.chunks = [] if req.chunks is None else req.chunks
        req.chunks.append((self._core.clock.now() - req.times.started, end))

    def _short_ones(self, budget: int, long: Req, rows: list[BatchRow]) -> int:
        """Chunks of prompts that end within `budget` tokens, and of one that ends long before `long` does; once it has
        started, half of `budget` is kept for it. How many tokens they take.
        """
        spent = 0
        partial: Req | None = None
        for req in self.active.values():
            if req is long:
                continue
            if _left(req) <= budget - spent:
                spent += self._chunk(req, rows, budget)
            else:
                partial = partial or req
        most = budget if partial is None else budget - min(_left(partial), budget // 2)
        for req in self._candidates():
            if spent >= most:
                break
            missing = req.seq_len - self._num_cached(req)
            if missing <= most - spent:
                if not self._start(req):
                    break
                spent += self._chunk(req, rows, budget)
            elif partial is None and missing <= _left(long) // 2:
                partial = req
        if partial is not None and spent < budget and (partial.rid in self.active or self._start_alone(partial)):
            spent += self._chunk(partial, rows, budget - spent)
        return spent

    def _start_alone(self, req: Req) -> bool:
        """Start `req` unless what was started since it was looked at computes its next page."""
        num_cached = self._num_cached(req)
        under_way = self._may_use(req, num_cached) and self._next_page(req, num_cached) in self._under_way()
        return not under_way and self._start(req)

    def _under_way(self) -> set[bytes]:
        """The next pages of active prompts, where others can use them."""
        pages = (self._next_page(req, req.computed) for req in self.active.values())
        return {page for page in pages if page is not None}

    def _candidates(self) -> Iterator[Req]:
        """The head of the queue, without those whose next page an active prompt computes just now: they wait for it."""
        self.waiting.refresh()
        under_way = self._under_way()
        place = num_new = num_again = 0
        while place < min(SCAN, len(self.waiting)) and num_new < LOOK_AHEAD:
            req = self.waiting[place]
            waits_for = self._waits_for.get(req.rid)
            if waits_for is not None and (waits_for in under_way or num_again == LOOK_AHEAD):
                place += 1
                continue
            num_cached = self._num_cached(req)
            next_page = self._next_page(req, num_cached)
            if next_page is not None and next_page in under_way and self._may_use(req, num_cached):
                self._waits_for[req.rid] = next_page
            else:
                self._waits_for.pop(req.rid, None)
                yield req
            if req.rid not in self.active:
                place += 1
                num_new += waits_for is None
                num_again += waits_for is not None
            elif next_page is not None:
                under_way.add(next_page)

    def _next_page(self, req: Req, num_tokens: int) -> bytes | None:
        """The tokens up to the end of the page after the first `num_tokens`; None when no page that others can use."""
        page_tokens = self._core.memory.layout.page_tokens
        end = (num_tokens // page_tokens + 1) * page_tokens
        return req.packed(end) if self._core.memory.has_prefix_cache and end < req.seq_len else None

    def _may_use(self, req: Req, num_cached: int) -> bool:
        """Whether `req` would take the page behind the first `num_cached` tokens from the cache."""
        return num_cached + self._core.memory.layout.page_tokens <= req.most_cached

    def _may_start(self, req: Req) -> bool:
        """True when there are a row, an aux slot, and memory for it beside what the running ones will need."""
        memory = self._core.memory
        if memory.table.num_free == 0 or (self._needs_aux and memory.aux.num_free == 0):
            return False
        left = memory.num_available - memory.num_taken(req.num_reserved, *self._prefix(req))
        alone = not self.active and memory.table.num_free == memory.table.num_rows
        return left >= 0 and (alone or left * memory.layout.page_tokens >= self._headroom_tokens(req))

    def _start(self, req: Req) -> bool:
        """Give a waiting request memory, row, aux slot, and what is cached or saved of it; False when it must wait."""
        core, memory = self._core, self._core.memory
        if not self._may_start(req) or (req.saved is not None and not core.settled):
            return False
        req.lease = memory.reserve_tokens(req.num_reserved, req.rid, *self._prefix(req))
        if req.lease is None:
            return False
        if self._needs_aux:
            req.aux = memory.aux.reserve(1, req.rid)
        self.waiting.remove(req)
        self.active[req.rid] = req
        seated = core.assign_slot(req)
        assert seated, "a row was free"
        if req.saved is not None:
            core.restore(req)
        else:
            req.computed = req.lease.num_prefix_pages * memory.layout.page_tokens
        req.planned = req.computed
        if req.num_retractions:
            core.counters["recomputed_tokens"] += req.seq_len - 1 - req.computed
        if req.times.started is None:
            req.times.started = core.clock.now()
            req.num_cached = min(req.computed, req.num_prompt)
        return True

    def _prefix(self, req: Req) -> tuple[bytes, int]:
        """What may be taken from the cache."""
        return (b"", 0) if req.saved is not None else (req.packed(req.seq_len), req.most_cached)

    def _num_cached(self, req: Req) -> int:
        return self._core.memory.match_prefix(*self._prefix(req))

    def _chunk(self, req: Req, rows: list[BatchRow], budget: int) -> int:
        """Add the next chunk of at most `budget` tokens; how many it takes. One that is cut ends with a page."""
        assert req.row is not None
        take = min(_left(req), budget)
        if take < _left(req):
            page_tokens = self._core.memory.layout.page_tokens
            aligned = (req.planned + take) // page_tokens * page_tokens - req.planned
            take = aligned if aligned > 0 else take
        if take <= 0:
            return 0
        end = req.planned + take
        rows.append(BatchRow(req.rid, req.row, req.planned, end, sample=end == req.seq_len))
        req.planned = end
        return take


def _left(req: Req) -> int:
    return req.seq_len - req.planned


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
    def needs_sync(self) -> bool:
        """See `SchedulerRole.needs_sync`."""
        return not self._parts and (self.running.is_short or self.prefilling.restores)

    def plan(self, step: int) -> BatchPlan | None:
        """Decode rows first, then chunks within the budget, in parts."""
        if not self._parts:
            if not self._any_request_streams():
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

    def _any_request_streams(self) -> bool:
        """True when somebody waits for a token after the first, which itself may be under way."""
        waits = any(req.planned < req.max_len for req in self.running.reqs.values())
        return waits or self.prefilling.ends_under_way

    def _retract(self, req: Req) -> None:
        self._core.retract(req)
        self.prefilling.waiting.add(req, resumed=True)
