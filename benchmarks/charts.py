"""Draws the README's charts from stored results, as SVG that is readable on light and dark pages.

    python -m benchmarks.charts [--interference FILE.json] [--throughput FILE.json]

- `docs/images/interference.svg`: ITL p99 and tokens/s of streams while long prompts arrive, from
  `bench_interference --peers --write`.
- `docs/images/throughput.svg`: tokens/s at 1 to 64 streams, from `compare_cpu --write`: output tokens/s, or decode
  tokens/s from results that were stored before `compare_cpu` measured the former.

By default each is drawn from the newest `results/<date>-interference-peers.json` and `results/<date>-cpu-peers.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.report import Spread, spread_of
from pdserve.bench.svg import Svg, nice_top

IMAGES = report.ROOT / "docs" / "images"
SYSTEMS = {
    "pdserve 1P1D": ("pdserve, pair", "series1"),
    "pdserve": ("pdserve, one server", "series4"),
    "vllm": ("vLLM, CPU build", "series2"),
    "llama bf16": ("llama.cpp server", "series3"),
}
"""Those of a chart by their name in the results, in the order of the rows: label, and class of the colour."""
WIDTH = 830
ROW, BAR = 30, 18


def newest(name: str) -> Path:
    """The newest stored result of a name. Raises FileNotFoundError where there is none."""
    found = sorted(report.RESULTS.glob(f"????-??-??-{name}.json"))
    if not found:
        raise FileNotFoundError(f"no {report.RESULTS}/<date>-{name}.json")
    return found[-1]


def subtitle(facts: Mapping[str, Any], num_rounds: int) -> str:
    """Model, processor, date and rounds of a run, and whether other processes used the cores."""
    host = facts["machine"]
    shared = ", shared with other work" if host["load_1m"] >= report.QUIET_LOAD else ""
    rounds = f"median of {num_rounds} rounds (line: range)" if num_rounds > 1 else "one round"
    return f"SmolLM2-135M, bf16, {host['cpus']} cores of {host['cpu_model']}{shared}, {facts['date']}; {rounds}"


def interference(facts: Mapping[str, Any]) -> str:
    """Two panels of horizontal bars, a row for each system. Raises KeyError where the result lacks a system."""
    found = {entry["system"]: entry["rounds"] for entry in facts["rounds"]}
    flags = facts["flags"]
    svg = Svg(WIDTH, 106 + ROW * len(SYSTEMS))
    svg.text(16, 26, f"{flags['streams']} streams while prompts of {flags['prompt_len']:,} tokens arrive", "title")
    svg.text(16, 46, subtitle(facts, flags["rounds"]), "note")
    panels = (
        ("ITL p99 of the streams, ms (lower is better)", "itl_p99_ms", 180, 290),
        ("streams' tokens/s (higher is better)", "stream_tok_s", 530, 230),
    )
    for heading, metric, left, width in panels:
        spreads = {name: spread_of([one[metric] for one in found[name]]) for name in SYSTEMS}
        top = max(spread.high for spread in spreads.values())
        svg.text(left, 76, heading, "axis")
        for row, (name, spread) in enumerate(spreads.items()):
            label, colour = SYSTEMS[name]
            y = 88 + ROW * row
            if metric == "itl_p99_ms":
                svg.text(left - 10, y + 13, label, "label end")
            horizontal_bar(svg, (left, y), width / top, spread, colour)
        svg.line(left, 84, left, 88 + ROW * len(SYSTEMS), "grid")
    return svg.render("ITL and tokens per second of streams while long prompts arrive, by server")


def horizontal_bar(svg: Svg, at: tuple[float, float], scale: float, spread: Spread, colour: str) -> None:
    """A bar from `at` to the right with its range and its value; `scale` is pixels by unit."""
    x, y = at
    svg.rect(x, y, max(1.5, spread.median * scale), BAR, colour)
    if spread.high > spread.low:
        svg.line(x + spread.low * scale, y + BAR / 2, x + spread.high * scale, y + BAR / 2, "range")
    svg.text(x + max(spread.high * scale, 1.5) + 6, y + 13, f"{spread.median:,.0f}", "value")


def throughput(facts: Mapping[str, Any]) -> str:
    """Vertical bars, a group for each number of streams. A system without a decode rate there has a dash."""
    whole = all("output_tok_s" in one for entry in facts["decode"] for one in entry["rounds"])
    metric, heading = ("output_tok_s", "Output") if whole else ("decode_tok_s", "Decode")
    found = {(entry["system"], entry["size"]): [one[metric] for one in entry["rounds"]] for entry in facts["decode"]}
    sizes = sorted({size for _, size in found})
    height, base, left, right = 330, 280, 56, WIDTH - 16
    svg = Svg(WIDTH, height)
    svg.text(16, 26, f"{heading} tokens/s by number of streams (higher is better)", "title")
    svg.text(16, 46, subtitle(facts, len(facts["decode"][0]["rounds"])), "note")
    legend(svg, 16, 62)
    top, step = nice_top(max(max(values) for (name, _), values in found.items() if name in SYSTEMS))
    scale = (base - 92) / top
    for tick in (step * index for index in range(round(top / step) + 1)):
        y = base - tick * scale
        svg.line(left, y, right, y, "grid")
        svg.text(left - 8, y + 4, f"{tick:,.0f}", "tick end")
    group = (right - left) / len(sizes)
    bar = group * 0.86 / len(SYSTEMS)
    for index, size in enumerate(sizes):
        begin = left + index * group + group * 0.07
        for place, (name, (_, colour)) in enumerate(SYSTEMS.items()):
            vertical_bar(svg, (begin + place * bar, base), bar - 3, scale, found.get((name, size), []), colour)
        svg.text(left + (index + 0.5) * group, base + 20, f"{size} stream{'s' if size > 1 else ''}", "label middle")
    note = "output tokens of all streams by the time from the first request to the last token, prompts included"
    no_rate = "–: the first streams end before the last one has its first token, so no rate"
    svg.text(16, height - 12, note if whole else no_rate, "note")
    return svg.render(f"{heading} tokens per second at 1 to 64 streams, by server")


def vertical_bar(
    svg: Svg, at: tuple[float, float], width: float, scale: float, values: Sequence[float], colour: str
) -> None:
    """A bar from `at` upwards with its range and its value; a dash where a round has no rate."""
    x, base = at
    if not values or min(values) <= 0:
        svg.text(x + width / 2, base - 6, "–", "value middle")
        return
    spread = spread_of(values)
    svg.rect(x, base - spread.median * scale, width, spread.median * scale, colour)
    if spread.high > spread.low:
        svg.line(x + width / 2, base - spread.low * scale, x + width / 2, base - spread.high * scale, "range")
    svg.text(x + width / 2, base - spread.high * scale - 5, f"{spread.median:,.0f}", "value middle")


def legend(svg: Svg, x: float, y: float) -> None:
    """The systems' colours in a row."""
    for label, colour in SYSTEMS.values():
        svg.rect(x, y, 12, 12, colour)
        svg.text(x + 18, y + 10, label, "label")
        x += 36 + 6.6 * len(label)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--interference", type=Path, help="a result of bench_interference --peers; default: the newest")
    add("--throughput", type=Path, help="a result of compare_cpu; default: the newest")
    add("--images", type=Path, default=IMAGES, help="where to")
    args = parser.parse_args(argv)
    args.images.mkdir(parents=True, exist_ok=True)
    for name, draw, path in (
        ("interference", interference, args.interference or newest("interference-peers")),
        ("throughput", throughput, args.throughput or newest("cpu-peers")),
    ):
        target = args.images / f"{name}.svg"
        target.write_text(draw(json.loads(path.read_text())))
        print(f"wrote {target} from {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
