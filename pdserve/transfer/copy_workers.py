"""Copy workers: threads that run copy jobs on a transport and post the results to the mailbox.

Each rank of a peer has its own threads, as many as the transport wants, from its first job until the peer is gone. So a
hanging peer delays no other peer, and each thread alone tracks whether it is connected.

A job with a closed gate is queued separately and delays no other job. A thread runs ready jobs first, and waits for its
oldest gate, in short intervals, only when no other job is ready.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from pdserve.errors import TransferError
from pdserve.protocol.failure import Failure
from pdserve.transfer.events import (
    CopyDone,
    CopyJob,
    LayersReady,
    PeerConnected,
    PeerFenced,
    ReceiverOpened,
    TransferEvent,
)
from pdserve.transfer.notifications import Notifications, encode_note
from pdserve.transfer.transport import Copy, NotifyingTransport, Transport
from pdserve.transfer.wire import MemoryKey

log = logging.getLogger(__name__)

GATE_TIMEOUT_S = 300.0
"""Seconds after which a gate that is still closed belongs to a step that will never be computed."""

CANCELLED = Failure(code="cancelled", message="the transfer was cancelled before this piece was sent")
PEER_GONE = Failure(code="peer_gone", message="the peer is gone, and this piece was not sent")
NEVER_WRITTEN = Failure(code="layers_not_written", message="the layers to be sent were never computed", status=500)


@dataclasses.dataclass(slots=True)
class _Gate:
    """Jobs behind one gate. All requests of a step share its gates, so a gate is polled once for all of them."""

    ready: LayersReady
    expires_at: float
    jobs: list[CopyJob] = dataclasses.field(default_factory=list)


class GatedJobs:
    """Jobs whose gates were closed at the last poll, the oldest gate first."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._gates: dict[int, _Gate] = {}

    def __bool__(self) -> bool:
        return bool(self._gates)

    def add(self, job: CopyJob, ready: LayersReady) -> None:
        """Keep `job` until `ready` returns True, the job is cancelled, or `GATE_TIMEOUT_S` have passed."""
        gate = self._gates.get(id(ready))
        if gate is None:
            gate = self._gates[id(ready)] = _Gate(ready, self._now() + GATE_TIMEOUT_S)
        gate.jobs.append(job)

    def take(self) -> Iterator[tuple[CopyJob, Failure | None]]:
        """Yield jobs that need not wait any longer: to be sent (None), or to be reported with that failure. Does not
        block.
        """
        for mark, gate in list(self._gates.items()):
            cancelled = [job for job in gate.jobs if job.cancelled]
            if cancelled:
                gate.jobs = [job for job in gate.jobs if not job.cancelled]
                yield from ((job, CANCELLED) for job in cancelled)
            if not gate.jobs:
                del self._gates[mark]
            elif self._ask(gate, 0.0):
                del self._gates[mark]
                yield from ((job, None) for job in gate.jobs)
            elif self._now() >= gate.expires_at:
                del self._gates[mark]
                yield from ((job, NEVER_WRITTEN) for job in gate.jobs)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the oldest gate; True when it is open. A gate that never opens may return False at once."""
        return bool(self._gates) and self._ask(next(iter(self._gates.values())), timeout_s)

    def clear(self) -> list[CopyJob]:
        """Remove and return all jobs."""
        dropped = [job for gate in self._gates.values() for job in gate.jobs]
        self._gates.clear()
        return dropped

    def _ask(self, gate: _Gate, timeout_s: float) -> bool:
        try:
            return gate.ready(timeout_s)
        except Exception:
            log.exception("a gate failed; its %d jobs will not be sent", len(gate.jobs))
            gate.expires_at = self._now()
            return False


CLOSE_TIMEOUT_S = 30.0
NUM_RECEIVER_THREADS = 4
GATE_SLICE_S = 0.004
"""Seconds that a thread waits for a gate before it checks its queue again."""


@dataclasses.dataclass(frozen=True, slots=True)
class _End:
    """The last order of a thread. Jobs that wait for a gate end with `failure`."""

    failure: Failure


@dataclasses.dataclass(frozen=True, slots=True)
class _Reach:
    """Connect before the first copy."""


Orders = queue.SimpleQueue[CopyJob | _Reach | _End]


class _Worker:
    """One thread's orders and progress: the scheduler thread writes `num_given`, the worker writes `num_ended`."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.orders: Orders = queue.SimpleQueue()
        self.num_given = 0
        self.num_ended = 0
        self.connected = False

    def give(self, job: CopyJob) -> None:
        self.num_given += 1
        self.orders.put(job)

    @property
    def num_left(self) -> int:
        return self.num_given - self.num_ended


class _PeerQueues:
    """Runs slow actions on peers: those of one peer in order, those of several peers concurrently."""

    def __init__(self, num_threads: int) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        """Queued actions of each peer that a thread works on, or is about to."""
        self._num_running = 0
        self._closed = False
        self._threads = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="kv-receivers")

    def submit(self, peer: str, action: Callable[[], None]) -> None:
        """Run `action` after all earlier actions of that peer. `action` raises nothing."""
        with self._changed:
            if self._closed:
                return
            if peer in self._waiting:
                self._waiting[peer].append(action)
            else:
                self._waiting[peer] = deque([action])
                self._threads.submit(self._work, peer)

    def close(self, deadline: float) -> None:
        """Start no more actions; wait for running ones until `deadline` (monotonic clock)."""
        with self._changed:
            self._closed = True
            for actions in self._waiting.values():
                actions.clear()
            ended = self._changed.wait_for(lambda: not self._num_running, max(0.0, deadline - time.monotonic()))
            if not ended:
                log.warning("%d receiving engines are still being opened or closed", self._num_running)
        self._threads.shutdown(wait=ended, cancel_futures=True)

    def _work(self, peer: str) -> None:
        while True:
            with self._changed:
                if not self._waiting[peer]:
                    del self._waiting[peer]
                    return
                action = self._waiting[peer].popleft()
                self._num_running += 1
            action()
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()


class CopyWorkers:
    """`CopyEngine` over a real transport, with at most `num_threads` threads for each peer."""

    def __init__(self, transport: Transport, post: Callable[[TransferEvent], None], num_threads: int) -> None:
        self._transport = transport
        self._notifying = cast(NotifyingTransport, transport) if transport.facts.notifies else None
        self._post = post
        self._num_writers = min(transport.facts.writers, num_threads)
        self._workers_of: dict[str, list[_Worker]] = {}
        self._threads: list[threading.Thread] = []
        """Threads that may still run."""
        self._numbers = itertools.count()
        self._closing = threading.Event()
        self._disconnecting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-disconnect")
        self._receivers = _PeerQueues(NUM_RECEIVER_THREADS)
        self._notifications = (
            None if self._notifying is None else Notifications(self._notifying.take_notifications, post)
        )

    @property
    def address(self) -> str:
        """See `Transport.address`: any process may write there, and no `fence` ends it."""
        return self._transport.address()

    @property
    def drain_timeout_s(self) -> float:
        """See `CopyEngine`."""
        return self._transport.drain_timeout_s

    @property
    def fence_drain_timeout_s(self) -> float:
        """See `CopyEngine`."""
        return self._transport.fence_drain_timeout_s

    @property
    def notifies(self) -> bool:
        """See `CopyEngine`."""
        return self._notifying is not None

    def reach(self, rank: int, transport_address: str) -> bool:
        """See `CopyEngine`."""
        workers = self._workers(transport_address)
        if isinstance(workers, Failure):
            self._post(PeerConnected(transport_address, workers))
            return False
        if any(worker.connected for worker in workers):
            return True
        workers[0].orders.put(_Reach())
        return False

    def submit(self, job: CopyJob) -> None:
        """See `CopyEngine`."""
        workers = self._workers(job.transport_address)
        if isinstance(workers, Failure):
            self._post(CopyDone.of(job, workers, settled=True, write_s=0.0))
        else:
            min(workers, key=_num_left).give(job)

    def cancel(self, job: CopyJob) -> None:
        """See `CopyEngine`: the threads look at `job.cancelled` themselves."""

    def forget(self, transport_address: str) -> None:
        """See `CopyEngine`."""
        self._disconnecting.submit(self._transport.disconnect, transport_address)  # ends running writes; may take long
        for worker in self._workers_of.pop(transport_address, ()):
            worker.orders.put(_End(PEER_GONE))

    def expect(self, key: MemoryKey, rank: int, count: int) -> bool:
        """See `CopyEngine`."""
        assert self._notifications is not None, "the transport notifies of nothing"
        return self._notifications.expect(key, count)

    def open_receiver(self, rank: int, peer: str) -> None:
        """See `CopyEngine`."""
        self._receivers.submit(peer, lambda: self._post(self._open_receiver(peer)))

    def fence(self, rank: int, peer: str) -> None:
        """See `CopyEngine`."""
        self._receivers.submit(peer, lambda: self._post(self._fence(peer)))

    def close(self) -> None:
        """End the threads. Running writes are cut off; queued jobs, and those with a closed gate, are not started."""
        self._closing.set()
        for address in self._workers_of:
            self._transport.disconnect(address)
        for worker in itertools.chain.from_iterable(self._workers_of.values()):
            worker.orders.put(_End(CANCELLED))
        self._disconnecting.shutdown(wait=False)
        if self._notifications is not None:
            self._notifications.close()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        self._receivers.close(deadline)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.warning("%s still copies after %g s and is abandoned", thread.name, CLOSE_TIMEOUT_S)

    def _open_receiver(self, peer: str) -> ReceiverOpened:
        try:
            return ReceiverOpened(peer, self._transport.open_receiver(peer), None)
        except TransferError as error:
            log.warning("no receiving engine for %s: %s", peer, error)
            return ReceiverOpened(peer, "", Failure.from_error(error))
        except Exception as error:
            log.exception("no receiving engine for %s", peer)
            return ReceiverOpened(peer, "", _internal(error))

    def _fence(self, peer: str) -> PeerFenced:
        try:
            return PeerFenced(peer, self._transport.fence(peer))
        except Exception:
            log.exception("cannot fence %s", peer)
            return PeerFenced(peer, fenced=False)

    def _workers(self, peer: str) -> Sequence[_Worker] | Failure:
        """Return the threads of a rank of a peer, or why there are none."""
        workers = self._workers_of.setdefault(peer, [])
        try:
            while len(workers) < self._num_writers:
                workers.append(self._start(peer))
        except RuntimeError as error:  # the system has no more threads
            log.error("no thread to copy to %s with: %s", peer, error)
            if not workers:
                return Failure(code="no_threads", message=f"no copy thread could be started: {error}", status=503)
        return workers

    def _start(self, peer: str) -> _Worker:
        worker = _Worker(peer)
        name = f"kv-copy-{next(self._numbers)}"
        thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
        thread.start()
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        return worker

    def _work(self, worker: _Worker) -> None:
        orders = worker.orders
        gated = GatedJobs()
        while True:
            match _next_order(orders, gated):
                case CopyJob(ready=None) as job:
                    self._end(worker, self._run(job, worker))
                case CopyJob(ready=ready) as job:
                    assert ready is not None
                    gated.add(job, ready)
                    if not orders.empty():
                        continue  # take all queued orders before the gates are polled
                case _Reach():
                    self._post(PeerConnected(worker.peer, self._reach(worker)))
                case _End(failure=failure):
                    self._report_unsent(worker, gated.clear(), failure)
                    self._transport.disconnect(worker.peer)  # once more: a connect may have been running
                    return
            for job, unsent in gated.take():
                if unsent is None:
                    self._end(worker, self._run(job, worker))
                else:
                    self._report_unsent(worker, [job], unsent)

    def _connect(self, worker: _Worker) -> None:
        if not worker.connected:
            self._transport.connect(worker.peer)
            worker.connected = True

    def _reach(self, worker: _Worker) -> Failure | None:
        """Connect; return the failure, or None."""
        try:
            self._connect(worker)
        except TransferError as error:
            log.warning("cannot reach %s: %s", worker.peer, error)
            return Failure.from_error(error)
        except Exception as error:
            log.exception("cannot reach %s", worker.peer)
            return _internal(error)
        return None

    def _report_unsent(self, worker: _Worker, jobs: Sequence[CopyJob], failure: Failure) -> None:
        for job in jobs:
            self._end(worker, CopyDone.of(job, failure, settled=True, write_s=0.0))

    def _end(self, worker: _Worker, done: CopyDone) -> None:
        worker.num_ended += 1
        self._post(done)

    def _run(self, job: CopyJob, worker: _Worker) -> CopyDone:
        if job.cancelled or self._closing.is_set():
            return CopyDone.of(job, CANCELLED, settled=True, write_s=0.0)
        copies = [
            Copy(source + copy.source, destination + copy.destination, copy.num_bytes)
            for source, destination, pieces in job.pieces
            for copy in pieces
        ]
        started = time.monotonic()
        try:
            self._connect(worker)
            if self._notifying is not None and job.num_bytes:
                self._notifying.write_and_notify(job.transport_address, copies, encode_note(job.key, job.index))
            else:
                self._transport.write(job.transport_address, copies)
        except TransferError as error:
            worker.connected = False  # reconnecting is a no-op where the connection is up
            log.warning("copy of %d bytes to %s failed: %s", job.num_bytes, job.transport_address, error)
            failure = Failure.from_error(error)
            return CopyDone.of(job, failure, settled=error.settled, write_s=time.monotonic() - started)
        except Exception as error:
            log.exception("copy of %d bytes to %s failed", job.num_bytes, job.transport_address)
            return CopyDone.of(job, _internal(error), settled=False, write_s=time.monotonic() - started)
        return CopyDone.of(job, None, settled=True, write_s=time.monotonic() - started)


def _internal(error: Exception) -> Failure:
    """Return the failure for a bug, or for an unknown exception of an engine."""
    return Failure(code="internal", message=repr(error), retryable=False, status=500)


def _num_left(worker: _Worker) -> int:
    return worker.num_left


def _next_order(orders: Orders, gated: GatedJobs) -> CopyJob | _Reach | _End | None:
    """Return the next order; None after a short wait, or when a gate opened. Blocks without limit only without gated
    jobs.
    """
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
    if left_s > 0:  # a gate that will never open returns at once
        with contextlib.suppress(queue.Empty):
            return orders.get(timeout=left_s)
    return None
