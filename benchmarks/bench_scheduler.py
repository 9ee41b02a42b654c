"""CPU time of one scheduler step, by role, number of requests and policy, with the device replaced by a cost model.

    python -m benchmarks.bench_scheduler [--write] [--roles null prefill decode] [--running 1 10 ...] [--queued 10 ...]

`poll` and `plan` decide what the next step computes, `commit` takes its results, `step` is all that the scheduler does
in a turn, with outputs encoded for the API process; the executor's own time is in none of them. CPU time of the thread,
so that what else the machine does matters less. Each case brings a server into the state it measures (`state`), then
times `--steps` steps: every running request gets a token in each, and no queued one can start.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by its path: `benchmarks` and `pdserve` lie in the checkout's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from benchmarks.costed_states import POLICIES, STATES, Case, State
from pdserve.base.process import freeze_heap
from pdserve.bench.metrics import percentile
from pdserve.config.schedule_group import SchedulePolicy

PARTS = ("poll", "plan", "commit", "step")
MARK_RUNNING, MARK_MS = 256, 1.0
RUNNING = (1, 10, 64, 256, 1000, 4000, 10_000)
QUEUED = (10, 100, 1000, 10_000)
SLOPE_FROM = 64
"""Smallest number of running requests that the slope is taken over: below, what every step costs is most of it."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One case: microseconds a step, median and p99, by part; `planning` is poll and plan together."""

    case: Case
    p50_us: dict[str, float]
    p99_us: dict[str, float]
    num_steps: int

    @property
    def per_running_us(self) -> float:
        """The whole step, per running request."""
        return self.p50_us["step"] / self.case.num_running

    def as_json(self) -> dict[str, Any]:
        """For the results file."""
        return dataclasses.asdict(self) | {"step_per_running_us": self.per_running_us}


def measure(case: Case, num_steps: int) -> Measured:
    """Bring a server into the state, then time its steps; those in which nothing was planned are an error."""
    state = STATES[case.role, case.state](case)
    samples: list[dict[str, float]] = []
    gc.collect()
    for _ in range(5 + num_steps):
        state.feed()
        watch = dict(state.server.step())
        samples.append({"planning": (watch["poll"] + watch["plan"]) / 1e3, **{p: watch[p] / 1e3 for p in PARTS}})
        state.check()
    del samples[:5]
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    return Measured(
        case,
        {name: statistics.median(column) for name, column in columns.items()},
        {name: percentile(column, 99) for name, column in columns.items()},
        num_steps,
    )


def exponent(found: Sequence[Measured], part: str) -> float | None:
    """k of `part / running ~ running^k`, by least squares in logarithms; 0 is flat. None of fewer than two sizes."""
    points = [
        (math.log(one.case.num_running), math.log(one.p50_us[part] / one.case.num_running))
        for one in found
        if one.case.num_running >= SLOPE_FROM
    ]
    return slope(points)


def per_queued_ns(found: Sequence[Measured]) -> float | None:
    """Nanoseconds a step that one more queued request costs, by least squares; None of fewer than two sizes."""
    us = slope([(one.case.num_queued, one.p50_us["step"]) for one in found])
    return None if us is None else us * 1e3


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """The slope of the line through `points` by least squares; None of fewer than two places."""
    return None if len({x for x, _ in points}) < 2 else statistics.linear_regression(*zip(*points, strict=True)).slope


def cases(args: argparse.Namespace) -> tuple[list[Case], list[Case]]:
    """Those with growing numbers of running requests, and those with growing queues."""
    running: list[Case] = []
    queued: list[Case] = []
    for role, state in STATES:
        if role not in args.roles:
            continue
        policies: list[SchedulePolicy] = args.policies if POLICIES[role] else ["fcfs"]
        for policy in policies:
            if State.is_first(role, state):
                running += [Case(role, state, policy, num, min(args.queued)) for num in args.running]
            queued += [Case(role, state, policy, MARK_RUNNING, num) for num in args.queued]
    return running, queued


def running_table(found: Sequence[Measured]) -> str:
    """A line per case, over numbers of running requests."""
    header = ["role", "policy", "running", *(f"{p}, us" for p in ("planning", "commit", "step"))]
    header += ["planning p99", "step p99", "step / running, us"]
    rows = [
        [one.case.role, one.case.policy, f"{one.case.num_running:,}"]
        + [f"{one.p50_us[p]:,.0f}" for p in ("planning", "commit", "step")]
        + [f"{one.p99_us[p]:,.0f}" for p in ("planning", "step")]
        + [f"{one.per_running_us:.2f}"]
        for one in found
    ]
    return report.markdown_table(header, rows, num_text=2)


def slope_table(found: Sequence[Measured]) -> str:
    """A line per role and policy: how the cost per running request grows, and what one more costs.

    Prefill has no exponents: what it does in a step does not depend on the number of requests on their way.
    """
    header = ["role", "policy", *(f"exponent of {p} / running" for p in ("planning", "commit", "step"))]
    header.append("one more, us a step")
    groups: dict[tuple[str, str], list[Measured]] = {}
    for one in found:
        groups.setdefault((one.case.role, one.case.policy), []).append(one)
    rows = []
    for group, ones in groups.items():
        exponents = [None if group[0] == "prefill" else exponent(ones, p) for p in ("planning", "commit", "step")]
        more = slope([(one.case.num_running, one.p50_us["step"]) for one in ones])
        rows.append([*group, *(_number(value, "+.2f") for value in exponents), _number(more, ".2f")])
    return report.markdown_table(header, rows, num_text=2)


def queued_table(found: Sequence[Measured]) -> str:
    """A line per role, state and policy: the step over lengths of the queue, and the cost of one more."""
    lengths = sorted({one.case.num_queued for one in found})
    header = ["role", "queued requests wait", "policy", *(f"{n:,}: step, us" for n in lengths), "per queued, ns"]
    groups: dict[tuple[str, str, str], dict[int, Measured]] = {}
    for one in found:
        groups.setdefault((one.case.role, one.case.state, one.case.policy), {})[one.case.num_queued] = one
    rows = [
        [
            *group,
            *(f"{ones[n].p50_us['step']:,.0f}" for n in lengths),
            _number(per_queued_ns(list(ones.values())), ".1f"),
        ]
        for group, ones in groups.items()
    ]
    return report.markdown_table(header, rows, num_text=3)


def mark(found: Sequence[Measured]) -> tuple[str, bool]:
    """The sentence on the mark, and whether it is met."""
    planned = [one.p50_us["planning"] for one in found if one.case.num_running == MARK_RUNNING]
    if not planned:
        return f"No case had {MARK_RUNNING} running requests.", True
    met = max(planned) < MARK_MS * 1e3
    return (
        f"Mark: a step with {MARK_RUNNING} running requests is planned within {MARK_MS:g} ms of CPU (median): "
        f"**{'met' if met else 'MISSED'}**, {min(planned):.0f} to {max(planned):.0f} us in {len(planned)} cases.",
        met,
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def document(facts: dict[str, Any], running: Sequence[Measured], queued: Sequence[Measured]) -> str:
    """The whole report in Markdown."""
    machine = facts["machine"]
    num_queued = min((one.case.num_queued for one in running), default=0)
    return f"""# CPU time of a scheduler's step, {facts["date"]}

{mark([*running, *queued])[0]}

Medians of {facts["num_steps"]} steps in microseconds of thread CPU time; prefix cache on; {num_queued} requests \
queued. `planning` is poll and plan.

{running_table(running)}

How the cost per running request grows with their number, from {SLOPE_FROM} on (cost / running ~ running^k; 0 is flat):

{slope_table(running)}

Queued requests beside {MARK_RUNNING} running ones: the whole step, and what one more queued request adds to each:

{queued_table(queued)}

- `running` of prefill are requests whose pages are on their way; each of its steps also takes in and computes 4 \
prompts of 512 tokens.
- Machine: {machine["cpu_model"]}, {machine["cpus"]} cores, Python {machine["python"]}; load before the run \
{machine["load_1m"]}.
- Revision {facts["revision"]}; the run took {facts["duration_s"]:.0f} s.
- Command: `{facts["command"]}`
"""


def parse_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--roles", nargs="+", choices=tuple(POLICIES), default=list(POLICIES))
    add("--policies", nargs="+", choices=("fcfs", "lpm", "priority"), default=["fcfs", "lpm", "priority"])
    add("--running", type=int, nargs="+", default=list(RUNNING))
    add("--queued", type=int, nargs="+", default=list(QUEUED))
    add("--steps", type=int, default=150, help="timed steps of each case, at most 200")
    add("--write", action="store_true", help="write <date>-scheduler.md and .json")
    add("--results", type=Path, default=report.RESULTS, help="where to")
    args = parser.parse_args(argv)
    if min(*args.running, *args.queued, args.steps) < 1 or args.steps > 200:
        parser.error("--running, --queued and --steps must be at least 1, --steps at most 200")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write when asked; exit status 1 when the mark is missed."""
    args = parse_flags(argv)
    bench = report.Run("scheduler", argv)
    freeze_heap()
    found: tuple[list[Measured], list[Measured]] = ([], [])
    for group, results in zip(cases(args), found, strict=True):
        for case in group:
            one = measure(case, args.steps)
            results.append(one)
            parts = "  ".join(f"{name} {value:,.0f}" for name, value in one.p50_us.items())
            print(f"{case.role} {case.state} {case.policy} {case.num_running}+{case.num_queued}: {parts}", flush=True)
    facts = bench.facts(
        num_steps=args.steps,
        running=[one.as_json() for one in found[0]],
        queued=[one.as_json() for one in found[1]],
    )
    text = document(facts, *found)
    bench.publish(args, text, facts)
    return 0 if mark([*found[0], *found[1]])[1] else 1


if __name__ == "__main__":
    sys.exit(main())
