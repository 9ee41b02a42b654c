"""Durations of the parts of a process's start-up. Created by the main function and passed to the code that it calls."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping

import psutil

IMPORTS = "imports"
RANKS = "join_ranks"
WEIGHTS = "load_weight"
PACK = "pack_weight"
POOLS = "kv_cache_allocation"
WARM_UP = "warm_up"
TRANSFER = "transfer"
SCHEDULER = "scheduler_e2e"
API = "tokenizer_e2e"
"""Names of parts, as in SGLang where it has them. `SCHEDULER` is a scheduler's total, since its process was created;
`API` is the API process's until its application was built.
"""

FACT = "startup_{}_s"
"""Key of a part in an engine's facts."""


def process_age_s() -> float:
    """Return the seconds since this process was created, which includes the start of the interpreter."""
    return max(0.0, time.time() - psutil.Process().create_time())


@functools.cache
def api_startup_s() -> float:
    """Return the age of this process at the first call, in seconds. A role switch is no start-up."""
    return process_age_s()


class StartupTimes:
    """Seconds by part. Parts nest: the time of an inner part is not counted for the outer one.

    One thread. Repeated parts add up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inner_s: list[float] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the duration of the `with` block as part `name`."""
        began = self._clock()
        self._inner_s.append(0.0)
        try:
            yield
        finally:
            took = self._clock() - began
            self.add(name, took - self._inner_s.pop())
            if self._inner_s:
                self._inner_s[-1] += took

    def add(self, name: str, seconds: float) -> None:
        """Add `seconds` to part `name`."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def loaded(self, num_bytes: int, total: int) -> None:
        """Hook for the progress of the weights: `num_bytes` of `total` bytes are loaded."""

    def close(self) -> None:
        """Hook for the end of the start-up."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by part, in the order in which the parts first ended."""
        return dict(self._seconds)

    def facts(self) -> dict[str, float]:
        """Return the seconds as facts of an engine, rounded to milliseconds."""
        return {FACT.format(name): round(seconds, 3) for name, seconds in self._seconds.items()}


def describe(seconds: Mapping[str, float]) -> str:
    """Format total and parts as the end of a log line; empty without a `SCHEDULER` part."""
    parts = {name: value for name, value in seconds.items() if name != SCHEDULER}
    if SCHEDULER not in seconds:
        return ""
    parts["other"] = max(0.0, seconds[SCHEDULER] - sum(parts.values()))
    return f" after {seconds[SCHEDULER]:.2f} s (" + ", ".join(f"{name} {s:.2f}" for name, s in parts.items()) + ")"


def read_facts(facts: Mapping[str, object]) -> dict[str, float]:
    """Read seconds by part from an engine's facts."""
    before, after = FACT.split("{}")
    return {
        name.removeprefix(before).removesuffix(after): float(value)
        for name, value in facts.items()
        if name.startswith(before) and name.endswith(after) and isinstance(value, int | float)
    }
