"""Closes ports that a library keeps open for the life of the process but needs only at its start. Linux only.

A socket filter that passes no packet is attached to the listening socket. The kernel then drops new connections;
accepted connections stay open, and the library notices nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterator

log = logging.getLogger(__name__)

_SO_ATTACH_FILTER = 26
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A classic BPF instruction: keep 0 bytes of the packet."""


@contextlib.contextmanager
def ports_closed_afterwards() -> Iterator[None]:
    """Close the ports that any thread of the process opened in the `with` block.

    If the kernel refuses the filter, the ports stay open and a warning is logged.
    """
    before = {inode for inode, _ in _listeners()}
    yield
    for inode, listener in _listeners():
        if inode not in before:
            _close(listener)


def close_port(port: int) -> None:
    """Close a TCP port of this process; no effect without such a listener. Logs a warning if the kernel refuses."""
    for _, listener in _listeners():
        if listener.getsockname()[1] == port:
            _close(listener)


def _listeners() -> Iterator[tuple[int, socket.socket]]:
    """Yield inode and a duplicate of each listening TCP socket; the duplicate is closed after use."""
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(f"/proc/self/fd/{name}")
            if not stat.S_ISSOCK(status.st_mode):
                continue
            copy = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            duplicate = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with duplicate:
            is_tcp = duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM
            if is_tcp and duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield status.st_ino, duplicate


def _close(listener: socket.socket) -> None:
    program = ctypes.create_string_buffer(_RETURN_NOTHING, len(_RETURN_NOTHING))
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program))
        )  # fmt: skip
    except OSError as error:
        log.warning("port %d could not be closed and stays open: %s", listener.getsockname()[1], error)
