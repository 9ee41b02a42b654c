"""The script that makes the README's charts: its commands are those of `pdserve bench`, and its files what they say."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme_charts, report
from benchmarks.peers import KINDS, Kind, Served
from pdserve.bench import flags
from pdserve.cli import bench, bench_compare

COMMON = {"model_id": "smollm2", "dataset_name": "random", "endpoint": "u", "date": "20260102-030405", "round": 0}
COUNTS = {"completed": 1, "failed": 0, "error_kinds": {}, "error_messages": []}


def test_all_services_of_the_charts_are_known() -> None:
    assert set(readme_charts.SERVICES) <= set(KINDS)
    assert len(set(readme_charts.SERVICES.values())) == 4


def test_the_script_measures_each_service_and_writes_charts_results_and_commands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running: list[str] = []
    loads: list[argparse.Namespace] = []

    def start(stack: contextlib.ExitStack, threads: int, model: object) -> Served:
        assert not running, "one service at a time has the cores"
        running.append("one")
        stack.callback(running.clear)
        return Served("http://127.0.0.1:1", [])

    def pdserve_bench(words: list[str]) -> str:
        if words[0] == "compare":
            assert not running
            bench_compare.main(words[1:])
            return capsys.readouterr().out
        args = bench.make_parser().parse_args(words)
        flags.check(args)
        loads.append(args)
        results = [
            {**COMMON, **COUNTS, "label": args.label, "request_rate": "inf", "max_concurrency": point.max_concurrency,
             "background_concurrency": point.background, "output_throughput": 10.0, "p99_itl_ms": 7.0}
            for point in flags.points_of(args)
        ]  # fmt: skip
        args.output_json.write_text(json.dumps({"results": results, "machine": {}}))
        return ""

    for name in readme_charts.SERVICES:
        monkeypatch.setitem(KINDS, name, Kind("bf16", None, start))
    monkeypatch.setattr(readme_charts, "pdserve_bench", pdserve_bench)
    monkeypatch.setattr(readme_charts, "wait_for_quiet", lambda _: False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    kept = ["--keep", str(tmp_path / "kept")]
    first = ["--systems", "pdserve 1P1D", "--root", str(tmp_path / "first")]
    assert readme_charts.main([*first, "--rounds", "2", *kept]) == 0
    assert len(loads) == 2
    assert readme_charts.main(["--root", str(tmp_path / "all"), "--rounds", "2", *kept]) == 0, "measures three more"
    tmp_path /= "all"
    assert [args.label for args in loads[::2]] == list(readme_charts.SERVICES.values()) and len(loads) == 8
    throughput, interference = loads[:2]
    assert [str(point) for point in flags.points_of(interference)] == [
        "all at once, 8 in flight, 0 in the background",
        "all at once, 8 in flight, 1 in the background",
    ]
    assert (interference.duration, interference.warmup_duration, interference.num_rounds) == (10.0, 3.0, 2)
    sizes = [flags.dataset_of(throughput, point).num_prompts for point in flags.points_of(throughput)]
    assert sizes == throughput.max_concurrency == [1, 4, 16, 64], "all streams at once"
    written = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.*"))
    folder = Path("benchmarks/results")
    assert written == [
        *(folder / f"{report.today()}-readme{end}" for end in ("-interference.json", "-throughput.json", ".md")),
        Path("docs/images/interference.svg"), Path("docs/images/throughput.svg"),
    ]  # fmt: skip
    text = (tmp_path / written[2]).read_text()
    assert "pdserve bench --model smollm2" in text and "--background-concurrency 0 1" in text
    assert text.count("llama.cpp server") >= 6 and "Command: `python -m benchmarks.readme_charts" in text
    chart = (tmp_path / "docs/images/throughput.svg").read_text()
    assert "16 in flight" in chart and "1 to 64 streams at a time" in chart


def test_a_service_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(KINDS, "vllm", Kind("bf16", Path("/no/such/file"), KINDS["vllm"].start))
    with pytest.raises(SystemExit):
        readme_charts.main(["--systems", "vllm"])
    assert "not installed: vllm; scripts/setup_peers.sh" in capsys.readouterr().err
