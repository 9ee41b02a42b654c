"""The executor of a replica that computes every step together with others: each of its steps is one of their rounds.

Made by the composition root of a leader's process. A plan without rows is this replica's part of a round that only
others have work in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pdserve.executor.interface import BatchPlan, Executor, StepHandle, StepResult
from pdserve.memory.layout import KVLayout
from pdserve.ranks.lockstep import Lockstep
from pdserve.ranks.rebalance import RoundRebalancer

T = TypeVar("T")


class RoundExecutor:
    """Implements `Executor` over `inner`, that of all ranks of the replica. Steps are numbered from 1, without gaps.

    A `rebalancer` moves experts between rounds.
    """

    def __init__(self, inner: Executor, lockstep: Lockstep, rebalancer: RoundRebalancer | None = None) -> None:
        self._inner = inner
        self._lockstep = lockstep
        self._rebalancer = rebalancer
        # rows and pages are the replica's own affair
        self.open_row, self.close_row = inner.open_row, inner.close_row
        self.offload, self.restore = inner.offload, inner.restore

    @property
    def layout(self) -> KVLayout:
        """See `Executor.layout`."""
        return self._inner.layout

    @property
    def buffers(self) -> tuple[tuple[int, int], ...]:
        """See `Executor.buffers`."""
        return self._inner.buffers

    def launch(self, plan: BatchPlan, *, layer_marks: bool = False) -> StepHandle:
        """See `Executor.launch`. The others are called first: all that follows may be an exchange with them."""
        self._lockstep.enter(plan.step)
        if self._rebalancer is not None:
            self._guarded(self._rebalancer.before_round)
        return self._guarded(lambda: self._inner.launch(plan, layer_marks=layer_marks))

    def resolve(self, handle: StepHandle) -> StepResult:
        """See `Executor.resolve`.

        Raises:
            RankError: a rank of any replica is lost.
        """
        return self._guarded(lambda: self._inner.resolve(handle))

    def _guarded(self, compute: Callable[[], T]) -> T:
        """Where it fails because another replica is lost, that is the error."""
        try:
            return compute()
        except Exception as error:
            lost = self._lockstep.blame()
            if lost is not None:
                raise lost from error
            raise
