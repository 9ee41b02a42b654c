"""Linear layers of the CPU kernels in each number format of weights, in turns, at a few numbers of rows.

    python -m benchmarks.bench_packed_linears --cpu-threads 2 --rows 1,4,16,256 [--formats bf16 fp8 mxfp4] [--write]

All layers lie one behind the other, as in a step; their weights are random. Ratios compare each round with the round of
the first format beside it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.kernels import CLOCKS
from pdserve.base.native import best_level
from pdserve.model.grouped_weights import GroupFormat, QuantizedWeight
from pdserve.model.native.program import Program
from pdserve.model.native.resources import Threads
from pdserve.model.native.weights import Arena, Format, Packed, open_packed, pack

FORMATS: dict[str, Format] = {
    "bf16": "bf16",
    "fp8": GroupFormat(8, 1 << 20, is_float=True),
    "fp8 block": GroupFormat(8, 128, is_float=True),
    "mxfp4": GroupFormat(4, 32, is_float=True),
    "int8": "int8",
    "int4": GroupFormat(4, 32),
}


def packed_of(arena: Arena, form: Format, num_out: int, num_in: int) -> Packed:
    """Pack a random weight; of formats with floats the codes are random."""
    if not (isinstance(form, GroupFormat) and form.is_float):
        return pack(arena, form, torch.randn(num_out, num_in).bfloat16())
    codes = torch.randint(0, 1 << form.bits, (num_out, num_in), dtype=torch.uint8) & 0xBF
    scale = torch.full((num_out, -(-num_in // form.group)), 1 / 64)
    packed = open_packed(arena, form, num_out, num_in)
    group_of = torch.arange(num_in) // form.group
    packed.put_values(QuantizedWeight(codes, scale, None, group_of, form.bits, is_float=True))
    return packed


def products(threads: Threads, form: Format, shape: tuple[int, int], layers: int, rows: int) -> Callable[[], object]:
    """Return a call that multiplies `rows` rows with all layers."""
    arena, program = Arena(), Program(threads, best_level())
    num_out, num_in = shape
    source, out = program.buffer(num_in, of_samples=True), program.buffer(num_out, of_samples=True)
    first = packed_of(arena, form, num_out, num_in)
    for _ in range(layers):
        packed = open_packed(arena, form, num_out, num_in)
        for mine, theirs in zip(packed.tensors, first.tensors, strict=True):
            mine.copy_(theirs)
        program.linear(source, packed, out)
    program.begin_samples(rows)
    program.view(source, rows).normal_()
    return lambda: program.run(0, program.num_ops)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write it with `--write`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    add("--rows", default="1,4,16,256")
    add("--outputs", type=int, default=4096)
    add("--inputs", type=int, default=2048)
    add("--layers", type=int, default=12)
    add("--rounds", type=int, default=9)
    add("--cpu-threads", type=int, default=torch.get_num_threads())
    add("--clock", choices=list(CLOCKS), default="wall", help="cpu: for a machine that others use, too")
    report.add_write_flags(parser, "packed-linears")
    args = parser.parse_args(argv)
    record = report.Run("packed-linears", argv, module="bench_packed_linears")
    threads, clock = Threads(args.cpu_threads), CLOCKS[args.clock]
    lines, figures = [], {}
    for rows in map(int, args.rows.split(",")):
        shape = args.outputs, args.inputs
        calls = {name: products(threads, FORMATS[name], shape, args.layers, rows) for name in args.formats}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(args.rounds + 1):  # the first warms up
            for name, call in calls.items():
                begun = clock()
                call()
                if turn:
                    times[name].append((clock() - begun) * 1e3 / args.layers)
        first = times[args.formats[0]]
        for name, own in times.items():
            spread, ratio = report.spread_of(own).show(3), report.ratios(first, own).show(2)
            lines.append([name, str(rows), spread, ratio])
        figures[rows] = times
    header = ["format", "rows", "ms a layer", f"times as fast as {args.formats[0]}"]
    facts = record.facts(times=figures)
    shown = f"Layers of {args.outputs} outputs and {args.inputs} inputs, {args.cpu_threads} threads, {args.clock} time."
    record.publish(args, f"{shown}\n\n{report.markdown_table(header, lines)}\n\n{report.footer(facts)}\n", facts)


if __name__ == "__main__":
    report.restart_without_spinning("bench_packed_linears")
    main()
