"""A chart of several services: bars by load, a panel for each metric, with the range of the rounds."""

from __future__ import annotations

import dataclasses
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.bench.results import Load, load_names, load_of, loads_of
from pdserve.bench.svg import SERIES, Svg, nice_top
from pdserve.errors import ConfigError

Json = dict[str, Any]
WIDTH, PANEL = 830, 250
LEFT, HEAD, FOOT, GAP = 56, 34, 30, 16
NOTE_CHARS = 125
MAX_BARS_BESIDE = 10
"""Two panels stand side by side when neither has more bars."""
MIN_WIDTH_OF_VALUE = 28
"""Bars that are narrower, in pixels, have no value above them."""
BAR_COLOURS = (SERIES[0], SERIES[3], SERIES[1], SERIES[2], *SERIES[4:])
RATES = {
    "output_throughput": ("Output tokens/s", 1.0),
    "total_token_throughput": ("Input and output tokens/s", 1.0),
    "request_throughput": ("Requests/s", 1.0),
    "request_goodput": ("Requests/s within the limits", 1.0),
    "goodput_share": ("Requests within the limits, %", 100.0),
    "max_output_tokens_per_s": ("Peak output tokens/s", 1.0),
    "background_request_throughput": ("Background requests/s", 1.0),
}
"""Fields where more is better: their title, and the factor of their values."""
DEFAULT_METRICS = ("output_throughput", "p99_itl_ms")
_LATENCY = re.compile(r"(background_)?(mean|median|std|p[0-9.]+)_(ttft|ttst|tpot|itl|e2el)_ms")


@dataclasses.dataclass(frozen=True)
class Panel:
    """One metric: its heading, and its values of each round by service and load."""

    heading: str
    values: Mapping[tuple[str, Load], Sequence[float]]


def heading_of(metric: str) -> tuple[str, float]:
    """Return the heading of a field of the results, and the factor of its values. Raises ConfigError for others."""
    if metric in RATES:
        title, factor = RATES[metric]
        return f"{title} (higher is better)", factor
    found = _LATENCY.fullmatch(metric)
    if found is None:
        known = ", ".join(RATES)
        text = f"--metric {metric}: give {known}, or a latency such as median_ttft_ms or p99_itl_ms"
        raise ConfigError(text, field="metric")
    background, kind, name = found.groups()
    title = f"{name.upper()} {kind}, ms" if background is None else f"{name.upper()} {kind} of background requests, ms"
    return f"{title} (lower is better)", 1.0


def panel_of(results: Sequence[Json], metric: str) -> Panel:
    """Return the values of a field. Raises ConfigError when no run has one, or it is no metric."""
    heading, factor = heading_of(metric)
    values: dict[tuple[str, Load], list[float]] = {}
    for one in results:
        if one.get(metric) is not None:
            values.setdefault((one["label"], load_of(one)), []).append(one[metric] * factor)
    if not values:
        raise ConfigError(f"--metric {metric}: no run has it", field="metric")
    return Panel(heading, values)


def note_of(report: Json) -> str:
    """Return a text on the runs: model, lengths, rounds, machine of the client and date."""
    results = report["results"]
    first, machine = results[0], report["machine"]
    parts = [", ".join(dict.fromkeys(str(one["model_id"]).rsplit("/", 1)[-1] for one in results))]
    if "random_input_len" in first:
        parts.append(f"prompts of {first['random_input_len']:,} tokens, answers of {first['random_output_len']:,}")
    rounds = len({one["round"] for one in results})
    parts.append(f"median of {rounds} rounds (line: range)" if rounds > 1 else "one round")
    if "cpus" in machine:
        parts.append(f"client on {machine['cpus']} cores of {machine.get('cpu_model') or machine.get('platform')}")
    date = str(first["date"])
    return "; ".join([*parts, f"{date[:4]}-{date[4:6]}-{date[6:8]}"])


def bar_chart(report: Json, metrics: Sequence[str] = DEFAULT_METRICS, *, title: str, note: str | None = None) -> Svg:
    """Draw one chart of all services.

    Args:
        report: results of one or more services; `round` tells the rounds of a load apart.
        metrics: fields of the results, a panel for each.
        title: the first line.
        note: the text below it, in as many lines as it needs; None: `note_of`.

    Raises:
        ConfigError: a metric is unknown, or no run has it.
    """
    results = report["results"]
    panels = [panel_of(results, metric) for metric in metrics]
    labels = list(dict.fromkeys(str(one["label"]) for one in results))
    beside = len(panels) > 1 and len(labels) * len(loads_of(results)) <= MAX_BARS_BESIDE
    columns = 2 if beside else 1
    rows = -(-len(panels) // columns)
    notes = textwrap.wrap(note_of(report) if note is None else note, NOTE_CHARS)
    lines = _legend_lines(labels)
    legend_at = 42 + 18 * len(notes)
    top = legend_at + 20 * len(lines)
    svg = Svg(WIDTH, top + rows * PANEL)
    svg.text(16, 26, title, "title")
    for line, text in enumerate(notes):
        svg.text(16, 46 + 18 * line, text, "note")
    for line, entries in enumerate(lines):
        for x, index in entries:
            svg.rect(x, legend_at + 20 * line, 12, 12, BAR_COLOURS[index % len(BAR_COLOURS)])
            svg.text(x + 18, legend_at + 10 + 20 * line, labels[index], "label")
    width = WIDTH / columns
    for index, panel in enumerate(panels):
        at = (index % columns * width, top + index // columns * PANEL)
        _draw_panel(svg, panel, at, width, labels, load_names(results))
    return svg


def _legend_lines(labels: Sequence[str]) -> list[list[tuple[float, int]]]:
    """Return the labels' places by line: x in pixels and the index of the label."""
    lines: list[list[tuple[float, int]]] = [[]]
    x = 16.0
    for index, label in enumerate(labels):
        width = 36 + 6.6 * len(label)
        if x > 16 and x + width > WIDTH:
            lines.append([])
            x = 16.0
        lines[-1].append((x, index))
        x += width
    return lines


def _draw_panel(
    svg: Svg, panel: Panel, at: tuple[float, float], width: float, labels: Sequence[str], loads: Mapping[Load, str]
) -> None:
    x, y = at
    left, right, base = x + LEFT, x + width - GAP, y + PANEL - FOOT
    svg.text(x + 16, y + 18, panel.heading, "axis")
    end, step = nice_top(max(max(values) for values in panel.values.values()) or 1)
    scale = (base - y - HEAD - GAP) / end
    for index in range(round(end / step) + 1):
        svg.line(left, base - index * step * scale, right, base - index * step * scale, "grid")
        svg.text(left - 8, base - index * step * scale + 4, f"{step * index:,.6g}", "tick end")
    group = (right - left) / len(loads)
    bar = min(64.0, group * 0.86 / len(labels))
    for place, (load, name) in enumerate(loads.items()):
        begin = left + (place + 0.5) * group - bar * len(labels) / 2
        for index, label in enumerate(labels):
            values = panel.values.get((label, load))
            colour = BAR_COLOURS[index % len(BAR_COLOURS)]
            _draw_bar(svg, (begin + index * bar, base), bar - 3, scale, values or (), colour)
        svg.text(left + (place + 0.5) * group, base + 20, name, "label middle")


def _draw_bar(
    svg: Svg, at: tuple[float, float], width: float, scale: float, values: Sequence[float], colour: str
) -> None:
    """Draw a bar upwards from `at` with the range of its values and their median; a dash without values."""
    x, base = at
    middle = x + width / 2
    if not values:
        svg.text(middle, base - 6, "–", "value middle")
        return
    median, low, high = statistics.median(values), min(values), max(values)
    svg.rect(x, base - median * scale, width, median * scale, colour)
    if high > low:
        svg.line(middle, base - low * scale, middle, base - high * scale, "range")
    if width >= MIN_WIDTH_OF_VALUE:
        svg.text(middle, base - high * scale - 5, _value(median), "value middle")


def _value(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
