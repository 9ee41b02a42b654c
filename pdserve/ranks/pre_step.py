"""Runs a hook before each step: a DP round, or an expert rebalance.

Created by `engine` in the ranks' processes. A plan without rows is this replica's part of a round in which only other
replicas have work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pdserve.errors import PdserveError
from pdserve.executor.expert_balance import ExpertBalance
from pdserve.executor.interface import BatchPlan, Executor, StepHandle, StepResult
from pdserve.memory.layout import KVLayout
from pdserve.ranks.dp_sync import DpSync
from pdserve.ranks.input_log import InputLog
from pdserve.ranks.rank_group import guarded


class ExpertRebalancer(Protocol):
    """Moves experts between steps."""

    def before_step(self, step: int) -> None:
        """Called before `step` is launched. May exchange tensors with the other ranks."""
        ...


class StepRebalancer:
    """Starts a new placement plan every `num_steps` steps, and applies it before the first step after rank 0 has its
    plan.

    `experts` is None on a rank whose stage has none.
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
    """Rebalancing for ranks of several replicas that share experts: depends on the round number alone, without
    messages.

    A plan is applied half an interval after its start; the rank waits for a plan that is not ready.
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


class PreStepExecutor:
    """Implements `Executor` over `inner`; calls `prepare` with the number of each step before its launch.

    `prepare` and the step may exchange tensors with other ranks; on failure `root_cause` names the lost rank (see
    `RankGroup.root_cause`).
    """

    def __init__(
        self, inner: Executor, prepare: Callable[[int], None], root_cause: Callable[[], PdserveError | None]
    ) -> None:
        self._inner = inner
        self._prepare = prepare
        self._blame = root_cause
        self.open_row, self.close_row = inner.open_row, inner.close_row
        self.offload, self.restore, self.zero = inner.offload, inner.restore, inner.zero

    @property
    def layout(self) -> KVLayout:
        """See `Executor.layout`."""
        return self._inner.layout

    @property
    def buffers(self) -> tuple[tuple[int, int], ...]:
        """See `Executor.buffers`."""
        return self._inner.buffers

    def launch(self, plan: BatchPlan, *, layer_events: bool = False) -> StepHandle:
        """See `Executor.launch`. Raises RankError like `resolve`."""

        def launch() -> StepHandle:
            self._prepare(plan.step)
            return self._inner.launch(plan, layer_events=layer_events)

        return guarded(launch, self._blame)

    def resolve(self, handle: StepHandle) -> StepResult:
        """See `Executor.resolve`.

        Raises:
            RankError: another rank is lost.
        """
        return guarded(lambda: self._inner.resolve(handle), self._blame)


class SharedRounds:
    """State of `lockstep` for the schedulers of all ranks of a replica. `lockstep` None: a follower, which reads it
    from `log`.
    """

    def __init__(self, lockstep: DpSync | None, log: InputLog) -> None:
        self._lockstep = lockstep
        self._log = log

    @property
    def is_behind(self) -> bool:
        """See `DpSync.is_behind`."""
        return self._log.answer(lambda: self._lockstep is not None and self._lockstep.is_behind)

    def leave(self) -> None:
        """See `DpSync.leave`."""
        if self._lockstep is not None:
            self._lockstep.leave()

    def ended(self, deadline: float) -> bool:
        """See `DpSync.ended`."""
        return self._log.answer(lambda: self._lockstep is not None and self._lockstep.ended(deadline))
