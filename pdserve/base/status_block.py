"""Status lines of the parts of a service while it starts, one line per part.

    terminal     a block of lines at the bottom, drawn again at each change; other output scrolls above it
    elsewhere    one log line for all parts every few seconds

Owned by `launch_local`. Reader threads of the parts call `set` and `above`.
"""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from pdserve.base.startup_progress import EVERY_S, READY, ticking

log = logging.getLogger(__name__)

NAME_WIDTH = 11
_UP_AND_CLEAR = "\x1b[{}A\x1b[J"


class StatusBlock:
    """See the file's docstring. Any thread. A context manager: shows nothing more after its end.

    `out`: where the block is drawn if it is a terminal; `tell` gets the lines if it is not.
    """

    def __init__(
        self, out: TextIO | None = None, tell: Callable[[str], None] = log.info, every_s: float = EVERY_S
    ) -> None:
        self._out = sys.stdout if out is None else out
        self._tell = tell
        self._on_terminal = self._out.isatty()
        self._parts: dict[str, tuple[str, float]] = {}
        self._num_drawn = 0
        self._closed = False
        self._lock = threading.RLock()
        self._ticker = ticking(self._tick, every_s)

    def __enter__(self) -> StatusBlock:
        self._ticker.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ticker.__exit__(None, None, None)
        with self._lock:
            self._erase()
            self._closed = True

    def set(self, name: str, text: str) -> None:
        """Show `text` as the status of part `name`, with the seconds since the part's first status."""
        with self._lock:
            if not self._closed:
                self._parts[name] = (text, self._parts.get(name, ("", time.monotonic()))[1])
                self._redraw()

    def remove(self, name: str) -> None:
        """Show part `name` no more: it is ready, or has ended."""
        with self._lock:
            self._parts.pop(name, None)
            self._redraw()

    def above(self, write: Callable[[], None]) -> None:
        """Call `write`, which prints a line, so that the line appears above the block."""
        with self._lock:
            self._erase()
            write()
            self._redraw()

    def _tick(self) -> None:
        with self._lock:
            self._redraw()
            late = [name for name, (text, _) in self._parts.items() if text != READY]
            if late and not self._on_terminal:
                parts = ", ".join(f"{name}: {self._line(name)}" for name in late)
                self._tell(f"not ready yet: {parts}")

    def _line(self, name: str) -> str:
        text, since = self._parts[name]
        return f"{text} ({time.monotonic() - since:.0f} s)"

    def _redraw(self) -> None:
        if not self._on_terminal or self._closed:
            return
        self._erase()
        width = shutil.get_terminal_size().columns - 1
        lines = [f"{name:<{NAME_WIDTH}}{self._line(name)}"[:width] + "\n" for name in self._parts]
        self._out.write("".join(lines))
        self._out.flush()
        self._num_drawn = len(lines)

    def _erase(self) -> None:
        if self._num_drawn:
            self._out.write(_UP_AND_CLEAR.format(self._num_drawn))
            self._out.flush()
            self._num_drawn = 0
