"""Results as text: a block for one run, as `vllm bench serve` prints it, and a table for several."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from pdserve.bench.metrics import METRICS, percentile_name
from pdserve.bench.results import LOAD_FIELDS

Json = dict[str, Any]
WIDTH = 60
COUNTS = (
    ("Successful requests:", "completed", "d"),
    ("Failed requests:", "failed", "d"),
    ("Unfinished requests:", "unfinished", "d"),
    ("Benchmark duration (s):", "duration", ".2f"),
    ("Total input tokens:", "total_input_tokens", "d"),
    ("Total cached input tokens:", "total_cached_tokens", "d"),
    ("Total generated tokens:", "total_output_tokens", "d"),
    ("Request throughput (req/s):", "request_throughput", ".2f"),
    ("Request goodput (req/s):", "request_goodput", ".2f"),
    ("Share of requests within the SLO:", "goodput_share", ".1%"),
    ("Output token throughput (tok/s):", "output_throughput", ".2f"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s", ".2f"),
    ("Peak concurrent requests:", "max_concurrent_requests", "d"),
    ("Total token throughput (tok/s):", "total_token_throughput", ".2f"),
)
COLUMNS = (
    ("service", "label", ""),
    ("rate", "request_rate", ""),
    ("in flight", "max_concurrency", ""),
    ("background", "background_concurrency", "d"),
    ("ok", "completed", "d"),
    ("failed", "failed", "d"),
    ("cut", "unfinished", "d"),
    ("req/s", "request_throughput", ".2f"),
    ("out tok/s", "output_throughput", ".1f"),
    ("TTFT p50", "median_ttft_ms", ".1f"),
    ("TTFT p99", "p99_ttft_ms", ".1f"),
    ("TTST p50", "median_ttst_ms", ".1f"),
    ("TPOT p50", "median_tpot_ms", ".2f"),
    ("ITL p50", "median_itl_ms", ".2f"),
    ("ITL p99", "p99_itl_ms", ".2f"),
    ("E2E p50", "median_e2el_ms", ".0f"),
    ("in SLO", "goodput_share", ".0%"),
    ("bg ok", "background_completed", "d"),
    ("bg failed", "background_failed", "d"),
    ("bg TTFT p50", "background_median_ttft_ms", ".0f"),
    ("bg TTFT p99", "background_p99_ttft_ms", ".0f"),
)
BACKGROUND = (
    ("Successful background requests:", "background_completed", "d"),
    ("Failed background requests:", "background_failed", "d"),
    ("Unfinished background requests:", "background_unfinished", "d"),
    ("Mean background TTFT (ms):", "background_mean_ttft_ms", ".2f"),
    ("Median background TTFT (ms):", "background_median_ttft_ms", ".2f"),
    ("Median background E2EL (ms):", "background_median_e2el_ms", ".2f"),
)


RATIOS = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_ttst_ms", "median_tpot_ms", "median_itl_ms",
          "p99_itl_ms")  # fmt: skip
"""Fields whose ratios compare services."""


def block(result: Json, metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """Return one run as text."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    counts = [one for one in COUNTS if one[1] in result and (one[1] != "unfinished" or result["unfinished"])]
    lines += [f"{title:<42}{result[name]:<18{form}}" for title, name, form in counts]
    for name in metrics:
        lines.append(f"{METRICS[name]:-^{WIDTH}}")
        rows = [(f"{title} {name.upper()} (ms):", f"{title.lower()}_{name}_ms") for title in ("Mean", "Median")]
        rows += [
            (f"{percentile_name(one).upper()} {name.upper()} (ms):", f"{percentile_name(one)}_{name}_ms")
            for one in percentiles if one != 50
        ]  # fmt: skip
        lines += [f"{title:<42}{_number(result[field], '.2f')}" for title, field in rows]
    beside = [f"{title:<42}{_number(result[name], form)}" for title, name, form in BACKGROUND if name in result]
    lines += [f"{'Background requests':-^{WIDTH}}", *beside] if beside else []
    lines.append("=" * WIDTH)
    return "\n".join([*(line.rstrip() for line in lines), *errors(result)])


def errors(result: Json) -> list[str]:
    """Return a line for each kind of error and for some messages."""
    kinds = [f"{count} x {kind}" for kind, count in result["error_kinds"].items()]
    beside = result.get("background_error_kinds", {})
    kinds += [f"{count} x {kind} in the background" for kind, count in beside.items()]
    return ([f"Errors: {', '.join(kinds)}"] if kinds else []) + [f"  {text}" for text in result["error_messages"][:5]]


def table(results: Sequence[Json]) -> str:
    """Return several runs as a table, and the ratios of the services; columns that no run has are left out."""
    columns = columns_of(results)
    rows = [[heading for heading, _, _ in columns]]
    rows += [[_number(result.get(name), form) for _, name, form in columns] for result in results]
    lines = [*_aligned(rows), "Latencies in milliseconds."]
    for one in comparisons(results):
        lines += ["", f"{one.title}:", *_aligned([one.headings, *one.rows])]
    found = [f"{result['label']}, {result['request_rate']}: {line}" for result in results for line in errors(result)]
    return "\n".join([*lines, *found])


def columns_of(results: Sequence[Json]) -> list[tuple[str, str, str]]:
    """Return the columns of a table; without those that no run has, and `cut` where no request was cut."""
    return [
        column
        for column in COLUMNS
        if any(result.get(column[1]) is not None for result in results)
        and (column[1] != "unfinished" or any(result.get("unfinished") for result in results))
    ]


@dataclasses.dataclass(frozen=True)
class ServiceRatios:
    """The ratios of one service to another: a title, headings, and a row for each load."""

    title: str
    headings: list[str]
    rows: list[list[str]]


def comparisons(results: Sequence[Json]) -> list[ServiceRatios]:
    """Return the ratios of each further service to the first one.

    A ratio is taken within a round: the median of the rounds with the least and the most.
    """
    labels = list(dict.fromkeys(result["label"] for result in results))
    names = [name for name in RATIOS if any(result.get(name) is not None for result in results)]
    by_column = {name: heading for heading, name, _ in COLUMNS}
    loads = [name for name in LOAD_FIELDS if name != "background_concurrency"
             or any(result.get(name) is not None for result in results)]  # fmt: skip
    headings = [*(by_column[name] for name in loads), "rounds", *(by_column[name] for name in names)]
    found: dict[tuple[Any, ...], dict[int, dict[str, Json]]] = {}
    for result in results:
        rounds = found.setdefault(tuple(result.get(name) for name in loads), {})
        rounds.setdefault(result["round"], {})[result["label"]] = result
    made = []
    for label in labels[1:]:
        rows = []
        for load, rounds in found.items():
            pairs = [(one[labels[0]], one[label]) for one in rounds.values() if {labels[0], label} <= set(one)]
            ratios = [[second[name] / first[name] for first, second in pairs if first.get(name) and second.get(name)]
                      for name in names]  # fmt: skip
            shown = ["-" if value is None else str(value) for value in load]
            rows.append([*shown, str(len(pairs)), *map(_spread, ratios)])
        made.append(ServiceRatios(f"{label} / {labels[0]}", headings, rows))
    return made


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return "-"
    spread = f" ({min(ratios):.2f}-{max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{statistics.median(ratios):.2f}x{spread}"


def best_rate(best: Json) -> str:
    """Return the result of a search for the highest rate within the limits."""
    rate = best["max_rate_within_slo"]
    if rate is None:
        return f"no rate, down to {best['lowest_rate_beyond_slo']:g} requests/s"
    at_least = "at least " if best["lowest_rate_beyond_slo"] is None else ""
    return f"{at_least}{rate:g} requests/s ({best['goodput_share']:.0%} within)"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _number(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
