"""A prefill scheduler that computes prompts before their decode server has published its pages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.messages import AbortRequest, GenerateRequest, RoomAddress
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.roles.optimistic import OptimisticLimits
from pdserve.sim.network import Faults
from pdserve.sim.world import Prompt, Shape, World, monolith_tokens

PROMPTS = [[number, *range(5, 12)] for number in range(8)]
QUIET = Faults(repeated=0.0, max_delay_s=0.1)


def make_world(attempts: int = 2, fraction: float = 1.0, num_pages: int = 24, **options: object) -> World:
    limits = OptimisticLimits(attempts=attempts, memory_fraction=fraction)
    shape = Shape(page_tokens=4, num_pages=num_pages, num_rows=4, chunk_tokens=3, optimistic=limits, **options)  # type: ignore[arg-type]
    return World(3, shape, QUIET)


def half(number: int, logprobs: Logprobs | None = None) -> GenerateRequest:
    return GenerateRequest(
        rid=f"r{number}",
        input_ids=PROMPTS[number],
        sampling=CoreSamplingParams(max_new_tokens=6, temperature=0.0),
        logprobs=logprobs,
        room=RoomAddress(host=World.ADDRESS[0], port=World.ADDRESS[1], room=number),
    )


def until(world: World, condition: Callable[[], bool], *, alone: bool = False) -> None:
    """Step both servers, or prefill alone."""
    for _ in range(2000):
        if condition():
            return
        world.clock.advance(0.25)
        world.net.deliver()
        for node in (world.prefill,) if alone else (world.prefill, world.decode):
            node.scheduler.step()
    raise AssertionError((world.prefill.scheduler.role.queues(), world.decode.scheduler.role.queues()))


def held(world: World) -> float:
    return world.prefill.scheduler.role.facts()["num_prefill_held_reqs"]


def counter(world: World, name: str) -> int:
    return world.prefill.scheduler.context.counters[f"optimistic_prefills{name}"]


@pytest.mark.parametrize("layer_groups", [0, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_is_held_and_sent_when_the_pages_are_known(layer_groups: int, overlap: bool) -> None:
    world = make_world(layer_groups=layer_groups, overlap=overlap)
    world.prefill.mailbox.post(half(0))
    until(world, lambda: held(world) == 1, alone=True)
    queues = world.prefill.scheduler.role.queues()
    assert queues["num_prefill_bootstrap_queue_reqs"] == 1 and queues["num_running_reqs"] == 0
    assert world.prefill.memory.table.num_free == 4, "it has left its row"
    world.decode.mailbox.post(half(0))
    until(world, lambda: world.decode.halves["r0"].finish is not None and world.prefill.halves["r0"].finish is not None)
    assert world.decode.halves["r0"].tokens == monolith_tokens(world.shape, [Prompt(tuple(PROMPTS[0]), 6)])[0]
    assert (counter(world, ""), counter(world, "_held"), counter(world, "_gave_way")) == (1, 1, 0)
    until(world, lambda: world.prefill.idle and world.decode.idle)
    assert not world.prefill.leaks() and not world.decode.leaks()


@pytest.mark.parametrize("end", ["abort", "timeout"])
@pytest.mark.parametrize("phase", ["active", "held"])
def test_an_early_request_that_ends_leaves_nothing(end: str, phase: str) -> None:
    world = make_world()
    world.prefill.mailbox.post(half(0))
    role = world.prefill.scheduler.role
    until(world, lambda: bool(held(world) if phase == "held" else role.queues()["num_running_reqs"]), alone=True)
    if end == "abort":
        world.prefill.mailbox.post(AbortRequest(rid="r0"))
    else:
        world.clock.advance(1000.0)
    until(world, lambda: world.prefill.halves["r0"].finish is not None, alone=True)
    finish = world.prefill.halves["r0"].finish
    assert finish is not None and finish.status_code == (499 if end == "abort" else 504)
    until(world, lambda: world.prefill.idle, alone=True)
    assert not world.prefill.leaks()


def test_held_pages_give_way_to_a_request_whose_decode_server_is_ready() -> None:
    world = make_world(attempts=1, num_pages=7)
    for number in (0, 1, 2):
        world.prefill.mailbox.post(half(number))
    until(world, lambda: held(world) == 3, alone=True)
    for server in (world.decode, world.prefill):
        server.mailbox.post(half(3))
    until(world, lambda: world.decode.halves["r3"].finish is not None)
    assert counter(world, "_gave_way") > 0 and counter(world, "") == 3, "it has used up its attempt"
    for number in (0, 1, 2):
        world.decode.mailbox.post(half(number))
    until(world, lambda: all(world.decode.halves[f"r{number}"].finish is not None for number in range(4)))
    prompts = [Prompt(tuple(PROMPTS[number]), 6) for number in range(4)]
    assert [world.decode.halves[f"r{number}"].tokens for number in range(4)] == monolith_tokens(world.shape, prompts)
    until(world, lambda: world.prefill.idle and world.decode.idle)
    assert not world.prefill.leaks()


def test_the_share_of_pages_and_the_kind_of_request_are_limits() -> None:
    world = make_world(fraction=0.2, num_aux=16)  # of 24 pages: two prompts of two pages
    for number in range(4):
        world.prefill.mailbox.post(half(number, Logprobs(top=0, prompt_from=0) if number == 0 else None))
    until(world, lambda: held(world) == 2, alone=True)
    for _ in range(50):
        world.prefill.scheduler.step()
    assert held(world) == 2 and counter(world, "") == 2
    assert not any(world.prefill.halves["r0"].prompt_parts), "a prompt whose log probabilities are wanted waits"
