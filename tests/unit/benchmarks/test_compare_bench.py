"""What the comparison of benchmark clients reads, and when it says that figures differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare_bench as bench
from pdserve.bench.datasets import DatasetOptions, make_sessions
from pdserve.bench.prompts import PromptMaker

FIELDS = {name: 10.0 for name, _, _ in bench.METRICS} | dict.fromkeys(bench.TOTALS, 4)
VLLM, SGLANG = "vllm bench serve", "SGLang bench_serving"


def file_of(tool: str, fields: dict[str, Any]) -> str:
    if tool == bench.OURS:
        return json.dumps({"benchmark": "pdserve bench", "results": [fields]})
    return json.dumps(fields) if tool == VLLM else json.dumps({"old": 1}) + "\n" + json.dumps(fields) + "\n"


@pytest.mark.parametrize("tool", [bench.OURS, VLLM, SGLANG])
def test_each_file_is_read(tool: str) -> None:
    found = bench.figures(tool, file_of(tool, FIELDS | {"extra": None}))
    assert found == FIELDS


@pytest.mark.parametrize("text", ["", "no JSON", "[]", file_of(VLLM, {"completed": 1}), file_of(VLLM, FIELDS | {
    "p99_itl_ms": None})])  # fmt: skip
def test_a_result_without_a_figure_names_the_tool(text: str) -> None:
    with pytest.raises(RuntimeError, match="vllm bench serve: its result cannot be read"):
        bench.figures(VLLM, text)


def test_a_file_of_prompts_is_read_as_a_custom_dataset(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    bench.write_prompts(path, PromptMaker("text"), 1, 3, 8)
    options = DatasetOptions(name="custom", path=path, num_prompts=3, output_len=5, output_override=5)
    sessions = make_sessions(options, PromptMaker("ids"), 0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [one.turns[0].prompt for one in sessions] == [row["prompt"] for row in rows]
    assert all(row["conversations"][0]["value"] == row["prompt"] and len(row["conversations"]) == 2 for row in rows)
    assert len({row["prompt"] for row in rows}) == 3


def rounds_of(*values: float) -> list[dict[str, float]]:
    return [FIELDS | {"p99_itl_ms": value} for value in values]


@pytest.mark.parametrize(
    ("theirs", "differs"), [((9.0, 10.5), False), ((10.05, 10.1), False), ((12.0, 13.0), True), ((8.0, 9.0), True)]
)
def test_figures_differ_beyond_spread_and_tolerance(theirs: tuple[float, ...], differs: bool) -> None:
    found = bench.disagreements({bench.OURS: rounds_of(9.9, 10.0), VLLM: rounds_of(*theirs)})
    assert [line.partition(",")[0] for line in found] == ([f"{VLLM}: ITL p99"] if differs else [])
    assert "ITL p99" in bench.table({bench.OURS: rounds_of(1.0)})


def test_rounds_are_as_many_as_fit_and_change_their_order() -> None:
    order: list[str] = []

    def run_once(tool: str, index: int) -> dict[str, float]:
        order.append(f"{tool}{index}")
        return {"x": float(index)}

    assert bench.rounds_within(["a", "b"], 2, 1e9, run_once) == {"a": [{"x": 0.0}, {"x": 1.0}], "b": [{"x": 0.0}, {
        "x": 1.0}]}  # fmt: skip
    assert order == ["a0", "b0", "b1", "a1"]
    assert bench.rounds_within(["a"], 5, 0.0, run_once) == {"a": [{"x": 0.0}]}, "one round at least"


def test_every_tool_gets_the_same_load(tmp_path: Path) -> None:
    job = bench.BenchJob(
        base_url="http://h:1", model="m", tokenizer=tmp_path, prompts=tmp_path / "p.jsonl",
        result=tmp_path / "r.json", num_prompts=7, output_len=5, concurrency=2,
    )  # fmt: skip
    for name, tool in bench.TOOLS.items():
        command = tool.command(job)
        assert command[0].startswith(str(tool.program.parent)), name
        for flag, value in (("--num-prompts", "7"), ("--max-concurrency", "2"), ("--base-url", "http://h:1")):
            assert command[command.index(flag) + 1] == value
        assert str(job.result) in command or job.result.name in command
        assert "5" in command
