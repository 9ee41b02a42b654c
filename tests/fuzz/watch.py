"""Memory of this process, and how late an event loop is: what a fuzzer watches beside the answers."""

from __future__ import annotations

import asyncio
import gc
import os
import time

import psutil

_PROCESS = psutil.Process(os.getpid())
TICK_S = 0.01


def rss_mb() -> float:
    """Resident memory of this process in MiB."""
    return _PROCESS.memory_info().rss / 2**20


class LoopWatch:
    """Notes by how much an event loop was late: at worst since `worst_s` was set to 0. Enter it in the loop that it
    watches. A loop that is late when the block ends counts, too.
    """

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._began = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LoopWatch:
        self._began = time.monotonic()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._note()
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _watch(self) -> None:
        while True:
            self._began = time.monotonic()
            await asyncio.sleep(TICK_S)
            self._note()

    def _note(self) -> None:
        self.worst_s = max(self.worst_s, time.monotonic() - self._began - TICK_S)


class Growth:
    """Holds this process to `most_mb` MiB beyond what it had after the first `warm_up` inputs."""

    def __init__(self, most_mb: float, warm_up: int) -> None:
        self._most_mb, self._warm_up = most_mb, warm_up
        self._num_inputs = 0
        self._base_mb = 0.0

    def look(self) -> None:
        """After each input; memory is looked at after every `warm_up` of them.

        Raises:
            AssertionError: it has grown by more.
        """
        self._num_inputs += 1
        if self._num_inputs % self._warm_up:
            return
        gc.collect()
        now_mb = rss_mb()
        self._base_mb = self._base_mb or now_mb
        grown_mb = now_mb - self._base_mb
        assert grown_mb < self._most_mb, f"memory has grown by {grown_mb:.0f} MiB after {self._num_inputs} inputs"
