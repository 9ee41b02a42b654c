"""What the API process knows of the life of its schedulers, without asking their loops. Owned by the engine client.

Beats come about once a second from a thread beside each loop, so they come during a long step, too, and stop when the
process is stopped or swapped out. The loop's own turn is in them: one that takes longer than any step may is stuck.
"""

from __future__ import annotations

import dataclasses
import time

from pdserve.protocol.messages import SchedulerBeat

SILENT_S = 10.0
"""A scheduler that was not heard for so long does not run."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaVitals:
    """One replica's scheduler now. `age_s` since it was heard, `turn_s` of the loop's turn under way, if any."""

    dp_rank: int
    age_s: float
    turn_s: float | None
    num_turns: int

    @property
    def silent(self) -> bool:
        """Its process does not run."""
        return self.age_s > SILENT_S

    def trouble(self, max_turn_s: float) -> str | None:
        """Why it cannot be alive, as a sentence; None when it may be."""
        if self.silent:
            return f"the scheduler of replica {self.dp_rank} is silent for {self.age_s:.0f} s"
        if self.turn_s is not None and self.turn_s > max_turn_s:
            return f"the scheduler of replica {self.dp_rank} is stuck in one step for {self.turn_s:.0f} s"
        return None


class Watchdogs:
    """The newest beat of each replica. Event loop only."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._newest: dict[int, tuple[float, SchedulerBeat]] = {}

    def begin(self) -> None:
        """All schedulers run from now on."""
        self._began_s = time.monotonic()

    def heard(self, beat: SchedulerBeat) -> None:
        """One beat."""
        self._newest[beat.dp_rank] = (time.monotonic(), beat)

    def vitals(self, dp_size: int) -> list[ReplicaVitals]:
        """Of each of `dp_size` replicas; none before `begin`."""
        if self._began_s is None:
            return []
        now = time.monotonic()
        return [self._vitals(rank, now, self._began_s) for rank in range(dp_size)]

    def _vitals(self, rank: int, now: float, began_s: float) -> ReplicaVitals:
        heard_s, beat = self._newest.get(rank, (began_s, SchedulerBeat(dp_rank=rank, turn_s=None, num_turns=0)))
        age_s = max(0.0, now - max(heard_s, began_s))
        turn_s = None if beat.turn_s is None else beat.turn_s + now - heard_s
        return ReplicaVitals(rank, age_s, turn_s, beat.num_turns)
