"""Log set-up, once per process: one line per event, with the role that wrote it, on stderr."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import Literal

Level = Literal["debug", "info", "warning", "error"]
QUIET = ("aiohttp.access", "asyncio", "httpx", "httpcore", "urllib3", "transformers")


class OneLine(logging.Formatter):
    """Joins lines, so that one event is one line whatever it says; a traceback follows indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, with line breaks of the message shown as `\\n`."""
        record.message = record.message.replace("\r", "\\r").replace("\n", "\\n")
        return super().formatMessage(record)


def setup_logging(level: Level, role: str) -> None:
    """Send all logs at or above `level` to stderr as `time level role logger: text`. Replaces earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    text = f"%(asctime)s.%(msecs)03d %(levelname).1s {role.replace('%', '%%')} %(name)s: %(message)s"
    handler.setFormatter(OneLine(text, datefmt="%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def escaped(text: str, most: int = 300) -> str:
    """`text` of a stranger for a log: printable ASCII, at most `most` characters of it."""
    shown = ascii(text[:most])[1:-1]
    return shown if len(text) <= most else f"{shown}..."


class SparingLog:
    """Warnings that strangers can cause. At most `burst` at once, then one every `every_s` seconds; what is left out is
    counted in the next one. Any thread.
    """

    def __init__(self, logger: logging.Logger, burst: int = 5, every_s: float = 5.0) -> None:
        self._logger = logger
        self._burst = burst
        self._every_s = every_s
        self._left = float(burst)
        self._looked_at = time.monotonic()
        self._num_left_out = 0
        self._lock = threading.Lock()

    def warning(self, text: str, *args: object) -> None:
        """As `Logger.warning`."""
        with self._lock:
            now = time.monotonic()
            self._left = min(self._burst, self._left + (now - self._looked_at) / self._every_s)
            self._looked_at = now
            if self._left < 1:
                self._num_left_out += 1
                return
            self._left -= 1
            num_left_out, self._num_left_out = self._num_left_out, 0
        more = f" ({num_left_out} more were not logged)" if num_left_out else ""
        self._logger.warning(f"{text}{more}", *args)
