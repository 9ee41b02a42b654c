"""How much memory this host has left for us: what the kernel says, within what a container's limit leaves."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def available_bytes() -> int:
    """Bytes that can be taken without swapping, and without reaching the limit of a control group we are in."""
    left = [psutil.virtual_memory().available]
    with contextlib.suppress(OSError):
        left += _left_in_groups(CGROUPS, OWN_CGROUP.read_text())
    return max(0, min(left))


def _left_in_groups(root: Path, own: str) -> list[int]:
    """What each limit (cgroup v2, v1) above us leaves; `own` is the text of `/proc/self/cgroup`."""
    left: list[int] = []
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.lstrip("/")
        for directory in (group, *group.parents):
            left += _left_in(directory, *names)
            if directory == top:
                break
    return left


def _left_in(group: Path, limit_name: str, used_name: str, cache_name: str) -> list[int]:
    """What the limit of one group leaves, the page cache that it can drop not counted as used; nothing without one."""
    with contextlib.suppress(OSError, ValueError):
        limit, used = int((group / limit_name).read_text()), int((group / used_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return [limit - used + int(stat.get(cache_name, 0))]
    return []


def give_back_freed() -> None:
    """Give freed memory back to the operating system, where the C library can (glibc); it keeps some for later else."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        try:
            trim = libc.malloc_trim
        except AttributeError:  # another C library
            return
        trim(0)
