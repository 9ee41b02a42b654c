"""Prefill and decode in the simulated world give the monolith's tokens and leave nothing behind, whatever happens."""

from __future__ import annotations

import threading

import pytest

from pdserve.sim.network import Faults
from tests.share import rest_slow
from tests.world.workload import play

SEEDS_PER_CASE = 20
CASES = rest_slow(range(10), keep=2)


@pytest.mark.parametrize("case", CASES)
def test_late_reordered_and_repeated_messages_change_nothing(case: int) -> None:
    for seed in range(case * SEEDS_PER_CASE, (case + 1) * SEEDS_PER_CASE):
        _, results = play(seed, Faults())
        assert all(half is not None and half.finish is not None for half in results)
        assert all(half is None or half.finish is None or half.finish.type == "length" for half in results)


@pytest.mark.parametrize("case", CASES)
def test_lost_messages_are_repeated_until_heard(case: int) -> None:
    for seed in range(case * SEEDS_PER_CASE, (case + 1) * SEEDS_PER_CASE):
        _, results = play(seed, Faults(lost=0.2))
        assert all(half is not None and half.finish and half.finish.type == "length" for half in results)


@pytest.mark.parametrize("case", CASES)
def test_aborts_at_any_moment(case: int) -> None:
    aborts = finished = 0
    for seed in range(case * SEEDS_PER_CASE, (case + 1) * SEEDS_PER_CASE):
        world, results = play(seed, Faults(abort=0.03, lost=0.05))
        aborts += world.num_aborts
        finished += sum(
            half is not None and half.finish is not None and half.finish.type == "length" for half in results
        )
    assert aborts > SEEDS_PER_CASE and finished > SEEDS_PER_CASE


@pytest.mark.parametrize("case", CASES)
def test_failed_copies_whose_bytes_land_late(case: int) -> None:
    for seed in range(case * SEEDS_PER_CASE, (case + 1) * SEEDS_PER_CASE):
        play(seed, Faults(copy_failed=0.1, abort=0.01))


@pytest.mark.parametrize("case", CASES)
def test_servers_killed_and_reborn(case: int) -> None:
    kills = 0
    for seed in range(case * SEEDS_PER_CASE, (case + 1) * SEEDS_PER_CASE):
        world, _ = play(seed, Faults(kill=0.005, lost=0.05, abort=0.01))
        kills += world.num_kills
    assert kills > 0


@pytest.mark.parametrize("case", CASES)
def test_bytes_that_are_seen_after_their_write_has_ended_are_waited_for_where_the_engine_notifies(case: int) -> None:
    """A sender can know only that its bytes have been taken; the receiver looks at none before the note behind them."""
    for seed in range(case * SEEDS_PER_CASE, (case + 1) * SEEDS_PER_CASE):
        _, results = play(2 * seed + 1, Faults(lands_late=True))
        assert all(half is not None and half.finish and half.finish.type == "length" for half in results)


@pytest.mark.parametrize("case", CASES)
def test_bytes_that_are_seen_late_hit_no_page_of_another_request(case: int) -> None:
    """The pages of an aborted one rest until its notes have come."""
    aborts = 0
    for seed in range(case * SEEDS_PER_CASE, (case + 1) * SEEDS_PER_CASE):
        world, _ = play(2 * seed + 1, Faults(lands_late=True, abort=0.3, lost=0.05, copy_failed=0.02))
        aborts += world.num_aborts
    assert aborts > SEEDS_PER_CASE


@pytest.mark.parametrize("case", CASES)
def test_notifications_that_do_not_come_fail_the_request_and_free_its_pages(case: int) -> None:
    failed = 0
    for seed in range(case * SEEDS_PER_CASE, (case + 1) * SEEDS_PER_CASE):
        world, results = play(2 * seed + 1, Faults(note_lost=0.05, lost=0.05))
        assert world.decode.kv is not None
        lost = world.decode.kv.counters["transfers_unconfirmed"]
        failed += lost
        assert sum(half is None or half.finish is None or half.finish.type == "abort" for half in results) == lost
    assert failed > 0


def test_no_thread_is_started() -> None:
    before = threading.active_count()
    play(1, Faults())
    assert threading.active_count() == before
