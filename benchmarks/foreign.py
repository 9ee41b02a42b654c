"""A pair beside busy processes that are not its own: `--foreign` of `bench_interference`.

The processes compute without a pause, in the session that starts the pair, as a compile in the same terminal does. Two
pairs work in turn: `launch_local` as it is, and one whose prefill server has no niceness. Their first tokens beside the
same processes show what the niceness costs a prompt; the streams' gaps show what it saves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import report
from pdserve.bench.metrics import percentile

PAIR_EQUAL = "1P1D, no niceness"
BUSY = "while True: pass"


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that compute without a pause."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@dataclasses.dataclass(frozen=True)
class BesideForeign:
    """What one round found of one pair beside the processes, in milliseconds; tokens of all streams a second."""

    system: str
    idle_ttft_ms: float
    """Median of prompts to the pair without streams."""
    ttft_ms: float
    """Median of prompts beside the streams."""
    itl_p99_ms: float
    stream_tok_s: float

    @classmethod
    def of(
        cls, system: str, idle_s: Sequence[float], prompts_s: Sequence[float], gaps_s: Sequence[float], seconds: float
    ) -> BesideForeign:
        """Summarize times to first tokens and gaps between tokens, all in seconds; `seconds` is what the gaps cover."""
        return cls(
            system,
            statistics.median(idle_s) * 1e3,
            statistics.median(prompts_s) * 1e3,
            percentile(gaps_s, 99) * 1e3,
            len(gaps_s) / seconds,
        )


COLUMNS = (
    ("idle_ttft_ms", "TTFT without streams, ms", 0),
    ("ttft_ms", "TTFT beside streams, ms", 0),
    ("itl_p99_ms", "ITL p99, ms", 1),
    ("stream_tok_s", "streams' tok/s", 1),
)


def table(found: Sequence[BesideForeign], ours: str) -> str:
    """Medians with their range for each pair, and the ratios of `ours` to the other in the same round."""
    by_system: dict[str, list[BesideForeign]] = {}
    for one in found:
        by_system.setdefault(one.system, []).append(one)

    def values(system: str, name: str) -> list[float]:
        return [getattr(one, name) for one in by_system[system]]

    rows = [
        [system, *(report.spread_of(values(system, name)).show(digits) for name, _, digits in COLUMNS)]
        for system in by_system
    ]
    rows += [
        [f"{ours} / {other}", *(report.ratios(values(ours, n), values(other, n)).show(2, "x") for n, _, _ in COLUMNS)]
        for other in by_system
        if other != ours
    ]
    return report.markdown_table(["pair", *(label for _, label, _ in COLUMNS)], rows)


def section(found: Sequence[BesideForeign], ours: str, count: int) -> str:
    """The report's section; empty without `--foreign`."""
    if not found:
        return ""
    return f"""## Beside {count} busy processes

{count} processes that are not the pair's compute without a pause, in the session that starts it. The second pair's \
prefill server has `--cpu-nice 0`.

{table(found, ours)}
"""


def facts(found: Sequence[BesideForeign]) -> list[dict[str, Any]]:
    """For the results' JSON."""
    return [dataclasses.asdict(one) for one in found]
