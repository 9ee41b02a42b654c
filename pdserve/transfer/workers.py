"""Copy workers: threads that run copy jobs on a transport and report to the mailbox.

A peer's jobs always go to the same thread, so that a peer that hangs delays nobody but those who share its thread,
and so that each thread knows alone whom it is connected to. Which thread that is, only the scheduler thread knows.
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

CLOSE_TIMEOUT_S = 30.0

Jobs = queue.SimpleQueue[CopyJob | str | None]
"""Jobs, addresses to disconnect, and None at the end."""


class CopyWorkers:
    """`CopyEngine` over a real transport, with `num_threads` threads."""

    def __init__(self, transport: Transport, post: Callable[[TransferEvent], None], num_threads: int) -> None:
        self._transport = transport
        self._post = post
        self._queues: list[Jobs] = [queue.SimpleQueue() for _ in range(num_threads)]
        self._thread_of: dict[str, int] = {}
        self._closing = threading.Event()
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
        index = self._thread_of.get(job.transport_address)
        if index is None:
            taken = list(self._thread_of.values())
            index = min(range(len(self._queues)), key=taken.count)
            self._thread_of[job.transport_address] = index
        self._queues[index].put(job)

    def forget(self, transport_address: str) -> None:
        """See `CopyEngine`."""
        self._transport.disconnect(transport_address)  # ends what runs
        index = self._thread_of.pop(transport_address, None)
        if index is not None:
            self._queues[index].put(transport_address)  # and once more behind a connect that runs just now

    def close(self) -> None:
        """End the threads. Writes under way are cut off; queued jobs are not begun."""
        self._closing.set()
        for address in self._thread_of:
            self._transport.disconnect(address)
        for jobs in self._queues:
            jobs.put(None)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.warning("%s still copies after %g s, and is left behind", thread.name, CLOSE_TIMEOUT_S)

    def _work(self, jobs: Jobs) -> None:
        connected: set[str] = set()
        while (job := jobs.get()) is not None:
            if isinstance(job, CopyJob):
                self._post(self._run(job, connected))
            else:
                connected.discard(job)
                self._transport.disconnect(job)

    def _run(self, job: CopyJob, connected: set[str]) -> CopyDone:
        if job.cancelled or self._closing.is_set():
            failure = Failure(code="cancelled", message="the transfer was cancelled before this piece was sent")
            return CopyDone(job, failure, settled=True, write_s=0.0)
        copies = [
            Copy(source + copy.source, destination + copy.destination, copy.num_bytes)
            for source, destination, pieces in job.pieces
            for copy in pieces
        ]
        started = time.monotonic()
        try:
            if job.transport_address not in connected:
                self._transport.connect(job.transport_address)
                connected.add(job.transport_address)
            self._transport.write(job.transport_address, copies)
        except TransferError as error:
            log.warning("copy of %d bytes to %s failed: %s", job.num_bytes, job.transport_address, error)
            return CopyDone(job, Failure.from_error(error), error.settled, time.monotonic() - started)
        except Exception as error:
            log.exception("copy of %d bytes to %s failed", job.num_bytes, job.transport_address)
            failure = Failure(code="internal", message=repr(error), retryable=False, status=500)
            return CopyDone(job, failure, settled=False, write_s=time.monotonic() - started)
        return CopyDone(job, None, settled=True, write_s=time.monotonic() - started)
