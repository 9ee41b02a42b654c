"""Numbers of speculative decoding: of a request, of the last seconds, in the statistics line."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest

from pdserve.observe.interval_stats import IntervalStats, server_fields, server_sentence
from pdserve.observe.metrics import ServerMetrics
from pdserve.observe.speculation import Acceptance, RecentAcceptance, accept_histogram, request_fields
from pdserve.protocol.engine_state import EngineState
from pdserve.protocol.messages import SpeculationStats
from pdserve.protocol.replicas import merge_states
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.observe.test_server_metrics import read, value
from tests.unit.server.server_kit import bench
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)


def state(steps: int | None = None, drafts: int = 0, accepted: int = 0) -> EngineState:
    """A state of a server that has counted this; None: it has no drafter."""
    counters: dict[str, float] = {}
    facts: dict[str, str | int | float | bool | None] = {}
    if steps is not None:
        facts["spec_is_drafting"] = 1.0
        counters = {"spec_verify_steps": steps, "spec_draft_tokens": drafts, "spec_accepted_tokens": accepted}
    return EngineState(
        queues={}, memory={}, counters=counters, facts=facts, num_running_reqs=0, num_queue_reqs=0, num_used_tokens=0,
        max_total_tokens=1,
    )  # fmt: skip


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_histogram_counts_each_step_once() -> None:
    stats = SpeculationStats(num_verify_steps=10, num_draft_tokens=30, accepted_by_position=(6, 5, 1))
    assert accept_histogram(stats) == [4, 1, 4, 1]
    assert sum(accept_histogram(stats)) == 10
    assert sum(k * steps for k, steps in enumerate(accept_histogram(stats))) == stats.num_accepted
    assert accept_histogram(SpeculationStats(num_verify_steps=2, num_draft_tokens=6)) == [2]


def test_a_request_without_accepted_drafts_has_a_rate_of_zero() -> None:
    assert request_fields(None) == request_fields(SpeculationStats(num_verify_steps=0, num_draft_tokens=0)) == {}
    fields = request_fields(SpeculationStats(num_verify_steps=2, num_draft_tokens=6, accepted_by_position=(0, 0, 0)))
    assert (fields["spec_accept_length"], fields["spec_accept_rate"], fields["spec_verify_ct"]) == (1.0, 0.0, 2)
    assert fields["spec_accept_histogram"] == [2, 0, 0, 0]


def test_recent_numbers_leave_out_what_is_longer_ago() -> None:
    clock = Clock()
    recent = RecentAcceptance(clock)
    recent.add(None)
    recent.add(state())
    assert recent.whole() is recent.of(0) is None
    recent.add(state(10, 20, 20))
    assert recent.of(0) == Acceptance(10, 20, 20)
    for second in range(1, 31):
        clock.now_s = 100.0 + second
        recent.add(state(10 + second, 20 + 2 * second, 20))
    found = recent.of(0)
    assert found == Acceptance(10, 20, 0), "those of the last 10 s"
    assert (found.accept_length, found.accept_rate) == (1.0, 0.0)
    clock.now_s += 60
    recent.add(state(40, 80, 20))
    assert recent.of(0) == Acceptance(), "nothing since the last state"
    assert Acceptance().accept_length is Acceptance().accept_rate is None


def test_many_states_at_once_are_as_good_as_the_last() -> None:
    clock = Clock()
    recent = RecentAcceptance(clock)
    for number in range(1, 5000):
        clock.now_s = 100.0 + number / 100
        recent.add(state(number, 2 * number, number))
    found = recent.of(0)
    assert found is not None and 1000 <= found.num_verify_steps <= 1200
    assert found.accept_length == 2.0


def test_a_new_engine_counts_from_zero() -> None:
    assert Acceptance(3, 6, 1).since(Acceptance(100, 200, 50)) == Acceptance(3, 6, 1)


def test_replicas_have_their_own_gauges() -> None:
    metrics = ServerMetrics("m", "decode")
    both = merge_states([state(4, 8, 4), state(4, 8, 8)])
    samples = read(metrics.render(both).decode())
    assert value(samples, "sglang:spec_accept_length", dp_rank="0") == 2.0
    assert value(samples, "sglang:spec_accept_length", dp_rank="1") == 3.0
    assert value(samples, "sglang:spec_accept_rate", dp_rank="1") == 1.0
    assert metrics.speculation.whole() == Acceptance(8, 16, 12)
    plain = read(ServerMetrics("m", "decode").render(state()).decode())
    assert ("sglang:spec_accept_length", frozenset()) not in plain


def test_a_line_has_the_acceptance_only_with_a_drafter() -> None:
    stats = IntervalStats()
    stats.started()
    interval = stats.take()
    assert interval is not None
    assert "accept" not in server_sentence(server_fields(interval, state()))
    fields = server_fields(interval, state(4, 8, 5), Acceptance(4, 8, 5))
    assert (fields["accept_length"], fields["accept_rate"]) == (2.25, 0.625)
    assert server_sentence(fields).endswith("; accept length 2.25, rate 62.5 %")
    off = server_sentence(server_fields(interval, state(4, 8, 5), Acceptance()))
    assert off.endswith("; accept length -, rate -"), "no drafts were verified"


async def test_each_line_has_the_acceptance_since_the_last(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdserve.server.stats_log")

    def fields() -> list[dict[str, Any]]:
        return [vars(one)["fields"] for one in caplog.records if one.name == "pdserve.server.stats_log"]

    def has_more_than(count: int) -> bool:
        return len(fields()) > count

    async with bench(tokenizer, observe={"log_stats_interval": 0.02}) as b:
        b.scheduler.facts = {"spec_is_drafting": 1.0}
        b.scheduler.counters = {"spec_verify_steps": 4.0, "spec_draft_tokens": 8.0, "spec_accepted_tokens": 6.0}
        for _ in range(2):
            num_lines = len(fields())
            assert (await b.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3})).status_code == 200
            await until(functools.partial(has_more_than, num_lines))
    assert (fields()[0]["accept_length"], fields()[0]["accept_rate"]) == (2.5, 0.75)
    assert fields()[-1]["accept_length"] is None
