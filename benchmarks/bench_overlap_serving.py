"""Overlap scheduling end to end on CPU: a monolith with one step in flight against one that takes steps one by one.

    python -m benchmarks.bench_overlap_serving [--rounds 5] [--write]

`bench_overlap` asks the same of the executor alone. Here two real servers of the same model and threads, both up for
the whole run, serve the same `--streams` streams over HTTP in turn; ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.load import Load, whole_figures
from benchmarks.servers import monolith

OFF, ON = "one by one", "one in flight"
FLAGS = {OFF: "--disable-overlap-schedule", ON: "--no-disable-overlap-schedule"}
METRICS = (
    ("output_tok_s", "output tok/s", 1),
    ("itl_p50_ms", "ITL p50, ms", 1),
    ("itl_p99_ms", "ITL p99, ms", 1),
)


def measure(args: argparse.Namespace, url: str, seed: int, output_len: int) -> dict[str, float]:
    """All streams once.

    Raises:
        RuntimeError: a request failed.
    """
    load = Load(
        num_prompts=args.streams, concurrency=args.streams, input_len=args.input_len, output_len=output_len,
        seed=seed, vocab_size=args.vocab_size,
    )  # fmt: skip
    found = whole_figures(load, url)
    return {
        "output_tok_s": found["output_throughput"],
        "itl_p50_ms": found["median_itl_ms"],
        "itl_p99_ms": found["p99_itl_ms"],
    }


def run_rounds(args: argparse.Namespace, urls: dict[str, str]) -> report.Rounds:
    """Warm up, then both in turn."""
    for url in urls.values():
        measure(args, url, 0, 8)
    return report.interleaved_rounds(
        list(urls), args.rounds, lambda side, index: measure(args, urls[side], args.seed + index + 1, args.output_len)
    )


def document(args: argparse.Namespace, facts: dict[str, Any], rounds: report.Rounds) -> str:
    """The whole report in Markdown."""
    return f"""# Overlap scheduling on CPU, {facts["date"]}

{args.model}, {args.dtype}: {args.streams} streams of {args.output_len} tokens, prompts of {args.input_len}; monoliths \
with {args.threads} thread(s). Median of {args.rounds} interleaved rounds (least-most).

{report.sides_table("steps", rounds, METRICS)}

{report.footer(facts, own_load=args.threads)}
"""


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    report.add_model_flags(parser)
    add("--streams", type=int, default=8)
    add("--input-len", type=int, default=64)
    add("--output-len", type=int, default=128)
    add("--threads", type=int, default=2, help="torch threads of each server")
    add("--rounds", type=int, default=5)
    report.add_write_flags(parser, "overlap-cpu")
    args = parser.parse_args(argv)
    if min(args.streams, args.rounds, args.threads) < 1 or args.output_len < 2:
        parser.error("--streams, --rounds and --threads must be at least 1, --output-len 2")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked."""
    args = parse_flags(argv)
    bench = report.Run("overlap-cpu", argv, module="bench_overlap_serving")
    print(bench.machine, flush=True)
    with contextlib.ExitStack() as stack:
        urls = {
            side: stack.enter_context(monolith(args.model, args.dtype, threads=args.threads, flags=[flag]))
            for side, flag in FLAGS.items()
        }
        rounds = run_rounds(args, urls)
    facts = bench.facts(rounds=rounds)
    text = document(args, facts, rounds)
    bench.publish(args, text, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
