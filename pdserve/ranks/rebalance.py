"""When experts move: the leader counts steps and gives the orders that all ranks obey between the same two steps.

Owned by `GroupExecutor`, or by `RoundExecutor` where replicas share their experts; called on the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable

from pdserve.executor.expert_balance import ExpertBalance
from pdserve.ranks.orders import Order, Rebalance


class Rebalancer:
    """Every `num_steps` steps a new plan is begun; it is carried out before the first step at which it is there."""

    def __init__(self, experts: ExpertBalance, order: Callable[[Order], None], num_steps: int) -> None:
        self._experts = experts
        self._order = order
        self._num_steps = num_steps
        self._since = 0

    def before_step(self) -> None:
        """A step is about to be ordered. Orders leave before we obey them ourselves: they are exchanges."""
        self._since += 1
        if self._experts.is_planned:
            self._order(Rebalance("place"))
            self._experts.place()
        elif not self._experts.is_planning and self._since > self._num_steps:
            self._since = 1
            self._order(Rebalance("plan"))
            self._experts.plan()


class RoundRebalancer:
    """As the leaders of all replicas do it, each for its own ranks: by the number of the round alone, so that nobody
    need ask. Half an interval after a plan is begun it is carried out, and waited for where it is not there yet.
    """

    def __init__(self, experts: ExpertBalance, order: Callable[[Order], None], num_rounds: int) -> None:
        self._experts = experts
        self._order = order
        self._num_rounds = num_rounds
        self._count = 0

    def before_round(self) -> None:
        """A round is about to be ordered; see `Rebalancer.before_step`."""
        position = self._count % self._num_rounds
        if self._experts.is_planning and position == self._num_rounds // 2:
            self._order(Rebalance("place"))
            self._experts.place()
        if position == 0 and self._count:
            self._order(Rebalance("plan"))
            self._experts.plan()
        self._count += 1
