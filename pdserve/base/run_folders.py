"""Private folders in the temporary directory that must not outlive their process, such as socket folders.

A folder's name holds the pid, the pid namespace and the start time of its process. Each process that makes a folder
first removes the folders of killed processes. Folders of running processes, of other users, and of other containers
with the same temporary directory are kept. Called by `protocol.channel`.
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
"""Field indices in `/proc/<pid>/stat`, counted after the program name, which may contain any character."""


def make_run_folder(max_path: int) -> str:
    """Make a folder of mode 0700 whose path has at most `max_path` characters, and remove those of killed processes.

    If the path of the temporary directory is too long, the folder is made in /tmp.
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
    """Remove the folders in `parent` of ended processes of this user and pid namespace; returns the removed paths."""
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
    """Return the inode of the pid namespace; None if unknown, in which case no folder is removed."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


def _start_of(pid: int) -> int | None:
    """Return the start time of process `pid` in clock ticks since boot; None if it has ended or is a zombie."""
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
