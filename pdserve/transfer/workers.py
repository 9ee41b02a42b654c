"""Copy workers: threads that run copy jobs on a transport and report to the mailbox.

A peer's jobs always go to the same thread, so that a peer that hangs delays nobody but those who share its thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from pdserve.errors import TransferError
from pdserve.protocol.failure import Failure
from pdserve.transfer.events import CopyDone, CopyJob, TransferEvent
from pdserve.transfer.transport import Copy, Transport

log = logging.getLogger(__name__)


class CopyWorkers:
    """`CopyEngine` over a real transport, with `num_threads` threads."""

    def __init__(self, transport: Transport, post: Callable[[TransferEvent], None], num_threads: int) -> None:
        self._transport = transport
        self._post = post
        self._queues: list[queue.SimpleQueue[CopyJob | None]] = [queue.SimpleQueue() for _ in range(num_threads)]
        self._connected: set[str] = set()
        self._thread_of: dict[str, int] = {}
        self.address = transport.address()
        self._threads = [
            threading.Thread(target=self._work, args=(jobs,), name=f"kv-copy-{i}", daemon=True)
            for i, jobs in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def settle_s(self) -> float:
        """See `CopyEngine`."""
        return self._transport.settle_s

    def submit(self, job: CopyJob) -> None:
        """See `CopyEngine`."""
        index = self._thread_of.setdefault(job.transport_address, len(self._thread_of) % len(self._queues))
        self._queues[index].put(job)

    def forget(self, transport_address: str) -> None:
        """See `CopyEngine`."""
        self._thread_of.pop(transport_address, None)
        self._connected.discard(transport_address)
        self._transport.disconnect(transport_address)

    def close(self) -> None:
        """End the threads after what they are at."""
        for jobs in self._queues:
            jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, jobs: queue.SimpleQueue[CopyJob | None]) -> None:
        while (job := jobs.get()) is not None:
            self._post(self._run(job))

    def _run(self, job: CopyJob) -> CopyDone:
        if job.cancelled:
            failure = Failure(code="cancelled", message="the transfer was cancelled before this piece was sent")
            return CopyDone(job, failure, settled=True, write_s=0.0)
        copies = [
            Copy(source + copy.source, destination + copy.destination, copy.num_bytes)
            for source, destination, pieces in job.pieces
            for copy in pieces
        ]
        started = time.monotonic()
        try:
            if job.transport_address not in self._connected:
                self._transport.connect(job.transport_address)
                self._connected.add(job.transport_address)
            self._transport.write(job.transport_address, copies)
        except TransferError as error:
            log.warning("copy of %d bytes to %s failed: %s", job.num_bytes, job.transport_address, error)
            return CopyDone(job, Failure.from_error(error), error.settled, time.monotonic() - started)
        except Exception as error:
            log.exception("copy of %d bytes to %s failed", job.num_bytes, job.transport_address)
            failure = Failure(code="internal", message=repr(error), retryable=False, status=500)
            return CopyDone(job, failure, settled=False, write_s=time.monotonic() - started)
        return CopyDone(job, None, settled=True, write_s=time.monotonic() - started)
