"""Moves what native libraries print on stderr into the log, at level debug.

Transfer engines and other C++ libraries write to file descriptor 2 in formats of their own. A child process gives that
descriptor the write end of a pipe, while Python's `sys.stderr` keeps the former one. The parent reads the pipe, so that
the last words of a process that crashes are not lost:

    child    native code ── fd 2 ──> pipe            Python: sys.stderr ──> the former fd 2
    parent   StderrReader: log.debug of each line; keeps the last ones, for a child that dies

The write end does not block: when the parent falls behind, lines are dropped and the child continues.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from multiprocessing.connection import Connection

from pdserve.base.log import LogOrigin, about

log = logging.getLogger("pdserve.native")

NUM_LAST = 20
"""Lines that are kept of each process."""
LAST_S = 10.0
"""Seconds before the end of a process from which lines count as its last ones."""
MAX_LINE_BYTES = 2000
"""Longer lines are cut."""
JOIN_S = 1.0


def redirect_native_stderr(write_end: Connection) -> None:
    """Send descriptor 2 of this process into the pipe. Call it before any thread starts and any library is loaded."""
    os.set_blocking(write_end.fileno(), False)
    sys.stderr.flush()
    python_only = os.dup(2)
    sys.stderr = open(python_only, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    os.dup2(write_end.fileno(), 2)
    write_end.close()


class StderrReader:
    """Reads the native stderr of one child process in a thread, and logs it on behalf of the child.

    `write_end` is for the child; the parent calls `begin` once the child has it.
    """

    def __init__(self, role: str) -> None:
        self._role = role
        read_end, write_end = os.pipe()
        self._read_end = read_end
        self.write_end = Connection(write_end, readable=False)
        self._last: deque[tuple[float, str]] = deque(maxlen=NUM_LAST)
        """Monotonic time and text of each line."""
        self._ended_s: float | None = None
        self._thread: threading.Thread | None = None

    def begin(self, pid: int) -> None:
        """Start to read. `pid`: of the child."""
        self.write_end.close()
        origin = LogOrigin(self._role, pid)
        self._thread = threading.Thread(target=self._read, args=(origin,), name="native-stderr", daemon=True)
        self._thread.start()

    def last_lines(self) -> list[str]:
        """Return the lines of the last `LAST_S` seconds of a child that has ended, oldest first."""
        if self._thread is not None:
            self._thread.join(JOIN_S)  # the pipe ends with the child, unless a process that it started lives on
        ended_s = time.monotonic() if self._ended_s is None else self._ended_s
        return [text for at_s, text in self._last if ended_s - at_s <= LAST_S]

    def close(self) -> None:
        """Release the pipe of a child that was never started. Others are released at the child's end."""
        if self._thread is None:
            self.write_end.close()
            with contextlib.suppress(OSError):
                os.close(self._read_end)

    def _read(self, origin: LogOrigin) -> None:
        with open(self._read_end, "rb", buffering=0) as pipe:
            rest = b""
            while piece := pipe.read(1 << 16):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    self._take(line, origin)
                rest = rest[:MAX_LINE_BYTES]
            if rest:
                self._take(rest, origin)
        self._ended_s = time.monotonic()

    def _take(self, line: bytes, origin: LogOrigin) -> None:
        text = line[:MAX_LINE_BYTES].decode(errors="backslashreplace").rstrip()
        if text:
            self._last.append((time.monotonic(), text))
            log.debug("%s", text, extra=about(origin=origin))
