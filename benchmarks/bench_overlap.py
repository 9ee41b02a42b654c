"""What does it bring to launch the next decode step before the last one is resolved? Executor only, no scheduler.

    python -m benchmarks.bench_overlap [--model-path smollm2] [--plan-ms 0 0.5 2] [--batch 1 8 32] [--rounds 5]

Two executors of the same model take turns, round by round: one resolves each step before the next is launched, the
other keeps one step in flight. Between steps both spend `--plan-ms` of Python, as a scheduler would. Prints ms/step and
the ratio of the two, which is below 1x where overlap wins. On CPU the steps of the second run on a thread of their own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run by its path: `benchmarks`, `pdserve` and `tests` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.config.schedule_group import ScheduleConfig
from pdserve.executor.factory import LoadedEngine, build_executor
from pdserve.executor.interface import BatchPlan, BatchRow, StepHandle
from pdserve.memory.layout import pages_for
from tests.driver import GREEDY, random_prompt

NUM_WARM = 3


class Loop:
    """Decode steps of one executor. `overlap`: one step stays in flight while the next is planned."""

    def __init__(self, built: LoadedEngine, overlap: bool) -> None:
        self._built, self._overlap = built, overlap

    def run(self, batch: int, context: int, num_steps: int, plan_s: float) -> float:
        """Seconds a step, for `batch` rows that each have `context` tokens already."""
        executor, table = self._built.executor, self._built.table
        count = pages_for(context + NUM_WARM + num_steps + 1, executor.layout.page_tokens)
        rows = []
        for index in range(batch):
            row = table.open(range(index * count, (index + 1) * count))
            assert row is not None
            prompt = random_prompt(context, self._built.spec.vocab_size, seed=index)
            executor.open_row(row, prompt, context, GREEDY, None)
            executor.resolve(executor.launch(BatchPlan(0, (BatchRow(str(row), row, 0, context, True),))))
            rows.append(row)
        self._steps(rows, context, NUM_WARM, plan_s)
        began = time.perf_counter()
        self._steps(rows, context + NUM_WARM, num_steps, plan_s)
        took = time.perf_counter() - began
        for row in rows:
            executor.close_row(row)
            table.close(row)
        return took / num_steps

    def _steps(self, rows: list[int], start: int, num_steps: int, plan_s: float) -> None:
        executor = self._built.executor
        flying: StepHandle | None = None
        for position in range(start, start + num_steps):
            _plan_for(plan_s)
            plan = BatchPlan(position, tuple(BatchRow(str(row), row, position, position + 1, True) for row in rows))
            handle = executor.launch(plan)
            if flying is not None:
                executor.resolve(flying)
            flying = handle
            if not self._overlap:
                executor.resolve(handle)
                flying = None
        if flying is not None:
            executor.resolve(flying)


def _plan_for(seconds: float) -> None:
    """Python that holds the interpreter for `seconds`, as planning does."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def build(args: argparse.Namespace, *, overlap: bool) -> LoadedEngine:
    """An executor for the largest batch."""
    pages = pages_for(args.context + NUM_WARM + args.steps + 1, 16)
    return build_executor(
        ServerConfig(
            model=ModelConfig(model_path=args.model_path, load_format=args.load_format),
            memory=MemoryConfig(max_total_tokens=16 * max(args.batch) * pages),
            schedule=ScheduleConfig(disable_overlap_schedule=not overlap),
            kernels=KernelConfig(device=args.device, cpu_threads=args.cpu_threads),
        ),
        max_rows=max(args.batch),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="smollm2", help="as launch_server takes it")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run")
    parser.add_argument("--cpu-threads", type=int, default=None, help="torch threads on CPU; all cores when absent")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="rows a step")
    parser.add_argument("--context", type=int, default=128, help="tokens that each row has already")
    parser.add_argument("--plan-ms", type=float, nargs="+", default=[0.0, 0.5, 2.0], help="planning between steps")
    parser.add_argument("--steps", type=int, default=20, help="timed steps a round")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    args = parser.parse_args(argv)
    built = [build(args, overlap=overlap) for overlap in (False, True)]
    loops = [Loop(one, overlap) for one, overlap in zip(built, (False, True), strict=True)]
    table = []
    for batch in args.batch:
        for plan_ms in args.plan_ms:
            found: tuple[list[float], list[float]] = ([], [])
            for _ in range(args.rounds):
                for loop, times in zip(loops, found, strict=True):
                    times.append(loop.run(batch, args.context, args.steps, plan_ms / 1e3) * 1e3)
            off, on = (report.spread_of(times).show(2) for times in found)
            table.append([str(batch), f"{plan_ms:g}", off, on, report.ratios(found[1], found[0]).show(2, "x")])
            print(" | ".join(table[-1]), file=sys.stderr, flush=True)
    for one in built:
        one.executor.close()
    print(
        f"{args.model_path} on {built[0].device}, {args.context} tokens of context; {report.machine()['cpu_model']}\n"
    )
    header = ["batch", "plan, ms", "one by one, ms/step", "one in flight, ms/step", "in flight / one by one"]
    print(report.markdown_table(header, table))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
