"""Idle batches: steps without rows, for DP-attention rounds in which only other replicas have work. See
`ranks/dp_sync`.

Owned by `Scheduler`; the composition root makes it where replicas compute together.
"""

from __future__ import annotations

import time
from typing import Protocol

from pdserve.executor.interface import BatchPlan, Executor, run

END_TIMEOUT_S = 4.0
"""Seconds to wait for the other replicas to stop before giving up."""


class DpRounds(Protocol):
    """The part of `DpSync` that a scheduler reads. Scheduler thread."""

    @property
    def is_behind(self) -> bool:
        """True when another replica has entered a round that this replica has not entered."""
        ...

    def leave(self) -> None:
        """Announce that this replica stops; called once."""
        ...

    def ended(self, deadline: float) -> bool:
        """True when no other replica needs this one any more, or when `deadline` (`time.monotonic()`) has passed."""
        ...


class Sleeper(Protocol):
    """The part of a mailbox that `IdleBatches` waits on, for events of any type."""

    def drain(self) -> object:
        """Take all events."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Block until there is an event, at most `timeout_s` seconds."""
        ...


class IdleBatches:
    """Plans empty batches for the rounds that other replicas have entered."""

    def __init__(self, rounds: DpRounds) -> None:
        self._rounds = rounds

    def plan(self, step: int) -> BatchPlan | None:
        """Return an empty plan for `step` when this replica is behind; None otherwise. Called when the role has no
        plan.
        """
        return BatchPlan(step, ()) if self._rounds.is_behind else None

    def run_idle_until_all_stop(self, step: int, executor: Executor, mailbox: Sleeper) -> None:
        """Compute empty batches after `step`, until all replicas have stopped or `END_TIMEOUT_S` has passed."""
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
