"""Servers that pause and go on at any moment give the monolith's tokens, and nothing is computed meanwhile."""

from __future__ import annotations

import dataclasses

import pytest

from pdserve.protocol.messages import ContinueGeneration, PauseGeneration, PauseMode
from pdserve.sim.network import Faults
from pdserve.sim.world import SimNode, World, monolith_tokens
from tests.world.workload import workload

MODES: tuple[PauseMode, ...] = ("retract", "in_place")


class PausingWorld(World):
    """Each server pauses now and then, for a while."""

    modes: tuple[PauseMode, ...] = MODES
    pause = 0.04
    """How often a server pauses, of all steps."""
    num_pauses = 0

    def misfortune(self, rooms: dict[int, tuple[int, SimNode, SimNode]]) -> None:
        super().misfortune(rooms)
        for node in (self.prefill, self.decode):
            if self.rng.random() < self.pause and rooms:
                self.num_pauses += 1
                node.mailbox.post(PauseGeneration(query_id="p", mode=self.rng.choice(self.modes)))
            elif self.rng.random() < 0.2 or not rooms:
                node.mailbox.post(ContinueGeneration(query_id="c"))


@pytest.mark.parametrize("overlap", [False, True])
def test_the_tokens_are_the_monoliths(overlap: bool) -> None:
    pauses = retracted = 0
    for seed in range(12):
        shape, prompts = workload(seed)
        world = PausingWorld(seed, dataclasses.replace(shape, overlap=overlap), Faults(lost=0.05))
        expected = monolith_tokens(shape, prompts)
        for index, half in enumerate(world.run(prompts, num_rooms=6)):
            assert half is not None and half.tokens == expected[index], (seed, index)
        for node in (world.prefill, world.decode):
            assert not node.leaks(), (seed, node.leaks())
        pauses += world.num_pauses
        retracted += world.decode.scheduler.context.counters["requests_retracted"]
    assert pauses > 40 and retracted > 10


def test_a_pause_that_aborts_ends_everything() -> None:
    class Aborting(PausingWorld):
        modes = ("abort",)
        pause = 0.01

    ended = finished = 0
    for seed in range(10):
        shape, prompts = workload(seed)
        expected = monolith_tokens(shape, prompts)
        world = Aborting(seed, shape, Faults())
        for index, half in enumerate(world.run(prompts, num_rooms=6)):
            assert half is not None and half.finish is not None
            ended += half.finish.type == "abort"
            finished += half.finish.type == "length"
            assert half.finish.type == "abort" or half.tokens == expected[index]
        for node in (world.prefill, world.decode):
            assert not node.leaks(), (seed, node.leaks())
    assert ended > 10 and finished > 0
