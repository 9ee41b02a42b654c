"""A load that needs several times the KV memory there is, against the same load with enough of it.

    python -m benchmarks.bench_overcommit [--rounds 2] [--write]

All requests are sent at once. `enough` has a pool for all of them together; the others have `1 / --times` of it, and
give way by computing again (`recompute`) or by copying to host memory (`offload`). Monolith and 1P1D, each variant on
servers of its own that are up for the whole run and work in turn. A request that fails counts as an error; so does
what the servers' self-audit finds afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.load import Load, figures, run
from benchmarks.servers import local_pair, monolith
from pdserve.memory.layout import pages_for

SYSTEMS = ("monolith", "1P1D")
VARIANTS = ("enough", "recompute", "offload")
OFFLOAD = "--disaggregation-decode-retraction-backup=cpu_tensor"
PAGE_TOKENS = 16
COUNTERS = ("requests_retracted", "recomputed_tokens", "offloaded_pages", "restored_pages", "audit_differences")
READ_S = 30.0
Rounds = dict[tuple[str, str], list[dict[str, float]]]
"""For each system and variant the numbers of each round."""


def tokens_of_all(args: argparse.Namespace) -> int:
    """KV tokens of all requests at their ends, in whole pages."""
    num_pages: int = args.requests * pages_for(args.input_len + args.output_len, PAGE_TOKENS)
    return num_pages * PAGE_TOKENS


def flags_of(args: argparse.Namespace, system: str, variant: str) -> list[str]:
    """Flags of the servers of a variant.

    Decode keeps little free for those that run: by default it accepts no more than surely fit, so that nothing of this
    size would ever give way.
    """
    total = tokens_of_all(args)
    pool = total if variant == "enough" else pages_for(total // args.times, PAGE_TOKENS) * PAGE_TOKENS
    flags = ["--max-total-tokens", str(pool), "--max-running-requests", str(args.requests)]
    flags += ["--page-size", str(PAGE_TOKENS), "--schedule-conservativeness", str(args.conservativeness)]
    if system == "1P1D":
        flags += ["--num-reserved-decode-tokens", str(args.reserved_decode_tokens)]
    return flags + ([OFFLOAD] if variant == "offload" else [])


def counters_of(url: str) -> dict[str, float]:
    """The scheduler's counters that matter here; of 1P1D, decode's. `audit` counts what does not add up just now."""
    with urllib.request.urlopen(url + "/get_server_info", timeout=READ_S) as response:
        info = json.load(response)
    return {name: float(info["counters"].get(name, 0)) for name in COUNTERS} | {"audit": float(len(info["audit"]))}


def measure(args: argparse.Namespace, url: str, seed: int) -> dict[str, float]:
    """One load on one system."""
    before = counters_of(url)
    load = Load(
        num_prompts=args.requests, concurrency=args.requests, input_len=args.input_len, output_len=args.output_len,
        seed=seed, vocab_size=args.vocab_size, timeout_s=args.timeout,
    )  # fmt: skip
    outcome = run(load, url)
    summary = figures(outcome.records, outcome.duration_s)
    for error in summary["error_messages"]:
        print(f"error: {error}", file=sys.stderr)
    after = counters_of(url)
    short = args.requests * args.output_len - summary["total_output_tokens"]
    return {
        "output_tok_s": summary["output_throughput"],
        "duration_s": summary["duration"],
        "errors": summary["failed"] + (summary["failed"] == 0 and short != 0),
        "audit": after["audit"] + after["audit_differences"],
        **{name: after[name] - before[name] for name in COUNTERS[:-1]},
    }


def run_rounds(args: argparse.Namespace, urls: dict[tuple[str, str], str]) -> Rounds:
    """A short load each to warm up, then all in turn; the order changes with the round."""
    warm = argparse.Namespace(**vars(args) | {"output_len": 4, "requests": 4})
    for url in urls.values():
        measure(warm, url, 0)
    rounds: Rounds = {key: [] for key in urls}
    for index in range(args.rounds):
        for system in SYSTEMS:
            for variant in VARIANTS[index % 3 :] + VARIANTS[: index % 3]:
                found = measure(args, urls[system, variant], args.seed + index + 1)
                rounds[system, variant].append(found)
                print(f"round {index} {system:<8} {variant:<9} {found}", flush=True)
    return rounds


def values(found: Sequence[dict[str, float]], name: str) -> list[float]:
    """One number over the rounds."""
    return [one[name] for one in found]


def table(rounds: Rounds) -> str:
    """Medians with their range; ratios to the same round of the same system with enough memory."""
    header = ["system", "KV memory", "output tok/s", "/ enough", "retractions", "recomputed tokens", "pages to host"]
    rows = []
    for (system, variant), found in rounds.items():
        rates = values(found, "output_tok_s")
        ratio = report.ratios(rates, values(rounds[system, "enough"], "output_tok_s"))
        names = ("requests_retracted", "recomputed_tokens", "offloaded_pages")
        rows.append(
            [system, variant, report.spread_of(rates).show(1), ratio.show(2, "x")]
            + [report.spread_of(values(found, name)).show() for name in names]
            + [f"{sum(values(found, 'errors')):.0f}", f"{sum(values(found, 'audit')):.0f}"]
        )
    return report.markdown_table([*header, "errors", "audit differences"], rows, num_text=2)


def num_errors(rounds: Rounds) -> float:
    """Failed requests and audit differences of all rounds."""
    return sum(one["errors"] + one["audit"] for found in rounds.values() for one in found)


def document(args: argparse.Namespace, facts: dict[str, Any], rounds: Rounds) -> str:
    """The whole report in Markdown."""
    total = tokens_of_all(args)
    notes = [
        f"Threads: monolith {args.threads}, prefill and decode {args.threads // 2} each. Of 1P1D the counts are "
        "decode's, and both servers' pools are that small.",
        f"Flags of the smaller ones: `{' '.join(flags_of(args, '1P1D', 'offload'))}`.",
    ]
    return f"""# {args.times} times more load than KV memory, {facts["date"]}

{args.model}, {args.dtype}: {args.requests} requests at once, prompts of {args.input_len} random tokens, \
{args.output_len} out: {total} tokens of KV. `enough` has a pool of that size, the others {args.times} times less. \
Median of {args.rounds} interleaved rounds (least-most). Errors in all: **{num_errors(rounds):.0f}**.

{table(rounds)}

{report.footer(facts, notes)}
"""


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    report.add_model_flags(parser)
    add("--requests", type=int, default=24)
    add("--input-len", type=int, default=64)
    add("--output-len", type=int, default=144)
    add("--times", type=int, default=3, help="how many times too small the pool is")
    add("--conservativeness", type=float, default=0.3, help="--schedule-conservativeness of all servers")
    add("--reserved-decode-tokens", type=int, default=16, help="--num-reserved-decode-tokens of decode")
    add("--threads", type=int, default=2, help="torch threads in all; each server of the pair has half")
    add("--rounds", type=int, default=2)
    add("--timeout", type=float, default=300.0, help="seconds a request may take")
    report.add_write_flags(parser, "overcommit")
    args = parser.parse_args(argv)
    if min(args.requests, args.rounds, args.times) < 1 or args.threads < 2 or args.threads % 2:
        parser.error("--requests, --rounds and --times must be at least 1, --threads even")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked; exit status 1 when there was an error."""
    args = parse_flags(argv)
    bench = report.Run("overcommit", argv)
    print(bench.machine, flush=True)
    with contextlib.ExitStack() as stack:
        urls: dict[tuple[str, str], str] = {}
        for variant in VARIANTS:
            flags = flags_of(args, "monolith", variant)
            urls["monolith", variant] = stack.enter_context(
                monolith(args.model, args.dtype, threads=args.threads, flags=flags)
            )
        for variant in VARIANTS:
            flags = flags_of(args, "1P1D", variant)
            urls["1P1D", variant] = stack.enter_context(
                local_pair(args.model, args.dtype, threads=args.threads // 2, flags=flags)
            )
        rounds = run_rounds(args, urls)
    facts = bench.facts(
        rounds=[{"system": s, "variant": variant, "rounds": found} for (s, variant), found in rounds.items()],
    )
    text = document(args, facts, rounds)
    bench.publish(args, text, facts)
    return 0 if num_errors(rounds) == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
