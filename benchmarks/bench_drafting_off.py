"""Decode steps of a server with a model drafter whose drafting is off, beside those of a server without a drafter.

    python -m benchmarks.bench_drafting_off --cpu-threads 2 --batches 1,4,16 [--layers 24] [--write]
    python -m benchmarks.bench_drafting_off --model smollm2 --draft-model DIR      # an EAGLE-3 head

The model has random weights, the shape of Qwen3.5-0.8B with `--layers` layers and a small vocabulary, and its MTP
module drafts (NEXTN). With `--model` and `--draft-model` an EAGLE-3 head drafts for a real model. The executor computes
greedy decode steps by the CPU kernels in bfloat16, in turns:

- `plain`: without a drafter.
- `off`: with the drafter, for steps that ask for no drafts. They are deferred (`executor/deferred_drafter.py`).
- `1 draft`, `3 drafts`: with the drafter, for steps that ask for 1 or 3 drafts of each row, which no step verifies.

The difference of the last two is the time of two passes of the drafter. The report has it beside the cost that the
scheduler takes a pass for (`model/drafting/cost.py`).
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
from pdserve.config.speculative_group import SpeculativeAlgorithm, SpeculativeConfig
from pdserve.executor.factory import LoadedEngine, build_executor
from pdserve.executor.interface import BatchPlan, BatchRow, run
from pdserve.protocol.sampling import CoreSamplingParams

SHAPE = "Qwen3.5-0.8B"
PLAIN, OFF, ONE, THREE = KINDS = ("plain", "off", "1 draft", "3 drafts")
NUM_PROPOSALS = {PLAIN: None, OFF: 0, ONE: 1, THREE: 3}


class Rows:
    """An executor whose rows decode on and on, over pages of zeros at first."""

    def __init__(
        self, shape: Path, draft_model: str | None, kind: str, batch: int, context: int, num_steps: int
    ) -> None:
        """`num_steps`: most steps in all. `shape`: a model, or without `draft_model` its config alone."""
        per_row = -(-(context + num_steps + 2) // PAGE_TOKENS)
        algorithm: SpeculativeAlgorithm | None = None if kind == PLAIN else "NEXTN" if draft_model is None else "EAGLE3"
        self._built: LoadedEngine = build_executor(
            ServerConfig(
                model=ModelConfig(
                    model_path=str(shape),
                    dtype="bfloat16",
                    load_format="dummy" if draft_model is None else "auto",
                    context_length=context + num_steps + 2,
                ),
                memory=MemoryConfig(page_size=PAGE_TOKENS, max_total_tokens=PAGE_TOKENS * per_row * batch),
                kernels=KernelConfig(device="cpu", cpu_kernels="native"),
                speculative=SpeculativeConfig(
                    speculative_algorithm=algorithm,
                    speculative_draft_model_path=draft_model if kind != PLAIN else None,
                ),
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

    @property
    def pass_cost(self) -> float:
        """The cost of a pass of the drafter that the scheduler assumes, relative to a step of one token."""
        return self._built.draft_pass_cost

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


def pass_costs(batch: int, times: Mapping[str, list[float]], assumed: float) -> str:
    """A line of the report: the time of a pass of the drafter, relative to a plain step of as many rows."""
    passes = [(three - one) / 2 for one, three in zip(times[ONE], times[THREE], strict=True)]
    found = ratios(passes, times[PLAIN]).show(2)
    return f"- A pass of the drafter, batch {batch}: {found} of a plain step; the scheduler assumes {assumed:.2f}."


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a real model, for which --draft-model drafts")
    parser.add_argument("--draft-model", help="directory of an EAGLE-3 head for --model")
    parser.add_argument("--cpu-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=34, help="steps of a round: of 17, one finds a backlog full")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: for a machine that others use, too")
    report.add_write_flags(parser, "drafting-off")
    args = parser.parse_args(argv)
    if (args.model is None) != (args.draft_model is None):
        parser.error("--model and --draft-model go together")
    bench = report.Run("drafting-off", argv, module="bench_drafting_off")
    torch.set_num_threads(args.cpu_threads)
    lines, rounds, passes = [], {}, []
    with tempfile.TemporaryDirectory(prefix="pdserve-shape-") as directory:
        shape = write_config(Path(directory), SHAPE, args.layers) if args.model is None else Path(args.model)
        for batch in (int(size) for size in args.batches.split(",")):
            most = args.steps * (args.rounds + 1)
            rows = {kind: Rows(shape, args.draft_model, kind, batch, args.context, most) for kind in KINDS}
            rounds[batch] = measure(rows, args.rounds, args.steps, CLOCKS[args.clock])
            lines += lines_of(batch, rounds[batch])
            passes.append(pass_costs(batch, rounds[batch], rows[ONE].pass_cost))
    what = args.model or f"{SHAPE}: {args.layers} layers, random weights, a vocabulary of {VOCAB_SIZE:,}"
    facts = bench.facts(rounds=rounds)
    header = [f"step, context from {args.context}", "ms", "steps/s", "times as fast as plain"]
    text = f"""# Decode steps while drafting is off, {report.today()}

{what}; {args.cpu_threads} threads, {args.clock} time, median (least-most) of {args.rounds} rounds of {args.steps}
steps.

{markdown_table(header, lines)}

{chr(10).join(passes)}

{report.footer(facts, own_load=args.cpu_threads)}
"""
    bench.publish(args, text, facts)
    return 0


if __name__ == "__main__":
    report.restart_without_spinning("bench_drafting_off")
    sys.exit(main())
