"""What a request waits for its first token, as its client sees it, in parts that add up to it. For benchmarks.

The servers' parts are those of `RequestTiming` (docs/architecture.md, "Where the time goes"); what they do not have is
the client's: HTTP both ways, reading the prompt, and the router of a pair.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from benchmarks import report
from benchmarks.answers import Answer
from pdserve.bench.metrics import percentile

TOLD = ("bootstrap", "queue", "prefill", "transfer")
"""What servers tell, in the order in which the parts follow each other."""
OUTSIDE = "HTTP, router"
PARTS = (OUTSIDE, *TOLD)


@dataclasses.dataclass(frozen=True)
class FirstToken:
    """The first token of one request: seconds from its sending, and `PARTS` of them."""

    ttft_s: float
    parts_s: dict[str, float]


def first_token_of(answer: Answer) -> FirstToken:
    """That of an answer which came whole."""
    return FirstToken(answer.ttft_s, parts_of(answer.ttft_s, answer.timing))


def parts_of(ttft_s: float, timing: Mapping[str, float | None]) -> dict[str, float]:
    """The fields of a `RequestTiming` as `TOLD`, 0 where it has none, and the rest of `ttft_s`."""
    told = {name: timing.get(f"{name}_s") or 0.0 for name in TOLD}
    return {OUTSIDE: ttft_s - sum(told.values()), **told}


def means_ms(found: Sequence[FirstToken]) -> dict[str, float]:
    """The mean of each part, in the order of `PARTS`: means add up to the mean of the whole, as medians would not."""
    return {name: statistics.fmean(one.parts_s[name] for one in found) * 1e3 for name in PARTS}


def table(found: Mapping[str, Sequence[FirstToken]], against: Sequence[tuple[str, str]] = ()) -> str:
    """A row for each name, and one for each two of them with what the first one's mean and parts have more."""
    rows = []
    for name, firsts in found.items():
        parts = means_ms(firsts)
        median = percentile([one.ttft_s for one in firsts], 50) * 1e3
        cells = [f"{value:.1f}" for value in (sum(parts.values()), *parts.values())]
        rows.append([name, str(len(firsts)), f"{median:.0f}", *cells])
    for ours, theirs in against:
        mine, peer = means_ms(found[ours]), means_ms(found[theirs])
        more = [mine[name] - peer[name] for name in PARTS]
        rows.append([f"{ours} - {theirs}", "", "", *(f"{value:+.1f}" for value in (sum(more), *more))])
    return report.markdown_table(["TTFT, ms", "prompts", "median", "mean", *PARTS], rows)
