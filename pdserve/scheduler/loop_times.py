"""Where the scheduler loop's time goes, for `/metrics`, under SGLang's names.

The times only inform: no decision depends on them, so ranks may measure different ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from pdserve.base.clock import Clock
from pdserve.protocol.engine_state import SchedulerHeartbeat
from pdserve.scheduler.step_parts import StepKind

Stage = Literal[
    "recv_requests", "process_input_requests", "process_queue", "get_next_batch_to_run", "run_batch",
    "process_batch_result", "sanity_check_cache", "idle", "other",
]  # fmt: skip
"""SGLang's names of the stages: take events; handle them; poll transfers; plan a step; launch it, and wait for its
results; commit them; run the self-audit; sleep; all else.
"""
STAGE_SECONDS, FORWARD_SECONDS = "scheduler_stage_seconds", "forward_execution_seconds"
KINDS: Sequence[StepKind] = get_args(StepKind)


class LoopTimes:
    """Seconds of the loop by stage, which add up to its whole time, and of steps by kind. Scheduler thread only."""

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, cpu: Callable[[], float] = time.process_time
    ) -> None:
        """`now`: wall time in seconds; `cpu`: CPU time of this process."""
        self._now, self._cpu = now, cpu
        self._stage: Stage = "other"
        self._since = self._resolved = now()
        self._stages: dict[Stage, float] = dict.fromkeys(get_args(Stage), 0.0)
        self._kinds: dict[StepKind, float] = dict.fromkeys(KINDS, 0.0)
        self._launched: deque[tuple[StepKind | None, float]] = deque()

    def begin(self) -> None:
        """Begin to count: the loop starts now."""
        self._since = self._resolved = self._now()

    def enter(self, stage: Stage) -> None:
        """End the current stage and begin `stage`."""
        now = self._now()
        self._stages[self._stage] += now - self._since
        self._stage, self._since = stage, now

    def launch(self, kind: StepKind | None) -> None:
        """Record that a step is launched now; None: one without rows, which counts as no kind."""
        self._launched.append((kind, self._now()))

    def resolve(self) -> None:
        """Record that the results of the oldest step have arrived.

        A step counts from its launch, or from the results of the step before it where that was under way.
        """
        kind, began = self._launched.popleft()
        now = self._now()
        if kind is not None:
            self._kinds[kind] += now - max(began, self._resolved)
        self._resolved = now

    @property
    def prefill_s(self) -> float:
        """Seconds of steps with prompt tokens."""
        return self._kinds["extend"] + self._kinds["mixed"]

    def counters(self) -> dict[str, float]:
        """Return the totals as counters of `EngineState`."""
        self.enter(self._stage)
        stages = {f"{STAGE_SECONDS}.{stage}": seconds for stage, seconds in self._stages.items()}
        kinds = {f"{FORWARD_SECONDS}.{kind}": seconds for kind, seconds in self._kinds.items()}
        idle_s = self._stages["idle"]
        return {**stages, **kinds, "scheduler_idle_seconds": idle_s, "scheduler_process_cpu_seconds": self._cpu()}


class Heartbeat:
    """Two plain fields, written by the scheduler thread only. Any thread may read them, at most one turn late."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_at: float | None = None
        self._num_turns = 0

    def begin(self) -> None:
        """Record that a turn of the loop begins."""
        self._began_at = self._clock.now()

    def end(self, *, computed: bool) -> None:
        """Record that the turn has ended; the loop may sleep now."""
        self._began_at = None
        self._num_turns += computed

    def beat(self, dp_rank: int) -> SchedulerHeartbeat:
        """Return the message for the API process. `turn_s` is None between turns. Any thread."""
        began_at = self._began_at
        turn_s = None if began_at is None else self._clock.now() - began_at
        return SchedulerHeartbeat(dp_rank=dp_rank, turn_s=turn_s, num_turns=self._num_turns)
