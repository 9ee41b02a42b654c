"""Servers with a host tier and hardly any device memory, so that prefixes leave the device and come back.

Copies between pages and slots end at random moments, some of them late. A page or slot that is reused too early, or
that is found too early, changes the tokens.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

from pdserve.base.parallel import ParallelShape
from pdserve.scheduler.host_tier import WritePolicy
from pdserve.sim.cluster import Cluster, Layout
from pdserve.sim.network import Faults
from pdserve.sim.node import monolith_tokens
from pdserve.sim.shape import Prompt, Shape
from pdserve.sim.world import World
from tests.world.pressure import counts_of, pressured, run_alone, run_pair
from tests.world.workload import with_groups, with_salts, with_states

POLICIES: tuple[WritePolicy, ...] = ("write_through", "write_through", "write_through_selective", "write_back")
SLOW = Faults(lost=0.05, max_delay_s=0.6, abort=0.005, copy_failed=0.01, slow_tier=0.1)


def setting(seed: int) -> tuple[Shape, list[Prompt]]:
    """A server with a host tier of a model of each kind in turn, and conversations that begin alike."""
    rng = random.Random(f"tiers {seed}")
    shape, prompts = pressured(seed)
    shape = dataclasses.replace(
        shape,
        prefix_cache=True,
        decode_prefix_cache=rng.random() < 0.7,
        host_ratio=rng.choice((0.5, 1.0, 2.0, 4.0)),
        write_policy=rng.choice(POLICIES),
        num_stages=1 if rng.random() < 0.7 else shape.num_stages,
    )
    if seed % 3 == 1:
        shape = with_states(shape, rng)
    if seed % 3 == 2:
        longest = max(len(prompt.tokens) + prompt.max_new_tokens for prompt in prompts)
        shape = dataclasses.replace(with_groups(shape, rng, longest), is_hybrid=rng.random() < 0.5)
    prompts += [dataclasses.replace(prompt, tokens=(*prompt.tokens[:30], 7)) for prompt in prompts[:6]]
    rng.shuffle(prompts)
    return shape, list(with_salts(rng, prompts))


def play(seed: int) -> Counter[str]:
    """A pair, or with an odd seed a monolith; what happened.

    Raises AssertionError for a wrong token, and for a page or slot that is not free at the end.
    """
    shape, prompts = setting(seed)
    if seed % 2 == 0:
        world, _ = run_pair(seed, shape, prompts, SLOW)
        counts = counts_of(world.prefill, world.decode)
        if not shape.decode_prefix_cache:
            counts["answers with tokens from prefill's host tier"] = check_sources(world)
        return counts
    rng = random.Random(f"mono {seed}")
    return counts_of(run_alone(seed, shape, prompts, rng, arrivals=0.3, faults=Faults(slow_tier=0.1, max_delay_s=0.6)))


def check_sources(world: World) -> int:
    """Check that decode, without a prefix cache, answers where prefill had cached tokens; returns those from the host.

    Raises AssertionError for an answer with other sources.
    """
    num_host = 0
    for rid, half in world.decode.halves.items():
        theirs = world.prefill.halves[rid].cached_details
        if half.tokens and theirs is not None and half.cached_details is not None:
            assert half.cached_details == theirs, f"{rid}: {half.cached_details} at decode, {theirs} at prefill"
            num_host += theirs.host > 0
    return num_host


def play_ranks(seed: int) -> Counter[str]:
    """A cluster whose replicas have several ranks, each of which copies at its own pace; what happened."""
    rng = random.Random(f"tier ranks {seed}")
    shape, prompts = setting(seed)
    shape = dataclasses.replace(shape, num_heads=2, num_stages=1, rules=type(shape.rules)(), layer_groups=0)
    pp_size = 1 + seed % 2
    shapes = [ParallelShape(tp_size=tp_size, pp_size=pp_size) for tp_size in (1, 2)]
    layout = Layout(prefills=1, decodes=1, prefill_ranks=rng.choice(shapes), decode_ranks=rng.choice(shapes))
    expected = monolith_tokens(shape, prompts)
    cluster = Cluster(seed, shape, dataclasses.replace(SLOW, abort=0.0, copy_failed=0.0), layout)
    for index, answer in enumerate(cluster.run(prompts)):
        assert answer.error is None and answer.tokens == expected[index], f"seed {seed}, request {index}: {answer}"
    assert not cluster.leaks(), cluster.leaks()
    return counts_of(*(node for server in cluster.servers for node in server.replicas))
