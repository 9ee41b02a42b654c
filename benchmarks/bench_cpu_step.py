"""A whole step of the executor at several batch sizes: native kernels in bf16 and int8 beside torch, in turns.

    python -m benchmarks.bench_cpu_step --cpu-threads 2 --batches 1,16,64 --context 256 [--fused DIRECTORY] [--write]
    python -m benchmarks.bench_cpu_step --cpu-threads 2 --shape Qwen3-30B-A3B --layers 2 [--write]
    python -m benchmarks.bench_cpu_step --batches 1,16 --kinds "torch bf16,transformers bf16"
    python -m benchmarks.bench_cpu_step --batches 1 --context 2048 --shape DeepSeek-V2-Lite --layers 1 \
        --kinds "transformers bf16,torch bf16,native bf16"
    python -m benchmarks.bench_cpu_step --batches 1 --context 512 --new-tokens 512 --shape Qwen3.5-0.8B --layers 4 \
        --kinds "transformers bf16,native bf16"

Every row computes the last of `--context` tokens, or the last `--new-tokens`. Ratios compare each round with the round
of the first kind beside it; with `--fused`, a directory with a `cstep.cpp` (see `fused_step`), also with that step of
the same precision. The model is SmolLM2-135M; with `--shape` one of random weights, with `--layers` layers and a small
vocabulary.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.fused_step import FORMATS, FusedStep
from benchmarks.gpu.shapes import HYBRID_MODELS, LATENT_MODELS, MODELS, TINY_MODELS
from benchmarks.kernels import CLOCKS
from benchmarks.report import markdown_table, ratios, spread_of
from pdserve.config.groups import KernelConfig, MemoryConfig, ModelConfig, ServerConfig
from pdserve.executor.factory import build_executor
from pdserve.executor.interface import BatchPlan, BatchRow, run
from pdserve.protocol.sampling import CoreSamplingParams

PAGE_TOKENS = MemoryConfig().page_size
SHAPES = MODELS | HYBRID_MODELS | LATENT_MODELS | TINY_MODELS
VOCAB_SIZE = 4096
"""Of models of random weights: of few layers, the logits would be most of the step."""
TOKEN = 50
TORCH = "torch bf16"
TRANSFORMERS = "transformers bf16"
KINDS: dict[str, tuple[KernelConfig, ModelConfig]] = {
    TORCH: (KernelConfig(device="cpu", cpu_kernels="torch"), ModelConfig(dtype="bfloat16")),
    "native bf16": (KernelConfig(device="cpu", cpu_kernels="native"), ModelConfig(dtype="bfloat16")),
    "native int8": (
        KernelConfig(device="cpu", cpu_kernels="native"),
        ModelConfig(dtype="bfloat16", quantization="int8"),
    ),
}
"""Native code of a model: with torch's operations, and with the CPU kernels."""
ALL_KINDS = KINDS | {
    TRANSFORMERS: (KernelConfig(device="cpu"), ModelConfig(dtype="bfloat16", model_impl="transformers")),
    "native int4": (
        KernelConfig(device="cpu", cpu_kernels="native"),
        ModelConfig(dtype="bfloat16", quantization="int4"),
    ),
}


def step_of(
    kind: str, batch: int, context: int, shape: Path | None = None, new_tokens: int = 1
) -> Callable[[], object]:
    """A call that computes one step of `batch` rows again and again, over pages of zeros. `shape`: see `write_config`.

    Each row computes the last `new_tokens` of `context` tokens.
    """
    kernels, model = ALL_KINDS[kind]
    if shape is not None:
        model = dataclasses.replace(model, model_path=str(shape), load_format="dummy")
    per_row = -(-(context + 1) // PAGE_TOKENS)
    memory = MemoryConfig(page_size=PAGE_TOKENS, max_total_tokens=PAGE_TOKENS * per_row * batch)
    built = build_executor(ServerConfig(model=model, memory=memory, kernels=kernels), max_rows=batch)
    order = torch.randperm(built.num_pages, generator=torch.Generator().manual_seed(0)).tolist()
    rows = []
    for index in range(batch):
        row = built.table.open(order[index * per_row : (index + 1) * per_row])
        assert row is not None, "there are rows and pages for all"
        built.table.slots[row] = index  # of states, where the model has them
        built.executor.open_row(row, [TOKEN] * context, context - 1, CoreSamplingParams(temperature=0.0), None)
        rows.append(BatchRow(str(index), row, context - new_tokens, context, True))
    for pool in built.executor.pools:
        pool.pages_as_bytes.zero_()
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


def write_config(directory: Path, shape: str, num_layers: int) -> Path:
    """`directory`, with the configuration of a model of random weights; see the module."""
    config = SHAPES[shape] | {"num_hidden_layers": num_layers, "vocab_size": VOCAB_SIZE}
    (directory / "config.json").write_text(json.dumps(config | {"bos_token_id": 0, "eos_token_id": 1}))
    return directory


def lines_of(batch: int, times: Mapping[str, list[float]]) -> list[list[str]]:
    """The table's rows of one batch size; the first kind is what the others are compared with."""
    lines = []
    first = next(iter(times.values()))
    for kind, own in times.items():
        fused = times.get(f"fused {kind.removeprefix('native ')}") if kind.startswith("native") else None
        beside = "" if fused is None else ratios(own, fused).show(2)
        lines.append([f"{kind}, batch {batch}", spread_of(own).show(2), ratios(first, own).show(2), beside])
    return lines


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cpu-threads", type=int, default=torch.get_num_threads())
    add("--batches", default="1,16,64")
    add("--context", type=int, default=256)
    add("--new-tokens", type=int, default=1, help="tokens of a row that a step computes")
    add("--kinds", default=",".join(KINDS), metavar="KINDS", help=f"some of {', '.join(ALL_KINDS)}")
    add("--rounds", type=int, default=15)
    add("--clock", choices=list(CLOCKS), default="wall", help="cpu: for a machine that others use, too")
    add("--shape", choices=list(SHAPES), help="a model of random weights instead of SmolLM2-135M")
    add("--layers", type=int, default=2, help="how many layers such a model has")
    add("--fused", type=Path, help="directory with a cstep.cpp, to be measured beside ours")
    report.add_write_flags(parser, "cpu-step")
    args = parser.parse_args(argv)
    args.kinds = args.kinds.split(",")
    if not set(args.kinds) <= set(ALL_KINDS):
        parser.error(f"--kinds is {','.join(args.kinds)}, but must be some of {', '.join(ALL_KINDS)}")
    if args.shape is not None and args.fused is not None:
        parser.error("--fused is for SmolLM2-135M, not for another --shape")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked."""
    args = parse_flags(argv)
    name = "cpu-step" if args.shape is None else f"cpu-step-{args.shape}"
    bench = report.Run(name, argv, module="bench_cpu_step")
    torch.set_num_threads(args.cpu_threads)
    lines, rounds = [], {}
    with contextlib.ExitStack() as stack:
        shape: Path | None = None
        if args.shape is not None:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-shape-"))
            shape = write_config(Path(directory), args.shape, args.layers)
        for batch in (int(size) for size in args.batches.split(",")):
            steps: dict[str, Callable[[], object]] = {
                kind: step_of(kind, batch, args.context, shape, args.new_tokens) for kind in args.kinds
            }
            if args.fused is not None:
                for kind in FORMATS:
                    steps[f"fused {kind}"] = FusedStep(args.fused, kind, batch, args.context, args.cpu_threads)
            rounds[batch] = measure(steps, args.rounds, CLOCKS[args.clock])
            lines += lines_of(batch, rounds[batch])
    facts = bench.facts(rounds=rounds)
    what = f"step, context {args.context}"
    if args.new_tokens > 1:
        what = f"step of {args.new_tokens} tokens a row, context {args.context}"
    header = [what, "ms", f"times as fast as {args.kinds[0]}", "its time / the fused step's"]
    random = f"{args.shape}: {args.layers} of its layers, random weights, a vocabulary of {VOCAB_SIZE:,}"
    title = "SmolLM2-135M" if args.shape is None else random
    text = f"""# A step on the CPU, {report.today()}

{title}, {args.cpu_threads} threads, {args.clock} time, median (least-most) of {args.rounds} rounds.

{markdown_table(header, lines)}

{report.footer(facts, own_load=args.cpu_threads)}
"""
    bench.publish(args, text, facts)
    return 0


if __name__ == "__main__":
    report.restart_without_spinning("bench_cpu_step")
    sys.exit(main())
