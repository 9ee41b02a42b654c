"""The first table: pdserve monolith, pdserve 1P1D and `transformers` `generate`, same prompts, same cores, one run.

    python -m benchmarks.compare_transformers [--rounds 3] [--write]

The servers are real ones, driven over HTTP by `load`; `generate` runs in a child process in padded batches of
the concurrency. All of them are up for the whole run; one works at a time, in an order that changes with the round,
so that what else the machine does hits each alike. Prompts are random token ids, new ones each round and concurrency,
the same for all three. Ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.generate_child import GenerateChild
from benchmarks.load import Load, figures, run
from benchmarks.servers import monolith_and_pair

PEER = "transformers"
SYSTEMS = ("monolith", "1P1D", PEER)
METRICS = (
    ("output_tok_s", "output tok/s", 1),
    ("ttft_p50_ms", "TTFT p50, ms", 0),
    ("itl_p50_ms", "ITL p50, ms", 1),
    ("itl_p99_ms", "ITL p99, ms", 1),
)
Rounds = dict[tuple[str, int], list[dict[str, float]]]
"""For each system and concurrency the metrics of each round."""


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2", help="as --model-path of a server")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    add("--rounds", type=int, default=3)
    add("--input-len", type=int, default=256, help="tokens per prompt")
    add("--output-len", type=int, default=64, help="tokens per answer; end of sequence is ignored")
    add("--vocab-size", type=int, default=1000, help="random token ids are 10 to this")
    add("--waves", type=int, default=2, help="prompts of a round are this times the concurrency, and at least 4")
    add("--threads", type=int, default=2, help="cores and torch threads in all; each server of the pair has half")
    add("--max-minutes", type=float, default=7.5, help="no further round when it would end after this")
    add("--seed", type=int, default=0)
    add("--write", action="store_true", help="write <date>-first-table.md and .json")
    add("--results", type=Path, default=report.RESULTS, help="where to")
    args = parser.parse_args(argv)
    if min(args.rounds, args.waves, *args.concurrency) < 1:
        parser.error("--rounds, --waves and --concurrency must be at least 1")
    if args.threads < 2 or args.threads % 2:
        parser.error("--threads must be even: the pair shares them")
    if args.threads > len(os.sched_getaffinity(0)):
        parser.error(f"--threads {args.threads}, but only {len(os.sched_getaffinity(0))} cores may be used")
    return args


def load_of(args: argparse.Namespace, concurrency: int, seed: int) -> Load:
    """The load of one measurement: a closed loop of `concurrency`."""
    return Load(
        num_prompts=max(4, args.waves * concurrency), concurrency=concurrency, input_len=args.input_len,
        output_len=args.output_len, seed=seed, vocab_size=args.vocab_size,
    )  # fmt: skip


def order_of(round_index: int) -> list[str]:
    """The systems in the order of a round: each is first, second and last in turn."""
    first = round_index % len(SYSTEMS)
    return [*SYSTEMS[first:], *SYSTEMS[:first]]


def measure(system: str, child: GenerateChild, load: Load, urls: dict[str, str]) -> dict[str, Any]:
    """The figures of one system at one concurrency.

    Raises:
        RuntimeError: a request failed, or has fewer tokens than it asked for.
    """
    outcome = child.run(load) if system == PEER else run(load, urls[system])
    summary = figures(outcome.records, outcome.duration_s)
    if summary["failed"]:
        raise RuntimeError(f"{system} at {load.concurrency}: {summary['failed']} errors: {summary['error_messages']}")
    expected = load.num_prompts * load.input_len, load.num_prompts * load.output_len
    seen = summary["total_input_tokens"], summary["total_output_tokens"]
    if seen != expected:
        raise RuntimeError(f"{system} at {load.concurrency}: {seen} prompt and output tokens, expected {expected}")
    return summary


def metrics_of(summary: dict[str, Any]) -> dict[str, float]:
    """The table's metrics out of a summary."""
    return {
        "output_tok_s": summary["output_throughput"],
        "ttft_p50_ms": summary["median_ttft_ms"],
        "itl_p50_ms": summary["median_itl_ms"],
        "itl_p99_ms": summary["p99_itl_ms"],
    }


def run_rounds(args: argparse.Namespace, urls: dict[str, str], child: GenerateChild, deadline: float) -> Rounds:
    """Warm every system up, then measure them in turn, for as many rounds as end before `deadline` (one at least)."""
    warm_up(args, urls, child)
    rounds: Rounds = {(system, concurrency): [] for concurrency in args.concurrency for system in SYSTEMS}
    longest_s = 0.0
    for index in range(args.rounds):
        began = time.perf_counter()
        if index and began + longest_s > deadline:
            print(f"no round {index}: it would end after --max-minutes {args.max_minutes:g}", flush=True)
            break
        for concurrency in args.concurrency:
            for system in order_of(index):
                seed = args.seed + 1000 * (index + 1) + concurrency
                found = metrics_of(measure(system, child, load_of(args, concurrency, seed), urls))
                rounds[system, concurrency].append(found)
                print(f"round {index} concurrency {concurrency:>3} {system:<13} " + show(found), flush=True)
        longest_s = max(longest_s, time.perf_counter() - began)
    return rounds


def warm_up(args: argparse.Namespace, urls: dict[str, str], child: GenerateChild) -> None:
    """One short wave at the highest concurrency for each system, not counted."""
    load = load_of(args, max(args.concurrency), args.seed)
    load = dataclasses.replace(load, num_prompts=load.concurrency, output_len=min(8, args.output_len))
    for system in SYSTEMS:
        measure(system, child, load, urls)


def show(found: dict[str, float]) -> str:
    """One measurement as text."""
    return "  ".join(f"{label} {found[name]:.{digits}f}" for name, label, digits in METRICS)


def values(rounds: Rounds, system: str, concurrency: int, metric: str) -> list[float]:
    """One metric over the rounds."""
    return [found[metric] for found in rounds[system, concurrency]]


def absolute_table(rounds: Rounds) -> str:
    """Medians of every system, with the range of the rounds."""
    header = ["system", "concurrency", *(label for _, label, _ in METRICS)]
    body = [
        [system, str(concurrency)]
        + [report.spread_of(values(rounds, system, concurrency, name)).show(digits) for name, _, digits in METRICS]
        for system, concurrency in rounds
    ]
    return report.markdown_table(header, body)


def ratio_table(rounds: Rounds) -> str:
    """pdserve against `transformers`, round by round."""
    header = [f"system / {PEER}", "concurrency", *(label.partition(",")[0] for _, label, _ in METRICS)]
    body = []
    for system, concurrency in rounds:
        if system != PEER:
            found = (
                report.ratios(values(rounds, system, concurrency, name), values(rounds, PEER, concurrency, name))
                for name, _, _ in METRICS
            )
            body.append([system, str(concurrency), *(ratio.show(2, "x") for ratio in found)])
    return report.markdown_table(header, body)


def document(args: argparse.Namespace, facts: dict[str, Any], rounds: Rounds) -> str:
    """The whole report in Markdown."""
    machine, peer = facts["machine"], facts["transformers"]
    return f"""# pdserve monolith, pdserve 1P1D and `transformers`, {facts["date"]}

Model {args.model}, {args.dtype}; prompts of {args.input_len} random tokens, {args.output_len} tokens out; median of \
{len(next(iter(rounds.values())))} interleaved rounds (least-most).

{absolute_table(rounds)}

The same as ratios to `transformers` (tok/s: higher is better; TTFT and ITL: lower is better):

{ratio_table(rounds)}

- Machine: {machine["cpu_model"]}, {machine["cpus"]} cores of which {len(machine["cpus_used"])} used, \
{machine["memory_gib"]} GiB, {machine["platform"]}; load before the run {machine["load_1m"]}.
- Threads: monolith {args.threads}, prefill and decode {args.threads // 2} each, transformers {peer["threads"]}; \
the load generator and the router share these cores.
- torch {peer["torch"]}, transformers {peer["transformers"]} ({peer["attention"]} attention), \
Python {machine["python"]}.
- Revision {facts["revision"]}; the run took {facts["duration_s"]:.0f} s.
- Command: `{facts["command"]}`

`generate` runs static batches: all of a batch have their first token, and their last, at once. The servers take
requests as slots come free, over HTTP; 1P1D also moves every prompt's KV cache from one process to the other.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked."""
    args = parse_flags(argv)
    began = time.perf_counter()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[: args.threads])
    bench = report.Run("first-table", argv, module="compare_transformers")
    print(f"{bench.machine}\nrevision {report.git_revision()}", flush=True)
    try:
        with monolith_and_pair(args.model, args.dtype, threads=args.threads) as urls:
            with contextlib.closing(GenerateChild(args.model, args.dtype, args.threads)) as child:
                peer = child.facts()
                rounds = run_rounds(args, urls, child, began + 60 * args.max_minutes)
    finally:
        os.sched_setaffinity(0, cores)
    facts = bench.facts(
        transformers=peer,
        rounds=[
            {"system": system, "concurrency": concurrency, "rounds": found}
            for (system, concurrency), found in rounds.items()
        ],
    )
    text = document(args, facts, rounds)
    bench.publish(args, text, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
