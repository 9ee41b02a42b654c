"""Flags of scheduling, a group of `ServerConfig`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

from pdserve.config.access_group import flag

SchedulePolicy = Literal["fcfs", "lpm", "priority", "random"]
MIN_PRIORITY, MAX_PRIORITY = -(1 << 31), (1 << 31) - 1
"""Bounds of the field `priority` of requests."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Batching, queueing and admission."""

    max_running_requests: int | None = flag(None, help="requests that hold KV rows at once")
    chunked_prefill_size: int | None = flag(None, help="prompt tokens per step; -1 disables chunked prefill")
    mixed_chunk_size: int | None = flag(
        None,
        help="prompt tokens per step that also decodes, after the prefill budget of two full steps is used or a step "
        "had no prompts; a smaller size shortens the pauses of streams (ITL). When absent: --chunked-prefill-size if "
        "given, else a quarter of its default",
    )
    prefill_saturation_tokens: int | None = flag(
        None,
        help="prompt tokens that saturate the processor: a step's prompts are computed in parts of about this size, "
        "twice the size if the step also decodes, so that prompts get their first tokens one after the other. When "
        "absent: on CPU 128, in bfloat16 with AMX 256, more with experts; elsewhere no parts. -1: no parts",
    )
    max_prefill_tokens: int = flag(16384, help="prompt tokens per step when chunked prefill is disabled")
    max_queued_requests: int = flag(
        8192,
        help="waiting requests of a replica, beyond free rows, before new requests are refused with 503; -1: no limit, "
        "also not of prompt tokens",
    )
    schedule_policy: SchedulePolicy = flag(
        "fcfs",
        help="order of waiting requests. fcfs: arrival; lpm: longest cached prefix first; priority: highest priority "
        "first, less the time waited; random: mixed among those of about a minute",
    )
    schedule_aging_s: float = flag(
        10.0,
        help="seconds of waiting that count as one priority level, or with lpm as 256 cached tokens; random shifts a "
        "request by up to six times as many",
    )
    enable_priority_scheduling: bool = flag(
        False,
        help="start waiting requests strictly by the field priority, whatever they waited (with --schedule-policy "
        "priority: less the time waited); a more urgent request displaces the least urgent from a full queue, and "
        "preempts running ones",
    )
    schedule_low_priority_values_first: bool = flag(False, help="a lower value of priority is more urgent")
    priority_scheduling_preemption_threshold: int = flag(
        10, help="a request preempts running ones whose priority differs by more than this"
    )
    disable_priority_preemption: bool = flag(False, help="priority scheduling preempts no running request")
    default_priority_value: int | None = flag(
        None,
        help="priority of requests without one; when absent the least urgent one with --enable-priority-scheduling and "
        "fcfs, else 0",
    )
    abort_on_priority_when_disabled: bool = flag(
        False, help="refuse requests with a priority with 503 where priority acts on no queue"
    )
    req_waiting_timeout_s: float = flag(
        -1.0,
        help="seconds after which a request that has not started ends with 503; 0 or less: no limit",
        env="SGLANG_REQ_WAITING_TIMEOUT",
    )
    req_running_timeout_s: float = flag(
        -1.0,
        help="seconds after which a request that has started ends with 503; 0 or less: no limit. On prefill its prompt "
        "counts, on decode its output",
        env="SGLANG_REQ_RUNNING_TIMEOUT",
    )
    schedule_conservativeness: float = flag(
        1.0, help="above 1 reserves more memory for running requests: fewer retractions, smaller batches"
    )
    init_new_token_ratio: float = flag(
        0.7,
        help="on a monolith: initial share of their remaining output tokens that memory is kept free for, for running "
        "requests; times --schedule-conservativeness",
        env="SGLANG_INIT_NEW_TOKEN_RATIO",
    )
    clip_max_new_tokens_estimation: int = flag(
        4096,
        help="on a monolith: most remaining output tokens of a request that this share is taken of",
        env="SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION",
    )
    num_reserved_decode_tokens: int = flag(512, help="tokens kept free for each request admitted by decode")
    disable_overlap_schedule: bool | None = flag(
        None, help="process each step's results before the next step is launched"
    )

    @property
    def waiting_timeout_s(self) -> float | None:
        """Most seconds that a request may wait to start; None: no limit."""
        return self.req_waiting_timeout_s if self.req_waiting_timeout_s > 0 else None

    @property
    def running_timeout_s(self) -> float | None:
        """Most seconds that a request may run; None: no limit."""
        return self.req_running_timeout_s if self.req_running_timeout_s > 0 else None

    @functools.cached_property
    def default_priority(self) -> int:
        """Priority of a request that has none: `default_priority_value`, else the least urgent one or 0."""
        if self.default_priority_value is not None:
            return self.default_priority_value
        if not self.enable_priority_scheduling or self.schedule_policy == "priority":
            return 0
        return MAX_PRIORITY if self.schedule_low_priority_values_first else MIN_PRIORITY

    @property
    def uses_priority(self) -> bool:
        """True when the field `priority` of requests acts on the waiting queue."""
        return self.enable_priority_scheduling or self.schedule_policy == "priority"

    @property
    def most_queued(self) -> int | None:
        """Limit of waiting requests of a replica; None: no limit."""
        return None if self.max_queued_requests < 0 else self.max_queued_requests
