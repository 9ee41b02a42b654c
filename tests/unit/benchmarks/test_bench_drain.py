"""What the benchmark of drains makes of its streams."""

from __future__ import annotations

import pytest

from benchmarks import bench_drain as bench
from benchmarks import report


def stream(gaps: list[float], token_ids: list[int], error: str | None = None) -> bench.Stream:
    arrivals = [0.0]
    for gap in gaps:
        arrivals.append(arrivals[-1] + gap)
    return bench.Stream(arrivals, token_ids, error)


STEADY = [stream([0.1, 0.1, 0.3], [1, 2, 3, 4]) for _ in range(2)]


def test_gaps_count_from_the_event_on() -> None:
    one = stream([0.5, 0.1, 0.2], [1])
    assert one.longest_gap_s(0.0) == 0.5 and one.longest_gap_s(0.55) == pytest.approx(0.2)
    assert one.longest_gap_s(9.0) == 0.0


@pytest.mark.parametrize(
    ("gap", "token_ids", "error", "fault"),
    [
        (1.2, [1, 2, 3, 4], None, None),
        (1.4, [1, 2, 3, 4], None, "a gap of 1.400 s"),
        (0.1, [1, 2, 3, 5], None, "1 streams have other tokens"),
        (0.1, [1], "cut", "1 streams failed"),
    ],
)
def test_the_limit(gap: float, token_ids: list[int], error: str | None, fault: str | None) -> None:
    steady = bench.Summary.of("steady", STEADY, STEADY, 0.0)
    drained = [STEADY[0], stream([0.1, gap, 0.1], token_ids, error)]
    found = [steady, bench.Summary.of("drain by migration", drained, STEADY, 0.0)]
    args, counters = bench.parse_flags(["--streams", "2"]), {bench.MOVED: 2.0}
    faults = list(bench.faults(args, found, counters))
    assert faults == [] if fault is None else fault in faults[0]
    facts = {"date": "today", "machine": report.machine(), "revision": "r", "duration_s": 1, "command": "c"}
    text = bench.document(args, facts | {"load_after": 0.0, "counters": counters}, found)
    assert ("misses" in text) == (fault is not None)


@pytest.mark.parametrize(
    ("at_s", "moved", "fault"),
    [
        (0.2, 2, None),
        (0.2, 1, "1 of 2 running streams did not move"),
        (0.2, 0, "2 of 2 running streams did not move"),
        (0.6, 2, "0 of 2 streams ran at the drain"),
    ],
)
def test_streams_that_run_at_the_drain_must_move(at_s: float, moved: int, fault: str | None) -> None:
    steady = bench.Summary.of("steady", STEADY, STEADY, at_s)
    found = [steady, bench.Summary.of("drain by migration", STEADY, STEADY, at_s)]
    counters = {bench.MOVED: float(moved), 'migrations_total{result="gone"}': 2.0}
    faults = list(bench.faults(bench.parse_flags(["--streams", "2"]), found, counters))
    assert faults == ([] if fault is None else [fault])
