"""What the router's benchmark sends and says; and one tiny run of all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_router as bench
from benchmarks import report


def measured(name: str, cpu_ms: float) -> bench.Measured:
    return bench.Measured(bench.OURS, bench.CASES[name], 1000.0, cpu_ms, 0.1, 0.6, 0.2, 0.9)


@pytest.mark.parametrize("case", bench.CASES.values(), ids=lambda case: case.name)
def test_requests_are_whole_and_their_prompts_differ_from_the_start(case: bench.Case) -> None:
    bodies = []
    for number in (1, 2):
        head, body = bench.request_bytes(case, number).split(b"\r\n\r\n", 1)
        assert f"Content-Length: {len(body)}".encode() in head
        bodies.append(json.loads(body))
    assert len(bodies[0]["text"]) == case.prompt_chars
    assert bodies[0]["text"][:8] != bodies[1]["text"][:8]
    assert bodies[0]["stream"] is (case.events > 0)


def test_the_report_names_the_limit_of_a_core_and_the_cost_of_an_event() -> None:
    facts = {"date": "today", "concurrency": 1, "seconds": 1, "alone": 1, "machine": report.machine()}
    facts |= {"revision": "r", "duration_s": 1, "command": "c"}
    text = bench.document(facts, [measured("plain", 0.5), measured("stream of 64", 1.14)])
    assert "2,000" in text, "requests a second at 0.5 ms each"
    assert "0.50 |" in text, "added to the worker's own"
    assert "costs 10 us" in text


@pytest.mark.slow
def test_a_tiny_run_writes_its_report(tmp_path: Path) -> None:
    argv = ["--cases", "plain", "stream of 64", "--seconds", "0.2", "--alone", "5", "--concurrency", "2"]
    assert bench.main([*argv, "--write", "--results", str(tmp_path)]) == 0
    facts = json.loads(next(tmp_path.glob("*-router.json")).read_text())
    assert [one["case"]["name"] for one in facts["measured"]] == ["plain", "stream of 64"]
    assert all(one["cpu_ms"] > 0 and one["per_second"] > 0 for one in facts["measured"])
