"""Optimistic prefill: prompts that are computed before their decode server has published its pages.

Without it a prompt waits in the bootstrap queue for the pages of its decode server. With
`--optimistic-prefill-attempts` a prompt in that queue is computed while no request whose decode server is ready waits:

offered     in the waiting queue during `plan` only, so that other requests never wait behind it
   v
early       active, as any prompt; nothing is sent
   v
held        complete: pages, aux slot, first token and drafts are kept until the decode server is ready, and then sent

An early request becomes an ordinary one at the moment its decode server has published its pages: `bound`. When a
request whose decode server is ready finds too little memory, early requests give way, the newest first: their pages
stay in the prefix cache as long as there is room, and the request returns to the bootstrap queue. It may be computed
early again until its attempts are used up.

All decisions depend on the queues and the memory alone, so the ranks of a replica decide alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from pdserve.executor.interface import SampledToken
from pdserve.scheduler.batch_planner import LOOK_AHEAD, BatchPlanner
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.request import Req

STARTED, GAVE_WAY, HELD = "optimistic_prefills", "optimistic_prefills_gave_way", "optimistic_prefills_held"
"""Counters: prompts that started early, that gave way, and that were complete before their decode server was ready."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptimisticLimits:
    """How often and with how much memory prompts are computed early.

    `attempts`: times that a prompt may be computed before its decode server is ready; 0: never. `memory_fraction`: the
    share of KV pages, and of aux slots, that early requests may hold together, above 0 and at most 1.
    """

    attempts: int = 0
    memory_fraction: float = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class ComputedPrompt:
    """What prefill has besides the KV of a complete prompt.

    `drafts` and `draft_hidden`: see `AuxRecord`; they are sent to a decode server with an equal drafter only.
    """

    token: SampledToken
    drafts: tuple[int, ...] = ()
    draft_hidden: bytes = b""


class OptimisticPrefill:
    """Owns the early requests of a prefill role. `bootstrap` is the role's queue of requests without a decode server.

    `in`: whether a request holds memory, or is offered, before its decode server is ready.
    """

    def __init__(
        self, context: SchedulerContext, planner: BatchPlanner, bootstrap: dict[str, Req], limits: OptimisticLimits
    ) -> None:
        self._context = context
        self._planner = planner
        self._prefilling = planner.prefilling
        self._bootstrap = bootstrap
        self._limits = limits
        self._early: dict[str, Req] = {}
        self._held: dict[str, ComputedPrompt] = {}
        self._attempts: dict[str, int] = {}
        self._offered: list[Req] = []
        self._gave_way_at = 0

    def __contains__(self, req: Req) -> bool:
        return req.rid in self._early

    @property
    def held(self) -> Iterable[Req]:
        """Complete prompts whose decode server is not ready."""
        return [self._early[rid] for rid in self._held]

    def holds(self, req: Req) -> bool:
        """True when the prompt is complete and its decode server is not ready."""
        return req.rid in self._held

    def offer(self) -> None:
        """Before a plan: let early requests give way, or put requests of the bootstrap queue into the waiting queue."""
        waiting = self._prefilling.waiting
        if len(waiting):
            self._make_room()
        elif self._bootstrap and self._limits.attempts:
            self._offered = self._candidates()
            for req in self._offered:
                waiting.add(req)

    def withdraw(self) -> None:
        """After a plan: take the offered requests that have not started out of the waiting queue again."""
        for req in self._offered:
            if req.rid not in self._prefilling.active:
                self._prefilling.remove(req)
                continue
            del self._bootstrap[req.rid]
            self._early[req.rid] = req
            self._attempts[req.rid] = self._attempts.get(req.rid, 0) + 1
            self._context.counters[STARTED] += 1
        self._offered = []

    def hold(self, req: Req, prompt: ComputedPrompt) -> None:
        """Keep a complete prompt, which has left its row, until its decode server is ready."""
        self._held[req.rid] = prompt
        self._context.counters[HELD] += 1

    def bound(self, req: Req) -> ComputedPrompt | None:
        """Make an early request whose decode server is ready an ordinary one.

        Returns what was held for it; None while its prompt is being computed.
        """
        prompt = self._held.get(req.rid)
        self.forget(req)
        return prompt

    def forget(self, req: Req) -> None:
        """Forget a request that has ended, or that is no longer early."""
        self._early.pop(req.rid, None)
        self._held.pop(req.rid, None)
        self._attempts.pop(req.rid, None)

    def facts(self) -> dict[str, float]:
        """Numbers for `/get_server_info` and `/metrics`."""
        return {"num_prefill_held_reqs": len(self._held)} if self._limits.attempts else {}

    # ------------------------------------------------------------------ inside

    def _candidates(self) -> list[Req]:
        """Return the oldest requests of the bootstrap queue that may be computed early within the limits."""
        memory, share = self._context.memory, self._limits.memory_fraction
        pages = share * memory.pages.num_total - sum(len(r.lease.pages) for r in self._early.values() if r.lease)
        slots = max(1, int(share * memory.aux.num_total)) - len(self._early)
        found: list[Req] = []
        for req in self._bootstrap.values():
            if len(found) >= min(slots, LOOK_AHEAD):
                break
            if not self._may_start_early(req):
                continue
            pages -= memory.num_pages(req.num_reserved)
            if pages < 0:
                break
            found.append(req)
        return found

    def _may_start_early(self, req: Req) -> bool:
        """True when the request has an attempt left.

        A prompt whose log probabilities are requested is never computed early: their parts are sent at once, and a
        second computation would send them again.
        """
        if self._attempts.get(req.rid, 0) >= self._limits.attempts:
            return False
        return req.spec.hidden is None and (req.spec.logprobs is None or req.spec.logprobs.prompt_from is None)

    def _make_room(self) -> None:
        """Let early requests give way, the newest first, while the first waiting request finds too little memory.

        Pages that a step under way may write are free when it has ended; until then no other request gives way.
        """
        waiting = self._prefilling.waiting
        while self._early and self._context.has_ended(self._gave_way_at) and not self._prefilling.may_start(waiting[0]):
            self._give_way(next(reversed(self._early.values())))

    def _give_way(self, req: Req) -> None:
        """Release what an early request holds. The prefix cache keeps its pages while there is room."""
        self._planner.remove(req)
        self._context.release(req)
        self._gave_way_at = self._context.newest_step
        req.computed = req.planned = 0
        req.state_stops = ()
        del self._early[req.rid]
        self._held.pop(req.rid, None)
        self._bootstrap[req.rid] = req
        self._context.counters[GAVE_WAY] += 1
