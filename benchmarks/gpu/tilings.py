"""Decode of the 8B shape under other choices than attention's own: where a device of another kind may want them.

    python -m benchmarks.gpu.tilings [--hybrid] [--batches 1 16 64] [--only NAME ...]

With `--hybrid` decode and prefill of the shape of Qwen3.5-0.8B, under other choices than GatedDeltaNet's. Each
alternative is captured and timed with overlap, as in `check_cuda`, beside the same floor; the choice as it is comes
first and last, for what lies between its two figures is noise. Prints, writes nothing. A minute on one GPU. Tilings of
products: `products.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.check_cuda import EXIT_NO_DEVICE
from benchmarks.gpu.shapes import HYBRID_MODELS, MODELS, TINY_HYBRID_MODELS, TINY_MODELS
from benchmarks.gpu.timings import Limits, Plan, Timer, build_dummy, measure_limits
from pdserve.executor.graphs import Capture, EagerCapture, GraphCapture
from pdserve.model.gpu import decode_attention, gated_delta, gated_delta_prefill, small_batch_gemm
from pdserve.model.gpu.decode_attention import AttentionTiling as Attention

Change = tuple[Any, str, Any]
"""An object, and what one of its attributes is to be."""


def _attention(keys: int, warps: int) -> Change:
    return Attention, "of", lambda *args: Attention(keys, warps)


def alternatives() -> dict[str, list[Change]]:
    """By name."""
    return {
        "as it is": [],
        "attention: 64 keys, 4 warps": [_attention(64, 4)],
        "attention: 32 keys, 4 warps": [_attention(32, 4)],
        "attention: 128 keys, 8 warps": [_attention(128, 8)],
        "attention: parts of 64 keys": [(decode_attention, "_PART_TOKENS", 64)],
        "attention: parts of 256 keys": [(decode_attention, "_PART_TOKENS", 256)],
        "attention: 8 programs a multiprocessor": [(decode_attention, "_WAVES", 8)],
        "products: all by cuBLAS": [(small_batch_gemm, "MAX_ROWS", 0)],
        "as it is, again": [],
    }


def hybrid_alternatives() -> dict[str, list[Change]]:
    """By name, those of GatedDeltaNet."""
    return {
        "as it is": [],
        "decode: 64 columns of a state": [(gated_delta, "_BLOCK_V", 64)],
        "decode: 16 columns of a state": [(gated_delta, "_BLOCK_V", 16)],
        "decode: 8 columns of a state for few rows": [(gated_delta, "_SMALL_BLOCK_V", 8)],
        "decode: 2 warps": [(gated_delta, "_WARPS", 2)],
        "prefill: 16 columns of a state": [(gated_delta_prefill, "STATE_COLUMNS", 16)],
        "prefill: 64 columns of a state": [(gated_delta_prefill, "STATE_COLUMNS", 64)],
        "prefill: 32 columns of outputs": [(gated_delta_prefill, "OUTPUT_COLUMNS", 32)],
        "prefill: 8 warps for a chunk's matrices": [(gated_delta_prefill, "_WARPS", 8)],
        "as it is, again": [],
    }


@contextlib.contextmanager
def changed(changes: Sequence[Change]) -> Iterator[None]:
    """Within, things are as `changes` say."""
    with contextlib.ExitStack() as stack:
        for target, name, value in changes:
            is_function = isinstance(target, type)
            stack.enter_context(mock.patch.object(target, name, staticmethod(value) if is_function else value))
        yield


def measure(
    config: dict[str, Any],
    plan: Plan,
    limits: Limits,
    named: dict[str, list[Change]],
    capture: Callable[[], Capture],
    *,
    with_prefills: bool = False,
) -> None:
    """Build the model once, and capture and time it under each alternative."""
    with tempfile.TemporaryDirectory() as directory:
        built = build_dummy(Path(directory), config, plan)
    timer, width = Timer(built, limits, plan), max(len(name) for name in named)
    for name, changes in named.items():
        with changed(changes):
            built.executor.capture_decode(plan.batches, capture())
            timings = [timer.decode(batch, ahead=True) for batch in plan.batches]
            timings += [timer.prefill(num_tokens) for num_tokens in plan.prefills if with_prefills]
        shown = (
            f"{one.tokens}: {one.median_s * 1e3:.3f} ms ({one.low_s * 1e3:.3f}-{one.high_s * 1e3:.3f}), "
            f"{one.floor_s / one.median_s:.1%} of the limit"
            for one in timings
        )
        print(f"{name:<{width}}  {' | '.join(shown)}", flush=True)
    built.executor.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--hybrid", action="store_true", help="GatedDeltaNet's choices")
    parser.add_argument("--only", nargs="*", help="of the alternatives, by name")
    args = parser.parse_args(argv)
    known = hybrid_alternatives() if args.hybrid else alternatives()
    if unknown := set(args.only or ()) - set(known):
        parser.error(f"--only: {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    if not torch.cuda.is_available():
        print("no CUDA device: torch.cuda.is_available() is False; nothing was measured")
        return EXIT_NO_DEVICE
    named = {name: changes for name, changes in known.items() if args.only is None or name in args.only}
    plan = Plan(batches=tuple(sorted(args.batches)), prefills=(2048,))
    limits = measure_limits(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}: copy {limits.copy_bytes_s / 1e12:.2f} TB/s")
    config = HYBRID_MODELS["Qwen3.5-0.8B"] if args.hybrid else MODELS["Qwen3-8B"]
    measure(config, plan, limits, named, GraphCapture, with_prefills=args.hybrid)
    return 0


def try_out(*, hybrid: bool = False, only: Sequence[str] = ()) -> None:
    """The same on a CPU, at a tiny shape, by Triton's interpreter; `only` these alternatives if there are any."""
    plan = Plan(
        device="cpu", attention_backend="triton", page_size=4, batches=(1, 2), context=5, prefills=(6,), num_warm=0,
        num_timed=2,
    )  # fmt: skip
    config = TINY_HYBRID_MODELS["tiny-hybrid"] if hybrid else TINY_MODELS["tiny"]
    named = hybrid_alternatives() if hybrid else alternatives()
    chosen = {name: changes for name, changes in named.items() if not only or name in only}
    measure(config, plan, Limits(1e9, 1e9), chosen, EagerCapture, with_prefills=hybrid)


if __name__ == "__main__":
    sys.exit(main())
