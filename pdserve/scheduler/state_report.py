"""What a scheduler reports about itself: its state when it is asked, and its load for `--load-publish-endpoint`.

Both only inform: no decision of the scheduler depends on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from pdserve.base.clock import TokenRate
from pdserve.observe.load_events import LoadStat
from pdserve.protocol.engine_state import EngineState
from pdserve.scheduler.batch_planner import PREFILL_TOKENS
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.loop_times import LoopTimes
from pdserve.scheduler.roles.base import SchedulerRole, count_by_priority
from pdserve.transfer.manager import KVManager

INTERVAL_S = 0.05
"""Least seconds between two measurements while steps are computed; each looks at all live requests."""


class LoadReporter:
    """Gives the load to `post`, at most once in `INTERVAL_S` seconds, and always before the loop sleeps.

    Rank 0 alone has one.
    """

    def __init__(
        self, post: Callable[[LoadStat], None], dp_rank: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._post = post
        self._dp_rank = dp_rank
        self._now = now
        self._next_at = 0.0

    def report(
        self, role: SchedulerRole, context: SchedulerContext, times: LoopTimes, num_gated: int, *, sleeps: bool
    ) -> None:
        """Post the present load, if it is due. `num_gated`: requests that wait for their grammar. `sleeps`: the loop
        sleeps next, so that no turn would post a later load.
        """
        now = self._now()
        if now < self._next_at and not sleeps:
            return
        self._next_at = now + INTERVAL_S
        memory, num_running = context.memory, role.queues()["num_running_reqs"]
        uncached = sum(
            max(0, req.num_input_tokens - req.computed) for req in role.live.values() if req.receiver is None
        )
        self._post(
            LoadStat(
                num_running_reqs=num_running,
                num_waiting_reqs=len(role.live) - num_running + num_gated,
                num_tokens=memory.num_used_tokens,
                max_total_num_tokens=memory.max_tokens,
                attn_dp_rank=self._dp_rank,
                waiting_uncached_tokens=uncached,
                num_total_tokens=memory.num_used_tokens + uncached,
                max_running_requests=memory.table.num_rows,
                total_prefill_uncached_tokens=context.counters[PREFILL_TOKENS],
                total_prefill_busy_us=round(1e6 * times.prefill_s),
            )
        )


class StateReporter:
    """Makes the `EngineState` of a scheduler. Scheduler thread only."""

    def __init__(
        self,
        context: SchedulerContext,
        live_facts: Callable[[], Mapping[str, str | float]] | None,
        *,
        by_priority: bool,
    ) -> None:
        """`live_facts` returns facts that change, None: there are none. `by_priority`: count requests by priority."""
        self._context, self._live_facts, self._by_priority = context, live_facts, by_priority
        self._rate, self._num_rated = TokenRate(context.clock.now), 0
        self._num_steps = 0

    def computed(self) -> None:
        """Count a step that has ended, and the tokens it generated."""
        self._num_steps += 1
        num_generated = self._context.counters["generation_tokens"]
        self._rate.add(num_generated - self._num_rated)
        self._num_rated = num_generated

    def state(
        self,
        role: SchedulerRole,
        kv: KVManager | None,
        times: LoopTimes,
        num_gated: int,
        facts: Mapping[str, str | int | float | bool | None],
        audit: Sequence[str],
    ) -> EngineState:
        """Return the state. `num_gated`: requests that wait for their grammar. `audit`: what the last audit found."""
        context = self._context
        queues = role.queues() | {"num_grammar_queue_reqs": num_gated}
        memory = context.memory.counts() | {"reqs_live": len(role.live)}
        counters: dict[str, float] = {name: float(value) for name, value in context.counters.items()}
        counters["evicted_pages"] = float(context.memory.pages.num_evicted)
        counters |= times.counters()
        told = {**facts, **role.facts()}
        if context.storage is not None:
            told |= context.storage.facts()
        if context.speculation is not None:
            counters |= context.speculation.counters
            told |= context.speculation.facts()
        if self._live_facts is not None:
            told |= self._live_facts()
        if context.tier is not None:
            memory |= context.tier.counts()
            counters |= context.tier.seconds()
        if kv is not None:
            memory |= kv.counts()
            counters |= {name: float(value) for name, value in kv.counters.items()}
            told["last_handshake_refusal"] = kv.sessions.last_refusal
        return EngineState(
            queues=queues,
            memory=memory,
            counters=counters,
            facts=told,
            num_running_reqs=queues["num_running_reqs"],
            num_queue_reqs=len(role.live) - queues["num_running_reqs"] + num_gated,
            num_used_tokens=context.memory.num_used_tokens,
            max_total_tokens=context.memory.max_tokens,
            audit=list(audit),
            failures=dict(context.failures),
            peers=[] if kv is None else kv.peer_loads(),
            oldest_orphan_s=0.0 if kv is None else kv.oldest_orphan_s(),
            by_priority=count_by_priority(role.live.values(), role.members()) if self._by_priority else {},
            gen_throughput=self._rate.value(),
            progress=self._num_steps + int(counters.get("kv_transfer_bytes", 0)),
            probes={req.rid: role.waits_for(req) for req in role.live.values() if req.spec.probe},
        )
