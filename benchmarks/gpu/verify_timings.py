"""The cost of a verify step beside a decode step: the shape of Qwen3-8B with random weights, batch 1 and 16.

    python -m benchmarks.gpu.verify_timings [--write] [--model Qwen3-8B] [--num-drafts 3]
    python -m benchmarks.gpu.verify_timings --tiny          on a CPU, with a tiny shape: does the program work?

A verify step computes the last token of each row and `--num-drafts` wrong drafts. Decode steps run kernel by kernel
and, where steps can be captured, as graphs, one by one and launched ahead. Verify steps run one by one and without
graphs, as servers run them. The report goes into $OUT when that is set, else with `--write` into `benchmarks/results/`.
No measurement begins after `--max-minutes`. Exit status: 3 without a CUDA device.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__" and "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which transformers does

import torch

from benchmarks import report
from benchmarks.gpu.shapes import HYBRID_MODELS, MODELS, TINY_MODELS
from benchmarks.gpu.timings import Limits, Plan, Timer, Timing, build_dummy, measure_limits
from pdserve.executor.graphs import EagerCapture, GraphCapture

EXIT_NO_DEVICE = 3
TINY_PLAN = Plan(
    device="cpu", attention_backend="triton", page_size=4, batches=(1, 2), context=5, prefills=(), num_warm=0,
    num_timed=2,
)  # fmt: skip
PLAN = Plan(batches=(1, 16), prefills=())


@dataclasses.dataclass(frozen=True)
class Measured:
    """Steps of one batch size, and how they were launched."""

    batch: int
    how: str
    timing: Timing


def measure(
    config: dict[str, Any], plan: Plan, limits: Limits, *, has_time: Callable[[], bool] = lambda: True
) -> list[Measured]:
    """Time decode and verify steps at each batch size of `plan`, as long as `has_time`."""
    with tempfile.TemporaryDirectory() as directory:
        built = build_dummy(Path(directory), config, plan)
    found: list[Measured] = []

    def add(batch: int, how: str, timed: Callable[[], Timing]) -> None:
        if has_time():
            found.append(Measured(batch, how, timed()))
            print(f"batch {batch}, {how}: {found[-1].timing.median_s * 1e3:.3f} ms", flush=True)

    try:
        timer = Timer(built, limits, plan)
        batches = [batch for batch in plan.batches if timer.fits(batch)]
        for batch in batches:
            add(batch, "decode", partial(timer.decode, batch, ahead=False))
            add(batch, f"verify, {1 + plan.num_drafts} tokens", partial(timer.verify, batch, plan.num_drafts))
        if batches and built.executor.can_capture:
            built.executor.capture_decode(tuple(batches), GraphCapture() if plan.device == "cuda" else EagerCapture())
            for batch in batches:
                add(batch, "decode, graph", partial(timer.decode, batch, ahead=False))
                add(batch, "decode, graph, overlap", partial(timer.decode, batch, ahead=True))
    finally:
        built.executor.close()
    return found


def table(measured: Sequence[Measured]) -> str:
    """The measurements in Markdown; the last column compares with the fastest decode steps of that batch size."""
    fastest = {
        batch: min(one.timing.median_s for one in measured if one.batch == batch and one.how.startswith("decode"))
        for batch in {one.batch for one in measured}
    }
    rows = [
        [
            str(one.batch),
            one.how,
            report.Spread(one.timing.median_s * 1e3, one.timing.low_s * 1e3, one.timing.high_s * 1e3).show(3),
            f"{one.timing.floor_s * 1e3:.3f}",
            f"{one.timing.median_s / fastest[one.batch]:.2f}",
        ]
        for one in sorted(measured, key=lambda one: one.batch)
    ]
    return report.markdown_table(["batch", "step", "ms (least-most)", "floor, ms", "times decode"], rows, num_text=2)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--write", action="store_true", help="write into benchmarks/results when $OUT is not set")
    parser.add_argument("--model", choices=MODELS | HYBRID_MODELS, default="Qwen3-8B")
    parser.add_argument("--num-drafts", type=int, default=3)
    parser.add_argument("--max-minutes", type=float, default=1.5, help="no measurement begins after so long")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on the CPU: does the program work?")
    args = parser.parse_args(argv)
    if not args.tiny and not torch.cuda.is_available():
        print("no CUDA device: torch.cuda.is_available() is False; nothing was measured")
        return EXIT_NO_DEVICE
    began = time.monotonic()
    name = next(iter(TINY_MODELS)) if args.tiny else args.model
    config = TINY_MODELS[name] if args.tiny else (MODELS | HYBRID_MODELS)[name]
    plan = dataclasses.replace(TINY_PLAN if args.tiny else PLAN, num_drafts=args.num_drafts)
    device = torch.device(plan.device)
    limits = measure_limits(device, copy_bytes=1 << 20, size=64) if args.tiny else measure_limits(device)
    measured = measure(config, plan, limits, has_time=lambda: time.monotonic() - began < 60 * args.max_minutes)
    facts: dict[str, Any] = {
        "date": report.today(),
        "device": "CPU, a tiny shape" if args.tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "revision": report.git_revision(),
        "command": report.command_line("benchmarks.gpu.verify_timings", argv),
        "model": name,
    }
    heading = f"# Verify steps beside decode steps: {name}, {plan.context} tokens of context"
    lines = [heading, "", *(f"- {key}: {value}" for key, value in facts.items()), "", table(measured), ""]
    text = "\n".join(lines)
    print("\n" + text)
    directory = Path(os.environ["OUT"]) if os.environ.get("OUT") else report.RESULTS if args.write else None
    if directory is not None:
        facts["measured"] = [dataclasses.asdict(one) for one in measured]
        for path in report.write_results(directory, "verify-" + "-".join(facts["device"].lower().split()), text, facts):
            print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
