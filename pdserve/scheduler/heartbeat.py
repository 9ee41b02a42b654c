"""What the loop is at, for a thread beside it that tells the API process. Written by the scheduler thread only."""

from __future__ import annotations

from pdserve.base.clock import Clock
from pdserve.protocol.messages import SchedulerBeat


class Heartbeat:
    """Two plain fields: another thread may read them at any time, and is wrong by a turn at most."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_at: float | None = None
        self._num_turns = 0

    def begin(self) -> None:
        """A turn of the loop begins."""
        self._began_at = self._clock.now()

    def end(self, *, computed: bool) -> None:
        """It has ended. The loop may sleep now."""
        self._began_at = None
        self._num_turns += computed

    def beat(self, dp_rank: int) -> SchedulerBeat:
        """What the API process is told. Any thread."""
        began_at = self._began_at
        turn_s = None if began_at is None else self._clock.now() - began_at
        return SchedulerBeat(dp_rank=dp_rank, turn_s=turn_s, num_turns=self._num_turns)
