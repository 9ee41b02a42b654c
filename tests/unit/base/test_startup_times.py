"""Parts of a start-up: what is inside another does not count twice."""

from __future__ import annotations

import pytest

from pdserve.base.startup_times import StartupTimes, process_age_s, read_facts


class Clock:
    """Says what it is told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_inner_parts_do_not_count_for_outer_ones_and_repeated_ones_add_up() -> None:
    clock = Clock()
    times = StartupTimes(clock)
    with times.part("load"):
        clock.now_s += 1
        for _ in range(3):
            with times.part("pack"):
                clock.now_s += 2
            clock.now_s += 0.5
    times.add("imports", 4.0)
    assert times.seconds == {"pack": 6.0, "load": 2.5, "imports": 4.0}


def test_a_part_that_fails_is_counted_and_ends() -> None:
    clock = Clock()
    times = StartupTimes(clock)

    def fail() -> None:
        with times.part("a"):
            clock.now_s += 1
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    with times.part("b"):
        clock.now_s += 1
    assert times.seconds == {"a": 1.0, "b": 1.0}


def test_facts_are_read_back() -> None:
    times = StartupTimes()
    times.add("load_weight", 1.5)
    facts = {**times.facts(), "dtype": "bfloat16", "startup_of_something": "x"}
    assert facts["startup_load_weight_s"] == 1.5
    assert read_facts(facts) == {"load_weight": 1.5}


def test_this_process_was_created_a_while_ago() -> None:
    assert 0 < process_age_s() < 24 * 3600
