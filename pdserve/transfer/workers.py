"""Copy workers: threads that run copy jobs on a transport and report to the mailbox.

A peer's jobs always go to the same thread, so that a peer that hangs delays nobody but those who share its thread,
and so that each thread knows alone whom it is connected to. Which thread that is, only the scheduler thread knows.

A job with a closed gate is kept aside, and holds up no other: a thread runs what is ready first, and waits for its
oldest gate, in short bits, only when there is nothing else to do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from pdserve.errors import TransferError
from pdserve.protocol.failure import Failure
from pdserve.transfer.events import CopyDone, CopyJob, TransferEvent
from pdserve.transfer.gated import CANCELLED, PEER_GONE, GatedJobs
from pdserve.transfer.transport import Copy, Transport

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
GATE_SLICE_S = 0.004
"""How long a thread waits for a gate before it looks at its queue again."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Forget:
    """The peer behind this address is gone."""

    transport_address: str


@dataclasses.dataclass(frozen=True, slots=True)
class _End:
    """Nothing comes after this."""


Orders = queue.SimpleQueue[CopyJob | _Forget | _End]


class CopyWorkers:
    """`CopyEngine` over a real transport, with `num_threads` threads."""

    def __init__(self, transport: Transport, post: Callable[[TransferEvent], None], num_threads: int) -> None:
        self._transport = transport
        self._post = post
        self._queues: list[Orders] = [queue.SimpleQueue() for _ in range(num_threads)]
        self._thread_of: dict[str, int] = {}
        self._closing = threading.Event()
        self._disconnecting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-disconnect")
        self.address = transport.address()
        self._threads = [
            threading.Thread(target=self._work, args=(orders,), name=f"kv-copy-{i}", daemon=True)
            for i, orders in enumerate(self._queues)
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

    def cancel(self, job: CopyJob) -> None:
        """See `CopyEngine`: the threads look at `job.cancelled` themselves."""

    def forget(self, transport_address: str) -> None:
        """See `CopyEngine`."""
        self._disconnecting.submit(self._transport.disconnect, transport_address)  # ends what runs; may take a second
        index = self._thread_of.pop(transport_address, None)
        if index is not None:
            self._queues[index].put(_Forget(transport_address))  # and once more behind a connect that runs just now

    def close(self) -> None:
        """End the threads. Writes under way are cut off; queued jobs, and those with a closed gate, are not begun."""
        self._closing.set()
        for address in self._thread_of:
            self._transport.disconnect(address)
        for orders in self._queues:
            orders.put(_End())
        self._disconnecting.shutdown(wait=False)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.warning("%s still copies after %g s, and is left behind", thread.name, CLOSE_TIMEOUT_S)

    def _work(self, orders: Orders) -> None:
        connected: set[str] = set()
        gated = GatedJobs()
        while True:
            match _next_order(orders, gated):
                case CopyJob(ready=None) as job:
                    self._post(self._run(job, connected))
                case CopyJob(ready=ready) as job:
                    assert ready is not None
                    gated.add(job, ready)
                    if not orders.empty():
                        continue  # take in all that came before the gates are asked
                case _Forget(transport_address=address):
                    self._report_unsent(gated.drop(address), PEER_GONE)
                    connected.discard(address)
                    self._transport.disconnect(address)
                case _End():
                    self._report_unsent(gated.clear(), CANCELLED)
                    return
            for job, failure in gated.take():
                if failure is None:
                    self._post(self._run(job, connected))
                else:
                    self._report_unsent([job], failure)

    def _report_unsent(self, jobs: Sequence[CopyJob], failure: Failure) -> None:
        for job in jobs:
            self._post(CopyDone(job, failure, settled=True, write_s=0.0))

    def _run(self, job: CopyJob, connected: set[str]) -> CopyDone:
        if job.cancelled or self._closing.is_set():
            return CopyDone(job, CANCELLED, settled=True, write_s=0.0)
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


def _next_order(orders: Orders, gated: GatedJobs) -> CopyJob | _Forget | _End | None:
    """What to do next; None when a while has passed, or a gate has opened. Blocks for good only with no gated job."""
    if not gated:
        return orders.get()
    try:
        return orders.get_nowait()
    except queue.Empty:
        pass
    looks_again_at = time.monotonic() + GATE_SLICE_S
    if gated.wait(GATE_SLICE_S):
        return None
    left_s = looks_again_at - time.monotonic()
    if left_s > 0:  # a gate that will never open does not wait
        with contextlib.suppress(queue.Empty):
            return orders.get(timeout=left_s)
    return None
