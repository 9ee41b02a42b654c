"""What a run of `benchmarks.chaos` has come to, and the report on it."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.chaos_farm import NAMESPACES, NONE, PROXY, Use
from benchmarks.chaos_faults import Injected
from benchmarks.chaos_hostile import REFUSED, UNREACHABLE
from benchmarks.chaos_load import ABORTED, BAD, ERROR, GOOD, HUNG, LEFT, LOST, WRONG, Ending
from benchmarks.report import footer, markdown_table

VERDICTS = (GOOD, ERROR, ABORTED, LEFT, WRONG, LOST, HUNG)
MORE_DESCRIPTORS, MORE_THREADS = 24, 12
MORE_RSS = 1.3
MORE_RSS_MB = 128.0
"""What a process may have more at the end than after the warm-up: pools of connections and heaps have grown."""
SOAK_RSS = 1.03
HOW_CUT = {
    NAMESPACES: "Links were cut between network namespaces.",
    PROXY: "Links were cut by proxies before HTTP, bootstrap and control ports and Mooncake's engines.",
    NONE: "No link was cut.",
}
NUM_EXAMPLES = 8


@dataclasses.dataclass(frozen=True)
class Sample:
    """What all processes took at one time of a soak, and the pages in use."""

    at_s: float
    use: dict[str, Use]
    pages: dict[str, int]


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """Everything that a run has seen."""

    endings: list[Ending]
    hostile: list[Ending]
    faults: list[Injected]
    problems: list[str]
    worst_health: dict[str, float | None]
    """Seconds, by member, while it was under no fault; None: never measured."""
    failed_health: Counter[str]
    settled_s: float
    held: dict[str, dict[str, Any]]
    before: dict[str, Use]
    after: dict[str, Use]
    samples: list[Sample]
    num_trapped: int
    num_secrets: int
    links: str
    """What cut links; see `chaos_farm.choose_links`."""
    seconds: float
    recovery_limit_s: float
    leftovers: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    @property
    def slowest_recovery_s(self) -> float | None:
        """None when a fault was not recovered from, or none happened."""
        times = [fault.recovery_s for fault in self.faults]
        return None if None in times else max((t for t in times if t is not None), default=None)

    def growth(self) -> list[str]:
        """Processes that have more descriptors, threads or memory at the end than they should."""
        grown = []
        for name, now in self.after.items():
            then = self.before.get(name)
            if then is None:
                continue
            if now.descriptors > then.descriptors + MORE_DESCRIPTORS:
                grown.append(f"{name}: descriptors {then.descriptors} -> {now.descriptors}")
            if now.threads > then.threads + MORE_THREADS:
                grown.append(f"{name}: threads {then.threads} -> {now.threads}")
            if now.rss_mb > then.rss_mb * MORE_RSS + MORE_RSS_MB:
                grown.append(f"{name}: RSS {then.rss_mb:.0f} -> {now.rss_mb:.0f} MB")
        return grown

    def failures(self, *, soak: bool) -> list[str]:
        """Why the run is a failure; empty when it is none."""
        verdicts = Counter(ending.verdict for ending in self.endings)
        found = [f"{verdicts[verdict]} answers {verdict}" for verdict in BAD if verdicts[verdict]]
        if not verdicts[GOOD]:
            found.append("no good answer at all")
        hostile = Counter(ending.verdict for ending in self.hostile)
        found += [f"{hostile[verdict]} hostile requests {verdict}" for verdict in (WRONG, HUNG) if hostile[verdict]]
        for fault in self.faults:
            if fault.recovery_s is None or fault.recovery_s > self.recovery_limit_s:
                after = "not at all" if fault.recovery_s is None else f"after {fault.recovery_s:.1f} s"
                found.append(f"{fault.kind} of {fault.member}: recovered {after}")
        found += self.problems
        unknown = [name for name, took in self.worst_health.items() if took is None]
        found += [f"/health of {name} was never measured while it was under no fault" for name in unknown]
        found += [] if self.worst_health else ["/health of no server was measured"]
        found += [f"/health under no fault failed {count} times: {why}" for why, count in self.failed_health.items()]
        found += [f"{name} holds {leaks}" for name, leaks in self.held.items()]
        found += self.growth()
        found += [f"left behind: {what}" for kind in self.leftovers.values() for what in kind]
        if self.num_secrets:
            found.append(f"the control token was sent to a stranger {self.num_secrets} times")
        if soak:
            found += [f"{verdicts[ERROR]} errors without a fault"] if verdicts[ERROR] else []
            found += [row[0] + " grows" for row in self.trends() if float(row[3]) > float(row[2]) * SOAK_RSS + 8]
        return found

    def trends(self) -> list[list[str]]:
        """Of each process and measure: name, median of the first and of the last quarter, growth an hour."""
        rows = []
        names = self.samples[0].use if self.samples else {}
        for name in names:
            for field, digits in (("rss_mb", 1), ("descriptors", 0), ("threads", 0)):
                points = [(s.at_s, float(getattr(s.use[name], field))) for s in self.samples if name in s.use]
                rows.append([name, field.replace("rss_mb", "RSS MB"), *_trend(points, digits)])
        for name in self.samples[0].pages if self.samples else {}:
            rows.append([name, "pages in use", *_trend([(s.at_s, float(s.pages[name])) for s in self.samples], 0)])
        return rows

    def summary(self) -> dict[str, Any]:
        """The numbers for programs."""
        return {
            "requests": dict(Counter(ending.verdict for ending in self.endings)),
            "hostile": dict(Counter(ending.verdict for ending in self.hostile)),
            "links": self.links,
            "fault_counts": dict(Counter(fault.kind for fault in self.faults)),
            "slowest_recovery_s": self.slowest_recovery_s,
            "settled_s": self.settled_s,
            "held": self.held,
            "leftovers": self.leftovers,
            "growth": self.growth(),
            "secrets_sent": self.num_secrets,
            "worst_health_s": self.worst_health,
            "failed_health": dict(self.failed_health),
        }


def _trend(points: Sequence[tuple[float, float]], digits: int) -> list[str]:
    """Median of the first quarter, of the last one, and the regression line's rise an hour."""
    quarter = max(1, len(points) // 4)
    first, last = (statistics.median(v for _, v in part) for part in (points[:quarter], points[-quarter:]))
    slope = 0.0
    if len({at for at, _ in points}) > 1:
        slope = statistics.linear_regression([at for at, _ in points], [v for _, v in points]).slope * 3600
    return [f"{first:.{digits}f}", f"{last:.{digits}f}", f"{slope:+.1f}"]


def render(outcome: Outcome, facts: dict[str, Any], *, soak: bool) -> str:
    """The report."""
    failures = outcome.failures(soak=soak)
    title = "Soak" if soak else "Chaos"
    counts = Counter(ending.verdict for ending in outcome.endings)
    parts = [
        f"# {title}: {len(outcome.endings)} requests in {outcome.seconds:.0f} s",
        _verdict_line(outcome, counts),
        _health_line(outcome),
        "## Requests\n\n" + _requests(outcome.endings, lambda ending: f"{ending.kind}, {ending.manner}"),
    ]
    if outcome.faults:
        parts.append(f"## Faults\n\n{_faults(outcome.faults)}\n\n{HOW_CUT[outcome.links]}")
    if outcome.hostile:
        parts.append("## Hostile requests\n\n" + _hostile(outcome))
    if outcome.samples:
        header = ["process", "measure", "first quarter", "last quarter", "rise an hour"]
        parts.append("## Over time\n\n" + markdown_table(header, outcome.trends(), num_text=2))
    parts.append("## Processes, after the warm-up and at the end\n\n" + _uses(outcome))
    parts.append("## What is wrong\n\n" + ("\n".join(f"- {failure}" for failure in failures) or "Nothing."))
    bad = [ending for ending in outcome.endings + outcome.hostile if ending.verdict in BAD]
    if bad:
        shown = [f"- {e.kind}, {e.manner}: {e.verdict} after {e.ended - e.began:.1f} s: {e.detail}" for e in bad]
        parts.append("## Examples\n\n" + "\n".join(shown[:NUM_EXAMPLES]))
    parts.append(footer(facts))
    return "\n\n".join(parts) + "\n"


def _verdict_line(outcome: Outcome, counts: Counter[str]) -> str:
    slowest = outcome.slowest_recovery_s
    errors = [ending.ended - ending.began for ending in outcome.endings if ending.verdict == ERROR]
    words = [f"{verdict} {counts[verdict]}" for verdict in VERDICTS]
    words.append(f"slowest recovery {'none' if slowest is None else f'{slowest:.1f} s'}")
    words.append(f"slowest error {max(errors, default=0.0):.1f} s")
    words.append(f"all free {outcome.settled_s:.1f} s after the load" if not outcome.held else "not all is free")
    return ", ".join(words) + "."


def _health_line(outcome: Outcome) -> str:
    times = {name: "never measured" if took is None else f"{took:.2f} s" for name, took in outcome.worst_health.items()}
    worst = ", ".join(f"{name} {took}" for name, took in sorted(times.items())) or "no server was measured"
    return f"Slowest `/health` of each server while it was under no fault itself: {worst}."


def _requests(endings: Sequence[Ending], name: Any) -> str:
    by_name: dict[str, Counter[str]] = {}
    for ending in endings:
        by_name.setdefault(name(ending), Counter())[ending.verdict] += 1
    rows = [[key, *(str(by_name[key][verdict]) for verdict in VERDICTS)] for key in sorted(by_name)]
    return markdown_table(["request", *VERDICTS], rows)


def _faults(faults: Sequence[Injected]) -> str:
    rows = []
    for kind in sorted({fault.kind for fault in faults}):
        mine = [fault for fault in faults if fault.kind == kind]
        times = [fault.recovery_s for fault in mine if fault.recovery_s is not None]
        slowest = f"{max(times):.1f}" if times else "-"
        median = f"{statistics.median(times):.1f}" if times else "-"
        rows.append([kind, str(len(mine)), str(len(mine) - len(times)), median, slowest])
    return markdown_table(["fault", "times", "not recovered", "median recovery s", "slowest s"], rows)


def _hostile(outcome: Outcome) -> str:
    rows = []
    for kind in sorted({ending.kind for ending in outcome.hostile}):
        mine = [ending for ending in outcome.hostile if ending.kind == kind]
        seen = Counter(ending.verdict for ending in mine)
        slowest = max(ending.ended - ending.began for ending in mine)
        example = next((ending.detail[:60] for ending in mine if ending.verdict in BAD), "")
        counts = [str(seen[verdict]) for verdict in (REFUSED, UNREACHABLE, WRONG, HUNG)]
        rows.append([kind, example.replace("|", "/").replace("\n", " "), *counts, f"{slowest:.1f}"])
    table = markdown_table(["request", "", "refused", "unreachable", "wrong", "hung", "slowest s"], rows, num_text=2)
    trapped = f"Look-ups lured to a stranger: {outcome.num_trapped}, with the control token: {outcome.num_secrets}."
    return f"{table}\n\n{trapped}"


def _uses(outcome: Outcome) -> str:
    rows = []
    for name, now in outcome.after.items():
        then = outcome.before.get(name, now)
        pairs = ((then.rss_mb, now.rss_mb), (then.descriptors, now.descriptors), (then.threads, now.threads))
        rows.append([name, *(f"{old:.0f} -> {new:.0f}" for old, new in pairs)])
    return markdown_table(["process", "RSS MB", "descriptors", "threads"], rows)
