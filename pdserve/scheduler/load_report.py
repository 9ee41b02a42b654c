"""Measures the load of a replica for `--load-publish-endpoint`, whatever its role is."""

from __future__ import annotations

import time
from collections.abc import Callable

from pdserve.observe.load_events import LoadStat
from pdserve.scheduler.batch_planner import PREFILL_TOKENS
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.loop_times import LoopTimes
from pdserve.scheduler.roles.base import SchedulerRole

INTERVAL_S = 0.05
"""Least seconds between two measurements while steps are computed; each looks at all live requests."""


class LoadReporter:
    """Gives the load to `post`, at most once in `INTERVAL_S` seconds, and always before the loop sleeps.

    The load informs routers only: no decision of the scheduler depends on it, so rank 0 alone has a reporter.
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
