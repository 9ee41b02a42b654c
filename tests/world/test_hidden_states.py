"""Hidden states reach the client whole and once, through retractions, cached prefixes and a pair."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import pytest

from pdserve.base.clock import ManualClock
from pdserve.protocol.hidden_states import HiddenArray, HiddenParams
from pdserve.protocol.messages import ContinueGeneration, PauseGeneration
from pdserve.scheduler.request import Req
from pdserve.sim.network import Faults, SimNet
from pdserve.sim.node import SimNode
from pdserve.sim.shape import request
from pdserve.sim.world import Prompt, RequestHalf, Shape, World, monolith_halves
from tests.world.workload import workload

NUM_SEEDS = 4


def _workload(seed: int) -> tuple[Shape, list[Prompt]]:
    """The workload of a seed, most of whose requests return hidden states, from a position of the prompt on."""
    shape, prompts = workload(seed)
    rng = random.Random(seed)

    def wanted(prompt: Prompt) -> HiddenParams | None:
        start = rng.choice((0, 0, len(prompt.tokens) // 2, len(prompt.tokens) - 1))
        return HiddenParams(start=start) if rng.random() < 0.8 else None

    return shape, [dataclasses.replace(prompt, hidden=wanted(prompt)) for prompt in prompts]


def _joined(half: RequestHalf, start: int) -> HiddenArray:
    """The rows of all parts, which follow one another from position `start` on."""
    for part in half.hidden_parts:
        assert part.start == start, "a part is missing, or came twice"
        start = part.end
    return np.concatenate([part.rows() for part in half.hidden_parts] or [np.zeros((0, 1), dtype=np.float32)])


def _check(prompt: Prompt, whole: RequestHalf, halves: Sequence[tuple[RequestHalf, int]]) -> int:
    """Compare what `halves` have been sent, each from its position on, with the monolith's; returns the rows."""
    if prompt.hidden is None:
        assert not any(half.hidden_parts for half, _ in halves)
        return 0
    expected = _joined(whole, prompt.hidden.start)
    assert len(expected) == len(prompt.tokens) + len(whole.tokens) - 1 - prompt.hidden.start
    got = np.concatenate([_joined(half, start) for half, start in halves])
    np.testing.assert_array_equal(got, expected)
    return len(got)


def _play(seed: int, faults: Faults) -> int:
    """A pair: prefill sends the states of the prompt, decode those of the output."""
    shape, prompts = _workload(seed)
    expected, told = monolith_halves(shape, prompts), 0
    world = World(seed, shape, faults)
    for i, half in enumerate(world.run(prompts, num_rooms=6)):
        prefill = world.prefill.halves.get(f"r{i}")
        if half is None or prefill is None or half.finish is None or half.finish.type == "abort":
            continue
        if prefill.finish is None or prefill.finish.type == "abort":
            continue
        hidden, count = prompts[i].hidden, len(prompts[i].tokens)
        told += _check(prompts[i], expected[i], [(prefill, 0 if hidden is None else hidden.start), (half, count)])
    for node in (world.prefill, world.decode):
        assert not node.leaks(), f"seed {seed}: {node.mode} still has {node.leaks()}"
    return told


def _play_alone(seed: int) -> int:
    """A monolith with a prefix cache, all of whose requests are retracted now and then. Returns the retractions."""
    shape, prompts = _workload(seed)
    expected = monolith_halves(shape, prompts)
    node = SimNode("null", shape, SimNet(seed, ManualClock(), Faults()), "mono", "mono")
    for i, prompt in enumerate(prompts):
        node.mailbox.post(request(f"r{i}", prompt, None))
    rng = random.Random(seed)
    for number in range(50_000):
        if rng.random() < 0.1:
            node.mailbox.post(PauseGeneration(query_id=f"p{number}", mode="retract"))
            node.mailbox.post(ContinueGeneration(query_id=f"c{number}"))
        node.scheduler.step()
        if node.idle:
            break
    assert node.idle and not node.leaks(), node.leaks()
    for i, prompt in enumerate(prompts):
        half = node.halves[f"r{i}"]
        assert half.tokens == expected[i].tokens
        _check(prompt, expected[i], [(half, 0 if prompt.hidden is None else prompt.hidden.start)])
    return int(node.scheduler.context.counters["requests_retracted"])


@pytest.mark.parametrize("faults", [Faults(), Faults(lost=0.1, abort=0.02)])
def test_a_pair_has_the_monoliths(faults: Faults) -> None:
    assert sum(_play(seed, faults) for seed in range(NUM_SEEDS)) > 100


def test_retracted_requests_send_each_once() -> None:
    assert sum(_play_alone(seed) for seed in range(NUM_SEEDS)) > 3


def test_a_cache_that_is_used_beyond_what_is_asked_for_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Req, "most_cached", property(lambda req: req.seq_len - 1))
    with pytest.raises(AssertionError):
        [_play_alone(seed) for seed in range(NUM_SEEDS)]


def test_states_that_are_sent_again_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Req, "hidden_params", property(lambda req: req.spec.hidden))
    with pytest.raises(AssertionError):
        [_play_alone(seed) for seed in range(NUM_SEEDS)]
