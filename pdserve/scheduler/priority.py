"""Priority scheduling: how the priorities of two requests compare, and what follows for a running one."""

from __future__ import annotations

import dataclasses

from pdserve.config.schedule_group import ScheduleConfig
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import GenerateRequest

EVICTED_CODE = "evicted_from_queue"
EVICTED = Failure(
    code=EVICTED_CODE,
    message="This request is aborted from the waiting queue by a higher priority request.",
    status=503,
)
"""The end of a waiting request whose place a more urgent one takes. The text is SGLang's."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PriorityRules:
    """How the `priority` of requests acts. By default it acts under `--schedule-policy priority` only.

    With `enabled` requests start in the order of their priority and displace less urgent ones from a full queue. With
    `preempts` they also preempt running requests whose priority is lower by more than `threshold`.
    """

    enabled: bool = False
    low_values_first: bool = False
    preempts: bool = True
    threshold: int = 10

    @classmethod
    def of(cls, schedule: ScheduleConfig) -> PriorityRules:
        """Return the rules of a server's flags."""
        return cls(
            enabled=schedule.enable_priority_scheduling,
            low_values_first=schedule.schedule_low_priority_values_first,
            preempts=not schedule.disable_priority_preemption,
            threshold=schedule.priority_scheduling_preemption_threshold,
        )

    @property
    def preemption(self) -> bool:
        """True when a waiting request may preempt a running one at all."""
        return self.enabled and self.preempts

    def rank(self, spec: GenerateRequest) -> int:
        """The priority of a request as a rank: lower is more urgent."""
        return spec.priority if self.low_values_first else -spec.priority

    def level(self, spec: GenerateRequest) -> int:
        """The rank of a request with priority scheduling; 0 for all requests without it."""
        return self.rank(spec) if self.enabled else 0

    def may_preempt(self, spec: GenerateRequest, running: GenerateRequest) -> bool:
        """True when the waiting `spec` may preempt `running`. Health probes preempt no request."""
        return self.preemption and self.level(running) - self.level(spec) > self.threshold and not spec.probe
