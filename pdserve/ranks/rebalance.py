"""When experts move: all ranks begin a plan, and carry it out, between the same two steps.

Made by the composition root of each rank's process; called on the scheduler thread.
"""

from __future__ import annotations

from typing import Protocol

from pdserve.executor.expert_balance import ExpertBalance
from pdserve.ranks.input_log import InputLog


class ExpertRebalancer(Protocol):
    """What may move experts."""

    def before_step(self, step: int) -> None:
        """`step` is about to be launched. What is done here may be an exchange with the other ranks."""
        ...


class StepRebalancer:
    """Every `num_steps` steps a new plan is begun; it is carried out before the first step at which the leader's is
    there. `experts` is None on a rank whose stage has none.
    """

    def __init__(self, experts: ExpertBalance | None, log: InputLog, num_steps: int) -> None:
        self._experts = experts
        self._log = log
        self._num_steps = num_steps
        self._since = 0
        self._is_planning = False

    def before_step(self, step: int) -> None:
        """See `ExpertRebalancer.before_step`."""
        self._since += 1
        if self._is_planning:
            if self._log.answer(self._is_planned):
                self._is_planning = False
                if self._experts is not None:
                    self._experts.place()
        elif self._since > self._num_steps:
            self._since, self._is_planning = 1, True
            if self._experts is not None:
                self._experts.plan()

    def _is_planned(self) -> bool:
        return self._experts is not None and self._experts.is_planned


class RoundRebalancer:
    """As the ranks of all replicas do it that share experts: by the number of the round alone, so that nobody need
    ask. Half an interval after a plan is begun it is carried out, and waited for where it is not there yet.
    """

    def __init__(self, experts: ExpertBalance, num_rounds: int) -> None:
        self._experts = experts
        self._num_rounds = num_rounds
        self._count = 0

    def before_step(self, step: int) -> None:
        """See `ExpertRebalancer.before_step`."""
        position = self._count % self._num_rounds
        if self._experts.is_planning and position == self._num_rounds // 2:
            self._experts.place()
        if position == 0 and self._count:
            self._experts.plan()
        self._count += 1
