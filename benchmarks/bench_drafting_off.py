"""Decode steps of a server with a model drafter whose drafting is off, beside those of a server without a drafter.

    python -m benchmarks.bench_drafting_off --cpu-threads 2 --batches 1,4,16 [--layers 24] [--write]

The model has random weights, the shape of Qwen3.5-0.8B with `--layers` layers and a small vocabulary, and its MTP
module drafts (NEXTN). The executor computes greedy decode steps by the CPU kernels in bfloat16, in turns:

- `plain`: without a drafter.
- `off`: with NEXTN, for steps that ask for no drafts. They are deferred (`executor/deferred_drafter.py`).
- `drafting`: with NEXTN, for steps that ask for one draft of each row, which no step verifies.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.bench_cpu_step import PAGE_TOKENS, TOKEN, VOCAB_SIZE, write_config
from benchmarks.kernels import CLOCKS
from benchmarks.report import markdown_table, ratios, spread_of
from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.config.speculative_group import SpeculativeConfig
from pdserve.executor.factory import LoadedEngine, build_executor
from pdserve.executor.interface import BatchPlan, BatchRow, run
from pdserve.protocol.sampling import CoreSamplingParams

SHAPE = "Qwen3.5-0.8B"
PLAIN, OFF, DRAFTING = KINDS = ("plain", "off", "drafting")
NUM_PROPOSALS = {PLAIN: None, OFF: 0, DRAFTING: 1}


class Rows:
    """An executor whose rows decode on and on, over pages of zeros at first."""

    def __init__(self, shape: Path, kind: str, batch: int, context: int, num_steps: int) -> None:
        """`num_steps`: most steps in all."""
        per_row = -(-(context + num_steps + 2) // PAGE_TOKENS)
        self._built: LoadedEngine = build_executor(
            ServerConfig(
                model=ModelConfig(
                    model_path=str(shape), dtype="bfloat16", load_format="dummy", context_length=context + num_steps + 2
                ),
                memory=MemoryConfig(page_size=PAGE_TOKENS, max_total_tokens=PAGE_TOKENS * per_row * batch),
                kernels=KernelConfig(device="cpu", cpu_kernels="native"),
                speculative=SpeculativeConfig(speculative_algorithm=None if kind == PLAIN else "NEXTN"),
            ),
            max_rows=batch,
        )
        for pool in self._built.executor.pools:
            pool.pages_as_bytes.zero_()
        self._num_proposals = NUM_PROPOSALS[kind]
        self._rows, self._at = [], context
        for index in range(batch):
            row = self._built.table.open(range(index * per_row, (index + 1) * per_row))
            assert row is not None, "there are rows and pages for all"
            self._built.table.slots[row] = index
            self._built.executor.open_row(
                row, [TOKEN] * (context + 1), context, CoreSamplingParams(temperature=0.0), None
            )
            self._rows.append(row)

    def steps(self, count: int, clock: Callable[[], float]) -> float:
        """Milliseconds of a step, of `count` of them."""
        began = clock()
        for _ in range(count):
            rows = tuple(BatchRow(str(row), row, self._at, self._at + 1, True) for row in self._rows)
            run(self._built.executor, BatchPlan(0, rows, self._num_proposals))
            self._at += 1
        return (clock() - began) * 1e3 / count


def measure(rows: Mapping[str, Rows], rounds: int, steps: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Milliseconds of a step of each kind, in turns; the first round warms up."""
    times: dict[str, list[float]] = {kind: [] for kind in rows}
    for turn in range(rounds + 1):
        for kind, own in rows.items():
            each = own.steps(steps, clock)
            if turn:
                times[kind].append(each)
    return times


def lines_of(batch: int, times: Mapping[str, list[float]]) -> list[list[str]]:
    """The table's rows of one batch size."""
    return [
        [
            f"{kind}, batch {batch}",
            spread_of(own).show(2),
            f"{1e3 / statistics.median(own):.0f}",
            ratios(times[PLAIN], own).show(2),
        ]
        for kind, own in times.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=34, help="steps of a round: of 17, one finds a backlog full")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: for a machine that others use, too")
    report.add_write_flags(parser, "drafting-off")
    args = parser.parse_args(argv)
    bench = report.Run("drafting-off", argv, module="bench_drafting_off")
    torch.set_num_threads(args.cpu_threads)
    lines, rounds = [], {}
    with tempfile.TemporaryDirectory(prefix="pdserve-shape-") as directory:
        shape = write_config(Path(directory), SHAPE, args.layers)
        for batch in (int(size) for size in args.batches.split(",")):
            most = args.steps * (args.rounds + 1)
            rows = {kind: Rows(shape, kind, batch, args.context, most) for kind in KINDS}
            rounds[batch] = measure(rows, args.rounds, args.steps, CLOCKS[args.clock])
            lines += lines_of(batch, rounds[batch])
    facts = bench.facts(rounds=rounds)
    header = [f"step, context from {args.context}", "ms", "steps/s", "times as fast as plain"]
    text = f"""# Decode steps while drafting is off, {report.today()}

{SHAPE}: {args.layers} layers, random weights, a vocabulary of {VOCAB_SIZE:,}; {args.cpu_threads} threads, {args.clock}
time, median (least-most) of {args.rounds} rounds of {args.steps} steps.

{markdown_table(header, lines)}

{report.footer(facts, own_load=args.cpu_threads)}
"""
    bench.publish(args, text, facts)
    return 0


if __name__ == "__main__":
    report.restart_without_spinning("bench_drafting_off")
    sys.exit(main())
