"""The order of waiting requests: policies, aging, resumed requests, removal from any place."""

from __future__ import annotations

import pytest

from pdserve.config.groups import SchedulePolicy
from pdserve.memory.kv_memory import KVMemory, PageTable
from pdserve.protocol.messages import GenerateRequest
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.request import LPM_TOKENS, Req, Times, WaitingQueue
from pdserve.sim.hash_lm import hash_layout

AGING_S = 10.0


def make_memory(num_pages: int = 512) -> KVMemory:
    return KVMemory(hash_layout(4), num_pages, PageTable(2, 512), num_aux=0, prefix_cache=True)


def make_queue(policy: SchedulePolicy) -> WaitingQueue:
    return WaitingQueue(policy, AGING_S, make_memory())


def make_req(rid: str, arrived: float, priority: int = 0, tokens: list[int] | None = None) -> Req:
    spec = GenerateRequest(rid=rid, input_ids=tokens or [1, 2, 3], sampling=CoreSamplingParams(), priority=priority)
    return Req(spec, Times(arrived=arrived))


def order(queue: WaitingQueue) -> str:
    return "".join(req.rid for req in queue)


def test_first_come_first_served_whatever_the_priority() -> None:
    queue = make_queue("fcfs")
    for rid, arrived, priority in (("a", 1.0, 0), ("b", 2.0, 9), ("c", 2.0, 0)):
        queue.add(make_req(rid, arrived, priority))
    assert order(queue) == "abc"


def test_priority_goes_first_but_waiting_outweighs_it() -> None:
    queue = make_queue("priority")
    queue.add(make_req("old", 0.0))
    queue.add(make_req("urgent", AGING_S - 1, 1))
    assert order(queue) == "urgentold"
    queue.add(make_req("late and urgent", AGING_S + 1, 1))
    assert order(queue) == "urgentoldlate and urgent", "one level is worth ten seconds of waiting, not more"


def test_the_longest_cached_prefix_goes_first_and_waiting_outweighs_it() -> None:
    memory = make_memory()
    queue = WaitingQueue("lpm", AGING_S, memory)
    known = list(range(LPM_TOKENS))
    lease = memory.reserve_tokens(len(known), "x")
    assert lease is not None
    waits = make_req("a", 0.0)
    queue.add(waits)
    match = make_req("b", AGING_S - 1, tokens=[*known, 7])
    queue.add(match)
    late = make_req("c", AGING_S + 1, tokens=[*known, 8])
    queue.add(late)
    assert order(queue) == "abc", "nothing is cached yet"
    memory.cache(lease, match.token_bytes(len(known)))
    queue.refresh()
    assert order(queue) == "bac"


def test_refresh_asks_the_cache_only_when_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make_memory()
    queue = WaitingQueue("lpm", AGING_S, memory)
    for i in range(3):
        queue.add(make_req(str(i), float(i)))
    asked: list[int] = []
    monkeypatch.setattr(memory, "match_prefix", lambda *args: asked.append(1) or 0)
    queue.refresh()
    first = len(asked)
    queue.refresh()
    assert (first, len(asked)) == (3, 3)


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_the_retracted_come_back_before_all_others_the_oldest_first(policy: SchedulePolicy) -> None:
    queue = make_queue(policy)
    queue.add(make_req("n", 0.0, 9))
    queue.add(make_req("y", 5.0), resumed=True)
    queue.add(make_req("o", 4.0), resumed=True)
    assert (order(queue), queue.num_resumed, len(queue)) == ("oyn", 2, 3)


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_any_request_can_be_taken_out(policy: SchedulePolicy) -> None:
    queue = make_queue(policy)
    reqs = [make_req(str(i), float(i % 3), i % 4) for i in range(9)]
    for req in reqs:
        queue.add(req)
    left = order(queue)
    for req in reqs[::2] + reqs[1::2]:
        assert req in queue
        queue.remove(req)
        left = left.replace(req.rid, "")
        assert req not in queue and order(queue) == left
