"""Prefill and decode schedulers with the hash model: aborts in every queue, refusals, the hand-over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import pytest

from pdserve.executor.interface import BatchPlan, StepHandle
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import (
    FAKE_BOOTSTRAP_HOST,
    AbortRequest,
    GenerateRequest,
    RoomAddress,
    SenderAddress,
)
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.request import Req, Times
from pdserve.scheduler.roles.base import PollFailures, can_recompute
from pdserve.sim.network import Faults
from pdserve.sim.world import Prompt, Shape, SimNode, World, monolith_tokens
from pdserve.transfer.room import KVPoll
from tests.unit.scheduler.kit import Mono

PROMPT = [5, 6, 7, 8, 9]
QUIET = Faults(repeated=0.0, max_delay_s=0.1)
QUEUES = {
    "prefill": (
        "num_prefill_bootstrap_queue_reqs",
        "num_queue_reqs",
        "num_running_reqs",
        "num_prefill_inflight_queue_reqs",
    ),
    "decode": (
        "num_decode_prealloc_queue_reqs",
        "num_decode_transfer_queue_reqs",
        "num_queue_reqs",
        "num_running_reqs",
    ),
}


def _world(num_rows: int = 1, num_pages: int = 24) -> World:
    return World(3, Shape(page_tokens=4, num_pages=num_pages, num_rows=num_rows, num_aux=6, chunk_tokens=2), QUIET)


def _request(rid: str, room: int, max_new: int = 6) -> GenerateRequest:
    return GenerateRequest(
        rid=rid,
        input_ids=PROMPT,
        sampling=CoreSamplingParams(max_new_tokens=max_new, temperature=0.0),
        room=RoomAddress(host=World.ADDRESS[0], port=World.ADDRESS[1], room=room),
    )


def _turn(world: World, *nodes: SimNode) -> None:
    world.clock.advance(0.25)
    world.net.deliver()
    for node in nodes or (world.prefill, world.decode):
        node.scheduler.step()


def _until(world: World, condition: Callable[[], bool], *nodes: SimNode) -> None:
    for _ in range(3000):
        if condition():
            return
        _turn(world, *nodes)
    raise AssertionError((world.prefill.scheduler.role.queues(), world.decode.scheduler.role.queues()))


def _idle(world: World) -> Callable[[], bool]:
    return lambda: world.prefill.idle and world.decode.idle and not world.net.busy


@pytest.mark.parametrize(("mode", "queue"), [(mode, queue) for mode, queues in QUEUES.items() for queue in queues])
def test_an_abort_in_each_queue_of_each_role_leaves_nothing_on_either_server(mode: str, queue: str) -> None:
    world = _world()
    node = world.prefill if mode == "prefill" else world.decode
    other = world.decode if mode == "prefill" else world.prefill
    rids = [f"r{i}" for i in range(3)]
    for i, rid in enumerate(rids):
        world.prefill.mailbox.post(_request(rid, i))
        world.decode.mailbox.post(_request(rid, i))
    _until(world, lambda: node.scheduler.role.queues()[queue] > 0)
    node.mailbox.post(AbortRequest(rid=None))
    node.scheduler.step()
    assert not node.scheduler.role.live
    for rid in rids:
        finish = node.halves[rid].finish
        assert finish is not None
        assert finish.type in ("abort", "length") and (finish.type != "abort" or finish.status_code == 499)
    _until(world, lambda: _idle(world)() and all(other.halves[rid].finish is not None for rid in rids))
    assert not world.prefill.leaks() and not world.decode.leaks()
    expected = monolith_tokens(world.shape, [Prompt(tuple(PROMPT), 6)])[0]
    world.prefill.mailbox.post(_request("again", 0))
    world.decode.mailbox.post(_request("again", 0))
    _until(world, lambda: "again" in world.decode.halves and world.decode.halves["again"].finish is not None)
    assert world.decode.halves["again"].tokens == expected, "the next use of the room is as if nothing had happened"


POLLED = [
    ("prefill", KVPoll.WAITING_FOR_INPUT, ("bootstrap", "transfer")),
    ("prefill", KVPoll.TRANSFERRING, ("transfer", "transfer")),
    ("prefill", KVPoll.SUCCESS, ("transfer", None)),
    ("decode", KVPoll.WAITING_FOR_INPUT, ("bootstrap", "bootstrap")),
    ("decode", KVPoll.SUCCESS, (None, "transfer")),
]


@pytest.mark.parametrize(("mode", "state", "phases"), POLLED)
def test_a_poll_that_fails_on_purpose_ends_the_request_and_is_counted_once_on_each_side(
    mode: str, state: KVPoll, phases: tuple[str | None, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`phases`: what prefill and decode count; None where that half has succeeded."""
    world = _world()
    node = world.prefill if mode == "prefill" else world.decode
    monkeypatch.setattr(
        PollFailures,
        "hits",
        lambda self, req, polled: (
            polled is state and req.rid in node.scheduler.role.live and node.scheduler.role.live[req.rid] is req
        ),
    )
    for side in (world.prefill, world.decode):
        side.mailbox.post(_request("r", 7))
    ended = [
        lambda side=side: "r" in side.halves and side.halves["r"].finish is not None
        for side in (world.prefill, world.decode)
    ]
    _until(world, lambda: all(has_ended() for has_ended in ended) and _idle(world)())
    finish = node.halves["r"].finish
    assert finish is not None and finish.type == "abort" and finish.message is not None
    assert "injected failure" in finish.message and finish.status_code == 502
    for side, phase in zip((world.prefill, world.decode), phases, strict=True):
        counters = side.scheduler.state().counters
        counted = {name: counters.get(f"{name}_failed_reqs", 0) for name in ("bootstrap", "transfer")}
        assert counted == {name: int(name == phase) for name in counted}
    assert not world.prefill.leaks() and not world.decode.leaks()


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_polls_of_the_fake_transport_fail_too(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PollFailures, "hits", lambda self, req, state: state is KVPoll.WAITING_FOR_INPUT)
    world = _world()
    node = world.prefill if mode == "prefill" else world.decode
    node.mailbox.post(
        msgspec.structs.replace(_request("r", 7), room=RoomAddress(host=FAKE_BOOTSTRAP_HOST, port=None, room=7))
    )
    _until(world, lambda: "r" in node.halves and node.halves["r"].finish is not None, node)
    finish = node.halves["r"].finish
    assert finish is not None and finish.status_code == 502
    assert node.scheduler.state().counters["bootstrap_failed_reqs"] == 1 and not node.leaks()


@pytest.mark.parametrize(
    ("mode", "turns", "phase"), [("prefill", 0, "bootstrap"), ("decode", 0, "bootstrap"), ("decode", 40, "transfer")]
)
def test_requests_that_time_out_are_counted_by_the_phase_of_their_transfer(mode: str, turns: int, phase: str) -> None:
    """The other half never arrives. After some turns decode has published its pages."""
    world = _world()
    node = world.prefill if mode == "prefill" else world.decode
    node.mailbox.post(_request("r", 7))
    for _ in range(turns):
        _turn(world)
    for _ in range(700):
        if "r" in node.halves and node.halves["r"].finish is not None:
            break
        world.clock.advance(1.0)
        if turns:
            world.net.deliver()
        for side in (world.prefill, world.decode) if turns else (node,):
            side.scheduler.step()
    finish, state = node.halves["r"].finish, node.scheduler.state()
    assert finish is not None and finish.status_code == 504 and state.failures == {"bootstrap_timeout": 1}
    other = "transfer" if phase == "bootstrap" else "bootstrap"
    assert (state.counters[f"{phase}_failed_reqs"], state.counters.get(f"{other}_failed_reqs", 0)) == (1, 0)


def test_the_share_of_polls_that_fail_is_the_given_one_and_equal_on_all_ranks() -> None:
    reqs = [Req(_request(str(room), room), Times(0.0)) for room in range(2000)]
    ranks = [PollFailures(0.05, "secret"), PollFailures(0.05, "secret")]
    hits = [[rank.hits(req, KVPoll.TRANSFERRING) for req in reqs] for rank in ranks]
    assert hits[0] == hits[1] and 60 <= sum(hits[0]) <= 140
    assert not any(PollFailures(0.0, "secret").hits(req, KVPoll.TRANSFERRING) for req in reqs)
    assert all(PollFailures(1.0, "secret").hits(req, KVPoll.TRANSFERRING) for req in reqs)
    probe = Req(msgspec.structs.replace(_request("probe", 1), probe=True), Times(0.0))
    assert not PollFailures(1.0, "secret").hits(probe, KVPoll.TRANSFERRING)


def test_tokens_in_prealloc_and_transfer_are_shown() -> None:
    world = _world()
    world.decode.mailbox.post(_request("r", 7))
    world.decode.scheduler.step()
    assert world.decode.scheduler.state().facts["pending_prealloc_tokens"] == len(PROMPT)
    world.prefill.mailbox.post(_request("r", 7))
    _until(world, lambda: world.decode.scheduler.role.queues()["num_decode_transfer_queue_reqs"] == 1)
    facts = world.decode.scheduler.state().facts
    assert (facts["preallocated_tokens"], facts["pending_prealloc_tokens"]) == (len(PROMPT), 0)


def test_the_wait_for_memory_is_shown_at_decode() -> None:
    world = _world(num_rows=4, num_pages=6)
    for name, room in (("a", 7), ("b", 8)):
        for node in (world.decode, world.prefill):
            node.mailbox.post(_request(name, room, max_new=12))
    waits = lambda: world.decode.scheduler.role.facts()["memory_wait_s"]  # noqa: E731
    assert waits() == 0.0
    _until(world, lambda: float(waits()) > 0.0)
    assert world.decode.scheduler.role.queues()["num_decode_prealloc_queue_reqs"] == 1
    _until(world, _idle(world))
    assert waits() == 0.0


def test_the_wait_for_memory_is_shown_at_a_server_without_disaggregation() -> None:
    mono = Mono(num_rows=4, num_pages=4, chunk=16)
    for name in ("a", "b"):
        mono.post(name, [5] * 9, max_new_tokens=4)
    mono.scheduler.step()
    mono.clock.advance(3.0)
    assert mono.scheduler.role.facts()["memory_wait_s"] == 3.0
    while mono.scheduler.step():
        pass
    assert mono.scheduler.role.facts()["memory_wait_s"] == 0.0


@pytest.mark.parametrize(
    ("mode", "queue", "code"),
    [
        ("prefill", "num_prefill_bootstrap_queue_reqs", "waiting_timeout"),
        ("prefill", "num_queue_reqs", "waiting_timeout"),
        ("prefill", "num_running_reqs", "running_timeout"),
        ("decode", "num_decode_prealloc_queue_reqs", "waiting_timeout"),
        ("decode", "num_queue_reqs", "waiting_timeout"),
        ("decode", "num_running_reqs", "running_timeout"),
    ],
)
def test_what_waits_or_runs_for_too_long_ends_on_both_servers(mode: str, queue: str, code: str) -> None:
    world = _world()
    node = world.prefill if mode == "prefill" else world.decode
    rids = [f"r{i}" for i in range(3)]
    for i, rid in enumerate(rids):
        world.prefill.mailbox.post(_request(rid, i))
        world.decode.mailbox.post(_request(rid, i))
    _until(world, lambda: node.scheduler.role.queues()[queue] > 0)
    context = node.scheduler.context
    timeouts = {"waiting_timeout_s": 0.1} if code == "waiting_timeout" else {"running_timeout_s": 0.1}
    context.limits = dataclasses.replace(context.limits, **timeouts)
    _turn(world, node)
    ended = [node.halves[rid].finish for rid in rids if node.halves[rid].finish is not None]
    found = [finish for finish in ended if finish is not None and finish.err_type == code]
    assert found and all(finish.status_code == 503 for finish in found), ended
    context.limits = dataclasses.replace(context.limits, waiting_timeout_s=None, running_timeout_s=None)
    _until(world, _idle(world))
    assert all(one.halves[rid].finish is not None for one in (world.prefill, world.decode) for rid in rids)
    assert not world.prefill.leaks() and not world.decode.leaks()


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_worker_refuses_what_it_cannot_pair(mode: str) -> None:
    world = _world()
    node = world.prefill if mode == "prefill" else world.decode
    node.mailbox.post(msgspec.structs.replace(_request("no room", 1), room=None))
    node.mailbox.post(_request("first", 5))
    node.mailbox.post(_request("second", 5))
    node.mailbox.post(msgspec.structs.replace(_request("large", 6), input_ids=list(range(97))))
    node.scheduler.step()
    statuses = {rid: half.finish.status_code for rid, half in node.halves.items() if half.finish is not None}
    assert statuses == {"no room": 400, "second": 409, "large": 400}
    assert list(node.scheduler.role.live) == ["first"]
    assert node.kv is not None and node.kv.counts()["rooms_live"] == 1


def test_a_request_of_another_server_is_refused_once_the_role_is_no_decode() -> None:
    """It was on its way from the API process while the role changed."""
    node = _world().prefill
    request = _request("moved", 5)
    assert request.room is not None
    sender = SenderAddress(instance="i", endpoint="h:1")
    moved = msgspec.structs.replace(request, room=msgspec.structs.replace(request.room, sender=sender))
    node.mailbox.post(moved)
    node.mailbox.post(msgspec.structs.replace(request, rid="again", room=None, local=True, taken_over=True))
    node.scheduler.step()
    codes = {rid: half.finish and half.finish.failure for rid, half in node.halves.items()}
    assert {rid: failure and failure.status for rid, failure in codes.items()} == {"moved": 409, "again": 400}
    assert not node.scheduler.role.live and not node.leaks()


def test_a_refused_request_keeps_nothing_of_the_room_it_asked_for() -> None:
    world = _world()
    world.decode.mailbox.post(msgspec.structs.replace(_request("large", 6), input_ids=list(range(97))))
    world.decode.scheduler.step()
    assert not world.decode.leaks()


def test_prefill_computes_one_token_and_decode_gets_the_same_one() -> None:
    world = _world(num_rows=4)
    prompts = [Prompt(tuple(PROMPT), max_new) for max_new in (1, 2, 6)]
    expected = monolith_tokens(world.shape, prompts)
    for i, prompt in enumerate(prompts):
        for node in (world.prefill, world.decode):
            node.mailbox.post(_request(f"r{i}", i, prompt.max_new_tokens))
    _until(world, lambda: len(world.decode.halves) == 3 and all(h.finish for h in world.decode.halves.values()))
    _until(world, _idle(world))
    for i, tokens in enumerate(expected):
        assert world.decode.halves[f"r{i}"].tokens == tokens
        assert world.prefill.halves[f"r{i}"].tokens == tokens[:1]
    assert not world.prefill.leaks() and not world.decode.leaks()


def _told_plans(world: World, num_waiting: int, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The rids of each of prefill's steps; the first is planned when so many prompts wait."""
    told: list[list[str]] = []
    role = world.prefill.scheduler.role
    plan = role.plan

    def telling(step: int) -> BatchPlan | None:
        planned = plan(step) if told or role.queues()["num_queue_reqs"] == num_waiting else None
        told.extend([] if planned is None else [[row.rid for row in planned.rows]])
        return planned

    monkeypatch.setattr(role, "plan", telling)
    return told


@pytest.mark.parametrize(("saturation", "sizes"), [(None, [4]), (5, [1, 1, 1, 1]), (10, [2, 2])])
def test_prefill_hands_over_one_part_of_a_step_after_the_other(
    saturation: int | None, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(num_rows=4, chunk_tokens=40, saturation_tokens=saturation, prefix_cache=False)
    world = World(3, shape, QUIET)
    told = _told_plans(world, 4, monkeypatch)
    for i in range(4):
        for node in (world.prefill, world.decode):
            node.mailbox.post(_request(f"r{i}", i))
    _until(world, lambda: len(world.decode.halves) == 4 and all(h.finish for h in world.decode.halves.values()))
    assert [len(rids) for rids in told] == sizes and len({rid for rids in told for rid in rids}) == 4
    assert {len(half.tokens) for half in world.decode.halves.values()} == {6}


def test_prefill_computes_nothing_of_who_ends_between_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(3, Shape(num_rows=4, chunk_tokens=40, saturation_tokens=5, prefix_cache=False), QUIET)
    told = _told_plans(world, 3, monkeypatch)
    for i in range(3):
        for node in (world.prefill, world.decode):
            node.mailbox.post(_request(f"r{i}", i))
    _until(world, lambda: len(told) == 1)
    later = [rid for rid in ("r0", "r1", "r2") if rid not in told[0]]
    for node in (world.prefill, world.decode):
        node.mailbox.post(AbortRequest(rid=later[0]))
    _until(world, _idle(world))
    assert told[1:] == [later[1:]]
    assert not world.prefill.leaks() and not world.decode.leaks()


def test_the_first_token_leaves_decode_before_the_next_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    world = _world()
    decode = world.decode
    seen: list[int] = []
    launch = decode.executor.launch

    def watched(plan: BatchPlan, *, layer_events: bool = False) -> StepHandle:
        seen.append(len(decode.halves["r0"].tokens))
        return launch(plan, layer_events=layer_events)

    monkeypatch.setattr(decode.executor, "launch", watched)
    for node in (world.prefill, decode):
        node.mailbox.post(_request("r0", room=1, max_new=3))
    _until(world, lambda: decode.halves["r0"].finish is not None)
    assert seen == [1, 2]


@pytest.mark.parametrize("offload_pages", [0, 100])
def test_what_a_fake_transfer_brought_is_never_cached(offload_pages: int) -> None:
    shape = Shape(
        page_tokens=4, num_pages=17, decode_prefix_cache=True, reserved_decode_tokens=0, offload_pages=offload_pages
    )
    world = World(3, shape, QUIET)
    decode = world.decode
    for i in range(4):
        spec = msgspec.structs.replace(_request(f"r{i}", i, 24), input_ids=list(range(i * 100, i * 100 + 20)))
        decode.mailbox.post(msgspec.structs.replace(spec, room=RoomAddress(host="2.2.2.2", port=1, room=i)))
    _until(world, lambda: len(decode.halves) == 4 and all(half.finish for half in decode.halves.values()), decode)
    assert decode.scheduler.context.counters["requests_retracted"] > 0, "the case is about retracted requests too"
    assert decode.memory.counts()["pages_cached"] == 0 and not decode.leaks()


def test_a_fake_room_reads_nothing_of_what_its_pages_held() -> None:
    answers = []
    for old in (3, 200):
        world = _world()
        decode = world.decode
        decode.executor.pools[0][0][:] = old
        room = RoomAddress(host="2.2.2.2", port=1, room=1)
        decode.mailbox.post(msgspec.structs.replace(_request("r0", 1), room=room))
        _until(world, lambda node=decode: "r0" in node.halves and node.halves["r0"].finish is not None, decode)
        answers.append(decode.halves["r0"].tokens)
    assert answers[0] == answers[1] and len(answers[0]) == 6


def test_decode_ends_a_request_that_waits_too_long_for_memory() -> None:
    world = _world(num_pages=6)
    lease = world.decode.memory.reserve_tokens(24, "somebody else")
    assert lease is not None
    for node in (world.prefill, world.decode):
        node.mailbox.post(_request("r0", 1))
    _until(world, lambda: world.decode.halves["r0"].finish is not None)
    finish = world.decode.halves["r0"].finish
    assert finish is not None and finish.type == "abort"
    lease.drop("request")
    _until(world, _idle(world))
    assert not world.decode.leaks() and not world.prefill.leaks()


@pytest.mark.parametrize(
    ("code", "may"), [("session_lost", True), ("prompt_mismatch", False), ("lora_mismatch", False)]
)
def test_decode_computes_no_prompt_that_differs_from_prefills(code: str, may: bool) -> None:
    assert can_recompute(Failure(code=code, message="")) is may


@pytest.mark.parametrize("has_memory", [True, False])
def test_decode_computes_in_pages_of_its_own_what_a_silent_peer_does_not_send(has_memory: bool) -> None:
    """The published pages stay with the peer as long as it may write there; without others the request ends in time."""
    shape = Shape(page_tokens=4, num_pages=6, num_aux=6, chunk_tokens=2, load_failure_policy="recompute", fences=False)
    world = World(3, shape, QUIET)
    decode = world.decode
    for node in (world.prefill, decode):
        node.mailbox.post(_request("r0", 1))
    _until(world, lambda: decode.scheduler.role.queues()["num_decode_transfer_queue_reqs"] == 1)
    lease = decode.memory.reserve_tokens(4 if has_memory else 16, "somebody else")
    assert lease is not None and decode.kv is not None
    before = decode.scheduler.state().progress
    _until(world, lambda: decode.halves["r0"].finish is not None, decode)
    assert (decode.scheduler.state().progress > before) is has_memory
    assert decode.kv.counts()["pages_held_remote"] > 0, "the peer is back as soon as it likes"
    assert decode.scheduler.context.counters["kv_loads_recomputed"] == 1
    finish = decode.halves["r0"].finish
    assert finish is not None
    if has_memory:
        assert (finish.type, len(decode.halves["r0"].tokens)) == ("length", 6)
    else:
        assert (finish.type, finish.err_type, finish.status_code) == ("abort", "prealloc_timeout", 503)
    lease.drop("request")
    _until(world, _idle(world))
    assert not decode.leaks() and not world.prefill.leaks()
