"""Real schedulers of every role on `CostModelExecutor`s and a network without delay, for `bench_scheduler`.

What is real: scheduler, roles, memory, prefix cache, page table, transfer manager, encoding of outputs. What is not:
the device, and the transport, in which bytes never arrive.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from pdserve.base.clock import ManualClock
from pdserve.base.mailbox import Mailbox
from pdserve.base.parallel import SINGLE
from pdserve.config.schedule_group import SchedulePolicy
from pdserve.executor.interface import BatchPlan, StepHandle, StepResult
from pdserve.memory.kv_memory import KVMemory, PageTable
from pdserve.protocol.codec import Codec
from pdserve.protocol.engine_state import WaitsFor
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import FinishReason, GenerateRequest, MigrationCommand, RoomAddress, ToApi
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.context import SchedulerContext, StepLimits
from pdserve.scheduler.outbox import Outbox
from pdserve.scheduler.request import Req, WaitingQueue
from pdserve.scheduler.roles.base import STOP_STRING, Queued, SchedulerRole
from pdserve.scheduler.roles.decode import DecodeRole
from pdserve.scheduler.roles.monolith import MonolithRole
from pdserve.scheduler.roles.prefill import PrefillRole
from pdserve.scheduler.scheduler import Event, Scheduler
from pdserve.scheduler.step_parts import StepKind
from pdserve.sim.cost_model import CostModel, CostModelExecutor
from pdserve.sim.hash_lm import hash_layout
from pdserve.sim.network import Faults, SimNet, SimSocket
from pdserve.transfer.aux import MetadataBuffers
from pdserve.transfer.events import Address, CopyJob, PrefillFound, ReceiverOpened
from pdserve.transfer.manager import FAKE_BOOTSTRAP_HOST, KVArgs, KVManager, TransferTimes
from pdserve.transfer.peers import SessionTimes
from pdserve.transfer.plan import rank_memory
from pdserve.transfer.wire import MemoryKey

PAGE_TOKENS = 16
PREFILL: Address = ("prefill", 1)
NOWHERE: Address = ("nowhere", 1)
FAKE: Address = (FAKE_BOOTSTRAP_HOST, 1)
NEVER_S = 1e12
LAYOUT = hash_layout(PAGE_TOKENS, num_layers=1)
"""Pages of a few bytes: what schedulers do does not depend on their size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of one server."""

    num_rows: int
    num_pages: int
    max_pages_per_row: int
    num_aux: int = 0
    chunk_tokens: int = 8192
    policy: SchedulePolicy = "fcfs"


class Watch(Counter[str]):
    """CPU nanoseconds of the current step, by what they were spent on."""

    def timed(self, name: str, began: int) -> None:
        """Count what has passed since `began`, a `time.thread_time_ns`, for `name`."""
        self[name] += time.thread_time_ns() - began


class WatchedExecutor(CostModelExecutor):
    """Its own CPU time is counted as `device`, so that it can be taken off a step's."""

    watch: Watch

    def launch(self, plan: BatchPlan, *, layer_events: bool = False) -> StepHandle:
        """See `Executor`."""
        began = time.thread_time_ns()
        handle = super().launch(plan, layer_events=layer_events)
        self.watch.timed("device", began)
        return handle

    def resolve(self, handle: StepHandle) -> StepResult:
        """See `Executor`."""
        began = time.thread_time_ns()
        result = super().resolve(handle)
        self.watch.timed("device", began)
        return result


class WatchedRole:
    """Implements `SchedulerRole`: another one, with its CPU time counted as `poll`, `plan` and `commit`."""

    def __init__(self, role: SchedulerRole, watch: Watch) -> None:
        self.role, self.watch = role, watch

    @property
    def live(self) -> dict[str, Req]:
        """See `SchedulerRole`."""
        return self.role.live

    @property
    def num_waiting(self) -> int:
        """See `SchedulerRole`."""
        return self.role.num_waiting

    def is_queued(self, req: Req) -> bool:
        """See `SchedulerRole`."""
        return self.role.is_queued(req)

    def withdraw_queued(self) -> list[GenerateRequest]:
        """See `SchedulerRole`."""
        return self.role.withdraw_queued()

    def admit(self, req: Req) -> None:
        """See `SchedulerRole`."""
        self.role.admit(req)

    def poll(self) -> None:
        """See `SchedulerRole`."""
        began = time.thread_time_ns()
        self.role.poll()
        self.watch.timed("poll", began)

    @property
    def needs_sync(self) -> bool:
        """See `SchedulerRole`. Counted as `plan`."""
        began = time.thread_time_ns()
        answer = self.role.needs_sync
        self.watch.timed("plan", began)
        return answer

    def plan(self, step: int) -> BatchPlan | None:
        """See `SchedulerRole`."""
        began = time.thread_time_ns()
        plan = self.role.plan(step)
        self.watch.timed("plan", began)
        return plan

    @property
    def step_kind(self) -> StepKind:
        """See `SchedulerRole`."""
        return self.role.step_kind

    def launched(self, handle: StepHandle) -> None:
        """See `SchedulerRole`."""
        self.role.launched(handle)

    def commit(self, plan: BatchPlan, result: StepResult) -> None:
        """See `SchedulerRole`."""
        began = time.thread_time_ns()
        self.role.commit(plan, result)
        self.watch.timed("commit", began)

    def end(self, req: Req, failure: Failure | None, finish: FinishReason = STOP_STRING) -> None:
        """See `SchedulerRole`."""
        self.role.end(req, failure, finish)

    def is_moving(self, req: Req) -> bool:
        """See `SchedulerRole`."""
        return self.role.is_moving(req)

    def queues(self) -> dict[str, int]:
        """See `SchedulerRole`."""
        return self.role.queues()

    def members(self) -> Mapping[str, Queued]:
        """See `SchedulerRole.members`."""
        return self.role.members()

    def waits_for(self, req: Req) -> WaitsFor:
        """See `SchedulerRole`."""
        return self.role.waits_for(req)

    def facts(self) -> dict[str, float]:
        """See `SchedulerRole`."""
        return self.role.facts()

    def retract_all(self) -> None:
        """See `SchedulerRole`."""
        self.role.retract_all()

    @property
    def guests(self) -> Collection[str]:
        """See `SchedulerRole`."""
        return self.role.guests

    def migrate(self, command: MigrationCommand) -> None:
        """See `SchedulerRole`."""
        self.role.migrate(command)


@dataclasses.dataclass(frozen=True)
class HeldEngine:
    """`CopyEngine` whose copies never end."""

    address: str
    post: Callable[[ReceiverOpened], None]
    drain_timeout_s: float = 0.0
    fence_drain_timeout_s: float = 0.0
    notifies: bool = False

    def connect(self, rank: int, transport_address: str) -> bool:
        """See `CopyEngine`."""
        return True

    def submit(self, job: CopyJob) -> None:
        """See `CopyEngine`."""

    def expect(self, key: MemoryKey, rank: int, count: int) -> bool:
        """See `CopyEngine`."""
        raise AssertionError("it notifies of nothing")

    def cancel(self, job: CopyJob) -> None:
        """See `CopyEngine`."""

    def forget(self, transport_address: str) -> None:
        """See `CopyEngine`."""

    def open_receiver(self, rank: int, peer: str) -> None:
        """See `CopyEngine`."""
        self.post(ReceiverOpened(peer, self.address, None, rank))

    def allow_sources(self, rank: int, peer: str, addresses: Sequence[str]) -> None:
        """See `CopyEngine`."""

    def fence(self, rank: int, peer: str) -> None:
        """See `CopyEngine`."""


@dataclasses.dataclass(frozen=True)
class OneDirectory:
    """`Directory` that knows one prefill server; about any other it never answers."""

    net: SimNet
    endpoint: str

    def find(self, address: Address) -> None:
        """See `Directory`."""
        replicas = self.net.served.get(address)
        if replicas is not None:
            self.net.post(self.endpoint, PrefillFound(address, replicas))

    def probe(self, instance: str, endpoint: str) -> None:
        """See `Directory`."""


class CostedServer:
    """One scheduler with all that is below it. `mode` is null, prefill or decode."""

    def __init__(self, mode: str, sizes: Sizes, net: SimNet) -> None:
        self.watch = Watch()
        self.mailbox: Mailbox[Event] = Mailbox()
        self.memory = KVMemory(
            LAYOUT,
            sizes.num_pages,
            PageTable(sizes.num_rows, sizes.max_pages_per_row),
            sizes.num_aux,
            prefix_cache=True,
        )
        executor = WatchedExecutor(LAYOUT, sizes.num_pages, CostModel(), net.clock)
        executor.watch = self.watch
        limits = StepLimits(chunk_tokens=sizes.chunk_tokens, reserved_decode_tokens=0)
        codec: Codec[ToApi] = Codec(ToApi)
        self.context = SchedulerContext(
            self.memory, executor, Outbox(lambda message: self._send(codec, message)), net.clock, limits
        )
        waiting = WaitingQueue(sizes.policy, 10.0, self.memory)
        self.kv = None if mode == "null" else self._transfer(mode, executor, sizes.num_aux, net)
        self.scheduler = Scheduler(self._role(mode, waiting), self.context, self.kv, self.mailbox)
        self.num_bytes_sent = 0

    def step(self) -> Watch:
        """One step of the scheduler; what it cost. `step` is all but the device."""
        self.watch.clear()
        began = time.thread_time_ns()
        self.scheduler.step()
        self.watch.timed("step", began)
        self.watch["step"] -= self.watch["device"]
        return self.watch

    def queues(self) -> dict[str, int]:
        """Queue lengths by SGLang's names."""
        return self.scheduler.role.queues()

    def ballast(self, num_pages_left: int) -> None:
        """Take pages until so many are available."""
        spare = self.memory.num_available - num_pages_left
        assert spare >= 0 and self.memory.pages.reserve(spare, "ballast") is not None, (spare, num_pages_left)

    def limit(self, *, reserved_decode_tokens: int, chunk_tokens: int) -> None:
        """Change what was set to get to the state that a case begins with."""
        self.context.limits = dataclasses.replace(
            self.context.limits, reserved_decode_tokens=reserved_decode_tokens, chunk_tokens=chunk_tokens
        )

    def _send(self, codec: Codec[ToApi], message: ToApi) -> None:
        self.num_bytes_sent += len(codec.encode(message))

    def _role(self, mode: str, waiting: WaitingQueue) -> SchedulerRole:
        role: SchedulerRole
        if self.kv is None:
            role = MonolithRole(self.context, waiting)
        elif mode == "prefill":
            role = PrefillRole(self.context, self.kv, waiting)
        else:
            role = DecodeRole(self.context, self.kv, waiting)
        return WatchedRole(role, self.watch)

    def _transfer(self, mode: str, executor: WatchedExecutor, num_aux: int, net: SimNet) -> KVManager:
        net.mailboxes[mode] = self.mailbox
        if mode == "prefill":
            net.served[PREFILL] = ((mode, mode),)
        times = SessionTimes(heartbeat_s=NEVER_S, resend_s=NEVER_S)
        return KVManager(
            KVArgs(
                instance=mode,
                layout=LAYOUT,
                ranks=(rank_memory(LAYOUT, SINGLE, mode, executor.buffers),),
                aux=MetadataBuffers(num_aux),
                facts={"model": ""},
                secret=mode,
            ),
            SimSocket(net, mode),
            HeldEngine(mode, self.mailbox.post),
            OneDirectory(net, mode),
            net.clock,
            TransferTimes(bootstrap_timeout_s=NEVER_S, waiting_timeout_s=NEVER_S, sessions=times),
        )


def instant_net() -> SimNet:
    """A network that delivers at once."""
    return SimNet(0, ManualClock(), Faults(repeated=0.0, max_delay_s=0.0))


class Prompts:
    """Makes requests: every other prompt begins like one of a few others. The same for the same seed."""

    def __init__(self, num_tokens: int, max_new_tokens: int, first: int = 0) -> None:
        self._rng = random.Random(0)
        self._num_tokens = num_tokens
        self._sampling = CoreSamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
        self._heads = [self._tokens(num_tokens // 2) for _ in range(8)]
        self._numbers = itertools.count(first)

    def make(self, address: Address = FAKE) -> GenerateRequest:
        """The next request; its two halves meet at `address`."""
        number = next(self._numbers)
        head = self._rng.choice(self._heads) if number % 2 else []
        return GenerateRequest(
            rid=f"request-{number}",
            input_ids=head + self._tokens(self._num_tokens - len(head)),
            sampling=self._sampling,
            room=RoomAddress(host=address[0], port=address[1], room=number),
            priority=number % 3,
        )

    def _tokens(self, count: int) -> list[int]:
        return list(self._rng.randbytes(count))
