"""Optimistic prefill: TTFT of a pair whose decode server is full, with `--optimistic-prefill-attempts` and without.

    python -m benchmarks.bench_optimistic [--rounds 5] [--write]

Decode's pool holds `--fits` of the `--concurrency` requests that are under way, so the others wait for its pages. Two
real pairs of the same model, both up for the whole run, serve the same requests in turn; ratios are taken within a
round.
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
from benchmarks.servers import pair

OFF, ON = "waits for decode's pages", "optimistic"
PAGE_TOKENS, RESERVED = 16, 32
METRICS = (
    ("ttft_p50_ms", "TTFT p50, ms", 0),
    ("ttft_p99_ms", "TTFT p99, ms", 0),
    ("output_tok_s", "output tok/s", 1),
    ("itl_p99_ms", "ITL p99, ms", 1),
)


def decode_tokens(args: argparse.Namespace) -> int:
    """Token slots of decode's pool."""
    each: int = args.input_len + args.output_len + RESERVED + PAGE_TOKENS
    num_tokens: int = -(-args.fits * each // PAGE_TOKENS) * PAGE_TOKENS
    return num_tokens


def measure(args: argparse.Namespace, url: str, seed: int, count: int) -> dict[str, float]:
    """All requests once.

    Raises:
        RuntimeError: a request failed.
    """
    load = Load(
        num_prompts=count, concurrency=args.concurrency, input_len=args.input_len, output_len=args.output_len,
        seed=seed, vocab_size=args.vocab_size,
    )  # fmt: skip
    found = whole_figures(load, url)
    return {
        "ttft_p50_ms": found["median_ttft_ms"],
        "ttft_p99_ms": found["p99_ttft_ms"],
        "output_tok_s": found["output_throughput"],
        "itl_p99_ms": found["p99_itl_ms"],
    }


def run_rounds(args: argparse.Namespace, urls: dict[str, str]) -> report.Rounds:
    """Warm up, then both in turn."""
    for url in urls.values():
        measure(args, url, 0, args.concurrency)
    return report.interleaved_rounds(
        list(urls), args.rounds, lambda side, index: measure(args, urls[side], args.seed + index + 1, args.requests)
    )


def document(args: argparse.Namespace, facts: dict[str, Any], rounds: report.Rounds) -> str:
    """The whole report in Markdown."""
    return f"""# Optimistic prefill on CPU, {facts["date"]}

{args.model}, {args.dtype}: {args.requests} requests, {args.concurrency} at a time, prompts of {args.input_len} tokens \
and {args.output_len} output tokens; decode's pool has {decode_tokens(args)} tokens, for {args.fits} of them. \
1P1D with {args.threads} thread(s) each. Median of {args.rounds} interleaved rounds (least-most).

{report.sides_table("prefill", rounds, METRICS)}

{report.footer(facts, own_load=2 * args.threads)}
"""


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    report.add_model_flags(parser)
    add("--requests", type=int, default=16)
    add("--concurrency", type=int, default=6)
    add("--fits", type=int, default=3, help="requests that decode's pool holds")
    add("--input-len", type=int, default=256)
    add("--output-len", type=int, default=32)
    add("--threads", type=int, default=1, help="torch threads of each server")
    add("--rounds", type=int, default=5)
    report.add_write_flags(parser, "optimistic")
    args = parser.parse_args(argv)
    if min(args.requests, args.rounds, args.threads, args.fits) < 1 or args.output_len < 2:
        parser.error("--requests, --rounds, --threads and --fits must be at least 1, --output-len 2")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked."""
    args = parse_flags(argv)
    bench = report.Run("optimistic", argv, module="bench_optimistic")
    print(bench.machine, flush=True)
    sizes = ["--page-size", str(PAGE_TOKENS)]
    decode = [*sizes, "--max-total-tokens", str(decode_tokens(args)), "--num-reserved-decode-tokens", str(RESERVED)]
    attempts = {OFF: "0", ON: "4"}
    with contextlib.ExitStack() as stack:
        urls = {}
        for side, count in attempts.items():
            prefill = [*sizes, "--optimistic-prefill-attempts", count]
            urls[side] = stack.enter_context(
                pair(args.model, args.dtype, threads=args.threads, prefill_flags=prefill, decode_flags=decode)
            )
        rounds = run_rounds(args, urls)
    facts = bench.facts(rounds=rounds)
    text = document(args, facts, rounds)
    bench.publish(args, text, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
