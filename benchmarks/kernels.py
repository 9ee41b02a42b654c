"""Each CPU kernel against what this machine can do: bytes read and products computed, measured in the same rounds.

    python -m benchmarks.kernels --cpu-threads 2 --rounds 9 [--write]

The limits are torch's: the sum over memory far larger than the caches, and oneDNN's product of square matrices, of bf16
or of 8 bits. A kernel's limit is the slower of the two for the bytes and products that it needs; the share of it that
the kernel reaches is the median over rounds, each with its own limits, so that a busy machine slows both alike. What
`place`, `norm`, `route` and `embed` touch lies mostly in the caches, as in a step, where the kernel before has just
written it: their share of what memory could do may be above 1. Threads are up when a case begins, as in a step, which
wakes them once for all its kernels. Decode attention of few bytes is measured over more layers, and the time given for
thirty of them: the call from Python would count, of which a step has one for all its kernels.

KV lies in pages, strips of 48 KB far from each other, which nothing reads as fast as one piece of memory: the
last cases of the table read what decode attention reads, and compute nothing (`strip_reader.cpp`, for which there must
be a g++).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks import report
from benchmarks.kernel_cases import (
    DECODED,
    Case,
    attention_case,
    choice_case,
    delta_case,
    embed_case,
    experts_case,
    head_case,
    layers_case,
    linear_case,
    norm_case,
    place_case,
    reading_case,
    route_case,
    waking,
)
from benchmarks.report import Spread, markdown_table, spread_of
from benchmarks.strip_reader import StripReader
from pdserve.base.native import best_level
from pdserve.model.native.resources import Threads
from pdserve.model.native.weights import Format
from pdserve.protocol.sampling import CoreSamplingParams

LIMIT_BYTES = 256 << 20
LIMIT_SIZE = 1536
FEW = (1, 16, 64)
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the machine did in one round: bytes and operations a second."""

    bytes_per_s: float
    ops_per_s: float

    def seconds(self, case: Case) -> float:
        """The least that `case` takes; `ops_per_s` is of its kind of products."""
        return max(case.num_bytes / self.bytes_per_s, case.num_ops / self.ops_per_s)


def all_cases(threads: Threads) -> list[Case]:
    """Every kernel at all sizes that the table has."""
    formats: tuple[Format, ...] = ("bf16", "int8")
    cases = [linear_case(threads, kind, rows) for kind in formats for rows in (1, 16, 64, 512)]
    cases += [linear_case(threads, kind, rows, gated=True) for kind in formats for rows in FEW]
    cases += [layers_case(threads, kind, rows) for kind in formats for rows in FEW]
    cases += [head_case(threads, kind, rows) for kind in formats for rows in FEW]
    cases += [experts_case(threads, kind, rows) for kind in formats for rows in FEW]
    cases += [make(threads, rows) for make in (embed_case, norm_case, place_case, route_case) for rows in FEW]
    for rows, tokens in DECODED:
        cases.append(attention_case(threads, f"decode, {rows} rows of {tokens:,}", rows, tokens - 1, tokens))
    cases += [attention_case(threads, f"prompt of {tokens}", 1, 0, tokens) for tokens in (512, 2048)]
    cases += [delta_case(threads, f"gated delta, {rows} rows", rows, 255, 256) for rows in (1, 4, 16)]
    cases += [delta_case(threads, f"gated delta, prompt of {tokens}", 1, 0, tokens) for tokens in (512, 2048)]
    for name, request in (
        ("best token", CoreSamplingParams(temperature=0.0)),
        ("drawn token", CoreSamplingParams(seed=0)),
        ("drawn with top_p 0.9", CoreSamplingParams(seed=0, top_p=0.9)),
    ):
        cases += [choice_case(threads, name, rows, request) for rows in FEW]
    wake = waking(threads)
    return [dataclasses.replace(case, wake=wake) for case in cases]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of each case milliseconds and share of its limit; and what the machine did all the while."""

    cases: list[tuple[Spread, Spread]]
    gbytes_per_s: Spread
    tera_ops_per_s: dict[Format, Spread]


def memory_gbytes_per_s(clock: Callable[[], float], rounds: int = 9) -> float:
    """How fast memory is read as it lies: the median."""
    memory = torch.ones(LIMIT_BYTES // 8, dtype=torch.int64)
    rates = []
    for _ in range(rounds):
        begun = clock()
        memory.sum()
        rates.append(LIMIT_BYTES / (clock() - begun) / 1e9)
    return spread_of(rates).median


def measure(cases: list[Case], rounds: int, clock: Callable[[], float]) -> Measured:
    """All cases in turns; the first turn warms up."""
    memory = torch.ones(LIMIT_BYTES // 8, dtype=torch.int64)
    x, y = (torch.randn(LIMIT_SIZE, LIMIT_SIZE).bfloat16() for _ in range(2))
    a, b = (torch.randint(-127, 128, (LIMIT_SIZE, LIMIT_SIZE), dtype=torch.int8) for _ in range(2))
    products: dict[Format, Callable[[], object]] = {"bf16": lambda: x @ y, "int8": lambda: torch._int_mm(a, b)}

    def seconds(call: Callable[[], object]) -> float:
        begun = clock()
        call()
        return clock() - begun

    times: list[list[float]] = [[] for _ in cases]
    shares: list[list[float]] = [[] for _ in cases]
    rates: list[float] = []
    tera_ops: dict[Format, list[float]] = {kind: [] for kind in products}
    for turn in range(rounds + 1):
        for case, own, share in zip(cases, times, shares, strict=True):
            ops_per_s = 2 * LIMIT_SIZE**3 / seconds(products[case.products])
            limits = Limits(LIMIT_BYTES / seconds(memory.sum), ops_per_s)
            case.before()
            case.wake()
            took = seconds(case.call) / case.times
            if turn:
                own.append(took * 1e3)
                share.append(limits.seconds(case) / took)
                rates.append(limits.bytes_per_s / 1e9)
                tera_ops[case.products].append(ops_per_s / 1e12)
    return Measured(
        [(spread_of(own), spread_of(share)) for own, share in zip(times, shares, strict=True)],
        spread_of(rates),
        {kind: spread_of(found) for kind, found in tera_ops.items() if found},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and write it when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: for a machine that others use, too")
    report.add_write_flags(parser, "kernels")
    args = parser.parse_args(argv)
    bench = report.Run("kernels", argv, module="kernels")
    torch.set_num_threads(args.cpu_threads)
    torch.manual_seed(0)
    cases = all_cases(Threads(args.cpu_threads))
    reader = StripReader(args.cpu_threads)
    for by_heads, how in ((True, "by heads"), (False, "by pages")):
        for rows, tokens in DECODED:
            name = f"only read {how}, {rows} rows of {tokens:,}"
            cases.append(reading_case(reader, name, rows, tokens, by_heads=by_heads))
    measured = measure(cases, args.rounds, CLOCKS[args.clock])
    results, memory, products = measured.cases, measured.gbytes_per_s, measured.tera_ops_per_s
    facts = bench.facts(
        memory_gb_s=dataclasses.asdict(memory),
        products_tera_ops_s={kind: dataclasses.asdict(spread) for kind, spread in products.items()},
        cases=[
            {"name": case.name, "ms": dataclasses.asdict(ms), "share": dataclasses.asdict(share)}
            for case, (ms, share) in zip(cases, results, strict=True)
        ],
    )
    lines = [[case.name, ms.show(2), share.show(2)] for case, (ms, share) in zip(cases, results, strict=True)]
    rates = " and ".join(f"{spread.show(2)} ({kind})" for kind, spread in products.items())
    text = f"""# CPU kernels, {facts["date"]}

{best_level()}, {args.cpu_threads} threads, {args.clock} time, median (least-most) of {args.rounds} rounds.

The limits: memory is read at {memory.show(1)} GB/s; products are {rates} tera-operations
a second. What `place`, `norm`, `route` and `embed` touch lies mostly in the caches: their shares of what memory could
do may be above 1.

{markdown_table(["30 layers, one of experts, or tokens of 49,152", "ms", "share of the limit"], lines)}

{report.footer(facts, own_load=args.cpu_threads)}
"""
    bench.publish(args, text, facts)
    return 0


if __name__ == "__main__":
    report.restart_without_spinning("kernels")
    sys.exit(main())
