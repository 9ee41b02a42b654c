"""The load that a scheduler posts: at most once in an interval, and always before the loop sleeps."""

from __future__ import annotations

from pdserve.base.clock import ManualClock
from pdserve.observe.load_events import LoadStat
from pdserve.scheduler.state_report import INTERVAL_S, LoadReporter
from tests.unit.scheduler.kit import Mono


def test_the_load_of_running_and_waiting_requests() -> None:
    stats, clock = list[LoadStat](), ManualClock()
    mono = Mono(num_rows=1, num_pages=16, chunk=4, load_reporter=LoadReporter(stats.append, 3, clock.now))
    mono.post("a", [5] * 9)
    mono.post("b", [6] * 7)
    mono.scheduler.step()
    first = stats[-1]
    assert (first.num_running_reqs, first.num_waiting_reqs, first.attn_dp_rank) == (1, 1, 3)
    assert (first.waiting_uncached_tokens, first.total_prefill_uncached_tokens) == (9 + 7 - 4, 4)
    assert first.num_tokens == 12 and first.num_total_tokens == 24
    assert (first.max_total_num_tokens, first.max_running_requests) == (64, 1)
    mono.scheduler.step()
    assert len(stats) == 1, "within the interval"
    clock.advance(INTERVAL_S)
    mono.scheduler.step()
    assert len(stats) == 2 and stats[-1].waiting_uncached_tokens == 7
    while mono.scheduler.step():
        pass
    last = stats[-1]
    assert (last.num_running_reqs, last.num_waiting_reqs, last.num_tokens, last.waiting_uncached_tokens) == (0, 0, 0, 0)
    assert last.total_prefill_uncached_tokens == 16 and last.total_prefill_busy_us >= first.total_prefill_busy_us
