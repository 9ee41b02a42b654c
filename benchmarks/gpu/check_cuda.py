"""One call on a machine with one GPU: is the CUDA executor right, and how far is it from what the device can do?

    python -m benchmarks.gpu.check_cuda [--write] [--skip-timings]

First the checks of `executor_checks` and `ahead_checks` for tiny Llama, Qwen2 and Qwen3 models, then decode and prefill
of a model of the shape of Qwen3-0.6B with random weights in bf16, beside the copy bandwidth and the matmul rate of the
same device in the same run. Writes into $OUT when that is set, else with `--write` into `benchmarks/results/`.
Exit status: 0 all checks passed, 1 one failed, 3 there is no CUDA device. Needs nothing but torch, transformers and
pdserve's light packages.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path: `benchmarks`, `pdserve` and `tests` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks import report
from benchmarks.gpu import ahead_checks, timings
from benchmarks.gpu import executor_checks as checks
from tests.tiny import FAMILIES, make_tiny

EXIT_FAILED, EXIT_NO_DEVICE = 1, 3


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a check; `error` is None when it passed."""

    name: str
    error: str | None
    seconds: float


def run_checks(named: Sequence[tuple[str, Callable[[], object]]]) -> list[Outcome]:
    """Run all, whatever fails."""
    outcomes = []
    for name, check in named:
        began, error = time.perf_counter(), None
        try:
            check()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            if not isinstance(caught, AssertionError):
                traceback.print_exc()
        outcomes.append(Outcome(name, error, time.perf_counter() - began))
        print(f"{'ok  ' if error is None else 'FAIL'} {name} {'' if error is None else error}", flush=True)
    return outcomes


def checks_of(family: str, checkpoint: Path, device: checks.Device) -> list[tuple[str, Callable[[], object]]]:
    """All checks of one model, by name."""
    expected = checks.greedy_tokens(checkpoint, "cpu", page_size=16, chunk=None, dtype="float32")
    return [
        *(
            (
                f"{family}: greedy fp32 tokens, whole and mixed batches, page size {size}",
                partial(checks.check_greedy, checkpoint, device, size, expected),
            )
            for size in checks.PAGE_SIZES
        ),
        *(
            (
                f"{family}: decode goes on with copied pages, page size {size}",
                partial(checks.check_hand_over, checkpoint, device, size),
            )
            for size in checks.PAGE_SIZES
        ),
        (f"{family}: fp32 log-probabilities", partial(checks.check_logprobs, checkpoint, device)),
        (f"{family}: fp32 log-probabilities of a prompt", partial(checks.check_prompt_logprobs, checkpoint, device)),
        (f"{family}: seeded sampling", partial(checks.check_sampling, checkpoint, device)),
        (f"{family}: bf16 results are finite in a pool of NaN", partial(checks.check_finite_bf16, checkpoint, device)),
        (f"{family}: steps launched ahead", partial(ahead_checks.check_ahead, checkpoint, device)),
        (f"{family}: a launch never waits", partial(ahead_checks.check_launch_never_waits, checkpoint, device)),
        (f"{family}: layer marks", partial(ahead_checks.check_layer_marks, checkpoint, device)),
        *(
            (
                f"{family}: pages to the host and back, page size {size}",
                partial(ahead_checks.check_offload, checkpoint, device, size),
            )
            for size in checks.PAGE_SIZES
        ),
    ]


def check_all(directory: Path) -> list[Outcome]:
    """Every check of every family."""
    outcomes = []
    for family in FAMILIES:
        outcomes += run_checks(checks_of(family, make_tiny(family, directory / family), "cuda"))
    return outcomes


def time_all(directory: Path) -> tuple[timings.Limits, list[timings.Timing]]:
    """The device's limits, then decode and prefill."""
    limits = timings.measure_limits(torch.device("cuda"))
    timer = timings.Timer(timings.build_dummy(directory / "dummy", timings.QWEN3_06B, "cuda"), limits)
    return limits, [*(timer.decode(batch) for batch in timings.BATCHES), timer.prefill()]


def timing_table(found: Sequence[timings.Timing]) -> str:
    """Steps beside their floors."""
    header = ["step", "ms (least-most)", "tok/s", "floor, ms", "time / floor"]
    body = [
        [
            one.name,
            report.Spread(one.median_s * 1e3, one.low_s * 1e3, one.high_s * 1e3).show(2),
            f"{one.tokens / one.median_s:.0f}",
            f"{one.floor_s * 1e3:.3f}",
            f"{one.median_s / one.floor_s:.1f}x",
        ]
        for one in found
    ]
    return report.markdown_table(header, body)


def document(facts: dict[str, Any], outcomes: Sequence[Outcome], timed: str) -> str:
    """The whole report in Markdown."""
    passed = sum(outcome.error is None for outcome in outcomes)
    lines = [f"- {outcome.name}: {'passed' if outcome.error is None else outcome.error}" for outcome in outcomes]
    return f"""# CUDA executor on {facts["device"]}, {facts["date"]}

torch {facts["torch"]} (CUDA {facts["cuda"]}), revision {facts["revision"]}, host {facts["machine"]["cpu_model"]}; \
command: `{facts["command"]}`

{timed}
## Checks: {passed} of {len(outcomes)} passed

{chr(10).join(lines)}
"""


def timings_section(limits: timings.Limits, found: Sequence[timings.Timing]) -> str:
    """Limits, table, and what the floors are."""
    return f"""## A model of the shape of Qwen3-0.6B, random weights, bf16, no CUDA graphs

Measured in the same run: copy {limits.copy_bytes_s / 1e12:.2f} TB/s (bytes read and written), \
bf16 matmul {limits.matmul_flop_s / 1e12:.0f} TFLOP/s.

{timing_table(found)}

Floors: decode reads all weights and all KV once at the copy's bytes a second; prefill does its multiplications at the
matmul's rate. A step is measured on the host, from the plan to the sampled tokens.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Check, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write into benchmarks/results when $OUT is not set")
    parser.add_argument("--skip-timings", action="store_true", help="only the checks")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device: torch.cuda.is_available() is False; nothing was checked")
        return EXIT_NO_DEVICE
    facts: dict[str, Any] = {
        "date": report.today(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "revision": report.git_revision(),
        "command": report.command_line("benchmarks.gpu.check_cuda", argv),
        "machine": report.machine(),
    }
    with tempfile.TemporaryDirectory() as temporary:
        outcomes = check_all(Path(temporary))
        timed = ""
        if not args.skip_timings:
            limits, found = time_all(Path(temporary))
            timed = timings_section(limits, found)
            facts |= {"limits": dataclasses.asdict(limits), "timings": [dataclasses.asdict(one) for one in found]}
    facts["checks"] = [dataclasses.asdict(outcome) for outcome in outcomes]
    text = document(facts, outcomes, timed)
    print("\n" + text)
    directory = Path(os.environ["OUT"]) if os.environ.get("OUT") else report.RESULTS if args.write else None
    if directory is not None:
        slug = "-".join(facts["device"].lower().split())
        for path in report.write_results(directory, f"cuda-{slug}", text, facts):
            print(f"wrote {path}")
    return EXIT_FAILED if any(outcome.error for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
