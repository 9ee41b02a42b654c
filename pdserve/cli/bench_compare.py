"""`pdserve bench compare`: joins results of several benchmarks into one table, chart and report.

Exit status: 0, 2 for a file without results or a wrong flag.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from pdserve.bench import html_report, text_report
from pdserve.bench.bars import DEFAULT_METRICS, bar_chart
from pdserve.bench.charts import NamedChart
from pdserve.bench.results import joined, read_report
from pdserve.cli.bench import check_writable, write
from pdserve.cli.help_pages import CommandParser
from pdserve.errors import ConfigError

DEFAULT_TITLE = "Serving benchmarks"
OUTPUTS = ("output_svg", "output_png", "output_html", "output_json")
PNG_WIDTH = 1660


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of `pdserve bench compare`."""
    text = "Joins results of `pdserve bench --output-json`: a table with ratios to the first service, charts, a report."
    parser = CommandParser(prog="pdserve bench compare", allow_abbrev=False, description=text)
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="results, also those of an earlier comparison")
    add("--labels", nargs="+", metavar="NAME", help="names of the services, in the order of the files")
    add("--metric", nargs="+", default=list(DEFAULT_METRICS), metavar="FIELD",
        help=f"fields of the results, a panel of the chart for each ({' '.join(DEFAULT_METRICS)})")  # fmt: skip
    add("--title", default=DEFAULT_TITLE, help="first line of the chart")
    add("--note", help="line below it; by default model, lengths, machine, date and rounds")
    add("--output-svg", type=Path, metavar="FILE", help="write the chart, for light and dark pages")
    add("--output-png", type=Path, metavar="FILE", help="write the chart as an image (pip install 'pdserve[bench]')")
    add("--output-html", type=Path, metavar="FILE", help="write a report with this chart and those of pdserve bench")
    add("--output-json", type=Path, metavar="FILE", help="write all runs to one file, without their distributions")
    return parser


def main(argv: Sequence[str]) -> int:
    """Join, print and write; return the exit status. Raises ConfigError naming the flag or the file."""
    args = make_parser().parse_args(argv)
    for name in OUTPUTS:
        check_writable(name, getattr(args, name))
    if args.output_png is not None:
        html_report.check_png()
    names = [str(path) for path in args.files]
    if len(set(names)) < len(names):
        raise ConfigError("FILE: one is given twice", field="files")
    report = joined({name: read_report(Path(name)) for name in names}, args.labels)
    chart = bar_chart(report, args.metric, title=args.title, note=args.note)
    print(text_report.table(report["results"]))
    if args.output_svg is not None:
        write(args.output_svg, chart.render(args.title), "--output-svg")
    if args.output_png is not None:
        write(args.output_png, html_report.image(chart, PNG_WIDTH), "--output-png")
    if args.output_html is not None:
        write(args.output_html, html_report.page(report, [NamedChart(title=args.title, svg=chart)]), "--output-html")
    if args.output_json is not None:
        write(args.output_json, json.dumps(report, indent=1, allow_nan=False) + "\n", "--output-json")
    return 0
