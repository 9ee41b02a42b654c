"""Memory and CPU time of processes, as the kernel counts them (Linux; elsewhere None).

Used by `/metrics`, `/get_server_info` and the log line at the end of start-up.
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
"""The name of the calling process: a server's API process."""


@dataclasses.dataclass(frozen=True)
class ProcessUse:
    """Memory and CPU time of one process.

    `rss_bytes` is `anonymous_bytes`, which only the process frees, plus memory that it may share with other processes.
    `file_bytes` are pages of mapped files (code, weights while they are read), which the kernel can reclaim.
    `peak_bytes` is the maximum of `rss_bytes`. `cpu_s` covers all threads. `start_s`: seconds since 1970.
    """

    pid: int
    rss_bytes: int
    anonymous_bytes: int
    file_bytes: int
    peak_bytes: int
    cpu_s: float
    start_s: float


def use_of(pid: int) -> ProcessUse | None:
    """Return the current use of process `pid`; None if it does not exist or the host does not report it."""
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
    """Return the use of this process and of its running `multiprocessing` children, by process name."""
    pids = {OWN: os.getpid()} | {child.name: child.pid for child in multiprocessing.active_children() if child.pid}
    uses = ((name, use_of(pid)) for name, pid in pids.items())
    return {name: use for name, use in uses if use is not None}


def describe(uses: Mapping[str, ProcessUse]) -> str:
    """Format the memory of each process for a log line."""
    return ", ".join(
        f"{name} {use.rss_bytes >> 20} MB (peak {use.peak_bytes >> 20}, anonymous {use.anonymous_bytes >> 20})"
        for name, use in uses.items()
    )


def _status(pid: int) -> dict[str, int]:
    """Read the sizes in `/proc/<pid>/status`, in bytes."""
    lines = (line.partition(":") for line in (PROC / str(pid) / "status").read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines if value.endswith(" kB")}
