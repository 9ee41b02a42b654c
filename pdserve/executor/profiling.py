"""A trace of what a scheduler process computes, by torch's profiler. Owned by `Scheduler`, on its thread.

The trace is of this process: where ranks share a model, of its leader. A thread "profile" writes it down, which takes
seconds for thousands of steps; until then the file has another name.
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
    """A running profiler, as torch's."""

    def stop(self) -> None:
        """End the recording."""
        ...

    def export_chrome_trace(self, path: str) -> None:
        """Write it down."""
        ...


class Profiler:
    """At most one trace at a time. `name` goes into the file's name. `begin` starts a trace; tests bring their own."""

    def __init__(self, name: str, begin: Callable[[StartProfile], Trace] | None = None) -> None:
        self._name = name
        self._begin = begin or _begin
        self._trace: Trace | None = None
        self._writer: threading.Thread | None = None
        self._path = Path()
        self._steps_left: int | None = None

    def start(self, order: StartProfile) -> tuple[bool, str]:
        """Begin; whether that went well, and a sentence on it."""
        if self._trace is not None or (self._writer is not None and self._writer.is_alive()):
            return False, f"a profile is being taken already, into {self._path}"
        path = Path(order.output_dir) / f"{order.profile_id or f'{time.time():.0f}'}-{self._name}.trace.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(path.parent, os.W_OK):
                return False, f"{path.parent} cannot be written"
            self._trace = self._begin(order)
        except (OSError, RuntimeError) as error:
            return False, f"cannot take a profile into {path.parent}: {error}"
        self._path, self._steps_left = path, order.num_steps
        return True, f"taking a profile into {path}"

    def step(self) -> None:
        """A step has been computed; the trace ends by itself after as many as were asked for."""
        if self._trace is None or self._steps_left is None:
            return
        self._steps_left -= 1
        if self._steps_left <= 0:
            self.stop()

    def stop(self) -> tuple[bool, str]:
        """End, and have the trace written."""
        if self._trace is None:
            return False, "no profile is being taken"
        trace, self._trace = self._trace, None
        try:
            trace.stop()
        except RuntimeError as error:
            return False, f"the profile failed: {error}"
        self._writer = threading.Thread(target=_write, args=(trace, self._path), name="profile")
        self._writer.start()
        return True, f"the profile is being written to {self._path}"


def _write(trace: Trace, path: Path) -> None:
    """Thread "profile"."""
    unfinished = path.with_name(f".{path.name}")
    try:
        trace.export_chrome_trace(str(unfinished))
        unfinished.replace(path)
    except (OSError, RuntimeError) as error:
        log.error("the profile could not be written to %s: %s", path, error)
    else:
        log.info("the profile is in %s", path)


def _begin(order: StartProfile) -> Trace:
    """A recording of all threads, for the one that computes need not be ours."""
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
