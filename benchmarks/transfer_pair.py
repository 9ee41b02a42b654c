"""A sending half in this process, a receiving half in a child, and the raw engine between their pools.

Used by `bench_transfer`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks import report
from benchmarks.transfer_raw import Write, raw_writer
from benchmarks.transfer_side import Load, Side, layout_of, send_all
from pdserve.transfer.transport import Copy

TOUCH_PAGES = 4


@dataclasses.dataclass(frozen=True)
class Run:
    """Seconds of a run: from the first publication to the last success, within the transport (added up over threads),
    and of each request from the decision to send to the receiver's success."""

    seconds: float
    write_s: float
    latencies: tuple[float, ...]


class Pair:
    """A sending half here, a receiving half in a child, and the raw engine between their pools."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        backend: str,
        layout: str,
        page_tokens: int,
        num_pages: int,
        *,
        scattered: bool,
    ) -> None:
        self._rooms = 1
        self._scattered = scattered
        self._num_pages = num_pages
        self.side = Side(stack, backend, layout_of(layout, page_tokens), num_pages, scattered=scattered)
        flags = {
            "backend": backend,
            "layout": layout,
            "instance": self.side.instance,
            "endpoint": self.side.endpoint,
            "page-tokens": str(page_tokens),
            "num-pages": str(num_pages),
        }
        argv = [word for name, value in flags.items() for word in (f"--{name}", value)]
        argv += ["--scattered"] if scattered else []
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transfer_side", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=report.ROOT,
        )
        stack.callback(self._end)
        ready = self._answer("READY")
        self._start: int = ready["start"]
        self._threads = stack.enter_context(ThreadPoolExecutor(self.num_writers))
        self._raws: list[Write] = [
            raw_writer(stack, backend, ready["address"], self.side.region) for _ in range(self.num_writers)
        ]

    def run(self, count: int, num_pages: int, window: int, *, check: bool = False) -> Run:
        """Transfer `count` requests, `window` of them at once. Raises RuntimeError when the bytes differ."""
        load = Load(first_room=self._rooms, count=count, num_pages=num_pages, window=window, check=check)
        self._rooms += count
        stdin = self._child.stdin
        assert stdin is not None

        def start() -> None:
            stdin.write(json.dumps(dataclasses.asdict(load)) + "\n")
            stdin.flush()

        sent = send_all(self.side, load, start)
        found = self._answer("DONE")
        if {int(room): value for room, value in found["sums"].items()} != sent.sums:
            raise RuntimeError("other bytes have arrived than were sent")
        latencies = tuple(at - sent.at[int(room)] for room, at in found["landed"].items())
        return Run(found["seconds"], found["write_s"], latencies)

    @property
    def num_writers(self) -> int:
        """Threads that write to the peer in the path."""
        return self.side.transport.facts.writers

    def touch_all(self) -> None:
        """Have both ways map every page of both pools, which costs time the first time."""
        size = self.side.page_bytes
        first = self.side.region.address
        every = [Copy(first + n * size, self._start + n * size, size) for n in range(self._num_pages)]
        for raw in self._raws:
            raw(every)
        self.run(-(-self._num_pages // TOUCH_PAGES) + 1, TOUCH_PAGES, 1)

    def run_raw(self, requests: Sequence[Sequence[Copy]], num_threads: int = 1) -> float:
        """Seconds that the engine takes for `requests`: each thread takes the next when it is done with its last.
        Each has an engine of its own.
        """
        waiting = iter(requests)
        began = time.perf_counter()
        if num_threads == 1:
            _write_all(self._raws[0], waiting)
        else:
            list(self._threads.map(_write_all, self._raws, [waiting] * num_threads))
        return time.perf_counter() - began

    def copies(self, count: int, num_pages: int, seed: int) -> list[list[Copy]]:
        """Of `count` requests: pages as far apart as those of the path, or one run."""
        rng, size = random.Random(seed), self.side.page_bytes
        if not self._scattered:
            starts = range(self._num_pages - num_pages + 1)
            places = [(rng.choice(starts), rng.choice(starts)) for _ in range(count)]
            return [[self._copy(ours, theirs, num_pages * size)] for ours, theirs in places]
        pages = range(self._num_pages)
        return [
            list(map(self._copy, rng.sample(pages, num_pages), rng.sample(pages, num_pages), itertools.repeat(size)))
            for _ in range(count)
        ]

    def _copy(self, ours: int, theirs: int, num_bytes: int) -> Copy:
        size = self.side.page_bytes
        return Copy(self.side.region.address + ours * size, self._start + theirs * size, num_bytes)

    def _answer(self, word: str) -> dict[str, Any]:
        stdout = self._child.stdout
        assert stdout is not None
        for line in stdout:  # engines print, too
            if line.startswith(word + " "):
                found: dict[str, Any] = json.loads(line.removeprefix(word))
                return found
        raise RuntimeError(f"the receiving half ended with status {self._child.wait()}")

    def _end(self) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()


def _write_all(raw: Write, waiting: Iterator[Sequence[Copy]]) -> None:
    for copies in waiting:
        raw(copies)
