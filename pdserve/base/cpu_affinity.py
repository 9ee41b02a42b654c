"""CPU pinning: parses `--cpu-pin` into lists of cores and pins processes.

The launchers divide cores among servers; `launch_engine` divides a server's cores among its ranks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from pdserve.errors import ConfigError

AUTO = "auto"
FIELD = "cpu_pin"
MAX_CORE = 65535
CPUS = Path("/sys/devices/system/cpu")
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)


@functools.cache
def granted_cores() -> frozenset[int]:
    """Return the cores that this process was started with. First called before any thread is pinned; cached."""
    return frozenset(os.sched_getaffinity(0))


def check_cores(text: str) -> None:
    """Raise ConfigError if `text` is not a valid value of `--cpu-pin`."""
    if text != AUTO:
        _listed(text)


def cores_of(text: str) -> list[int]:
    """Return the cores of a `--cpu-pin` value, in its order; "auto": all granted cores, second hardware threads last.

    Raises:
        ConfigError: this process may not use one of the cores, or the system cannot pin.
    """
    if sys.platform != "linux":
        raise ConfigError("--cpu-pin is for Linux", field=FIELD)
    if text == AUTO:
        return spread_out(granted_cores())
    cores = _listed(text)
    missing = [core for core in cores if core not in granted_cores()]
    if missing:
        raise ConfigError(
            f"--cpu-pin {text}: this process may not use core {missing[0]}, only {show_cores(granted_cores())}",
            field=FIELD,
        )
    return cores


def show_cores(cores: Iterable[int]) -> str:
    """Format `cores` as a value of `--cpu-pin`."""
    return ",".join(str(core) for core in sorted(cores))


def share_cores(text: str, count: int) -> list[str]:
    """Split the cores of `text` into `count` equal values of `--cpu-pin`; remaining cores stay unused.

    Raises:
        ConfigError: fewer than `count` cores, or as `cores_of`.
    """
    cores = cores_of(text)
    each = len(cores) // count
    if each == 0:
        raise ConfigError(f"--cpu-pin {text}: {count} servers need a core each, there are {len(cores)}", field=FIELD)
    return [",".join(str(core) for core in cores[i * each : (i + 1) * each]) for i in range(count)]


def spread_out(cores: Iterable[int]) -> list[int]:
    """Sort `cores`: one hardware thread of each physical core, by socket, then the second threads.

    Compute threads then get whole physical cores first.
    """
    known = sorted(cores)
    physical = {core: (_number(core, "physical_package_id"), _number(core, "core_id", core)) for core in known}
    seen: dict[tuple[int, int], int] = {}
    order: list[tuple[int, tuple[int, int], int]] = []
    for core in known:
        thread = seen.get(physical[core], 0)
        seen[physical[core]] = thread + 1
        order.append((thread, physical[core], core))
    return [core for _, _, core in sorted(order)]


def pin_process(cores: Sequence[int]) -> None:
    """Pin all threads of this process, and threads that they start later, to `cores`."""
    assert cores
    granted_cores()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(task.name), cores)


def _listed(text: str) -> list[int]:
    """Parse a list of cores such as "0-3,8"."""
    cores: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not first <= last <= MAX_CORE:
            raise ConfigError(f'--cpu-pin must be "{AUTO}" or a list of cores such as 0-3,8, got {text!r}', field=FIELD)
        cores += range(first, last + 1)
    if len(set(cores)) < len(cores):
        raise ConfigError(f"--cpu-pin {text} has a core twice", field=FIELD)
    return cores


def _number(core: int, name: str, default: int = 0) -> int:
    """Read a number from the core's topology in sysfs; `default` if sysfs has none."""
    try:
        return int((CPUS / f"cpu{core}/topology/{name}").read_text())
    except (OSError, ValueError):
        return default
