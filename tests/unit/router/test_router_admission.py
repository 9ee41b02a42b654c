"""Places at workers and the queue before them: a pair as a whole or not at all, in order, and nothing stays."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from pdserve.protocol.failure import Failure
from pdserve.router.config.config import BreakerConfig, LimitConfig, PolicyConfig, RouterConfig, WorkerRole, WorkerSpec
from pdserve.router.policies import RoutedRequest
from pdserve.router.workers.admission import Admission, PairSlots, QueueWaitEstimator, rids_of
from pdserve.router.workers.metrics import RouterMetrics
from pdserve.router.workers.workers import BreakerState, LoadReport, Registry, Worker
from tests.waiting import settle

ANYTHING = RoutedRequest()


class Desk(Admission):
    """An admission desk with workers that are all healthy, and a clock in the test's hand."""

    clock_s = 1000.0

    def __init__(self, prefills: int, decodes: int, **limits: Any) -> None:
        breaker = BreakerConfig(failure_threshold=2, success_threshold=1, open_s=10.0)
        names = [(WorkerRole.PREFILL, f"http://p{i}:1") for i in range(prefills)]
        names += [(WorkerRole.DECODE, f"http://d{i}:1") for i in range(decodes)]
        config = RouterConfig(
            pd=True, policies=PolicyConfig(policy="least_loaded"), limits=LimitConfig(**limits), breaker=breaker
        )
        registry = Registry(breaker)
        super().__init__(config, registry, RouterMetrics(), random.Random(7))
        for role, url in names:
            registry.add(WorkerSpec(role=role, url=url)).healthy = True
        self.registry = registry

    def now(self) -> float:  # type: ignore[override]
        return self.clock_s

    def worker(self, name: str) -> Worker:
        found = self.registry.find(f"http://{name}:1")
        assert found is not None
        return found

    async def places(self, *avoid: Worker) -> PairSlots:
        entered = await self.enter(ANYTHING, avoid)
        assert isinstance(entered, PairSlots), entered
        return entered

    async def refused(self) -> Failure:
        entered = await self.enter(ANYTHING)
        assert isinstance(entered, Failure), entered
        return entered

    def loads(self) -> dict[str, int]:
        return {worker.spec.url[7:-2]: worker.inflight for worker in self.registry.workers}


def break_worker(desk: Desk, worker: Worker) -> None:
    for _ in range(2):
        worker.breaker.failed(worker.breaker.enter(desk.now()), desk.now())
    assert worker.breaker.state(desk.now()) is BreakerState.OPEN


async def test_places_count_at_both_workers_until_they_are_given_back_and_only_once() -> None:
    desk = Desk(1, 1)
    places = await desk.places()
    assert desk.loads() == {"p0": 1, "d0": 1}
    assert places.prefill is not None
    places.prefill.close()
    assert desk.loads() == {"p0": 0, "d0": 1}
    places.close()
    places.close()
    assert desk.loads() == {"p0": 0, "d0": 0}
    assert desk.num_inside == 0


async def test_a_moved_request_is_read_at_its_worker_though_that_gets_no_new_ones() -> None:
    desk = Desk(1, 1, max_inflight=1)
    worker = desk.worker("d0")
    full = await desk.places()
    worker.healthy = False
    slots = desk.enter_at(worker)
    assert slots is not None and desk.loads() == {"p0": 1, "d0": 2}
    slots.close()
    full.close()
    assert desk.loads() == {"p0": 0, "d0": 0}
    break_worker(desk, worker)
    assert desk.enter_at(worker) is None


async def test_workers_to_avoid_are_taken_only_where_there_is_no_other() -> None:
    desk = Desk(1, 2)
    for _ in range(3):
        places = await desk.places(desk.worker("p0"), desk.worker("d1"))
        assert places.pair.decode is desk.worker("d0")
        assert places.pair.prefill is desk.worker("p0")


@pytest.mark.parametrize("sick", ["p0", "d0"])
async def test_an_open_breaker_on_either_side_keeps_the_pair_out_and_spends_nothing_of_the_other(sick: str) -> None:
    desk = Desk(1, 1)
    well = "d0" if sick == "p0" else "p0"
    break_worker(desk, desk.worker(sick))
    refused = await desk.refused()
    assert (refused.code, refused.retry_after_s) == ("breaker_open", 10)
    desk.clock_s += 5
    break_worker(desk, desk.worker(well))
    desk.clock_s += 6
    assert desk.worker(sick).breaker.state(desk.now()) is BreakerState.HALF_OPEN
    assert (await desk.refused()).retry_after_s == 4, "one may be probed, the other is still open"
    assert desk.worker(sick).breaker.admits(desk.now()), "and its probe was not spent"
    assert desk.loads() == {"p0": 0, "d0": 0}


async def test_one_request_probes_both_halves_of_a_pair() -> None:
    desk = Desk(1, 1)
    for name in ("p0", "d0"):
        break_worker(desk, desk.worker(name))
    desk.clock_s += 10
    probe = await desk.places()
    assert (await desk.refused()).code == "breaker_open", "one probe at a time"
    for place in probe:
        place.completed()
    probe.close()
    assert {desk.worker(name).breaker.state(desk.now()) for name in ("p0", "d0")} == {BreakerState.CLOSED}


async def test_a_probe_whose_client_leaves_says_nothing_and_the_next_one_is_admitted() -> None:
    desk = Desk(1, 1)
    break_worker(desk, desk.worker("d0"))
    desk.clock_s += 10
    (await desk.places()).close()
    assert desk.worker("d0").breaker.state(desk.now()) is BreakerState.HALF_OPEN
    second = await desk.places()
    second.decode.failed()
    second.close()
    assert desk.worker("d0").breaker.state(desk.now()) is BreakerState.OPEN


async def test_a_sick_worker_is_passed_over_while_another_is_well() -> None:
    desk = Desk(1, 2)
    break_worker(desk, desk.worker("d0"))
    assert {(await desk.places()).pair.decode for _ in range(4)} == {desk.worker("d1")}


async def test_full_workers_fill_a_queue_that_is_served_in_order_and_refuses_one_too_many() -> None:
    desk = Desk(1, 2, max_inflight=1, queue_size=2)
    first = await desk.places()
    order: list[str] = []

    async def come(name: str) -> PairSlots:
        places = await desk.places()
        order.append(name)
        return places

    calls = [asyncio.create_task(come(name)) for name in ("one", "two")]
    await settle()
    refused = await desk.refused()
    assert (refused.status, refused.code) == (503, "queue_full")
    assert desk.num_waiting == 2
    assert first.prefill is not None
    first.prefill.close()
    await settle()
    assert order == ["one"], "prefill has room again, though the first one still decodes"
    first.close()
    await settle()
    assert order == ["one"], "prefill is full"
    (await calls[0]).close()
    (await calls[1]).close()
    assert order == ["one", "two"]
    assert set(desk.loads().values()) == {0}
    assert desk.num_waiting == 0


async def test_nobody_overtakes_the_queue_but_a_request_that_was_in_before() -> None:
    desk = Desk(1, 1, max_inflight=1, queue_size=1)
    first = await desk.places()
    waits = asyncio.create_task(desk.enter(ANYTHING))
    await settle()
    again = asyncio.create_task(desk.enter(ANYTHING, again=True))
    await settle()
    assert desk.num_waiting == 2, "the limit is for newcomers"
    first.close()
    await settle()
    assert again.done()
    assert not waits.done()
    for call in (again, waits):
        places = await call
        assert isinstance(places, PairSlots)
        places.close()
    assert set(desk.loads().values()) == {0}


async def test_all_workers_together_may_be_limited_too() -> None:
    desk = Desk(2, 2, max_concurrent_requests=1)
    first = await desk.places()
    second = asyncio.create_task(desk.places())
    await settle()
    assert not second.done()
    first.close()
    (await second).close()
    assert desk.num_inside == 0


async def test_a_wait_ends_in_time_and_says_so() -> None:
    desk = Desk(1, 1, max_inflight=1, queue_timeout_s=0.01)
    held = await desk.places()
    refused = await desk.refused()
    assert (refused.status, refused.code) == (503, "queue_timeout")
    assert desk.num_waiting == 0
    held.close()


@pytest.mark.parametrize("given", [False, True], ids=["while it waits", "in the moment of its turn"])
async def test_a_client_that_hangs_up_in_the_queue_leaves_nothing(given: bool) -> None:
    desk = Desk(1, 1, max_inflight=1)
    held = await desk.places()
    leaves, stays = asyncio.create_task(desk.places()), asyncio.create_task(desk.places())
    await settle()
    if given:
        held.close()
        leaves.cancel()
    else:
        leaves.cancel()
        await settle()
        held.close()
    (await stays).close()
    assert leaves.cancelled()
    assert (desk.num_inside, desk.num_waiting, set(desk.loads().values())) == (0, 0, {0})


async def test_those_who_wait_are_told_when_nobody_is_left() -> None:
    desk = Desk(1, 1, max_inflight=1)
    await desk.places()
    waits = asyncio.create_task(desk.enter(ANYTHING))
    await settle()
    desk.worker("d0").healthy = False
    desk.wake()
    refused = await waits
    assert isinstance(refused, Failure)
    assert (refused.code, refused.message) == ("no_worker", "no healthy decode worker")


async def test_a_new_worker_serves_those_who_wait() -> None:
    desk = Desk(1, 1, max_inflight=1)
    first = await desk.places()
    assert first.prefill is not None
    first.prefill.close()
    waits = asyncio.create_task(desk.places())
    await settle()
    desk.registry.add(WorkerSpec(role=WorkerRole.DECODE, url="http://d1:1")).healthy = True
    desk.wake()
    assert (await waits).pair.decode is desk.worker("d1")


async def test_an_aborted_request_does_not_wait_any_more() -> None:
    desk = Desk(1, 1, max_inflight=1)
    await desk.places()
    waits = asyncio.create_task(desk.enter(ANYTHING, rids=rids_of({"rid": ["a", "b"]})))
    other = asyncio.create_task(desk.enter(ANYTHING, rids=rids_of({"rid": "c"})))
    await settle()
    assert desk.abort("b") == 1
    refused = await waits
    assert isinstance(refused, Failure)
    assert (refused.status, refused.code) == (400, "aborted")
    assert not other.done()
    assert desk.abort(None) == 1
    await other


async def test_a_draining_worker_gets_nothing_and_is_gone_after_its_last_request() -> None:
    desk = Desk(1, 2)
    places = await desk.places()
    worker = places.pair.decode
    gone: list[Worker] = []
    desk.registry.on_forgotten.append(gone.append)
    desk.registry.remove(worker)
    assert {(await desk.places()).pair.decode for _ in range(4)}.isdisjoint({worker})
    assert desk.registry.find(worker.id) is worker
    assert gone == []
    places.close()
    assert desk.registry.find(worker.id) is None
    assert gone == [worker]


def test_load_is_what_a_worker_reported_plus_what_was_sent_since() -> None:
    desk = Desk(1, 1)
    worker = desk.worker("d0")
    worker.inflight = 3
    assert worker.load(10.0, 3.0) == 3, "nothing reported"
    worker.report = LoadReport(requests=8, tokens=4096, inflight_then=2, at_s=9.0)
    assert worker.load(10.0, 3.0) == 8 + 1 + 1, "8 there, one more of ours since, 4096 tokens weigh as one"
    worker.inflight = 0
    assert worker.load(10.0, 3.0) == 8 - 2 + 1
    assert worker.load(12.1, 3.0) == 0, "too old"
    worker.report = LoadReport(requests=None, tokens=0, inflight_then=2, at_s=9.0)
    worker.inflight = 5
    assert worker.load(10.0, 3.0) == 5, "it does not say how many requests"
    worker.report = LoadReport(requests=0, tokens=0, inflight_then=5, at_s=9.0)
    assert worker.load(10.0, 3.0) == 5, "never less than what we know to be there"


async def test_the_least_loaded_by_report_is_taken() -> None:
    desk = Desk(1, 2)
    desk.worker("d0").report = LoadReport(requests=50, tokens=0, inflight_then=0, at_s=desk.now())
    assert {(await desk.places()).pair.decode for _ in range(5)} == {desk.worker("d1")}


def test_the_time_to_come_back_follows_the_pace() -> None:
    pace = QueueWaitEstimator()
    assert pace.retry_after_s(0.0, 50) == 1
    for at in range(10):
        pace.note(float(at))
    assert pace.retry_after_s(10.0, 20) == 10, "one a second, half of the queue"
    assert pace.retry_after_s(10.0, 10_000) == 60
    assert pace.retry_after_s(10.0, 0) == 1
