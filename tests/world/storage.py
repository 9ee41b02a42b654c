"""Servers with a host tier and a store that is slow, away, forgetful and lying. Shared with the tests.

`python -m tests.world.storage --seeds 2000` plays seeds and prints how often each event happened.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from typing import get_args

from pdserve.base.clock import ManualClock
from pdserve.base.parallel import ParallelShape
from pdserve.config.tier_group import PrefetchPolicy
from pdserve.sim.cluster import Cluster, Layout
from pdserve.sim.network import Faults, SimNet
from pdserve.sim.node import monolith_tokens
from pdserve.sim.shape import Prompt, Shape
from tests.world.pressure import counts_of, pressured, run_alone, run_pair
from tests.world.workload import with_drafts, with_groups, with_states

KINDS = {
    "slow_store": (0.05, 0.4),
    "store_away": (0.05, 0.6),
    "store_lies": (0.05, 0.6),
    "put_lost": (0.05, 0.4),
    "object_damaged": (0.05, 0.4),
    "slow_tier": (0.02, 0.1),
}
"""Fault kinds of the tiers, and between which probabilities each is drawn."""
QUIET = Faults(max_delay_s=0.6)
HAPPENS = (
    "prefetched_tokens", "backuped_tokens", "storage_prefetch_hit_tokens", "load_back_tokens", "prefetched_states",
    "backuped_states", "prefetched_window_pages", "backuped_window_pages",
)  # fmt: skip
"""Counters that a campaign must see."""


def with_store(rng: random.Random, shape: Shape) -> Shape:
    """The same server with a host tier and a store."""
    host_ratio = rng.choice((1.0, 2.0, 4.0))
    return dataclasses.replace(
        shape, prefix_cache=True, host_ratio=host_ratio, storage=rng.choice(get_args(PrefetchPolicy)), offload_pages=0
    )


def setting(seed: int) -> tuple[Shape, list[Prompt]]:
    """A server with hardly any device memory, a host tier and a store, and conversations that begin alike.

    Some servers draft tokens. The model of each second seed has recurrent states, a window, or both.
    """
    rng = random.Random(f"storage {seed}")
    shape, prompts = pressured(seed)
    shape = with_store(rng, dataclasses.replace(shape, decode_prefix_cache=rng.random() < 0.7))
    if rng.random() < 0.3:
        shape, prompts = with_drafts(shape, prompts, rng)
    return (of_groups(seed, shape, prompts) if seed % 2 else shape), prompts


def of_groups(seed: int, shape: Shape, prompts: Sequence[Prompt]) -> Shape:
    """The same server for a model with states, with a window, or with both."""
    rng = random.Random(f"storage groups {seed}")
    if rng.random() < 0.5:
        return dataclasses.replace(with_states(shape, rng), num_slots=rng.choice((3, 5, 8)))
    longest = max(len(prompt.tokens) + prompt.max_new_tokens for prompt in prompts)
    return dataclasses.replace(with_groups(shape, rng, longest), is_hybrid=rng.random() < 0.5)


def faults_of(seed: int, base: Faults = QUIET) -> Faults:
    """Some of the kinds of faults."""
    rng = random.Random(f"storage faults {seed}")
    drawn = {kind: rng.uniform(*between) for kind, between in KINDS.items() if rng.random() < 0.4}
    return dataclasses.replace(base, **drawn)


def play(seed: int) -> Counter[str]:
    """Two servers of the same weights and one of others, one after the other on one store; or a pair; what happened.

    Raises AssertionError for a wrong token, and for a page or slot that is not free at the end.
    """
    shape, prompts = setting(seed)
    if seed % 3 == 2:
        world, _ = run_pair(seed, shape, prompts, faults_of(seed, Faults(lost=0.05, max_delay_s=0.6, abort=0.005)))
        return counts_of(world.prefill, world.decode) + world.net.counts
    return play_weights(seed, (0, 0) if seed % 3 else (0, 1, 0))


def play_weights(seed: int, weights: Sequence[int]) -> Counter[str]:
    """Monoliths with these weights, one after the other on one store."""
    shape, prompts = setting(seed)
    found: Counter[str] = Counter()
    objects: dict[str, bytes] = {}
    for number, own in enumerate(weights):
        net = SimNet(seed + number, ManualClock(), faults_of(seed))
        net.objects = objects
        found += _run(seed, dataclasses.replace(shape, model_weights=own), prompts, net)
    return found


def stored_by_other_weights(seed: int, shape: Shape, prompts: Sequence[Prompt]) -> dict[str, bytes]:
    """Return what a monolith of another model of the same layout stores while it answers the same prompts."""
    net = SimNet(seed, ManualClock(), QUIET)
    _run(seed, dataclasses.replace(shape, model_weights=shape.model_weights + 1), prompts, net)
    return net.objects


def _run(seed: int, shape: Shape, prompts: Sequence[Prompt], net: SimNet) -> Counter[str]:
    """A monolith on a net, to its end."""
    rng = random.Random(f"storage run {seed}")
    node = run_alone(seed, shape, prompts, rng, arrivals=0.3, net=net)
    return counts_of(node) + net.counts


def play_ranks(seed: int) -> Counter[str]:
    """A cluster whose replicas have several ranks, each of which has its own part of the pages in the store."""
    rng = random.Random(f"storage ranks {seed}")
    shape, prompts = setting(seed)
    shape = dataclasses.replace(shape, num_heads=2, num_stages=1, rules=type(shape.rules)(), layer_groups=0)
    shapes = [ParallelShape(tp_size=tp_size, pp_size=1 + seed // 4 % 2) for tp_size in (1, 2)]
    layout = Layout(prefills=1, decodes=1, prefill_ranks=rng.choice(shapes), decode_ranks=rng.choice(shapes))
    expected = monolith_tokens(shape, prompts)
    cluster = Cluster(seed, shape, faults_of(seed, Faults(lost=0.05, max_delay_s=0.6)), layout)
    for index, answer in enumerate(cluster.run(prompts)):
        assert answer.error is None and answer.tokens == expected[index], f"seed {seed}, request {index}: {answer}"
    assert not cluster.leaks(), cluster.leaks()
    return counts_of(*(node for server in cluster.servers for node in server.replicas)) + cluster.net.counts


def play_changes(seed: int) -> Counter[str]:
    """A cluster whose servers change their role in place: their tiers stay, while copies and the store are slow."""
    rng = random.Random(f"storage changes {seed}")
    shape, prompts = setting(seed)
    shape = dataclasses.replace(shape, num_heads=2, num_stages=1, rules=type(shape.rules)(), layer_groups=0)
    ranks = ParallelShape(tp_size=rng.choice((1, 2)), pp_size=rng.choice((1, 1, 2)))
    layout = Layout(prefills=2, decodes=2, prefill_ranks=ranks, decode_ranks=ranks)
    base = Faults(lost=0.05, max_delay_s=0.6, change=rng.uniform(0.01, 0.05), change_failed=rng.choice((0.0, 0.3)))
    cluster = Cluster(seed, shape, faults_of(seed, base), layout)
    expected = monolith_tokens(shape, prompts)
    for index, answer in enumerate(cluster.run(prompts)):
        assert answer.tokens == expected[index][: len(answer.tokens)], f"seed {seed}, request {index}: wrong tokens"
        assert answer.error is not None or answer.tokens == expected[index], f"seed {seed}, request {index}: {answer}"
    assert not cluster.leaks(), cluster.leaks()
    return counts_of(*(node for server in cluster.servers for node in server.replicas)) + cluster.net.counts


def main() -> None:
    """Print what happened in many seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    found: Counter[str] = Counter()
    for seed in range(args.first, args.first + args.seeds):
        found += play(seed)
        if seed % 4 == 0:
            found += play_ranks(seed // 4)
            found += play_changes(seed // 4)
    for name, count in sorted(found.items()):
        print(f"{count:8} {name}")
    missing = [name for name in HAPPENS if not found[name]]
    assert not missing, f"did not happen: {missing}"


if __name__ == "__main__":
    main()
