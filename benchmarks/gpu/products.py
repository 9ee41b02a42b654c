"""Each product of few rows of three models alone, by every tiling that may suit it: which one a device wants.

    python -m benchmarks.gpu.products [--rows 1 16 64] [--only "8B qkv" ...]

A product is captured into a graph with a norm before it, as in a step, over as many copies of its weights as no cache
holds; the time is that of a product and a norm. Beside it torch's product, which is cuBLAS's, the tiling that
`small_batch_gemm` has for it, and what the weights take at the copy's rate. Kernels are compiled first, in processes
side by side. Prints, writes nothing. Three minutes on one GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.check_cuda import EXIT_NO_DEVICE
from benchmarks.gpu.timings import measure_limits
from pdserve.model.gpu import elementwise, small_batch_gemm
from pdserve.model.gpu.runtime import num_cores, shared_bytes
from pdserve.model.gpu.small_batch_gemm import SmallBatchTiling
from pdserve.model.layers.kernels import FastKernels

_COPY_BYTES = 1 << 30
_HIDDEN = 4096
"""Width of the norm."""
_REPLAYS = 7
_TENSOR_ROWS = 64
"""Rows from which on a step's inputs are kept a step longer (`wgmma`)."""


@dataclasses.dataclass(frozen=True)
class Product:
    """So many outputs and inputs; of a gate, outputs of each half."""

    num_outs: int
    num_in: int
    is_gate: bool = False

    @property
    def num_weights(self) -> int:
        """Lines of the weights."""
        return self.num_outs * (1 + self.is_gate)

    def mine(self, x: Tensor, weight: Tensor) -> Tensor:
        """By our kernel."""
        return small_batch_gemm.gated(x, weight, None) if self.is_gate else small_batch_gemm.linear(x, weight, None)

    def library(self, x: Tensor, weight: Tensor) -> Tensor:
        """By torch's product."""
        found = FastKernels().linear(x, weight, None)
        return elementwise.swiglu(*found.chunk(2, -1)) if self.is_gate else found

    def tiling(self, num_rows: int, device: torch.device) -> SmallBatchTiling:
        """What `small_batch_gemm` takes."""
        return SmallBatchTiling.of(num_rows, self.num_outs, device, is_gate=self.is_gate)


PRODUCTS = {
    "8B qkv": Product(6144, 4096), "8B out": Product(4096, 4096), "8B gate": Product(12288, 4096, is_gate=True),
    "8B down": Product(4096, 12288), "8B head": Product(151936, 4096),
    "30B qkv": Product(5120, 2048), "30B out": Product(2048, 4096), "30B router": Product(128, 2048),
    "30B head": Product(151936, 2048),
    "0.6B qkv": Product(4096, 1024), "0.6B out": Product(1024, 2048), "0.6B gate": Product(3072, 1024, is_gate=True),
    "0.6B down": Product(1024, 3072),
}  # fmt: skip
Kernel = tuple[SmallBatchTiling, int, bool]
"""A tiling, the number of rows, and whether it is a gate's."""


def candidates(product: Product, num_rows: int, num_cores: int, shared: int) -> Iterator[SmallBatchTiling]:
    """Tilings whose programs are there all at once, or in many turns, and that fit into `shared` bytes."""
    rows, halves = small_batch_gemm.padded(num_rows), 1 + product.is_gate
    for outs, depth, warps, stages in itertools.product((16, 32, 64, 128), (64, 128, 256), (2, 4, 8), range(3, 9)):
        if (warps == 2 and (outs > 16 or rows >= _TENSOR_ROWS)) or (warps == 8 and outs < 64):
            continue
        if rows * outs * halves > 64 * 32 * warps or depth * (rows + outs) <= 64 * 48:  # registers; too little at once
            continue
        buffers = stages - (rows < _TENSOR_ROWS)
        room = shared // ((rows + outs * halves) * depth * 2 * buffers + 1024)
        programs = -(-product.num_outs // outs)
        is_one_turn, is_many = programs <= room * num_cores, programs >= 4 * room * num_cores
        if 1 <= room <= 6 and (is_one_turn or is_many) and (outs == 16 or programs >= num_cores * 2 // 3):
            yield SmallBatchTiling(outs, depth, warps, stages)


def chosen(tiling: SmallBatchTiling) -> contextlib.AbstractContextManager[object]:
    """Within, products of few rows have this tiling."""
    return mock.patch.object(SmallBatchTiling, "of", staticmethod(lambda *args, **how: tiling))


def compile_all(kernels: Sequence[Kernel]) -> None:
    """In processes side by side, which leave them in Triton's cache."""
    workers = min(14, os.cpu_count() or 1)
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for failed in pool.map(compile_some, [kernels[first::workers] for first in range(workers)]):
            for line in failed:
                print("FAIL", line, flush=True)


def compile_some(kernels: Sequence[Kernel]) -> list[str]:
    """Launch each once on weights of a few lines; what went wrong."""
    failed = []
    for tiling, num_rows, is_gate in kernels:
        product = Product(tiling.outs, 4096, is_gate)
        x, weight = (torch.zeros(n, 4096, dtype=torch.bfloat16, device="cuda") for n in (num_rows, product.num_weights))
        try:
            with chosen(tiling):
                product.mine(x, weight)
        except Exception as error:
            failed.append(f"{tiling}, {num_rows} rows: {type(error).__name__}: {str(error)[:200]}")
    torch.cuda.synchronize()
    return failed


def seconds(work: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: Sequence[Tensor]) -> float:
    """Of a product and a norm: the median of some replays of one with each of `weights`."""
    hidden = torch.randn(len(x), _HIDDEN, dtype=x.dtype, device=x.device)
    scale = torch.ones(_HIDDEN, dtype=x.dtype, device=x.device)

    def chain() -> None:
        for weight in weights:
            elementwise.rms_norm(hidden, scale, 1e-6)
            work(x, weight)

    if x.device.type != "cuda":
        began = time.perf_counter()
        chain()
        return (time.perf_counter() - began) / len(weights)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        work(x, weights[0])
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            chain()
        times = []
        for _ in range(_REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / len(weights))
    return float(statistics.median(times))


def measure(
    name: str, product: Product, num_rows: int, tilings: Sequence[SmallBatchTiling], copy_bytes_s: float, most: int,
    device: torch.device, dtype: torch.dtype = torch.bfloat16, copy_bytes: int = _COPY_BYTES,
) -> None:  # fmt: skip
    """One product by cuBLAS, by its own tiling and by `tilings`, of which the `most` fastest are printed."""
    num_bytes = 2 * product.num_weights * product.num_in
    weights = [
        torch.randn(product.num_weights, product.num_in, dtype=dtype, device=device) * 0.02
        for _ in range(max(4, copy_bytes // num_bytes))
    ]
    x = torch.randn(num_rows, product.num_in, dtype=dtype, device=device)
    floor, expected = num_bytes / copy_bytes_s, product.library(x, weights[0]).float()
    own = product.tiling(num_rows, device)

    def line(what: str, took: float, error: float) -> str:
        return f"  {took * 1e6:7.2f} us  {floor / took:6.1%}  error {error:.1e}  {what}"

    print(f"{name}, {num_rows} rows: {floor * 1e6:.1f} us at the copy's rate", flush=True)
    print(line("cuBLAS", seconds(product.library, x, weights), 0.0))
    found = []
    for tiling in (own, *(one for one in tilings if one != own)):
        try:
            with chosen(tiling):
                error = ((product.mine(x, weights[0]).float() - expected).norm() / expected.norm()).item()
                found.append((seconds(product.mine, x, weights), error, tiling))
        except Exception as failure:
            print(f"  FAIL {tiling}: {type(failure).__name__}: {str(failure)[:100]}")
    for took, error, tiling in (*found[:1], *sorted(found[1:], key=lambda one: one[0])[:most]):
        print(line(f"{tiling}{' (its own)' if tiling == own else ''}", took, error), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--only", nargs="+", choices=PRODUCTS, default=list(PRODUCTS))
    parser.add_argument("--most", type=int, default=3, help="of the fastest are printed")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device: torch.cuda.is_available() is False; nothing was measured")
        return EXIT_NO_DEVICE
    device = torch.device("cuda")
    limits = measure_limits(device)
    print(f"{torch.cuda.get_device_name()}: copy {limits.copy_bytes_s / 1e12:.2f} TB/s", flush=True)
    cases = [
        (name, rows, list(candidates(PRODUCTS[name], rows, num_cores(device), shared_bytes(device))))
        for name, rows in itertools.product(args.only, args.rows)
    ]
    kernels = {
        (tiling, small_batch_gemm.padded(rows), PRODUCTS[name].is_gate)
        for name, rows, tilings in cases
        for tiling in tilings
    }
    compile_all(sorted(kernels, key=str))
    for name, rows, tilings in cases:
        measure(name, PRODUCTS[name], rows, tilings, limits.copy_bytes_s, args.most, device)
    return 0


def try_out() -> None:
    """The same on a CPU, at a tiny shape, by Triton's interpreter."""
    for product in (Product(48, 32), Product(24, 32, is_gate=True)):
        tilings = [SmallBatchTiling(16, 32, 4, 1), SmallBatchTiling(32, 16, 4, 1)]
        measure("tiny", product, 2, tilings, 1e9, 2, torch.device("cpu"), torch.float16, copy_bytes=1)


if __name__ == "__main__":
    sys.exit(main())
