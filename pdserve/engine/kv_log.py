"""The log of `--log-kv-target`: JSON lines about KV transfers and decode steps, one file for each rank.

    event           written by                                   a line for
    kv.sent         scheduler/kv_checksum.py, rank 0 of prefill  each request, with hashes of the sent KV
    kv.received     scheduler/kv_checksum.py, rank 0 of decode   each request, with hashes of the received KV
    kv.submission   transfer/copy_workers.py, every rank         each batch of copies that a transfer engine was given
    decode.step     scheduler/step_log.py, rank 0                each step that generates tokens

Built at start-up by `build` and `build_follower`. Without the flag nothing of this exists.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from pdserve.config import ServerConfig
from pdserve.observe.json_lines import JsonLines
from pdserve.protocol.failure import Failure
from pdserve.scheduler.kv_checksum import WriteLine
from pdserve.transfer.copy_workers import LogSubmission
from pdserve.transfer.events import CopyJob
from pdserve.transfer.transport import Copy, Transport

MOST_BUFFERS = 256
"""Buffers of a submission that its line lists; `num_buffers` counts all."""


def open_kv_log(config: ServerConfig, dp_rank: int, rank: int, stack: contextlib.ExitStack) -> WriteLine | None:
    """Return the writer of a rank's lines; None without `--log-kv-target`. `stack` closes the log.

    Raises:
        ConfigError: the file cannot be opened.
    """
    target = config.observe.log_kv_target
    if target is None:
        return None
    name = f"kv-{config.disagg.disaggregation_mode}-{dp_rank}"
    lines = JsonLines(target, name if rank == 0 else f"{name}-rank{rank}", "log_kv_target")
    stack.callback(lines.close)
    return lines.write


class SubmissionLog:
    """Writes a `kv.submission` line for each batch of copies. Copy workers call it when the batch has ended.

    `device` is the memory that is read, `ib_device` that of the flag; None: the engine chooses.
    """

    def __init__(
        self, write: WriteLine, transport: Transport, *, dp_rank: int, device: str, ib_device: str | None
    ) -> None:
        self._write = write
        self._facts = {
            "dp_rank": dp_rank,
            "transport": transport.name,
            "protocol": transport.facts.protocol,
            "device": device,
            "ib_device": ib_device,
        }

    def __call__(self, job: CopyJob, copies: Sequence[Copy], latency_s: float, failure: Failure | None) -> None:
        """Write the line. `latency_s`: seconds from the submission until the engine reported its end."""
        key = job.key
        self._write(
            {
                "at": time.time(),
                "event": "kv.submission",
                "room": str(key.room),
                "key": f"{key.room}/{key.attempt}/{key.origin}",
                "index": job.index,
                "rank": job.rank,
                "peer": job.peer,
                "address": job.transport_address,
                **self._facts,
                "num_buffers": len(copies),
                "buffers": [[copy.source, copy.destination, copy.num_bytes] for copy in copies[:MOST_BUFFERS]],
                "bytes": job.num_bytes,
                "latency_s": latency_s,
                "error": None if failure is None else f"{failure.code}: {failure.message}",
            }
        )


def submission_log(
    config: ServerConfig, write: WriteLine | None, transport: Transport, *, dp_rank: int, device: str
) -> LogSubmission | None:
    """Return the log of a rank's submissions; None without a KV log."""
    if write is None:
        return None
    ib_device = config.disagg.disaggregation_ib_device
    return SubmissionLog(write, transport, dp_rank=dp_rank, device=device, ib_device=ib_device)
