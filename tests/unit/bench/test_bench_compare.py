"""`pdserve bench compare`: several results in one table, chart and report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pdserve.bench import bars, results, svg
from pdserve.cli import bench_compare, main
from pdserve.errors import ConfigError
from tests.unit.bench.test_bench_report import SVG, report, result, texts


def measured(label: str, *, tokens: float, background: int | None = None, limit: int = 8, rounds: int = 1) -> Any:
    made = []
    for index in range(rounds):
        one = result(label, "inf", 0.1, limit=limit, round_index=index) | {"output_throughput": tokens + index}
        one |= {"background_concurrency": background, "p99_itl_ms": 5000 / tokens}
        made.append(one | ({"background_input_len": 1500} if background is not None else {}))
    return made


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Results of three services, of a load alone and with a background."""
    paths = []
    for label, alone, beside in (("pair", 250, 240), ("one", 400, 20), ("other", 300, 10)):
        found = measured(label, tokens=alone, background=0, rounds=3)
        found += measured(label, tokens=beside, background=1, rounds=3)
        path = tmp_path / f"{label}.json"
        path.write_text(json.dumps(report(*found) | {"machine": {"cpus": 2, "cpu_model": "Some CPU"}}))
        paths.append(str(path))
    return paths


def bars_of(drawing: str, colour: str) -> list[float]:
    """Heights of the bars of a colour, without the legend."""
    rects = [one for one in ElementTree.fromstring(drawing).iter(f"{SVG}rect") if one.get("class") == colour]
    return [float(str(one.get("height"))) for one in rects if one.get("width") != one.get("height")]


def test_a_chart_has_a_panel_for_each_metric_and_a_bar_for_each_service_and_load(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = {name: tmp_path / "out" / f"all.{name}" for name in ("svg", "html", "json")}
    words = [word for name, path in out.items() for word in (f"--output-{name}", str(path))]
    assert main.main(["bench", "compare", *files, "--title", "a < b", "--metric", "p99_itl_ms", "output_throughput",
                      *words]) == 0  # fmt: skip
    shown = capsys.readouterr().out
    assert "one / pair:" in shown and "other / pair:" in shown
    assert re.search(r"inf +8 +1 +3 +0.09x \(0.08-0.09\)", shown), shown
    drawing = out["svg"].read_text()
    found = ["".join(text.itertext()) for text in ElementTree.fromstring(drawing).iter(f"{SVG}text")]
    assert {"a < b", "pair", "one", "other", "alone", "beside 1,500-token prompts", "241", "401", "21", "301"} <= set(
        found
    )
    assert {"ITL p99, ms (lower is better)", "Output tokens/s (higher is better)"} <= set(found)
    note = " ".join(text for text in found if "median of" in text or "Some CPU" in text)
    assert "<m>; median of 3 rounds (line: range); client on 2 cores of Some CPU; 2026-01-02" in note
    pair_itl = bars_of(drawing, "series1")
    assert len(pair_itl) == 4 and pair_itl[2] / pair_itl[3] == pytest.approx(251 / 241, rel=0.01)
    assert bars_of(drawing, "series4")[3] == pytest.approx(pair_itl[3] * 21 / 241, rel=0.05)
    page = out["html"].read_text()
    assert "<script" not in page and page.count("a &lt; b") == 2 and "background clients" in page
    again = json.loads(out["json"].read_text())
    assert len(again["results"]) == 18 and not set(results.LONG_FIELDS) & set(again["results"][0])
    assert main.main(["bench", "compare", str(out["json"]), "--labels", "x", "y", "z"]) == 0, "joined results again"
    assert "z / x:" in capsys.readouterr().out


def test_many_loads_have_one_panel_a_row_and_a_dash_where_a_service_has_no_run() -> None:
    runs = [one for limit in (1, 4, 16, 64) for label in "abcd" for one in measured(label, tokens=limit, limit=limit)]
    runs = [one for one in runs if (one["label"], one["max_concurrency"]) != ("d", 64)]
    drawing = bars.bar_chart(report(*runs), ["output_throughput", "p99_itl_ms"], title="t")
    assert drawing.size[1] > 2 * bars.PANEL
    assert [texts(drawing).count(text) for text in ("16 in flight", "–")] == [2, 2]
    many = [one for label in "abcdefghijkl" for one in measured(label * 12, tokens=3.25)]
    chart = bars.bar_chart(report(*many), ["output_throughput"], title="t", note="mine")
    legend = [float(str(text.get("y"))) for text in ElementTree.fromstring(chart.render("t")).iter(f"{SVG}text")
              if text.get("class") == "label"]  # fmt: skip
    assert len(set(legend)) > 1 and "mine" in texts(chart) and "all at once, 8 in flight" in texts(chart)
    assert {f"series{index}" for index in range(1, 7)} == set(svg.SERIES) == set(bars.BAR_COLOURS)


def test_loads_are_named_by_what_differs() -> None:
    runs = [result("a", rate, 0.1, limit=4) for rate in (0.5, "inf", "trace")]
    assert list(results.load_names(runs).values()) == ["0.5 requests/s", "all at once", "times of the file"]
    runs = measured("a", tokens=1, background=2) + measured("a", tokens=1, background=0)
    assert list(results.load_names(runs).values()) == ["beside 2 x 1,500-token prompts", "alone"]
    for one in runs:
        del one["background_input_len"]
    assert next(iter(results.load_names(runs).values())) == "beside 2 x background prompts"


@pytest.mark.parametrize(
    ("words", "field", "message"),
    [
        (["A", "A"], "files", "one is given twice"),
        (["/no/such/file"], "files", "cannot be read"),
        (["A", "--metric", "median_ttft"], "metric", "--metric median_ttft: give output_throughput"),
        (["A", "--metric", "p99_tpot_ms", "background_p99_ttft_ms"], "metric", "no run has it"),
        (["A", "B", "--labels", "x"], "labels", "a name of its own for each service: pair"),
        (["A", "B", "--labels", "x", "x"], "labels", "--labels must have"),
        (["A", "--output-svg", "/proc/x/y"], "output_svg", "--output-svg /proc/x/y"),
    ],
)
def test_a_wrong_word_is_named(words: list[str], field: str, message: str, files: list[str]) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        bench_compare.main([{"A": files[0], "B": files[1]}.get(word, word) for word in words])
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "it is no JSON"), ("[]", "it has no results"), ('{"results": []}', "it has no results"),
     ('{"results": [{"label": "a"}]}', "a result has no endpoint")],
)  # fmt: skip
def test_a_file_of_something_else_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"x.json: {message}"):
        results.read_report(path)


def test_two_files_with_one_name_need_labels(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "again.json"
    other.write_text(Path(files[0]).read_text().replace("Some CPU", "Another CPU"))
    with pytest.raises(ConfigError, match="both have results of 'pair'; give --labels"):
        bench_compare.main([files[0], str(other)])
    assert bench_compare.main([files[0], str(other), "--labels", "before", "after"]) == 0
    shown = capsys.readouterr()
    assert "after / before:" in shown.out and "ran on different machines" in shown.err


def test_help_is_that_of_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "compare", "--help"]) == 0
    assert "pdserve bench compare" in capsys.readouterr().out
    assert main.main(["bench", "--help"]) == 0
    assert "--background-concurrency" in capsys.readouterr().out
