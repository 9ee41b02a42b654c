"""Makes the README's charts with `pdserve bench`: a pair, one server, vLLM's CPU build and llama.cpp's server in turn.

    scripts/setup_peers.sh vllm llama                 # once
    python -m benchmarks.readme_charts [--rounds 3] [--root FOLDER] [--keep FOLDER]

Each service has the same cores, bf16 and its default settings but for the size of the KV pool, and runs alone. Two
commands of `pdserve bench` measure it:

- throughput: N requests at once for each of `--streams`; tokens/s of all of them, prompts included;
- interference: `STREAMS` streams, alone and beside a client that sends one long prompt after the other. The first
  seconds of a run do not count, and its end cuts the streams.

`pdserve bench compare` then draws `docs/images/<chart>.svg` and joins the results in `benchmarks/results`, beside a
report with their tables and all commands. `--root` is the folder that has `docs` and `benchmarks`. The cores must be
quiet. With `--keep` the results of single services stay in a folder, and a service that has them is not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.compare_cpu import loud_notes, wait_for_quiet
from benchmarks.peers import KINDS, REQUESTED_NAME, SMOLLM2

SERVICES = {
    "pdserve 1P1D": "pdserve, pair",
    "pdserve": "pdserve, one server",
    "vllm": "vLLM, CPU build",
    "llama bf16": "llama.cpp server",
}
"""Names of `peers.KINDS`, and those in the charts."""
STREAMS, STREAM_PROMPT_LEN, LONG_PROMPT_LEN, LONG_OUTPUT_LEN = 8, 32, 1500, 4
WARMUP_S = 3.0
BENCH_TIMEOUT_S = 900.0


@dataclasses.dataclass(frozen=True)
class ReadmeChart:
    """One chart: its name in files, its title, and the fields of the results that it shows."""

    name: str
    title: str
    metrics: tuple[str, ...]


CHARTS = (  # in the order of the runs: the first has a warm-up, which the second does without
    ReadmeChart("throughput", "1 to 64 streams at a time", ("output_throughput",)),
    ReadmeChart(
        "interference", f"{STREAMS} streams, alone and while long prompts arrive", ("p99_itl_ms", "output_throughput")
    ),
)


def bench_words(chart: str, args: argparse.Namespace) -> list[str]:
    """Return the words of `pdserve bench` that make the load of a chart."""
    words = ["--model", REQUESTED_NAME, "--prompt-type", "text", "--ignore-eos", "--num-rounds", str(args.rounds)]
    words += ["--seed", str(args.seed)]
    if chart == "throughput":
        words += ["--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)]
        return [*words, "--prompts-per-concurrency", "1", "--max-concurrency", *map(str, args.streams)]
    words += ["--random-input-len", str(STREAM_PROMPT_LEN), "--random-output-len", "1024"]
    words += ["--num-prompts", str(STREAMS), "--max-concurrency", str(STREAMS), "--num-warmups", "0"]
    words += ["--duration", f"{WARMUP_S + args.seconds:g}", "--warmup-duration", f"{WARMUP_S:g}"]
    words += ["--background-concurrency", "0", "1", "--background-input-len", str(LONG_PROMPT_LEN)]
    return [*words, "--background-output-len", str(LONG_OUTPUT_LEN)]


def compare_words(chart: ReadmeChart, files: Sequence[Path], root: Path) -> list[str]:
    """Return the words of `pdserve bench compare` that draw a chart from results."""
    words = [*map(str, files), "--title", chart.title, "--metric", *chart.metrics]
    words += ["--output-svg", str(root / "docs/images" / f"{chart.name}.svg")]
    return [*words, "--output-json", str(results_file(root, chart.name))]


def results_file(root: Path, chart: str) -> Path:
    """Return where the joined results of a chart go today."""
    return root / "benchmarks/results" / f"{report.today()}-readme-{chart}.json"


def pdserve_bench(words: Sequence[str]) -> str:
    """Run `pdserve bench` with more words; return what it prints. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "pdserve", "bench", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=BENCH_TIMEOUT_S)
    return done.stdout


@dataclasses.dataclass(frozen=True)
class ServiceRun:
    """How a service was measured: seconds, load before it, and how many commands began while others computed."""

    seconds: float
    load_1m: float
    num_loud: int


def measured(name: str, args: argparse.Namespace, folder: Path) -> ServiceRun:
    """Measure a service, unless `folder` has its results."""
    kept = file_of(folder, "run", name)
    if kept.exists():
        return ServiceRun(**json.loads(kept.read_text()))
    found = measure(name, args, folder)
    kept.write_text(json.dumps(dataclasses.asdict(found)))
    return found


def measure(name: str, args: argparse.Namespace, folder: Path) -> ServiceRun:
    """Start a service, measure it and end it; its results are then in `folder`."""
    num_loud, load_1m = 0, report.machine()["load_1m"]
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        system = KINDS[name].start(stack, args.threads, SMOLLM2)
        print(f"{name} is up after {time.perf_counter() - began:.0f} s", flush=True)
        for chart in CHARTS:
            num_loud += not wait_for_quiet(psutil.cpu_percent)
            words = ["--base-url", getattr(system, "url"), "--label", SERVICES[name]]  # noqa: B009
            words += ["--output-json", str(file_of(folder, chart.name, name))]
            print(pdserve_bench([*words, *bench_words(chart.name, args)]), flush=True)
    found = ServiceRun(time.perf_counter() - began, load_1m, num_loud)
    print(f"{name} took {found.seconds:.0f} s", flush=True)
    return found


def file_of(folder: Path, chart: str, name: str) -> Path:
    """Return the file of a service's results."""
    return folder / f"{chart}-{name.replace(' ', '-')}.json"


def document(args: argparse.Namespace, facts: dict[str, Any], tables: dict[str, str], num_loud: int) -> str:
    """Return the report in Markdown."""
    sections = [
        f"## {chart.title}\n\n```\npdserve bench {shlex.join(bench_words(chart.name, args))}\n```\n\n"
        f"```\n{tables[chart.name].rstrip()}\n```\n"
        for chart in CHARTS
    ]
    notes = [
        f"Threads: {args.threads} for each service; prefill and decode of the pair have {args.threads // 2} each. The "
        "client and the router share these cores.",
        "Services have their default settings but for the size of the KV pool. Prompts are random common words.",
        *loud_notes(num_loud),
    ]
    head = (
        f"# The README's charts, {facts['date']}\n\nSmolLM2-135M-Instruct, bf16, one service at a time. Each command "
    )
    head += "ran with `--base-url` and `--label` of each service; `pdserve bench compare` joined the results."
    return "\n".join([head, "", *sections, report.footer(facts, notes, own_load=args.threads)])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all services, draw, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--systems", nargs="+", choices=tuple(SERVICES), default=list(SERVICES), help="default: all")
    add("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    add("--rounds", type=int, default=3)
    add("--input-len", type=int, default=128, help="words of a prompt of the throughput")
    add("--output-len", type=int, default=64, help="tokens of an answer of the throughput")
    add("--seconds", type=float, default=7.0, help="of a run with streams that count")
    add("--threads", type=int, default=2)
    add("--seed", type=int, default=0)
    add("--keep", type=Path, metavar="FOLDER", help="keep the results of single services here, and use them again")
    add("--root", type=Path, default=report.ROOT, help="where docs/images and benchmarks/results are")
    args = parser.parse_args(argv)
    if missing := [name for name in args.systems if not KINDS[name].can_serve()]:
        parser.error(f"not installed: {', '.join(missing)}; scripts/setup_peers.sh does that")
    bench = report.Run("readme", argv, module="readme_charts")
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    tables = {}
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="readme-charts-")))
        folder.mkdir(parents=True, exist_ok=True)
        runs = [measured(name, args, folder) for name in args.systems]
        for chart in CHARTS:
            files = [file_of(folder, chart.name, name) for name in args.systems]
            tables[chart.name] = pdserve_bench(["compare", *compare_words(chart, files, args.root)])
    facts = bench.facts(duration_s=sum(run.seconds for run in runs))
    facts["machine"]["load_1m"] = runs[0].load_1m
    num_loud = sum(run.num_loud for run in runs)
    target = args.root / "benchmarks/results" / f"{report.today()}-readme.md"
    target.write_text(document(args, facts, tables, num_loud).rstrip() + "\n")
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
