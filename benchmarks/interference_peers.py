"""`bench_interference --peers`: the same load on pdserve and on other projects' servers, seen by one HTTP client.

All systems are up for the whole run, with the same threads and about the same KV pool, and answer the same prompts at
`/v1/completions`. One works at a time, on quiet cores, in an order that changes with the round. Each runs with its own
defaults; the servers that run prefill and decode in one engine also with chunks of `--peer-chunk` tokens, which shorten
the pauses of streams.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import psutil

from benchmarks import report
from benchmarks.compare_cpu import loud_notes, wait_for_quiet
from benchmarks.interference_report import METRICS, Rounds, absolute_table, cell, ratio_row, values
from benchmarks.peers import KINDS, Served, start_llama, start_pair, start_pdserve, start_vllm

PAIR, MONOLITH = "pdserve 1P1D", "pdserve"
POOL_GIB, SLOTS = 1, 16
"""KV cache of vLLM in GiB, and sequences of llama.cpp: about as many tokens as `peers.MEMORY` gives pdserve."""
PEERS = ("vllm", "llama bf16")
Measure = Callable[[str, int], dict[str, float | None]]
"""The metrics of one turn on the server at a URL, with the prompts of a seed."""


@dataclasses.dataclass(frozen=True)
class PeerSystem:
    """One row: a system of `peers.KINDS`, and tokens a chunk; 0: its own default."""

    kind: str
    chunk: int = 0

    @property
    def name(self) -> str:
        """As tables have it."""
        return f"{self.kind}, chunks of {self.chunk}" if self.chunk else self.kind

    def start(self, stack: contextlib.ExitStack, threads: int) -> Served:
        """Start it, and end it with `stack`. Raises ChildError where it does not come up."""
        size = str(self.chunk)
        if self.kind == PAIR:
            return start_pair(stack, threads)
        if self.kind == MONOLITH:
            flags = ["--chunked-prefill-size", size] if self.chunk else []
            return start_pdserve(*flags)(stack, threads)
        if self.kind == "vllm":
            flags = ["--max-num-batched-tokens", size] if self.chunk else []
            return start_vllm(*flags, pool_gib=POOL_GIB)(stack, threads)
        flags = ["--batch-size", size, "--ubatch-size", size] if self.chunk else []
        return start_llama(self.kind.removeprefix("llama "), *flags, slots=SLOTS)(stack, threads)


def check_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program with a message where `--peers` is given and cannot be done; without names it means all."""
    args.peers = args.peers or list(PEERS)
    if missing := [name for name in args.peers if not KINDS[name].can_serve()]:
        parser.error(f"--peers: not installed: {', '.join(missing)}; scripts/setup_peers.sh does that")
    if args.model != "smollm2" or args.dtype != "bfloat16" or args.server_flags:
        parser.error("--peers takes neither --model nor --dtype nor flags of servers: peers have smollm2 in bfloat16")
    if args.peer_chunk and args.peer_chunk < 64:
        parser.error("--peer-chunk must be 0, or at least 64: vLLM takes no less for 64 sequences")


def systems_of(args: argparse.Namespace) -> list[PeerSystem]:
    """The rows of a run, in the order of its table."""
    singles = [MONOLITH, *args.peers]
    chunked = [PeerSystem(kind, args.peer_chunk) for kind in singles] if args.peer_chunk else []
    return [PeerSystem(PAIR), *map(PeerSystem, singles), *chunked]


def run(args: argparse.Namespace, bench: report.Run, measure: Measure) -> None:
    """Start all, measure, print, and write when asked."""
    with contextlib.ExitStack() as stack:
        urls = {}
        for system in systems_of(args):
            print(f"starting {system.name}", flush=True)
            urls[system.name] = system.start(stack, args.threads).url
        rounds, num_loud = run_rounds(args, urls, measure)
    facts = bench.facts(
        flags={name: value for name, value in vars(args).items() if name not in ("write", "results")},
        rounds=[{"system": name, "prompts": True, "rounds": found} for (name, _), found in rounds.items()],
    )
    bench.publish(args, document(args, facts, rounds, num_loud), facts)


def run_rounds(args: argparse.Namespace, urls: dict[str, str], measure: Measure) -> tuple[Rounds, int]:
    """A round that does not count, then `--rounds` that do; and how many turns began while other processes computed."""
    rounds: Rounds = {(name, True): [] for name in urls}
    num_loud = 0
    for index in range(args.rounds + 1):
        for name in random.Random(f"{args.seed}/{index}").sample(list(urls), len(urls)):
            num_loud += not wait_for_quiet(psutil.cpu_percent)
            metrics = measure(urls[name], args.seed + index)
            text = "  ".join(f"{label} {cell(metrics[key], digits)}" for key, label, digits in METRICS)
            print(f"round {index} {name:<28} {text}", flush=True)
            if index:
                rounds[name, True].append(metrics)
    return rounds, num_loud


def ratio_table(rounds: Rounds) -> str:
    """The pair against each other system, of the same round."""
    ours = rounds[PAIR, True]
    rows = [ratio_row(f"{PAIR} / {name}", ours, found) for (name, _), found in rounds.items() if name != PAIR]
    return report.markdown_table(["ratio", *(label.partition(",")[0] for _, label, _ in METRICS)], rows)


def document(args: argparse.Namespace, facts: dict[str, Any], rounds: Rounds, num_loud: int) -> str:
    """The whole report in Markdown."""
    all_metrics = [metrics for found in rounds.values() for metrics in found]
    sent, through, gaps = (values(all_metrics, f"num_{name}") for name in ("prompts", "prompts_through", "gaps"))
    notes = [
        f"Threads: {args.threads} for each server; prefill and decode of 1P1D have {args.threads // 2} each. The load "
        "generator and the router share these cores.",
        *loud_notes(num_loud),
    ]
    return f"""# Long prompts beside decoding streams, pdserve and other servers, {facts["date"]}

SmolLM2-135M-Instruct, bfloat16: {args.streams} streams (prompts of {args.stream_prompt_len}); beside them one client \
that sends prompts of {args.prompt_len} tokens, {args.prompt_output_len} out, each after the answer to the previous \
one. All servers are measured by one HTTP client at `/v1/completions`. In each turn gaps count for {args.seconds:g} s, \
or until the first prompt's answer where it takes longer: {min(gaps):,.0f} to {max(gaps):,.0f} gaps, {min(sent):.0f} \
to {max(sent):.0f} prompts sent and {min(through):.0f} to \
{max(through):.0f} through meanwhile. Median of {args.rounds} rounds (least-most), each in another order.

{absolute_table(rounds)}

Servers have their defaults but for the KV pool. `chunks of N` limits the prompt tokens of a step: \
`--chunked-prefill-size N` (pdserve), `--max-num-batched-tokens N` (vLLM), `--batch-size N --ubatch-size N` (llama.cpp).

Ratios of the same round (ITL and TTFT: lower is better):

{ratio_table(rounds)}

{report.footer(facts, notes, own_load=args.threads)}
"""
