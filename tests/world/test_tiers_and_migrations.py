"""Servers that prefill, decode, migrate requests and use a host tier and a store at once; and bugs planted there.

`python -m tests.world.campaign --tiers --migrations --seeds 2000` plays many seeds of the same world.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest

from pdserve.errors import PdserveError
from pdserve.sim.cluster import Cluster, Layout
from pdserve.sim.network import Faults
from pdserve.sim.node import SimNode, monolith_tokens
from pdserve.sim.server import SimServer
from pdserve.sim.shape import Prompt, Shape
from tests.world import migration_bugs, tier_bugs
from tests.world.campaign import play, tally_of

Patch = pytest.MonkeyPatch
MAX_SEEDS = 60
FAULTS_OF_TIERS = (
    "copies to and from the host tier that take long",
    "calls of a store that take long",
    "calls of a store that is away",
    "look-ups that name objects that are not there",
    "puts that are lost",
    "stored objects with a flipped bit",
    "stored objects that are cut short",
    "stored objects of another key under the right name",
    "stored objects of another namespace under the right name",
    "reads of the store without the object: absent",
    "reads of the store without the object: checksum",
    "reads of the store without the object: key",
    "reads of the store without the object: length",
    "reads of the store without the object: namespace",
    "deaths of the source in the middle of a stage",
    "deaths of the target in the middle of a stage",
    "migrations away from a draining server",
    "migrations",
    "stages",
    "tokens read from the store",
    "tokens loaded from the host tier",
)
"""What must happen in a campaign of some hundred seeds, or it says nothing."""


@pytest.mark.slow
def test_each_kind_of_fault_of_the_tiers_happens_in_a_campaign() -> None:
    tally = tally_of(range(3000, 3300), 1, migrations=True, tiers=True)
    assert not tally.failures, tally.failures[0]
    assert not [name for name in FAULTS_OF_TIERS if not tally.counts[name]], tally.counts


def test_a_server_with_a_store_takes_requests_of_others() -> None:
    """Neither a request nor a stage waits for the store, nor is refused because another one does."""
    prompts = [Prompt(tuple(range(i, i + 9 + i % 7)), 48) for i in range(16)]
    shape = Shape(num_pages=256, num_rows=16, num_aux=16, decode_prefix_cache=True, host_ratio=1.0)
    shape = dataclasses.replace(shape, storage="wait_complete")
    cluster = Cluster(3, shape, Faults(migrate=0.5, slow_store=0.5, max_delay_s=0.3), Layout(prefills=1, decodes=3))
    answers = cluster.run(prompts, 16)
    assert [it.tokens for it in answers] == monolith_tokens(shape, prompts) and not cluster.leaks()
    counts = cluster.net.counts
    assert counts["migrations"] > 16 and counts["stages"] > 16, counts
    assert not counts["migrations given up"]


# ---------------------------------------------------------------------- a drain


def drain_by_migration(num_streams: int, num_new: int) -> Counter[str]:
    """All streams run at one decode server, which then drains while two others take them; what happened.

    Raises AssertionError when a stream has another token than the monolith's, was tried again, or ended at the server
    that drained, or ran there to its end after the drain had begun.
    """
    prompts = [Prompt(tuple(range(i, i + 5 + i % 7)), num_new) for i in range(num_streams)]
    num_pages = num_streams * (4 + num_new // 4)
    shape = Shape(num_pages=num_pages, num_rows=num_streams, num_aux=2 * num_streams, chunk_tokens=64)
    shape = dataclasses.replace(shape, decode_prefix_cache=True, host_ratio=0.5, storage="best_effort")
    faults = Faults(max_delay_s=0.2, drain_migrate=0.5)
    cluster = Cluster(7, shape, faults, Layout(prefills=1, decodes=3))
    one, *others = cluster.of_role("decode")
    for server in others:
        server.draining = True
    node, running = one.replicas[0], set[str]()

    def drain() -> None:
        if len(node.scheduler.role._batch_planner.running.reqs) < num_streams:  # type: ignore[attr-defined]
            cluster.net.later(drain, 0.0, min_delay_s=0.25)
            return
        running.update(node.scheduler.role.live)
        one.draining = True
        for server in others:
            server.draining = False

    cluster.net.later(drain, 0.0)
    answers = cluster.run(prompts, num_streams, at_once=True)
    for answer, tokens in zip(answers, monolith_tokens(shape, prompts), strict=True):
        assert (answer.tokens, answer.error, answer.num_tries) == (tokens, None, 1)
    assert len(running) == num_streams and not cluster.leaks()
    for rid in running:
        half = one.raw_half(rid)
        assert half is not None and half.finish is not None and half.finish.err_type == "migrated", rid
    return cluster.net.counts


@pytest.mark.parametrize(("num_streams", "num_new"), [(24, 40), pytest.param(200, 160, marks=pytest.mark.slow)])
def test_streams_leave_a_server_that_drains(num_streams: int, num_new: int) -> None:
    counts = drain_by_migration(num_streams, num_new)
    assert counts["migrations away from a draining server"] == num_streams


# ---------------------------------------------------------------------- everything at once


def activities(node: SimNode) -> set[str]:
    """What a decode server does at this moment."""
    role, tier = node.scheduler.role, node.scheduler.context.tier
    assert tier is not None and tier.storage is not None
    own = {
        "computes prompts": len(role._batch_planner.prefilling.active),  # type: ignore[attr-defined]
        "decodes": len(role._batch_planner.running.reqs),  # type: ignore[attr-defined]
        "sends a request away": len(list(role._migrations.stopped)) + len(role.guests),  # type: ignore[attr-defined]
        "uses the store": tier.storage.num_jobs,
    }
    return {name for name, number in own.items() if number}


def test_one_server_does_everything_at_once(monkeypatch: Patch) -> None:
    """A conversation of three turns: prompts whose transfer fails are computed at the decode server."""
    step, seen = SimServer.step, set[frozenset[str]]()

    def look(self: SimServer) -> None:
        step(self)
        if self.role == "decode":
            seen.add(frozenset(activities(self.replicas[0])))

    monkeypatch.setattr(SimServer, "step", look)
    shape = Shape(num_pages=96, num_rows=8, num_aux=12, chunk_tokens=1, page_tokens=2, decode_prefix_cache=True)
    shape = dataclasses.replace(shape, host_ratio=2.0, storage="timeout", load_failure_policy="recompute")
    faults = Faults(migrate=0.9, copy_failed=0.3, slow_store=0.3, slow_tier=0.05)
    cluster = Cluster(11, shape, faults, Layout(prefills=1, decodes=2))
    prompts = [Prompt(tuple(range(100 * i, 100 * i + 9 + i % 5)), 16) for i in range(8)]
    for turn in range(3):
        cluster.net.calm, cluster.net.faults = False, faults
        answers = cluster.run(prompts, 8)
        for answer, tokens in zip(answers, monolith_tokens(shape, prompts), strict=True):
            assert answer.tokens == tokens[: len(answer.tokens)] and (answer.error or answer.tokens == tokens)
        prompts = [
            dataclasses.replace(prompt, tokens=(*prompt.tokens, *answer.tokens, 7 + turn))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
    assert not cluster.leaks()
    assert max(map(len, seen)) == 4, seen
    names = ("migrations_in", "migrations_out", "kv_loads_recomputed", "backuped_tokens", "prefetched_tokens")
    counters = Counter[str]()
    for server in cluster.of_role("decode"):
        counters += server.replicas[0].scheduler.context.counters
    assert not [name for name in names if not counters[name]], counters


# ---------------------------------------------------------------------- planted bugs


BUGS: list[tuple[Callable[[Patch], None], str, int]] = [
    (tier_bugs.a_namespace_without_weights, "", 6),
    (tier_bugs.slots_are_used_again_before_a_load_has_ended, "", 127),
    (tier_bugs.each_rank_believes_itself, "ranks", 4),
    (migration_bugs.it_goes_on_after_a_commit, "", 2),
]
"""A bug, the kinds of faults beside those of the tiers, and a seed that has caught it."""


@pytest.mark.parametrize(("bug", "kinds", "first"), BUGS, ids=lambda value: getattr(value, "__name__", value))
def test_planted_bug_is_caught(bug: Callable[[Patch], None], kinds: str, first: int, monkeypatch: Patch) -> None:
    bug(monkeypatch)
    for seed in (*range(first, first + MAX_SEEDS), *range(first)):
        try:
            play(seed, kinds, migrations=True, tiers=True)
        except (AssertionError, PdserveError, IndexError, KeyError):
            return
    pytest.fail(f"{bug.__name__}: not caught in {MAX_SEEDS + first} seeds")
