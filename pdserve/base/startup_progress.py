"""Tells how a start-up goes: a log line for each part, one every few seconds of a long part, and a bar of the weights.

    scheduler process ── log lines, the bar on a terminal
                      └─ status lines on stdout, if the environment asks for them ──> `launch_local` shows the last one

Created by the main function of a scheduler process, and closed when the engine is ready.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from pdserve.base.startup_times import IMPORTS, POOLS, RANKS, TRANSFER, WARM_UP, WEIGHTS, StartupTimes

ANNOUNCE = "PDSERVE_ANNOUNCE_START"
"""Environment variable that `launch_local` sets: print status lines."""
EVERY_S = 3.0
"""Seconds between two progress lines of work that takes long. A busy machine makes the pauses longer, up to 5 s."""
STATUS_PREFIX = "PDSERVE_STARTING "
STARTING, READY = "starting", "ready"
LABELS = {
    IMPORTS: "importing libraries",
    RANKS: "joining the ranks",
    WEIGHTS: "loading weights",
    POOLS: "allocating KV memory",
    WARM_UP: "building kernels and graphs",
    TRANSFER: "opening the transfer engine",
}
"""What users read for a part."""
_MB = 1_000_000


@contextlib.contextmanager
def ticking(call: Callable[[], None], every_s: float = EVERY_S) -> Iterator[None]:
    """Run `call` in a thread each `every_s` seconds until the end of the block; the first call is after `every_s`."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(every_s):
            call()

    thread = threading.Thread(target=run, name="ticker", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def announce_status(text: str) -> None:
    """Print what this process does now for `launch_local`; nothing without `ANNOUNCE` in the environment."""
    if os.environ.get(ANNOUNCE):
        print(STATUS_PREFIX + json.dumps(text), flush=True)


def parse_status(line: str) -> str | None:
    """Parse a line of `announce_status`; None for any other line."""
    if not line.startswith(STATUS_PREFIX):
        return None
    try:
        return str(json.loads(line.removeprefix(STATUS_PREFIX)))
    except ValueError:
        return None


class StartupProgress(StartupTimes):
    """`StartupTimes` that are told while they pass.

    `tell` gets log lines. `part` and `loaded` are for one thread; a ticker reads what they note.
    """

    def __init__(
        self, tell: Callable[[str], None], *, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(clock)
        self._tell = tell
        self._now = clock
        self._doing, self._since = LABELS[IMPORTS], clock()
        self._detail = ""
        self._bar: Any = None
        self._depth = 0
        self._closing = contextlib.ExitStack()
        self._closing.enter_context(ticking(self._tick, every_s))
        announce_status(self._doing)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the duration of the `with` block, and tell it. A part within another one is not told."""
        if self._depth == 0:
            self._enter(LABELS.get(name, name))
        self._depth += 1
        began = self._now()
        try:
            with super().part(name):
                yield
        finally:
            self._depth -= 1
        if self._depth == 0:
            self._close_bar()
            self._tell(f"{self._doing}: {self._now() - began:.1f} s")
            self._enter(STARTING)

    def add(self, name: str, seconds: float) -> None:
        """Add `seconds` to part `name`; of the imports, also tell them."""
        super().add(name, seconds)
        if name == IMPORTS:
            self._tell(f"{LABELS[IMPORTS]}: {seconds:.1f} s")
            self._enter(STARTING)

    def loaded(self, num_bytes: int, total: int) -> None:
        """Note that `num_bytes` of `total` bytes of the weights are loaded; updates the bar on a terminal."""
        share = num_bytes / max(1, total)
        self._detail = f"{100 * share:.0f} % of {total / _MB:.0f} MB"
        if self._bar is None and sys.stderr.isatty():
            from tqdm import tqdm

            tqdm.set_lock(threading.RLock())  # its own lock is shared by processes, and outlives a killed one
            self._bar = tqdm(total=total, desc=self._doing, unit="B", unit_scale=True, leave=False)
        if self._bar is not None:
            self._bar.update(num_bytes - self._bar.n)

    def close(self) -> None:
        """End the ticker; the engine is ready, or does not start."""
        self._close_bar()
        self._closing.close()

    def _enter(self, doing: str) -> None:
        self._doing, self._since, self._detail = doing, self._now(), ""
        announce_status(doing)

    def _tick(self) -> None:
        text = f"{self._doing}, {self._detail}" if self._detail else self._doing
        announce_status(text)
        if self._bar is None:
            self._tell(f"{text}: {self._now() - self._since:.0f} s so far")

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


@contextlib.contextmanager
def told(tell: Callable[[str], None], doing: str, *, least_s: float = 0.0) -> Iterator[None]:
    """Tell how long the block takes at its end, and every few seconds that it goes on.

    A block of fewer than `least_s` seconds is not told. Nor is the end of a block that raises.
    """
    began = time.monotonic()
    with ticking(lambda: tell(f"{doing}: {time.monotonic() - began:.0f} s so far")):
        yield
    if (seconds := time.monotonic() - began) >= least_s:
        tell(f"{doing}: {seconds:.1f} s")
