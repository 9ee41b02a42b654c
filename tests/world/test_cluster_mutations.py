"""A test of the tests: two planted bugs for each kind of fault of a cluster, which it must notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.errors import RankError
from tests.world import cluster_bugs as bugs
from tests.world import role_bugs
from tests.world.campaign import KINDS, play

Patch = pytest.MonkeyPatch
Bug = Callable[[Patch], None]
MAX_SEEDS = 60
MUTANTS: list[tuple[Bug, str, int]] = [
    (bugs.a_lost_receiver_is_everyones, "kills", 16),
    (bugs.what_was_found_once_is_there_for_good, "kills", 13),
    (bugs.keys_of_all_receivers_are_one, "", 3),
    (bugs.a_key_is_its_room, "", 5),
    (bugs.no_replica_sends_receivers_on, "replicas", 0),
    (bugs.follow_with_the_old_key, "replicas", 14),
    (bugs.a_rank_has_copied_when_it_was_told_to, "ranks", 0),
    (bugs.a_follower_fences_nothing, "ranks+lies", 2),
    (bugs.an_ended_session_writes_no_more, "lies", 5),
    (bugs.promise_quiet_while_writing_in_an_ended_session, "lies+cuts", 34),
    (bugs.a_peer_that_was_gone_stays_gone, "lies", 1),
    (bugs.an_end_is_not_told, "lies", 0),
    (bugs.an_endpoint_is_whose_Hello_says_so, "usurpers", 0),
    (bugs.an_unanswered_challenge_is_an_answer, "usurpers+replays", 0),
    (bugs.a_known_name_needs_no_challenge, "usurpers", 0),
    (bugs.a_reset_of_any_session_counts, "replays+lies", 5),
    (bugs.an_ended_session_may_begin_again, "replays+kills", 8),
    (bugs.what_is_silent_is_dead, "cuts", 4),
    (bugs.a_rank_that_cannot_say_is_fenced, "cuts", 21),
    (bugs.a_failed_copy_is_the_last_one_of_its_key, "deaths+ranks", 20),
    (bugs.a_cancelled_copy_reads_no_more, "deaths+ranks", 24),
    (bugs.what_was_found_once_is_there_for_good, "deaths", 3),
    (bugs.a_lost_receiver_is_everyones, "deaths", 29),
    (bugs.one_that_listens_is_lost, "stops", 15),
    (bugs.no_patience_with_one_that_listens, "stops", 15),
    (bugs.silence_by_the_clock, "clocks", 0),
    (bugs.times_of_another_machine, "clocks", 0),
    (bugs.no_frame_is_damaged, "frames", 1),
    (bugs.a_frame_is_read_by_any_receiver, "frames", 3),
    (bugs.nothing_is_compared, "damage", 0),
    (bugs.only_the_first_page_is_hashed, "damage", 0),
    (bugs.a_failed_look_up_is_the_last, "look-ups", 0),
    (bugs.a_failed_look_up_is_not_told, "look-ups", 0),
    (bugs.an_ended_request_may_still_publish, "aborts", 0),
    (bugs.a_drain_that_cuts_requests_frees_all_pages, "switches", 0),
    (bugs.a_successor_is_its_predecessor, "switches", 5),
    (role_bugs.a_role_change_waits_for_no_transfer, "changes+lost", 18),
    (role_bugs.a_role_change_keeps_the_instance, "changes+lost", 1),
    (role_bugs.a_rank_changes_its_role_a_turn_later, "changes+ranks", 0),
    (role_bugs.a_release_keeps_the_prefix_cache, "releases", 6),
    (role_bugs.a_release_keeps_the_sessions, "releases", 29),
]
"""A bug, the kinds of faults that reveal it, and a seed. The bug needs the first kind; without kinds it needs none."""
RAISES: dict[Bug, type[Exception]] = {
    bugs.an_ended_request_may_still_publish: KeyError,
    role_bugs.a_rank_changes_its_role_a_turn_later: RankError,
}
"""What ends a seed with that bug, where no condition of the campaign fails before."""
SLOW = {bugs.an_end_is_not_told, role_bugs.a_role_change_waits_for_no_transfer}
CASES = [pytest.param(*case, marks=pytest.mark.slow) if case[0] in SLOW else case for case in MUTANTS]
WITH_FAULTS = [(mutant, kind) for mutant, kind, _ in MUTANTS if kind]


def without_its_fault(seed: int, kind: str) -> None:
    """Play a seed without the first of the kinds. Raises AssertionError when the bug is caught all the same."""
    play(seed, kind, without=kind.partition("+")[0])


@pytest.mark.parametrize(("mutant", "kind", "first"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_planted_bug_is_caught_by_its_fault(mutant: Bug, kind: str, first: int, monkeypatch: Patch) -> None:
    """The seeds are played from `first` on, which has caught the bug before, and then the others.

    The seed that catches it does not catch it without its kind of fault.
    """
    mutant(monkeypatch)
    for seed in (*range(first, MAX_SEEDS), *range(first)):
        try:
            play(seed, kind)
        except (AssertionError, RAISES.get(mutant, AssertionError)):
            if kind:
                without_its_fault(seed, kind)
            return
    pytest.fail(f"{mutant.__name__}: not caught in {MAX_SEEDS} seeds")


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "kind"), WITH_FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_planted_bug_is_not_caught_without_its_fault(mutant: Bug, kind: str, monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    for seed in range(12):
        without_its_fault(seed, kind)


def test_each_kind_of_fault_of_a_cluster_has_two_planted_bugs() -> None:
    found: dict[str, set[Bug]] = {}
    for mutant, kind in WITH_FAULTS:
        found.setdefault(kind.partition("+")[0], set()).add(mutant)
    small_world = {"lost", "late", "copies", "notes", "aborts"}  # `test_mutations` has them
    assert {kind for kind in KINDS if len(found.get(kind, ())) < 2} == small_world
