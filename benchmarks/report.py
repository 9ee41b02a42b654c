"""What every benchmark's report has: the machine, the revision, medians with their spread, Markdown tables, files.

Called by the scripts of this folder. Imports nothing that a GPU machine with torch alone would not have.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from pdserve.base.env import OPENMP_WAIT, keep_openmp_from_spinning
from pdserve.base.host_facts import cpu_model

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
QUIET_LOAD = 1.5
"""One-minute load average below which real time may be measured."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median of several rounds with the smallest and largest of them."""

    median: float
    low: float
    high: float

    def show(self, digits: int = 0, unit: str = "") -> str:
        """`median (low-high)`; the median alone when all rounds are one."""
        middle = f"{self.median:.{digits}f}{unit}"
        if self.low == self.high:
            return middle
        return f"{middle} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def spread_of(values: Sequence[float]) -> Spread:
    """Median, least and most of `values`, of which there is at least one."""
    return Spread(statistics.median(values), min(values), max(values))


def ratios(values: Sequence[float], peers: Sequence[float]) -> Spread:
    """`values[i] / peers[i]`: rounds are compared with the peer's round beside them, then the median is taken."""
    return spread_of([value / peer for value, peer in zip(values, peers, strict=True)])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, num_text: int = 1) -> str:
    """A Markdown table with padded columns: the first `num_text` columns to the left, all others to the right."""
    widths = [max(2, *(len(row[i]) for row in (header, *rows))) for i in range(len(header))]
    rule = [":" + "-" * (w - 1) if i < num_text else "-" * (w - 1) + ":" for i, w in enumerate(widths)]

    def line(cells: Sequence[str]) -> str:
        pairs = enumerate(zip(cells, widths, strict=True))
        return "| " + " | ".join(c.ljust(w) if i < num_text else c.rjust(w) for i, (c, w) in pairs) + " |"

    return "\n".join([line(header), line(rule), *(line(row) for row in rows)])


Rounds = dict[str, list[dict[str, float]]]
"""For each side the metrics of each round."""


def interleaved_rounds(sides: Sequence[str], count: int, measure: Callable[[str, int], dict[str, float]]) -> Rounds:
    """Measure all sides `count` times in turn; the first side changes with the round. `measure` gets side and round."""
    rounds: Rounds = {side: [] for side in sides}
    for index in range(count):
        for side in sides if index % 2 == 0 else reversed(sides):
            rounds[side].append(measure(side, index))
            print(f"round {index} {side:<25} {rounds[side][-1]}", flush=True)
    return rounds


def sides_table(head: str, rounds: Rounds, metrics: Sequence[tuple[str, str, int]]) -> str:
    """A table of both sides and the ratio of the second to the first; `metrics`: key, label and digits of each."""
    rows = [
        [side, *(spread_of([one[name] for one in found]).show(digits) for name, _, digits in metrics)]
        for side, found in rounds.items()
    ]
    off, on = rounds
    found = [ratios([one[name] for one in rounds[on]], [one[name] for one in rounds[off]]) for name, _, _ in metrics]
    rows.append([f"{on} / {off}", *(one.show(2, "x") for one in found)])
    return markdown_table([head, *(label for _, label, _ in metrics)], rows)


def machine() -> dict[str, Any]:
    """What this run has of the machine; `load_1m` says how busy others kept it before."""
    return {
        "cpu_model": cpu_model(),
        "cpus": os.cpu_count(),
        "cpus_used": sorted(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_1m": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def busy_note(*loads: float) -> str:
    """A sentence when others kept the machine busy before the run: real time measured then says little."""
    if max(loads) < QUIET_LOAD:
        return "The cores were quiet before the run."
    return "**Others used the cores, so times and their ratios are rough: repeat this on quiet cores.**"


def footer(facts: dict[str, Any], notes: Sequence[str] = (), *, own_load: int | None = None) -> str:
    """The last lines of a report on real time: machine, `notes`, how quiet it was, revision, and the command.

    `own_load` is what the run itself adds to the load, where `facts` have the load after it.
    """
    host = facts["machine"]
    load = f"load before the run {host['load_1m']}"
    if own_load is not None:
        load += f", after it {facts['load_after']} (the run itself is about {own_load})"
    lines = [
        f"Machine: {host['cpu_model']}, {host['cpus']} cores, {host['platform']}; {load}.",
        *notes,
        busy_note(host["load_1m"]),
        f"Revision {facts['revision']}; the run took {facts['duration_s']:.0f} s.",
        f"Command: `{facts['command']}`",
    ]
    return "\n".join(f"- {line}" for line in lines)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which model the servers have, and which tokens it knows."""
    parser.add_argument("--model", default="smollm2", help="as --model-path of a server")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--vocab-size", type=int, default=1000, help="random token ids are 10 to this")
    parser.add_argument("--seed", type=int, default=0)


def add_write_flags(parser: argparse.ArgumentParser, name: str) -> None:
    """Whether and where results go."""
    parser.add_argument("--write", action="store_true", help=f"write <date>-{name}.md and .json")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to")


def git_revision() -> str:
    """Short hash of HEAD, "+changes" behind it when tracked files but results differ; "unknown" outside a checkout."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
        return head + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*args: str) -> str:
    """The output of a git command in the checkout."""
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def command_line(module: str, argv: Sequence[str] | None) -> str:
    """The command that repeats this run from the checkout's root."""
    return f"python -m {module} " + shlex.join(sys.argv[1:] if argv is None else list(argv))


def today() -> str:
    """The date in results' names."""
    return time.strftime("%Y-%m-%d")


class Run:
    """One run of a benchmark's script, from its start to its files.

    `name` is in the files' names; the script is `benchmarks.bench_<name>` unless `module` says otherwise.
    """

    def __init__(self, name: str, argv: Sequence[str] | None, *, module: str | None = None) -> None:
        self._name = name
        self._command = command_line(f"benchmarks.{module or f'bench_{name}'}", argv)
        self._began = time.perf_counter()
        self.machine = machine()

    def facts(self, **more: Any) -> dict[str, Any]:
        """What every report has, asked for when all is measured, and `more`."""
        return {
            "date": today(),
            "command": self._command,
            "revision": git_revision(),
            "machine": self.machine,
            "load_after": round(os.getloadavg()[0], 2),
            "duration_s": time.perf_counter() - self._began,
            **more,
        }

    def publish(self, args: argparse.Namespace, text: str, facts: dict[str, Any]) -> None:
        """Print the report, and write it when asked; `args` have what `add_write_flags` adds."""
        print("\n" + text)
        if args.write:
            for path in write_results(args.results, self._name, text, facts):
                print(f"wrote {path}")


def restart_without_spinning(module: str) -> None:
    """Start `benchmarks.<module>` again with OpenMP's threads asleep between torch's operations, as a server has them.

    Else they spin for milliseconds behind each, on the cores of whatever is measured next. Only where a script is the
    program, first thing: OpenMP reads the variable when torch is imported.
    """
    if OPENMP_WAIT not in os.environ:
        keep_openmp_from_spinning()
        os.execv(sys.executable, [sys.executable, "-m", f"benchmarks.{module}", *sys.argv[1:]])


def write_results(directory: Path, name: str, text: str, facts: dict[str, Any]) -> list[Path]:
    """Write `<date>-<name>.md` and `.json` into `directory`; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{today()}-{name}{suffix}" for suffix in (".md", ".json")]
    paths[0].write_text(text.rstrip() + "\n")
    paths[1].write_text(json.dumps(facts, indent=2, allow_nan=False) + "\n")
    return paths
