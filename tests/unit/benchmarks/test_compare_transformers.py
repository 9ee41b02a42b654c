"""The first table: medians and ratios by round, tables, padding, order; and one tiny run of everything."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks import compare_transformers as compare
from benchmarks import generate_child, report
from pdserve.bench.client import BenchRecord
from tests.tiny import VOCAB_SIZE, Family


def rounds_of(**scales: Sequence[float]) -> compare.Rounds:
    """Rounds of concurrency 4, in which metric number i of a system is (i + 1) times its scale."""
    return {
        (system, 4): [
            {name: (i + 1) * scale for i, (name, _, _) in enumerate(compare.METRICS)} for scale in scales[system]
        ]
        for system in ("monolith", "pair", compare.PEER)
    }


def cells(table: str) -> list[list[str]]:
    """The cells of a Markdown table, without its rule."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [lines[0], *lines[2:]]


def test_spread_is_the_median_with_its_range() -> None:
    assert report.spread_of([5.0, 1.0, 3.0]) == report.Spread(3.0, 1.0, 5.0)
    assert report.spread_of([4.0, 2.0]).median == 3.0
    assert report.Spread(3.0, 1.0, 5.25).show(1) == "3.0 (1.0-5.2)"
    assert report.Spread(3.0, 3.0, 3.0).show(2, "x") == "3.00x"


def test_ratios_are_taken_within_a_round() -> None:
    """The machine slowed down tenfold in the second round, for both: the ratio does not see it."""
    assert report.ratios([10.0, 100.0, 30.0], [5.0, 50.0, 10.0]) == report.Spread(2.0, 2.0, 3.0)


def test_a_table_is_padded_and_aligned() -> None:
    table = report.markdown_table(["name", "a", "b"], [["x", "1", "22222"], ["longer", "3", "4"]])
    assert table.splitlines() == [
        "| name   |  a |     b |",
        "| :----- | -: | ----: |",
        "| x      |  1 | 22222 |",
        "| longer |  3 |     4 |",
    ]


def test_the_tables_show_every_metric_of_every_system() -> None:
    rounds = rounds_of(monolith=[2.0, 4.0, 3.0], pair=[1.0, 1.0, 1.0], transformers=[1.0, 2.0, 2.0])
    header, monolith, pair, peer = cells(compare.absolute_table(rounds))
    assert header[:3] == ["system", "concurrency", "output tok/s"]
    assert monolith == ["monolith", "4", "3.0 (2.0-4.0)", "6 (4-8)", "9.0 (6.0-12.0)", "12.0 (8.0-16.0)"]
    assert pair[2:] == ["1.0", "2", "3.0", "4.0"] and peer[0] == "transformers"
    _, *lines = cells(compare.ratio_table(rounds))
    assert lines == [
        ["monolith", "4", *["2.00x (1.50-2.00)"] * 4],
        ["pair", "4", *["0.50x (0.50-1.00)"] * 4],
    ]


def test_a_ratio_is_of_its_own_metric() -> None:
    rounds = rounds_of(monolith=[2.0], pair=[1.0], transformers=[1.0])
    rounds["monolith", 4][0]["itl_p99_ms"] = 20.0
    assert cells(compare.ratio_table(rounds))[1][2:] == ["2.00x", "2.00x", "2.00x", "5.00x"]


def test_each_system_is_first_in_turn() -> None:
    orders = [compare.order_of(index) for index in range(3)]
    assert {order[0] for order in orders} == set(compare.SYSTEMS)
    assert all(sorted(order) == sorted(compare.SYSTEMS) for order in orders)


def test_short_prompts_are_padded_on_the_left() -> None:
    assert generate_child.padded([[5, 6, 7], [8]], 0) == ([[5, 6, 7], [0, 0, 8]], [[1, 1, 1], [0, 0, 1]])


def test_batches_are_taken_in_order() -> None:
    sizes = []

    def generate(prompts: Sequence[Sequence[int]], output_len: int) -> list[BenchRecord]:
        sizes.append(len(prompts))
        return [BenchRecord(prompt_tokens=len(prompt), output_tokens=output_len) for prompt in prompts]

    outcome = generate_child.run_batches(generate, [[1] * count for count in range(1, 6)], 7, 2)
    assert sizes == [2, 2, 1] and {record.output_tokens for record in outcome.records} == {7}
    assert [record.prompt_tokens for record in outcome.records] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("flags", [["--threads", "3"], ["--threads", "0"], ["--rounds", "0"], ["--concurrency", "0"]])
def test_flags_that_cannot_be_measured_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        compare.parse_flags(flags)


@pytest.mark.slow
def test_a_tiny_run_measures_all_three_and_writes(tiny_checkpoint: Callable[[Family], Path], tmp_path: Path) -> None:
    argv = ["--model", str(tiny_checkpoint("llama")), "--vocab-size", str(VOCAB_SIZE), "--concurrency", "1", "2"]
    argv += ["--rounds", "1", "--input-len", "8", "--output-len", "4", "--write", "--results", str(tmp_path)]
    assert compare.main(argv) == 0
    (path,) = tmp_path.glob("*-first-table.json")
    entries = json.loads(path.read_text())["rounds"]
    assert {(entry["system"], entry["concurrency"]) for entry in entries} == {
        (system, concurrency) for system in compare.SYSTEMS for concurrency in (1, 2)
    }
    assert all(value > 0 for entry in entries for found in entry["rounds"] for value in found.values())
    (table,) = tmp_path.glob("*-first-table.md")
    assert "1P1D" in table.read_text()
