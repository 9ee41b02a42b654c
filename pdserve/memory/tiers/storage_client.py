"""A server's access to a store: two threads, so that no call of the store is made by the scheduler.

    scheduler thread                     kv-tier-get                          kv-tier-put
    start_lookup ──> Lookup ───────────> exists
    start_get ─────> Transfer ─────────> get_into staging, check, copy
    start_put ─────> Transfer ──────────────────────────────────────────────> copy, seal, put_from staging

The scheduler polls jobs, and `wake` is called when one has ended. The store reads and writes only staging buffers,
which belong to the thread. A call that blocks therefore holds no memory that anything else uses, and its thread begins
no other call before it returns. After `cancel` has returned, no byte of a job's buffers is read or written.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from pdserve.memory.tiers.breaker import StorageBreaker
from pdserve.memory.tiers.storage import PUT_THREAD, Miss, ObjectId, Storage, StorageError, check, object_bytes, seal
from pdserve.memory.tiers.storage_probe import StorageProbe

log = logging.getLogger(__name__)

STAGING_BYTES = 8 << 20
"""Objects of one call have at most this size together, or are one."""
MOST_KEYS = 128
"""Most objects of one call."""
CALL_LIMIT_S = 2.0
"""Seconds that one call may take before the breaker opens."""
MOST_QUEUED_PUTS = 256
"""Jobs that wait to be stored; further ones are dropped."""
_IDLE_S = 0.25
_CLOSE_S = 1.0
GET, PUT = "get", "put"
T = TypeVar("T")


CountLeading = Callable[[Sequence[ObjectId]], int | None]
"""Returns how many leading objects the store has; None when it failed, or when the answer is of no interest."""
FindEnd = Callable[[int, CountLeading], int]
"""Returns where a prompt can be continued, given its leading token pages in the store; see `PrefixEnds.last`."""


class Lookup:
    """A look-up of leading pages in a store. `num_found` has their number once `is_done` is true.

    With `find_end` it has the result of `find_end` instead.
    """

    def __init__(self, ids: Sequence[ObjectId], find_end: FindEnd | None = None) -> None:
        self.ids = tuple(ids)
        self.find_end = find_end
        self.num_found = 0
        self.is_done = False
        self.is_cancelled = False
        self.started_s = 0.0
        """When the client took it, by the client's clock."""

    def cancel(self) -> None:
        """Give up; the answer is no longer of interest."""
        self.is_cancelled = True


class Transfer:
    """Pages on their way from or to a store. Poll `is_done`; `num_done` leading pages have been moved so far.

    A page that the store did not take was not moved.
    """

    def __init__(self, ids: Sequence[ObjectId], buffers: Sequence[memoryview]) -> None:
        assert len(ids) == len(buffers)
        self.ids, self.buffers = tuple(ids), tuple(buffers)
        self.num_done = 0
        self.is_done = False
        self.is_cancelled = False
        self.started_s = 0.0
        """When the client took it, by the client's clock."""
        self._lock = threading.Lock()

    def cancel(self) -> int:
        """Give up; return `num_done`, which is final. No buffer is used once this has returned.

        Waits for the copy of one page at most.
        """
        with self._lock:
            self.is_cancelled = True
            return self.num_done

    def copy(self, target: memoryview, source: memoryview, *, counts: bool) -> bool:
        """Copy one page unless the job is cancelled; with `counts` one more page is done. The client's threads only."""
        with self._lock:
            if not self.is_cancelled:
                target[:] = source
                self.num_done += counts
            return not self.is_cancelled


Job = Lookup | Transfer


@dataclasses.dataclass(slots=True)
class StorageCounts:
    """What a client has done so far. Written by its threads, one field by one thread."""

    pages_read: int = 0
    bytes_read: int = 0
    pages_written: int = 0
    bytes_written: int = 0
    pages_refused: int = 0
    """Pages that the store did not take, or that were given up because of its failure."""
    misses: Counter[Miss] = dataclasses.field(default_factory=Counter)


class StorageClient:
    """Jobs for one store. `wake` is called on a client's thread when a job has ended.

    The client closes `storage`. `call_limit_s`, `starts_open`, `now`: see `StorageBreaker`.
    """

    def __init__(
        self,
        storage: Storage,
        wake: Callable[[], None] = lambda: None,
        *,
        call_limit_s: float = CALL_LIMIT_S,
        starts_open: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.storage = storage
        self.breaker = StorageBreaker(call_limit_s, starts_open=starts_open, now=now)
        self._now, self._probe = now, StorageProbe(call_limit_s)
        self._late_s: float | None = None
        """Seconds after which a request has given up last; None since a probe has closed the breaker."""
        self.counts = StorageCounts()
        self._wake = wake
        self._gets: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._puts: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._to_clear = threading.Event()
        self._threads = [
            threading.Thread(target=self._run_gets, name="kv-tier-get", daemon=True),
            threading.Thread(target=self._run_puts, name=PUT_THREAD, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------------ scheduler thread

    def start_lookup(self, ids: Sequence[ObjectId], find_end: FindEnd | None = None) -> Lookup:
        """Ask how many leading pages the store has; at once none while the breaker is open.

        `find_end` is called with that number on the client's thread, and may ask for other objects.
        """
        job = Lookup(ids, find_end)
        if self.breaker.allows and (ids or find_end is not None):
            job.started_s = self._now()
            self._gets.put(job)
        else:
            job.is_done = True
        return job

    def start_get(self, ids: Sequence[ObjectId], buffers: Sequence[memoryview]) -> Transfer:
        """Read pages into `buffers`, up to the first one that is a miss; at once none while the breaker is open."""
        job = Transfer(ids, buffers)
        if self.breaker.allows and ids:
            job.started_s = self._now()
            self._gets.put(job)
        else:
            job.is_done = True
        return job

    def start_put(self, ids: Sequence[ObjectId], buffers: Sequence[memoryview]) -> Transfer:
        """Store pages; nothing while the breaker is open, or too many jobs wait. `num_done` says how many were sent."""
        job = Transfer(ids, buffers)
        if self.breaker.allows and self._puts.qsize() < MOST_QUEUED_PUTS:
            self._puts.put(job)
        else:
            self.counts.pages_refused += len(ids)
            job.is_done = True
        return job

    def give_up(self, job: Job, *, late: bool) -> None:
        """Cancel a job. At its deadline (`late`) the breaker opens when the job has less than half of its pages, or no
        answer.
        """
        late = late and not job.is_done
        job.cancel()
        if late and (isinstance(job, Lookup) or 2 * job.num_done < len(job.ids)):
            self._late_s = self._now() - job.started_s
            self.breaker.late()

    def clear(self) -> None:
        """Remove all objects of the store, in the background."""
        self._to_clear.set()

    def facts(self) -> dict[str, float | str]:
        """Return state and counts, for `/get_server_info`. Any thread."""
        counts = self.counts
        return {
            "backend": self.storage.name,
            "breaker": self.breaker.state.value,
            "breaker_opened": float(self.breaker.num_opened),
            "last_error": self.breaker.last_error,
            "pages_read": float(counts.pages_read),
            "bytes_read": float(counts.bytes_read),
            "pages_written": float(counts.pages_written),
            "bytes_written": float(counts.bytes_written),
            "pages_refused": float(counts.pages_refused),
            **{f"misses_{miss.value}": float(counts.misses[miss]) for miss in Miss},
        }

    def close(self) -> None:
        """End the threads and close the store. A thread whose call blocks is left behind. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._gets.put(None)
        self._puts.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)
        self.storage.close()

    # ------------------------------------------------------------------ kv-tier-get

    def _run_gets(self) -> None:
        staging = _Staging()
        while not self._closed.is_set():
            if self.breaker.begin_probe():
                self._ask_again(staging)
            try:
                job = self._gets.get(timeout=_IDLE_S)
            except queue.Empty:
                continue
            if job is None:
                return
            if not job.is_cancelled and self.breaker.allows:
                self._look_up(job) if isinstance(job, Lookup) else self._get(job, staging)
            self._end(job)

    def _ask_again(self, staging: _Staging) -> None:
        """Probe the store."""
        self.breaker.begin(GET)
        try:
            error = self._probe.run(self.storage, self._num_stored, staging.objects, self._now, self._late_s)
        except Exception as raised:
            error = self._told(raised)
        self.breaker.end_probe(GET, error)
        if self.breaker.allows:
            self._late_s = None

    def _look_up(self, job: Lookup) -> None:
        self._probe.note(job.ids[:MOST_KEYS])

        def count(ids: Sequence[ObjectId]) -> int | None:
            keys = [identity.key for identity in ids]
            if job.is_cancelled or not self.breaker.allows:
                return None
            return self._call(GET, lambda: self._num_stored(keys)) if keys else 0

        num_leading = count(job.ids)
        if num_leading is not None:
            job.num_found = num_leading if job.find_end is None else job.find_end(num_leading, count)

    def _get(self, job: Transfer, staging: _Staging) -> None:
        """Read the pages of a job up to the first miss, whose object is discarded: else no put would replace it."""
        found = self._get_batches(job, staging)
        if found is not None and not job.is_cancelled:
            self.breaker.read(found=found)

    def _get_batches(self, job: Transfer, staging: _Staging) -> bool | None:
        """Return whether the job has got a page; None when a call has failed, or the job was cancelled."""
        for first, end in _batches(job.buffers):
            ids, buffers = job.ids[first:end], job.buffers[first:end]
            if not first:
                self._probe.note(ids, [len(buffer) for buffer in buffers], len(job.ids))
            objects = staging.objects([len(buffer) for buffer in buffers])
            keys = [identity.key for identity in ids]
            read = self._call(GET, functools.partial(_outcomes, self.storage.get_into, keys, objects))
            if read is None:
                return None
            for identity, buffer, stored, was_read in zip(ids, buffers, objects, read, strict=True):
                miss = check(stored, identity) if was_read else Miss.ABSENT
                if miss is not None:
                    self.counts.misses[miss] += 1
                    self._call(GET, functools.partial(self.storage.discard, [identity.key]))
                    if miss is not Miss.ABSENT:
                        log.warning("an object of the store %s is not used: %s", self.storage.name, miss)
                    return job.num_done > 0
                if not job.copy(buffer, stored[-len(buffer) :], counts=True):
                    return None
                self.counts.pages_read += 1
                self.counts.bytes_read += len(buffer)
        return True

    # ------------------------------------------------------------------ kv-tier-put

    def _run_puts(self) -> None:
        staging = _Staging()
        while not self._closed.is_set():
            if self._to_clear.is_set():
                self._to_clear.clear()
                self._call(PUT, self.storage.clear)
            try:
                job = self._puts.get(timeout=_IDLE_S)
            except queue.Empty:
                continue
            if job is None:
                return
            if not job.is_cancelled:
                self._put(job, staging)
            self._end(job)

    def _put(self, job: Transfer, staging: _Staging) -> None:
        """Store the pages of a job but for the leading ones that the store has, such as a prompt's."""
        has = self._call(PUT, functools.partial(self._num_stored, [identity.key for identity in job.ids]))
        if has is None:
            self.counts.pages_refused += len(job.ids)
            return
        job.num_done = has
        is_refused = False
        for first, end in _batches(job.buffers):
            first = max(first, has)
            if first >= end:
                continue
            ids, buffers = job.ids[first:end], job.buffers[first:end]
            objects = staging.objects([len(buffer) for buffer in buffers])
            if not self.breaker.allows:
                self.counts.pages_refused += len(job.ids) - first
                return
            for identity, buffer, target in zip(ids, buffers, objects, strict=True):
                page = target[-len(buffer) :]
                if not job.copy(page, buffer, counts=False):
                    return
                seal(target, identity, page)
            keys = [identity.key for identity in ids]
            taken = self._call(PUT, functools.partial(_outcomes, self.storage.put_from, keys, objects))
            if taken is None:
                self.counts.pages_refused += len(job.ids) - first
                return
            if not is_refused:
                job.num_done += next((index for index, ok in enumerate(taken) if not ok), len(taken))
            is_refused = is_refused or not all(taken)
            self.counts.pages_written += sum(taken)
            self.counts.bytes_written += sum(len(buffer) for buffer, ok in zip(buffers, taken, strict=True) if ok)
            self.counts.pages_refused += len(taken) - sum(taken)

    # ------------------------------------------------------------------ both threads

    def _num_stored(self, keys: Sequence[str]) -> int:
        """Return how many leading keys the store says to have. A third party's store may answer anything."""
        found = self.storage.exists(keys)
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= len(keys):
            raise StorageError(f"exists({len(keys)} keys) answered {found!r}")
        return found

    def _call(self, lane: str, call: Callable[[], T]) -> T | None:
        """Call the store; None when it failed. A third party's store may raise anything."""
        self.breaker.begin(lane)
        try:
            result = call()
        except Exception as error:
            self.breaker.fail(lane, self._told(error))
            return None
        self.breaker.succeed(lane)
        return result

    def _told(self, error: Exception) -> str:
        """Log an error of the store; return its text."""
        if not self._closed.is_set():
            log.warning("the KV store %s failed: %s", self.storage.name, error, exc_info=not _is_told(error))
        return str(error) or type(error).__name__

    def _end(self, job: Job) -> None:
        job.is_done = True
        self._wake()


Move = Callable[[Sequence[str], Sequence[memoryview]], list[bool]]


def _outcomes(move: Move, keys: Sequence[str], objects: Sequence[memoryview]) -> list[bool]:
    """Call `get_into` or `put_from` of a store, which may be a third party's, and check what it returns."""
    moved = [bool(one) for one in move(keys, objects)]
    if len(moved) != len(keys):
        raise StorageError(f"{len(moved)} results for {len(keys)} objects")
    return moved


def _is_told(error: Exception) -> bool:
    return isinstance(error, StorageError)


class _Staging:
    """Memory of one thread that the store reads and writes. It grows to the largest page."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def objects(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return a buffer for the object of each payload; the last call's buffers are void."""
        total = sum(map(object_bytes, sizes))
        if len(self._memory) < total:
            self._memory = bytearray(max(total, STAGING_BYTES))
        whole, at, objects = memoryview(self._memory), 0, []
        for size in sizes:
            objects.append(whole[at : at + object_bytes(size)])
            at += object_bytes(size)
        return objects


def _batches(buffers: Sequence[memoryview]) -> list[tuple[int, int]]:
    """Return `(first, end)` of the pages of each call."""
    batches, first, size = [], 0, 0
    for index, buffer in enumerate(buffers):
        size += object_bytes(len(buffer))
        if index > first and (size > STAGING_BYTES or index - first >= MOST_KEYS):
            batches.append((first, index))
            first, size = index, object_bytes(len(buffer))
    if first < len(buffers):
        batches.append((first, len(buffers)))
    return batches
