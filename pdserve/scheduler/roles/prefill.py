"""The prefill role: computes the prompt and exactly one token, and sends KV and token to decode.

bootstrap    a sender is open; waits until the decode server has published its pages
   v         with `--optimistic-prefill-attempts` a prompt may be computed meanwhile, see `optimistic`
waiting      waits for memory, a row and an aux slot
   v
active       chunks are computed; the whole pages of each chunk are sent at once
   v
inflight     all is computed; waits until every byte has arrived. The row is free; the holds `request` and `send` keep
             the pages, and `send` drops first
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import msgspec

from pdserve.errors import RequestError
from pdserve.executor.interface import BatchPlan, BatchRow, SampledToken, StepHandle, StepResult
from pdserve.protocol.engine_state import WaitsFor
from pdserve.protocol.failure import Failure
from pdserve.protocol.logprobs import PromptLogprobs
from pdserve.protocol.messages import FinishReason, RequestTiming
from pdserve.scheduler.batch_planner import BatchPlanner
from pdserve.scheduler.context import SchedulerContext, validate_fits
from pdserve.scheduler.kv_checksum import KVChecksum
from pdserve.scheduler.request import Req, WaitingQueue
from pdserve.scheduler.roles.base import (
    INJECTED,
    LOST,
    STOP_STRING,
    STOPPED,
    BaseRole,
    PollFailures,
    Queued,
    TransferPhase,
    refuse_incoming,
)
from pdserve.scheduler.roles.optimistic import ComputedPrompt, OptimisticLimits, OptimisticPrefill
from pdserve.transfer.aux import MAX_FIRST_DRAFTS, AuxRecord
from pdserve.transfer.manager import KVManager
from pdserve.transfer.room import KVPoll
from pdserve.transfer.wire import TransferStats, prompt_digest


class PrefillRole(BaseRole):
    """Owns the bootstrap and inflight queues; `BatchPlanner` owns waiting and active."""

    def __init__(
        self,
        context: SchedulerContext,
        kv: KVManager,
        waiting: WaitingQueue,
        kv_checksum: KVChecksum | None = None,
        *,
        optimistic: OptimisticLimits | None = None,
    ) -> None:
        """`kv_checksum` hashes the KV that is sent; None: no checksums.

        `optimistic` None: no prompt is computed before its decode server has published its pages.
        """
        planner = BatchPlanner(
            context, waiting, lambda req, without: 0.0, prefill_only=True, num_proposals=self._num_first_drafts
        )
        super().__init__(context, planner)
        self._kv_checksum = kv_checksum
        self._kv = kv
        self._poll_failures = PollFailures(kv.args.poll_failures, kv.args.secret)
        self._waiting = waiting
        self._bootstrap: dict[str, Req] = {}
        self._optimistic = OptimisticPrefill(context, planner, self._bootstrap, optimistic or OptimisticLimits())
        self._inflight: dict[str, Req] = {}
        self._rooms: dict[int, Req] = {}

    def admit(self, req: Req) -> None:
        """See `SchedulerRole.admit`."""
        room = req.spec.room
        if room is None:
            raise RequestError("a prefill server needs bootstrap_room", field="bootstrap_room")
        refuse_incoming(req)
        validate_fits(self._context, req.num_input_tokens)
        digest = prompt_digest(req.spec.given_ids, req.adapter_digest)
        req.sender = self._kv.open_sender(room.room, room.host, digest, req.num_input_tokens)
        self.live[req.rid] = req
        self._rooms[room.room] = req
        self._bootstrap[req.rid] = req

    @property
    def num_waiting(self) -> int:
        """See `SchedulerRole.num_waiting`."""
        return len(self._bootstrap) + len(self._waiting)

    def is_queued(self, req: Req) -> bool:
        """See `SchedulerRole.is_queued`."""
        return req.rid in self._bootstrap or req in self._waiting

    def _may_withdraw(self, req: Req) -> bool:
        """See `BaseRole`. Early prompts are computed again. The pages of a decode server are known to one room only."""
        assert req.sender is not None
        is_waiting = req.rid in self._bootstrap or req in self._optimistic
        return is_waiting and req.sender.key is None and req.sender.poll() is KVPoll.BOOTSTRAPPING

    def poll(self) -> None:
        """Move requests whose bootstrap room is bound to waiting; end requests whose transfer has ended."""
        for room in self._kv.drain_state_changes(sending=True):
            req = self._rooms[room]
            assert req.sender is not None
            state = req.sender.poll()
            if state is KVPoll.FAILED:
                self.end(req, req.sender.failure or LOST)
            elif self._poll_failures.hits(req, state):
                self.end(req, INJECTED)
            elif state is KVPoll.SUCCESS and req.rid in self._inflight:
                self._succeed(req)
            elif state is KVPoll.WAITING_FOR_INPUT and req.times.peer_ready is None:
                req.times.peer_ready = self._context.clock.now()
                self._bound(req)
        self._end_timed_out()

    def plan(self, step: int) -> BatchPlan | None:
        """See `SchedulerRole.plan`."""
        self._optimistic.offer()
        plan = super().plan(step)
        self._optimistic.withdraw()
        return plan

    def launched(self, handle: StepHandle) -> None:
        """With layer events, send the pages that this step completes, one layer range at a time."""
        if handle.layer_events is None:
            return
        num_layers, num_groups = self._context.memory.layout.num_layers, self._context.limits.layer_groups
        ends = sorted({-(-num_layers * (i + 1) // num_groups) for i in range(num_groups)})
        layers = [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        for row in handle.plan.rows:
            req = self.live[row.rid]
            if req in self._optimistic:
                continue
            assert req.sender is not None and req.lease is not None
            req.sender.send(req.lease, self._num_whole_pages(req, row.end), layers, handle.layer_events)

    def commit(self, plan: BatchPlan, result: StepResult) -> None:
        """Send the pages that became whole; after the last chunk also the rest of the pages and the first token."""
        for index, (row, token) in enumerate(zip(plan.rows, result.tokens, strict=True)):
            req = self.live.get(row.rid)
            if req is None or req.row != row.row:
                continue
            assert req.sender is not None and req.lease is not None
            if index in result.prompts:
                self._send_logprobs(req, result.prompts[index])
            if index in result.hidden:
                self._context.outbox.emit_hidden(req, result.hidden[index])
            complete = self._batch_planner.prefilling.committed(req, row.end)
            is_early = req in self._optimistic
            if not complete:
                if not is_early:
                    self._send_pages(req, row.end)
                continue
            assert token is not None
            req.times.prefilled = self._context.clock.now()
            prompt = ComputedPrompt(token)
            if is_early or req.sender.sends_drafts:
                hidden = self._context.executor.draft_hidden(row.row)
                prompt = ComputedPrompt(token, result.drafts.get(index, ()), hidden)
            self._context.release_row(req)
            if is_early:
                self._optimistic.hold(req, prompt)
            else:
                self._finish(req, prompt)

    def end(self, req: Req, failure: Failure | None, finish: FinishReason = STOP_STRING) -> None:
        """See `SchedulerRole.end`. Prefill matches no stop strings, so an end without a failure is an abort."""
        super().end(req, failure or STOPPED)

    def retract_all(self) -> None:
        """See `SchedulerRole.retract_all`: does nothing, because the pages of a started prompt are being sent."""

    def members(self) -> Mapping[str, Queued]:
        """See `SchedulerRole.members`."""
        return {
            "num_queue_reqs": self._waiting,
            "num_running_reqs": self._batch_planner.prefilling.active.values(),
            "num_prefill_bootstrap_queue_reqs": [*self._bootstrap.values(), *self._optimistic.held],
            "num_prefill_inflight_queue_reqs": self._inflight.values(),
        }

    def waits_for(self, req: Req) -> WaitsFor:
        """See `SchedulerRole.waits_for`."""
        if req.rid in self._bootstrap or self._optimistic.holds(req):
            return "peer"
        return "transfer" if req.rid in self._inflight else "compute"

    def facts(self) -> dict[str, float]:
        """See `SchedulerRole.facts`."""
        return self._prefilling_facts() | self._optimistic.facts()

    def _bound(self, req: Req) -> None:
        """Send what is computed of a request whose decode server has published its pages, or let it wait for its
        turn.
        """
        if req not in self._optimistic:
            del self._bootstrap[req.rid]
            self._waiting.add(req)
            return
        prompt = self._optimistic.bound(req)
        if prompt is None:
            self._send_pages(req, req.computed)
        else:
            self._finish(req, prompt)

    def _send_pages(self, req: Req, end: int) -> None:
        """Send the whole pages of the first `end` tokens, which are computed, without those sent before."""
        assert req.sender is not None and req.lease is not None
        num_pages = self._num_whole_pages(req, end)
        if self._kv_checksum is not None:
            self._kv_checksum.computed(req, num_pages)
        req.sender.send(req.lease, num_pages)

    def _finish(self, req: Req, prompt: ComputedPrompt) -> None:
        """Send the pages that are left, and the first token."""
        assert req.sender is not None and req.lease is not None and req.aux is not None and req.spec.room is not None
        token, num_pages = prompt.token, self._num_whole_pages(req, req.num_input_tokens)
        if self._kv_checksum is not None:
            self._kv_checksum.computed(req, num_pages)
        req.first_token = token
        self._context.append(req, token)
        record = AuxRecord(
            room=req.spec.room.room,
            attempt=0,
            first_token=token.token_id,
            cached_tokens=req.num_cached,
            cached_details=req.cached_details,
            logprob=token.logprob,
            top=token.top,
        )
        if req.sender.sends_drafts:
            record = dataclasses.replace(record, drafts=prompt.drafts, draft_hidden=prompt.draft_hidden)
        if token.picked:
            req.sender.send_logprobs(PromptLogprobs.of_token(req.num_prompt, token.picked))
        req.sender.finish(req.aux, record, self._sent_stats(req), lease=req.lease, num_pages=num_pages)
        self._inflight[req.rid] = req

    def _send_logprobs(self, req: Req, part: PromptLogprobs) -> None:
        """Send log probabilities of a part of the prompt to the client, and to decode where its client wants them."""
        assert req.sender is not None and req.spec.logprobs is not None
        self._context.outbox.emit_prompt(req, part)
        if req.spec.logprobs.to_decode:
            req.sender.send_logprobs(part)

    def _num_first_drafts(self, rows: Sequence[BatchRow]) -> int:
        """Return how many drafts behind the first tokens of `rows` the drafter shall propose: decode verifies them in
        its first step. 0: no request is sent to a server with an equal drafter, or none wants drafts.
        """
        speculation = self._context.speculation
        if speculation is None:
            return 0
        reqs = [self.live[row.rid] for row in rows if row.sample and row.rid in self.live]
        takes = (speculation.may_draft(req) and self._may_send_drafts(req) for req in reqs)
        return min(speculation.max_drafts, MAX_FIRST_DRAFTS) if any(takes) else 0

    def _may_send_drafts(self, req: Req) -> bool:
        """True when the drafts of the request are sent, or when its decode server is not known yet."""
        return req in self._optimistic or (req.sender is not None and req.sender.sends_drafts)

    def _num_whole_pages(self, req: Req, end: int) -> int:
        """Pages whose tokens are all computed once tokens `[0, end)` are."""
        memory = self._context.memory
        return memory.num_pages(end) if end >= req.num_input_tokens else memory.layout.whole_pages(end)

    def _succeed(self, req: Req) -> None:
        self._leave(req)
        tokens: tuple[SampledToken, ...] = () if req.first_token is None else (req.first_token,)
        stats = self._stats(req)
        assert req.sender is not None
        sent, prefilled, ready = req.sender.stats, req.times.prefilled, req.times.peer_ready
        timing = RequestTiming(
            queue_s=stats.queue_s,
            bootstrap_s=stats.bootstrap_s,
            prefill_s=stats.prefill_s,
            transfer_s=None
            if prefilled is None or ready is None
            else self._context.clock.now() - max(prefilled, ready),
            kv_bytes=sent.num_bytes,
            kv_pages=sent.num_pages,
            kv_transfer_s=sent.write_s,
            chunks=req.chunks,
        )
        self._context.outbox.emit(req, tokens, FinishReason(type="length", length=1), timing)

    def _transfer_phase(self, req: Req) -> TransferPhase:
        return "bootstrap" if req.rid in self._bootstrap or req in self._optimistic else "transfer"

    def _abort_transfer(self, req: Req, failure: Failure | None) -> None:
        assert req.sender is not None and failure is not None
        req.sender.abort(failure)

    def _leave_queues(self, req: Req) -> None:
        assert req.sender is not None and req.spec.room is not None
        req.sender.close()
        del self._rooms[req.spec.room.room]
        if self._kv_checksum is not None:
            self._kv_checksum.forget(req)
        self._bootstrap.pop(req.rid, None)
        self._optimistic.forget(req)
        self._inflight.pop(req.rid, None)

    def _running_since_s(self, req: Req) -> float | None:
        """See `BaseRole`. A computed prompt whose pages are being sent no longer runs."""
        return req.times.started if req.times.prefilled is None else None

    def _timing(self, req: Req) -> RequestTiming | None:
        """Return None: only a successful request has timing, see `_succeed`."""
        return None

    def _sent_stats(self, req: Req) -> TransferStats:
        stats = self._stats(req)
        return (
            stats
            if self._kv_checksum is None
            else msgspec.structs.replace(stats, kv_checksum=self._kv_checksum.sent(req))
        )

    def _stats(self, req: Req) -> TransferStats:
        """Return the durations after which decode's pages were known: what was computed before that cost no time."""
        times = req.times
        if times.peer_ready is None or times.started is None or times.prefilled is None:
            return TransferStats()
        return TransferStats(
            bootstrap_s=times.peer_ready - times.arrived,
            queue_s=max(0.0, times.started - times.peer_ready),
            prefill_s=max(0.0, times.prefilled - max(times.started, times.peer_ready)),
        )
