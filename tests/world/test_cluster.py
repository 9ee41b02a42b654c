"""Several servers of each role, with replicas and ranks, a router that tries again, and everything that goes wrong."""

from __future__ import annotations

import gc
import os

import pytest

from pdserve.sim.cluster import Cluster, Layout
from pdserve.sim.network import Faults
from pdserve.sim.node import monolith_tokens
from pdserve.sim.shape import Prompt, Shape
from tests.world.campaign import KINDS, PROMPT_S, check, play, tally_of

FAULTS_OF: dict[str, tuple[str, ...]] = {
    "lost": ("frames lost",),
    "late": ("copies seen late",),
    "copies": ("copies failed",),
    "notes": ("notes lost",),
    "aborts": ("clients that went away", "halves aborted"),
    "kills": ("servers killed", "restarts at the same endpoint"),
    "deaths": ("deaths of one rank or replica", "replicas of several ranks"),
    "cuts": ("links cut in one direction", "frames cut off", "probes cut off", "copies given up over a cut link"),
    "lies": ("probes refused though alive", "peers that came back after their session had ended"),
    "usurpers": ("Hellos of a second instance",),
    "replays": ("frames replayed", "Hellos replayed"),
    "stops": ("servers stopped",),
    "clocks": ("clock leaps", "clocks that differ"),
    "frames": ("odd frames", "frames damaged"),
    "damage": ("pages damaged",),
    "look-ups": ("slow look-ups", "look-ups without an answer", "stale look-ups"),
    "switches": ("role switches", "drains", "drains that cut requests"),
    "changes": ("role changes in place", "role changes that failed", "drains for a role change in place"),
    "releases": ("releases of memory", "drains for a release of memory"),
    "ranks": ("replicas of several ranks",),
    "replicas": ("diverts",),
}
"""What must happen in the seeds of a kind, or they say nothing: the first in a few of them, the others in many."""


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 60), marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_fault_alone(kind: str, seeds: range) -> None:
    tally = tally_of(seeds, 1, kind)
    assert not tally.failures, tally.failures[0]
    assert tally.counts["requests with the monolith's tokens"] > len(seeds)
    for name in FAULTS_OF[kind][: 1 if len(seeds) < 10 else None]:
        assert tally.counts[name], (name, tally.counts)


@pytest.mark.parametrize("seeds", [range(1000, 1008), pytest.param(range(1008, 1400), marks=pytest.mark.slow)], ids=len)
def test_all_kinds_together(seeds: range) -> None:
    tally = tally_of(seeds, 1)
    assert not tally.failures, tally.failures[0]
    assert tally.counts["requests that were tried again and got them"]


def test_a_seed_is_played_alike_each_time() -> None:
    assert play(5) == play(5) != play(6)


def test_a_world_holds_no_descriptors() -> None:
    """Its servers end with the garbage collector: of thousands in one process some hundred are there at a time."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        play(7)
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


def test_a_server_that_comes_back_at_once_at_its_endpoint_is_not_taken_for_the_one_before() -> None:
    """The new process accepts probes of the old one, so only another look-up tells them apart."""
    shape, prompts = Shape(num_pages=64), [Prompt(tuple(range(i, i + 9)), 4) for i in range(3)]
    cluster = Cluster(1, shape, Faults(), Layout(prefills=1, decodes=1))
    cluster.run(prompts[:1])
    (old,) = cluster.of_role("prefill")
    old.die()
    cluster.servers.remove(old)
    cluster.servers.append(cluster.start("prefill", old.host, old.clock, [node.endpoint for node in old.replicas]))
    answers = cluster.run(prompts)
    check(answers, monolith_tokens(shape, prompts), (), most_s=PROMPT_S)
    assert all(answer.error is None and answer.took_s < 60.0 for answer in answers), answers
    assert not cluster.leaks()
