"""One call on a machine with one GPU: is the CUDA path right, and how far is it from what the device can do?

    python -m benchmarks.gpu.check_cuda [--hybrid] [--write] [--skip-checks] [--skip-timings] [--models Qwen3-8B ...]
    python -m benchmarks.gpu.check_cuda --tiny          on a CPU, with tiny shapes: does the program work?

First kernels beside torch's at the shapes of real models, then the checks of `executor_checks`, `ahead_checks` and
`serving_checks` for tiny models against the CPU: with graphs and without, by each attention backend that is there. Then
decode and prefill of models of the shapes of Qwen3-0.6B, 8B and 30B-A3B with random weights, with and without graphs
and overlap, beside the copy bandwidth and the matmul rate of the same device in the same run, and where the time of a
decode step goes.

With `--hybrid` the same of models with recurrent layers or windows: kernels of GatedDeltaNet and of windows, tiny
models, decode and prefill of Qwen3.5-0.8B and of 8 layers of Qwen3-Next.

With `--tiny` kernels are run by Triton's interpreter, graphs are work that is done again, and of the checks there are
those of kernels: for whole models there is nothing to compare with.

Report, figures and traces go into $OUT when that is set, else with `--write` into `benchmarks/results/`. Stops
checking after half of `--max-minutes`, and measuring after all of them. Exit status: 0 all checks passed, 1 one failed,
3 there is no CUDA device.
What it needs is in `benchmarks/README.md`; flashinfer and llguidance are used where they are installed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import multiprocessing
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
if __name__ == "__main__" and "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which transformers does

import torch

from benchmarks import report
from benchmarks.gpu import ahead_checks, kernel_checks, kernel_timings, model_timings, serving_checks, timings
from benchmarks.gpu import executor_checks as checks
from benchmarks.gpu.shapes import HYBRID_MODELS, MODELS, TINY_HYBRID_MODELS, TINY_MODELS
from pdserve.config.groups import AttentionBackendName
from tests import model_families
from tests.tiny import EOS_ID, FAMILIES, Family, make_tiny

EXIT_FAILED, EXIT_NO_DEVICE = 1, 3
VARIANTS: dict[str, dict[str, Any]] = {
    "torch": {"attention_backend": "torch"},
    "triton": {"attention_backend": "triton"},
    "triton without graphs": {"attention_backend": "triton", "disable_cuda_graph": True},
}
"""Besides `auto`; flashinfer has no float32."""
HYBRID_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Of `tests.model_families`."""
TINY_PLAN = timings.Plan(
    device="cpu", attention_backend="triton", page_size=4, batches=(2,), context=5, prefills=(6,), num_warm=0,
    num_timed=2,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a check; `error` is None when it passed."""

    name: str
    error: str | None
    seconds: float


HasTime = Callable[[], bool]


def run_checks(
    named: Sequence[tuple[str, Callable[[], object]]], has_time: HasTime = lambda: True
) -> list[Outcome]:  # fmt: skip
    """Run all, whatever fails, as long as `has_time`: what is left then is no outcome."""
    outcomes = []
    for name, check in named:
        if not has_time():
            break
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


def checks_of(
    family: str, checkpoint: Path, other: Path, device: checks.Device
) -> list[tuple[str, Callable[[], object]]]:
    """All checks of one model, by name. `other`: a checkpoint of the model with other weights."""
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
        *(
            (
                f"{family}: greedy fp32 tokens, {name}",
                partial(checks.check_greedy, checkpoint, device, 16, expected, **how),
            )
            for name, how in VARIANTS.items()
        ),
        (f"{family}: fp32 log-probabilities", partial(checks.check_logprobs, checkpoint, device)),
        (f"{family}: fp32 log-probabilities of a prompt", partial(checks.check_prompt_logprobs, checkpoint, device)),
        (f"{family}: seeded sampling", partial(checks.check_sampling, checkpoint, device)),
        (f"{family}: bf16 results are finite in a pool of NaN", partial(checks.check_finite_bf16, checkpoint, device)),
        (f"{family}: steps launched ahead", partial(ahead_checks.check_ahead, checkpoint, device)),
        (f"{family}: a launch never waits", partial(ahead_checks.check_launch_never_waits, checkpoint, device)),
        (f"{family}: layer events", partial(ahead_checks.check_layer_events, checkpoint, device)),
        *(
            (
                f"{family}: pages to the host and back, page size {size}",
                partial(ahead_checks.check_offload, checkpoint, device, size),
            )
            for size in checks.PAGE_SIZES
        ),
        *(
            (
                f"{family}: pages to the host tier and back beside steps, page size {size}",
                partial(serving_checks.check_host_tier, checkpoint, device, size),
            )
            for size in checks.PAGE_SIZES
        ),
        (f"{family}: other weights", partial(serving_checks.check_other_weights, checkpoint, other, device)),
    ]


def backends() -> tuple[AttentionBackendName, ...]:
    """Those that read pages in place, as far as they are installed."""
    return ("triton", "flashinfer") if importlib.util.find_spec("flashinfer") else ("triton",)


def check_kernels(deadline: float) -> tuple[list[Outcome], list[str]]:
    """Every check of every kernel, until `time.monotonic()` is there; and what there was no time for."""
    return _run_until(kernel_checks.checks(torch.device("cuda"), backends()), deadline)


def check_family(family: Family, deadline: float) -> tuple[list[Outcome], list[str]]:
    """The same of a tiny model."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint, other = (make_tiny(family, Path(directory, name), seed=seed) for seed, name in enumerate("ab"))
        return _run_until(checks_of(family, checkpoint, other, "cuda"), deadline)


def check_hybrid_kernels(deadline: float) -> tuple[list[Outcome], list[str]]:
    """The checks of kernels that hybrid models need beside those of others."""
    return _run_until(kernel_checks.hybrid_checks(torch.device("cuda")), deadline)


def check_hybrid_family(name: str, deadline: float) -> tuple[list[Outcome], list[str]]:
    """The same of a tiny hybrid model."""
    family = model_families.FAMILIES[name]
    with tempfile.TemporaryDirectory() as directory:
        dataclasses.replace(family, changes=family.changes | {"eos_token_id": EOS_ID}).write(Path(directory))
        return _run_until(hybrid_checks_of(name, Path(directory), "cuda"), deadline)


def hybrid_checks_of(name: str, checkpoint: Path, device: checks.Device) -> list[tuple[str, Callable[[], object]]]:
    """Checks of a model with recurrent layers, by name: tokens of the CPU, with graphs and without."""
    expected = checks.greedy_tokens(checkpoint, "cpu", page_size=16, chunk=None, dtype="float32")
    return [
        *(
            (
                f"{name}: greedy fp32 tokens, {how}",
                partial(checks.check_greedy, checkpoint, device, 16, expected, **flags),
            )
            for how, flags in VARIANTS.items()
        ),
        (f"{name}: seeded sampling", partial(checks.check_sampling, checkpoint, device)),
        (f"{name}: bf16 results are finite", partial(checks.check_finite_bf16, checkpoint, device)),
        (f"{name}: steps launched ahead", partial(ahead_checks.check_ahead, checkpoint, device)),
        (f"{name}: a launch never waits", partial(ahead_checks.check_launch_never_waits, checkpoint, device)),
    ]


def _run_until(
    named: Sequence[tuple[str, Callable[[], object]]], deadline: float
) -> tuple[list[Outcome], list[str]]:  # fmt: skip
    outcomes = run_checks(named, lambda: time.monotonic() < deadline)
    return outcomes, [name for name, _ in named[len(outcomes) :]]


def check_all(families: Sequence[Family], deadline: float) -> tuple[list[Outcome], list[str]]:
    """Kernels and `families`, each in a process of its own, for most of the time kernels are being compiled."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1 + len(families), mp_context=context) as pool:
        jobs = [pool.submit(check_kernels, deadline)]
        jobs += [pool.submit(check_family, family, deadline) for family in families]
        found = [job.result() for job in jobs]
    missing = [name for _, names in found for name in names]
    missing += [f"the family {family}" for family in FAMILIES if family not in families]
    return [outcome for outcomes, _ in found for outcome in outcomes], missing


def check_all_hybrid(deadline: float) -> tuple[list[Outcome], list[str]]:
    """Kernels and models with recurrent layers, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1 + len(HYBRID_FAMILIES), mp_context=context) as pool:
        jobs = [pool.submit(check_hybrid_kernels, deadline)]
        jobs += [pool.submit(check_hybrid_family, name, deadline) for name in HYBRID_FAMILIES]
        found = [job.result() for job in jobs]
    return [one for outcomes, _ in found for one in outcomes], [name for _, names in found for name in names]


def document(facts: dict[str, Any], outcomes: Sequence[Outcome], timed: str) -> str:
    """The whole report in Markdown."""
    passed = sum(outcome.error is None for outcome in outcomes)
    lines = [f"- {outcome.name}: {'passed' if outcome.error is None else outcome.error}" for outcome in outcomes]
    lines += [f"- left out: {what}" for what in facts["left_out"]]
    return f"""# CUDA path on {facts["device"]}, {facts["date"]}

torch {facts["torch"]} (CUDA {facts["cuda"]}), revision {facts["revision"]}, host {facts["machine"]["cpu_model"]}; \
command: `{facts["command"]}`

{timed}
## Checks: {passed} of {len(outcomes)} passed

{chr(10).join(lines)}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Check, time, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--write", action="store_true", help="write into benchmarks/results when $OUT is not set")
    parser.add_argument("--skip-checks", action="store_true", help="only the timings")
    parser.add_argument("--skip-timings", action="store_true", help="only the checks")
    parser.add_argument("--hybrid", action="store_true", help="what models with recurrent layers or windows need")
    parser.add_argument("--models", nargs="*", choices=MODELS | HYBRID_MODELS, help="those to time")
    parser.add_argument("--attention-backend", choices=("auto", "torch", *backends()), help="to time")
    parser.add_argument("--max-minutes", type=float, default=9.0, help="no check or measurement begins after so long")
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES), help="tiny models to check")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU: does the program work?")
    args = parser.parse_args(argv)
    if not args.tiny and not torch.cuda.is_available():
        print("no CUDA device: torch.cuda.is_available() is False; nothing was checked")
        return EXIT_NO_DEVICE
    began = time.monotonic()
    directory = report.RESULTS if args.write else None
    if os.environ.get("OUT"):
        directory = Path(os.environ["OUT"])

    def has_time() -> bool:
        return bool(time.monotonic() - began < 60 * args.max_minutes)

    facts = facts_of(args.tiny, argv)
    facts["left_out"] = [] if args.tiny or args.skip_checks else left_out()
    outcomes, timed = [], ""
    if not args.skip_checks:
        if args.tiny:
            outcomes = tiny_checks(hybrid=args.hybrid)
        else:
            minutes = args.max_minutes if args.skip_timings else args.max_minutes / 2
            deadline = began + 60 * minutes
            outcomes, missing = check_all_hybrid(deadline) if args.hybrid else check_all(args.families, deadline)
            facts["left_out"] += missing
    if not args.skip_timings:
        results = model_timings.Results(limits_of(args.tiny))
        kernels = time_kernels(args.tiny, results.limits, hybrid=args.hybrid)
        model_timings.time_models(
            models_of(args.models, tiny=args.tiny, hybrid=args.hybrid),
            plan_of(args.tiny, args.attention_backend), results, out=directory,
            has_time=has_time,
        )  # fmt: skip
        timed = model_timings.section(results) + "\n" + kernel_timings.section(kernels)
        facts |= dataclasses.asdict(results) | {"kernels": [dataclasses.asdict(one) for one in kernels]}
    facts["checks"] = [dataclasses.asdict(outcome) for outcome in outcomes]
    text = document(facts, outcomes, timed)
    print("\n" + text)
    if directory is not None:
        slug = "-".join(facts["device"].lower().split())
        for path in report.write_results(directory, f"cuda-{slug}", text, facts):
            print(f"wrote {path}")
    return EXIT_FAILED if any(outcome.error for outcome in outcomes) else 0


def facts_of(tiny: bool, argv: Sequence[str] | None) -> dict[str, Any]:
    """What ran where."""
    return {
        "date": report.today(),
        "device": "CPU, tiny shapes" if tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "revision": report.git_revision(),
        "command": report.command_line("benchmarks.gpu.check_cuda", argv),
        "machine": report.machine(),
    }


def left_out() -> list[str]:
    """What is not checked here."""
    return [] if ahead_checks.has_grammars() else ["rows that follow a grammar, for llguidance is not installed"]


def plan_of(tiny: bool, backend: AttentionBackendName | None) -> timings.Plan:
    """What is timed, with another attention where one is asked for."""
    plan = TINY_PLAN if tiny else timings.Plan()
    return plan if backend is None else dataclasses.replace(plan, attention_backend=backend)


def models_of(names: Sequence[str] | None, *, tiny: bool, hybrid: bool) -> dict[str, dict[str, Any]]:
    """Models to time: those of these names, or all of the kind."""
    if tiny:
        return TINY_HYBRID_MODELS if hybrid else TINY_MODELS
    known = MODELS | HYBRID_MODELS
    return {name: known[name] for name in (names or (HYBRID_MODELS if hybrid else MODELS))}


def tiny_checks(*, hybrid: bool = False) -> list[Outcome]:
    """The checks of kernels, where Triton's interpreter runs them."""
    cpu = torch.device("cpu")
    if hybrid:
        return run_checks(kernel_checks.hybrid_checks(cpu, tiny=True))
    return run_checks(kernel_checks.checks(cpu, ("triton",), tiny=True))


def time_kernels(tiny: bool, limits: timings.Limits, *, hybrid: bool) -> list[kernel_timings.KernelTiming]:
    """Every kernel alone."""
    device = torch.device("cpu" if tiny else "cuda")
    sizes = kernel_timings.TINY_SIZES if tiny else kernel_timings.SIZES
    found = []
    if hybrid:
        cases = kernel_timings.hybrid_cases(sizes, device)
    else:
        cases = kernel_timings.cases(sizes, ("triton",) if tiny else backends(), device)
    for case in cases:
        found.append(kernel_timings.measure(case, limits, device))
        print(f"{case.name}: {found[-1].seconds * 1e6:.1f} us", flush=True)
    return found


def limits_of(tiny: bool) -> timings.Limits:
    """What the device can do."""
    if tiny:
        return timings.measure_limits(torch.device("cpu"), copy_bytes=1 << 20, size=64)
    return timings.measure_limits(torch.device("cuda"))


if __name__ == "__main__":
    sys.exit(main())
