"""Stored ratios against measured ones, with made-up numbers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import regressions
from benchmarks.ratio_table import Line, Table, compare, doubts, is_worse, read, report_of, write
from benchmarks.report import Spread


def table(**ratios: Spread) -> Table:
    return Table(
        date="2026-01-01", revision="abc", command="python -m x", cpu_model="a CPU", cpus=2, threads=2, level="avx2",
        load_1m=0.1, note="quiet", ratios=ratios,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("median", "verdict"),
    [(2.0, "ok"), (1.81, "ok"), (1.79, "fell"), (2.29, "ok"), (2.31, "rose"), (0.0, "fell")],
)
def test_a_ratio_has_fallen_when_it_is_below_the_stored_spread(median: float, verdict: str) -> None:
    assert Line("a", Spread(2.0, 1.8, 2.3), Spread(median, 0.0, 9.0)).verdict == verdict


def test_a_narrow_spread_leaves_room_for_noise() -> None:
    stored = Spread(2.0, 1.99, 2.01)
    verdicts = [Line("a", stored, Spread(now, now, now)).verdict for now in (1.91, 1.89, 2.09, 2.11)]
    assert verdicts == ["ok", "fell", "ok", "rose"]


def test_what_is_not_measured_any_more_is_worse_and_what_is_new_is_not() -> None:
    one = Spread(1.0, 1.0, 1.0)
    lines = compare({"old": one, "both": one}, {"both": one, "new": one})
    assert [(line.name, line.verdict) for line in lines] == [("old", "missing"), ("both", "ok"), ("new", "new")]
    assert is_worse(lines) and not is_worse(lines[1:])
    assert report_of(lines, ["a note"]).startswith("1 of 3 ratios are worse: old\n")
    well = report_of(lines[1:], ["a note"])
    assert well.startswith("No ratio has fallen.\n") and well.endswith("- a note")


def test_the_report_says_by_how_much() -> None:
    text = report_of(compare({"a": Spread(2.0, 1.8, 2.3)}, {"a": Spread(1.5, 1.4, 1.6)}), [])
    assert "1 of 1 ratios are worse: a" in text
    assert "| a     | 2.00 (1.80-2.30) | 1.50 (1.40-1.60) |   -25% |    fell |" in text


def test_another_machine_and_busy_cores_are_doubts() -> None:
    stored = table()
    assert doubts(stored, stored) == []
    other = dataclasses.replace(stored, cpu_model="another", level="avx512", threads=1, load_1m=3.0)
    found = doubts(stored, other)
    assert [doubt.partition(":")[0] for doubt in found[:3]] == ["CPU", "threads", "instruction set"]
    assert "others used the cores when it was measured (load 3.0 before)" in found


def test_memory_of_another_speed_is_a_doubt() -> None:
    stored, slow, fast = table(), Spread(34.0, 30.0, 36.0), Spread(47.0, 46.0, 59.0)
    stored = dataclasses.replace(stored, memory_gbytes_per_s=slow)
    assert doubts(stored, dataclasses.replace(stored, memory_gbytes_per_s=Spread(38.0, 30.0, 59.0))) == []
    assert doubts(table(), stored) == [] == doubts(stored, table())
    for was, own, speeds in ((slow, fast, "34 GB/s, measured at 47"), (fast, slow, "47 GB/s, measured at 34")):
        then, now = (dataclasses.replace(stored, memory_gbytes_per_s=speed) for speed in (was, own))
        (doubt,) = doubts(then, now)
        assert doubt.startswith(f"memory: stored at {speeds}:")


def test_a_table_is_stored_a_ratio_a_line_and_read_back(tmp_path: Path) -> None:
    stored = table(**{'a "kernel"': Spread(0.5, 0.25, 0.75), "b": Spread(1.23456, 1.0, 2.0)})
    write(tmp_path / "t.json", stored)
    text = (tmp_path / "t.json").read_text()
    assert json.loads(text)["ratios"]["b"] == {"median": 1.2346, "low": 1.0, "high": 2.0}
    assert sum('"median"' in line for line in text.splitlines()) == 2
    again = read(tmp_path / "t.json")
    assert again.memory_gbytes_per_s is None
    assert again.ratios['a "kernel"'] == Spread(0.5, 0.25, 0.75) and again.level == "avx2"


def test_the_speed_of_memory_is_stored_and_read_back(tmp_path: Path) -> None:
    stored = dataclasses.replace(table(a=Spread(1.0, 1.0, 1.0)), memory_gbytes_per_s=Spread(34.0, 30.0, 36.0))
    write(tmp_path / "t.json", stored)
    assert read(tmp_path / "t.json") == stored


def test_the_exit_status_says_whether_something_fell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = {"kernel: a": Spread(0.8, 0.7, 0.9), "step: b": Spread(2.0, 1.9, 2.1)}
    monkeypatch.setattr(regressions, "measure", lambda parts, *_: regressions.of_parts(now, parts))
    monkeypatch.setattr(regressions, "best_level", lambda: "avx2")
    where = ["--table", str(tmp_path / "t.json")]
    assert regressions.main(["--write", *where]) == 0
    assert regressions.main(where) == 0
    now["step: b"] = Spread(1.0, 1.0, 1.0)
    assert regressions.main(["--only", "kernels", *where]) == 0
    assert regressions.main(where) == 1
    assert "1 of 2 ratios are worse: step: b" in capsys.readouterr().out


def test_some_kernels_are_compared_with_their_own_stored_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = table(**{"kernel: a": Spread(0.8, 0.7, 0.9), "kernel: b": Spread(0.8, 0.7, 0.9)})
    write(tmp_path / "t.json", stored)
    asked = []

    def measure(parts: object, threads: int, rounds: int, clock: object, wanted: str) -> dict[str, Spread]:
        asked.append(wanted)
        return {"kernel: a": Spread(0.4, 0.4, 0.4)}

    monkeypatch.setattr(regressions, "measure", measure)
    monkeypatch.setattr(regressions, "best_level", lambda: "avx2")
    flags = ["--only", "kernels", "--cases", "a$", "--passes", "1", "--table", str(tmp_path / "t.json")]
    assert regressions.main(flags) == 1
    assert asked == ["a$"]
    assert "1 of 1 ratios are worse: kernel: a" in capsys.readouterr().out


def test_what_counts_is_how_far_medians_of_passes_lie_apart() -> None:
    """One round that somebody else disturbed must not make room for any loss."""
    passes = [{"a": Spread(2.0, 0.1, 9.0)}, {"a": Spread(1.9, 1.0, 2.0)}, {"a": Spread(2.2, 0.5, 2.3)}]
    stored = regressions.over_passes(passes)
    assert stored == {"a": Spread(2.0, 1.9, 2.2)}
    assert is_worse(compare(stored, {"a": Spread(1.8, 0.1, 9.0)}))


@pytest.mark.parametrize(
    "flags", [["--only", "x"], ["--only", "steps", "--write"], ["--cases", "a", "--write"], ["--table", "nowhere.json"]]
)
def test_flags_that_do_not_fit_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        regressions.main(flags)
    assert caught.value.code == 2


def test_each_level_has_a_table_of_its_own() -> None:
    assert regressions.stored_of("zen4") != regressions.stored_of("avx2")
    stored = sorted(regressions.stored_of("*").parent.glob(regressions.stored_of("*").name))
    assert stored, "some are stored"
    for path in stored:
        table = read(path)
        assert path == regressions.stored_of(table.level) and {name.partition(":")[0] for name in table.ratios} == {
            "kernel",
            "step",
            "server",
        }
