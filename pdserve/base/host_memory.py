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


def total_bytes() -> int:
    """Return the memory of this host, or the least cgroup limit of this process if that is less."""
    limits = [psutil.virtual_memory().total]
    with contextlib.suppress(OSError):
        limits += [limit for limit, _ in _groups(CGROUPS, OWN_CGROUP.read_text())]
    return min(limits)


def _left_in_groups(root: Path, own: str) -> list[int]:
    """Return the bytes left under each cgroup limit of this process."""
    return [left for _, left in _groups(root, own)]


def _groups(root: Path, own: str) -> list[tuple[int, int]]:
    """Return each cgroup limit (v2, v1) of this process in bytes, and the bytes left under it.

    `own` is the text of `/proc/self/cgroup`.
    """
    found: list[tuple[int, int]] = []
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
            found += _limit_of(directory, *names)
            if directory == top:
                break
    return found


def _limit_of(group: Path, limit_name: str, used_name: str, cache_name: str) -> list[tuple[int, int]]:
    """Return a group's limit and the bytes left under it, empty without a limit.

    Page cache that can be dropped counts as left.
    """
    with contextlib.suppress(OSError, ValueError):
        limit, used = int((group / limit_name).read_text()), int((group / used_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return [(limit, limit - used + int(stat.get(cache_name, 0)))]
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
