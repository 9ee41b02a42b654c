"""Device memory of a running engine: weights that are read by name, and memory that goes back to the system.

    ReleaseMemory ──> no request is live ──> no transfer is open ──> all ranks have prepared, or none releases
        ──> kv_cache: sessions end, the transport closes (the role without transfers), the prefix cache is empty
        ──> the memory is free; requests are refused with 503 `memory_released`
    ResumeMemory ──> the memory is taken again ──> kv_cache: the role opens again, with a new transfer manager

Each rank has an `EngineMemory`, and the input log gives all ranks the same command in the same turn. Scheduler thread.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec

from pdserve.base.clock import Clock
from pdserve.errors import ModelError, PdserveError, RankError, RequestError
from pdserve.model.named_weights import NamedRows, joined
from pdserve.protocol.engine_memory import (
    KV_CACHE,
    MEMORY_TAGS,
    WEIGHTS,
    GetWeights,
    MemoryCommand,
    ReleaseMemory,
    ResumeMemory,
    WeightRows,
)
from pdserve.protocol.messages import CommandReply, SwitchRole, ToApi
from pdserve.protocol.weights import InstallWeights, PrepareTensors, PrepareWeights, WeightsCommand
from pdserve.ranks.rank_reports import RankReports
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.role_switcher import OpenedRole, RoleOpener
from pdserve.scheduler.roles.base import SchedulerRole
from pdserve.scheduler.weights_update import WeightsUpdater
from pdserve.transfer.manager import KVManager

log = logging.getLogger(__name__)

RELEASED = "memory_released"
"""Code of the 503 of requests while memory is released; also the fact that lists what is released."""
RETRY_AFTER_S = 5
LOADS = PrepareWeights | PrepareTensors | InstallWeights


class ReleasableMemory(Protocol):
    """One rank's memory; see `executor/device_memory.py`."""

    def read(self, name: str, max_rows: int) -> list[NamedRows]:
        """Return this rank's part of a tensor. Raises ModelError."""
        ...

    def prepare(self, tags: Collection[str]) -> None:
        """Do what can fail before `release`. Raises ModelError."""
        ...

    def cancel(self) -> None:
        """Forget what `prepare` has done."""
        ...

    def release(self, tags: Collection[str]) -> int:
        """Give the memory back; returns its bytes."""
        ...

    def restore(self, tags: Collection[str]) -> None:
        """Take the memory again. Raises ModelError."""
        ...


class ManagedMemory(abc.ABC):
    """Mixin of `Scheduler`: the commands about the engine's memory."""

    role: SchedulerRole
    context: SchedulerContext
    kv: KVManager | None
    weights: WeightsUpdater | None
    engine_memory: EngineMemory | None
    """None: memory is not released, and weights are not read."""
    facts: dict[str, str | int | float | bool | None]

    @abc.abstractmethod
    def begin_role(self, opened: OpenedRole) -> None:
        """Compute in a role that was opened."""

    @abc.abstractmethod
    def process_all_results(self) -> None:
        """Take the results of all steps under way."""

    @property
    @abc.abstractmethod
    def is_idle(self) -> bool:
        """Whether no request is live, and no step, copy or transfer is under way."""

    def command_memory(self, command: MemoryCommand) -> None:
        """Carry out a command about the engine's memory."""
        memory = self.engine_memory
        if memory is None:
            message = "the memory of this engine is not released, and its weights are not read"
            self.context.outbox.send(CommandReply(query_id=command.query_id, ok=False, message=message))
            return
        self.process_all_results()
        match command:
            case GetWeights():
                memory.read(command)
            case ReleaseMemory():
                updates = self.weights is not None and (self.weights.is_pending or self.weights.num_held > 0)
                memory.release(command, len(self.role.live), updates=updates)
            case ResumeMemory():
                self._take_role(memory.resume(command), memory)

    def refuses_update(self, command: WeightsCommand) -> bool:
        """Refuse to load or install weights while those in use are released; returns whether it was refused."""
        memory = self.engine_memory
        if memory is None or WEIGHTS not in memory.released or not isinstance(command, LOADS):
            return False
        message = "the weights are released; resume them before they are updated"
        self.context.outbox.send(CommandReply(query_id=command.query_id, ok=False, message=message))
        return True

    def poll_memory(self, memory: EngineMemory) -> None:
        """Go on with a release that is pending."""
        self._take_role(memory.poll(self.is_idle, self.kv, self._drop_cached), memory)

    def _drop_cached(self) -> None:
        """Drop all cached KV, and past outputs."""
        if self.context.speculation is not None:
            self.context.speculation.forget_past()
        self.context.memory.flush()
        self.context.flush_tier()

    def _take_role(self, opened: OpenedRole | None, memory: EngineMemory) -> None:
        """Begin the role that a release or resume of memory has opened, if it did; note what is released."""
        if opened is not None:
            self.begin_role(opened)
        self.facts[RELEASED] = memory.released


class EngineMemory:
    """Carries out the commands on one rank. `send` gives replies to the API process."""

    def __init__(
        self,
        memory: ReleasableMemory,
        opener: RoleOpener,
        reports: RankReports,
        clock: Clock,
        send: Callable[[ToApi], None],
    ) -> None:
        self._memory, self._opener, self._reports = memory, opener, reports
        self._clock, self._send = clock, send
        self._released: tuple[str, ...] = ()
        self._closed_role: SwitchRole | None = None
        """The role to open again with `kv_cache`; None: it is open."""
        self._pending: ReleaseMemory | None = None
        self._deadline = 0.0

    @property
    def is_pending(self) -> bool:
        """True while a release waits for the end of the last transfer."""
        return self._pending is not None

    @property
    def released(self) -> str:
        """What is released: names of `MEMORY_TAGS`, with commas between them; empty: nothing."""
        return ",".join(self._released)

    def require(self) -> None:
        """Raise the refusal of a request while memory is released."""
        if self._released:
            raise RequestError(
                f"the memory of this server is released ({self.released}) until /resume_memory_occupation",
                status=503,
                code=RELEASED,
                retry_after_s=RETRY_AFTER_S,
            )

    def read(self, command: GetWeights) -> None:
        """Answer with the rows of a tensor, as all ranks have them. No step is under way."""
        trouble: str | None = None
        found: list[NamedRows] = []
        try:
            found = self._memory.read(command.name, command.max_rows)
        except ModelError as error:
            trouble = str(error)
        trouble = self._reports.first_trouble(trouble)
        reports = self._reports.gather(msgspec.msgpack.encode(found if trouble is None else []))
        if trouble is None:
            try:
                self._answer(command, reports)
                return
            except ModelError as error:
                trouble = str(error)
        self._reply(command, trouble)

    def release(self, command: ReleaseMemory, num_live: int, *, updates: bool = False) -> None:
        """Begin a release; refuse it while `num_live` requests are live. `updates`: the weights are being updated."""
        if updates:
            self._reply(command, "the weights are being updated; memory is released afterwards")
        elif num_live:
            self._reply(command, f"{num_live} requests are live; memory is released when none is")
        elif self._pending is not None:
            self._reply(command, "another release is under way")
        else:
            self._pending, self._deadline = command, self._clock.now() + command.timeout_s

    def poll(self, idle: bool, kv: KVManager | None, flush: Callable[[], object]) -> OpenedRole | None:
        """Release if the scheduler is idle. Returns the role without transfers that begins now, None: the role stays.

        `kv`: the present transfer manager. `flush` empties the prefix cache.
        """
        command = self._pending
        assert command is not None
        if not idle or not self._opener.is_quiet:
            if self._clock.now() > self._deadline:
                self._pending = None
                self._reply(command, f"requests or transfers have not ended within {command.timeout_s:g} s")
            return None
        self._pending = None
        tags = tuple(tag for tag in MEMORY_TAGS if tag in command.tags and tag not in self._released)
        trouble = self._agreed(lambda: self._memory.prepare(tags))
        opened: OpenedRole | None = None
        if trouble is None and KV_CACHE in tags and kv is not None:
            present = self._opener.present
            try:
                commit = self._opener.prepare(without_transfers(present))
                kv.end_sessions()
                opened, self._closed_role = commit(), present
            except RankError:
                raise
            except PdserveError as error:
                trouble = str(error)
        if trouble is not None:
            if WEIGHTS in tags:
                self._memory.cancel()
            self._reply(command, trouble)
            return None
        if KV_CACHE in tags:
            flush()
        num_bytes = self._memory.release(tags)
        self._released = tuple(tag for tag in MEMORY_TAGS if tag in (*self._released, *tags))
        log.info("released %s: %d MB", ", ".join(tags) or "nothing more", num_bytes >> 20)
        self._reply(command)
        return opened

    def resume(self, command: ResumeMemory) -> OpenedRole | None:
        """Take memory again. Returns the role that begins now; None: the role stays."""
        tags = tuple(tag for tag in self._released if tag in command.tags)
        trouble, opened = self._agreed(lambda: self._memory.restore(tags)), None
        resumed = () if trouble is not None else tags
        if KV_CACHE in resumed and self._closed_role is not None:
            try:
                opened = self._opener.prepare(msgspec.structs.replace(self._closed_role, server=command.server))()
                self._closed_role = None
            except RankError:
                raise
            except PdserveError as error:
                trouble = f"the transfers cannot be opened again: {error}"
                resumed = tuple(tag for tag in resumed if tag != KV_CACHE)
        self._released = tuple(tag for tag in self._released if tag not in resumed)
        if opened is not None:
            self._opener.announce()
        self._reply(command, trouble or "")
        return opened

    # ------------------------------------------------------------------ inside

    def _agreed(self, action: Callable[[], None]) -> str | None:
        """Run `action` on all ranks; returns why it failed on one of them."""
        trouble: str | None = None
        try:
            action()
        except ModelError as error:
            trouble = str(error)
        return self._reports.first_trouble(trouble)

    def _answer(self, command: GetWeights, reports: Sequence[bytes]) -> None:
        parts = [part for report in reports for part in msgspec.msgpack.decode(report, type=list[NamedRows])]
        if not parts:
            raise ModelError(f"this model does not use the tensor {command.name}")
        rows = joined(command.name, parts, command.max_rows)
        payload = msgspec.msgpack.encode(WeightRows(rows.shape, rows.tobytes()))
        self._send(CommandReply(query_id=command.query_id, ok=True, message="ok", payload=payload))

    def _reply(self, command: GetWeights | ReleaseMemory | ResumeMemory, trouble: str = "") -> None:
        self._send(CommandReply(query_id=command.query_id, ok=not trouble, message=trouble or "ok"))


def without_transfers(role: SwitchRole) -> SwitchRole:
    """Return the command of the role without transfers that `role` leaves for a while."""
    return msgspec.structs.replace(role, disagg=role.disagg | {"disaggregation_mode": "null"}, bootstrap_port=None)
