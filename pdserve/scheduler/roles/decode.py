"""The decode role: receives a prompt's KV and first token from a prefill server and generates the other tokens.

prealloc     a receiver is open; waits for the session with the prefill server, then for pages and an aux slot
   v
transfer     pages are published (hold `remote`); waits for the bytes
   v
waiting      KV and first token have arrived; waits for a row. The request needs no prefill step
   v
running      one token a step; memory grows page by page
   v ^
retracted    released its memory when memory ran out; resumes before any new request publishes pages, unless priority
             scheduling puts that one first. Its KV comes from host memory or is computed again here.
             A request whose KV transfer failed is queued here too, with load failure policy `recompute`. It gets new
             pages: the published ones stay held by `remote` as long as the peer may write there.

A received request takes a row when it joins the decode batch, so a full batch never delays prefill. A retracted request
takes a row when it resumes, before its remaining tokens are computed (`PrefillManager`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterator, Mapping

from pdserve.config.groups import LoadFailurePolicy
from pdserve.errors import RequestError
from pdserve.executor.interface import BatchPlan, SampledToken
from pdserve.memory.slot_stamp import SlotStamp
from pdserve.protocol.cached_tokens import CachedTokensDetails
from pdserve.protocol.engine_state import WaitsFor
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import MigrationCommand, RequestTiming
from pdserve.scheduler.batch_planner import BatchPlanner
from pdserve.scheduler.context import SchedulerContext, validate_fits
from pdserve.scheduler.kv_checksum import KVChecksum
from pdserve.scheduler.preemption import Preemption
from pdserve.scheduler.request import Req, WaitingQueue
from pdserve.scheduler.roles.base import (
    INJECTED,
    LOST,
    STOPPED,
    WRONG_RECORD,
    WRONG_STATE,
    MixedBatchRole,
    PollFailures,
    Queued,
    TransferPhase,
    can_recompute,
    received_timing,
)
from pdserve.scheduler.roles.migration import NO_ROOM, OutgoingMigrations
from pdserve.scheduler.roles.prealloc import DecodeMemory, DecodeReservation, HostLoads
from pdserve.scheduler.step_log import DecodeStepLog
from pdserve.transfer.manager import KVManager
from pdserve.transfer.room import KVPoll
from pdserve.transfer.wire import prompt_digest


class DecodeRole(MixedBatchRole):
    """Owns the prealloc, transfer, waiting and retracted queues; `BatchPlanner` owns the decode batch."""

    def __init__(
        self,
        context: SchedulerContext,
        kv: KVManager,
        ready: WaitingQueue,
        kv_checksum: KVChecksum | None = None,
        *,
        load_failure_policy: LoadFailurePolicy = "fail",
        step_log: DecodeStepLog | None = None,
    ) -> None:
        """`kv_checksum` hashes the KV that arrives; None: no checksums.

        `load_failure_policy`: see `--disaggregation-load-failure-policy`.
        """
        self._memory = DecodeMemory(context, self._held)
        self._loads = HostLoads(context, self._memory.fits)
        self._retracted = ready.for_retracted()
        """Requests whose prompt or output is computed again here."""
        super().__init__(context, BatchPlanner(context, self._retracted, self._headroom_tokens), ready, step_log)
        self._kv_checksum = kv_checksum
        self._recomputes = load_failure_policy == "recompute"
        self._lost: dict[str, Req] = {}
        """Requests whose KV transfer failed and whose prefill has not started here, in the order of the failures."""
        self._kv = kv
        self._poll_failures = PollFailures(kv.args.poll_failures, kv.args.secret)
        self._rooms: dict[int, Req] = {}
        """By bootstrap room, while the room is open."""
        self._prealloc: dict[str, Req] = {}
        self._ready = ready
        """Requests in prealloc that have a session."""
        self._transfer: dict[str, Req] = {}
        self._waiting: dict[str, Req] = {}
        self._migrations = OutgoingMigrations(context, kv, kv_checksum, self._batch_planner, self._leave)

    def admit(self, req: Req) -> None:
        """See `SchedulerRole.admit`."""
        room = req.spec.room
        if room is None and not req.spec.local:
            raise RequestError("a decode server needs bootstrap_room", field="bootstrap_room")
        validate_fits(self._context, req.max_len)
        if room is None:  # it is queued as a request whose KV transfer was lost
            if req.spec.taken_over:
                if len(self._retracted) or not self._batch_planner.prefilling.may_start(req):
                    raise NO_ROOM.error()
                self._context.counters["migrations_in"] += 1
            req.times.lost = req.times.arrived
            self.live[req.rid] = self._lost[req.rid] = req
            self._retracted.add(req, resumed=True)
            return
        address = (room.host, room.port or 0)
        if room.sender is not None:
            address = (f"{room.host} {room.sender.instance}", 0)
            if not self._context.memory.table.num_free:
                raise NO_ROOM.error()
            self._kv.learn_sender(address, room.sender)
        req.num_hidden = req.num_input_tokens  # prefill's answer has the hidden states of these tokens
        digest, logprob_params = prompt_digest(req.spec.given_ids, req.adapter_digest), req.spec.logprobs
        needs_transfer = logprob_params is not None and logprob_params.needs_transfer
        req.receiver = self._kv.open_receiver(room.room, address, digest, takes_logprobs=needs_transfer)
        req.cacheable = not req.receiver.is_fake
        self.live[req.rid] = req
        self._rooms[room.room] = req
        self._prealloc[req.rid] = req

    def is_moving(self, req: Req) -> bool:
        """See `SchedulerRole.is_moving`."""
        return req in self._migrations

    @property
    def num_waiting(self) -> int:
        """See `SchedulerRole.num_waiting`."""
        return len(self._prealloc) + len(self._retracted)

    def is_queued(self, req: Req) -> bool:
        """See `SchedulerRole.is_queued`."""
        return req.rid in self._prealloc

    def _may_withdraw(self, req: Req) -> bool:
        """See `BaseRole`. A failure that `poll` has not taken yet ends the request."""
        return super()._may_withdraw(req) and req.receiver is not None and req.receiver.poll() is not KVPoll.FAILED

    def poll(self) -> None:
        """Publish pages where memory is free, take finished transfers, and give rows to waiting requests."""
        self._take_changed_rooms()
        self._end_the_overdue()
        self._end_timed_out()
        if len(self._ready) and self._may_publish():
            self._publish_ready()
            self._take_changed_rooms()
        self._end_migrations_without_memory()
        self._migrations.poll()
        self._run_received()

    @property
    def needs_sync(self) -> bool:
        """See `SchedulerRole.needs_sync`."""
        return super().needs_sync or (self._migrations.needs_sync and self._batch_planner.is_step_complete)

    def plan(self, step: int) -> BatchPlan | None:
        """See `SchedulerRole.plan`."""
        if self._migrations.needs_sync and self._batch_planner.is_step_complete and self._context.no_step_in_flight:
            self._migrations.stop_due()
        return super().plan(step)

    @property
    def guests(self) -> Collection[str]:
        """See `SchedulerRole.guests`."""
        return self._migrations.prefixes.owners

    def migrate(self, command: MigrationCommand) -> None:
        """See `SchedulerRole.migrate`."""
        req = self.live.get(command.rid)
        self._migrations.handle(command, req, "" if req is None else self._state_of(req))

    def _state_of(self, req: Req) -> str:
        """Name the queue that a request is in."""
        if req.rid in self._batch_planner.running.reqs:
            return "running"
        queues = (("retracted", self._retracted), ("prefilling", self._batch_planner.prefilling.active.values()))
        if name := next((name for name, queue in queues if req in queue), ""):
            return name
        return self.waits_for(req) if req.rid in self._prealloc or req.rid in self._transfer else "waiting for a row"

    def members(self) -> Mapping[str, Queued]:
        """See `SchedulerRole.members`."""
        return {
            "num_queue_reqs": self._waiting.values(),
            "num_running_reqs": self._in_batch(),
            "num_retracted_reqs": self._retracted,
            "num_decode_prealloc_queue_reqs": self._prealloc.values(),
            "num_decode_transfer_queue_reqs": self._transfer.values(),
        }

    def waits_for(self, req: Req) -> WaitsFor:
        """See `SchedulerRole.waits_for`."""
        if req.rid in self._prealloc:
            return "memory" if req in self._ready else "peer"
        return "transfer" if req.rid in self._transfer else "compute"

    def _take_changed_rooms(self) -> None:
        """Process the rooms whose state has changed since the last call."""
        for room in self._kv.drain_state_changes(sending=False):
            req = self._rooms[room]
            assert req.receiver is not None
            state = req.receiver.poll()
            if state is KVPoll.FAILED:
                self._lose(req, req.receiver.failure or LOST)
            elif self._poll_failures.hits(req, state):
                self._lose(req, INJECTED)
            elif state is KVPoll.SUCCESS:
                self._receive(req)
            elif state is KVPoll.WAITING_FOR_INPUT and req.rid in self._prealloc:
                self._ready.add(req)

    def _run_received(self) -> None:
        """Give free rows to requests whose KV has arrived: in the order of arrival, or by priority."""
        self._migrations.resume()
        num_free, received = self._context.memory.table.num_free, self._waiting.values()
        if not num_free or not received:
            return
        if self._ready.rules.enabled:
            chosen = heapq.nsmallest(num_free, received, key=self._ready.key)
        else:
            chosen = list(itertools.islice(received, num_free))
        for req in chosen:
            del self._waiting[req.rid]
            self._context.assign_row(req)
            self._batch_planner.running.add(req)

    def _may_publish(self) -> bool:
        """True when no retracted request waits, or only such that the first request with a session precedes."""
        return not len(self._retracted) or self._is_before_retracted(self._retracted[0])

    def _is_before_retracted(self, retracted: Req) -> bool:
        """True when priority scheduling puts a request that waits for memory before `retracted`."""
        ready = self._ready
        return ready.rules.enabled and len(ready) > 0 and ready.key(ready[0]) < ready.key(retracted)

    def _publish_ready(self) -> None:
        """Publish pages in the order of the schedule policy, until a request finds too little memory.

        Requests of other servers do not wait behind a first request that waits for the host tier or the store.
        """
        reserve = self._memory.to_keep_free()
        self._ready.refresh()
        if self._may_publish():
            self._loads.begin(self._ready)
        while len(self._ready) and self._may_publish() and not self._loads.holds_back(self._ready[0]):
            if not self._publish(self._ready[0], reserve):
                return
            self._ready.remove(self._ready[0])
        if self._may_publish():
            for req in [req for req in self._ready if req.is_incoming]:
                if not self._publish(req, reserve):
                    return
                self._ready.remove(req)

    def _would_preempt(self, preemption: Preemption) -> bool:
        return preemption.is_due or bool(self._victims(preemption))

    def _preempt(self, preemption: Preemption) -> None:
        """Let requests take the place of less urgent running ones: retracted, received, and those without memory."""
        preemption.run()
        while victims := self._victims(preemption):
            self._batch_planner.preempt(victims)
            self._run_received()
            self._publish_ready()

    def _victims(self, preemption: Preemption) -> list[Req]:
        """Return the requests that the first one without a row preempts, else the first one without memory."""
        table, ready = self._context.memory.table, self._ready
        if self._waiting and not table.num_free:
            first = min(self._waiting.values(), key=ready.key)
            if victims := preemption.victims(first, lambda gone: True):
                return victims
        if not len(ready) or not self._may_publish() or self._loads.is_running(ready[0]) or self._memory.fits(ready[0]):
            return []
        return preemption.victims(ready[0], lambda gone: self._memory.fits(ready[0], gone))

    def _end_the_overdue(self) -> None:
        """End requests that wait too long for memory. The transfer manager ends requests without a session at the same
        age.
        """
        latest = self._context.clock.now() - self._context.limits.prealloc_timeout_s
        for req in list(itertools.takewhile(lambda req: req.times.arrived < latest, self._prealloc.values())):
            self.end(req, self._no_memory())

        for req in list(self._lost.values()):
            if req.times.started is not None:
                del self._lost[req.rid]
            elif req.times.lost is not None and req.times.lost < latest:
                self.end(req, self._no_memory())

    def _waiting_since_s(self, req: Req) -> float | None:
        """See `BaseRole`: for the session or memory since the arrival, and for a row since the KV cache arrived."""
        if req.rid in self._prealloc:
            return req.times.arrived
        if req.rid in self._waiting:
            return req.times.received
        return req.times.lost if req.times.started is None else None

    def _running_since_s(self, req: Req) -> float | None:
        """See `BaseRole`."""
        return None if req.rid in self._waiting else req.times.started

    def _end_migrations_without_memory(self) -> None:
        """End the requests that come from another server and find no memory now: they go on there."""
        for req in [req for req in self._ready if req.is_incoming]:
            self.end(req, NO_ROOM)

    def _no_memory(self) -> Failure:
        message = f"no KV pages became free within {self._context.limits.prealloc_timeout_s:g} s"
        return Failure(code="prealloc_timeout", message=message, status=503)

    def _lose(self, req: Req, failure: Failure) -> None:
        """Handle a failed KV transfer: the request ends, or its prompt is computed here."""
        if not self._recomputes or not can_recompute(failure) or req.is_incoming:
            self.end(req, failure)
            return
        assert req.receiver is not None
        self._count_transfer_failure(req)
        req.receiver.abort(failure)
        self._leave_queues(req)
        self._context.leave_device(req)
        req.times.lost = self._context.clock.now()
        self._context.counters["kv_loads_recomputed"] += 1
        self._lost[req.rid] = req
        self._retracted.add(req, resumed=True)

    def _publish(self, req: Req, reserve: DecodeReservation) -> bool:
        """Reserve memory for the request and publish its pages to prefill; False when too little memory is free."""
        lease_and_aux = self._memory.reserve(req, reserve)
        if lease_and_aux is None:
            return False
        req.lease, req.aux = lease, aux = lease_and_aux
        memory = self._context.memory
        self._context.cover_window(req, req.num_input_tokens, req.num_input_tokens)
        assert req.receiver is not None
        req.times.published = self._context.clock.now()
        num_cached = memory.layout.tokens_in(lease.num_prefix_pages)
        req.num_cached = min(num_cached, req.num_prompt)
        self._loads.started(req)
        self._context.counters["decode_cached_tokens"] += num_cached
        if req.receiver.is_fake:
            pages = memory.pages_by_group(lease, req.num_input_tokens, lease.num_prefix_pages)
            self._context.executor.zero(pages)
        req.receiver.publish(lease, aux, num_cached, req.num_input_tokens)
        reserve.add(req)
        del self._prealloc[req.rid]
        self._transfer[req.rid] = req
        return True

    def _receive(self, req: Req) -> None:
        """Take the KV and the first token of a finished transfer."""
        assert req.receiver is not None and req.aux is not None
        record = req.receiver.take(req.aux)
        if record is None:
            self._context.counters["metadata_mismatches"] += 1
            self._lose(req, WRONG_RECORD)
            return
        if not self._has_own_state(req):
            self._context.counters["state_mismatches"] += 1
            self._lose(req, WRONG_STATE)
            return
        damage = None if self._kv_checksum is None else self._kv_checksum.received(req)
        if damage is not None:
            self._lose(req, damage)
            return
        del self._transfer[req.rid]
        self._context.counters["migrations_in"] += req.is_incoming and req.spec.sampling.max_new_tokens > 0
        req.times.received = req.times.started = req.times.prefilled = self._context.clock.now()
        req.aux.drop("request")
        req.aux = None
        self._close(req)
        req.computed = req.planned = req.num_input_tokens
        req.num_cached = min(req.num_cached, req.num_prompt)
        if record.cached_tokens > req.num_cached or (req.cached_details is None and not req.num_cached):
            req.num_cached, req.cached_details = record.cached_tokens, record.cached_details
            if record.cached_details is None and self._context.tier is not None:
                req.cached_details = CachedTokensDetails(device=record.cached_tokens, host=0)
        self._context.cache(req)
        token = SampledToken(record.first_token, record.logprob, record.top, self._take_logprobs(req))
        finish = self._context.append(req, token)
        self._context.outbox.emit(req, (token,), finish, self._timing(req))
        if finish is not None:
            self._leave(req)
            return
        req.draft_hidden = record.draft_hidden
        if record.drafts and self._context.speculation is not None:
            self._context.speculation.received(req, record.drafts)
        self._waiting[req.rid] = req

    def _has_own_state(self, req: Req) -> bool:
        """True when the stamp of the received state names this request and the end of its input; also without state."""
        assert req.lease is not None and req.receiver is not None
        groups = req.lease.groups
        if groups is None or groups.slot is None or req.receiver.is_fake:
            return True
        expected = SlotStamp.of(req.spec.input_ids, req.num_input_tokens)
        return self._context.executor.has_stamp(groups.slot, expected)

    def _take_logprobs(self, req: Req) -> tuple[float, ...]:
        """Emit the prompt's log probabilities that arrived; returns those of the first token, which the aux record
        cannot hold.
        """
        assert req.receiver is not None
        picked: tuple[float, ...] = ()
        for part in req.receiver.take_logprobs():
            if part.start < req.num_prompt:
                self._context.outbox.emit_prompt(req, part)
            else:
                picked = tuple(part.arrays()[-1][0].tolist())
        return picked

    def _headroom_tokens(self, req: Req, without: Collection[str]) -> float:
        """See `Headroom`. Also leaves the memory that a more urgent request without memory needs."""
        tokens = self._memory.to_keep_free(without).tokens
        return tokens + (self._ready[0].num_input_tokens if self._is_before_retracted(req) else 0)

    def _held(self) -> Iterator[Req]:
        """Requests that hold memory and will need more."""
        running, active = self._batch_planner.running.reqs, self._batch_planner.prefilling.active
        received, stopped = self._waiting.values(), self._migrations.stopped
        return itertools.chain(running.values(), active.values(), self._transfer.values(), received, stopped)

    def facts(self) -> dict[str, float]:
        """See `SchedulerRole.facts`. Tokens of prompts whose pages are reserved for KV that has not arrived, and of
        those that wait for pages; seconds since the arrival of the first request that waits for pages alone.
        """
        reserved = sum(req.num_input_tokens for req in self._transfer.values())
        pending, now = sum(req.num_input_tokens for req in self._prealloc.values()), self._context.clock.now()
        waited_s = max((now - req.times.arrived for req in self._ready), default=0.0)
        return super().facts() | {
            "preallocated_tokens": reserved, "pending_prealloc_tokens": pending, "memory_wait_s": waited_s
        }  # fmt: skip

    def _transfer_phase(self, req: Req) -> TransferPhase | None:
        if req.rid in self._prealloc:
            return "bootstrap"
        return "transfer" if req.rid in self._transfer else None

    def _abort_transfer(self, req: Req, failure: Failure | None) -> None:
        if req.receiver is not None:
            req.receiver.abort(failure or STOPPED)

    def _leave_queues(self, req: Req) -> None:
        self._close(req)
        self._migrations.leave(req, None)
        self._prealloc.pop(req.rid, None)
        if req in self._ready:
            self._ready.remove(req)
        self._transfer.pop(req.rid, None)
        self._waiting.pop(req.rid, None)
        self._lost.pop(req.rid, None)

    def _close(self, req: Req) -> None:
        """Close the bootstrap room, whose number may be used again. A local request has none."""
        if req.receiver is None or req.spec.room is None:
            return
        req.receiver.close()
        if self._rooms.get(req.spec.room.room) is req:
            del self._rooms[req.spec.room.room]

    def _timing(self, req: Req) -> RequestTiming:
        return received_timing(req)
