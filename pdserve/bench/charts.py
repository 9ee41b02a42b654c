"""Charts of a benchmark's results: a sweep's curves, or the distributions and the course of single runs."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from pdserve.bench.results import LOAD_FIELDS, load_names, load_of, loads_of
from pdserve.bench.svg import SERIES, Point, Svg, nice_top

Json = dict[str, Any]
WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BASE = 64, WIDTH - 20, 76, HEIGHT - 44
LEGEND_LINE = 18
AXES = {
    "request_rate": "request rate, requests/s",
    "max_concurrency": "requests in flight at most",
    "background_concurrency": "background clients",
}
LATENCIES = (("ttft", "Time to first token"), ("ttst", "Time to second token"), ("tpot", "Time per output token"),
             ("itl", "Inter-token latency"), ("e2el", "End-to-end latency"))  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChartSeries:
    """One curve: its name in the legend, its points in the units of the axes, and how it is drawn."""

    name: str
    points: Sequence[Point]
    colour: str
    dashed: bool = False
    marks: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedChart:
    """A drawing and its title."""

    title: str
    svg: Svg


def line_chart(
    title: str, x_name: str, y_name: str, series: Sequence[ChartSeries], y_end: float | None = None
) -> NamedChart:
    """Draw curves over linear axes from 0 to the largest value, or to `y_end`.

    The legend has as many lines as it needs.
    """
    svg = Svg(WIDTH, HEIGHT)
    svg.text(16, 24, title, "title")
    x, y = 16.0, 42.0
    for one in series:
        width = 46 + 6.4 * len(one.name)
        if x > 16 and x + width > WIDTH:
            x, y = 16.0, y + LEGEND_LINE
        svg.curve([(x, y), (x + 22, y)], one.colour, dashed=one.dashed)
        svg.text(x + 28, y + 4, one.name, "note")
        x += width
    upper = TOP + y - 42
    points = [point for one in series for point in one.points]
    x_top, x_step = nice_top(max((point[0] for point in points), default=1) or 1)
    y_top, y_step = nice_top(y_end or max((point[1] for point in points), default=1) or 1)
    for tick in _ticks(y_top, y_step):
        y = BASE - tick / y_top * (BASE - upper)
        svg.line(LEFT, y, RIGHT, y, "grid")
        svg.text(LEFT - 8, y + 4, f"{tick:,.6g}", "tick end")
    for tick in _ticks(x_top, x_step):
        svg.text(LEFT + tick / x_top * (RIGHT - LEFT), BASE + 18, f"{tick:,.6g}", "tick middle")
    svg.text(LEFT - 48, upper - 12, y_name, "note")
    svg.text(RIGHT, HEIGHT - 8, x_name, "note end")
    for one in series:
        scale_x, scale_y = (RIGHT - LEFT) / x_top, (BASE - upper) / y_top
        placed = [(LEFT + at * scale_x, BASE - value * scale_y) for at, value in one.points]
        svg.curve(placed, one.colour, dashed=one.dashed, marks=one.marks)
    return NamedChart(title=title, svg=svg)


def _ticks(top: float, step: float) -> list[float]:
    return [step * index for index in range(round(top / step) + 1)]


def charts_of(results: Sequence[Json]) -> list[NamedChart]:
    """Return the charts that fit the results: curves over a sweep's loads, else those of each single load."""
    field = _axis(results)
    return single_charts(results) if field is None else sweep_charts(results, field)


def _axis(results: Sequence[Json]) -> str | None:
    """Return the field of the load that has several numbers, the request rate before the others; None: no field has."""
    for field in LOAD_FIELDS:
        if len({one.get(field) for one in results if isinstance(one.get(field), int | float)}) > 1:
            return field
    return None


def _group(result: Json, others: Sequence[str]) -> tuple[Any, ...]:
    return (result["label"], *(result.get(name) for name in others))


def sweep_charts(results: Sequence[Json], field: str) -> list[NamedChart]:
    """Return curves over a field of the load: medians of the rounds of each load."""
    labels = list(dict.fromkeys(result["label"] for result in results))
    colours = {label: SERIES[index % len(SERIES)] for index, label in enumerate(labels)}
    used = [result for result in results if isinstance(result.get(field), int | float)]
    others = [name for name in LOAD_FIELDS if name != field and len({one.get(name) for one in used}) > 1]
    groups = list(dict.fromkeys(_group(result, others) for result in used))
    several = bool(others)

    def curves(metric: str, suffix: str = "", *, dashed: bool = False) -> list[ChartSeries]:
        found = []
        for place, (label, *values) in enumerate(groups):
            mine = [one for one in used if _group(one, others) == (label, *values) and one.get(metric) is not None]
            at = sorted({one[field] for one in mine})
            points = [(x, statistics.median(one[metric] for one in mine if one[field] == x)) for x in at]
            parts = [f"{other.replace('_', ' ')} {value}" for other, value in zip(others, values, strict=True)]
            name = ", ".join([label, *parts]) + suffix
            if points:
                colour = SERIES[place % len(SERIES)] if several else colours[label]
                found.append(ChartSeries(name=name, points=points, colour=colour, dashed=dashed, marks=True))
        return found

    x_name = AXES[field]
    made = [line_chart("Output throughput", x_name, "tokens/s", curves("output_throughput"))]
    made += [
        line_chart(title, x_name, "ms", [*curves(f"median_{name}_ms", " p50"),
                                         *curves(f"p99_{name}_ms", " p99", dashed=True)])
        for name, title in LATENCIES if curves(f"median_{name}_ms")
    ]  # fmt: skip
    if any("goodput_share" in one for one in used):
        shares = curves("goodput_share")
        percent = [dataclasses.replace(one, points=[(x, 100 * y) for x, y in one.points]) for one in shares]
        made.append(line_chart("Requests within the limits", x_name, "%", percent, 100))
    return made


def single_charts(results: Sequence[Json]) -> list[NamedChart]:
    """Return the distribution of each latency, and tokens/s and requests in flight over time."""
    several = {result["label"] for result in results if result["round"] > 0}
    loads = load_names(results) if len(loads_of(results)) > 1 else {}
    groups = list(dict.fromkeys((result["label"], load_of(result)) for result in results))
    colours = {group: SERIES[index % len(SERIES)] for index, group in enumerate(groups)}

    def series(points: Callable[[Json], list[Point]]) -> list[ChartSeries]:
        made = []
        for result in results:
            label, load = result["label"], load_of(result)
            parts = [label, *([loads[load]] if loads else [])]
            parts += [f"round {result['round'] + 1}"] if label in several else []
            if found := points(result):
                dashed, colour = result["round"] > 0, colours[label, load]
                made.append(ChartSeries(name=", ".join(parts), points=found, colour=colour, dashed=dashed))
        return made

    made = []
    for name, title in LATENCIES:
        curves = series(lambda result, name=name: _distribution(result, name))  # type: ignore[misc]
        if curves:
            made.append(
                line_chart(f"{title}: share of {'gaps' if name == 'itl' else 'requests'}", "ms", "%", curves, 100)
            )
    for field, title, unit in (("output_tokens", "Output tokens over time", "tokens/s"),
                               ("in_flight", "Requests in flight over time", "requests")):  # fmt: skip
        curves = series(lambda result, field=field: _course(result, field))  # type: ignore[misc]
        if curves:
            made.append(line_chart(title, "seconds", unit, curves))
    return made


def _distribution(result: Json, name: str) -> list[Point]:
    values = result.get("distributions_ms", {}).get(name, [])
    last = max(1, len(values) - 1)
    return [(value, 100 * index / last) for index, value in enumerate(values)]


def _course(result: Json, field: str) -> list[Point]:
    course = result.get("timeline")
    if not course:
        return []
    size = course["bucket_s"]
    per_s = 1 / size if field == "output_tokens" else 1
    return [((index + 0.5) * size, value * per_s) for index, value in enumerate(course[field])]
