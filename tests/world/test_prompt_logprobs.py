"""Log probabilities of prompts reach the client whole through prefill and decode, whatever becomes of messages."""

from __future__ import annotations

import dataclasses
import random

import pytest

from pdserve.protocol.logprobs import Logprobs, PromptLogprobs, join
from pdserve.scheduler.request import Req
from pdserve.sim.network import Faults
from pdserve.sim.world import Prompt, RequestHalf, Shape, World, monolith_halves
from tests.world.workload import workload


def _wishes(seed: int) -> tuple[Shape, list[Prompt]]:
    """The workload of a seed, most of whose requests want to know something."""
    shape, prompts = workload(seed)
    rng = random.Random(seed)
    return shape, [
        dataclasses.replace(
            prompt,
            logprobs=Logprobs(
                top=rng.choice((0, 2)),
                token_ids=rng.choice(((), (3, 5))),
                prompt_from=rng.choice((None, 0, 0, len(prompt.tokens) // 2)),
                to_decode=rng.random() < 0.8,
            ),
        )
        for prompt in prompts
    ]


def _told(prompt: Prompt, half: RequestHalf) -> PromptLogprobs | None:
    logprob_params = prompt.logprobs
    if logprob_params is None or logprob_params.prompt_from is None:
        assert not half.prompt_parts
        return None
    return join(half.prompt_parts, logprob_params.prompt_from + 1, len(prompt.tokens))


def _play(seed: int, faults: Faults) -> int:
    """How many requests were told everything."""
    shape, prompts = _wishes(seed)
    expected = monolith_halves(shape, prompts)
    world = World(seed, shape, faults)
    told = 0
    for prompt, whole, half in zip(prompts, expected, world.run(prompts, num_rooms=6), strict=True):
        if half is None or half.finish is None or half.finish.type == "abort":
            continue
        assert half.tokens == whole.tokens
        assert half.picked == whole.picked, "the first token's come beside the aux record"
        if prompt.logprobs is not None and prompt.logprobs.to_decode:
            assert _told(prompt, half) == _told(prompt, whole)
            told += _told(prompt, half) is not None
        else:
            assert not half.prompt_parts
    for node in (world.prefill, world.decode):
        assert not node.leaks(), f"seed {seed}: {node.mode} still has {node.leaks()}"
    return told


def _play_all(faults: Faults) -> int:
    return sum(_play(seed, faults) for seed in range(20))


@pytest.mark.parametrize("faults", [Faults(), Faults(lost=0.2), Faults(lost=0.05, abort=0.02, kill=0.004)])
def test_they_are_the_monoliths(faults: Faults) -> None:
    assert _play_all(faults) > 20


def test_the_cache_is_not_used_beyond_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Req, "most_cached", property(lambda req: req.seq_len - 1))
    with pytest.raises(AssertionError):
        _play_all(Faults())
