"""pdserve beside its peers on a CPU, as servers: the same model, prompts and threads, interleaved rounds, one run.

    scripts/setup_peers.sh
    python -m benchmarks.compare_cpu [--rounds 3] [--systems pdserve vllm "llama bf16"] [--write]
    python -m benchmarks.hybrid_model .venv-peers/Qwen3.5-0.8B
    python -m benchmarks.compare_cpu --model-path .venv-peers/Qwen3.5-0.8B --turns 1000 [--write]

All systems are up for the whole run, and one works at a time, in an order that changes with the round. Prompts are
token ids of English prose, the same for all, new pieces each round. Ratios are taken within a round. Before each
measurement all cores are quiet, for some systems spin for seconds behind an answer, and then the system has answered a
short request.

- Decode at N streams: N prompts of `--input-len` tokens at once, `--output-len` tokens each. `decode tok/s` counts
  tokens from when the last stream has its first one to when the first stream has its last: all N run, and nothing else.
  `output tok/s` counts all tokens out, from the first request to the last token: the prompts' time is in it.
- Prefill of N tokens: one prompt by itself, and its first token; tokens by the time until then.
- Second turn (`--turns N`): the first token of a prompt whose first N tokens the system has just answered, and
  `TURN_TOKENS` more.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.load import Load, figures
from benchmarks.peers import KINDS, REQUESTED_NAME, SMOLLM2, Outcome, ServedModel, System
from pdserve.bench.client import BenchRecord

OURS = "pdserve"


@dataclasses.dataclass(frozen=True)
class Metric:
    """A column; `digits` are those behind the point."""

    key: str
    heading: str
    digits: int
    more_is_better: bool = False


DECODE = (
    Metric("decode_tok_s", "decode tok/s", 0, more_is_better=True),
    Metric("output_tok_s", "output tok/s", 0, more_is_better=True),
    Metric("ttft_p50_ms", "TTFT p50, ms", 0),
    Metric("itl_p50_ms", "ITL p50, ms", 1),
    Metric("itl_p99_ms", "ITL p99, ms", 1),
    Metric("cpu_ms_token", "CPU/token, ms", 2),
)
QUIET_PERCENT, LOOK_S, PATIENCE_S = 5.0, 0.3, 20.0
"""A measurement waits until all cores are busy for less than that share of `LOOK_S`, but not for longer than that."""
NONE = "none"
"""A rate of streams that never ran together."""
PREFILL = (Metric("prefill_tok_s", "prefill tok/s", 0, more_is_better=True), Metric("ttft_ms", "TTFT, ms", 0))
TURN = (Metric("ttft_ms", "TTFT, ms", 0),)
TURN_TOKENS = 32
"""New tokens of a second turn."""
Rounds = dict[tuple[str, int], list[dict[str, float]]]
"""Metrics of each round, by system and streams, or by system and prompt length."""


def load_of(count: int, input_len: int, output_len: int, seed: int) -> Load:
    """`count` prompts of prose, all at once."""
    return Load(
        num_prompts=count, concurrency=count, input_len=input_len, output_len=output_len, seed=seed,
        prose_of="smollm2", model=REQUESTED_NAME, timeout_s=600,
    )  # fmt: skip


def run(system: System, name: str, load: Load) -> Outcome:
    """One measurement.

    Raises:
        RuntimeError: a request failed, or has other numbers of tokens than it asked for.
    """
    outcome = system.run(load)
    for one in outcome.records:
        if one.error_kind is not None or one.output_tokens != load.output_len:
            told = f"{one.output_tokens} tokens, expected {load.output_len}"
            raise RuntimeError(f"{name}: {one.error or told}")
    return outcome


def decode_rate(records: Sequence[BenchRecord]) -> float:
    """Tokens a second while all streams run. A token without text makes no event, so events are scaled to tokens."""
    begin, end = max(one.arrivals_s[0] for one in records), min(one.arrivals_s[-1] for one in records)
    if end <= begin:
        return 0.0
    total = 0.0
    for one in records:
        within = sum(begin < at <= end for at in one.arrivals_s)
        total += within * (one.output_tokens - 1) / max(1, len(one.arrivals_s) - 1)
    return total / (end - begin)


def decode_metrics(outcome: Outcome) -> dict[str, float]:
    """Of one measurement at N streams."""
    summary = figures(outcome.records, outcome.duration_s)
    return {
        "decode_tok_s": decode_rate(outcome.records),
        "output_tok_s": summary["output_throughput"],
        "ttft_p50_ms": summary["median_ttft_ms"],
        "itl_p50_ms": summary["median_itl_ms"],
        "itl_p99_ms": summary["p99_itl_ms"],
        "cpu_ms_token": outcome.cpu_s * 1000 / summary["total_output_tokens"],
        "events_per_token": sum(len(one.arrivals_s) for one in outcome.records) / summary["total_output_tokens"],
    }


def order_of(names: Sequence[str], index: int) -> list[str]:
    """Each is first in turn."""
    first = index % len(names)
    return [*names[first:], *names[:first]]


def wait_for_quiet(busy_percent: Callable[[float], float], clock: Callable[[], float] = time.monotonic) -> bool:
    """Until nobody computes; False when somebody does not stop to.

    `busy_percent(seconds)`: how busy all cores were in these seconds, which it waits for.
    """
    deadline = clock() + PATIENCE_S
    while busy_percent(LOOK_S) > QUIET_PERCENT:
        if clock() > deadline:
            return False
    return True


def woken(args: argparse.Namespace, systems: dict[str, System], name: str, load: Load) -> Outcome:
    """One measurement on quiet cores, right after a short request that does not count: who idled for minutes has lost
    its caches, and on some machines the pages of its programs.
    """
    if not wait_for_quiet(psutil.cpu_percent):
        print(f"others compute though nothing is asked of them; {name} is measured all the same", flush=True)
        args.num_loud += 1
    run(systems[name], name, load_of(1, args.input_len, 4, args.seed))
    return run(systems[name], name, load)


def measure(args: argparse.Namespace, systems: dict[str, System]) -> tuple[Rounds, Rounds, Rounds]:
    """All rounds of decode, prefill and second turns, after one short wave of each system that does not count."""
    decode: Rounds = {(name, count): [] for count in args.streams for name in systems}
    prefill: Rounds = {(name, length): [] for length in args.prompts for name in systems}
    turns: Rounds = {(name, length): [] for length in args.turns for name in systems}
    names = list(systems)
    for name, system in systems.items():
        run(system, name, load_of(max(args.streams), args.input_len, 4, args.seed))
        run(system, name, load_of(1, max(args.prompts), 2, args.seed))
    for index in range(args.rounds):
        for count in args.streams:
            for name in order_of(names, index):
                load = load_of(count, args.input_len, args.output_len, args.seed + 1000 * (index + 1) + count)
                found = decode_metrics(woken(args, systems, name, load))
                decode[name, count].append(found)
                tell(f"round {index} {count:>5} streams {name}", found)
        for length in args.prompts:
            for name in order_of(names, index):
                times = []
                for again in range(args.repeats):
                    seed = args.seed + 1000 * (index + 1) + 7 * length + again
                    outcome = woken(args, systems, name, load_of(1, length, 2, seed))
                    times.append(outcome.records[0].arrivals_s[0])
                found = {"prefill_tok_s": length / statistics.median(times), "ttft_ms": statistics.median(times) * 1000}
                prefill[name, length].append(found)
                tell(f"round {index} {length:>5} tokens  {name}", found)
        for length in args.turns:
            for name in order_of(names, index):
                times = [
                    second_turn(args, systems[name], name, length, args.seed + 1000 * (index + 1) + 11 * length + again)
                    for again in range(args.repeats)
                ]
                turns[name, length].append({"ttft_ms": statistics.median(times) * 1000})
                tell(f"round {index} {length:>5} cached  {name}", turns[name, length][-1])
    return decode, prefill, turns


def second_turn(args: argparse.Namespace, system: System, name: str, length: int, seed: int) -> float:
    """Seconds until the first token of a prompt that begins with one of `length` tokens, answered just before."""
    run(system, name, load_of(1, length, 4, seed))
    outcome = run(system, name, load_of(1, length + TURN_TOKENS, 2, seed))
    return outcome.records[0].arrivals_s[0]


def loud_notes(num_loud: int) -> list[str]:
    """A line of the report where measurements were begun beside others that computed."""
    return [f"**{num_loud} measurements were begun while something else computed.**"] if num_loud else []


def tell(what: str, found: dict[str, float]) -> None:
    """One measurement as a line."""
    print(f"{what:<36}", *(f"{key} {value:.2f}" for key, value in found.items()), flush=True)


def values(rounds: Rounds, name: str, size: int, metric: str) -> list[float]:
    """One metric over the rounds."""
    return [found[metric] for found in rounds[name, size]]


def fewest_events(rounds: Rounds) -> float:
    """By tokens; where it is below 1, what is between events is not what is between tokens."""
    return min(found["events_per_token"] for measured in rounds.values() for found in measured)


def table(rounds: Rounds, metrics: Sequence[Metric], size: str) -> str:
    """Medians with spread; `size` is what the systems are compared at."""
    rows = []
    for name, count in rounds:
        columns = [(values(rounds, name, count, one.key), one.digits) for one in metrics]
        shown = [report.spread_of(column).show(digits) if min(column) > 0 else NONE for column, digits in columns]
        rows.append([name, KINDS[name].precision, f"{count:,}", *shown])
    return report.markdown_table(["system", "precision", size, *(one.heading for one in metrics)], rows, num_text=2)


def ratio_table(rounds: Rounds, metrics: Sequence[Metric], size: str) -> str:
    """How many times better pdserve is than each of the others, in each metric."""
    rows = [
        [name, KINDS[name].precision, f"{count:,}", *(ratio(rounds, name, count, one) for one in metrics)]
        for name, count in rounds
        if name != ours_beside(name, rounds) and (ours_beside(name, rounds), count) in rounds
    ]
    header = ["pdserve beside", "precision", size, *(one.heading.partition(",")[0] for one in metrics)]
    return report.markdown_table(header, rows, num_text=2)


def ours_beside(name: str, rounds: Rounds) -> str:
    """Which of ours a system is compared with: the one of its bits; 8 bits against 4 where ours of 4 did not run."""
    precision = KINDS[name].precision
    if precision == "4 bit" and any(one == f"{OURS} 4bit" for one, _ in rounds):
        return f"{OURS} 4bit"
    return OURS if precision == "bf16" else f"{OURS} int8"


def ratio(rounds: Rounds, name: str, size: int, metric: Metric) -> str:
    """Within rounds, and above 1 where ours is better: ours by theirs where more is better, else theirs by ours."""
    both = [values(rounds, one, size, metric.key) for one in (ours_beside(name, rounds), name)]
    if min(map(min, both)) <= 0:
        return NONE
    return report.ratios(*(both if metric.more_is_better else both[::-1])).show(2, "x")


@contextlib.contextmanager
def started(names: Sequence[str], threads: int, model: ServedModel) -> Iterator[dict[str, System]]:
    """All systems, one after the other; ended whatever happens."""
    with contextlib.ExitStack() as stack:
        systems: dict[str, System] = {}
        for name in names:
            print(f"starting {name}", flush=True)
            systems[name] = KINDS[name].start(stack, threads, model)
        yield systems


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is installed, print, and write when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--systems", nargs="+", choices=tuple(KINDS), help="default: all that are installed, but `vllm cache`")
    add("--model-path", type=Path, help="a checkpoint with SmolLM2's tokenizer; default: SmolLM2")
    add("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    add("--prompts", type=int, nargs="+", default=[128, 512, 2048], help="tokens of the prompts for prefill")
    add("--turns", type=int, nargs="*", default=[], help="tokens of first turns, for second turns")
    add("--rounds", type=int, default=3)
    add("--repeats", type=int, default=3, help="prompts of each length a round")
    add("--input-len", type=int, default=128, help="tokens per prompt at N streams")
    add("--output-len", type=int, default=64, help="tokens per answer")
    add("--threads", type=int, default=2)
    add("--seed", type=int, default=0)
    add("--name", help="of the files; default: cpu-peers, or cpu-peers-8bit where all systems have 8 bits or 4")
    report.add_write_flags(parser, "NAME")
    args = parser.parse_args(argv)
    args.num_loud = 0
    model = SMOLLM2 if args.model_path is None else ServedModel(args.model_path.name, str(args.model_path))
    here = [name for name, kind in KINDS.items() if kind.can_serve(model)]
    names = args.systems or [name for name in here if name != "vllm cache"]
    if missing := set(names) - set(here):
        parser.error(f"not installed: {', '.join(sorted(missing))}; scripts/setup_peers.sh does that")
    only_8bit = all(KINDS[name].precision != "bf16" for name in names)
    name = args.name or ("cpu-peers-8bit" if only_8bit else "cpu-peers")
    bench = report.Run(name, argv, module="compare_cpu")
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    with started(names, args.threads, model) as systems:
        decode, prefill, turns = measure(args, systems)
    facts = bench.facts(model=model.name, decode=_plain(decode), prefill=_plain(prefill), turns=_plain(turns))
    second = f"""
## Second turn: tokens answered before, and {TURN_TOKENS} more

{table(turns, TURN, "tokens")}

{ratio_table(turns, TURN, "tokens")}
"""
    text = f"""# pdserve beside its peers on a CPU, {facts["date"]}

{"SmolLM2-135M-Instruct" if model == SMOLLM2 else model.name}, {args.threads} threads each, over HTTP (OpenVINO and \
transformers: called in their processes). \
Median of {args.rounds} interleaved rounds (least-most). Below each table, how many times better pdserve of the same \
precision (8 bits for 4 bits, unless it ran with 4) is than the row's system, within rounds: its tokens/s by theirs, \
their times by its.

## Decode: prompts of {args.input_len} tokens, {args.output_len} tokens out, all streams at once

{table(decode, DECODE, "streams")}

{ratio_table(decode, DECODE, "streams")}

Events by tokens, least of all measurements: {fewest_events(decode):.2f}. A token without text makes none.

## Prefill: one prompt by itself

{table(prefill, PREFILL, "tokens")}

{ratio_table(prefill, PREFILL, "tokens")}
{second if args.turns else ""}
Not in this run: {", ".join(sorted(set(KINDS) - set(names))) or "nothing"}.

{report.footer(facts, loud_notes(args.num_loud), own_load=args.threads)}
"""
    bench.publish(args, text, facts)
    return 0


def _plain(rounds: Rounds) -> list[dict[str, Any]]:
    return [{"system": name, "size": size, "rounds": found} for (name, size), found in rounds.items()]


if __name__ == "__main__":
    sys.exit(main())
