"""Requests with input embeddings through a pair, with cached prefixes, lost messages and recomputed prompts."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from pdserve.protocol.messages import ContinueGeneration, PauseGeneration
from pdserve.sim import shape as sim_shape
from pdserve.sim.network import Faults
from pdserve.sim.world import Prompt, Shape, World, monolith_halves
from tests.world.workload import workload

NUM_SEEDS = 4
WIDTH = 2


def _workload(seed: int) -> tuple[Shape, list[Prompt]]:
    """The workload of a seed; most requests have embeddings of few kinds, so that some of them are equal."""
    shape, prompts = workload(seed)
    rng = random.Random(seed)

    def changed(prompt: Prompt) -> Prompt:
        if rng.random() < 0.2:
            return prompt
        count = len(prompt.tokens)
        values = np.random.default_rng(rng.randrange(2)).normal(size=(count, WIDTH)).astype(np.float32)
        return dataclasses.replace(prompt, tokens=(0,) * count, embeds=values.tobytes())

    return dataclasses.replace(shape, load_failure_policy="recompute"), [changed(prompt) for prompt in prompts]


def _play(seed: int, faults: Faults) -> int:
    """Return how many requests with embeddings generated the monolith's tokens."""
    shape, prompts = _workload(seed)
    expected, right = monolith_halves(shape, prompts), 0
    world, rng = World(seed, shape, faults), random.Random(seed)
    misfortune = world.misfortune

    def also_retract(rooms: dict) -> None:  # type: ignore[type-arg]
        misfortune(rooms)
        if rng.random() < 0.05:
            world.decode.mailbox.post(PauseGeneration(query_id="p", mode="retract"))
            world.decode.mailbox.post(ContinueGeneration(query_id="c"))

    world.misfortune = also_retract  # type: ignore[method-assign]
    for prompt, whole, half in zip(prompts, expected, world.run(prompts, num_rooms=6), strict=True):
        if half is None or half.finish is None or half.finish.type == "abort":
            continue
        assert half.tokens == whole.tokens
        right += bool(prompt.embeds)
    for node in (world.prefill, world.decode):
        assert not node.leaks(), f"seed {seed}: {node.mode} still has {node.leaks()}"
    return right


@pytest.mark.parametrize("faults", [Faults(), Faults(lost=0.1, kill=0.002)])
def test_the_tokens_are_the_monoliths(faults: Faults) -> None:
    assert sum(_play(seed, faults) for seed in range(NUM_SEEDS)) > 12


def test_embeddings_that_share_cached_kv_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_shape, "salt_of_embeds", lambda salt, data: salt)
    with pytest.raises(AssertionError):
        [_play(seed, Faults()) for seed in range(NUM_SEEDS)]
