"""Logs the end of start-up: the duration of each part, and the memory of each process.

The engine client calls it when the scheduler has sent `EngineReady`. `/get_server_info` and `/metrics` report the same
numbers.
"""

from __future__ import annotations

import logging

from pdserve.base import process_use, startup_times
from pdserve.protocol.messages import EngineReady

log = logging.getLogger(__name__)


def log_startup(ready: EngineReady) -> None:
    """Log one line. With several replicas the times are those of the first replica."""
    times = startup_times.describe(startup_times.read_facts(ready.facts))
    log.info("the engine is ready%s; memory: %s", times, process_use.describe(process_use.own_processes()))
