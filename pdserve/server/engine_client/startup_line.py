"""The line in the log that ends a start-up: how long each part took, and what memory each process has now.

Called by the engine client when the scheduler has announced itself; `/get_server_info` and `/metrics` have the same.
"""

from __future__ import annotations

import logging

from pdserve.base import process_use, startup_times
from pdserve.protocol.messages import EngineReady

log = logging.getLogger(__name__)


def log_startup(ready: EngineReady) -> None:
    """Of replicas, the times are the first one's."""
    times = startup_times.describe(startup_times.read_facts(ready.facts))
    log.info("the engine is ready%s; memory: %s", times, process_use.describe(process_use.own_processes()))
