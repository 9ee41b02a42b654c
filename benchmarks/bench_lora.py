"""Decode steps of SmolLM2 with LoRA adapters in a batch, beside those of a server without --enable-lora.

    python -m benchmarks.bench_lora --cpu-threads 2 --batches 4,16 [--rank 16] [--write]

The adapters have random weights and change all linear layers. The executor computes greedy decode steps by the CPU
kernels in bfloat16, in turns: without --enable-lora, then with it and rows of no, one and four adapters, which take
the rows in turn.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks import report
from benchmarks.bench_cpu_step import PAGE_TOKENS, TOKEN
from benchmarks.kernels import CLOCKS
from benchmarks.report import markdown_table, ratios, spread_of
from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.config.lora_group import LoraConfig
from pdserve.executor.factory import build_executor
from pdserve.executor.interface import BatchPlan, BatchRow, run
from pdserve.model.loader import read_spec
from pdserve.model.lora import CONFIG, WEIGHTS, lora_targets
from pdserve.model.paths import SMOLLM2, resolve_model_path
from pdserve.protocol.sampling import CoreSamplingParams

GREEDY = CoreSamplingParams(temperature=0.0)
OFF = "off"
KINDS = {OFF: 0, "0 adapters": 0, "1 adapter": 1, "4 adapters": 4}
"""The number of adapters of each kind."""


def write_adapter(directory: Path, rank: int, seed: int) -> Path:
    """Write a random adapter of all linear layers of SmolLM2; returns `directory`."""
    generator = torch.Generator().manual_seed(seed)
    targets = lora_targets(read_spec(resolve_model_path(SMOLLM2)), ParallelShape(tp_size=1, pp_size=1).coord(0))
    tensors = {}
    for name, target in targets.items():
        if target.parts:  # a fused layer
            continue
        for part, shape in (("A", (rank, target.num_in)), ("B", (target.num_out, rank))):
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = 0.01 * torch.randn(shape, generator=generator)
    directory.mkdir()
    save_file(tensors, directory / WEIGHTS)
    (directory / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return directory


class AdaptedRows:
    """An executor whose rows, with the adapters of a kind, decode on and on. `num_steps`: most steps in all."""

    def __init__(self, kind: str, paths: Sequence[Path], batch: int, num_steps: int, args: argparse.Namespace) -> None:
        self._at: int = args.context
        length = self._at + num_steps + 2
        per_row = -(-length // PAGE_TOKENS)
        loaded = ",".join(f"{path.name}={path}" for path in paths[: KINDS[kind]]) or None
        built = build_executor(
            ServerConfig(
                model=ModelConfig(
                    model_path=SMOLLM2, dtype="bfloat16", quantization=args.quantization, context_length=length
                ),
                memory=MemoryConfig(page_size=PAGE_TOKENS, max_total_tokens=PAGE_TOKENS * per_row * batch),
                kernels=KernelConfig(device="cpu", cpu_kernels=args.cpu_kernels),
                lora=LoraConfig(enable_lora=kind != OFF, lora_paths=loaded),
            ),
            max_rows=batch,
        )
        self._executor, self._rows = built.executor, []
        for pool in self._executor.pools:
            pool.pages_as_bytes.zero_()
        names = () if built.loras is None else built.loras.names
        for index in range(batch):
            row = built.table.open(range(index * per_row, (index + 1) * per_row))
            assert row is not None, "there are rows and pages for all"
            self._executor.open_row(row, [TOKEN] * (self._at + 1), self._at, GREEDY, None)
            if built.loras is not None and names:
                built.loras.open_row(row, built.loras.find(names[index % len(names)]))
            self._rows.append(row)

    def step_ms(self, count: int, clock: Callable[[], float]) -> float:
        """Compute `count` steps; returns the milliseconds of one."""
        began = clock()
        for _ in range(count):
            plan = tuple(BatchRow(str(row), row, self._at, self._at + 1, True) for row in self._rows)
            run(self._executor, BatchPlan(0, plan))
            self._at += 1
        return (clock() - began) * 1e3 / count


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-kernels", choices=("native", "torch"), default="native")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--batches", default="4,16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: for a machine that others use, too")
    report.add_write_flags(parser, "lora")
    args = parser.parse_args(argv)
    bench = report.Run("lora", argv, module="bench_lora")
    torch.set_num_threads(args.cpu_threads)
    lines: list[list[str]] = []
    rounds: dict[int, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="pdserve-lora-") as directory:
        paths = [write_adapter(Path(directory) / f"a{seed}", args.rank, seed) for seed in range(4)]
        for batch in (int(size) for size in args.batches.split(",")):
            most = args.steps * (args.rounds + 1)
            kinds = {kind: AdaptedRows(kind, paths, batch, most, args) for kind in KINDS}
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            rounds[batch] = times
            for turn in range(args.rounds + 1):  # the first warms up
                for kind, rows in kinds.items():
                    each = rows.step_ms(args.steps, CLOCKS[args.clock])
                    times[kind] += [each] if turn else []
            for kind, own in times.items():
                rate = spread_of([1e3 * batch / each for each in own])
                lines.append([f"{kind}, batch {batch}", rate.show(0), ratios(times[OFF], own).show(2)])
    facts = bench.facts(rounds=rounds)
    header = ["--enable-lora", "decode tokens/s", "times as fast as off"]
    text = f"""# Decode steps with LoRA adapters, {report.today()}

SmolLM2 (135M), {args.quantization or "bfloat16"}, {args.cpu_kernels} kernels, adapters of rank {args.rank} in all
linear layers, context from {args.context}; {args.cpu_threads} threads, {args.clock} time, median (least-most) of
{args.rounds} rounds of {args.steps} steps.

{markdown_table(header, lines)}

{report.footer(facts, own_load=args.cpu_threads)}
"""
    bench.publish(args, text, facts)
    return 0


if __name__ == "__main__":
    report.restart_without_spinning("bench_lora")
    sys.exit(main())
