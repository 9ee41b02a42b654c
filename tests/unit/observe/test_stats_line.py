"""The statistics line of the log: its numbers, and that an idle server has none."""

from __future__ import annotations

import logging

import pytest

from pdserve.observe.interval_stats import IntervalStats, LatencyBuckets, server_fields, server_sentence
from pdserve.protocol.engine_state import EngineState
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import bench
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)


def test_quantiles_are_close_and_need_a_duration() -> None:
    buckets = LatencyBuckets()
    assert buckets.quantile(0.5) is None
    for millis in range(1, 1001):
        buckets.add(millis / 1000)
    assert buckets.quantile(0.5) == pytest.approx(0.5, rel=0.05)
    assert buckets.quantile(0.99) == pytest.approx(0.99, rel=0.05)
    buckets.add(100.0, count=100_000)
    assert buckets.quantile(0.5) == pytest.approx(100.0, rel=0.05)
    buckets.add(0.0)
    buckets.clear()
    assert buckets.quantile(0.5) is None


def test_an_interval_has_what_happened_in_it_and_none_comes_from_an_idle_server() -> None:
    stats = IntervalStats()
    assert stats.take() is None
    stats.started()
    stats.first_token(0.25)
    stats.prompt_done(40, 10)
    stats.generated(1)
    stats.next_tokens(0.02, 3)
    stats.generated(3)
    first = stats.take()
    assert first is not None
    assert (first.prompt_tokens, first.cached_tokens, first.generated_tokens) == (40, 10, 4)
    assert first.hit_rate == 0.25
    assert first.generated_tokens_per_s == pytest.approx(4 / first.seconds)
    assert first.ttft_p50_s == pytest.approx(0.25, rel=0.05)
    assert first.itl_p99_s == pytest.approx(0.02, rel=0.05)
    running = stats.take()
    assert running is not None, "a request runs, though it has no token"
    assert (running.generated_tokens, running.hit_rate, running.ttft_p50_s) == (0, None, None)
    stats.ended()
    assert stats.take() is not None, "the last line follows the end of the last request"
    assert stats.take() is None


def test_a_line_has_the_load_of_all_replicas_and_dashes_for_what_is_not_known() -> None:
    stats = IntervalStats()
    stats.started()
    interval = stats.take()
    assert interval is not None
    unknown = server_sentence(server_fields(interval, None))
    assert unknown.startswith("running -, queued -; in 0.0 tok/s, out 0.0 tok/s; KV used -; prefix hits -; TTFT p50 -")
    state = EngineState(
        queues={},
        memory={},
        counters={},
        facts={},
        num_running_reqs=8,
        num_queue_reqs=2,
        num_used_tokens=128,
        max_total_tokens=1024,
    )
    assert server_sentence(server_fields(interval, state)).startswith("running 8, queued 2; in 0.0 tok/s")
    assert "KV used 12.5 %" in server_sentence(server_fields(interval, state))


async def test_a_server_logs_its_statistics_while_requests_run(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pdserve.server.stats_log")

    def lines() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name == "pdserve.server.stats_log"]

    def total(name: str) -> float:
        return sum(vars(line)["fields"][name] or 0.0 for line in lines())

    async with bench(tokenizer, observe={"log_stats_interval": 0.02}) as b:
        await until(lambda: b.client.ready)
        assert lines() == []
        body = {"prompt": "hello world", "max_tokens": 3}
        assert (await b.http.post("/v1/completions", json=body)).status_code == 200
        await until(lambda: total("generated_tokens_per_s"))
    assert total("prompt_tokens_per_s") > 0
    assert total("ttft_p50_s") > 0
    assert lines()[0].getMessage() == server_sentence(vars(lines()[0])["fields"])


async def test_without_an_interval_there_is_no_line(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with bench(tokenizer, observe={"log_stats_interval": 0.0}) as b:
        assert (await b.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})).status_code == 200
    assert not [record for record in caplog.records if record.name == "pdserve.server.stats_log"]
