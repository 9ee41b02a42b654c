"""Runs a hook before each step: a DP round, or an expert rebalance. `IdleBatches` plans steps without rows.

Created by `engine` in the ranks' processes. A plan without rows is this replica's part of a round in which only other
replicas have work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from pdserve.errors import PdserveError
from pdserve.executor.expert_balance import ExpertBalance
from pdserve.executor.interface import BatchPlan, Executor, StepHandle, StepResult, run
from pdserve.memory.layout import KVLayout
from pdserve.ranks.dp_sync import DpSync
from pdserve.ranks.input_log import InputLog, guarded


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
        self._root_cause = root_cause
        self.open_row, self.close_row, self.draft_hidden = inner.open_row, inner.close_row, inner.draft_hidden
        self.offload, self.restore, self.zero = inner.offload, inner.restore, inner.zero
        self.start_save, self.start_load, self.copy_now = inner.start_save, inner.start_load, inner.copy_now
        self.poll_copies = inner.poll_copies
        self.has_stamp, self.seal = inner.has_stamp, inner.seal

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

        return guarded(launch, self._root_cause)

    def resolve(self, handle: StepHandle) -> StepResult:
        """See `Executor.resolve`.

        Raises:
            RankError: another rank is lost.
        """
        return guarded(lambda: self._inner.resolve(handle), self._root_cause)


class SharedDpSync:
    """State of `dp_sync` for the schedulers of all ranks of a replica. `dp_sync` None: a follower, which reads it
    from `log`.
    """

    def __init__(self, dp_sync: DpSync | None, log: InputLog) -> None:
        self._dp_sync = dp_sync
        self._log = log

    @property
    def is_behind(self) -> bool:
        """See `DpSync.is_behind`."""
        return self._log.answer(lambda: self._dp_sync is not None and self._dp_sync.is_behind)

    def leave(self) -> None:
        """See `DpSync.leave`."""
        if self._dp_sync is not None:
            self._dp_sync.leave()

    def ended(self, deadline: float) -> bool:
        """See `DpSync.ended`."""
        return self._log.answer(lambda: self._dp_sync is not None and self._dp_sync.ended(deadline))


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


class WaitableMailbox(Protocol):
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

    def run_idle_until_all_stop(self, step: int, executor: Executor, mailbox: WaitableMailbox) -> None:
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
