"""Profiles the steps of a scheduler process with torch's profiler. Owned by `Scheduler`, on its thread.

The trace covers this process: rank 0, where ranks share a model. A thread "profile" writes the file, which takes
seconds for thousands of steps; until then the file has a temporary name.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pdserve.protocol.messages import StartProfile

log = logging.getLogger(__name__)


class Trace(Protocol):
    """A running profiler, with torch's interface."""

    def stop(self) -> None:
        """Stop recording."""
        ...

    def export_chrome_trace(self, path: str) -> None:
        """Write the trace to `path`."""
        ...


class Profiler:
    """Takes at most one trace at a time. `name` is part of the file name. `begin` starts a trace; None: torch's
    profiler.
    """

    def __init__(self, name: str, begin: Callable[[StartProfile], Trace] | None = None) -> None:
        self.name = name
        self._begin = begin or _begin
        self._trace: Trace | None = None
        self._writer: threading.Thread | None = None
        self._path = Path()
        self.steps_left: int | None = None
        """Steps until the trace stops; None while it does not count."""

    def start(self, order: StartProfile) -> tuple[bool, str]:
        """Start a trace; returns whether it started, and a message."""
        if self._trace is not None or (self._writer is not None and self._writer.is_alive()):
            return False, f"a profile is already running, into {self._path}"
        path = Path(order.output_dir) / f"{order.profile_id or f'{time.time():.0f}'}-{self.name}.trace.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(path.parent, os.W_OK):
                return False, f"{path.parent} is not writable"
            self._trace = self._begin(order)
        except (OSError, RuntimeError) as error:
            return False, f"cannot start a profile into {path.parent}: {error}"
        self._path, self.steps_left = path, order.num_steps
        return True, f"profiling into {path}"

    def step(self) -> None:
        """Count a computed step; the trace stops after the requested number of steps."""
        if self.steps_left is None:
            return
        self.steps_left -= 1
        if self.steps_left <= 0:
            self.stop()

    def stop(self) -> tuple[bool, str]:
        """Stop the trace and write it on a thread; returns whether it succeeded, and a message."""
        if self._trace is None:
            return False, "no profile is running"
        trace, self._trace = self._trace, None
        self.steps_left = None
        try:
            trace.stop()
        except RuntimeError as error:
            return False, f"the profile failed: {error}"
        self._writer = threading.Thread(target=_write, args=(trace, self._path), name="profile")
        self._writer.start()
        return True, f"the profile is being written to {self._path}"


def _write(trace: Trace, path: Path) -> None:
    """Write the trace. Thread "profile"."""
    unfinished = path.with_name(f".{path.name}")
    try:
        trace.export_chrome_trace(str(unfinished))
        unfinished.replace(path)
    except (OSError, RuntimeError) as error:
        log.error("the profile could not be written to %s: %s", path, error)
    else:
        log.info("profile written to %s", path)


def _begin(order: StartProfile) -> Trace:
    """Start a recording of all threads: steps may be computed on another thread."""
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    kinds = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}
    wanted = [kinds[name] for name in order.activities if name != "GPU" or torch.cuda.is_available()]
    trace = profile(
        activities=wanted or [ProfilerActivity.CPU],
        record_shapes=order.record_shapes,
        with_stack=order.with_stack,
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )
    trace.start()
    return trace
