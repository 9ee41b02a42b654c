"""Logging set-up, once per process: one line per event on stderr, with the role of the process."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import Literal

Level = Literal["debug", "info", "warning", "error"]
QUIET = ("aiohttp.access", "asyncio", "httpx", "httpcore", "urllib3", "transformers")


class OneLine(logging.Formatter):
    """Escapes line breaks, so that each event is one line; a traceback follows."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format the line; line breaks of the message become `\\n`."""
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
    """Escape untrusted `text` for a log as printable ASCII; only its first `most` characters."""
    shown = ascii(text[:most])[1:-1]
    return shown if len(text) <= most else f"{shown}..."


class SparingLog:
    """Rate limit for warnings that untrusted clients can trigger: a token bucket of `burst`, refilled every `every_s`.

    The next logged warning states the number of suppressed warnings. Any thread.
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
        """Log a warning like `Logger.warning`, or suppress it."""
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
