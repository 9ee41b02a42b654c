"""Keeps the last log lines of this process and of the processes that it starts, in shared memory, for `GET /logs`.

    parent   LogRing.create(name) ── handle ──> child: keep_lines_in      its handler writes each line into the ring
    parent   last_lines <── all rings, the child's also after its end

A ring has `RING_BYTES`; new lines overwrite the oldest ones. One process writes to a ring, under the lock of its
logging handler. A reader takes no lock: it drops the lines that were overwritten while it copied.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import tempfile
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

from pdserve.base.redaction import Redactor
from pdserve.errors import RequestError

RING_BYTES = 512 << 10
MAX_LINE_BYTES = 8 << 10
"""Longer lines are cut."""
MAX_RINGS = 64
"""Rings that a process keeps; the oldest are dropped."""
DEFAULT_LINES, MAX_LINES = 1000, 5000
PATH = "/logs"
_HEADER = struct.Struct("<Q")
_ROOM = RING_BYTES - _HEADER.size


class LogRing:
    """A ring of lines in shared memory. `name`: the process that writes it."""

    def __init__(self, name: str, descriptor: int) -> None:
        """Map the memory behind `descriptor`, which stays open."""
        self.name = name
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, RING_BYTES)

    @classmethod
    def create(cls, name: str) -> LogRing:
        """Make an empty ring. Its memory is committed as lines are written, and released with its last process."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("pdserve-log")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, RING_BYTES)
        return cls(name, descriptor)

    @property
    def handle(self) -> Connection:
        """What a child process is given to write to the ring: a copy of the descriptor."""
        return Connection(os.dup(self._descriptor))

    def write(self, line: str) -> None:
        """Append a line without its line break."""
        data = line.encode(errors="backslashreplace")[:MAX_LINE_BYTES] + b"\n"
        total: int = _HEADER.unpack_from(self._memory)[0]
        at = total % _ROOM
        first = data[: _ROOM - at]
        begin = _HEADER.size + at
        self._memory[begin : begin + len(first)] = first
        rest = data[len(first) :]
        self._memory[_HEADER.size : _HEADER.size + len(rest)] = rest
        _HEADER.pack_into(self._memory, 0, total + len(data))

    def lines(self, most: int) -> list[str]:
        """Return the last `most` lines, oldest first."""
        end: int = _HEADER.unpack_from(self._memory)[0]
        copy = self._memory[_HEADER.size :]
        # The writer may have overwritten what it has counted since, and one line that it has not counted yet.
        begin = max(0, _HEADER.unpack_from(self._memory)[0] + 2 * MAX_LINE_BYTES - _ROOM)
        if begin >= end:
            return []
        text = (copy[begin % _ROOM :] + copy[: begin % _ROOM])[: end - begin]
        lines = text.decode(errors="replace").splitlines()
        return lines[1 if begin else 0 :][-most:]


class _RingHandler(logging.Handler):
    """Writes log lines into a ring."""

    def __init__(self, ring: LogRing) -> None:
        super().__init__()
        self._ring = ring

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        try:
            self._ring.write(self.format(record))
        except Exception:
            self.handleError(record)


_own: LogRing | None = None
_rings: deque[LogRing] = deque(maxlen=MAX_RINGS)


def keep_lines_in(name: str, handle: Connection) -> None:
    """Have this process write its log lines into a ring of its parent. Called before `setup_logging`."""
    global _own
    _own = LogRing(name, os.dup(handle.fileno()))
    handle.close()


def ring_handler(name: str) -> logging.Handler:
    """Return a handler that writes into the ring of this process, which is created by the first call."""
    global _own
    if _own is None:
        _own = LogRing.create(name)
        _rings.append(_own)
    _own.name = name
    return _RingHandler(_own)


def ring_of_child(name: str) -> LogRing:
    """Create the ring of a process that this one is about to start, and keep it."""
    ring = LogRing.create(name)
    _rings.append(ring)
    return ring


def last_lines(most: int, redactor: Redactor) -> list[dict[str, Any]]:
    """Return for each ring `name` and `lines`, the last `most` ones without secrets, oldest first."""
    return [{"name": ring.name, "lines": [redactor.text(line) for line in ring.lines(most)]} for ring in _rings]


def parse_num_lines(text: str | None) -> int:
    """Return the query parameter `lines` of `GET /logs`; None: the default.

    Raises:
        RequestError: 400 naming `lines`.
    """
    if text is None:
        return DEFAULT_LINES
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_LINES)) and 1 <= int(text) <= MAX_LINES):
        raise RequestError(f"lines must be 1 to {MAX_LINES}, got {text[:64]!r}", field="lines")
    return int(text)
