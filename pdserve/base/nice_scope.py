"""Which processes the kernel compares a niceness with, and a session of our own for the processes of one service.

Linux compares niceness within a task group only. Groups share the cores by their own weights, whatever niceness their
processes have:

    processes in a CPU cgroup (a container, a systemd unit)    the cgroup is the group
    else, where kernel.sched_autogroup_enabled is 1            each session (`setsid`) is a group
    else                                                       all processes of the machine are one group

`launch_local` gives prefill a niceness so that decode and the router come first. Every other process of the group comes
first as well. So the niceness may be high only where the group has none but our processes. No cgroup is made for this
purpose: a cgroup beside ours would escape the limits of ours, and one below it has no CPU weight as long as ours has
processes itself.
"""

from __future__ import annotations

import enum
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from pdserve.base.process import die_with_parent

_CONTAINER_INIT = 1
_FORWARDED = (signal.SIGINT, signal.SIGTERM)


class NiceScope(enum.Enum):
    """The processes with which a niceness of ours is compared."""

    SESSION = "session"
    """Those of our session."""
    OWN_CGROUP = "own cgroup"
    """Those of our CPU cgroup, which has no others."""
    SHARED = "shared"
    """Others as well, or it is not known."""


def nice_scope(proc: Path = Path("/proc")) -> NiceScope:
    """Return the scope of this process's niceness. Call it before child processes are started."""
    try:
        cgroup = _cpu_cgroup(proc)
        if cgroup is not None:
            pids = {int(pid) for procs in cgroup.rglob("cgroup.procs") for pid in procs.read_text().split()}
            return NiceScope.OWN_CGROUP if pids <= {os.getpid(), _CONTAINER_INIT} else NiceScope.SHARED
        enabled = (proc / "sys/kernel/sched_autogroup_enabled").read_text().strip() == "1"
    except (OSError, ValueError, LookupError):
        return NiceScope.SHARED
    return NiceScope.SESSION if enabled else NiceScope.SHARED


def _cpu_cgroup(proc: Path) -> Path | None:
    """Return the directory of the cgroup that is this process's task group; None: that of the whole machine.

    Raises:
        LookupError: the cgroup is not visible here.
    """
    lines = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    if "cpu" in paths:
        mount, directory = _mounted(proc, "cgroup", "cpu", paths["cpu"])
        return None if (directory / "release_agent").exists() else directory
    if "" not in paths:
        return None
    mount, directory = _mounted(proc, "cgroup2", "", paths[""])
    for one in (directory, *directory.parents):
        if (one / "cpu.weight").exists():
            return one
        if one == mount:
            break
    if (mount / "cgroup.type").exists():  # the machine's root cgroup has no such file
        raise LookupError("the cgroup with the CPU controller is outside of this namespace")
    return None


def _mounted(proc: Path, kind: str, controller: str, path: str) -> tuple[Path, Path]:
    """Return the mount point of a cgroup hierarchy, and the directory of the cgroup `path` in it."""
    for line in (proc / "self/mountinfo").read_text().splitlines():
        head, _, tail = line.partition(" - ")
        found_kind, _, options = tail.split(" ", 2)
        if found_kind != kind or (controller and controller not in options.split(",")):
            continue
        root, mount = head.split(" ")[3:5]
        if Path(path).is_relative_to(root) and ".." not in Path(path).parts:
            return Path(mount), Path(mount) / Path(path).relative_to(root)
    raise LookupError(f"the cgroup {path} is not mounted")


def in_own_session(run: Callable[[], int]) -> int:
    """Call `run` in a child process that leads a session of its own, and return its exit status.

    This process stays in its session and forwards SIGINT and SIGTERM: a terminal sends Ctrl-C to its own session only.
    The kernel kills the child when this process dies. A process that leads a session already, or has other threads,
    calls `run` itself. Call it in the main thread.
    """
    if os.getsid(0) == os.getpid() or threading.active_count() > 1:  # a fork copies the calling thread only
        return run()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    pid = os.fork()
    if pid == 0:
        _lead(parent, before, run)
    handlers = [signal.signal(number, lambda sent, _: os.kill(pid, sent)) for number in _FORWARDED]
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # a zombie: no other process has its pid yet
    for number, handler in zip(_FORWARDED, handlers, strict=True):
        signal.signal(number, handler)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status if status >= 0 else 128 - status


def _lead(parent: int, mask: set[int | signal.Signals], run: Callable[[], int]) -> NoReturn:
    """Become the leader of a new session, call `run`, and end this process."""
    status = 1
    try:
        die_with_parent(parent)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = run()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
