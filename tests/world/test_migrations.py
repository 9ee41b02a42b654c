"""Running requests move between decode servers at random times, with everything that goes wrong; and planted bugs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pdserve.sim.cluster import Cluster, Layout
from pdserve.sim.network import Faults
from pdserve.sim.node import monolith_tokens
from pdserve.sim.shape import Prompt, Shape
from tests.world import migration_bugs
from tests.world.campaign import play, tally_of

Patch = pytest.MonkeyPatch
KINDS = ("", "kills", "deaths", "copies", "cuts", "usurpers", "replays+lies", "aborts", "ranks", "replicas", "stops")
MAX_SEEDS = 30


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 400), marks=pytest.mark.slow)], ids=len)
def test_all_kinds_of_faults_together(seeds: range) -> None:
    tally = tally_of(seeds, 1, migrations=True)
    assert not tally.failures, tally.failures[0]
    assert tally.counts["migrations"] > len(seeds)
    assert tally.counts["stages"]


@pytest.mark.parametrize("seeds", [(67,), pytest.param(range(200), marks=pytest.mark.slow)], ids=len)
def test_requests_move_while_servers_change_their_role(seeds: Sequence[int]) -> None:
    tally = tally_of(seeds, 1, "changes", migrations=True)  # in 67 a request with a stage is retracted
    assert not tally.failures, tally.failures[0]
    assert tally.counts["drains for a role change in place"] and tally.counts["migrations begun"]


@pytest.mark.parametrize("seeds", [(22, 34), pytest.param(range(300), marks=pytest.mark.slow)], ids=len)
def test_requests_move_between_servers_with_a_host_tier_and_a_store(seeds: Sequence[int]) -> None:
    tally = tally_of(seeds, 1, migrations=True, tiers=True)
    assert not tally.failures, tally.failures[0]
    assert tally.counts["migrations"] and tally.counts["tokens loaded from the host tier"]
    assert tally.counts["tokens read from the store"] and tally.counts["role changes in place"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["groups", "states", "drafts"])
def test_servers_with_both_tiers_of_each_model(model: str) -> None:
    tally = tally_of(range(1000, 1060), 1, model=model, migrations=True, tiers=True)  # type: ignore[arg-type]
    assert not tally.failures, tally.failures[0]  # in 1050 the drafters of prefill and decode have other weights
    assert tally.counts["migrations"] and tally.counts["tokens loaded from the host tier"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["full", "drafts"])
def test_each_kind_of_fault_alone(kind: str, model: str) -> None:
    tally = tally_of(range(40), 1, kind, model=model, migrations=True)  # type: ignore[arg-type]
    assert not tally.failures, tally.failures[0]
    assert tally.counts["migrations"] > 10


def test_32_streams_move_again_and_again() -> None:
    """Nothing goes wrong: every request gets the monolith's tokens at its first try."""
    prompts = [Prompt(tuple(range(i, i + 9 + i % 7)), 16) for i in range(32)]
    shape = Shape(num_pages=256, num_rows=32, num_aux=32)
    cluster = Cluster(3, shape, Faults(migrate=0.9), Layout(prefills=1, decodes=3))
    answers = cluster.run(prompts, 32)
    assert [(it.tokens, it.error, it.num_tries) for it in answers] == [
        (tokens, None, 1) for tokens in monolith_tokens(shape, prompts)
    ]
    assert cluster.net.counts["migrations"] > 16 and not cluster.leaks()


def move_while_memory_is_short(seed: int) -> Cluster:
    """Nothing goes wrong, but most requests are retracted: each gets the monolith's tokens at its first try."""
    prompts = [Prompt(tuple(range(i, i + 9 + i % 7)), 40) for i in range(24)]
    shape = Shape(num_pages=40, num_rows=16, num_aux=16)
    cluster = Cluster(seed, shape, Faults(migrate=0.5), Layout(prefills=1, decodes=3))
    answers = cluster.run(prompts, 24, max_steps=1500)
    assert [(it.tokens, it.error, it.num_tries) for it in answers] == [
        (tokens, None, 1) for tokens in monolith_tokens(shape, prompts)
    ]
    assert not cluster.leaks()
    return cluster


@pytest.mark.parametrize("seeds", [(3,), pytest.param(range(10, 40), marks=pytest.mark.slow)], ids=len)
def test_retracted_requests_move(seeds: Sequence[int]) -> None:
    """Their KV is computed again where they go."""
    counts = [move_while_memory_is_short(seed).net.counts for seed in seeds]
    assert sum(it["migrations of retracted requests"] for it in counts) > 2 * len(seeds)


# ---------------------------------------------------------------------- planted bugs


RETRACTION_MUTANTS = (
    migration_bugs.a_retracted_request_does_not_come_back,
    migration_bugs.a_moved_request_stays_in_its_queue,
    migration_bugs.its_last_token_counts_as_sent,
)


@pytest.mark.parametrize("mutant", RETRACTION_MUTANTS, ids=lambda value: value.__name__)
def test_planted_bug_in_moves_of_retracted_requests_is_caught(
    mutant: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        move_while_memory_is_short(3)


MUTANTS: list[tuple[Callable[[Patch], None], int]] = [
    (migration_bugs.it_goes_on_after_a_commit, 0),
    (migration_bugs.a_late_commit_is_accepted, 0),
    (migration_bugs.the_last_page_is_left_out, 0),
    (migration_bugs.one_token_too_few_is_offered, 0),
    (migration_bugs.a_stopped_request_keeps_its_row, 0),
    (migration_bugs.a_stage_outlives_the_pages_of_its_request, 0),
]
"""A bug, and a seed that has caught it."""


@pytest.mark.parametrize(("mutant", "first"), MUTANTS, ids=lambda value: getattr(value, "__name__", value))
def test_planted_bug_is_caught(mutant: Callable[[Patch], None], first: int, monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    for seed in (*range(first, MAX_SEEDS), *range(first)):
        try:
            play(seed, "", migrations=True)
        except AssertionError:
            return
    pytest.fail(f"{mutant.__name__}: not caught in {MAX_SEEDS} seeds")
