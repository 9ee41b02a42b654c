"""The clocks move forward, and the manual one only when told."""

from __future__ import annotations

import pytest

from pdserve.base.clock import Clock, ManualClock, MonotonicClock


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
