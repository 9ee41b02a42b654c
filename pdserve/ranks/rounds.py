"""Steps that something must come before: a round that others are called to, experts that move.

Made by the composition roots of the ranks' processes. In a round a plan without rows is this replica's part of what
only others have work in.
"""

from __future__ import annotations

from collections.abc import Callable

from pdserve.errors import PdserveError
from pdserve.executor.interface import BatchPlan, Executor, StepHandle, StepResult
from pdserve.memory.layout import KVLayout
from pdserve.ranks.input_log import InputLog
from pdserve.ranks.lockstep import DpSync
from pdserve.ranks.mates import guarded


class PreStepExecutor:
    """Implements `Executor` over `inner`. `prepare` is called with the number of each step before it is launched: all
    that follows may be an exchange with other ranks, which `blame` knows as `Mates.blame` does.
    """

    def __init__(
        self, inner: Executor, prepare: Callable[[int], None], blame: Callable[[], PdserveError | None]
    ) -> None:
        self._inner = inner
        self._prepare = prepare
        self._blame = blame
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

    def launch(self, plan: BatchPlan, *, layer_marks: bool = False) -> StepHandle:
        """See `Executor.launch`. Raises RankError like `resolve`."""

        def launch() -> StepHandle:
            self._prepare(plan.step)
            return self._inner.launch(plan, layer_marks=layer_marks)

        return guarded(launch, self._blame)

    def resolve(self, handle: StepHandle) -> StepResult:
        """See `Executor.resolve`.

        Raises:
            RankError: another rank is lost.
        """
        return guarded(lambda: self._inner.resolve(handle), self._blame)


class SharedRounds:
    """What `lockstep` tells the schedulers of all ranks of a replica; None on a follower, which hears it by `log`."""

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
