"""What processes take of this host: memory and CPU time, as the kernel counts them (Linux; elsewhere nothing is told).

`/metrics`, `/get_server_info` and the line at the end of the start-up read this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path

import psutil

PROC = Path("/proc")
OWN = "api"
"""The name of the process that asks: a server's API process."""


@dataclasses.dataclass(frozen=True)
class ProcessUse:
    """One process: `rss_bytes` are `anonymous_bytes`, which only it frees, and what others may have in common with it.

    `file_bytes` are pages of mapped files (code, weights while they are read), which the kernel takes back when memory
    is short. `peak_bytes` is the most that `rss_bytes` was. `cpu_s`: of all its threads. `start_s`: seconds since 1970.
    """

    pid: int
    rss_bytes: int
    anonymous_bytes: int
    file_bytes: int
    peak_bytes: int
    cpu_s: float
    start_s: float


def use_of(pid: int) -> ProcessUse | None:
    """What the process takes now; None when there is none, or this host does not tell."""
    with contextlib.suppress(OSError, KeyError, psutil.Error):
        fields = _status(pid)
        process = psutil.Process(pid)
        times = process.cpu_times()
        return ProcessUse(
            pid=pid,
            rss_bytes=fields["VmRSS"],
            anonymous_bytes=fields["RssAnon"],
            file_bytes=fields["RssFile"],
            peak_bytes=fields["VmHWM"],
            cpu_s=times.user + times.system,
            start_s=process.create_time(),
        )
    return None


def own_processes() -> dict[str, ProcessUse]:
    """This process and those that it started by `multiprocessing`, by name; those that have ended are left out."""
    pids = {OWN: os.getpid()} | {child.name: child.pid for child in multiprocessing.active_children() if child.pid}
    uses = ((name, use_of(pid)) for name, pid in pids.items())
    return {name: use for name, use in uses if use is not None}


def describe(uses: Mapping[str, ProcessUse]) -> str:
    """Memory by process, for a line of the log."""
    return ", ".join(
        f"{name} {use.rss_bytes >> 20} MB (peak {use.peak_bytes >> 20}, anonymous {use.anonymous_bytes >> 20})"
        for name, use in uses.items()
    )


def _status(pid: int) -> dict[str, int]:
    """The sizes in `/proc/<pid>/status`, in bytes."""
    lines = (line.partition(":") for line in (PROC / str(pid) / "status").read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines if value.endswith(" kB")}
