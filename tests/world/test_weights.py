"""Clusters whose servers take other weights while requests run: each answer is wholly of one version's weights."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest

from pdserve.base.parallel import ParallelShape
from pdserve.errors import HandshakeError
from pdserve.memory.kv_memory import KVMemory
from pdserve.protocol.weights import InstallWeights
from pdserve.scheduler.weights_update import UpdatableWeights, WeightsUpdater
from pdserve.sim.cluster import Cluster, Layout
from pdserve.sim.network import Faults
from pdserve.sim.node import monolith_tokens
from pdserve.sim.shape import Prompt, Shape
from pdserve.sim.updates import NUM_ROUNDS
from pdserve.transfer import sessions
from pdserve.transfer.sessions import Sessions
from pdserve.transfer.wire import WEIGHTS, Hello
from tests.world.workload import with_groups, with_states, workload

Patch = pytest.MonkeyPatch
RANKS = (ParallelShape(), ParallelShape(), ParallelShape(tp_size=2), ParallelShape(pp_size=2))


def setting(seed: int) -> tuple[Shape, list[Prompt], Faults, Layout]:
    """Shape, prompts, faults and layout of a seed: prefix caches on both sides, hybrids, replicas and ranks."""
    shape, prompts = workload(seed)
    rng = random.Random(f"weights {seed}")
    shape = dataclasses.replace(
        shape, prefix_cache=True, decode_prefix_cache=rng.random() < 0.7, num_pages=shape.num_pages + 16,
        layer_groups=rng.choice((0, 2)),
    )  # fmt: skip
    if rng.random() < 0.3:
        shape = rng.choice((with_groups, with_states))(shape, rng)
    faults = Faults(
        lost=rng.choice((0.0, 0.1)), abort=rng.choice((0.0, 0.01)), copy_failed=rng.choice((0.0, 0.05)),
        max_delay_s=rng.choice((0.5, 2.0)), update=rng.choice((0.02, 0.1)), update_failed=rng.choice((0.0, 0.3)),
    )  # fmt: skip
    prefill, decode = rng.choice(RANKS), rng.choice(RANKS)
    if decode.pp_size > 1:
        shape = dataclasses.replace(shape, num_stages=2) if prefill.pp_size > 1 else shape
        decode = decode if prefill.pp_size > 1 else ParallelShape()
    elif prefill.pp_size > 1:
        prefill = ParallelShape()
    layout = Layout(
        prefills=rng.choice((1, 2)), decodes=rng.choice((1, 2)), prefill_dp=rng.choice((1, 1, 2)),
        decode_dp=rng.choice((1, 1, 2)), prefill_ranks=prefill, decode_ranks=decode, shares_steps=rng.random() < 0.5,
    )  # fmt: skip
    return shape, prompts * 2, faults, layout


def play(seed: int) -> Counter[str]:
    """Play a seed: every answer is one version's, nothing is left, and no client fails but by an abort or a copy.

    A try that the router ends, because the weights differ, leaves a tombstone. Rooms are used again on purpose, so a
    later try of the same prompt may meet it and end as aborted.
    """
    shape, prompts, faults, layout = setting(seed)
    versions = [
        monolith_tokens(dataclasses.replace(shape, model_weights=number), prompts) for number in range(NUM_ROUNDS + 1)
    ]
    cluster = Cluster(seed, shape, faults, layout)
    answers = cluster.run(prompts)
    counts = cluster.net.counts
    for index, answer in enumerate(answers):
        if answer.error is not None:
            met_a_tombstone = answer.error == "499" and counts["tries with different weights"] > 0
            assert faults.abort or faults.copy_failed or met_a_tombstone, (seed, index, answer.error)
            continue
        found = [number for number, tokens in enumerate(versions) if tokens[index] == answer.tokens]
        assert found, (seed, index, answer.tokens, [tokens[index] for tokens in versions])
        counts[f"answers of version {found[0]}"] += 1
    assert not cluster.leaks(), (seed, cluster.leaks())
    return counts


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 300), marks=pytest.mark.slow)], ids=len)
def test_every_answer_is_wholly_of_one_version(seeds: Sequence[int]) -> None:
    counts = sum((play(seed) for seed in seeds), Counter[str]())
    for name in ("answers of version 0", "answers of version 1", "servers with other weights"):
        assert counts[name], counts
    assert counts["tries with different weights"] and counts["weights that a rank could not load"], counts
    assert counts["weights of replicas that compute together"] or len(seeds) < 10, counts


# ---------------------------------------------------------------------- planted bugs


def a_room_compares_no_weights(patch: Patch) -> None:
    """A room joins two servers with different weights."""
    patch.setattr(Sessions, "weights", property(lambda self: ""))


def a_prefix_outlives_its_weights(patch: Patch) -> None:
    patch.setattr(KVMemory, "flush", lambda self: 0)


def running_requests_go_on_with_other_weights(patch: Patch) -> None:
    """Nothing is waited for: a request is computed with both."""
    from pdserve.scheduler.scheduler import Scheduler
    from pdserve.sim.hash_lm import HashExecutor

    def change(self: HashExecutor, weights: int) -> None:
        self._weights = weights
        self._layers = [self._layer(layer) for layer in range(self._layout.num_layers)]

    patch.setattr(HashExecutor, "change_weights", change)
    patch.setattr(Scheduler, "is_drained", property(lambda self: not self.under_way))


def a_replica_goes_on_before_all_have_swapped(patch: Patch) -> None:
    swap = WeightsUpdater._swap

    def go_on(self: WeightsUpdater, install: InstallWeights, scheduler: UpdatableWeights) -> None:
        swap(self, install, scheduler)
        self._release(scheduler)

    patch.setattr(WeightsUpdater, "_swap", go_on)


def held_requests_are_forgotten(patch: Patch) -> None:
    release = WeightsUpdater._release

    def forget(self: WeightsUpdater, scheduler: object) -> None:
        for rid in list(self._withdrawn):
            self._held.pop(rid, None)
        release(self, scheduler)  # type: ignore[arg-type]

    patch.setattr(WeightsUpdater, "_release", forget)


def a_handshake_compares_the_weights(patch: Patch) -> None:
    """A late Hello with the former weights ends a session in which rooms are open."""
    check = sessions.check_hello

    def strict(ours: Hello, theirs: Hello, sizes: Mapping[str, int]) -> None:
        check(ours, theirs, sizes)
        if ours.facts[WEIGHTS] != theirs.facts[WEIGHTS]:
            raise HandshakeError(WEIGHTS, ours.facts[WEIGHTS], theirs.facts[WEIGHTS])

    patch.setattr(sessions, "check_hello", strict)


SLOW_BUGS = (
    (a_prefix_outlives_its_weights, 0),
    (running_requests_go_on_with_other_weights, 0),
    (a_replica_goes_on_before_all_have_swapped, 0),
    (held_requests_are_forgotten, 0),
    (a_handshake_compares_the_weights, 56),
)
BUGS = [(a_room_compares_no_weights, 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_BUGS)]


@pytest.mark.parametrize(("bug", "first"), BUGS, ids=lambda value: getattr(value, "__name__", value))
def test_planted_bugs_are_caught(bug: Callable[[Patch], None], first: int, monkeypatch: Patch) -> None:
    """`first`: a seed that has caught the bug before."""
    bug(monkeypatch)
    for seed in range(first, first + 40):
        try:
            play(seed)
        except AssertionError:
            return
    pytest.fail(f"{bug.__name__} is not caught")
