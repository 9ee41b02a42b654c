"""A whole step of the executor at several batch sizes: native kernels in bf16 and int8 beside torch, in turns.

    python -m benchmarks.bench_cpu_step --cpu-threads 2 --batches 1,16,64 --context 256

Every row decodes one token behind `--context` others. Ratios compare each round with torch's round beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.kernels import CLOCKS
from benchmarks.report import markdown_table, ratios, spread_of
from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.executor.factory import build_executor
from pdserve.executor.interface import BatchPlan, Row, run
from pdserve.protocol.sampling import SamplingParams

PAGE_TOKENS = 16
KINDS: dict[str, tuple[KernelConfig, ModelConfig]] = {
    "torch bf16": (KernelConfig(device="cpu", cpu_kernels="torch"), ModelConfig(dtype="bfloat16")),
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


def main() -> None:
    """Print a table for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", default="1,16,64")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: for a machine that others use, too")
    args = parser.parse_args()
    torch.set_num_threads(args.cpu_threads)
    clock = CLOCKS[args.clock]
    lines = []
    for batch in (int(size) for size in args.batches.split(",")):
        steps = {kind: step_of(kind, batch, args.context) for kind in KINDS}
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for turn in range(args.rounds + 1):
            for kind, step in steps.items():
                begun = clock()
                step()
                if turn:  # the first round warms up
                    times[kind].append((clock() - begun) * 1e3)
        slow = times["torch bf16"]
        lines += [
            [f"{kind}, batch {batch}", spread_of(own).show(2), ratios(slow, own).show(2)] for kind, own in times.items()
        ]
    print(f"SmolLM2-135M, {args.cpu_threads} threads, {args.clock} time, median (least-most) of {args.rounds} rounds\n")
    print(markdown_table([f"step, context {args.context}", "ms", "times as fast as torch"], lines))


if __name__ == "__main__":
    main()
