"""The clocks move forward, and the manual one only when told."""

from __future__ import annotations

import pytest

from pdserve.base.clock import RATE_WINDOW_S, Clock, ManualClock, MonotonicClock, TokenRate


def test_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.advance(2.5)
    assert clock.now() == 7.5


def test_manual_clock_refuses_to_go_back() -> None:
    with pytest.raises(AssertionError, match="go back"):
        ManualClock().advance(-1.0)


def test_monotonic_clock_never_goes_back() -> None:
    clock: Clock = MonotonicClock()
    readings = [clock.now() for _ in range(100)]
    assert readings == sorted(readings)


def test_a_rate_is_of_the_last_whole_seconds() -> None:
    clock = ManualClock(100.0)
    rate = TokenRate(clock.now)
    rate.add(7)
    rate.add(3)
    assert rate.value() == 0, "the second is not over"
    clock.advance(1.0)
    rate.add(20)
    assert rate.value() == 10 / RATE_WINDOW_S
    clock.advance(1.0)
    assert rate.value() == 30 / RATE_WINDOW_S
    clock.advance(RATE_WINDOW_S - 1.0)
    assert rate.value() == 20 / RATE_WINDOW_S
    clock.advance(1.0)
    assert rate.value() == 0
