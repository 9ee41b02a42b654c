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
    faults = list(bench.faults(found))
    assert faults == [] if fault is None else fault in faults[0]
    args = bench.parse_flags([])
    facts = {"date": "today", "machine": report.machine(), "revision": "r", "duration_s": 1, "command": "c"}
    text = bench.document(args, facts | {"load_after": 0.0, "counters": {"moved": 2.0}}, found)
    assert ("misses" in text) == (fault is not None)
