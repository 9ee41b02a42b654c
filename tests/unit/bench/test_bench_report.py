"""The report and the charts of `pdserve bench`: what they show of results, and that they need nothing else."""

from __future__ import annotations

import json
import re
import struct
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pdserve.bench import html_report, svg, text_report
from pdserve.bench.charts import ChartSeries, charts_of, line_chart
from pdserve.bench.client import BenchRecord
from pdserve.bench.metrics import Slo, summarize, timeline
from pdserve.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"


def record(start_s: float, ttft_s: float, gap_s: float, error: str | None = None) -> BenchRecord:
    arrivals = [ttft_s + gap_s * index for index in range(4)]
    return BenchRecord(
        start_s=start_s, arrivals_s=arrivals, end_s=arrivals[-1], prompt_tokens=9, output_tokens=4, error_kind=error
    )


def result(label: str, rate: Any, ttft_s: float, *, limit: int | None = None, round_index: int = 0) -> dict[str, Any]:
    records = [record(index, ttft_s, 0.05) for index in range(5)] + [record(2, 1, 1, "http_503")]
    head = {"label": label, "endpoint": "http://a/v1/completions", "model_id": "<m>", "dataset_name": "random"}
    load = {"request_rate": rate, "max_concurrency": limit, "round": round_index, "date": "20260102-030405"}
    return head | load | summarize(records, 6.0, slo=Slo.parse(["ttft:150"]))


def report(*results: dict[str, Any]) -> dict[str, Any]:
    machine = {"cpus": 2, "platform": "Linux", "python": "3"}
    return {"version": "1", "flags": {"seed": 0}, "machine": machine, "results": list(results)}


def curves(chart: svg.Svg) -> list[list[tuple[float, float]]]:
    lines = ElementTree.fromstring(chart.render("t")).iter(f"{SVG}polyline")
    pairs = [[point.split(",") for point in str(line.get("points")).split()] for line in lines]
    return [[(float(x), float(y)) for x, y in points] for points in pairs]


def texts(chart: svg.Svg) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.fromstring(chart.render("t")).iter(f"{SVG}text")]


def test_a_sweep_has_a_curve_for_each_service_over_the_rates() -> None:
    results = [result(label, rate, ttft) for rate, ttft in ((1.0, 0.1), (2.0, 0.2)) for label in ("pair", "one")]
    charts = {chart.title: chart.svg for chart in charts_of(results)}
    assert list(charts)[:2] == ["Output throughput", "Time to first token"]
    found = texts(charts["Time to first token"])
    assert {"pair p50", "one p50", "pair p99", "one p99", "ms", "request rate, requests/s"} <= set(found)
    *_, first, second, third, fourth = curves(charts["Time to first token"])
    assert first == second == third == fourth and len(first) == 2, "the same figures"
    assert first[0][1] > first[1][1], "a longer time is higher"
    assert "Requests within the limits" in charts


def test_two_services_have_ratios_within_rounds() -> None:
    ttfts = ((0.1, 0.2), (0.2, 0.4), (0.3, 0.7))
    results = [result(label, 1.0, ttft, round_index=index)
               for index, both in enumerate(ttfts) for label, ttft in zip("ab", both, strict=True)]  # fmt: skip
    (found,) = text_report.comparisons(results)
    headings, rows = found.headings, found.rows
    assert rows[0][:3] == ["1.0", "-", "3"] and rows[0][headings.index("TTFT p50")] == "2.00x (2.00-2.33)"
    assert "b / a:" in text_report.table(results) and "<h2>b / a</h2>" in html_report.page(report(*results))
    assert text_report.comparisons(results[::2]) == []
    assert text_report.comparisons(results[1:3])[0].rows == [["1.0", "-", "0", *["-"] * 7]], "no round has both"


def test_rounds_of_a_load_are_one_point_and_concurrencies_an_axis() -> None:
    results = [result("a", "inf", ttft, limit=limit, round_index=index)
               for limit in (1, 4) for index, ttft in enumerate((0.1, 0.2, 0.3))]  # fmt: skip
    chart = next(chart for chart in charts_of(results) if chart.title == "Time to first token")
    assert len(curves(chart.svg)[-1]) == 2 and "requests in flight at most" in texts(chart.svg)


def test_a_long_legend_has_several_lines_and_groups_their_own_colours() -> None:
    results = [result(f"127.0.0.1:1800{port}", rate, 0.1, limit=limit)
               for port in (1, 2) for rate in (1.0, 2.0) for limit in (4, 8)]  # fmt: skip
    chart = next(chart for chart in charts_of(results) if chart.title == "Time to first token").svg
    found = list(ElementTree.fromstring(chart.render("t")).iter(f"{SVG}text"))
    legend = [(float(str(text.get("x"))), float(str(text.get("y"))), text.text) for text in found
              if "127.0.0.1" in str(text.text)]  # fmt: skip
    assert len(legend) == 8 and len({y for _, y, _ in legend}) > 1
    assert all(x + 6 * len(str(text)) < chart.size[0] for x, _, text in legend)
    classes = {str(line.get("class")) for line in ElementTree.fromstring(chart.render("t")).iter(f"{SVG}polyline")}
    assert len(classes) == 4
    assert all(y < 300 for curve in curves(chart)[-8:] for _, y in curve)


def test_one_load_has_distributions_and_its_course() -> None:
    titles = [chart.title for chart in charts_of([result("a", "inf", 0.1), result("b", "inf", 0.1)])]
    assert "Time to first token: share of requests" in titles and "Inter-token latency: share of gaps" in titles
    assert titles[-2:] == ["Output tokens over time", "Requests in flight over time"]


def test_loads_without_two_numbers_have_the_charts_of_single_runs() -> None:
    charts = {chart.title: chart.svg for chart in charts_of([result("a", 2.0, 0.1), result("a", "inf", 0.2)])}
    found = charts["Time to first token: share of requests"]
    assert {"a, 2 requests/s", "a, all at once"} <= set(texts(found))
    *_, first, second = curves(found)
    assert len(first) == len(second) == 101


def test_a_sweep_takes_results_without_its_field() -> None:
    older = result("old", "inf", 0.1)
    newer = [result("new", "inf", 0.1) | {"background_concurrency": number} for number in (0, 1)]
    chart = next(chart.svg for chart in charts_of([older, *newer]) if chart.title == "Output throughput")
    assert "new" in texts(chart) and "old" not in texts(chart)


def test_the_course_counts_tokens_and_requests_in_flight() -> None:
    found = timeline([record(0.0, 1.0, 1.0), record(2.0, 1.0, 1.0)], 6.0)
    assert found["bucket_s"] == pytest.approx(0.1) and sum(found["output_tokens"]) == 8
    assert sum(found["in_flight"]) * 0.1 == pytest.approx(8.0, abs=0.1), "two requests of 4 s"
    assert max(found["in_flight"]) == pytest.approx(2.0) and found["in_flight"][5] == pytest.approx(1.0)


def test_a_chart_without_values_has_axes() -> None:
    empty = line_chart("t", "x", "y", [ChartSeries(name="n", points=[], colour="series1")])
    assert texts(empty.svg)[:2] == ["t", "n"]


class Loads(HTMLParser):
    """Elements of a page, and those that load something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.foreign += [str(value) for name, value in attrs if name in ("src", "href", "srcset", "data")]


def test_the_page_has_all_figures_and_loads_nothing() -> None:
    text = html_report.page(report(result("pair", 1.0, 0.1), result("pair", 2.0, 0.2)))
    parser = Loads()
    parser.feed(text)
    assert parser.foreign == [] and not {"script", "link", "iframe", "img"} & set(parser.tags)
    assert "url(" not in text and "@import" not in text and "default-src 'none'" in text
    assert parser.tags.count("svg") == 7
    assert "&lt;m&gt;" in text and "<m>" not in text
    cells = re.findall(r"<td>(.*?)</td>", text)
    assert "http_503" in cells and "100.00" in cells and "83%" in cells
    assert "prefers-color-scheme: dark" in text and "&quot;seed&quot;: 0" in text


def test_the_page_tells_the_search() -> None:
    best = {"label": "a", "goodput_target": 0.9, "goodput_slo_ms": {"ttft": 200.0}, "max_rate_within_slo": 3.5}
    best |= {"goodput_share": 0.92, "lowest_rate_beyond_slo": 4.0}
    text = html_report.page(report(result("a", 1.0, 0.1)) | {"goodput_search": [best]})
    assert "a: highest rate with 90% of requests within ttft 200 ms: 3.5 requests/s (92% within)" in text
    for more, told in (({"max_rate_within_slo": None}, "no rate, down to 4 requests/s"),
                       ({"lowest_rate_beyond_slo": None}, "at least 3.5 requests/s (92% within)")):  # fmt: skip
        assert f"ttft 200 ms: {told}" in html_report.page(
            report(result("a", 1.0, 0.1)) | {"goodput_search": [best | more]}
        )


def test_the_image_has_the_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("resvg_py")
    data = html_report.png(report(result("a", 1.0, 0.1), result("a", 2.0, 0.1)))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1920 and height == 1920 / 1280 * 300 * 4, "seven charts in two columns"


def test_an_image_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(ConfigError, match=r"pip install 'pdserve\[bench\]'") as raised:
        html_report.png(report(result("a", 1.0, 0.1)))
    assert raised.value.field == "output_png"


def test_results_are_json_again(tmp_path: Path) -> None:
    found = report(result("a", "inf", 0.1))
    assert html_report.page(json.loads(json.dumps(found, allow_nan=False))) == html_report.page(found)


@pytest.mark.parametrize(
    ("value", "top", "step"), [(997, 1000, 200), (1100, 1250, 250), (3.2, 4, 1), (0.05, 0.05, 0.01)]
)
def test_axes_end_at_a_round_number(value: float, top: float, step: float) -> None:
    assert svg.nice_top(value) == pytest.approx((top, step))


def test_text_is_escaped_and_both_colour_schemes_have_all_classes() -> None:
    drawing = svg.Svg(10, 10)
    drawing.text(1, 2, "a < b & c", "label end")
    assert texts(drawing) == ["a < b & c"] and "<title>t &lt; u</title>" in drawing.render("t < u")
    light, dark = (svg.style(scheme) for scheme in (0, 1))
    assert all(f".{name} {{" in scheme for name in [*svg.COLOURS, *svg.SIZES] for scheme in (light, dark))
