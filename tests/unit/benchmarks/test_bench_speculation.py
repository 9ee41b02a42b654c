"""The benchmark of speculative decoding: its prompts, what it computes from a batch, its table; a tiny run (slow)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks import bench_speculation as bench
from benchmarks.bench_speculation import PLAIN, Cell, Measured, Stream
from benchmarks.speculation_texts import KINDS, REPEATING, tasks
from tests.tiny import Family

COUNTS = {"spec_verify_steps": 10.0, "spec_draft_tokens": 40.0, "spec_accepted_tokens": 20.0}


def run(decode_tok_s: float, tokens: Sequence[int], counters: dict[str, float] | None = None) -> Measured:
    return Measured(decode_tok_s / 2, decode_tok_s, 40, counters or dict.fromkeys(COUNTS, 0.0), [list(tokens)])


@pytest.mark.parametrize("kind", KINDS)
def test_no_two_prompts_are_equal_and_equal_seeds_give_equal_prompts(kind: str) -> None:
    made = tasks(kind, 64, "0 1 64")
    assert len({task.prompt for task in made}) == 64
    assert made == tasks(kind, 64, "0 1 64")
    other = {task.message for task in tasks(kind, 64, "0 2 64")}
    assert len(other & {task.message for task in made}) < 32
    assert {task.temperature for task in made} == {1.0 if kind == "chat, drawn" else 0.0}
    assert all(bool(task.begun) == (kind in REPEATING) for task in made)


def test_decoding_is_measured_from_the_first_token_on() -> None:
    streams = [Stream(2.0, 6.0, 1, [5] * 11), Stream(3.0, 7.0, 3, [6] * 13)]
    found = bench.measured([(1.0, streams)], COUNTS)
    assert (found.num_tokens, found.tok_s, found.decode_tok_s) == (24, 24 / 6, 20 / 5)
    at_once = (1.0, [Stream(2.0, 2.0, 4, [5] * 4)])
    assert bench.measured([at_once], COUNTS).decode_tok_s == 4.0
    both = bench.measured([(1.0, streams), at_once], COUNTS)
    assert (both.tok_s, both.decode_tok_s) == (28 / 7, (20 + 4) / (5 + 1))
    assert len(both.token_ids) == 3


def test_ratios_are_taken_within_rounds_and_other_answers_are_counted() -> None:
    sides = {PLAIN: [run(10, [1, 2]), run(40, [3])], "NGRAM": [run(20, [1, 2], COUNTS), run(60, [4], COUNTS)]}
    found = bench.summary(sides, "NGRAM")
    assert (found["decode_ratio"].low, found["decode_ratio"].high) == (1.5, 2.0)
    assert (found["accept_length"], found["accept_rate"]) == (3.0, 0.5)
    assert found["share_of_verify_steps"] == (20 + 40) / 80
    assert (found["num_answers"], found["num_equal"]) == (2, 1)
    assert bench.summary(sides, PLAIN)["accept_length"] is None
    text = bench.table({Cell("chat", 1): sides, Cell("chat", 4): sides}, 4)
    assert text.count("\n") == 3 and "1.75x (1.50-2.00)" in text and "1 of 2" in text


def test_few_kinds_are_measured_at_many_streams() -> None:
    args = bench.parse_flags(["--streams", "1", "64", "--kinds", "code", "chat", "--kinds-of-many", "chat"])
    assert bench.cells(args) == [Cell("code", 1), Cell("chat", 1), Cell("chat", 64)]
    alone, many = (bench.groups_of(cell, "0 0", 2) for cell in (Cell("chat", 1), Cell("chat", 64)))
    assert [len(group) for group in alone] == [1, 1] and [len(group) for group in many] == [64]
    assert [bench.output_len(args, cell) for cell in bench.cells(args)] == [128, 128, 48]


@pytest.mark.parametrize("argv", [["--algorithms", "EAGLE3"], ["--streams", "0"], ["--output-len", "1"]])
def test_wrong_flags_are_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse_flags(argv)


@pytest.mark.slow
@pytest.mark.parametrize("where", [[], ["--pair"]], ids=["monolith", "pair"])
def test_a_tiny_run_writes(where: list[str], tiny_checkpoint: Callable[[Family], Path], tmp_path: Path) -> None:
    few = ["--rounds", "1", "--streams", "1", "2", "--kinds", "editing", "chat", "--output-len", "24", "--threads", "1"]
    argv = ["--model", str(tiny_checkpoint("llama")), *few, *where, "--write", "--results", str(tmp_path)]
    assert bench.main(argv) == 0
    (path,) = tmp_path.glob("*-speculation.json")
    results = json.loads(path.read_text())["results"]
    assert results.keys() == {"editing, 1", "chat, 1", "editing, 2", "chat, 2"}
    assert all(one["num_equal"] == one["num_answers"] for sides in results.values() for one in sides.values())
    assert len(list(tmp_path.glob("*.md"))) == 1
