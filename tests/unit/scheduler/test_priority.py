"""Priority scheduling in the roles: who starts first, who is preempted, and who leaves a full queue."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.base.clock import RATE_WINDOW_S
from pdserve.protocol.messages import GenerateRequest, RoomAddress
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.request import EVICTED_CODE, PriorityRules
from pdserve.sim.network import Faults
from pdserve.sim.world import Prompt, Shape, World, monolith_tokens
from tests.unit.scheduler.kit import Mono

RULES = PriorityRules(enabled=True)
QUIET = Faults(repeated=0.0, max_delay_s=0.1)


def ends(mono: Mono) -> list[str]:
    """The rids in the order in which they ended."""
    mono.run()
    rids = [o.rid for message in mono.sent for o in getattr(message, "outputs", []) if o.finish is not None]
    assert mono.all_free() and not mono.scheduler.audit()
    return rids


def preempted(mono: Mono) -> int:
    return mono.context.counters["requests_preempted"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("offload_bytes", [0, 1 << 20])
def test_a_request_beyond_the_threshold_takes_the_row_of_a_running_one(overlap: bool, offload_bytes: int) -> None:
    mono = Mono(num_rows=1, rules=RULES, overlap=overlap, offload_bytes=offload_bytes, prefix_cache=True)
    mono.post("low", max_new_tokens=9)
    for _ in range(4):
        mono.step()
    for rid, priority in (("middle", 10), ("high", 20)):
        mono.post(rid, [priority] * 5, priority=priority)
    assert ends(mono) == ["high", "middle", "low"], "10 is not more than the threshold"
    assert preempted(mono) == 1
    assert [len(mono.tokens(rid)) for rid in ("low", "middle", "high")] == [9, 4, 4]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (PriorityRules(enabled=True, threshold=19), ["low", "high"]),
        (PriorityRules(enabled=True, threshold=18), ["high", "low"]),
        (PriorityRules(enabled=True, preempts=False), ["low", "high"]),
        (PriorityRules(enabled=True, low_values_first=True), ["low", "high"]),
        (PriorityRules(), ["low", "high"]),
    ],
)
def test_what_decides_whether_a_request_is_preempted(rules: PriorityRules, expected: list[str]) -> None:
    mono = Mono(num_rows=1, rules=rules)
    mono.post("low", max_new_tokens=9, priority=1)
    for _ in range(4):
        mono.step()
    mono.post("high", priority=20)
    assert ends(mono) == expected
    assert preempted(mono) == (expected[0] == "high")


def test_a_prompt_that_is_being_computed_is_preempted_too() -> None:
    mono = Mono(num_rows=1, rules=RULES, num_pages=32, width=32)
    mono.post("low", list(range(3, 60)))
    mono.step()
    mono.post("high", priority=11)
    mono.step()
    assert mono.scheduler.state().queues["num_retracted_reqs"] == 1
    assert ends(mono) == ["high", "low"]


def small(rules: PriorityRules, num_pages: int) -> Mono:
    """A server that admits as many requests as its memory can hold now."""
    return Mono(num_rows=4, rules=rules, num_pages=num_pages, chunk=64, conservativeness=0.01)


def test_no_more_requests_are_preempted_than_the_urgent_one_needs_and_the_newest_of_the_least_urgent_first() -> None:
    mono = small(RULES, 12)
    for rid, priority in (("a", 0), ("b", 0), ("c", 5)):
        mono.post(rid, [ord(rid)] * 12, priority=priority, max_new_tokens=4)
    for _ in range(2):
        mono.step()
    assert (mono.scheduler.state().num_running_reqs, mono.memory.num_available) == (3, 0)
    mono.post("high", [3, 4, 5, 6], priority=16, max_new_tokens=2)
    assert set(mono.step()) == {"a", "c", "high"}
    assert preempted(mono) == 1
    assert sorted(ends(mono)) == ["a", "b", "c", "high"]


def test_none_is_preempted_where_that_would_not_help() -> None:
    mono = small(RULES, 12)
    mono.post("other", [7] * 24, priority=50, max_new_tokens=6)
    mono.post("low", [8] * 8, max_new_tokens=6)
    for _ in range(2):
        mono.step()
    mono.post("high", [9] * 24, priority=45, max_new_tokens=2)
    assert set(mono.step()) == {"other", "low"}
    assert preempted(mono) == 0
    assert sorted(ends(mono)) == ["high", "low", "other"]


def test_when_memory_runs_out_the_least_urgent_request_is_retracted() -> None:
    mono = small(PriorityRules(enabled=True, threshold=100), 8)
    mono.post("old", [7] * 9, priority=0, max_new_tokens=16)
    mono.post("new", [8] * 9, priority=9, max_new_tokens=16)
    assert ends(mono) == ["new", "old"]
    assert mono.context.counters["requests_retracted"] > 0 and preempted(mono) == 0


def test_a_full_queue_evicts_the_least_urgent_for_a_more_urgent_one_only() -> None:
    mono = Mono(num_rows=1, rules=PriorityRules(enabled=True, preempts=False), max_queued=2)
    mono.post("running", priority=1)
    mono.step()
    for rid, priority in (("b", 2), ("c", 3), ("d", 2), ("e", 4), ("f", 5)):
        mono.post(rid, priority=priority)
    mono.post("probe", priority=9, probe=True)
    mono.step()
    assert mono.finish("d").err_type == "queue_full", "not more urgent than b"
    assert mono.finish("probe").err_type == "queue_full"
    for rid in ("b", "c"):
        assert (mono.finish(rid).status_code, mono.finish(rid).err_type) == (503, EVICTED_CODE)
        assert mono.finish(rid).retry_after_s == 1, "without it a router counts a failure of the server"
    assert ends(mono)[-3:] == ["running", "f", "e"]
    assert mono.scheduler.state().counters["requests_evicted"] == 2


def test_a_request_that_was_preempted_never_leaves_a_full_queue() -> None:
    mono = Mono(num_rows=1, rules=RULES, max_queued=1)
    mono.post("low", max_new_tokens=9)
    for _ in range(4):
        mono.step()
    mono.post("high", priority=20)
    mono.step()
    mono.post("later", priority=30)
    mono.step()
    assert mono.finish("later").err_type == "queue_full"
    assert ends(mono) == ["later", "high", "low"]


def _post(world: World, room: int, priority: int, num_tokens: int = 5, max_new: int = 6) -> str:
    rid = f"r{room}"
    for node in (world.prefill, world.decode):
        node.mailbox.post(
            GenerateRequest(
                rid=rid,
                input_ids=[3 + room] * num_tokens,
                sampling=CoreSamplingParams(max_new_tokens=max_new, temperature=0.0),
                room=RoomAddress(host=World.ADDRESS[0], port=World.ADDRESS[1], room=room),
                priority=priority,
            )
        )
    return rid


def _until(world: World, condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        world.clock.advance(0.25)
        world.net.deliver()
        for node in (world.prefill, world.decode):
            node.scheduler.step()
    raise AssertionError((world.prefill.scheduler.role.queues(), world.decode.scheduler.role.queues()))


def _all_end(world: World, rids: list[str], max_new: int) -> list[str]:
    """Play to the end; the rids in the order in which they ended on decode. Every one has the monolith's tokens."""
    ended: list[str] = []

    def all_ended() -> bool:
        halves = world.decode.halves
        ended.extend(rid for rid in rids if rid not in ended and rid in halves and halves[rid].finish is not None)
        return len(ended) == len(rids) and world.prefill.idle and world.decode.idle and not world.net.busy

    _until(world, all_ended)
    for rid in rids:
        tokens = tuple([3 + int(rid[1:])] * 5)
        assert world.decode.halves[rid].tokens == monolith_tokens(world.shape, [Prompt(tokens, max_new)])[0]
    assert not world.prefill.leaks() and not world.decode.leaks()
    return ended


def _world(rules: PriorityRules, *, num_rows: int = 1, num_pages: int = 24, max_queued: int | None = None) -> World:
    shape = Shape(page_tokens=4, num_pages=num_pages, num_rows=num_rows, num_aux=6, rules=rules, max_queued=max_queued)
    return World(3, shape, QUIET)


@pytest.mark.parametrize(("num_rows", "num_pages"), [(1, 24), (4, 5)], ids=["row", "memory"])
def test_decode_preempts_for_a_row_and_for_memory(num_rows: int, num_pages: int) -> None:
    world = _world(RULES, num_rows=num_rows, num_pages=num_pages)
    low = _post(world, 0, 0, max_new=12)
    _until(world, lambda: world.decode.scheduler.role.queues()["num_running_reqs"] == 1)
    high = _post(world, 1, 20, max_new=12)
    assert _all_end(world, [low, high], 12) == [high, low]
    assert world.decode.scheduler.context.counters["requests_preempted"] == 1


def test_rows_of_decode_go_to_the_most_urgent_received_request() -> None:
    world = _world(PriorityRules(enabled=True, preempts=False))
    first = _post(world, 0, 0, max_new=12)
    _until(world, lambda: world.decode.scheduler.role.queues()["num_running_reqs"] == 1)
    rids = [_post(world, room, priority, max_new=12) for room, priority in ((1, 1), (2, 7), (3, 4))]
    assert _all_end(world, [first, *rids], 12) == ["r0", "r2", "r3", "r1"]


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_full_queue_of_either_role_evicts_and_the_other_half_ends_too(mode: str) -> None:
    world = _world(RULES, max_queued=1)
    node, other = (world.prefill, world.decode) if mode == "prefill" else (world.decode, world.prefill)
    for room, priority in ((0, 1), (1, 2), (2, 3)):
        _post(world, room, priority)
    node.scheduler.step()  # one row is free and one request may wait beyond it: the third displaces the first
    finish = node.halves["r0"].finish
    assert finish is not None and (finish.status_code, finish.err_type) == (503, EVICTED_CODE)
    _until(world, lambda: world.prefill.idle and world.decode.idle and not world.net.busy)
    told = other.halves["r0"].finish
    assert told is not None and (told.status_code, told.err_type, told.retry_after_s) == (503, EVICTED_CODE, 1)
    assert not world.prefill.leaks() and not world.decode.leaks()


def test_the_state_counts_queues_by_priority_and_the_tokens_a_second() -> None:
    mono = Mono(num_rows=1, rules=PriorityRules(enabled=True, preempts=False))
    for rid, priority in (("a", 5), ("b", 1), ("c", 1)):
        mono.post(rid, priority=priority)
    mono.step()
    state = mono.scheduler.state()
    assert state.by_priority == {"num_running_reqs": {5: 1}, "num_queue_reqs": {1: 2}}
    mono.run()
    mono.clock.advance(1.0)
    assert mono.scheduler.state().gen_throughput == 3 * 4 / RATE_WINDOW_S
    mono.clock.advance(RATE_WINDOW_S + 1.0)
    state = mono.scheduler.state()
    assert state.gen_throughput == 0 and state.by_priority == {"num_running_reqs": {}, "num_queue_reqs": {}}
    assert Mono().scheduler.state().by_priority == {}


def test_queues_of_a_pair_are_counted_by_priority() -> None:
    world = _world(PriorityRules(enabled=True, preempts=False))
    _post(world, 0, 3)
    _until(world, lambda: world.decode.scheduler.role.queues()["num_decode_transfer_queue_reqs"] == 1)
    counts = world.decode.scheduler.state().by_priority
    assert (counts["num_decode_transfer_queue_reqs"], counts["num_queue_reqs"]) == ({3: 1}, {3: 1})
    assert counts.keys() >= {"num_decode_prealloc_queue_reqs", "num_running_reqs"}
    assert world.prefill.scheduler.state().by_priority.keys() == {
        *("num_queue_reqs", "num_running_reqs"),
        *("num_prefill_bootstrap_queue_reqs", "num_prefill_inflight_queue_reqs"),
    }
