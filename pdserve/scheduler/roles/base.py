"""The interface between the scheduler loop and a role, and what all roles share.

A role owns the queues before and after computation; it never launches a step itself.
"""

from __future__ import annotations

import abc
import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Literal, Protocol

from pdserve.errors import RequestError
from pdserve.executor.interface import BatchPlan, StepHandle, StepResult
from pdserve.protocol.engine_state import WaitsFor
from pdserve.protocol.failure import RUNNING_TIMEOUT, Failure
from pdserve.protocol.messages import CommandReply, FinishReason, GenerateRequest, MigrationCommand, RequestTiming
from pdserve.scheduler.batch_planner import BatchPlanner
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.preemption import Preemption
from pdserve.scheduler.request import EVICTED_CODE, Req, WaitingQueue
from pdserve.scheduler.roles.migration import not_migratable
from pdserve.scheduler.step_log import DecodeStepLog
from pdserve.scheduler.step_parts import StepKind
from pdserve.transfer.manager import KVManager
from pdserve.transfer.room import KVPoll

LOST = Failure(code="transfer_failed", message="the KV transfer failed and reported no cause")
INJECTED = Failure(code="transfer_failed", message="injected failure of a poll")
WAITED_TOO_LONG = Failure(
    code="waiting_timeout", message="Request waiting timeout reached.", status=503, retry_after_s=1
)
RAN_TOO_LONG = Failure(
    code=RUNNING_TIMEOUT, message="Request running timeout reached.", status=503, retryable=False, retry_after_s=1
)
"""Messages and statuses of SGLang."""
TIMEOUT_CHECK_S = 0.05
"""Seconds between two looks at the ages of all requests."""
STOP_STRING = FinishReason(type="stop")
"""The end of a request whose text matched a stop string, which the API process names."""
WRONG_RECORD = Failure(
    code="metadata_mismatch",
    message="the aux record that arrived belongs to another room, or to KV and state other than those published",
)

WRONG_STATE = Failure(
    code="state_mismatch",
    message="the recurrent state that arrived belongs to another request, or to another position",
    origin="decode",
    status=502,
)
STOPPED = Failure(code="stopped", message="the request was stopped", status=499)


def can_recompute(failure: Failure) -> bool:
    """True when decode may compute the prompt of a request whose KV transfer ended with `failure`.

    False for aborts, for bad requests, for servers whose configuration, weights, tokenizer or LoRA adapters differ, and
    for requests that a more urgent one displaced from prefill's queue.
    """
    is_excluded = failure.code in ("prompt_mismatch", "lora_mismatch", "weights_mismatch", EVICTED_CODE)
    return failure.retryable and failure.status >= 500 and not is_excluded


def refuse_incoming(req: Req) -> None:
    """Raise RequestError, 409, for a request of another decode server: this one changed its role meanwhile."""
    if req.is_incoming or req.spec.taken_over:
        message = "disaggregation_mode: this is no decode server any more"
        raise RequestError(message, field="disaggregation_mode", status=409, code="not_migratable")


def received_timing(req: Req) -> RequestTiming:
    """Return the TTFT of a request on decode, in parts that add up to it."""
    times = req.times
    if times.lost is not None and times.started is not None and times.prefilled is not None:
        queue_s, prefill_s = times.started - times.lost, times.prefilled - times.started
        return RequestTiming(bootstrap_s=times.lost - times.arrived, queue_s=queue_s, prefill_s=prefill_s)
    if req.receiver is None or times.published is None or times.received is None:
        return RequestTiming()
    stats = req.receiver.stats
    first_step = None if times.second_token is None else times.second_token - times.received
    return RequestTiming(
        bootstrap_s=times.published - times.arrived,
        queue_s=stats.queue_s,
        prefill_s=stats.prefill_s,
        transfer_s=max(0.0, times.received - times.published - stats.queue_s - stats.prefill_s),
        first_decode_step_s=first_step,
        kv_bytes=stats.num_bytes,
        kv_pages=stats.num_pages,
        kv_transfer_s=stats.write_s,
    )


class SchedulerRole(Protocol):
    """Plans batches and commits their results. Called in each step, in order: `poll`, `plan`, `launched`, `commit`."""

    @property
    def live(self) -> dict[str, Req]:
        """All requests of the role, by rid."""
        ...

    def admit(self, req: Req) -> None:
        """Put a new request into the first queue.

        Raises:
            RequestError: the request can never run here, or its bootstrap room is live; nothing was kept.
        """
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that have not started."""
        ...

    def is_queued(self, req: Req) -> bool:
        """True while the request waits and has no output: it may lose its place in a full queue."""
        ...

    def poll(self) -> None:
        """Move requests between queues according to the state of their transfers; end those past a timeout."""
        ...

    @property
    def needs_sync(self) -> bool:
        """True when the next plan requires that no step is under way."""
        ...

    def plan(self, step: int) -> BatchPlan | None:
        """Return the batch of step `step`; None when there is nothing to compute."""
        ...

    @property
    def step_kind(self) -> StepKind:
        """What the rows of the last plan compute."""
        ...

    def launched(self, handle: StepHandle) -> None:
        """Called once the plan is launched; `handle.layer_events` is set where the scheduler requests layer events."""
        ...

    def commit(self, plan: BatchPlan, result: StepResult) -> None:
        """Take the result of a plan. The next plan may be launched already; rows of ended requests are ignored."""
        ...

    def end(self, req: Req, failure: Failure | None, finish: FinishReason = STOP_STRING) -> None:
        """End a live request early: with a failure, or with `finish` when `failure` is None."""
        ...

    def withdraw_queued(self) -> list[GenerateRequest]:
        """Forget the requests that have not started, without an output; returns them, oldest first.

        Their rooms close unnoticed by the peer, which has heard nothing of them. Those that have brought KV stay, and
        those whose peer has pages for them or writes to ours.
        """
        ...

    @property
    def guests(self) -> Collection[str]:
        """Owners of leases and rooms that are no live requests."""
        ...

    def migrate(self, command: MigrationCommand) -> None:
        """Move a running request to another server, or end that; the reply is sent now or by a later turn."""
        ...

    def is_moving(self, req: Req) -> bool:
        """True while another server is taking the request over."""
        ...

    def retract_all(self) -> None:
        """Release the memory of every request that can be computed again later. No step is under way."""
        ...

    def queues(self) -> dict[str, int]:
        """Queue lengths by SGLang's names."""
        ...

    def members(self) -> Mapping[str, Queued]:
        """Requests of each queue that `queues` counts; retracted requests of a monolith are in its waiting queue."""
        ...

    def waits_for(self, req: Req) -> WaitsFor:
        """Return what a live request waits for: the peer, memory, compute, or the KV transfer."""
        ...

    def facts(self) -> dict[str, float]:
        """Numbers that steer the role, for `/get_server_info` and `/metrics`."""
        ...


class Queued(Protocol):
    """The requests of one queue."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Req]: ...


def count_by_priority(live: Iterable[Req], members: Mapping[str, Queued]) -> dict[str, dict[int, int]]:
    """Count requests by their priority, for each queue in `members`. `num_queue_reqs` counts all that do not run."""
    counted = {name: Counter(req.spec.priority for req in reqs) for name, reqs in members.items()}
    everywhere = Counter(req.spec.priority for req in live)
    return {name: dict(numbers) for name, numbers in counted.items()} | {
        "num_queue_reqs": dict(everywhere - counted["num_running_reqs"])
    }


def audit_holds(
    context: SchedulerContext, role: SchedulerRole, kv: KVManager | None, *, idle: bool, in_flight: bool
) -> list[str]:
    """Return one sentence for each page, row, aux slot or room whose owner is missing, duplicate, or ended.

    `idle`: no request, step, transfer or copy is left. `in_flight`: a step is under way.
    """
    memory, live, guests = context.memory, role.live, role.guests
    found = memory.audit()
    if not in_flight:
        found += [
            f"{len(lease.pages)} {name} are held for request {lease.owner!r}, which has ended: {lease!r}"
            for name, pool in (("pages", memory.pages), ("aux slots", memory.aux))
            for lease in pool.live_leases
            if idle or (lease.held_by("request") and lease.owner not in live and lease.owner not in guests)
        ]
        taken = {req.row for req in live.values()}
        found += [f"row {row} is open for no request" for row in memory.table.open_rows if row not in taken]
    if kv is not None and (num_rooms := kv.counts()["rooms_live"]) > len(live) + len(guests):
        found.append(f"{num_rooms} rooms are live for {len(live)} requests")
    if context.tier is not None:
        found += context.tier.audit(idle=idle)
    if idle and context.offloaded_bytes:
        found.append(f"{context.offloaded_bytes} bytes of host memory are held for no request")
    return found


class PollFailures:
    """Fails a share of the polls of transfers on purpose, for tests of a running pair; health probes are spared.

    All ranks of a replica decide alike: the outcome depends on `secret`, which they share, and on the room's state.
    """

    def __init__(self, share: float, secret: str) -> None:
        """`share`: 0 to 1."""
        self._limit = int(share * (1 << 64))
        self._secret = secret.encode()

    def hits(self, req: Req, state: KVPoll) -> bool:
        """Whether the poll that found `req`'s transfer in `state` fails."""
        if not self._limit or req.spec.probe or req.spec.room is None:
            return False
        text = f"{req.spec.room.room}/{state.value}".encode()
        return int.from_bytes(hashlib.blake2b(text, key=self._secret[:64], digest_size=8).digest()) < self._limit


TransferPhase = Literal["bootstrap", "transfer"]


class BaseRole(abc.ABC):
    """What all roles share: the batch planner, and the end of a request."""

    def __init__(self, context: SchedulerContext, planner: BatchPlanner) -> None:
        self._context = context
        self._batch_planner = planner
        self._next_timeout_check_s = 0.0
        self.live: dict[str, Req] = {}

    @property
    def needs_sync(self) -> bool:
        """See `SchedulerRole.needs_sync`."""
        return self._batch_planner.needs_sync

    def plan(self, step: int) -> BatchPlan | None:
        """See `SchedulerRole.plan`."""
        return self._batch_planner.plan(step)

    @property
    def step_kind(self) -> StepKind:
        """See `SchedulerRole.step_kind`."""
        return self._batch_planner.step_kind

    def end(self, req: Req, failure: Failure | None, finish: FinishReason = STOP_STRING) -> None:
        """See `SchedulerRole.end`."""
        if failure is not None:
            self._context.count_failure(req, failure)
            self._count_transfer_failure(req)
        self._abort_transfer(req, failure)
        self._leave(req)
        finish = finish if failure is None else FinishReason.failed(failure)
        self._context.outbox.emit(req, (), finish, self._timing(req))

    def withdraw_queued(self) -> list[GenerateRequest]:
        """See `SchedulerRole.withdraw_queued`."""
        found = [req for req in self.live.values() if self._may_withdraw(req) and not req.spec.probe]
        for req in found:
            self._leave(req)
        return [req.spec for req in found]

    def _may_withdraw(self, req: Req) -> bool:
        """Whether the request has not started, has brought no KV, and no peer has heard of it."""
        return self.is_queued(req) and req.saved is None and not req.is_incoming

    @abc.abstractmethod
    def is_queued(self, req: Req) -> bool:
        """See `SchedulerRole.is_queued`."""

    @property
    def guests(self) -> Collection[str]:
        """See `SchedulerRole.guests`."""
        return ()

    def migrate(self, command: MigrationCommand) -> None:
        """See `SchedulerRole.migrate`. Only decode servers have requests that move."""
        failure = not_migratable("only the requests of decode servers move")
        reply = CommandReply(query_id=command.query_id, ok=False, message=failure.message, failure=failure)
        self._context.outbox.send(reply)

    def is_moving(self, req: Req) -> bool:
        """See `SchedulerRole.is_moving`."""
        return False

    def _end_timed_out(self) -> None:
        """End the requests that have waited or run for too long. Health probes have their own timeouts."""
        limits, now_s = self._context.limits, self._context.clock.now()
        if not limits.has_timeouts or now_s < self._next_timeout_check_s:
            return
        self._next_timeout_check_s = now_s + TIMEOUT_CHECK_S
        for req in [req for req in self.live.values() if not req.spec.probe]:
            if _is_over(limits.waiting_timeout_s, self._waiting_since_s(req), now_s):
                self.end(req, WAITED_TOO_LONG)
            elif _is_over(limits.running_timeout_s, self._running_since_s(req), now_s):
                self.end(req, RAN_TOO_LONG)

    def _waiting_since_s(self, req: Req) -> float | None:
        """When the request began to wait for its start; None: it does not wait."""
        return req.times.arrived if req.times.started is None else None

    def _running_since_s(self, req: Req) -> float | None:
        """When the request started; None: it waits, or its KV is transferred."""
        return req.times.started

    @abc.abstractmethod
    def members(self) -> Mapping[str, Queued]:
        """See `SchedulerRole.members`."""

    def queues(self) -> dict[str, int]:
        """See `SchedulerRole.queues`."""
        return {name: len(reqs) for name, reqs in self.members().items()}

    def _prefilling_facts(self) -> dict[str, float]:
        return {"num_prefill_inflight_reqs": len(self._batch_planner.prefilling.active)}

    def _leave(self, req: Req) -> None:
        """Remove the request from all queues and release its memory."""
        self._leave_queues(req)
        self._batch_planner.remove(req)
        del self.live[req.rid]
        self._context.release(req)

    def _abort_transfer(self, req: Req, failure: Failure | None) -> None:  # noqa: B027
        """End the KV transfer of a request that ends early. Does nothing in a role without transfers."""

    def _leave_queues(self, req: Req) -> None:  # noqa: B027
        """Remove the request from the role's own queues, and close its bootstrap room."""

    def _transfer_phase(self, req: Req) -> TransferPhase | None:
        """Return the phase that the request's KV transfer is in; None: it has ended, or the role has no transfers."""
        return None

    def _count_transfer_failure(self, req: Req) -> None:
        """Count a request that fails or is aborted before its KV transfer has ended, whatever the cause."""
        phase = self._transfer_phase(req)
        if phase is not None and not req.spec.probe:
            self._context.counters[f"{phase}_failed_reqs"] += 1

    @abc.abstractmethod
    def _timing(self, req: Req) -> RequestTiming | None:
        """Return the TTFT of the request in parts, as far as they are known; None: the output has no timing."""


def _is_over(limit_s: float | None, since_s: float | None, now_s: float) -> bool:
    return limit_s is not None and since_s is not None and now_s - since_s > limit_s


class MixedBatchRole(BaseRole):
    """Methods shared by the monolith and decode roles, which both plan mixed batches and preempt requests."""

    def __init__(
        self,
        context: SchedulerContext,
        planner: BatchPlanner,
        waiting: WaitingQueue,
        step_log: DecodeStepLog | None = None,
    ) -> None:
        """`waiting`: the queue of new requests, with the rules of priority scheduling.

        `step_log` None: decode steps are not logged.
        """
        super().__init__(context, planner)
        self._preemption = Preemption(planner, waiting) if waiting.rules.preemption else None
        self._step_log = step_log

    @property
    def needs_sync(self) -> bool:
        """See `SchedulerRole.needs_sync`."""
        planner, preemption = self._batch_planner, self._preemption
        return planner.needs_sync or (
            preemption is not None and planner.is_step_complete and self._would_preempt(preemption)
        )

    def plan(self, step: int) -> BatchPlan | None:
        """See `SchedulerRole.plan`."""
        planner, preemption = self._batch_planner, self._preemption
        if preemption is not None and planner.is_step_complete and self._context.no_step_in_flight:
            self._preempt(preemption)
        return planner.plan(step)

    def launched(self, handle: StepHandle) -> None:
        """Do nothing: these roles send no KV."""

    def commit(self, plan: BatchPlan, result: StepResult) -> None:
        """Append the tokens and release finished requests. The first two tokens and the last one carry timing."""
        for req, tokens, finish in self._batch_planner.commit(self.live, plan, result):
            num_before = len(req.output_ids) - len(req.spec.prior_output_ids) - len(tokens)
            timing = self._timing(req) if finish or num_before < 2 else None
            self._context.outbox.emit(req, tokens, finish, timing)
            if self._step_log is not None:
                self._step_log.add(req, len(tokens), finish)
            if finish is not None:
                self._leave(req)
        if self._step_log is not None:
            self._step_log.end_step(plan.step)

    def retract_all(self) -> None:
        """See `SchedulerRole.retract_all`."""
        self._batch_planner.retract_all()

    def _would_preempt(self, preemption: Preemption) -> bool:
        """True when `_preempt` would retract a request now."""
        return preemption.is_due

    def _preempt(self, preemption: Preemption) -> None:
        """Let waiting requests take the place of less urgent ones."""
        preemption.run()

    def _in_batch(self) -> list[Req]:
        """Requests that are prefilled or decoded."""
        planner = self._batch_planner
        return [*planner.prefilling.active.values(), *planner.running.reqs.values()]

    def facts(self) -> dict[str, float]:
        """See `SchedulerRole.facts`."""
        return self._prefilling_facts() | {"new_token_ratio": self._batch_planner.running.ratio.value}
