"""How long the parts of a process's start took. Made by the process's main function, handed down to what it builds."""

from __future__ import annotations

import contextlib
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
"""Names of parts; those that SGLang has are SGLang's. The last is the whole of a scheduler's, from its creation on."""

FACT = "startup_{}_s"
"""The name of a part among an engine's facts."""


def process_age_s() -> float:
    """Seconds since this process was created, before its interpreter began."""
    return max(0.0, time.time() - psutil.Process().create_time())


class StartupTimes:
    """Seconds by part. Parts may contain parts: the time of an inner one does not count for the outer.

    For one thread. Parts that come again add up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inner_s: list[float] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is done inside is `name`."""
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
        """So many more seconds of `name`."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @property
    def seconds(self) -> Mapping[str, float]:
        """By part, in the order in which they ended first."""
        return dict(self._seconds)

    def facts(self) -> dict[str, float]:
        """The same as facts of an engine."""
        return {FACT.format(name): round(seconds, 3) for name, seconds in self._seconds.items()}


def describe(seconds: Mapping[str, float]) -> str:
    """For a line of the log, behind what has taken so long: the whole and its parts. Empty where nothing is known."""
    parts = {name: value for name, value in seconds.items() if name != SCHEDULER}
    if SCHEDULER not in seconds:
        return ""
    parts["other"] = max(0.0, seconds[SCHEDULER] - sum(parts.values()))
    return f" after {seconds[SCHEDULER]:.2f} s (" + ", ".join(f"{name} {s:.2f}" for name, s in parts.items()) + ")"


def read_facts(facts: Mapping[str, object]) -> dict[str, float]:
    """Seconds by part, out of an engine's facts."""
    before, after = FACT.split("{}")
    return {
        name.removeprefix(before).removesuffix(after): float(value)
        for name, value in facts.items()
        if name.startswith(before) and name.endswith(after) and isinstance(value, int | float)
    }
