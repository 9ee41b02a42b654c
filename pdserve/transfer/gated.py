"""Copy jobs that wait for their layers to be written. One `GatedJobs` per copy worker; only its thread calls it."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator

from pdserve.protocol.failure import Failure
from pdserve.transfer.events import CopyJob, LayersReady

log = logging.getLogger(__name__)

GATE_TIMEOUT_S = 300.0
"""A gate still closed after this long belongs to a step that will never be computed."""

CANCELLED = Failure(code="cancelled", message="the transfer was cancelled before this piece was sent")
PEER_GONE = Failure(code="peer_gone", message="the peer is gone, and this piece was not sent")
NEVER_WRITTEN = Failure(code="layers_not_written", message="the layers to be sent were never computed", status=500)


@dataclasses.dataclass(slots=True)
class _Gate:
    """Jobs behind one gate. All requests of a step share its gates, so a gate is asked once for all of them."""

    ready: LayersReady
    expires_at: float
    jobs: list[CopyJob] = dataclasses.field(default_factory=list)


class GatedJobs:
    """Jobs whose gates were closed when last looked at, the oldest gate first."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._gates: dict[int, _Gate] = {}

    def __bool__(self) -> bool:
        return bool(self._gates)

    def add(self, job: CopyJob, ready: LayersReady) -> None:
        """Keep `job` until `ready` says True, the job is cancelled, or `GATE_TIMEOUT_S` have passed."""
        gate = self._gates.get(id(ready))
        if gate is None:
            gate = self._gates[id(ready)] = _Gate(ready, self._now() + GATE_TIMEOUT_S)
        gate.jobs.append(job)

    def take(self) -> Iterator[tuple[CopyJob, Failure | None]]:
        """Jobs that need wait no longer: to be sent (None), or to be reported with that failure. Does not block."""
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
        """Wait for the oldest gate; True when it is open. A gate that never opens may say False at once."""
        return bool(self._gates) and self._ask(next(iter(self._gates.values())), timeout_s)

    def clear(self) -> list[CopyJob]:
        """Let go of all jobs, and return them."""
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
