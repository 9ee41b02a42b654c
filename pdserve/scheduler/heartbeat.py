"""The progress of the scheduler loop, for the ingress thread, which reports it to the API process."""

from __future__ import annotations

from pdserve.base.clock import Clock
from pdserve.protocol.messages import SchedulerBeat


class Heartbeat:
    """Two plain fields, written by the scheduler thread only. Any thread may read them, at most one turn late."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_at: float | None = None
        self._num_turns = 0

    def begin(self) -> None:
        """Record that a turn of the loop begins."""
        self._began_at = self._clock.now()

    def end(self, *, computed: bool) -> None:
        """Record that the turn has ended; the loop may sleep now."""
        self._began_at = None
        self._num_turns += computed

    def beat(self, dp_rank: int) -> SchedulerBeat:
        """Return the message for the API process. `turn_s` is None between turns. Any thread."""
        began_at = self._began_at
        turn_s = None if began_at is None else self._clock.now() - began_at
        return SchedulerBeat(dp_rank=dp_rank, turn_s=turn_s, num_turns=self._num_turns)
