"""Whole models of published shapes on a device: decode with and without graphs and overlap, prefill, and the profile.

Called by `check_cuda.py`. Every figure stands beside its floor by the limits of the same device in the same run.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.gpu.timings import Limits, Plan, Timer, Timing, build_dummy
from pdserve.errors import PdserveError
from pdserve.executor.factory import LoadedEngine
from pdserve.executor.graphs import EagerCapture, GraphCapture

NUM_NAMED = 14
"""Kernels that a profile's table names."""
PROFILED_BATCHES = (1, 16, 64)


@dataclasses.dataclass(frozen=True)
class Measured:
    """One timing: of which model, and how the steps were launched."""

    model: str
    graphs: bool
    ahead: bool
    timing: Timing


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A step that was not timed, and why."""

    model: str
    step: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Profile:
    """Some steps of decode as the device saw them: seconds from first to last kernel, and those with one at work.

    `kernels`: name, seconds and calls, those that took longest first.
    """

    model: str
    batch: int
    span_s: float
    busy_s: float
    kernels: tuple[tuple[str, float, int], ...]


@dataclasses.dataclass
class Results:
    """All that was measured; grows model by model."""

    limits: Limits
    measured: list[Measured] = dataclasses.field(default_factory=list)
    skipped: list[Skipped] = dataclasses.field(default_factory=list)
    profiles: list[Profile] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def time_models(
    models: dict[str, dict[str, Any]], plan: Plan, results: Results, *, out: Path | None, has_time: Callable[[], bool]
) -> None:
    """Measure `models` one after the other into `results`, as long as `has_time`; traces go into `out`."""
    for name, config in models.items():
        if not has_time():
            results.notes.append(f"{name}: not measured, the time was over")
            continue
        with tempfile.TemporaryDirectory() as directory:
            try:
                built = build_dummy(Path(directory), config, plan)
            except (RuntimeError, PdserveError) as error:
                results.notes.append(f"{name}: not measured, {type(error).__name__}: {str(error)[:200]}")
                continue
        try:
            _time_model(name, built, plan, results, out, has_time)
        except torch.OutOfMemoryError as error:
            results.notes.append(f"{name}: not measured to the end, {str(error)[:200]}")
        finally:
            built.executor.close()
            del built
            gc.collect()
            if plan.device == "cuda":
                torch.cuda.empty_cache()


def _time_model(
    name: str, built: LoadedEngine, plan: Plan, results: Results, out: Path | None, has_time: Callable[[], bool]
) -> None:
    """One model: without graphs first, for they cannot be taken back."""
    timer = Timer(built, results.limits, plan)
    batches = [batch for batch in plan.batches if timer.fits(batch)]
    prompts = [num_tokens for num_tokens in plan.prefills if timer.fits_prompt(num_tokens)]
    steps = [f"decode {batch}" for batch in plan.batches if batch not in batches]
    steps += [f"prefill {num_tokens}" for num_tokens in plan.prefills if num_tokens not in prompts]
    reason = f"KV does not fit the pool of {built.max_total_tokens} tokens"
    results.skipped += [Skipped(name, step, reason) for step in steps]

    def measure(graphs: bool) -> None:
        for batch in batches:
            for ahead in (False, True):
                if has_time():
                    found = timer.decode(batch, ahead=ahead)
                    results.measured.append(Measured(name, graphs, ahead, found))
                    print(line_of(results.measured[-1]), flush=True)

    for num_tokens in prompts:
        if has_time():
            results.measured.append(Measured(name, False, False, timer.prefill(num_tokens)))
            print(line_of(results.measured[-1]), flush=True)
    measure(False)
    if not batches:
        return
    if built.executor.can_capture:
        built.executor.capture_decode(tuple(batches), GraphCapture() if plan.device == "cuda" else EagerCapture())
        measure(True)
    else:
        results.notes.append(f"{name}: steps cannot be captured with this attention backend")
    if plan.device == "cuda":
        for batch in PROFILED_BATCHES:
            if batch in batches and has_time():
                results.profiles.append(_profile(name, timer, batch, out))


def _profile(name: str, timer: Timer, batch: int, out: Path | None) -> Profile:
    """Decode steps launched ahead, seen by torch's profiler; its trace is kept in `out`.

    The steps are those that are timed, without the first ones. The host's side is left out: to watch it makes the host
    so slow that the device waits for it.
    """
    timer.decode_steps(batch, ahead=True)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def before(step: int) -> None:
        if step == timer.num_warm:
            torch.cuda.synchronize()
            profiler.start()

    timer.decode_steps(batch, ahead=True, before=before)
    torch.cuda.synchronize()
    profiler.stop()
    kernels = [
        (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events()  # type: ignore[no-untyped-call]
        if event.device_type.name == "CUDA"
    ]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(out / f"{report.today()}-trace-{name}-batch-{batch}.json.gz"))
    return summary(name, batch, kernels)


def summary(model: str, batch: int, kernels: Sequence[tuple[str, float, float]]) -> Profile:
    """A profile of `(name, begin, end)` of the device's kernels and copies, in seconds; they may overlap."""
    if not kernels:
        return Profile(model, batch, 0.0, 0.0, ())
    totals: dict[str, float] = collections.defaultdict(float)
    calls: dict[str, int] = collections.Counter()
    for name, begin, end in kernels:
        totals[name] += end - begin
        calls[name] += 1
    ranked = sorted(totals, key=lambda name: -totals[name])[:NUM_NAMED]
    span = max(end for _, _, end in kernels) - min(begin for _, begin, _ in kernels)
    busy = _covered((begin, end) for _, begin, end in kernels)
    return Profile(model, batch, span, busy, tuple((name, totals[name], calls[name]) for name in ranked))


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def line_of(one: Measured) -> str:
    """One line while it runs."""
    timing = one.timing
    how = f"{'graphs' if one.graphs else 'no graphs'}, {'overlap' if one.ahead else 'one by one'}"
    share = timing.floor_s / timing.median_s
    return f"{one.model} {timing.name} ({how}): {timing.median_s * 1e3:.3f} ms, {share:.0%} of the limit"


def section(results: Results) -> str:
    """The report in Markdown."""
    header = ["model", "step", "graphs", "overlap", "ms (least-most)", "tok/s", "floor, ms", "floor / time"]
    body = [
        [
            one.model,
            one.timing.name,
            "yes" if one.graphs else "no",
            "yes" if one.ahead else "no",
            report.Spread(one.timing.median_s * 1e3, one.timing.low_s * 1e3, one.timing.high_s * 1e3).show(3),
            f"{one.timing.tokens / one.timing.median_s:.0f}",
            f"{one.timing.floor_s * 1e3:.3f}",
            f"{one.timing.floor_s / one.timing.median_s:.0%}",
        ]
        for one in results.measured
    ]
    body += [[one.model, one.step, "", "", one.reason, "", "", ""] for one in results.skipped]
    parts = [
        "## Random weights in published shapes",
        f"Measured in the same run: copy {results.limits.copy_bytes_s / 1e12:.2f} TB/s (bytes read and written), "
        f"bf16 matmul {results.limits.matmul_flop_s / 1e12:.0f} TFLOP/s.",
        report.markdown_table(header, body, num_text=4),
        "Floors: decode reads its weights (of experts those that a batch of that size chooses by lot) and all KV "
        "once, and reads and writes recurrent states, at the copy's bytes a second; prefill does its multiplications "
        "at the matmul's rate. A step is measured on the host, from the plan to the sampled tokens; with overlap, from "
        "the end of one to the end of the next.",
        *(_profile_part(profile) for profile in results.profiles),
    ]
    if results.notes:
        parts.append("\n".join(f"- {note}" for note in results.notes))
    return "\n\n".join(parts) + "\n"


def _profile_part(profile: Profile) -> str:
    """Idle time, and where the rest went."""
    idle = 1.0 - profile.busy_s / profile.span_s if profile.span_s else 0.0
    rows = [[name[:90], f"{s * 1e3:.2f}", str(calls)] for name, s, calls in profile.kernels]
    table = report.markdown_table(["kernel", "ms", "calls"], rows)
    return f"### {profile.model}, decode {profile.batch}, with overlap: the device is idle {idle:.1%}\n\n{table}"
