"""Calls a function at regular times while a block of code runs, so that long work at start-up is not silent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

EVERY_S = 4.0
"""Seconds between two progress lines of work that takes long."""


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
