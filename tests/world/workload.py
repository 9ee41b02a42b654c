"""Workloads of the simulated world, and its oracle. Shared by the world tests and the tests of these tests."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import msgspec

from pdserve.memory.layout import pages_for
from pdserve.protocol.sampling import CoreSamplingParams, Grammar, ThinkingBudget
from pdserve.scheduler.roles.optimistic import OptimisticLimits
from pdserve.sim.hash_sampling import ECHO_TOKENS, piece
from pdserve.sim.network import Faults
from pdserve.sim.shape import SimDrafting
from pdserve.sim.world import Prompt, RequestHalf, Shape, World, monolith_tokens

MAX_PROMPT, MAX_NEW = 23, 8


def optimistic(seed: int) -> OptimisticLimits:
    """Whether the servers of a seed compute prompts early: in half of the seeds, with few to many pages."""
    rng = random.Random(f"optimistic {seed}")
    return OptimisticLimits(attempts=rng.choice((0, 0, 0, 1, 2, 5)), memory_fraction=rng.choice((0.2, 0.5, 1.0, 1.0)))


def workload(seed: int) -> tuple[Shape, list[Prompt]]:
    """A seeded shape and prompts. Memory is tight, so that pages are used again as soon as they are free; some
    prompts repeat, so that a late message can meet a later use of its room.
    """
    rng = random.Random(seed)
    page_tokens = rng.choice((1, 2, 4, 8))
    shape = Shape(
        page_tokens=page_tokens,
        num_pages=pages_for(MAX_PROMPT + MAX_NEW, page_tokens) + rng.choice((0, 1, 4, 16)),
        num_rows=rng.choice((2, 4, 8)),
        num_aux=rng.choice((2, 6)),
        chunk_tokens=rng.choice((None, 1, 3, 5, 9)),
        notifies=seed % 2 == 1,
        fences=seed % 4 != 2,
        optimistic=optimistic(seed),
    )
    prompts: list[Prompt] = []
    for _ in range(rng.randint(4, 20)):
        if prompts and rng.random() < 0.5:
            prompts.append(rng.choice(prompts[-2:]))
        else:
            tokens = tuple(rng.randint(0, 999) for _ in range(rng.randint(1, MAX_PROMPT)))
            prompts.append(Prompt(tokens, rng.randint(1, MAX_NEW)))
    return shape, prompts


def with_salts(rng: random.Random, prompts: Sequence[Prompt], *, share: float = 0.25) -> Sequence[Prompt]:
    """The same prompts; with the chance `share` each has one of two cache salts, or none."""
    if rng.random() >= share:
        return prompts
    return [dataclasses.replace(prompt, salt=rng.choice(("", "a", "b"))) for prompt in prompts]


PAIRS_OF_DRAFTERS = ((1, 1), (1, 1), (1, 1), (1, 2), (0, 1), (1, 0))
"""See `SimDrafting.weights`."""
WINDOWS = (1, 2, 3, 5, 8, 40)


def with_groups(shape: Shape, rng: random.Random, longest: int = MAX_PROMPT + MAX_NEW) -> Shape:
    """The same server for a hybrid model, with hardly more window pages and slots than one request needs."""
    window, page_tokens, step = rng.choice(WINDOWS), shape.page_tokens, shape.chunk_tokens
    most = pages_for(longest, page_tokens)
    if step is not None:
        step = max(step, shape.decode_step_tokens)
        ahead = max(1, shape.num_stages)
        most = min(most, pages_for(window - 1 + step, page_tokens) + 1 + ahead * (pages_for(step, page_tokens) + 1))
    return dataclasses.replace(
        shape,
        window=window,
        num_window_pages=most + rng.choice((0, 1, 8)),
        num_slots=rng.choice((1, 3, 8, 8)),
    )


def with_states(shape: Shape, rng: random.Random) -> Shape:
    """The same server for a model with recurrent layers and no window, with a prefix cache and few slots."""
    return dataclasses.replace(
        shape, has_state=True, num_slots=rng.choice((1, 2, 3, 5, 8)), state_grid_pages=rng.choice((1, 1, 2, 3))
    )


def with_drafts(shape: Shape, prompts: Sequence[Prompt], rng: random.Random) -> tuple[Shape, list[Prompt]]:
    """The same servers with speculative decoding, and the same prompts with all kinds of sampling.

    Drafts come from n-grams, from a drafter of the executor, or from both; with several stages from n-grams alone. The
    drafters of prefill and decode are equal in half of the seeds; in others they differ, or one side has none.
    """
    only_ngram = shape.num_stages > 1
    min_match = rng.choice((1, 2) if only_ngram else (0, 1, 1, 2))
    has_model = min_match == 0 or (rng.random() < 0.3 and not only_ngram)
    drafting = SimDrafting(
        max_drafts=rng.choice((1, 2, 3, 5)),
        min_match=min_match,
        capacity=rng.choice((0, 60, 4096)),
        chance=rng.choice((0.3, 0.7, 0.95)) if has_model else None,
        adaptive=rng.random() < 0.2,
    )
    weights = random.Random(repr(drafting)).choice(PAIRS_OF_DRAFTERS)
    drafting = dataclasses.replace(drafting, weights=weights)
    shape = dataclasses.replace(shape, drafting=drafting, echo=rng.choice((0.4, 0.6, 0.8)))
    samplings = [_with_thinking(_sampling(rng), random.Random(repr(prompt.tokens))) for prompt in prompts]
    return shape, [
        dataclasses.replace(prompt, sampling=sampling) for prompt, sampling in zip(prompts, samplings, strict=True)
    ]


def _sampling(rng: random.Random) -> CoreSamplingParams:
    is_random = rng.random() < 0.4
    return CoreSamplingParams(
        temperature=1.0 if is_random else 0.0,
        seed=rng.randrange(100) if is_random else None,
        frequency_penalty=0.5 if rng.random() < 0.3 else 0.0,
        min_new_tokens=rng.choice((0, 0, 3)),
        stop_token_ids=tuple(rng.sample(range(ECHO_TOKENS), 2)) if rng.random() < 0.3 else (),
        grammar=Grammar(kind="regex", text=".*") if rng.random() < 0.15 else None,
        speculative=rng.random() < 0.9,
    )


def _with_thinking(sampling: CoreSamplingParams, rng: random.Random) -> CoreSamplingParams:
    """Give a quarter of the requests a thinking budget; the tags are tokens that the model often echoes."""
    if rng.random() > 0.25:
        return sampling
    opening, end, *closing = rng.sample(range(ECHO_TOKENS), rng.choice((3, 4)))
    budget = ThinkingBudget(
        num_tokens=rng.choice((0, 1, 3, 6)),
        closing_ids=tuple(closing),
        opening=piece(opening).decode(),
        ends=(piece(end).decode(),),
        inside=rng.random() < 0.7,
    )
    grammar = sampling.grammar or Grammar(kind="any_text", text="")
    return msgspec.structs.replace(sampling, thinking=budget, grammar=grammar)


def play(seed: int, faults: Faults) -> tuple[World, list[RequestHalf | None]]:
    """Run a seed and hold it against the oracle: finished requests have the monolith's tokens, and nothing is left."""
    shape, prompts = workload(seed)
    expected = monolith_tokens(shape, prompts)
    world = World(seed, shape, faults)
    results = world.run(prompts, num_rooms=6)
    for index, half in enumerate(results):
        if half is None or half.finish is None or half.finish.type == "abort":
            continue
        assert half.tokens == expected[index], f"seed {seed}, request {index}: tokens differ from the monolith's"
    for node in (world.prefill, world.decode):
        assert not node.leaks(), f"seed {seed}: {node.mode} still has {node.leaks()}"
    return world, results
