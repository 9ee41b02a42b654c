"""A whole step of the executor at several batch sizes: native kernels in bf16 and int8 beside torch, in turns.

    python -m benchmarks.bench_cpu_step --cpu-threads 2 --batches 1,16,64 --context 256 [--fused DIRECTORY] [--write]

Every row decodes one token behind `--context` others. Ratios compare each round with torch's round beside it; with
`--fused`, a directory with a `cstep.cpp` (see `fused_step`), also with that step of the same precision.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.fused_step import FORMATS, FusedStep
from benchmarks.kernels import CLOCKS
from benchmarks.report import markdown_table, ratios, spread_of
from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.executor.factory import build_executor
from pdserve.executor.interface import BatchPlan, Row, run
from pdserve.protocol.sampling import SamplingParams

PAGE_TOKENS = 16
TORCH = "torch bf16"
KINDS: dict[str, tuple[KernelConfig, ModelConfig]] = {
    TORCH: (KernelConfig(device="cpu", cpu_kernels="torch"), ModelConfig(dtype="bfloat16")),
    "native bf16": (KernelConfig(device="cpu", cpu_kernels="native"), ModelConfig(dtype="bfloat16")),
    "native int8": (
        KernelConfig(device="cpu", cpu_kernels="native"),
        ModelConfig(dtype="bfloat16", quantization="int8"),
    ),
}


def step_of(kind: str, batch: int, context: int) -> Callable[[], object]:
    """A call that computes one step of `batch` rows again and again, over pages of zeros."""
    kernels, model = KINDS[kind]
    per_row = -(-(context + 1) // PAGE_TOKENS)
    memory = MemoryConfig(page_size=PAGE_TOKENS, max_total_tokens=PAGE_TOKENS * per_row * batch)
    built = build_executor(ServerConfig(model=model, memory=memory, kernels=kernels), max_rows=batch)
    order = torch.randperm(built.num_pages, generator=torch.Generator().manual_seed(0)).tolist()
    rows = []
    for index in range(batch):
        row = built.table.open(order[index * per_row : (index + 1) * per_row])
        assert row is not None, "there are rows and pages for all"
        built.executor.open_row(row, [500] * context, context, SamplingParams(temperature=0.0), None)
        rows.append(Row(str(index), row, context - 1, context, True))
    for pool in built.executor.pools:
        pool.pages.zero_()
    return partial(run, built.executor, BatchPlan(0, tuple(rows)))


def measure(
    steps: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Milliseconds of each kind, in turns; the first round warms up."""
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for turn in range(rounds + 1):
        for kind, step in steps.items():
            begun = clock()
            step()
            if turn:
                times[kind].append((clock() - begun) * 1e3)
    return times


def lines_of(batch: int, times: Mapping[str, list[float]]) -> list[list[str]]:
    """The table's rows of one batch size."""
    lines = []
    for kind, own in times.items():
        fused = times.get(f"fused {kind.removeprefix('native ')}") if kind.startswith("native") else None
        beside = "" if fused is None else ratios(own, fused).show(2)
        lines.append([f"{kind}, batch {batch}", spread_of(own).show(2), ratios(times[TORCH], own).show(2), beside])
    return lines


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cpu-threads", type=int, default=torch.get_num_threads())
    add("--batches", default="1,16,64")
    add("--context", type=int, default=256)
    add("--rounds", type=int, default=15)
    add("--clock", choices=list(CLOCKS), default="wall", help="cpu: for a machine that others use, too")
    add("--fused", type=Path, help="directory with a cstep.cpp, to be measured beside ours")
    report.add_write_flags(parser, "cpu-step")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked."""
    args = parse_flags(argv)
    bench = report.Run("cpu-step", argv, module="bench_cpu_step")
    torch.set_num_threads(args.cpu_threads)
    lines, rounds = [], {}
    for batch in (int(size) for size in args.batches.split(",")):
        steps: dict[str, Callable[[], object]] = {kind: step_of(kind, batch, args.context) for kind in KINDS}
        if args.fused is not None:
            for kind in FORMATS:
                steps[f"fused {kind}"] = FusedStep(args.fused, kind, batch, args.context, args.cpu_threads)
        rounds[batch] = measure(steps, args.rounds, CLOCKS[args.clock])
        lines += lines_of(batch, rounds[batch])
    facts = bench.facts(rounds=rounds)
    header = [f"step, context {args.context}", "ms", "times as fast as torch", "its time / the fused step's"]
    text = f"""# A step on the CPU, {report.today()}

SmolLM2-135M, {args.cpu_threads} threads, {args.clock} time, median (least-most) of {args.rounds} rounds.

{markdown_table(header, lines)}

{report.footer(facts, own_load=args.cpu_threads)}
"""
    bench.publish(args, text, facts)
    return 0


if __name__ == "__main__":
    report.restart_without_spinning("bench_cpu_step")
    sys.exit(main())
