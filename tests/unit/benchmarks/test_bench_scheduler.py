"""What the scheduler's benchmark measures: states that hold, fits, tables, the mark; and one tiny run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_scheduler as bench
from benchmarks.costed_states import POLICIES, STATES, Case, RoleName


def measured(num_running: int, us: float, num_queued: int = 10) -> bench.Measured:
    """A case in which everything takes `us`."""
    parts = dict.fromkeys((*bench.PARTS, "planning"), us)
    return bench.Measured(Case("null", "rows", "fcfs", num_running, num_queued), parts, parts, 5)


@pytest.mark.parametrize(("role", "state"), list(STATES))
def test_a_server_comes_into_its_state_and_stays_there(role: RoleName, state: str) -> None:
    made = STATES[role, state](Case(role, state, "lpm" if POLICIES[role] else "fcfs", 5, 7))
    for _ in range(100):
        made.feed()
        watch = made.server.step()
        made.check()
    assert {"poll", "plan", "commit", "step", "device"} <= set(watch) and watch["step"] > watch["plan"] > 0
    assert made.server.num_bytes_sent > 0


def test_a_state_that_is_left_is_an_error() -> None:
    made = STATES["null", "rows"](Case("null", "rows", "fcfs", 2, 3))
    while made.server.scheduler.role.live:
        made.server.step()
    with pytest.raises(RuntimeError, match="left its state"):
        made.check()


def test_the_exponent_is_that_of_the_cost_per_request() -> None:
    linear = [measured(n, 3.0 * n) for n in (1, 64, 1000, 8000)]
    assert bench.exponent(linear, "step") == pytest.approx(0.0)
    square = [measured(n, 0.01 * n**2) for n in (64, 1000, 8000)]
    assert bench.exponent(square, "step") == pytest.approx(1.0)
    assert bench.exponent(linear[:2], "step") is None, "sizes below are not counted"


def test_queued_requests_have_a_price_each() -> None:
    found = [measured(256, 400 + 0.5 * queued, queued) for queued in (10, 1000, 10_000)]
    assert bench.per_queued_ns(found) == pytest.approx(500)
    assert bench.per_queued_ns(found[:1]) is None


def test_the_mark_is_that_of_the_slowest_case_of_its_size() -> None:
    assert bench.mark([measured(256, 999.0), measured(1000, 5000.0)])[1]
    text, met = bench.mark([measured(256, 400.0), measured(256, 1001.0)])
    assert not met and "MISSED" in text


@pytest.mark.parametrize("flags", [["--steps", "0"], ["--steps", "201"], ["--running", "0"], ["--roles", "router"]])
def test_flags_that_cannot_be_measured_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse_flags(flags)


def test_a_tiny_run_measures_every_role_and_writes(tmp_path: Path) -> None:
    argv = ["--running", "1", "2", "--queued", "3", "--policies", "fcfs", "--steps", "3", "--write"]
    bench.main([*argv, "--results", str(tmp_path)])
    (path,) = tmp_path.glob("*-scheduler.json")
    entries = json.loads(path.read_text())["running"]
    assert {(entry["case"]["role"], entry["case"]["num_running"]) for entry in entries} == {
        (role, num) for role in POLICIES for num in (1, 2)
    }
    (table,) = tmp_path.glob("*-scheduler.md")
    assert all(state in table.read_text() for _, state in STATES)
