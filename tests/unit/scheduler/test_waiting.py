"""The order of waiting requests: policies, aging, resumed requests, removal from any place."""

from __future__ import annotations

import pytest

from pdserve.config.schedule_group import SchedulePolicy
from pdserve.memory.kv_memory import KVMemory, PageTable
from pdserve.protocol.messages import GenerateRequest
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.request import LPM_TOKENS, RANDOM_MOST, EvictionOrder, PriorityRules, Req, Times, WaitingQueue
from pdserve.sim.hash_lm import hash_layout

AGING_S = 10.0


def make_memory(num_pages: int = 512) -> KVMemory:
    return KVMemory(hash_layout(4), num_pages, PageTable(2, 512), num_aux=0, prefix_cache=True)


def make_queue(policy: SchedulePolicy, rules: PriorityRules | None = None) -> WaitingQueue:
    return WaitingQueue(policy, AGING_S, make_memory(), rules)


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


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority", "random"])
def test_the_retracted_come_back_before_all_others_the_oldest_first(policy: SchedulePolicy) -> None:
    queue = make_queue(policy)
    queue.add(make_req("n", 0.0, 9))
    queue.add(make_req("y", 5.0), resumed=True)
    queue.add(make_req("o", 4.0), resumed=True)
    assert (order(queue), queue.num_resumed, len(queue)) == ("oyn", 2, 3)


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority", "random"])
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


def test_random_mixes_requests_of_about_a_minute_and_no_more() -> None:
    queue = make_queue("random")
    reqs = [make_req(f"{i:02}", float(i)) for i in range(40)]
    for req in reqs:
        queue.add(req)
    late = make_req("late", RANDOM_MOST * AGING_S + 40.0)
    queue.add(late)
    mixed = [req.rid for req in queue]
    assert sorted(mixed) == [req.rid for req in reqs] + ["late"] and mixed != sorted(mixed)
    assert mixed[-1] == "late", "a request that came a minute later overtakes none"


@pytest.mark.parametrize(("low_first", "expected"), [(False, "dbca"), (True, "acbd")])
def test_priority_scheduling_is_strict_and_retracted_requests_have_no_advantage(low_first: bool, expected: str) -> None:
    queue = make_queue("fcfs", PriorityRules(enabled=True, low_values_first=low_first))
    for rid, arrived, priority in (("a", 0.0, 1), ("b", 900.0, 2), ("d", 900.0, 3)):
        queue.add(make_req(rid, arrived, priority))
    queue.add(make_req("c", 950.0 if not low_first else 800.0, 2), resumed=True)
    assert order(queue) == expected
    assert (queue.num_resumed, len(queue.for_retracted())) == (1, 0)


def test_with_the_policy_priority_waiting_outweighs_priority_also_for_retracted_requests() -> None:
    queue = make_queue("priority", PriorityRules(enabled=True)).for_retracted()
    queue.add(make_req("o", 0.0), resumed=True)
    queue.add(make_req("u", AGING_S - 1, 1), resumed=True)
    queue.add(make_req("l", AGING_S + 1, 1), resumed=True)
    assert order(queue) == "uol"


def test_a_health_probe_and_a_small_difference_preempt_none() -> None:
    rules = PriorityRules(enabled=True, threshold=10)
    runs, urgent = make_req("r", 0.0, 0), make_req("u", 1.0, 11)
    probe = GenerateRequest(rid="p", input_ids=[1], sampling=CoreSamplingParams(), priority=100, probe=True)
    assert rules.may_preempt(urgent.spec, runs.spec)
    assert not rules.may_preempt(make_req("x", 1.0, 10).spec, runs.spec) and not rules.may_preempt(probe, runs.spec)
    assert not PriorityRules(enabled=True, preempts=False).may_preempt(urgent.spec, runs.spec)
    assert not PriorityRules().may_preempt(urgent.spec, runs.spec)


def test_the_newest_of_the_least_urgent_loses_its_place() -> None:
    queued = {rid: make_req(rid, 0.0, priority) for rid, priority in (("a", 2), ("b", 1), ("c", 1), ("d", 5))}
    evictions = EvictionOrder(PriorityRules(enabled=True), lambda req: req.rid in queued)
    for req in queued.values():
        evictions.add(req, len(queued))
    found = []
    for _ in range(3):
        req = evictions.displaced_by(make_req("new", 1.0, 3).spec)
        found.append(None if req is None else queued.pop(req.rid).rid)
    assert found == ["c", "b", "a"]
    assert evictions.displaced_by(make_req("new", 1.0, 5).spec) is None, "d is as urgent"
    for number in range(1000):
        evictions.add(make_req(f"gone{number}", 1.0, 9), 1)
    del queued["d"]
    assert evictions.displaced_by(make_req("new", 1.0, 9).spec) is None
