"""The statistics line of the router's log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pdserve.errors import ConfigError
from pdserve.observe.interval_stats import RouterStats, router_sentence
from pdserve.router.config.flags import config_from, make_parser
from tests.waiting import until

RunWorld = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]
LOGGER = "pdserve.router.stats_log"


def test_an_interval_has_its_requests_and_an_idle_router_has_none() -> None:
    stats = RouterStats()
    assert stats.take() is None
    stats.begun()
    stats.begun()
    stats.first_byte(0.5)
    stats.ended(2.0, failed=False)
    first = stats.take()
    assert first is not None
    assert (first["running"], first["failed"]) == (1, 0)
    assert first["first_byte_p50_s"] == pytest.approx(0.5, rel=0.05)
    assert first["request_p99_s"] == pytest.approx(2.0, rel=0.05)
    stats.ended(3.0, failed=True)
    last = stats.take()
    assert last is not None
    assert (last["running"], last["failed"], last["first_byte_p50_s"]) == (0, 1, None)
    assert stats.take() is None
    text = router_sentence(last | {"queued": 2, "workers": 3, "workers_up": 1})
    assert text.startswith("running 0, queued 2; ")
    assert "1 failed; first byte p50 -, p99 -; whole p50 " in text
    assert text.endswith("workers 1 of 3 up")


def test_the_router_logs_its_statistics_while_requests_run(
    run_world: RunWorld, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)

    def fields() -> list[dict[str, Any]]:
        return [vars(record)["fields"] for record in caplog.records if record.name == LOGGER]

    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        async with world.router([prefill], [decode], log_stats_interval_s=0.02) as url:
            assert fields() == []
            async with world.session.post(f"{url}/generate", json={"text": "a"}) as answer:
                assert answer.status == 200
            await until(fields)

    run_world(scenario)
    first = fields()[0]
    assert (first["failed"], first["queued"], first["workers"], first["workers_up"]) == (0, 0, 2, 2)
    assert first["running"] + (first["requests_per_s"] > 0) >= 1


def test_a_negative_interval_is_refused() -> None:
    args = make_parser().parse_args(["--worker-urls", "http://a:1", "--log-stats-interval", "-1"])
    with pytest.raises(ConfigError, match="--log-stats-interval must be at least 0"):
        config_from(args)
