"""A breaker opens, lets probes through, and closes; whatever happens it never holds on to a place."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.router.config.config import BreakerConfig
from pdserve.router.workers.workers import Breaker, BreakerState, Permit

CONFIG = BreakerConfig(failure_threshold=3, success_threshold=2, open_s=10.0, window_s=60.0)


def fail(breaker: Breaker, now: float) -> None:
    held = breaker.enter(now)
    breaker.failed(held, now)
    breaker.leave(held)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(CONFIG)
    for _ in range(3):
        fail(breaker, now)
    return breaker


def test_it_opens_after_failures_in_a_row_and_admits_nothing_for_a_while() -> None:
    breaker = Breaker(CONFIG)
    fail(breaker, 0.0)
    fail(breaker, 1.0)
    assert breaker.state(1.0) is BreakerState.CLOSED
    fail(breaker, 2.0)
    assert breaker.state(2.0) is BreakerState.OPEN
    assert not breaker.admits(11.9)
    assert breaker.retry_in_s(5.0) == 7.0
    assert breaker.state(12.0) is BreakerState.HALF_OPEN
    assert breaker.admits(12.0)


def test_a_success_between_failures_and_failures_long_ago_do_not_count() -> None:
    breaker = Breaker(CONFIG)
    fail(breaker, 0.0)
    fail(breaker, 0.0)
    breaker.completed()
    fail(breaker, 1.0)
    fail(breaker, 1.0)
    fail(breaker, 61.0)
    assert breaker.state(61.0) is BreakerState.CLOSED
    fail(breaker, 61.0)
    fail(breaker, 61.0)
    assert breaker.state(61.0) is BreakerState.OPEN


def test_half_open_admits_as_many_as_must_succeed_and_closes_when_they_have_begun_well() -> None:
    breaker = opened()
    first, second = breaker.enter(10.0), breaker.enter(10.0)
    assert not breaker.admits(10.0)
    first = breaker.answered(first)
    assert not breaker.admits(10.0), "one success is missing, and one probe is under way for it"
    breaker.leave(first)
    assert not breaker.admits(10.0), "it left the count when it had answered"
    breaker.answered(second)
    assert breaker.state(10.0) is BreakerState.CLOSED


def test_a_probe_that_says_nothing_makes_room_for_another() -> None:
    breaker = opened()
    probes = [breaker.enter(10.0), breaker.enter(10.0)]
    breaker.leave(probes[0])
    assert breaker.admits(10.0)
    assert breaker.state(10.0) is BreakerState.HALF_OPEN


def test_one_failing_probe_opens_it_again_and_older_requests_do_not_count() -> None:
    breaker = Breaker(CONFIG)
    from_before = breaker.enter(0.0)
    for _ in range(3):
        fail(breaker, 0.0)
    first, second = breaker.enter(10.0), breaker.enter(10.0)
    breaker.failed(from_before, 10.0)
    assert breaker.state(10.0) is BreakerState.HALF_OPEN
    breaker.failed(first, 11.0)
    assert breaker.state(20.9) is BreakerState.OPEN
    for held in (from_before, first, second):
        breaker.leave(held)
    breaker.answered(second)
    assert breaker.state(21.0) is BreakerState.HALF_OPEN, "a probe of the opening before says nothing of this one"


def test_it_never_opens_when_it_is_turned_off() -> None:
    breaker = Breaker(BreakerConfig(enabled=False, failure_threshold=1))
    for _ in range(5):
        fail(breaker, 0.0)
    assert breaker.admits(0.0)


def test_another_process_begins_with_a_clean_slate() -> None:
    breaker = opened()
    probe = breaker.enter(10.0)
    breaker.renew()
    assert breaker.admits(10.0)
    breaker.failed(probe, 10.0)
    fail(breaker, 10.0)
    assert breaker.state(10.0) is BreakerState.CLOSED, "failures before it do not count"
    fail(breaker, 10.0)
    assert breaker.state(10.0) is BreakerState.OPEN


ACTIONS = st.sampled_from(("enter", "answer", "fail", "complete", "leave", "wait", "renew"))


@settings(max_examples=80, deadline=None)
@given(actions=st.lists(st.tuples(ACTIONS, st.integers(0, 5)), max_size=60))
def test_whatever_happens_places_come_back_and_probes_stay_few(actions: list[tuple[str, int]]) -> None:
    breaker, now = opened(), 10.0
    inside: list[Permit] = []
    for action, which in actions:
        held = inside[which % len(inside)] if inside else None
        if action == "wait":
            now += 3.0
        elif action == "enter" and breaker.admits(now):
            inside.append(breaker.enter(now))
        elif action == "complete":
            breaker.completed()
        elif action == "renew":
            breaker.renew()
            assert breaker.state(now) is BreakerState.CLOSED
        elif held is not None and action == "answer":
            inside[inside.index(held)] = breaker.answered(held)
        elif held is not None and action == "fail":
            breaker.failed(held, now)
        elif held is not None and action == "leave":
            inside.remove(held)
            breaker.leave(held)
        newest = max((held.opening or 0 for held in inside), default=0)  # 0: it was closed when they entered
        probes = [held for held in inside if newest and held.opening == newest and not held.answered]
        assert len(probes) <= CONFIG.success_threshold
    for held in inside:
        breaker.leave(held)
    now += CONFIG.open_s
    assert breaker.admits(now), "it is never shut for good"
    probes = []
    for _ in range(CONFIG.success_threshold):
        if breaker.state(now) is BreakerState.HALF_OPEN and breaker.admits(now):
            probes.append(breaker.enter(now))
    for held in probes:
        breaker.answered(held)
    assert breaker.state(now) is BreakerState.CLOSED, "as many probes may enter as must succeed"
