"""Memory of this process, and how late an event loop is: what a fuzzer watches beside the answers."""

from __future__ import annotations

import asyncio
import os
import time

import psutil

_PROCESS = psutil.Process(os.getpid())
TICK_S = 0.01


def rss_mb() -> float:
    """Resident memory of this process in MiB."""
    return _PROCESS.memory_info().rss / 2**20


class LoopWatch:
    """Notes by how much an event loop was late, at worst since `reset`. Enter it in the loop that it watches."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LoopWatch:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(TICK_S)
            self.worst_s = max(self.worst_s, time.monotonic() - began - TICK_S)
