"""Copy workers: threads that run copy jobs on a transport and post the results to the mailbox.

Each rank of a peer has its own threads, as many as the transport wants, from its first job until the peer is gone. So a
hanging peer delays no other peer, and each thread alone tracks whether it is connected.

A job is queued on its thread once its layers are written (`memory/layer_events`), so it delays no other job until then.
A thread only waits for its queue.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

from pdserve.errors import TransferError
from pdserve.protocol.failure import Failure
from pdserve.transfer.events import (
    CopyDone,
    CopyJob,
    PeerConnected,
    PeerFenced,
    ReceiverOpened,
    TransferEvent,
)
from pdserve.transfer.notifications import Notifications, encode_note
from pdserve.transfer.transport import Copy, NotifyingTransport, Transport
from pdserve.transfer.wire import MemoryKey

log = logging.getLogger(__name__)

CANCELLED = Failure(code="cancelled", message="the transfer was cancelled before this piece was sent")
PEER_GONE = Failure(code="peer_gone", message="the peer is gone, and this piece was not sent")
NEVER_WRITTEN = Failure(code="layers_not_written", message="the layers to be sent were never computed", status=500)
CLOSE_TIMEOUT_S = 30.0
NUM_RECEIVER_THREADS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class _Connect:
    """Connect before the first copy."""


Orders = queue.SimpleQueue[tuple[CopyJob, Failure | None] | _Connect | None]
"""A job to be run, or reported with that failure; or a connection to be made. None ends the thread."""


class _Worker:
    """One thread's orders and progress: the scheduler thread writes `num_submitted`, the worker writes `num_ended`."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.orders: Orders = queue.SimpleQueue()
        self.num_submitted = 0
        self.num_ended = 0
        self.connected = False
        self._lock = threading.Lock()
        self._waiting: dict[int, CopyJob] = {}
        """Jobs whose layers are not written, by `id`."""

    def submit(self, job: CopyJob) -> None:
        """Queue `job` once its layers are written; it is queued with a failure if they never are. Scheduler thread."""
        self.num_submitted += 1
        with self._lock:
            self._waiting[id(job)] = job
        job.layer_events.when_written(job.num_layers, partial(self._on_written, job))

    def release(self, job: CopyJob, failure: Failure | None) -> None:
        """Queue a job that waits for its layers; does nothing for other jobs. Any thread."""
        with self._lock:
            if self._waiting.pop(id(job), None) is not None:
                self.orders.put((job, failure))

    def end(self, failure: Failure) -> None:
        """End the thread after the queued orders, and jobs that wait for their layers with `failure`. Call once."""
        with self._lock:
            for job in self._waiting.values():
                self.orders.put((job, failure))
            self._waiting.clear()
            self.orders.put(None)

    @property
    def num_left(self) -> int:
        """Jobs that have not ended."""
        return self.num_submitted - self.num_ended

    def _on_written(self, job: CopyJob, written: bool) -> None:
        self.release(job, None if written else NEVER_WRITTEN)


LogSubmission = Callable[[CopyJob, Sequence[Copy], float, Failure | None], None]
"""Gets a job, its copies, the seconds in the transport, and the failure or None."""


class _PeerQueues:
    """Runs slow actions on peers: those of one peer in order, those of several peers concurrently.

    Brief actions have a thread of their own, so slow ones of other peers do not delay them.
    """

    def __init__(self, num_threads: int) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        """Queued actions of each peer that a thread works on, or is about to."""
        self._num_running = 0
        self._closed = False
        self._threads = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="kv-receivers")
        self._brief = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-sources")

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

    def submit_brief(self, peer: str, action: Callable[[], None]) -> None:
        """Run `action` after all earlier slow actions of that peer; a later one may overtake it. It raises nothing."""
        with self._changed:
            if self._closed:
                return
            if peer in self._waiting:
                self._waiting[peer].append(action)
            else:
                self._brief.submit(action)

    def close(self, deadline: float) -> None:
        """Start no more actions; wait for running ones until `deadline` (monotonic clock)."""
        with self._changed:
            self._closed = True
            for actions in self._waiting.values():
                actions.clear()
            ended = self._changed.wait_for(lambda: not self._num_running, max(0.0, deadline - time.monotonic()))
            if not ended:
                log.warning("%d receiving engines are still being opened or closed", self._num_running)
        for threads in (self._threads, self._brief):
            threads.shutdown(wait=ended, cancel_futures=True)

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

    def __init__(
        self,
        transport: Transport,
        post: Callable[[TransferEvent], None],
        num_threads: int,
        log_submission: LogSubmission | None = None,
    ) -> None:
        """`log_submission` is called by the copy threads with each batch that has ended; None: no log."""
        self._transport = transport
        self._log_submission = log_submission
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

    @property
    def num_threads(self) -> int:
        """Copy threads that run."""
        return sum(thread.is_alive() for thread in self._threads)

    def connect(self, rank: int, transport_address: str) -> bool:
        """See `CopyEngine`."""
        workers = self._workers(transport_address)
        if isinstance(workers, Failure):
            self._post(PeerConnected(transport_address, workers))
            return False
        if any(worker.connected for worker in workers):
            return True
        workers[0].orders.put(_Connect())
        return False

    def submit(self, job: CopyJob) -> None:
        """See `CopyEngine`."""
        workers = self._workers(job.transport_address)
        if isinstance(workers, Failure):
            self._post(_unsent(job, workers))
        else:
            min(workers, key=_num_left).submit(job)

    def cancel(self, job: CopyJob) -> None:
        """See `CopyEngine`. A thread looks at `job.cancelled` of a queued job itself."""
        for worker in self._workers_of.get(job.transport_address, ()):
            worker.release(job, CANCELLED)

    def forget(self, transport_address: str) -> None:
        """See `CopyEngine`."""
        self._disconnecting.submit(self._transport.disconnect, transport_address)  # ends running writes; may take long
        for worker in self._workers_of.pop(transport_address, ()):
            worker.end(PEER_GONE)

    def expect(self, key: MemoryKey, rank: int, count: int) -> bool:
        """See `CopyEngine`."""
        assert self._notifications is not None, "the transport notifies of nothing"
        return self._notifications.expect(key, count)

    def open_receiver(self, rank: int, peer: str) -> None:
        """See `CopyEngine`."""
        self._receivers.submit(peer, lambda: self._post(self._open_receiver(peer)))

    def allow_sources(self, rank: int, peer: str, addresses: Sequence[str]) -> None:
        """See `CopyEngine`. Senders connect soon after, so an engine that is open does not wait for other peers'."""
        self._receivers.submit_brief(peer, lambda: self._allow_sources(peer, addresses))

    def fence(self, rank: int, peer: str) -> None:
        """See `CopyEngine`."""
        self._receivers.submit(peer, lambda: self._post(self._fence(peer)))

    def close(self) -> None:
        """End the threads. Running writes are cut off; queued and waiting jobs are not started."""
        self._closing.set()
        for address in self._workers_of:
            self._transport.disconnect(address)
        for worker in itertools.chain.from_iterable(self._workers_of.values()):
            worker.end(CANCELLED)
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

    def _allow_sources(self, peer: str, addresses: Sequence[str]) -> None:
        try:
            self._transport.allow_sources(peer, addresses)
        except Exception:
            log.exception("connections of %s from %s may be refused", peer, ", ".join(addresses))

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
            log.error("cannot start a copy thread for %s: %s", peer, error)
            if not workers:
                return Failure(code="no_threads", message=f"cannot start a copy thread: {error}", status=503)
        return workers

    def _start(self, peer: str) -> _Worker:
        worker = _Worker(peer)
        name = f"kv-copy-{next(self._numbers)}"
        thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
        thread.start()
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        return worker

    def _work(self, worker: _Worker) -> None:
        while (order := worker.orders.get()) is not None:
            match order:
                case _Connect():
                    self._post(PeerConnected(worker.peer, self._try_connect(worker)))
                case job, failure:
                    done = self._run(job, worker) if failure is None else _unsent(job, failure)
                    worker.num_ended += 1
                    self._post(done)
        self._transport.disconnect(worker.peer)  # once more: a connect may have been running

    def _connect(self, worker: _Worker) -> None:
        if not worker.connected:
            self._transport.connect(worker.peer)
            worker.connected = True

    def _try_connect(self, worker: _Worker) -> Failure | None:
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

    def _run(self, job: CopyJob, worker: _Worker) -> CopyDone:
        if job.cancelled or self._closing.is_set():
            return _unsent(job, CANCELLED)
        copies = [
            Copy(source + copy.source, destination + copy.destination, copy.num_bytes)
            for source, destination, pieces in job.pieces
            for copy in pieces
        ]
        failure, settled = None, True
        started = time.monotonic()
        try:
            self._connect(worker)
            if self._notifying is not None and job.num_bytes:
                self._notifying.write_and_notify(job.transport_address, copies, encode_note(job.key, job.index))
            else:
                self._transport.write(job.transport_address, copies)
        except TransferError as error:
            worker.connected = False  # reconnecting is a no-op where the connection is up
            text = "copy of %d bytes of room %d to %s failed: %s"
            log.warning(text, job.num_bytes, job.key.room, job.transport_address, error)
            failure, settled = Failure.from_error(error), error.settled
        except Exception as error:
            text = "copy of %d bytes of room %d to %s failed"
            log.exception(text, job.num_bytes, job.key.room, job.transport_address)
            failure, settled = _internal(error), False
        write_s = time.monotonic() - started
        if self._log_submission is not None:
            self._log_submission(job, copies, write_s, failure)
        return CopyDone.of(job, failure, settled=settled, write_s=write_s)


def _internal(error: Exception) -> Failure:
    """Return the failure for a bug, or for an unknown exception of an engine."""
    return Failure(code="internal", message=repr(error), retryable=False, status=500)


def _num_left(worker: _Worker) -> int:
    return worker.num_left


def _unsent(job: CopyJob, failure: Failure) -> CopyDone:
    """Return the event for a job that was not started."""
    return CopyDone.of(job, failure, settled=True, write_s=0.0)
