"""Log set-up, once per process: one line per event, with the role that wrote it, on stderr."""

from __future__ import annotations

import logging
import sys
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
