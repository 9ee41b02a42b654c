"""Logging: one line per record on stderr, with the role that speaks."""

from __future__ import annotations

import logging
import sys


def setup_logging(level: str, role: str) -> None:
    """Set up the root logger of this process. Quiet libraries that talk much."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {role} %(levelname).1s %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("httpx", "urllib3", "aiohttp.access", "asyncio", "transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)
