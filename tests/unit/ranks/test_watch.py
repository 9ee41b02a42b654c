"""Verdicts on ranks, with made-up times."""

from __future__ import annotations

import pytest

from pdserve.errors import ConfigError, ModelError, RankError
from pdserve.ranks.failure_detector import FailureDetector, LinkTimes, PeerRank

TIMES = LinkTimes(beat_s=1.0, silent_s=10.0, join_s=60.0, grace_s=0.5)


def make() -> FailureDetector:
    return FailureDetector([PeerRank(rank, f"rank {rank} on h{rank}", "", "") for rank in (1, 2)], TIMES, now=0.0)


def run_until(watch: FailureDetector, start: float, end: float) -> list[tuple[float, Exception]]:
    """Asked once a second."""
    now = start
    while now <= end:
        error = watch.root_cause(now)
        if error is not None:
            return [(now, error)]
        now += 1.0
    return []


def test_silence_is_judged_by_what_was_heard_last() -> None:
    watch = make()
    watch.heard(1, "PageCapacity", 0.0)
    assert run_until(watch, 0.0, 9.0) == []
    watch.heard(2, "Alive", 9.0)
    ((now, error),) = run_until(watch, 10.0, 30.0)
    assert now == 12.0  # silent at 11, and a moment for others to be heard
    assert str(error) == "rank 1 on h1 is silent for 11.0 s; its last message was PageCapacity"


def test_a_rank_that_never_spoke_has_longer() -> None:
    watch = make()
    for now in range(60):
        watch.heard(1, "Alive", float(now))
        assert watch.root_cause(float(now)) is None
    watch.heard(1, "Alive", 61.0)
    assert watch.root_cause(61.0) is None
    error = watch.root_cause(61.6)
    assert isinstance(error, RankError)
    assert "rank 2 on h2 is silent" in str(error) and "never sent a message" in str(error)


def test_our_own_sleep_is_nobody_s_silence() -> None:
    watch = make()
    for rank in (1, 2):
        watch.heard(rank, "Alive", 1.0)
    assert watch.root_cause(1.0) is None
    assert watch.root_cause(500.0) is None, "this process was paused for 499 s, so silence proves nothing"
    assert run_until(watch, 500.5, 504.5) == []
    assert run_until(watch, 505.5, 520.0), "but from then on it counts"


def test_who_ended_without_a_word_is_to_blame_not_who_complains() -> None:
    watch = make()
    for rank in (1, 2):
        watch.heard(rank, "Alive", 1.0)
    watch.failed(1, RankError("connection closed by peer"), 2.0)
    watch.closed(1, 2.1)
    assert watch.root_cause(2.2) is None
    watch.closed(2, 2.3)
    error = watch.root_cause(2.6)
    assert str(error) == (
        "rank 2 on h2 is gone: its connection is closed; its last message was Alive 1.3 s before; "
        "rank 1 on h1 failed: connection closed by peer"
    )


@pytest.mark.parametrize(
    "refusal", [ConfigError("tp_size 3 does not fit", field="tp_size"), ModelError("no such file")]
)
def test_a_refusal_is_passed_on_as_what_it_is_at_once(refusal: ConfigError | ModelError) -> None:
    watch = make()
    watch.closed(1, 1.0)
    watch.failed(2, refusal, 1.0)
    error = watch.root_cause(1.0)
    assert type(error) is type(refusal) and str(error).startswith(f"rank 2 on h2: {refusal}")
    assert not isinstance(error, ConfigError) or error.field == "tp_size"
