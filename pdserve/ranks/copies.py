"""The leader's copy engine: the rank whose pages a job copies runs it. Made by the leader's composition root."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from pdserve.ranks.followers import Followers
from pdserve.ranks.orders import Cancel, CopyReport, Expect, Forget, NotesReport, RankReady, Submit, pack_pieces
from pdserve.transfer.events import CopyDone, CopyEngine, CopyJob, LayerGate, Notified, TransferEvent
from pdserve.transfer.wire import Key


class RankCopies:
    """Implements `CopyEngine` over `own` workers and those of `followers`, which are `ready`.

    `last_resolved` is the newest step that every rank had computed: a follower's job without a gate of its own waits
    for it there too. Scheduler thread, but for reports, which the link thread hands to `post`.
    """

    def __init__(
        self,
        own: CopyEngine,
        followers: Followers,
        ready: Sequence[RankReady],
        last_resolved: Callable[[], int | None],
        post: Callable[[TransferEvent], None],
    ) -> None:
        self._own = own
        self._followers = followers
        self._last_resolved = last_resolved
        self._post = post
        self._settle_s = max(own.settle_s, *(each.settle_s for each in ready))
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._jobs: dict[int, CopyJob] = {}
        """Jobs that followers have, by the number that they know them by."""
        self._numbers: dict[int, int] = {}
        """These numbers by the identity of the job."""
        followers.on_copied(self._copied)

    @property
    def settle_s(self) -> float:
        """See `CopyEngine`: the longest of all ranks'."""
        return self._settle_s

    @property
    def address(self) -> str:
        """See `CopyEngine`: the leader's."""
        return self._own.address

    @property
    def notifies(self) -> bool:
        """See `CopyEngine`: all ranks have the same transport."""
        return self._own.notifies

    def submit(self, job: CopyJob) -> None:
        """See `CopyEngine`."""
        if job.rank == 0:
            self._own.submit(job)
            return
        gate = job.ready
        assert gate is None or isinstance(gate, LayerGate), (
            "only a gate that names its step can be waited for elsewhere"
        )
        number = next(self._ids)
        with self._lock:
            self._jobs[number] = job
            self._numbers[id(job)] = number
        self._followers.order_one(
            job.rank,
            Submit(
                job=number,
                key=job.key,
                index=job.index,
                peer=job.peer,
                transport_address=job.transport_address,
                pieces=pack_pieces(job.pieces),
                num_bytes=job.num_bytes,
                after_step=self._last_resolved() if gate is None else gate.step,
                after_layers=None if gate is None else gate.num_layers,
            ),
        )

    def cancel(self, job: CopyJob) -> None:
        """See `CopyEngine`."""
        if job.rank == 0:
            self._own.cancel(job)
            return
        with self._lock:
            number = self._numbers.get(id(job))
        if number is not None:
            self._followers.order_one(job.rank, Cancel(number))

    def forget(self, transport_address: str) -> None:
        """See `CopyEngine`: every rank forgets it."""
        self._own.forget(transport_address)
        self._followers.order(Forget(transport_address))

    def expect(self, key: Key, rank: int, count: int) -> bool:
        """See `CopyEngine`: what a follower has been notified of it will say."""
        if rank == 0:
            return self._own.expect(key, 0, count)
        self._followers.order_one(rank, Expect(key, count))
        return False

    def _copied(self, rank: int, report: CopyReport | NotesReport) -> None:
        if isinstance(report, NotesReport):
            self._post(Notified(report.key, report.num_missing, rank))
            return
        with self._lock:
            job = self._jobs.pop(report.job)
            del self._numbers[id(job)]
        self._post(CopyDone(job, report.failure, report.settled, report.write_s))
