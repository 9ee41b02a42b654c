"""`/engine_metrics`: all workers' metrics in one answer that Prometheus can read, whatever a worker does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdserve.router.config.config import RouterAccessConfig
from pdserve.router.workers import engine_metrics
from pdserve.router.workers.engine_metrics import merge_expositions

RunWorld = Callable[[Callable[[Any], Coroutine[Any, Any, None]]], None]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
EXPORTED = """\
# HELP sglang:num_running_reqs Running now
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="a \\"b\\""} 3.0
# HELP sglang:prompt_tokens_total So far
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m"} 40.0
# HELP sglang:ttft How long
# TYPE sglang:ttft histogram
sglang:ttft_bucket{le="0.5"} 1.0
sglang:ttft_bucket{le="+Inf"} 2.0
sglang:ttft_count 2.0
sglang:ttft_sum 1.5
"""
UP = "pdserve_router_engine_up"


def read(text: str) -> Samples:
    """Every sample by name and labels; each stands there once, and so does each metric."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    samples = [sample for family in families for sample in family.samples]
    read = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(read) == len(samples)
    return read


def of(samples: Samples, url: str) -> Samples:
    """The samples of one worker without its address and `UP`."""
    return {
        (name, labels - {("worker_addr", url)}): value
        for (name, labels), value in samples.items()
        if ("worker_addr", url) in labels and name != UP
    }


async def scrape(world: Any, url: str) -> Samples:
    async with world.session.get(url + "/engine_metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return read(await response.text())


def up(samples: Samples) -> dict[str, float]:
    return {dict(labels)["worker_addr"]: value for (name, labels), value in samples.items() if name == UP}


def test_every_workers_samples_are_there_under_its_address_without_a_key(run_world: RunWorld) -> None:
    async def scenario(world: Any) -> None:
        prefill, decode = await world.worker("p"), await world.worker("d")
        prefill.exported, decode.exported = EXPORTED, EXPORTED.replace("40.0", "7.0")
        access = RouterAccessConfig(api_key="secret")
        async with world.router([prefill], [decode], access=access, wait_key="secret") as url:
            samples = await scrape(world, url)
        assert of(samples, prefill.url) == read(EXPORTED)
        assert of(samples, decode.url) == read(EXPORTED.replace("40.0", "7.0"))
        assert up(samples) == {prefill.url: 1.0, decode.url: 1.0}

    run_world(scenario)


def test_who_is_silent_wrong_or_dead_is_down_and_the_others_are_there(
    run_world: RunWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_metrics, "ASK_TIMEOUT_S", 0.3)

    async def scenario(world: Any) -> None:
        good, silent, wrong, without, dead = [await world.worker(name) for name in "gswnd"]
        good.exported, silent.exported, silent.metrics_gate = EXPORTED, EXPORTED, asyncio.Event()
        wrong.exported, dead.health_status = "<html>{ no metrics }", 500
        everyone = [good, silent, wrong, without, dead]
        async with world.router([], everyone) as url:
            samples = await scrape(world, url)
            silent.metrics_gate.set()
        assert up(samples) == {worker.url: float(worker is good) for worker in everyone}
        assert of(samples, good.url) == read(EXPORTED)
        assert dead.num_scraped == 0

    run_world(scenario)


def test_many_scrapes_are_one_round_and_a_worker_that_is_removed_is_gone_from_the_next(
    run_world: RunWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: Any) -> None:
        one, other = await world.worker("a"), await world.worker("b")
        one.exported = other.exported = EXPORTED
        async with world.router([], [one, other]) as url:
            await asyncio.gather(*(scrape(world, url) for _ in range(5)))
            assert (one.num_scraped, other.num_scraped) == (1, 1)
            monkeypatch.setattr(engine_metrics, "INTERVAL_S", 0.0)
            async with world.session.delete(f"{url}/workers/{other.url}") as response:
                assert response.status == 202
            assert up(await scrape(world, url)) == {one.url: 1.0}

    run_world(scenario)


def test_an_address_that_is_there_already_and_a_type_that_differs_do_not_spoil_the_answer() -> None:
    expositions = [
        ("regular", "http://a", '# TYPE x gauge\nx{worker_addr="inner"} 1\n'),
        ("regular", "http://b", "# TYPE x histogram\nx_count 1\n# TYPE y gauge\ny 2\n"),
    ]
    samples = read(merge_expositions(expositions).decode())
    assert ("x", frozenset({("worker_addr", "http://a"), ("exported_worker_addr", "inner")})) in samples
    assert of(samples, "http://b") == {("y", frozenset()): 2.0}
    assert read(merge_expositions([]).decode()) == {}
