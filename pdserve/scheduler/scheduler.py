"""The scheduler loop. Each turn: take posted events, poll transfers, plan, launch, commit, and send outputs."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from pdserve.base.clock import RetryAfterEstimator
from pdserve.base.mailbox import Woken
from pdserve.errors import RequestError
from pdserve.executor.interface import BatchPlan, StepHandle, StepResult
from pdserve.executor.profiling import Profiler
from pdserve.protocol.engine_memory import MemoryCommand
from pdserve.protocol.engine_state import EngineState
from pdserve.protocol.failure import CLIENT_ABORT, Failure
from pdserve.protocol.messages import (
    AbortRequest,
    ClearStorage,
    CommandReply,
    ContinueGeneration,
    DeclarePeerDead,
    EndMigration,
    EngineCommand,
    ExtractReply,
    ExtractRequest,
    FlushCache,
    GenerateRequest,
    KVPart,
    LoadLora,
    MigrateOut,
    PauseGeneration,
    PauseMode,
    PrepareLora,
    RedirectReceiver,
    SendPrefix,
    Shutdown,
    StartProfile,
    StateQuery,
    StateReply,
    StopProfile,
    SwitchRole,
    ToScheduler,
    UnloadLora,
)
from pdserve.protocol.weights import WeightsCommand
from pdserve.ranks.pre_step import IdleBatches
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.engine_memory import EngineMemory, ManagedMemory
from pdserve.scheduler.loop_times import Heartbeat, LoopTimes
from pdserve.scheduler.outbox import log_admitted
from pdserve.scheduler.request import (
    EVICTED,
    GRAMMAR_FAILED,
    PROCESSOR_FAILED,
    EvictionOrder,
    PriorityRules,
    Req,
    Times,
)
from pdserve.scheduler.role_switcher import OpenedRole, RoleSwitcher
from pdserve.scheduler.roles.base import SchedulerRole, audit_holds
from pdserve.scheduler.snapshots import MOVING, NOT_LIVE, SUSPENDED, RequestExtractor, check_adapter
from pdserve.scheduler.state_report import LoadReporter, StateReporter
from pdserve.scheduler.weights_update import UpdatableWeights, WeightsUpdater
from pdserve.transfer.events import TransferEvent
from pdserve.transfer.manager import KVManager
from pdserve.transfer.wire import prompt_digest

log = logging.getLogger(__name__)

Event = ToScheduler | TransferEvent | Woken
_IDLE_WAIT_S = 60.0
PROBES = "health_probes"
"""Counter of health probes, which are excluded from all other request and token counters."""


class InputSource(Protocol):
    """The source of the loop's events: a `Mailbox`, a `GrammarGate`, or the shared input of a replica's ranks.

    See `scheduler/input_source`. Scheduler thread.
    """

    def drain(self) -> Sequence[Event]:
        """Take all posted events, oldest first."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Block until there may be an event, at most `timeout_s` seconds."""
        ...


class Scheduler(UpdatableWeights, ManagedMemory):
    """Runs one role on a `SchedulerContext`. `kv` is the transfer manager, None in a monolith. Scheduler thread."""

    def __init__(
        self,
        role: SchedulerRole,
        context: SchedulerContext,
        kv: KVManager | None,
        inputs: InputSource,
        *,
        max_queued: int | None = None,
        overlap: bool = False,
        profile_name: str = "TP-0",
        facts: Mapping[str, str | int | float | bool | None] | None = None,
        live_facts: Callable[[], Mapping[str, str | float]] | None = None,
        idle_batches: IdleBatches | None = None,
        heartbeat: Heartbeat | None = None,
        num_gated: Callable[[], int] | None = None,
        rules: PriorityRules | None = None,
        switcher: RoleSwitcher | None = None,
        load_reporter: LoadReporter | None = None,
        engine_memory: EngineMemory | None = None,
        weights: WeightsUpdater | None = None,
    ) -> None:
        """`max_queued`: most waiting requests beyond the free rows; None: no limit.

        With the `rules` of priority scheduling a more urgent request takes the place of a waiting one in a full queue.
        `num_gated` returns the number of requests that wait for their grammar before admission; None: there is no gate.
        `switcher` None: the role is fixed.
        `load_reporter` None: load is not published. `weights` None: the weights stay.
        `engine_memory` None: memory is not released.
        """
        self.role = role
        self.context = context
        self.kv = kv
        self.inputs = inputs
        self._max_queued = max_queued
        self._rules = rules
        self._evictions = self._eviction_order()
        self.facts = dict(facts or {})
        self._num_gated = num_gated
        self._switcher = switcher
        self.weights = weights
        self._load_reporter = load_reporter
        self.engine_memory = engine_memory
        self._state = StateReporter(context, live_facts, by_priority=rules is not None and rules.enabled)
        self._idle_batches = idle_batches
        self._depth = max(int(overlap), context.limits.num_stages - 1)
        self._step = 0
        self.under_way: deque[StepHandle] = deque()
        self._audited = True
        self._found: list[str] = []
        self._retry_after = RetryAfterEstimator(context.clock)
        self._times = LoopTimes()
        self.heartbeat = heartbeat or Heartbeat(context.clock)
        self.paused = False
        self._profiler = Profiler(profile_name)
        self._extractor = RequestExtractor(context)
        self._stopping = False

    def run(self) -> None:
        """Run turns until shutdown; sleeps while there is nothing to compute and nothing is posted."""
        self._times.begin()
        while not self._stopping:
            self.heartbeat.begin()
            computed = self.step()
            self.heartbeat.end(computed=computed)
            if not computed and not self._stopping:
                timer_s = None if self.kv is None else self.kv.sessions.next_timer_s()
                waiting = (self.kv is not None and not self.kv.quiet) or (
                    self.context.limits.has_timeouts and bool(self.role.live)
                )
                waiting = waiting or (self.context.tier is not None and self.context.tier.has_work)
                waiting = waiting or (self._switcher is not None and self._switcher.is_pending)
                waiting = waiting or (self.engine_memory is not None and self.engine_memory.is_pending)
                waiting = waiting or (self.weights is not None and self.weights.is_pending)
                self._times.enter("idle")
                self.inputs.wait(0.05 if waiting else timer_s or _IDLE_WAIT_S)
        while self.under_way:
            self.context.executor.resolve(self.under_way.popleft())
        if self._idle_batches is not None:
            self._idle_batches.run_idle_until_all_stop(self._step, self.context.executor, self.inputs)

    def step(self) -> bool:
        """Run one turn; True when a step was launched or was under way.

        With overlap, the next step is planned and launched before the results of the last one are taken. With S
        pipeline stages up to S - 1 steps stay under way.
        """
        times = self._times
        times.enter("recv_requests")
        events = self.inputs.drain()
        if events:
            times.enter("process_input_requests")
            for event in events:
                self._handle(event)
        times.enter("process_queue")
        if self.kv is not None:
            self.kv.tick()
        if self.context.tier is not None:
            self.context.tier.poll()
        self.role.poll()
        if self._switcher is not None and self._switcher.is_pending:
            self._switch_role(self._switcher)
        if self.engine_memory is not None and self.engine_memory.is_pending:
            self.poll_memory(self.engine_memory)
        if self.weights is not None and self.weights.is_pending:
            self.weights.poll(self)
        was_under_way = bool(self.under_way)
        if was_under_way and self.role.needs_sync:
            self.process_all_results()
        times.enter("get_next_batch_to_run")
        plan = None if self.paused or self._stopping else self.role.plan(self._step + 1)
        times.enter("other")
        self.context.outbox.flush()
        if plan is None and self._idle_batches is not None:
            plan = self._idle_batches.plan(self._step + 1)
        if (plan is not None or was_under_way) and self.kv is not None:
            self.kv.flush()
        if plan is not None:
            self.under_way.append(self._launch(plan))
        if len(self.under_way) > (self._depth if plan is not None else 0):
            self._process_result()
        self.context.outbox.flush()
        self.context.memory.flush_changes()
        if self._load_reporter is not None:
            computed = plan is not None or was_under_way
            self._load_reporter.report(self.role, self.context, self._times, self._gated, sleeps=not computed)
        if not self._audited and self.is_idle:
            times.enter("sanity_check_cache")
            self._audit_at_idle()
            times.enter("other")
        return plan is not None or was_under_way

    def _switch_role(self, switcher: RoleSwitcher) -> None:
        """Take the new role if nothing is live or under way. What is kept for the old one must be free by then."""
        opened = switcher.run(self.is_idle, self.kv)
        if opened is not None:
            self.begin_role(opened)
            switcher.finish()

    def begin_role(self, opened: OpenedRole) -> None:
        """Compute in a role that was opened for it."""
        self.role, self.kv = opened.role, opened.kv
        self.facts, self._audited = dict(opened.facts), False
        self._evictions = self._eviction_order()
        self._profiler.name = opened.profile_name

    def _eviction_order(self) -> EvictionOrder | None:
        rules = self._rules
        evicts = rules is not None and rules.enabled and self._max_queued is not None
        return EvictionOrder(rules, self.role.is_queued) if rules is not None and evicts else None

    def audit(self) -> list[str]:
        """Return one sentence for each page, row, aux slot or room whose owner is missing, duplicate, or ended."""
        return audit_holds(self.context, self.role, self.kv, idle=self.is_idle, in_flight=bool(self.under_way))

    @property
    def is_idle(self) -> bool:
        """Whether no request is live, and no step, copy or transfer is under way."""
        copies = self.context.tier is not None and self.context.tier.num_copies > 0
        return not self.role.live and not self.under_way and not copies and (self.kv is None or self.kv.quiet)

    def _audit_at_idle(self) -> None:
        self._audited = True
        self._record(self.audit())

    def _record(self, found: list[str]) -> None:
        self._found = found
        for sentence in found:
            self.context.counters["audit_differences"] += 1
            log.error("self-audit: %s", sentence)

    def _launch(self, plan: BatchPlan) -> StepHandle:
        self._step, self._audited = plan.step, False
        self._times.enter("run_batch")
        self._times.launch(self.role.step_kind if plan.rows else None)
        layer_events = self.context.limits.layer_groups > 0 and bool(plan.rows)
        handle = self.context.executor.launch(plan, layer_events=layer_events)
        self.context.launched(plan.step)
        self._times.enter("other")
        if plan.rows:
            self.role.launched(handle)
        return handle

    def process_all_results(self) -> None:
        """Take the results of all steps under way."""
        while self.under_way:
            self._process_result()

    def _process_result(self) -> None:
        """Take the results of the oldest step."""
        handle = self.under_way.popleft()
        self._times.enter("run_batch")
        result = self.context.executor.resolve(handle)
        self._times.resolve()
        self._times.enter("process_batch_result")
        self.context.resolved(handle.plan.step)
        if self._profiler.steps_left is not None:
            self._profiler.step()
        self._end_failed(handle.plan, result)
        if handle.plan.rows:
            self.role.commit(handle.plan, result)
            self._state.computed()
        self._times.enter("other")

    def _end_failed(self, plan: BatchPlan, result: StepResult) -> None:
        """End the requests whose grammar failed in this step; their tokens of this step are discarded."""
        for row in [plan.rows[index] for index in result.failed]:
            req = self.role.live.get(row.rid)
            if req is not None and req.row == row.row:
                self.context.counters["grammars_failed"] += 1
                self.role.end(req, GRAMMAR_FAILED if req.spec.sampling.processor is None else PROCESSOR_FAILED)

    def state(self) -> EngineState:
        """Return the snapshot behind `/get_server_info` and `/metrics`."""
        return self._state.state(self.role, self.kv, self._times, self._gated, self.facts, self._found)

    @property
    def _gated(self) -> int:
        return 0 if self._num_gated is None else self._num_gated()

    def _handle(self, event: Event) -> None:
        if isinstance(event, WeightsCommand | MemoryCommand):
            self._audited = False
            if isinstance(event, MemoryCommand):
                self.command_memory(event)
            elif not self.refuses_update(event):
                self.update_weights(event)
            return
        match event:
            case GenerateRequest():
                if self.weights is None or not self.weights.takes(event, self):
                    self.admit_request(event)
            case AbortRequest():
                if self.weights is not None:
                    self.weights.aborted(event, self)
                self.abort_requests(event)
            case ExtractRequest():
                self.context.outbox.send(self._extract(event))
            case KVPart():
                self._extractor.arrived(event)
            case StateQuery(query_id=query_id, audit=audit):
                if audit:
                    self._record(self.audit())
                self.context.outbox.send(StateReply(query_id=query_id, state=self.state()))
            case (
                FlushCache()
                | ClearStorage()
                | PauseGeneration()
                | ContinueGeneration()
                | StartProfile()
                | StopProfile()
                | DeclarePeerDead()
                | LoadLora()
                | UnloadLora()
            ):
                ok, message = self._obey(event)
                self.context.outbox.send(CommandReply(query_id=event.query_id, ok=ok, message=message))
            case MigrateOut() | EndMigration() | SendPrefix():
                self._audited = False
                self.role.migrate(event)
            case RedirectReceiver() if self.kv is None and self.engine_memory is not None:
                pass  # of a room that ended before memory was released
            case RedirectReceiver(room=room, input_ids=input_ids, replica=replica, lora=lora):
                assert self.kv is not None, "a monolith has no rooms"
                adapter = "" if lora is None else self.context.adapter_digest(lora)
                self.kv.redirect(room, prompt_digest(input_ids, adapter), replica)
            case SwitchRole():
                if self._switcher is None or (self.engine_memory is not None and self.engine_memory.released):
                    reply = CommandReply(query_id=event.query_id, ok=False, message="the role of this engine is fixed")
                    self.context.outbox.send(reply)
                else:
                    self._switcher.accept(event)
            case PrepareLora(name=name, path=path):
                self.context.prepare_adapter(name, path)
            case Shutdown():
                self._stopping = True
            case Woken():
                pass
            case _:
                assert self.kv is not None, f"{event} without a transfer manager"
                self.kv.handle(event)

    def admit_request(self, spec: GenerateRequest, *, again: bool = False) -> None:
        """Admit a new request, or `again` one that was admitted before and withdrawn: it has its place in the queue."""
        try:
            if self.engine_memory is not None:
                self.engine_memory.require()
            if spec.rid in self.role.live:
                raise RequestError(f"rid {spec.rid!r} is in use", field="rid", status=409, code="rid_in_use")
            displaced = None
            if not again and self._is_full() and (displaced := self._displaced_by(spec)) is None:
                raise RequestError(
                    "The waiting queue is full.",
                    status=503,
                    code="queue_full",
                    retry_after_s=self._retry_after.retry_after_s(self._num_ended()),
                )
            self._retry_after.sample(self._num_ended())
            self._audited = False
            req = Req(spec, Times(arrived=self.context.clock.now()), output_ids=list(spec.prior_output_ids))
            if spec.lora is not None:
                self.context.give_adapter(req, spec.lora)
                check_adapter(req)
            self._extractor.admit(req, self.role.admit)
            self.context.look_up(req)
            log_admitted(spec)
            self.context.counters[PROBES if spec.probe else "requests"] += not again
            if displaced is not None:
                self.context.counters["requests_evicted"] += not displaced.spec.probe
                retry_after_s = self._retry_after.retry_after_s(self._num_ended())
                self.role.end(displaced, msgspec.structs.replace(EVICTED, retry_after_s=retry_after_s))
            if self._evictions is not None:
                self._evictions.add(req, self.role.num_waiting)
        except RequestError as error:
            self.context.counters["requests_refused"] += not spec.probe
            self._extractor.forget(spec.rid)
            self.refuse(spec, Failure.from_error(error))

    def _displaced_by(self, spec: GenerateRequest) -> Req | None:
        return None if self._evictions is None else self._evictions.displaced_by(spec)

    def abort_requests(self, abort: AbortRequest) -> None:
        live = self.role.live
        rids = list(live) if abort.rid is None else [abort.rid]
        failure: Failure | None = CLIENT_ABORT if abort.reason == "abort" else None
        if abort.rid is not None:
            self._extractor.forget(abort.rid)
        for req in [live[rid] for rid in rids if rid in live]:
            self.context.counters["requests_aborted"] += failure is not None and not req.spec.probe
            self.role.end(req, failure)

    def _extract(self, event: ExtractRequest) -> ExtractReply:
        """Take the state of a request; without `keep` the request ends here."""
        self.process_all_results()
        req = self.role.live.get(event.rid)
        if req is None:
            return ExtractReply(query_id=event.query_id, rid=event.rid, failure=NOT_LIVE)
        if self.role.is_moving(req):
            return ExtractReply(query_id=event.query_id, rid=event.rid, failure=MOVING)
        reply = self._extractor.extract(event.query_id, req, with_kv=event.with_kv)
        if not event.keep:
            self.context.counters["requests_suspended"] += 1
            self.role.end(req, None, SUSPENDED)
        self.context.outbox.flush()
        return reply

    def _obey(self, command: EngineCommand) -> tuple[bool, str]:
        """Run a command; returns whether it succeeded, and a message."""
        match command:
            case FlushCache():
                return self._flush_cache()
            case ClearStorage():
                return self.context.clear_storage()
            case PauseGeneration(mode=mode):
                return self._pause(mode)
            case ContinueGeneration():
                self.paused = False
                return True, "Generation continued successfully."
            case StartProfile():
                return self._profiler.start(command)
            case StopProfile():
                return self._profiler.stop()
            case LoadLora() | UnloadLora():
                return self.context.change_adapters(command)
            case DeclarePeerDead(instance=instance):
                if self.kv is None or not self.kv.declare_dead(instance):
                    return False, f"there is no peer {instance!r}"
                return True, f"the session with {instance} is closed, and the pages it could write to are free"

    def _pause(self, mode: PauseMode) -> tuple[bool, str]:
        self.paused = True
        self.process_all_results()
        if mode == "abort":
            self.abort_requests(AbortRequest(rid=None))
        elif mode == "retract":
            self.role.retract_all()
        return True, "Generation paused successfully."

    def _flush_cache(self) -> tuple[bool, str]:
        """Empty the prefix cache unless a request holds pages. Requests that a pause has retracted hold none."""
        holding = sum(not self.paused or req.lease is not None for req in self.role.live.values())
        if holding:
            return False, f"{holding} requests are running"
        if self.context.speculation is not None:
            self.context.speculation.forget_past()
        num_dropped = self.context.memory.flush()
        self.context.flush_tier()
        return True, f"{num_dropped} cached pages were dropped"

    def _num_ended(self) -> int:
        withdrawn = 0 if self.weights is None else self.weights.num_withdrawn
        return self.context.counters["requests"] + self.context.counters[PROBES] - len(self.role.live) - withdrawn

    def _is_full(self) -> bool:
        """True when `max_queued` requests wait beyond those that free rows will take."""
        return (
            self._max_queued is not None
            and self.role.num_waiting >= self._max_queued + self.context.memory.table.num_free
        )
