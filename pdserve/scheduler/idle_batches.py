"""The scheduler's part in rounds that only other replicas have work in (DP attention); see `ranks/lockstep`.

Owned by `Scheduler`; made by the composition root where replicas compute together.
"""

from __future__ import annotations

import time
from typing import Protocol

from pdserve.executor.interface import BatchPlan, Executor, run

END_TIMEOUT_S = 4.0
"""A replica that has not been told to stop by then never will be."""


class DpRounds(Protocol):
    """What `DpSync` tells a scheduler. Scheduler thread."""

    @property
    def is_behind(self) -> bool:
        """Whether others have entered a round that we have not."""
        ...

    def leave(self) -> None:
        """We stop; called once."""
        ...

    def ended(self, deadline: float) -> bool:
        """Whether nobody needs us any more, or it is too late (`time.monotonic()`) for anybody to say so."""
        ...


class Sleeper(Protocol):
    """The part of a mailbox that is waited on: posts of whatever kind."""

    def drain(self) -> object:
        """Take them all."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Until there is one."""
        ...


class IdleBatches:
    """Plans without rows, for the rounds that others call us to."""

    def __init__(self, rounds: DpRounds) -> None:
        self._rounds = rounds

    def plan(self, step: int) -> BatchPlan | None:
        """To be asked when the role has nothing to compute in `step`."""
        return BatchPlan(step, ()) if self._rounds.is_behind else None

    def run_idle_until_all_stop(self, step: int, executor: Executor, mailbox: Sleeper) -> None:
        """We have stopped after `step`: compute with the others until they stop as well, for a while."""
        self._rounds.leave()
        deadline = time.monotonic() + END_TIMEOUT_S
        while not self._rounds.ended(deadline):
            mailbox.drain()
            plan = self.plan(step + 1)
            if plan is not None:
                run(executor, plan)
                step += 1
            elif not self._rounds.ended(deadline):
                mailbox.wait(max(0.0, deadline - time.monotonic()))
