"""Worlds with a store below the host tier, and bugs that are planted there: each must give a wrong token, or worse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from pdserve.errors import RankError
from tests.world import tier_bugs
from tests.world.pressure import assert_caught
from tests.world.storage import HAPPENS, play, play_changes, play_ranks, play_weights

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("seed", range(3))
def test_servers_with_a_store(seed: int) -> None:
    play(seed)


@pytest.mark.parametrize("seed", range(2))
def test_ranks_with_a_store(seed: int) -> None:
    play_ranks(seed)


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(100, 140), marks=pytest.mark.slow)], ids=len)
def test_servers_with_a_store_change_their_role(seeds: range) -> None:
    found: Counter[str] = Counter()
    for seed in seeds:
        found += play_changes(seed)
    assert found["role changes in place"] and found["backuped_tokens"]


@pytest.mark.slow
def test_many_servers_with_a_store() -> None:
    found: Counter[str] = Counter()
    for seed in range(100, 200):
        found += play(seed)
    assert not [name for name in HAPPENS if not found[name]], found


@pytest.mark.slow
def test_many_ranks_with_a_store() -> None:
    for seed in range(100, 150):
        play_ranks(seed)


# ---------------------------------------------------------------------- planted bugs


def with_other_weights(seed: int) -> object:
    """Servers of two models, one after the other."""
    return play_weights(seed, (0, 1, 0))


def with_groups(seed: int) -> object:
    """Servers of a model with recurrent states or a window."""
    return play(2 * seed + 1)


Bug = tuple[Callable[[Patch], None], Callable[[int], object]]


QUICK: tuple[Bug, ...] = (
    (tier_bugs.a_namespace_without_weights, with_other_weights),
    (tier_bugs.objects_are_not_checked, play),
    (tier_bugs.all_that_was_found_is_read, play),
    (tier_bugs.a_state_is_used_that_was_not_read, with_groups),
    (tier_bugs.the_key_of_a_state_has_no_position, with_groups),
    (tier_bugs.each_rank_believes_itself, play_ranks),
)
SLOW: tuple[Bug, ...] = (
    (tier_bugs.a_page_is_its_own_tokens, play),
    (tier_bugs.window_pages_are_read_backwards, with_groups),
    (tier_bugs.bytes_land_after_a_job_was_given_up, play),
    (tier_bugs.a_role_change_waits_for_no_copy, play_changes),
)
BUGS = [pytest.param(*bug, id=bug[0].__name__) for bug in QUICK]
BUGS += [pytest.param(*bug, id=bug[0].__name__, marks=pytest.mark.slow) for bug in SLOW]


@pytest.mark.parametrize(("plant", "run"), BUGS)
def test_bugs_are_caught(plant: Callable[[Patch], None], run: Callable[[int], object], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    assert_caught(run, 150, RankError, IndexError, KeyError, msgspec.ValidationError)
