"""Each CPU kernel against what this machine can do: bytes read and products computed, measured in the same rounds.

    python -m benchmarks.kernels --cpu-threads 2 --rounds 9 [--write]

The limits are torch's: the sum over memory far larger than the caches, and oneDNN's bf16 product of square matrices. A
kernel's limit is the slower of the two for the bytes and products that it needs; the share of it that the kernel
reaches is the median over rounds, each with its own limits, so that a busy machine slows both alike. KV lies in pages,
strips of 12 KB and less far from each other, which nothing reads as fast as one piece of memory: the last cases of the
table read what decode attention reads, and compute nothing (`strip_reader.cpp`, for which there must be a g++).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks import report
from benchmarks.report import Spread, markdown_table, spread_of
from benchmarks.strip_reader import StripReader
from pdserve.base.native import best_level
from pdserve.executor.row_params import RowParams
from pdserve.memory.shared import allocate_private
from pdserve.model.forward_batch import ForwardBatch, HostRows
from pdserve.model.native.choice import NativeChooser
from pdserve.model.native.program import HeadShape, Program, Threads
from pdserve.model.native.weights import Arena, Format, open_packed, pack
from pdserve.protocol.sampling import SamplingParams

HEADS = HeadShape(layers=30, num_heads=9, num_kv_heads=3, page_tokens=16, dim=64)
NO_HEADS = HeadShape(layers=1, num_heads=1, num_kv_heads=1, page_tokens=1, dim=2)
NUM_OUT, NUM_IN = 3072, 576
"""The largest linear layer of SmolLM2-135M, as often as it has layers: together larger than the caches."""
TOKEN_BYTES = 2 * HEADS.num_kv_heads * HEADS.dim * 2
"""Of the keys and values of a token in one layer."""
DECODED = ((1, 256), (16, 256), (64, 256), (1, 4096), (16, 1024))
"""Rows and tokens of each."""
VOCAB = 49152
EXPERTS, TOP_K, EXPERT_OUT, EXPERT_IN = 32, 8, 768, 2048
"""A layer with experts of the size of Qwen3-30B-A3B's, of which it has a quarter."""
LIMIT_BYTES = 256 << 20
LIMIT_SIZE = 1536
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one size: what it reads at least, and the operations of its products (an addition is one)."""

    name: str
    num_bytes: float
    num_ops: float
    call: Callable[[], object]
    before: Callable[[], object] = lambda: None
    """What a step does once for all its layers: not timed."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the machine did in one round: bytes and operations a second."""

    bytes_per_s: float
    ops_per_s: float

    def seconds(self, case: Case) -> float:
        """The least that `case` takes."""
        return max(case.num_bytes / self.bytes_per_s, case.num_ops / self.ops_per_s)


def rows_of(num_rows: int, start: int, end: int) -> tuple[ForwardBatch, int]:
    """Rows that compute positions `[start, end)` on scattered pages; and how many pages there are."""
    per_row = -(-end // HEADS.page_tokens)
    table = np.random.default_rng(0).permutation(num_rows * per_row).astype(np.int32).reshape(num_rows, per_row)
    positions = np.tile(np.arange(start, end), num_rows)
    pages = table[np.repeat(np.arange(num_rows), end - start), positions // HEADS.page_tokens].astype(np.int64)
    offsets = np.arange(num_rows) * (end - start)
    columns = torch.from_numpy(np.stack((positions * 0, positions, pages, positions % HEADS.page_tokens)))
    host = HostRows(np.full(num_rows, start), np.full(num_rows, end), offsets, table)
    return ForwardBatch(columns, torch.from_numpy(offsets + end - start - 1), host), num_rows * per_row


def linear_case(threads: Threads, format: Format, num_rows: int) -> Case:
    """All layers' products of `num_rows` rows."""
    arena, layers = Arena(), HEADS.layers
    weight = torch.randn(NUM_OUT, NUM_IN).bfloat16()
    kv = torch.zeros(1, 1, 2, 1, 1, 2, dtype=torch.bfloat16)
    program = Program(threads, best_level(), NO_HEADS, kv)
    source, out = program.buffer(NUM_IN, of_samples=True), program.buffer(NUM_OUT, of_samples=True)
    for _ in range(layers):
        program.linear(source, pack(arena, format, weight), out)
    program.begin_samples(num_rows)
    program.view(source, num_rows).normal_()
    item = 2 if format == "bf16" else 1
    rate = 1.0 if format == "bf16" else 0.5  # products of 8 bits are at twice the rate
    return Case(
        f"linear {format}, {num_rows} rows", layers * NUM_OUT * NUM_IN * item,
        layers * 2 * num_rows * NUM_OUT * NUM_IN * rate, lambda: program.run(0, program.num_ops),
    )  # fmt: skip


def experts_case(threads: Threads, format: Format, num_rows: int) -> Case:
    """One layer's experts of `num_rows` rows, which go anywhere."""
    arena = Arena()
    gate_up = open_packed(arena, format, 2 * EXPERT_OUT, EXPERT_IN, num_parts=2, count=EXPERTS)
    down = open_packed(arena, format, EXPERT_IN, EXPERT_OUT, count=EXPERTS)
    for index in range(EXPERTS):
        gate_up.put(torch.randn(2 * EXPERT_OUT, EXPERT_IN).bfloat16(), index=index)
        down.put(torch.randn(EXPERT_IN, EXPERT_OUT).bfloat16(), index=index)
    program = Program(threads, best_level(), NO_HEADS, torch.zeros(1, 1, 2, 1, 1, 2, dtype=torch.bfloat16))
    source, out = (program.buffer(EXPERT_IN, of_samples=True) for _ in range(2))
    chosen = program.buffer(TOP_K, torch.int64, of_samples=True)
    shares = program.buffer(TOP_K, of_samples=True)
    program.experts(source, gate_up, down, chosen, shares, out)
    program.begin_samples(num_rows)
    program.view(source, num_rows).normal_()
    program.view(shares, num_rows).fill_(1 / TOP_K)
    routes = torch.rand(num_rows, EXPERTS).argsort(-1)[:, :TOP_K]
    program.view(chosen, num_rows).copy_(routes)
    item = 2 if format == "bf16" else 1
    rate = 1.0 if format == "bf16" else 0.5
    size = 3 * EXPERT_OUT * EXPERT_IN
    return Case(
        f"experts {format}, {num_rows} rows", len(set(routes.flatten().tolist())) * size * item,
        2 * num_rows * TOP_K * size * rate, lambda: program.run(0, 1),
    )  # fmt: skip


def pages_of(num_pages: int) -> torch.Tensor:
    """KV of that many pages, where a server keeps it."""
    shape = (num_pages, HEADS.layers, 2, HEADS.num_kv_heads, HEADS.page_tokens, HEADS.dim)
    return torch.frombuffer(allocate_private(2 * math.prod(shape)), dtype=torch.bfloat16).fill_(1).view(shape)


def attention_case(threads: Threads, name: str, num_rows: int, start: int, end: int) -> Case:
    """All layers' attention of rows that compute `[start, end)`."""
    batch, num_pages = rows_of(num_rows, start, end)
    kv = pages_of(num_pages).normal_()
    program = Program(threads, best_level(), HEADS, kv)
    qkv = program.buffer((HEADS.num_heads + 2 * HEADS.num_kv_heads) * HEADS.dim)
    out = program.buffer(HEADS.num_heads * HEADS.dim)
    program.angles(torch.zeros(HEADS.dim // 2), 1.0)
    program.place(qkv, 0, None, None, 0.0)
    first = program.num_ops
    for layer in range(HEADS.layers):
        program.attend(layer, out)
    program.begin(batch)
    program.view(qkv, len(batch.positions)).normal_()
    program.run(0, program.num_ops)
    pairs = num_rows * sum(position + 1 for position in range(start, end))
    return Case(
        name, HEADS.layers * num_rows * end * TOKEN_BYTES, HEADS.layers * pairs * HEADS.num_heads * HEADS.dim * 4,
        lambda: program.run(first, program.num_ops), lambda: program.begin(batch),
    )  # fmt: skip


def reading_case(read: StripReader, name: str, num_rows: int, tokens: int, *, by_heads: bool) -> Case:
    """What attention reads, and nothing done with it: head by head, or page by page, where heads lie side by side."""
    batch, num_pages = rows_of(num_rows, tokens - 1, tokens)
    assert batch.host is not None, "rows have pages"
    kv = pages_of(num_pages)
    head = HEADS.page_tokens * HEADS.dim * kv.itemsize
    parts = np.arange(2 * HEADS.num_kv_heads).reshape(2, -1).T * head if by_heads else np.zeros((1, 1), dtype=np.int64)
    pages = batch.host.pages.astype(np.int64) * kv[0].nbytes
    strips = [
        (share[:, None, None, :] + parts[:, :, None]).ravel()
        for share in np.array_split(pages, read.num_threads, axis=1)
    ]
    return Case(
        name, kv.nbytes, 0.0,
        read.call_of(kv, strips, head if by_heads else 2 * HEADS.num_kv_heads * head, HEADS.layers),
    )  # fmt: skip


def choice_case(threads: Threads, name: str, num_rows: int, request: SamplingParams) -> Case:
    """A token for each row of logits; they are read once at least."""
    logits = torch.randn(num_rows, VOCAB) * 3
    params = RowParams(num_rows, ())
    for row in range(num_rows):
        params.set(row, 1, request, None)
    picked = params.pick(np.arange(num_rows), np.ones(num_rows, dtype=np.int64))
    chooser, points = NativeChooser(threads, best_level()), np.random.default_rng(0).random(num_rows)
    return Case(f"{name}, {num_rows} rows", 4 * num_rows * VOCAB, 0.0, lambda: chooser(logits, picked.columns, points))


def all_cases(threads: Threads) -> list[Case]:
    """Linear layers, experts, attention and the choice of tokens, at all sizes that the table has."""
    formats: tuple[Format, ...] = ("bf16", "int8")
    cases = [linear_case(threads, kind, rows) for kind in formats for rows in (1, 16, 64, 512)]
    cases += [experts_case(threads, kind, rows) for kind in formats for rows in (1, 16, 64)]
    for rows, tokens in DECODED:
        cases.append(attention_case(threads, f"decode, {rows} rows of {tokens:,}", rows, tokens - 1, tokens))
    cases += [attention_case(threads, f"prompt of {tokens}", 1, 0, tokens) for tokens in (512, 2048)]
    for name, request in (
        ("best token", SamplingParams(temperature=0.0)),
        ("drawn token", SamplingParams(seed=0)),
        ("drawn with top_p 0.9", SamplingParams(seed=0, top_p=0.9)),
    ):
        cases += [choice_case(threads, name, rows, request) for rows in (1, 16, 64)]
    return cases


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of each case milliseconds and share of its limit; and what the machine did all the while."""

    cases: list[tuple[Spread, Spread]]
    gbytes_per_s: Spread
    tera_ops_per_s: Spread


def measure(cases: list[Case], rounds: int, clock: Callable[[], float]) -> Measured:
    """All cases in turns; the first turn warms up."""
    memory = torch.ones(LIMIT_BYTES // 8, dtype=torch.int64)
    x, y = (torch.randn(LIMIT_SIZE, LIMIT_SIZE).bfloat16() for _ in range(2))

    def seconds(call: Callable[[], object]) -> float:
        begun = clock()
        call()
        return clock() - begun

    times: list[list[float]] = [[] for _ in cases]
    shares: list[list[float]] = [[] for _ in cases]
    found: list[Limits] = []
    for turn in range(rounds + 1):
        for case, own, share in zip(cases, times, shares, strict=True):
            limits = Limits(LIMIT_BYTES / seconds(memory.sum), 2 * LIMIT_SIZE**3 / seconds(lambda: x @ y))
            case.before()
            took = seconds(case.call)
            if turn:
                own.append(took * 1e3)
                share.append(limits.seconds(case) / took)
                found.append(limits)
    return Measured(
        [(spread_of(own), spread_of(share)) for own, share in zip(times, shares, strict=True)],
        spread_of([limits.bytes_per_s / 1e9 for limits in found]),
        spread_of([limits.ops_per_s / 1e12 for limits in found]),
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
        products_tera_ops_s=dataclasses.asdict(products),
        cases=[
            {"name": case.name, "ms": dataclasses.asdict(ms), "share": dataclasses.asdict(share)}
            for case, (ms, share) in zip(cases, results, strict=True)
        ],
    )
    lines = [[case.name, ms.show(2), share.show(2)] for case, (ms, share) in zip(cases, results, strict=True)]
    text = f"""# CPU kernels, {facts["date"]}

{best_level()}, {args.cpu_threads} threads, {args.clock} time, median (least-most) of {args.rounds} rounds.

The limits: memory is read at {memory.show(1)} GB/s; products of bf16 are {products.show(2)} tera-operations a second.

{markdown_table(["30 layers, one of experts, or tokens of 49,152", "ms", "share of the limit"], lines)}

{report.footer(facts, own_load=args.cpu_threads)}
"""
    bench.publish(args, text, facts)
    return 0


if __name__ == "__main__":
    report.restart_without_spinning("kernels")
    sys.exit(main())
