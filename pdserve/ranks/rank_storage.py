"""Storage jobs of a replica with several ranks: each rank moves its own part of the pages, and the least of all counts.

    follower   own job has ended ── StorageEnded ──> rank 0
    rank 0     the job has ended on all ranks ── Answer: numbers and least pages ──> all ranks, in the same turn

While jobs are pending, each turn has one answer of rank 0. No turn waits for a rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec

from pdserve.memory.tiers.prefix_ends import PageKey, PrefixEnds
from pdserve.memory.tiers.storage_port import JobEnd, StoragePort
from pdserve.ranks.input_log import InputLog
from pdserve.ranks.messages import StorageEnded

_Ends = list[tuple[int, int]]


class StorageReports:
    """The ends of jobs on all ranks, at rank 0. Any thread reports.

    `wake` is called when a job has ended on all ranks.
    """

    def __init__(self, num_ranks: int, wake: Callable[[], None]) -> None:
        self._num_ranks, self._wake = num_ranks, wake
        self._lock = threading.Lock()
        self._reports: dict[int, list[int]] = {}

    def add(self, report: StorageEnded) -> None:
        """Take the report of one rank."""
        with self._lock:
            found = self._reports.setdefault(report.number, [])
            found.append(report.num_pages)
            complete = len(found) == self._num_ranks
        if complete:
            self._wake()

    def take(self) -> _Ends:
        """Return number and least pages of the jobs that have ended on all ranks, each once."""
        with self._lock:
            complete = [number for number, found in self._reports.items() if len(found) == self._num_ranks]
            return [(number, min(self._reports.pop(number))) for number in sorted(complete)]


class RankStoragePort:
    """Implements `StoragePort` over `own`, that of this rank. `report` sends the end of an own job to rank 0.

    `reports`: at rank 0; None on followers.
    """

    def __init__(
        self,
        own: StoragePort,
        log: InputLog,
        report: Callable[[StorageEnded], None],
        reports: StorageReports | None = None,
    ) -> None:
        self._own, self._log, self._report, self._reports = own, log, report, reports
        self._pending: set[int] = set()

    def look_up(self, root: bytes, keys: Sequence[PageKey], ends: PrefixEnds | None = None) -> int:
        """See `StoragePort.look_up`."""
        return self._add(self._own.look_up(root, keys, ends))

    def get(self, root: bytes, keys: Sequence[PageKey], slots: Sequence[int]) -> int:
        """See `StoragePort.get`."""
        return self._add(self._own.get(root, keys, slots))

    def put(self, root: bytes, keys: Sequence[PageKey], slots: Sequence[int]) -> int:
        """See `StoragePort.put`."""
        return self._add(self._own.put(root, keys, slots))

    def give_up(self, number: int, *, late: bool) -> None:
        """See `StoragePort.give_up`."""
        self._own.give_up(number, late=late)

    def poll(self) -> Sequence[JobEnd]:
        """See `StoragePort.poll`."""
        if not self._pending:
            return []
        for end in self._own.poll():
            self._report(StorageEnded(end.number, end.num_pages))
        ends = msgspec.msgpack.decode(self._log.answer(self._find), type=_Ends)
        self._pending.difference_update(number for number, _ in ends)
        return [JobEnd(*end) for end in ends]

    @property
    def num_pending(self) -> int:
        """See `StoragePort.num_pending`."""
        return len(self._pending)

    def clear(self) -> None:
        """See `StoragePort.clear`."""
        self._own.clear()

    def facts(self) -> Mapping[str, float | str]:
        """See `StoragePort.facts`."""
        return self._own.facts()

    def _add(self, number: int) -> int:
        self._pending.add(number)
        return number

    def _find(self) -> bytes:
        assert self._reports is not None, "rank 0 answers"
        return msgspec.msgpack.encode(self._reports.take())
