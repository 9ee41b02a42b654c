"""A benchmark as one HTML file: figures, charts and flags, without scripts and without other files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from pdserve.bench.charts import NamedChart, charts_of
from pdserve.bench.metrics import METRICS, percentile_name
from pdserve.bench.svg import Svg, grid, sheet
from pdserve.bench.text_report import best_rate, columns_of, comparisons
from pdserve.errors import ConfigError

Json = dict[str, Any]
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
CSS = """
:root { color-scheme: light dark; --text: #1f2328; --muted: #59636e; --line: #d1d9e0; --page: #ffffff }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --muted: #9198a1; --line: #3d444d; --page: #0d1117 }
}
body { background: var(--page); color: var(--text); margin: 24px auto; max-width: 1340px; padding: 0 16px;
  font: 15px/1.5 -apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif }
h1 { font-size: 24px } h2 { font-size: 18px; margin-top: 32px } p, summary { color: var(--muted) }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid var(--line); padding: 4px 12px; text-align: right; white-space: nowrap }
th:first-child, td:first-child, .named :is(th, td):nth-child(2) { text-align: left }
thead th { color: var(--muted); font-weight: 600 }
.charts { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)) }
.charts svg { border: 1px solid var(--line); border-radius: 6px; height: auto; width: 100% }
pre { overflow-x: auto }
"""


def page(report: Json, first_charts: Sequence[NamedChart] = ()) -> str:
    """Return the file for a report of `pdserve bench`; `first_charts` stand before those of the results."""
    results: Sequence[Json] = report["results"]
    charts = [*first_charts, *charts_of(results)]
    services = " and ".join(dict.fromkeys(f"{one['label']} ({one['endpoint']})" for one in results))
    machine, date = report["machine"], results[0]["date"]
    day, clock = f"{date[:4]}-{date[4:6]}-{date[6:8]}", f"{date[9:11]}:{date[11:13]}"
    facts = (
        f"{services}; model {results[0]['model_id']}; {results[0]['dataset_name']} requests; {day} {clock}; "
        f"client on {machine.get('cpus', '?')} cores, {machine.get('platform', '?')}; pdserve {report['version']}"
    )
    shown = json.dumps(report["flags"], indent=2)
    parts = [
        "<h1>Serving benchmark</h1>", f"<p>{escape(facts)}</p>", *_searches(report),
        "<h2>Runs</h2>", f"<p>Latencies in milliseconds.{escape(_limits(results))}</p>",
        _table([heading for heading, _, _ in columns_of(results)], _runs(results)),
        *_comparison(results), *_errors(results),
        "<h2>Charts</h2>", '<div class="charts">', *(chart.svg.inline(chart.title) for chart in charts), "</div>",
        "<h2>Latencies, ms</h2>", _table(["run", "metric", *_kinds(results)], _latencies(results), "named"),
        f"<details><summary>Flags</summary><pre>{escape(shown)}</pre></details>",
    ]  # fmt: skip
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Serving benchmark</title>\n<style>{CSS}{sheet()}\n</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _comparison(results: Sequence[Json]) -> list[str]:
    told = "Each ratio is taken within a round: the median of the rounds (least-most)."
    return [
        part
        for one in comparisons(results)
        for part in (f"<h2>{escape(one.title)}</h2>", f"<p>{told}</p>", _table(one.headings, one.rows))
    ]


def _limits(results: Sequence[Json]) -> str:
    limits = results[0].get("goodput_slo_ms", {})
    told = " and ".join(f"{name.upper()} at most {value:g}" for name, value in limits.items())
    return f" In SLO: the share of requests with {told}." if told else ""


def _runs(results: Sequence[Json]) -> list[list[str]]:
    columns = columns_of(results)
    return [[_number(result.get(name), form) for _, name, form in columns] for result in results]


def _kinds(results: Sequence[Json]) -> list[str]:
    """Return the statistics that the results have, by the prefix of their fields."""
    ends = [f"_{name}_ms" for name in METRICS]
    found = [field.removesuffix(end) for result in results for field in result for end in ends if field.endswith(end)]
    return [kind for kind in dict.fromkeys(found) if kind != percentile_name(50)]


def _latencies(results: Sequence[Json]) -> list[list[str]]:
    rows = []
    for number, result in enumerate(results, 1):
        for name, title in METRICS.items():
            if f"mean_{name}_ms" in result:
                values = [_number(result.get(f"{kind}_{name}_ms"), ".2f") for kind in _kinds(results)]
                rows.append([f"{number}: {result['label']}", title, *values])
    return rows


def _errors(results: Sequence[Json]) -> list[str]:
    rows = [
        [f"{number}: {result['label']}{where}", kind, str(count)]
        for number, result in enumerate(results, 1)
        for name, where in (("error_kinds", ""), ("background_error_kinds", ", background"))
        for kind, count in result.get(name, {}).items()
    ]  # fmt: skip
    messages = dict.fromkeys(text for result in results for text in result["error_messages"])
    items = "".join(f"<li>{escape(text)}</li>" for text in messages)
    return ["<h2>Errors</h2>", _table(["run", "kind", "requests"], rows, "named"), f"<ul>{items}</ul>"] if rows else []


def _searches(report: Json) -> list[str]:
    told = []
    for best in report.get("goodput_search", []):
        limits = ", ".join(f"{name} {value:g} ms" for name, value in best["goodput_slo_ms"].items())
        target = f"{best['goodput_target']:.0%} of requests within {limits}"
        text = f"{best['label']}: highest rate with {target}: {best_rate(best)}"
        told.append(f"<p><strong>{escape(text)}</strong></p>")
    return told


def _number(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{escape(str(one))}</th>" for one in headings)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>\n" for row in rows)
    whole = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>"
    return f'<div class="scroll"><table class="{kind}">\n{whole}</table></div>'


def png(report: Json, *, width: int = 1920) -> bytes:
    """Return the charts as one PNG of `width` pixels, in the light scheme. Raises ConfigError as `check_png`."""
    return image(grid([chart.svg for chart in charts_of(report["results"])], 2), width)


def image(chart: Svg, width: int) -> bytes:
    """Return a drawing as a PNG of `width` pixels, in the light scheme. Raises ConfigError as `check_png`."""
    check_png()
    from resvg_py import svg_to_bytes

    drawing = chart.render("Serving benchmark", scheme=0)
    # The list of fonts of a page means none that every machine has.
    drawing = drawing.replace("-apple-system, ", "")
    return bytes(svg_to_bytes(svg_string=drawing, width=width))


def check_png() -> None:
    """Check that a PNG can be drawn.

    Raises:
        ConfigError: resvg-py (the extra `bench`) is not installed, or the machine has no font.
    """
    try:
        from resvg_py import svg_to_bytes
    except ImportError:
        raise ConfigError("--output-png needs resvg-py: pip install 'pdserve[bench]'", field="output_png") from None
    probe = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{}</svg>'
    with_text = probe.format('<text y="15" font-family="sans-serif">X</text>')
    if bytes(svg_to_bytes(svg_string=with_text)) == bytes(svg_to_bytes(svg_string=probe.format(""))):
        raise ConfigError("--output-png needs a font on this machine, such as DejaVu Sans", field="output_png")
