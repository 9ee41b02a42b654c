"""Copies between tiers on a replica with several ranks: each rank copies its own part of the pages, at its own pace.

    follower   own copy has ended ── PagesCopied ──> rank 0
    rank 0     the copy has ended on all ranks ── Answer: numbers ──> all ranks, in the same turn: the handle is done

While copies are pending, each turn has one answer of rank 0. No turn waits for a rank.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import msgspec

from pdserve.executor.interface import CopyHandle
from pdserve.ranks.input_log import InputLog
from pdserve.ranks.messages import PagesCopied


class CopyReports:
    """The ends of copies on all ranks, at rank 0. Any thread reports.

    `wake` is called when a copy has ended on all ranks.
    """

    def __init__(self, num_ranks: int, wake: Callable[[], None]) -> None:
        self._num_ranks, self._wake = num_ranks, wake
        self._lock = threading.Lock()
        self._counts: Counter[int] = Counter()

    def add(self, report: PagesCopied) -> None:
        """Take the report of one rank."""
        with self._lock:
            self._counts[report.number] += 1
            complete = self._counts[report.number] == self._num_ranks
        if complete:
            self._wake()

    def take(self) -> list[int]:
        """Return the numbers of the copies that have ended on all ranks, each once."""
        with self._lock:
            complete = sorted(number for number, count in self._counts.items() if count == self._num_ranks)
            for number in complete:
                del self._counts[number]
        return complete


class AgreedCopy:
    """Implements `CopyHandle` over `own`, this rank's part: done in the turn in which all ranks agree on the end."""

    def __init__(self, own: CopyHandle) -> None:
        self._own = own
        self.is_agreed = False

    @property
    def is_done(self) -> bool:
        """See `CopyHandle`."""
        return self.is_agreed and self._own.is_done

    def on_end(self, then: Callable[[], None]) -> None:
        """See `CopyHandle`: of this rank's part."""
        self._own.on_end(then)


class RankCopyEnds:
    """The copies of one rank that the ranks have not agreed on. Scheduler thread.

    `report` sends the end of an own copy to rank 0, on any thread. `reports`: at rank 0; None on followers.
    """

    def __init__(
        self, log: InputLog, report: Callable[[PagesCopied], None], reports: CopyReports | None = None
    ) -> None:
        self._log, self._report, self._reports = log, report, reports
        self._pending: dict[int, AgreedCopy] = {}
        self._number = 0

    def watch(self, own: CopyHandle) -> AgreedCopy:
        """Return the handle of a copy that all ranks make; all ranks call this in the same turn. `own`: this rank's."""
        number, self._number = self._number, self._number + 1
        copy = self._pending[number] = AgreedCopy(own)
        own.on_end(lambda: self._report(PagesCopied(number)))
        return copy

    def poll(self) -> None:
        """Take the ends that all ranks have reported; called once a turn on all ranks."""
        if not self._pending:
            return
        for number in msgspec.msgpack.decode(self._log.answer(self._find), type=list[int]):
            self._pending.pop(number).is_agreed = True

    def _find(self) -> bytes:
        assert self._reports is not None, "rank 0 answers"
        return msgspec.msgpack.encode(self._reports.take())
