"""The copying half of a follower: runs the leader's copy jobs out of this rank's pages.

`obey` is called by the link thread, `_ended` by copy workers and what waits for notifications.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pdserve.ranks.orders import Cancel, Copying, CopyReport, Expect, Forget, NotesReport, Report, Submit, unpack_pieces
from pdserve.ranks.steps import StepLog
from pdserve.transfer.events import CopyDone, CopyEngine, CopyJob, Notified, TransferEvent


class Copier:
    """Jobs that the leader has submitted, on the engine that `open_engine` makes; it is given where to report to."""

    def __init__(
        self,
        open_engine: Callable[[Callable[[TransferEvent], None]], CopyEngine],
        steps: StepLog,
        report: Callable[[Report], None],
    ) -> None:
        self._steps = steps
        self._report = report
        self._lock = threading.Lock()
        self._jobs: dict[int, CopyJob] = {}
        self._numbers: dict[int, int] = {}
        self._engine = open_engine(self._ended)

    def obey(self, order: Copying) -> None:
        """One order. Never blocks."""
        match order:
            case Submit():
                self._submit(order)
            case Cancel(job=number):
                with self._lock:
                    job = self._jobs.get(number)
                if job is not None:
                    job.cancelled = True
                    self._engine.cancel(job)
            case Forget(transport_address=address):
                self._engine.forget(address)
            case Expect(key=key, num_writes=num_writes):
                if self._engine.expect(key, 0, num_writes):
                    self._report(NotesReport(key, 0))

    def _submit(self, order: Submit) -> None:
        job = CopyJob(
            key=order.key,
            index=order.index,
            peer=order.peer,
            transport_address=order.transport_address,
            pieces=unpack_pieces(order.pieces),
            num_bytes=order.num_bytes,
            ready=self._steps.gate(order.after_step, order.after_layers),
        )
        with self._lock:
            self._jobs[order.job] = job
            self._numbers[id(job)] = order.job
        self._engine.submit(job)

    def _ended(self, event: TransferEvent) -> None:
        if isinstance(event, Notified):
            self._report(NotesReport(event.key, event.num_missing))
            return
        assert isinstance(event, CopyDone), event
        with self._lock:
            number = self._numbers.pop(id(event.job))
            del self._jobs[number]
        self._report(CopyReport(job=number, failure=event.failure, settled=event.settled, write_s=event.write_s))
