"""Worlds with speculative decoding and hardly any memory. Shared with the tests, and played by `campaign --drafts`.

The oracle is a monolith without speculation: its tokens, and its log probabilities of the tokens that requests ask for.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence

from pdserve.memory.layout import pages_for
from pdserve.protocol.logprobs import Logprobs
from pdserve.sim.network import Faults
from pdserve.sim.node import SimNode, monolith_halves, monolith_tokens
from pdserve.sim.shape import Prompt, RequestHalf, Shape
from pdserve.sim.world import World
from tests.world import pressure
from tests.world.pressure import MAX_NEW, MAX_PROMPT, pressured
from tests.world.workload import with_drafts, with_groups, with_states

NUM_SECOND_TURNS = 4


def setting(seed: int) -> tuple[Shape, list[Prompt]]:
    """A seeded shape and prompts under memory pressure; full attention, a window and a state, or a state, in turn.

    Some prompts are second turns: an earlier prompt, its answer, and more.
    """
    shape, prompts = pressured(seed)
    rng = random.Random(f"drafts {seed}")
    shape, prompts = with_drafts(shape, prompts, rng)
    shape = dataclasses.replace(
        shape,
        num_pages=pages_for(MAX_PROMPT + MAX_NEW, shape.page_tokens) + rng.choice((0, 0, 1)),
        offload_pages=rng.choice((0, 100, 100)),
    )
    if seed % 3 == 1:
        shape = with_groups(shape, rng, MAX_PROMPT + MAX_NEW)
    elif seed % 3 == 2:
        shape = with_states(shape, rng)
    firsts = sorted(prompts, key=lambda prompt: len(prompt.tokens) + prompt.max_new_tokens)[:NUM_SECOND_TURNS]
    turns: list[Prompt] = []
    for first, answer in zip(firsts, monolith_tokens(shape, firsts), strict=True):
        tokens = (*first.tokens, *answer)[: MAX_PROMPT - 1]
        turns.append(Prompt((*tokens, rng.randint(0, 999)), rng.randint(4, MAX_NEW), sampling=first.sampling))
    return shape, [
        dataclasses.replace(prompt, logprobs=Logprobs(token_ids=(3, 5))) if rng.random() < 0.3 else prompt
        for prompt in (*turns, *prompts)  # the last ones are sent first
    ]


def with_drafters(shape: Shape, weights: tuple[int, int]) -> Shape:
    """The same servers with model drafters alone, of these weights: see `SimDrafting`."""
    assert shape.drafting is not None
    drafting = dataclasses.replace(shape.drafting, min_match=0, chance=0.9, weights=weights, adaptive=False)
    return dataclasses.replace(shape, drafting=drafting, num_stages=1)


def counts_of(*nodes: SimNode) -> Counter[str]:
    """What the schedulers counted; no received state and no aux record was another's."""
    found = pressure.counts_of(*nodes)
    for node in nodes:
        speculation = node.scheduler.context.speculation
        assert speculation is not None
        found += speculation.counters
    return found


def check(seed: int, shape: Shape, prompts: Sequence[Prompt], halves: Sequence[RequestHalf | None]) -> int:
    """Hold what clients got against the monolith; returns how many requests finished."""
    num_finished = 0
    for index, (prompt, half, whole) in enumerate(zip(prompts, halves, monolith_halves(shape, prompts), strict=True)):
        if half is None or half.finish is None:
            continue
        if half.speculation is not None:
            assert prompt.sampling.speculative, f"seed {seed}, request {index}: it has drafts"
            assert half.speculation.num_accepted < len(half.tokens), f"seed {seed}, request {index}"
        if half.finish.type == "abort":
            assert half.tokens == whole.tokens[: len(half.tokens)], f"seed {seed}, request {index}: wrong tokens"
            continue
        num_finished += 1
        assert half.tokens == whole.tokens, f"seed {seed}, request {index}: tokens differ from the monolith's"
        assert half.finish == whole.finish, f"seed {seed}, request {index}: it ends otherwise"
        assert half.picked == whole.picked, f"seed {seed}, request {index}: log probabilities differ"
    return num_finished


def play_pair(seed: int, faults: Faults = pressure.FAULTS, weights: tuple[int, int] | None = None) -> Counter[str]:
    """A pair under memory pressure: retraction, offload, aborts, failed copies. Returns what happened.

    `weights`: see `with_drafters`; None: the seed's drafters.
    """
    shape, prompts = setting(seed)
    shape = shape if weights is None else with_drafters(shape, weights)
    world = World(seed, shape, faults)
    num_finished = check(seed, shape, prompts, world.run(prompts, num_rooms=8))
    for node in (world.prefill, world.decode):
        assert not node.leaks(), f"seed {seed}: {node.mode} still has {node.leaks()}"
    found = counts_of(world.prefill, world.decode, *world.dead)
    prefill = world.prefill.scheduler.context.speculation
    assert prefill is not None and not prefill.counters, "a prefill server has planned drafts"
    return found + Counter(aborts=world.num_aborts, finished=num_finished)


def play_monolith(seed: int) -> Counter[str]:
    """An aggregated server that is too small, with some aborts. Returns what happened."""
    rng = random.Random(f"mono {seed}")
    shape, prompts = setting(seed)
    shape = dataclasses.replace(shape, prefix_cache=rng.random() < 0.8)
    node = pressure.run_to_idle(seed, shape, prompts, rng, arrivals=0.5)
    num_finished = check(seed, shape, prompts, [node.halves[f"r{index}"] for index in range(len(prompts))])
    return counts_of(node) + Counter(finished=num_finished)


def play(seed: int) -> Counter[str]:
    """A pair or a monolith, each with all models."""
    return play_monolith(seed) if seed // 3 % 2 else play_pair(seed)
