"""The only loop. Each step: take what threads posted, poll transfers, plan, run, commit, send outputs."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pdserve.base.mailbox import Mailbox
from pdserve.errors import RequestError
from pdserve.executor.interface import run
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import (
    AbortRequest,
    EngineState,
    FinishReason,
    FlushCache,
    FlushReply,
    GenerateRequest,
    OutputBatch,
    RequestOutput,
    Shutdown,
    StateQuery,
    StateReply,
    ToScheduler,
)
from pdserve.scheduler.core import Core
from pdserve.scheduler.req import CLIENT_ABORT, Req, Times
from pdserve.scheduler.roles.base import Role
from pdserve.transfer.events import TransferEvent
from pdserve.transfer.manager import KVManager

log = logging.getLogger(__name__)

Event = ToScheduler | TransferEvent
_IDLE_WAIT_S = 60.0


class Scheduler:
    """Joins a role, the shared core and the transfer manager (None in a monolith)."""

    def __init__(
        self,
        role: Role,
        core: Core,
        kv: KVManager | None,
        mailbox: Mailbox[Event],
        *,
        max_queued: int | None = None,
        facts: Mapping[str, str | int | float | bool | None] | None = None,
    ) -> None:
        self.role = role
        self.core = core
        self.kv = kv
        self.mailbox = mailbox
        self._max_queued = max_queued
        self.facts = dict(facts or {})
        self._step = 0
        self._stopping = False

    def run(self) -> None:
        """Step until shut down; sleeps while there is nothing to compute and nothing posted."""
        while not self._stopping:
            if not self.step():
                timer_s = None if self.kv is None else self.kv.sessions.next_timer_s()
                waiting = self.kv is not None and not self.kv.quiet
                self.mailbox.wait(0.05 if waiting else timer_s or _IDLE_WAIT_S)

    def step(self) -> bool:
        """One turn; True when something was computed."""
        for event in self.mailbox.drain():
            self._handle(event)
        if self.kv is not None:
            self.kv.tick()
        self.role.poll()
        plan = self.role.plan(self._step)
        self.core.outbox.flush()
        if plan is not None:
            self._step += 1
            self.role.commit(plan, run(self.core.executor, plan))
        self.core.outbox.flush()
        return plan is not None

    def state(self) -> EngineState:
        """The snapshot behind `/get_server_info` and `/metrics`."""
        queues = self.role.queues()
        memory = self.core.memory.counts() | {"reqs_live": len(self.role.live)}
        counters: dict[str, float] = {name: float(value) for name, value in self.core.counters.items()}
        if self.kv is not None:
            memory |= self.kv.counts()
            counters |= {name: float(value) for name, value in self.kv.counters.items()}
        used = (memory["pages_total"] - memory["pages_free"]) * self.core.memory.layout.page_tokens
        return EngineState(
            queues=queues,
            memory=memory,
            counters=counters,
            facts=self.facts,
            num_running_reqs=queues["num_running_reqs"],
            num_queue_reqs=len(self.role.live) - queues["num_running_reqs"],
            num_used_tokens=used,
            max_total_tokens=self.core.memory.max_tokens,
        )

    def _handle(self, event: Event) -> None:
        match event:
            case GenerateRequest():
                self._admit(event)
            case AbortRequest():
                self._abort(event)
            case StateQuery(query_id=query_id):
                self.core.outbox.send(StateReply(query_id=query_id, state=self.state()))
            case FlushCache(query_id=query_id):
                idle = not self.role.live
                message = "nothing is cached" if idle else f"{len(self.role.live)} requests are running"
                self.core.outbox.send(FlushReply(query_id=query_id, ok=idle, message=message))
            case Shutdown():
                self._stopping = True
            case _:
                assert self.kv is not None, f"{event} without a transfer manager"
                self.kv.handle(event)

    def _admit(self, spec: GenerateRequest) -> None:
        try:
            if spec.rid in self.role.live:
                raise RequestError(f"rid {spec.rid!r} is in use", field="rid", status=409, code="rid_in_use")
            if self._max_queued is not None and self._num_queued() >= self._max_queued:
                raise RequestError(f"{self._max_queued} requests wait already", status=503, code="queue_full")
            self.role.admit(Req(spec, Times(arrived=self.core.clock.now())))
            self.core.counters["requests"] += 1
        except RequestError as error:
            self.core.counters["requests_refused"] += 1
            finish = FinishReason(type="abort", message=error.message, status_code=error.status, err_type=error.code)
            self.core.outbox.send(OutputBatch(outputs=[RequestOutput(rid=spec.rid, token_ids=[], finish=finish)]))

    def _abort(self, abort: AbortRequest) -> None:
        live = self.role.live
        rids = list(live) if abort.rid is None else [abort.rid]
        failure: Failure | None = CLIENT_ABORT if abort.reason == "abort" else None
        for req in [live[rid] for rid in rids if rid in live]:
            self.core.counters["requests_aborted"] += failure is not None
            self.role.end(req, failure)

    def _num_queued(self) -> int:
        return len(self.role.live) - self.role.queues()["num_running_reqs"]
