"""The README's charts: what they show of stored results, and that they are those of the newest ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import charts, report
from pdserve.bench import svg

SVG = "{http://www.w3.org/2000/svg}"
MACHINE = {"cpus": 2, "cpu_model": "Some CPU", "load_1m": 0.3}


def texts(drawing: str) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.fromstring(drawing).iter(f"{SVG}text")]


def bars(drawing: str, colour: str, side: str) -> list[float]:
    """Lengths of the bars of a colour, without the legend."""
    rects = ElementTree.fromstring(drawing).iter(f"{SVG}rect")
    own = [rect for rect in rects if rect.get("class") == colour]
    return [float(rect.get(side) or 0) for rect in own if (rect.get("width"), rect.get("height")) != ("12.0", "12.0")]


def interference_facts() -> dict[str, Any]:
    found = {"pdserve 1P1D": (20.0, 400.0), "pdserve": (400.0, 40.0), "vllm": (1000.0, 20.0), "llama bf16": (2000, 10)}
    rounds = [
        {"system": name, "rounds": [{"itl_p99_ms": itl * k, "stream_tok_s": rate * k} for k in (0.5, 1, 1)]}
        for name, (itl, rate) in found.items()
    ]
    return {"date": "2026-01-02", "machine": MACHINE, "flags": {"streams": 8, "prompt_len": 1500, "rounds": 3}} | {
        "rounds": [*rounds, {"system": "vllm, chunks of 64", "rounds": []}]
    }


def test_interference_has_the_medians_of_four_systems() -> None:
    drawing = charts.interference(interference_facts())
    found = texts(drawing)
    assert {"20", "400", "1,000", "2,000", "40", "10"} <= set(found)
    assert "8 streams while prompts of 1,500 tokens arrive" in found
    assert any("2 cores of Some CPU, 2026-01-02; median of 3 rounds" in text for text in found)
    (pair_itl, pair_rate), (llama_itl, llama_rate) = (
        bars(drawing, "series1", "width"),
        bars(drawing, "series3", "width"),
    )
    assert llama_itl == pytest.approx(100 * pair_itl, rel=0.05) and pair_rate == pytest.approx(
        40 * llama_rate, rel=0.05
    )


def test_a_chart_says_that_others_used_the_cores() -> None:
    facts = interference_facts() | {"machine": MACHINE | {"load_1m": 4.0}}
    assert any("Some CPU, shared with other work, 2026" in text for text in texts(charts.interference(facts)))


def test_a_result_without_a_system_is_an_error() -> None:
    facts = interference_facts()
    facts["rounds"] = facts["rounds"][1:]
    with pytest.raises(KeyError, match="1P1D"):
        charts.interference(facts)


def test_throughput_has_a_group_for_each_number_of_streams_and_a_dash_for_no_rate() -> None:
    rates = {(name, size): 10.0 * size for name in charts.SYSTEMS for size in (1, 64)} | {("pdserve 1P1D", 64): 0.0}
    decode = [
        {"system": name, "size": size, "rounds": [{"decode_tok_s": rate}] * 2} for (name, size), rate in rates.items()
    ]
    drawing = charts.throughput({"date": "2026-01-02", "machine": MACHINE, "decode": decode})
    found = texts(drawing)
    assert [found.count(text) for text in ("1 stream", "64 streams", "640", "10", "–")] == [1, 1, 3, 4, 1]
    assert len(bars(drawing, "series1", "height")) == 1
    low, high = bars(drawing, "series4", "height")
    assert high == pytest.approx(64 * low, rel=0.05)
    for entry in decode:
        entry["rounds"] = [one | {"output_tok_s": 7.0} for one in entry["rounds"]]
    found = texts(charts.throughput({"date": "2026-01-02", "machine": MACHINE, "decode": decode}))
    assert found.count("7") == 8 and "–" not in found, "output tokens/s, which all systems have"


@pytest.mark.parametrize(
    ("value", "top", "step"), [(997, 1000, 200), (1100, 1250, 250), (3.2, 4, 1), (0.05, 0.05, 0.01)]
)
def test_axes_end_at_a_round_number(value: float, top: float, step: float) -> None:
    assert svg.nice_top(value) == pytest.approx((top, step))


def test_text_is_escaped_and_both_colour_schemes_have_all_classes() -> None:
    drawing = svg.Svg(10, 10)
    drawing.text(1, 2, "a < b & c", "label end")
    text = drawing.render("t < u")
    assert texts(text) == ["a < b & c"]
    light, dark = (svg.style(scheme) for scheme in (0, 1))
    assert all(f".{name} {{" in scheme for name in [*svg.COLOURS, *svg.SIZES] for scheme in (light, dark))


def test_the_newest_result_of_that_name_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    with pytest.raises(FileNotFoundError, match="cpu-peers"):
        charts.newest("cpu-peers")
    for name in ("2026-01-02-cpu-peers", "2026-02-01-cpu-peers", "2026-03-01-cpu-peers-zen5", "2026-04-01-idle"):
        (tmp_path / f"{name}.json").write_text("{}")
    assert charts.newest("cpu-peers").stem == "2026-02-01-cpu-peers"


def test_the_charts_of_the_readme_show_the_newest_results() -> None:
    readme = (report.ROOT / "README.md").read_text()
    for name, draw, result in (
        ("interference", charts.interference, charts.newest("interference-peers")),
        ("throughput", charts.throughput, charts.newest("cpu-peers")),
    ):
        drawn = (charts.IMAGES / f"{name}.svg").read_text()
        assert drawn == draw(json.loads(result.read_text())), "run: python -m benchmarks.charts"
        assert f"docs/images/{name}.svg" in readme
        assert f"benchmarks/results/{result.stem}.md" in readme, "the README links the result that its chart shows"
