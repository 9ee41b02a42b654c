"""What the benchmark of tiers makes of its turns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import bench_tiers as bench
from benchmarks import report


def turns(none_s: float, host_s: float, files_s: float, cached: float = 0.89) -> bench.Turns:
    """Three turns of each variant with these TTFT in seconds, the last one slow; `cached`: hit rate of both tiers."""

    def of(ttft_s: float, hits: float) -> list[dict[str, float]]:
        return [{"ttft_s": time_s, "cached": 1000 * hits, "prompt": 1000} for time_s in (ttft_s, ttft_s, 9.0)]

    return {"none": of(none_s, 0.0), "host": of(host_s, cached), "host+file": of(files_s, cached)}


CASES = [
    (turns(1.5, 0.3, 0.5), 0, []),
    (turns(1.5, 0.3, 0.6), 0, ["TTFT of host+file is 2.5 times as short, less than 3"]),
    (turns(1.5, 0.3, 0.4, cached=0.5), 0, ["the hit rate of host is 50%, less than 85%"] * 2),
    (turns(1.5, 0.3, 0.4), 2, ["2 answers differ"]),
]


@pytest.mark.parametrize(("found", "different", "faults"), CASES)
def test_the_limit(found: bench.Turns, different: int, faults: list[str]) -> None:
    assert [one.replace("host+file is 50%", "host is 50%") for one in bench.faults(found, different)] == faults
    facts = {"date": "today", "machine": report.machine(), "revision": "r", "duration_s": 1, "command": "c"}
    states: dict[str, dict[str, Any]] = {name: {"counters": {"load_back_tokens": 7}} for name in found}
    text = bench.document(bench.parse_flags([]), facts, found, states, different)
    assert ("miss their limit" in text) == bool(faults) and all(one in text for one in faults[:1])


@pytest.mark.parametrize(("found", "different", "faults"), CASES)
def test_the_exit_status(
    found: bench.Turns, different: int, faults: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def monolith(*args: Any, **more: Any) -> Iterator[str]:
        yield "http://nowhere"

    monkeypatch.setattr(bench, "monolith", monolith)
    monkeypatch.setattr(bench, "converse", lambda args, urls: (found, different))
    monkeypatch.setattr(bench, "state", lambda url: {"counters": {}})
    assert bench.main([]) == bool(faults)
