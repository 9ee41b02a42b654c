"""The decode role: takes a prompt's KV and first token from a prefill server and generates the rest.

prealloc     a receiver is open; waits for the session with the prefill server, then for pages and an aux slot
   v
transfer     pages are published (hold `remote`); waits for the bytes
   v
waiting      KV and first token are here; waits for a row. No forward is needed: the first batch is prebuilt
   v
running      one token a step
"""

from __future__ import annotations

from collections import deque

from pdserve.errors import RequestError
from pdserve.executor.interface import BatchPlan, SampledToken, StepResult
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import FinishReason, RequestTiming
from pdserve.scheduler.core import Core, Running, plan_of
from pdserve.scheduler.req import Req, finish_for_failure
from pdserve.scheduler.roles.monolith import check_fits
from pdserve.scheduler.roles.prefill import LOST
from pdserve.transfer.manager import KVManager
from pdserve.transfer.state import KVPoll
from pdserve.transfer.wire import prompt_digest

WRONG_ROOM = Failure(code="metadata_mismatch", message="the metadata that came is of another room")


class DecodeRole:
    """Owns all four queues. Reserves a request's worst case when it publishes pages."""

    def __init__(self, core: Core, kv: KVManager) -> None:
        self._core = core
        self._kv = kv
        self._prealloc: dict[str, Req] = {}
        self._transfer: dict[str, Req] = {}
        self._waiting: deque[Req] = deque()
        self._running = Running(core)
        self.live: dict[str, Req] = {}

    def admit(self, req: Req) -> None:
        """See `Role.admit`."""
        room = req.spec.room
        if room is None:
            raise RequestError("a decode server needs bootstrap_room", field="bootstrap_room")
        check_fits(self._core, req.num_worst)
        address = (room.host, room.port or 0)
        req.receiver = self._kv.open_receiver(room.room, address, prompt_digest(req.spec.input_ids))
        self.live[req.rid] = req
        self._prealloc[req.rid] = req

    def poll(self) -> None:
        """Publish pages where there is memory, take what has landed, seat what waits."""
        blocked = False
        for req in list(self._prealloc.values()):
            assert req.receiver is not None
            state = req.receiver.poll()
            if state is KVPoll.FAILED:
                self.end(req, req.receiver.failure or LOST)
            elif state is KVPoll.WAITING_FOR_INPUT and not blocked:
                blocked = not self._publish(req)
        for req in list(self._transfer.values()):
            assert req.receiver is not None
            state = req.receiver.poll()
            if state is KVPoll.FAILED:
                self.end(req, req.receiver.failure or LOST)
            elif state is KVPoll.SUCCESS:
                self._receive(req)
        while self._waiting and self._core.memory.table.num_free:
            req = self._waiting.popleft()
            self._core.seat(req)
            self._running.add(req)

    def plan(self, step: int) -> BatchPlan | None:
        """One token for each running request."""
        return plan_of(step, self._running.plan())

    def commit(self, plan: BatchPlan, result: StepResult) -> None:
        """Append the tokens."""
        for row, token in zip(plan.rows, result.tokens, strict=True):
            req = self.live[row.rid]
            assert token is not None
            finish = self._running.commit(req, token)
            timing = self._timing(req) if finish or len(req.output_ids) == 2 else None
            self._core.outbox.emit(req, (token,), finish, timing)
            if finish is not None:
                self._leave(req)

    def end(self, req: Req, failure: Failure | None) -> None:
        """See `Role.end`."""
        assert req.receiver is not None
        req.receiver.abort(failure or Failure(code="stopped", message="the request was stopped", status=499))
        self._leave(req)
        finish = FinishReason(type="stop") if failure is None else finish_for_failure(failure)
        self._core.outbox.emit(req, (), finish, self._timing(req))

    def queues(self) -> dict[str, int]:
        """See `Role.queues`."""
        return {
            "num_queue_reqs": len(self._waiting),
            "num_running_reqs": len(self._running.reqs),
            "num_decode_prealloc_queue_reqs": len(self._prealloc),
            "num_decode_transfer_queue_reqs": len(self._transfer),
        }

    def _publish(self, req: Req) -> bool:
        """Take memory for the request and tell prefill where to write; False when there is too little."""
        memory = self._core.memory
        if memory.aux.num_free == 0:
            return False
        lease = memory.reserve_tokens(req.num_worst)
        aux = memory.aux.reserve(1) if lease is not None else None
        if lease is None or aux is None:
            return False
        req.lease, req.aux = lease, aux
        assert req.receiver is not None
        req.times.published = self._core.clock.now()
        req.receiver.publish(lease, aux)
        del self._prealloc[req.rid]
        self._transfer[req.rid] = req
        return True

    def _receive(self, req: Req) -> None:
        """The KV and the first token have landed."""
        assert req.receiver is not None and req.aux is not None
        record = req.receiver.take(req.aux)
        if record is None:
            self.end(req, WRONG_ROOM)
            return
        del self._transfer[req.rid]
        req.times.received = self._core.clock.now()
        req.aux.drop("request")
        req.aux = None
        req.receiver.close()
        req.computed = req.num_prompt
        token = SampledToken(record.first_token, record.logprob, record.top)
        finish = self._core.append(req, token)
        self._core.outbox.emit(req, (token,), finish, self._timing(req))
        if finish is not None:
            self._leave(req)
        else:
            self._waiting.append(req)

    def _leave(self, req: Req) -> None:
        assert req.receiver is not None
        req.receiver.close()
        self._prealloc.pop(req.rid, None)
        self._transfer.pop(req.rid, None)
        self._running.reqs.pop(req.rid, None)
        if req in self._waiting:
            self._waiting.remove(req)
        del self.live[req.rid]
        self._core.release(req)

    def _timing(self, req: Req) -> RequestTiming:
        """The time to the first token, in parts that add up to it."""
        times = req.times
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
