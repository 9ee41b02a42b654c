"""Admission by state slots: a request that finds no slot waits, or gets 503; it never gets the slot of another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import pytest

from pdserve.base.clock import ManualClock
from pdserve.memory.lease import Lease
from pdserve.protocol.messages import RoomAddress
from pdserve.sim.network import Faults, SimNet
from pdserve.sim.node import SimNode
from pdserve.sim.shape import Prompt, Shape, request
from pdserve.sim.world import World, monolith_tokens

SHAPE = Shape(page_tokens=4, num_pages=24, num_aux=6, chunk_tokens=4, window=3, num_window_pages=16, num_slots=1)
CACHED = dataclasses.replace(SHAPE, window=0, has_state=True)
QUIET = Faults(repeated=0.0, max_delay_s=0.1)
PROMPTS = [Prompt((5, 6, 7, 8, 9, first), 6) for first in (1, 2, 3)]
ADDRESS = RoomAddress(host=World.ADDRESS[0], port=World.ADDRESS[1], room=1)


def turn(world: World) -> None:
    world.clock.advance(0.25)
    world.net.deliver()
    for node in (world.prefill, world.decode):
        node.scheduler.step()


def until(world: World, condition: Callable[[], bool]) -> None:
    for _ in range(4000):
        if condition():
            return
        turn(world)
    raise AssertionError((world.prefill.scheduler.role.queues(), world.decode.scheduler.role.queues()))


def occupy(node: SimNode) -> Lease:
    """Take the only slot."""
    lease = node.memory.reserve_tokens(4, "somebody else")
    assert lease is not None and lease.groups is not None and lease.groups.slot is not None
    return lease


def begin(world: World, index: int = 0) -> None:
    for node in (world.prefill, world.decode):
        node.mailbox.post(request(f"r{index}", PROMPTS[index], msgspec.structs.replace(ADDRESS, room=index + 1)))


@pytest.mark.parametrize("shape", [SHAPE, CACHED], ids=["window", "cache"])
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_request_waits_for_a_slot(mode: str, shape: Shape) -> None:
    world = World(3, shape, QUIET)
    node = world.prefill if mode == "prefill" else world.decode
    lease = occupy(node)
    begin(world)
    for _ in range(100):
        turn(world)
    assert not world.decode.halves["r0"].tokens and world.decode.halves["r0"].finish is None
    assert node.scheduler.role.num_waiting == 1
    assert node.memory.counts()["pages_free"] == 23, "it waits for the slot, not for pages"
    lease.drop("request")
    until(world, lambda: world.decode.halves["r0"].finish is not None)
    assert world.decode.halves["r0"].tokens == monolith_tokens(shape, PROMPTS)[0]


def test_decode_answers_503_to_a_request_that_never_gets_a_slot() -> None:
    world = World(3, SHAPE, QUIET)
    lease = occupy(world.decode)
    begin(world)
    until(world, lambda: world.decode.halves["r0"].finish is not None)
    finish = world.decode.halves["r0"].finish
    assert finish is not None
    assert (finish.type, finish.err_type, finish.status_code) == ("abort", "prealloc_timeout", 503)
    lease.drop("request")
    until(world, lambda: world.prefill.idle and world.decode.idle and not world.net.busy)
    assert not world.prefill.leaks() and not world.decode.leaks()


@pytest.mark.parametrize("shape", [SHAPE, CACHED], ids=["window", "cache"])
@pytest.mark.parametrize("mode", ["null", "pair"])
def test_requests_take_turns_with_the_only_slot(mode: str, shape: Shape) -> None:
    expected = monolith_tokens(shape, PROMPTS)
    if mode == "null":
        net = SimNet(0, ManualClock(), Faults())
        node = SimNode("null", shape, net, "mono", "mono")
        for index, prompt in enumerate(PROMPTS):
            node.mailbox.post(request(f"r{index}", prompt, None))
        most = 0
        for _ in range(2000):
            net.clock.advance(0.05)
            if not node.scheduler.step() and node.idle:
                break
            most = max(most, node.scheduler.role.queues()["num_running_reqs"])
        assert most == 1
    else:
        world = World(3, shape, QUIET)
        for index in range(len(PROMPTS)):
            begin(world, index)
        node = world.decode
        until(world, lambda: all(node.halves[f"r{index}"].finish is not None for index in range(len(PROMPTS))))
    assert [node.halves[f"r{index}"].tokens for index in range(len(PROMPTS))] == expected


def test_a_server_without_slots_refuses() -> None:
    node = SimNode("null", dataclasses.replace(SHAPE, num_slots=0), SimNet(0, ManualClock(), Faults()), "m", "m")
    node.mailbox.post(request("r0", PROMPTS[0], None))
    node.scheduler.step()
    finish = node.halves["r0"].finish
    assert finish is not None and finish.status_code == 400
    assert finish.message is not None and "more window pages or state slots than the pools have" in finish.message
