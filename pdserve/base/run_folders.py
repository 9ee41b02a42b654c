"""Private folders in the temporary directory that must not outlive their process, such as those of its sockets.

A folder's name says who made it: pid, pid namespace, and when the process started. So the next one that makes a folder
removes those of processes that were killed, and no others: not those of the living, of other users, or of other
containers with the same temporary directory. Called by `protocol.channel`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "pdserve"
_NAME = re.compile(PREFIX + r"-(\d+)-(\d+)-(\d+)-[^-]*")
_STAT_START = 19
_STAT_STATE = 0
"""Places in `/proc/<pid>/stat`, counted behind the name of the program, which may hold anything."""


def make_run_folder(max_path: int) -> str:
    """A new folder of mode 0700 whose path has at most `max_path` characters; folders of killed processes are removed.

    Where the temporary directory has too long a name it is made in /tmp.
    """
    prefix = _own_prefix()
    for parent in (tempfile.gettempdir(), "/tmp"):
        sweep(Path(parent))
        folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
        if len(folder) <= max_path:
            return folder
        os.rmdir(folder)
    return tempfile.mkdtemp(prefix=f"{PREFIX}-", dir="/tmp")


def sweep(parent: Path) -> list[Path]:
    """Remove the folders in `parent` of processes of this user and pid namespace that have ended; returns them."""
    removed = []
    namespace = _namespace()
    with contextlib.suppress(OSError):
        for entry in sorted(parent.iterdir()):
            named = _NAME.fullmatch(entry.name)
            if named is None or int(named[2]) != namespace or _start_of(int(named[1])) == int(named[3]):
                continue
            if _is_own_folder(entry):
                shutil.rmtree(entry, ignore_errors=True)
                removed.append(entry)
    return removed


def _own_prefix() -> str:
    pid = os.getpid()
    start, namespace = _start_of(pid), _namespace()
    return f"{PREFIX}-" if start is None or namespace is None else f"{PREFIX}-{pid}-{namespace}-{start}-"


def _namespace() -> int | None:
    """Number of the pid namespace; None where the system does not tell, and nothing is ever swept."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


def _start_of(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since the system did; None when there is none, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[_STAT_STATE] == "Z" else int(fields[_STAT_START])


def _is_own_folder(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
