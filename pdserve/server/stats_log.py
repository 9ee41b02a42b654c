"""The statistics line of a server's log: load, throughput and latencies of the last seconds, while requests run.

    ... INFO decode[4711] pdserve.server.stats_log: running 8, queued 2; in 98.3 tok/s, out 301.0 tok/s; KV used 12.4 %;
        prefix hits 40.0 %; TTFT p50 0.31 s, p99 0.52 s; ITL p50 24 ms, p99 41 ms

The API process writes it (`--log-stats-interval`) from its own counts and one query to the schedulers; replicas are
summed. The last line follows the end of the last request; an idle server logs nothing.
"""

from __future__ import annotations

import asyncio
import logging

from pdserve.base.log import about
from pdserve.observe.interval_stats import Interval, IntervalStats
from pdserve.protocol.messages import EngineState
from pdserve.server.engine_client.client import EngineClient

log = logging.getLogger(__name__)

STATE_TIMEOUT_S = 1.0
"""Seconds to wait for the schedulers; after that the line has the newest state that is known."""


async def log_stats(client: EngineClient, stats: IntervalStats, interval_s: float) -> None:
    """Log a line every `interval_s` seconds in which a request ran. Returns only by cancellation."""
    while True:
        await asyncio.sleep(interval_s)
        interval = stats.take()
        if interval is None:
            continue
        fields = fields_of(interval, await client.state(STATE_TIMEOUT_S))
        log.info("%s", sentence(fields), extra=about(fields=fields))


def fields_of(interval: Interval, state: EngineState | None) -> dict[str, float | None]:
    """Return the numbers of a line by name. Shares are 0 to 1, latencies in seconds; None: not known, or no request.

    `state` None: no scheduler has answered yet.
    """
    used = None if state is None or not state.max_total_tokens else state.num_used_tokens / state.max_total_tokens
    numbers: dict[str, float | None] = {
        "running": None if state is None else state.num_running_reqs,
        "queued": None if state is None else state.num_queue_reqs,
        "prompt_tokens_per_s": interval.prompt_tokens_per_s,
        "generated_tokens_per_s": interval.generated_tokens_per_s,
        "kv_used": used,
        "cache_hit_rate": interval.hit_rate,
        "ttft_p50_s": interval.ttft_p50_s,
        "ttft_p99_s": interval.ttft_p99_s,
        "itl_p50_s": interval.itl_p50_s,
        "itl_p99_s": interval.itl_p99_s,
    }
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in numbers.items()}


def sentence(fields: dict[str, float | None]) -> str:
    """Format the numbers of `fields_of` as text; `-`: None."""

    def number(name: str, unit: str, digits: int = 0, factor: float = 1) -> str:
        value = fields[name]
        return "-" if value is None else f"{value * factor:.{digits}f}{unit}"

    return (
        f"running {number('running', '')}, queued {number('queued', '')}; "
        f"in {number('prompt_tokens_per_s', ' tok/s', 1)}, out {number('generated_tokens_per_s', ' tok/s', 1)}; "
        f"KV used {number('kv_used', ' %', 1, 100)}; prefix hits {number('cache_hit_rate', ' %', 1, 100)}; "
        f"TTFT p50 {number('ttft_p50_s', ' s', 3)}, p99 {number('ttft_p99_s', ' s', 3)}; "
        f"ITL p50 {number('itl_p50_s', ' ms', 1, 1000)}, p99 {number('itl_p99_s', ' ms', 1, 1000)}"
    )
