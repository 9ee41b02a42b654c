"""Available memory of this host, bounded by the container's cgroup limits."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def available_bytes() -> int:
    """Return the bytes that this process can allocate without swapping and without reaching a cgroup limit."""
    left = [psutil.virtual_memory().available]
    with contextlib.suppress(OSError):
        left += _left_in_groups(CGROUPS, OWN_CGROUP.read_text())
    return max(0, min(left))


def _left_in_groups(root: Path, own: str) -> list[int]:
    """Bytes left under each cgroup limit (v2, v1) of this process; `own` is the text of `/proc/self/cgroup`."""
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
    """Bytes left under one group's limit, empty without a limit. Page cache that can be dropped counts as free."""
    with contextlib.suppress(OSError, ValueError):
        limit, used = int((group / limit_name).read_text()), int((group / used_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return [limit - used + int(stat.get(cache_name, 0))]
    return []


def give_back_freed() -> None:
    """Return freed heap memory to the operating system. Has no effect without glibc's `malloc_trim`."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        try:
            trim = libc.malloc_trim
        except AttributeError:  # another C library
            return
        trim(0)
