"""Batch planning: admission, chunked prefill, and what a step holds. All roles share it.

waiting   holds no memory; in the order of the schedule policy
   v
active    has a row and a lease over its known tokens; keeps both until its prompt is complete, or a pause retracts it

A step has a budget of prompt tokens. The oldest active prompt comes first. A prompt longer than the budget leaves up to
half of the budget to shorter prompts. Prompts that finish in this step take that half first. One prompt of at most half
the remaining length takes the rest. So other prompts at most double the TTFT of a long prompt, and never wait for all
of it.

On decode only retracted requests, and requests whose KV transfer failed, are prefilled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from pdserve.executor.interface import BatchPlan, BatchRow, SampledToken, StepResult
from pdserve.protocol.messages import FinishReason
from pdserve.scheduler.context import SchedulerContext, group_leases, plan_of
from pdserve.scheduler.decode_batch import DecodeBatch
from pdserve.scheduler.request import Req, WaitingQueue
from pdserve.scheduler.state_stops import StateStops
from pdserve.scheduler.step_parts import BatchSplitter, PrefillBudget, StepKind

PREFILL_TOKENS, CACHE_TOKENS, DECODE_TOKENS = (
    f"realtime_tokens.{mode}" for mode in ("prefill_compute", "prefill_cache", "decode")
)
"""Counters by SGLang's name and label: prompt tokens computed and taken from the cache, and tokens of decode rows.

Tokens that are computed again count again.
"""
LOOK_AHEAD = 32
"""A step passes over at most this many new requests, and as many that waited for a page in an earlier step."""
SCAN = 1024
"""Most queue positions that a step passes."""


Headroom = Callable[[Req, Collection[str]], float]
"""`headroom(req, without)`: token slots that must stay free when `req` starts, once the rids `without` do not run."""


class PrefillManager:
    """Admission and chunked prefill. With `needs_aux` a request also needs an aux slot to start."""

    def __init__(
        self,
        context: SchedulerContext,
        waiting: WaitingQueue,
        headroom_tokens: Headroom,
        *,
        needs_aux: bool,
    ) -> None:
        self._context = context
        self._headroom_tokens = headroom_tokens
        self._needs_aux = needs_aux
        self.waiting = waiting
        self._has_groups = context.memory.groups.is_used
        self._states = StateStops(context) if context.memory.has_cached_states else None
        self.active: dict[str, Req] = {}
        self._waits_for: dict[str, bytes] = {}
        """By rid of a waiting request that needs a page an active request computes: the tokens up to the end of that
        page.
        """

    def plan(self, budget: int) -> list[BatchRow]:
        """Return the next chunks, of at most `budget` tokens in all where prompts are cut.

        Admits waiting requests while budget, memory and rows last.
        """
        if not self.active and not len(self.waiting):
            return []
        whole = self._context.limits.chunk_tokens is None
        rows: list[BatchRow] = []
        long = next((req for req in self.active.values() if _num_unplanned(req) > budget), None)
        if long is not None:
            spent = self._short_ones(budget // 2, long, rows)
            self._chunk(long, rows, budget - spent)
            return rows
        for req in self.active.values():
            budget -= self._chunk(req, rows, budget, may_wait=bool(rows))
        for req in self._candidates():
            if budget <= 0 or (whole and rows and req.seq_len > budget):
                break
            if not self.start(req):
                break
            taken = self._chunk(req, rows, _num_unplanned(req) if whole else budget, may_wait=bool(rows))
            if not taken:
                break
            budget -= taken
        return rows

    @property
    def num_unplanned(self) -> int:
        """Tokens of active prompts that no planned step computes."""
        return sum(_num_unplanned(req) for req in self.active.values())

    @property
    def ends_under_way(self) -> bool:
        """True while a step under way computes the last chunk of a prompt that gets more than one token."""
        return any(req.seq_len == req.planned < req.max_len for req in self.active.values())

    @property
    def restores(self) -> bool:
        """True when a request whose KV is in host memory can resume: no step may be under way when it does."""
        if not self.waiting.num_resumed:
            return False
        head = self.waiting[0]
        return head.saved is not None and self.may_start(head)

    def committed(self, req: Req, end: int) -> bool:
        """Record that the chunk up to `end` is computed; True when the prompt is complete (the request leaves
        `active`).
        """
        if not req.spec.probe:
            self._context.counters[PREFILL_TOKENS] += end - req.computed
        req.computed = end
        if req.spec.traced and req.times.prefilled is None:
            self._note_chunk(req, end)
        self._context.cache(req)
        if self._states is not None:
            self._states.committed(req)
        if end < req.seq_len:
            return False
        del self.active[req.rid]
        if self._has_groups:
            self._context.begin_decode(req)
        if req.times.prefilled is None:
            if not req.spec.probe:
                self._context.counters["prompt_tokens"] += req.num_prompt
                self._context.counters["cached_tokens"] += req.num_cached
            req.times.prefilled = self._context.clock.now()
        return True

    def remove(self, req: Req) -> None:
        """Remove a request that ends early."""
        if req in self.waiting:
            self.waiting.remove(req)
        self.active.pop(req.rid, None)
        self._waits_for.pop(req.rid, None)

    def may_start(self, req: Req, without: Sequence[Req] = ()) -> bool:
        """True when a row, an aux slot and enough memory are free, with the headroom that running requests need.

        `without`: as if these running requests had been retracted.
        """
        memory = self._context.memory
        num_rows_free = memory.table.num_free + len(without)
        if num_rows_free == 0 or (self._needs_aux and memory.aux.num_free == 0):
            return False
        if memory.groups.is_used and not memory.groups.fits(
            max(req.max_len, req.num_reserved), after=group_leases(without)
        ):
            return False
        if without:
            return self._fits(req, num_rows_free, without)
        left = memory.num_available - memory.num_taken(req.num_reserved, *self._prefix(req))
        alone = not self.active and num_rows_free == memory.table.num_rows
        return left >= 0 and (alone or memory.layout.tokens_in(left) >= self._headroom_tokens(req, ()))

    def waits_for_page(self, req: Req) -> bool:
        """True when an active prompt computes the page that `req` needs next."""
        num_cached = self._num_cached(req)
        return self._may_use(req, num_cached) and self._next_page(req, num_cached) in self._under_way()

    def is_loading(self, req: Req) -> bool:
        """True while pages of a waiting request come from the host tier."""
        tier = self._context.tier
        return tier is not None and tier.is_loading(req)

    def start(self, req: Req) -> bool:
        """Give a waiting request memory, row and aux slot, and its cached or saved KV; False when the request must
        wait.
        """
        context, memory = self._context, self._context.memory
        if not self.may_start(req) or (req.saved is not None and not context.no_step_in_flight):
            return False
        req.lease = memory.reserve_tokens(req.num_reserved, req.rid, *self._prefix(req), max_len=req.max_len)
        if req.lease is None:
            return False
        if self._needs_aux:
            req.aux = memory.aux.reserve(1, req.rid)
        self.waiting.remove(req)
        self.active[req.rid] = req
        assigned = context.assign_row(req)
        assert assigned, "a row was free"
        if req.saved is not None:
            context.restore(req)
        else:
            req.computed = memory.layout.tokens_in(req.lease.num_prefix_pages)
            context.counters[CACHE_TOKENS] += 0 if req.spec.probe else req.computed
        req.planned = req.computed
        if self._states is not None:
            req.state_stops = self._states.stops(req)
        if req.num_retractions:
            context.counters["recomputed_tokens"] += req.seq_len - 1 - req.computed
        is_first = req.times.started is None
        if is_first:
            req.times.started = context.clock.now()
            req.num_cached = min(req.computed, req.num_prompt)
        if context.tier is not None:
            details = context.tier.started(req)
            req.cached_details = details if is_first else req.cached_details
        return True

    # ------------------------------------------------------------------ inside

    def _note_chunk(self, req: Req, end: int) -> None:
        assert req.times.started is not None
        req.chunks = [] if req.chunks is None else req.chunks
        req.chunks.append((self._context.clock.now() - req.times.started, end))

    def _short_ones(self, budget: int, long: Req, rows: list[BatchRow]) -> int:
        """Add chunks of shorter prompts beside `long`; returns their tokens, at most `budget`.

        Prompts that finish within `budget` come first, then one with at most half the remaining length of `long`. Once
        that one has started, half of `budget` is reserved for it.
        """
        spent = 0
        may_wait = budget >= self._context.limits.state_grid
        partial: Req | None = None
        for req in self.active.values():
            if req is long:
                continue
            if _num_unplanned(req) <= budget - spent:
                spent += self._chunk(req, rows, budget)
            else:
                partial = partial or req
        most = budget
        if partial is not None and self._length(partial, budget // 2, may_wait=may_wait):
            most -= min(_num_unplanned(partial), budget // 2)
        for req in self._candidates():
            if spent >= most:
                break
            missing = req.seq_len - self._num_cached(req)
            if missing <= most - spent:
                if not self.start(req):
                    break
                spent += self._chunk(req, rows, budget)
            elif partial is None and missing <= _num_unplanned(long) // 2:
                partial = req
        if partial is not None and spent < budget and (partial.rid in self.active or self._start_alone(partial)):
            spent += self._chunk(partial, rows, budget - spent, may_wait=may_wait)
        return spent

    def _start_alone(self, req: Req) -> bool:
        """Start `req` unless a prompt that started since the scan computes its next page."""
        return not self.waits_for_page(req) and self.start(req)

    def _loads_first(self, req: Req) -> bool:
        """True when pages of `req` come from the host tier, or begin to now; it starts once they are there."""
        tier = self._context.tier
        return tier is not None and tier.holds_back(req, lambda: self.may_start(req))

    def _under_way(self) -> set[bytes]:
        """The pages that active prompts compute next, where other requests can use them."""
        pages = (self._next_page(req, req.computed) for req in self.active.values())
        return {page for page in pages if page is not None}

    def _candidates(self) -> Iterator[Req]:
        """Yield requests from the head of the queue, except those whose next page an active prompt computes: they wait
        for it.
        """
        self.waiting.refresh()
        under_way = self._under_way()
        place = num_new = num_again = 0
        while place < min(SCAN, len(self.waiting)) and num_new < LOOK_AHEAD:
            req = self.waiting[place]
            waits_for = self._waits_for.get(req.rid)
            if waits_for is not None and (waits_for in under_way or num_again == LOOK_AHEAD):
                place += 1
                continue
            if self._loads_first(req):
                place += 1
                num_new += 1
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
        """The tokens up to the end of the page behind the first `num_tokens`; None when other requests cannot use that
        page.
        """
        layout = self._context.memory.layout
        end = layout.tokens_in(layout.whole_pages(num_tokens) + 1)
        return req.token_bytes(end) if self._context.memory.has_prefix_cache and end < req.seq_len else None

    def _may_use(self, req: Req, num_cached: int) -> bool:
        """True when `req` may take the page behind its first `num_cached` tokens from the prefix cache."""
        return num_cached + self._context.memory.layout.tokens_in(1) <= req.most_cached

    def _fits(self, req: Req, num_rows_free: int, without: Sequence[Req]) -> bool:
        """See `may_start`; `without` is not empty."""
        memory = self._context.memory
        after = memory.preview_release(other.lease for other in without if other.lease is not None)
        left = memory.num_available + after.num_pages - memory.num_taken(req.num_reserved, *self._prefix(req), after)
        rids = {other.rid for other in without}
        alone = num_rows_free == memory.table.num_rows
        return left >= 0 and (alone or memory.layout.tokens_in(left) >= self._headroom_tokens(req, rids))

    def _prefix(self, req: Req) -> tuple[bytes, int]:
        """The tokens to look up in the prefix cache, and the most that may be taken from it."""
        return (b"", 0) if req.saved is not None else (req.token_bytes(req.seq_len), req.most_cached)

    def _num_cached(self, req: Req) -> int:
        return self._context.memory.match_prefix(*self._prefix(req))

    def _chunk(self, req: Req, rows: list[BatchRow], budget: int, *, may_wait: bool = False) -> int:
        """Add the next chunk of at most `budget` tokens; returns its length, see `_length`. A cut chunk also ends where
        the prefix cache keeps a state.
        """
        assert req.row is not None
        take = self._length(req, budget, may_wait=may_wait)
        if take <= 0:
            return 0
        end = req.planned + take
        if self._states is not None:
            end = self._states.end_of_chunk(req, end)
        if self._has_groups:
            self._context.cover_window(req, req.planned, end)
        row = BatchRow(req.rid, req.row, req.planned, end, sample=end == req.seq_len)
        rows.append(row if self._states is None else self._states.with_slots(req, row))
        take, req.planned = end - req.planned, end
        return take

    def _length(self, req: Req, budget: int, *, may_wait: bool) -> int:
        """Return the tokens of the next chunk, at most `budget`. A cut chunk ends on the grid of states.

        Where the budget does not reach the grid: 0 if the request `may_wait` for a later step, else the chunk ends on a
        page, or anywhere.
        """
        num_left = _num_unplanned(req)
        if num_left <= budget:
            return num_left
        layout, grid = self._context.memory.layout, self._context.limits.state_grid
        end = req.planned + budget
        if grid:
            on_grid = end - end % grid - req.planned
            if on_grid > 0 or may_wait:
                return max(on_grid, 0)
        aligned = layout.round_down(end) - req.planned
        return aligned if aligned > 0 else budget


def _num_unplanned(req: Req) -> int:
    return req.seq_len - req.planned


class BatchPlanner:
    """Decides what each step holds. Owns `DecodeBatch`, `PrefillManager`, `PrefillBudget` and `BatchSplitter`; returns
    retracted requests to `waiting`.

    With `prefill_only` no request decodes here: every step has the full prompt budget, and a request also needs an aux
    slot to start. `num_proposals` then returns `BatchPlan.num_proposals` of a step with these rows; None: no drafts.
    """

    def __init__(
        self,
        context: SchedulerContext,
        waiting: WaitingQueue,
        headroom_tokens: Headroom,
        *,
        prefill_only: bool = False,
        num_proposals: Callable[[Sequence[BatchRow]], int] | None = None,
    ) -> None:
        self._context = context
        self._propose_for = num_proposals
        self._prefill_only = prefill_only
        self.running = DecodeBatch(context, self._retract, waiting.rules)
        self.prefilling = PrefillManager(context, waiting, headroom_tokens, needs_aux=prefill_only)
        self._prefill_budget = PrefillBudget(context)
        self._splitter = BatchSplitter(context.limits.saturation_tokens)
        self._speculation = None if prefill_only else context.speculation
        self._num_proposals = 0 if prefill_only else None

    @property
    def needs_sync(self) -> bool:
        """See `SchedulerRole.needs_sync`."""
        return not self._prefill_only and not self._splitter and (self.running.needs_sync or self.prefilling.restores)

    def plan(self, step: int) -> BatchPlan | None:
        """Decode rows first, then prefill chunks within the budget; the step is split into parts."""
        if not self._splitter:
            if self._prefill_only or not self._any_request_streams():
                self._prefill_budget.refill()
            beside_streams = self._prefill_budget.is_over
            budget = self._prefill_budget.budget
            beside = 0 if self._speculation is None else min(budget, self.prefilling.num_unplanned)
            decode, prompts = self.running.plan(beside), self.prefilling.plan(budget)
            if prompts:
                self._prefill_budget.take(sum(row.num_tokens for row in prompts))
            elif decode:
                self._prefill_budget.end()
            self._splitter.put(decode, prompts, beside_streams=beside_streams)
            if self._speculation is not None:
                self._num_proposals = self._speculation.num_proposals(self.running.reqs.values())
        rows = self._splitter.take()
        if self._propose_for is not None:
            self._num_proposals = self._propose_for(rows)
        return plan_of(step, rows, self._num_proposals)

    @property
    def step_kind(self) -> StepKind:
        """What the rows of the last plan compute."""
        return self._splitter.kind

    def commit(
        self, live: dict[str, Req], plan: BatchPlan, result: StepResult
    ) -> Iterator[tuple[Req, tuple[SampledToken, ...], FinishReason | None]]:
        """Yield each request that got tokens, with its tokens and its finish reason; finished prompts join the decode
        batch.
        """
        running, prompts, num_decoded = self.running.reqs, result.prompts, 0
        speculation = self._speculation
        has_drafts = speculation is not None and any(row.drafts for row in plan.rows)
        for index, (row, token) in enumerate(zip(plan.rows, result.tokens, strict=True)):
            req = live.get(row.rid)
            if req is None or req.row != row.row:
                continue
            if prompts and index in prompts:
                self._context.outbox.emit_prompt(req, prompts[index])
            if index in result.hidden:
                self._context.outbox.emit_hidden(req, result.hidden[index])
            if has_drafts and row.drafts and row.rid in running:
                tokens, finish = self.running.commit_drafts(req, row, result.sampled(index))
                num_decoded += 0 if req.spec.probe else len(tokens)
                yield req, tokens, finish
            elif row.rid in running:
                assert token is not None
                num_decoded += not req.spec.probe
                yield req, (token,), self.running.commit(req, token)
            elif self.prefilling.committed(req, row.end):
                assert token is not None
                finish = self._context.append(req, token)
                if finish is None:
                    self.running.add(req)
                    if len(req.output_ids) > 1:
                        self._prefill_budget.end()
                yield req, (token,), finish
            if speculation is not None and index in result.drafts and req.rid in running:
                speculation.proposed(req, result.drafts[index])
        self._context.counters[DECODE_TOKENS] += num_decoded

    def remove(self, req: Req) -> None:
        """Remove a request from all queues and batches."""
        self.prefilling.remove(req)
        self.running.reqs.pop(req.rid, None)
        self._splitter.drop(req.rid)
        if self._speculation is not None:
            self._speculation.ended(req)

    def retract_all(self) -> None:
        """Retract all running requests and active prompts: they wait again without memory. No step may be under way."""
        taken = [*self.running.reqs.values(), *self.prefilling.active.values()]
        self.running.reqs.clear()
        self.prefilling.active.clear()
        self._splitter.clear()
        for req in taken:
            self._context.counters["requests_retracted"] += 1
            self._retract(req)

    @property
    def is_step_complete(self) -> bool:
        """True when all parts of the last planned step have been launched: `plan` plans a new one."""
        return not self._splitter

    def preempt(self, victims: Sequence[Req]) -> None:
        """Retract running requests or active prompts for a more urgent one. No step may be under way."""
        assert self.is_step_complete and self._context.no_step_in_flight
        for req in victims:
            self.running.reqs.pop(req.rid, None)
            self.prefilling.active.pop(req.rid, None)
            self._context.counters["requests_preempted"] += 1
            self._retract(req)

    def _any_request_streams(self) -> bool:
        """True when a running request waits for a token after its first. The first token may still be under way."""
        waits = any(req.planned < req.max_len for req in self.running.reqs.values())
        return waits or self.prefilling.ends_under_way

    def _retract(self, req: Req) -> None:
        self._context.retract(req)
        self.prefilling.waiting.add(req, resumed=True)
