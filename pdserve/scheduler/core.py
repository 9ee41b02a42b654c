"""What all roles share: memory, executor, outbox, clock; and how a request takes and leaves a row, and ends."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable

from pdserve.base.clock import Clock
from pdserve.executor.interface import BatchPlan, Executor, Row, SampledToken
from pdserve.memory.kv_memory import KVMemory
from pdserve.protocol.messages import (
    FinishReason,
    OutputBatch,
    RequestOutput,
    RequestTiming,
    ToApi,
    TokenLogprob,
)
from pdserve.scheduler.req import Req, finish_for_token


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a step may hold. `chunk_tokens` None: prompts are not cut."""

    chunk_tokens: int | None
    eos_token_ids: frozenset[int] = frozenset()


class Outbox:
    """Outputs of a step, sent as one message."""

    def __init__(self, send: Callable[[ToApi], None]) -> None:
        self.send = send
        self._outputs: list[RequestOutput] = []

    def emit(
        self,
        req: Req,
        tokens: tuple[SampledToken, ...],
        finish: FinishReason | None = None,
        timing: RequestTiming | None = None,
    ) -> None:
        """New tokens of `req`, and how it ended if it did.

        Tokens of the middle of a request that nobody streams wait.
        """
        logprobs = None
        if req.spec.top_logprobs is not None:
            logprobs = [TokenLogprob(token.logprob or 0.0, list(token.top)) for token in tokens]
        self._outputs.append(
            RequestOutput(
                rid=req.rid,
                token_ids=[token.token_id for token in tokens],
                logprobs=logprobs,
                finish=finish,
                prompt_tokens=req.num_prompt,
                timing=timing,
            )
        )

    def flush(self) -> None:
        """Send what the step produced."""
        if self._outputs:
            self.send(OutputBatch(outputs=self._outputs))
            self._outputs = []


class Core:
    """The part of a scheduler that does not depend on the role."""

    def __init__(self, memory: KVMemory, executor: Executor, outbox: Outbox, clock: Clock, limits: Limits) -> None:
        self.memory = memory
        self.executor = executor
        self.outbox = outbox
        self.clock = clock
        self.limits = limits
        self.counters: Counter[str] = Counter()

    def seat(self, req: Req) -> bool:
        """Give `req`, which has a lease, a row; False when all are taken."""
        assert req.lease is not None and req.row is None
        row = self.memory.table.open(req.lease.pages)
        if row is None:
            return False
        req.row = row
        tokens = req.spec.input_ids + req.output_ids
        self.executor.open_row(row, tokens, req.num_prompt, req.spec.sampling, req.spec.top_logprobs)
        return True

    def unseat(self, req: Req) -> None:
        """Take the row back; the pages stay."""
        if req.row is not None:
            self.executor.close_row(req.row)
            self.memory.table.close(req.row)
            req.row = None

    def release(self, req: Req) -> None:
        """The request's own claim on rows, pages and aux slot ends here; transfers may hold pages longer."""
        self.unseat(req)
        for lease in (req.lease, req.aux):
            if lease is not None:
                lease.drop("request")
        req.lease = req.aux = None

    def append(self, req: Req, token: SampledToken) -> FinishReason | None:
        """A new output token; whether it is the last one."""
        req.output_ids.append(token.token_id)
        self.counters["generation_tokens"] += 1
        return finish_for_token(req, token.token_id, self.limits.eos_token_ids)


class Prefilling:
    """Prompts on their way through the model, in chunks, first come first served. Shared by monolith and prefill role.

    `waiting` have no memory yet; `active` have a lease and a row and are partly computed.
    """

    def __init__(self, core: Core, num_tokens_of: Callable[[Req], int], needs_aux: bool) -> None:
        self._core = core
        self._num_tokens_of = num_tokens_of
        self._needs_aux = needs_aux
        self.waiting: deque[Req] = deque()
        self.active: list[Req] = []

    def plan(self) -> list[Row]:
        """The next chunks within the token budget; admits waiting requests while memory, rows and budget last."""
        budget = self._core.limits.chunk_tokens
        rows: list[Row] = []
        for req in self.active:
            budget = self._chunk(req, rows, budget)
        while self.waiting and (budget is None or budget > 0) and self._admit(self.waiting[0]):
            req = self.waiting.popleft()
            self.active.append(req)
            budget = self._chunk(req, rows, budget)
        return rows

    def committed(self, req: Req, end: int) -> bool:
        """The chunk up to `end` is computed; True when the prompt is complete (the request leaves `active`)."""
        req.computed = end
        self._core.counters["prompt_tokens"] += 0 if end < req.num_prompt else req.num_prompt
        if end < req.num_prompt:
            return False
        self.active.remove(req)
        req.times.prefilled = self._core.clock.now()
        return True

    def remove(self, req: Req) -> None:
        """Forget a request that ends early."""
        if req in self.waiting:
            self.waiting.remove(req)
        if req in self.active:
            self.active.remove(req)

    def _admit(self, req: Req) -> bool:
        memory = self._core.memory
        if memory.table.num_free == 0 or (self._needs_aux and memory.aux.num_free == 0):
            return False
        req.lease = memory.reserve_tokens(self._num_tokens_of(req))
        if req.lease is None:
            return False
        if self._needs_aux:
            req.aux = memory.aux.reserve(1)
        req.times.started = self._core.clock.now()
        return self._core.seat(req)

    def _chunk(self, req: Req, rows: list[Row], budget: int | None) -> int | None:
        assert req.row is not None
        left = req.num_prompt - req.computed
        take = left if budget is None else min(left, budget)
        if take:
            end = req.computed + take
            rows.append(Row(req.rid, req.row, req.computed, end, sample=end == req.num_prompt))
        return None if budget is None else budget - take


class Running:
    """Requests that get one token a step. Shared by monolith and decode role."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.reqs: dict[str, Req] = {}

    def add(self, req: Req) -> None:
        """Decode `req` from the next step on."""
        self.reqs[req.rid] = req

    def plan(self) -> list[Row]:
        """One row per request: compute the last token, sample the next."""
        return [
            Row(req.rid, req.row, req.computed, req.computed + 1, sample=True)
            for req in self.reqs.values()
            if req.row is not None
        ]

    def commit(self, req: Req, token: SampledToken) -> FinishReason | None:
        """The token of this step; a finished request leaves."""
        req.computed += 1
        finish = self._core.append(req, token)
        if req.times.second_token is None:
            req.times.second_token = self._core.clock.now()
        if finish is not None:
            del self.reqs[req.rid]
        return finish


def plan_of(step: int, rows: list[Row]) -> BatchPlan | None:
    """A plan, or None when there is nothing to compute."""
    return BatchPlan(step, tuple(rows)) if rows else None
