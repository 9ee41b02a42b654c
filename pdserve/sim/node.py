"""One server of a simulated world: a scheduler and everything below it, on the world's network, clock and model.

The scheduler, role, leases and transfer manager are the real ones. Made by `world` and `cluster`, and by tests.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from pdserve.base.clock import Clock, ManualClock
from pdserve.base.mailbox import Mailbox, Woken
from pdserve.base.parallel import SINGLE, ParallelShape
from pdserve.executor.interface import Executor
from pdserve.memory.group_pools import GroupPoolSizes
from pdserve.memory.kv_memory import KVMemory, PageTable
from pdserve.memory.layout import PageSpace
from pdserve.memory.lease import Lease
from pdserve.memory.tiers.storage_port import StoragePort
from pdserve.protocol.engine_state import EngineReady
from pdserve.protocol.messages import (
    CommandReply,
    ExtractReply,
    KVPart,
    OutputBatch,
    StateReply,
    ToApi,
)
from pdserve.ranks.rank_reports import OwnReport, RankReports
from pdserve.scheduler.context import SchedulerContext, StepLimits
from pdserve.scheduler.engine_memory import EngineMemory
from pdserve.scheduler.kv_checksum import KVChecksum, WriteLine
from pdserve.scheduler.outbox import Outbox
from pdserve.scheduler.request import WaitingQueue
from pdserve.scheduler.role_switcher import RoleSwitcher
from pdserve.scheduler.roles.base import SchedulerRole
from pdserve.scheduler.roles.decode import DecodeRole
from pdserve.scheduler.roles.monolith import MonolithRole
from pdserve.scheduler.roles.prefill import PrefillRole
from pdserve.scheduler.scheduler import Event, InputSource, Scheduler
from pdserve.scheduler.weights_update import WeightsUpdater
from pdserve.sim.hash_draft import HIDDEN_BYTES
from pdserve.sim.hash_layout import hash_draft_layout, hash_layout
from pdserve.sim.hash_lm import HashExecutor
from pdserve.sim.hash_storage import add_store, open_port
from pdserve.sim.hash_tier import HashHasher
from pdserve.sim.in_place import SharedSteps, SimMemory, SimRoles, SimWeights, name_of
from pdserve.sim.network import Faults, Grants, Pool, SimCopyEngine, SimDirectory, SimNet, SimSocket, Verb
from pdserve.sim.shape import Prompt, RequestHalf, Shape, request
from pdserve.sim.tiered_node import TieredNode
from pdserve.transfer.aux import MetadataBuffers
from pdserve.transfer.events import ControlSocket, CopyEngine, Directory, TransferEvent
from pdserve.transfer.manager import KVArgs, KVManager, TransferTimes
from pdserve.transfer.peers import SessionTimes
from pdserve.transfer.plan import rank_memory
from pdserve.transfer.wire import WEIGHTS, MemoryKey, RankMemory


class MachineClock:
    """The clock of one machine: it has its own origin, and `leap` moves it ahead."""

    def __init__(self, clock: Clock, offset_s: float = 0.0) -> None:
        self._clock = clock
        self._offset_s = offset_s

    def now(self) -> float:
        """See `Clock`."""
        return self._clock.now() + self._offset_s

    def leap(self, seconds: float) -> None:
        """Move the clock ahead by `seconds`."""
        self._offset_s += seconds


class SimNode(TieredNode):
    """One server: a scheduler and everything below it. `mode` is null, prefill or decode.

    Peers reach it at `endpoint`. `instance` names its process; a successor at the same endpoint has another name.
    `write_kv_line` gets the log lines of KV hashes; None: no log.
    """

    def __init__(
        self,
        mode: str,
        shape: Shape,
        net: SimNet,
        endpoint: str,
        instance: str,
        *,
        clock: Clock | None = None,
        parallel: ParallelShape = SINGLE.shape,
        dp_size: int = 1,
        write_kv_line: WriteLine | None = None,
    ) -> None:
        self.mode, self.endpoint, self.instance = mode, endpoint, instance
        self._shared_steps: SharedSteps | None = None
        self._write_kv_line = write_kv_line
        self.halves: dict[str, RequestHalf] = defaultdict(RequestHalf)
        self.extracted: dict[str, ExtractReply] = {}
        self.kv_parts: dict[str, list[KVPart]] = defaultdict(list)
        self.replies: dict[str, CommandReply] = {}
        """Replies to commands, by query id."""
        self._net, self._shape, self._parallel = net, shape, parallel
        self.clock = clock or net.clock
        self.layout = hash_layout(
            shape.page_tokens,
            num_heads=shape.num_heads,
            window=shape.window,
            has_state=shape.has_state,
            is_hybrid=shape.is_hybrid,
        )
        self.drafter = None if shape.drafting is None else shape.drafting.model(mode)
        if self.drafter is not None:
            self.layout = hash_draft_layout(self.layout)
        table = PageTable(shape.num_rows, shape.num_pages, has_window=shape.window > 0)
        self.executor = self._model(table)
        self.memory = KVMemory(
            self.layout,
            shape.num_pages,
            table,
            shape.num_aux,
            on_free=self._on_free,
            prefix_cache=self._caches_prefixes,
            eviction=shape.eviction,
            group_sizes=GroupPoolSizes(
                num_window_pages=shape.num_window_pages,
                num_slots=shape.num_slots,
                step_tokens=shape.chunk_tokens,
                num_steps_ahead=max(1, shape.num_stages),
                decode_step_tokens=1 if mode == "prefill" else shape.decode_step_tokens,
            ),
            on_group_free=lambda space, pages: self._on_free(pages, space),
        )
        host = self._host_pool()
        speculation = None if shape.drafting is None else shape.drafting.speculation()
        context = SchedulerContext(
            self.memory, self._steps(table), Outbox(self._hear), self._time(), self._limits(), speculation,
            host=host, write_policy=shape.write_policy,
        )  # fmt: skip
        self.mailbox: Mailbox[Event] = Mailbox()
        add_store(context, shape, self.drafter, self._storage_port)
        self.kv: KVManager | None = None
        self._dp_size = dp_size
        role = self.open_role(context)
        self.scheduler = Scheduler(
            role,
            context,
            self.kv,
            self._input_source(),
            overlap=shape.overlap,
            max_queued=shape.max_queued,
            rules=shape.rules,
            switcher=RoleSwitcher(SimRoles(self), self._time(), self._hear),
            weights=WeightsUpdater(SimWeights(self), self._time(), self._hear),
            engine_memory=EngineMemory(
                SimMemory(self._lose_memory), SimRoles(self), self._reports(), self._time(), self._hear
            ),
        )

    def _limits(self) -> StepLimits:
        shape = self._shape
        return StepLimits(
            chunk_tokens=shape.chunk_tokens,
            mixed_chunk_tokens=shape.mixed_chunk_tokens,
            saturation_tokens=shape.saturation_tokens,
            reserved_decode_tokens=shape.reserved_decode_tokens,
            offload_bytes=self.layout.bytes_of(shape.offload_pages),
            prealloc_timeout_s=400.0,
            layer_groups=shape.layer_groups if self.mode == "prefill" else 0,
            num_stages=shape.num_stages,
            state_grid=self.layout.tokens_in(shape.state_grid_pages) if self.layout.has_state else 0,
        )

    def open_role(self, context: SchedulerContext) -> SchedulerRole:
        """Make the role of `mode` with a transfer manager of its own."""
        waiting = WaitingQueue(self._shape.policy, 10.0, self.memory, self._shape.rules)
        if self.mode == "null":
            self.kv = None
            return MonolithRole(context, waiting)
        self.kv = self._transfer(self._dp_size)
        kv_checksum = self._kv_checksum()
        if self.mode == "prefill":
            return PrefillRole(context, self.kv, waiting, kv_checksum, optimistic=self._shape.optimistic)
        policy = self._shape.load_failure_policy
        return DecodeRole(context, self.kv, waiting, kv_checksum, load_failure_policy=policy)

    def change_role(self, mode: str, endpoint: str, instance: str) -> SchedulerRole:
        """Take the role `mode` in place, as another instance; returns the role object."""
        self._hang_up()
        for name in self.processes:
            self._net.mailboxes.pop(name, None)
        host = self._net.hosts.get(self.endpoint, self.endpoint)
        self.mode, self.endpoint, self.instance = mode, endpoint, instance
        self.mailbox.discard(lambda event: isinstance(event, TransferEvent))
        context = self.scheduler.context
        context.limits = self._limits()
        self.memory.change_role(self._shape.num_aux, prefix_cache=self._caches_prefixes)
        role = self.open_role(context)
        for name in (endpoint, *self.processes):
            self._net.hosts[name] = host
        return role

    @property
    def is_quiet(self) -> bool:
        """Whether no copy is without an outcome that all ranks know."""
        return True

    @property
    def _caches_prefixes(self) -> bool:
        return self._shape.decode_prefix_cache if self.mode == "decode" else self._shape.prefix_cache

    def role_change_fails(self) -> bool:
        """Draw whether a rank cannot open the parts of another role; all ranks learn it."""
        return self._net.happens("role changes that failed", self._net.faults.change_failed)

    def load_ends(self) -> str | None:
        """Draw whether the load of other weights ends: None: not yet, empty: well. All ranks learn it."""
        if self._net.rng.random() < 0.8:
            return None
        return "injected" * self._net.happens("weights that a rank could not load", self._net.faults.update_failed)

    def take_weights(self, number: int) -> None:
        """Compute with the weights of this number from now on."""
        self.executor.change_weights(number)
        if self._shared_steps is not None:
            self._shared_steps.changed(self)

    def may_install(self, query_id: str) -> bool:
        """See `RankWeights.may_install`. All ranks learn it."""
        return self._shared_steps is None or self._shared_steps.may_install(query_id, self)

    def share_steps(self, shared: SharedSteps) -> None:
        """Compute all steps together with other replicas."""
        self._shared_steps = shared

    def step(self) -> None:
        """Run one turn of the scheduler."""
        before = self.scheduler.context.newest_step
        self.scheduler.step()
        if self._shared_steps is not None and self.scheduler.context.newest_step != before:
            self._shared_steps.check()

    @property
    def processes(self) -> list[str]:
        """Process names of all ranks."""
        return self._net.processes[self.instance]

    @property
    def lives(self) -> bool:
        """Whether the scheduler's process is alive."""
        return self.instance in self._net.mailboxes

    def die(self) -> None:
        """Kill all processes (kill -9): they receive and copy nothing any more."""
        self._hang_up()
        for name in self.processes:
            self._net.mailboxes.pop(name, None)

    def _hang_up(self) -> None:
        """Remove the mailboxes of the scheduler's process."""
        if self._net.mailboxes.get(self.endpoint) is self.mailbox:
            del self._net.mailboxes[self.endpoint]
        self._net.mailboxes.pop(self.instance, None)

    def lose_a_process(self, rng: random.Random) -> float:
        """Kill one process. Returns the seconds after which the other processes have ended, at the latest."""
        self.die()
        return 5.0

    @property
    def idle(self) -> bool:
        """Whether no request, step, transfer or unacknowledged message is left."""
        context = self.scheduler.context
        ended = context.no_step_in_flight and not self.scheduler.role.live
        ended = ended and (context.tier is None or not context.tier.has_work)
        return ended and (self.kv is None or self.kv.quiet)

    @property
    def num_unfenced(self) -> int:
        """Number of ended sessions whose peer may still write."""
        return 0 if self.kv is None else self.kv.receivers.num_fencing

    def leaks(self) -> dict[str, int]:
        """Return resources that are still held although the node is idle; empty when there are none."""
        counts = self.memory.counts()
        counts["pages_free"] += counts["pages_evictable"]
        counts |= self._tier_counts(self.scheduler.context.tier)
        for name in ("slots", "window_pages", "host_slots", "host_window_pages"):
            counts[f"{name}_free"] = counts.get(f"{name}_free", 0) + counts.get(f"{name}_cached", 0)
        names = [name.removesuffix("_total") for name in counts if name.endswith("_total")]
        lost = {name: counts[f"{name}_total"] - counts[f"{name}_free"] for name in names}
        lost |= dict.fromkeys(self.scheduler.audit(), 1)
        if self.kv is not None:
            lost |= self.kv.counts()
        return {name: count for name, count in lost.items() if count}

    # ------------------------------------------------------------------ overridden by ranks of a split replica

    def _time(self) -> Clock:
        """Return the scheduler's clock."""
        return self.clock

    def _model(self, table: PageTable) -> HashExecutor:
        shape = self._shape
        sizes = {
            PageSpace.TOKENS: shape.num_pages,
            PageSpace.WINDOW: shape.num_window_pages,
            PageSpace.SLOTS: shape.num_slots,
        }
        executor = HashExecutor(
            self.layout,
            sizes,
            table,
            self._parallel,
            echo=shape.echo,
            drafting=self.drafter,
            weights=shape.model_weights,
            checks_drafts=not shape.kv_checksum,  # copies may be damaged, and draft KV is not hashed
        )
        executor.late = self._shape.late
        return executor

    def _storage_port(self) -> StoragePort:
        return self.rank_storage_port(0)

    def rank_storage_port(self, rank: int) -> StoragePort:
        """Return a rank's access to the world's store."""
        assert self.executor.tier is not None
        host, coord = self.executor.tier.hosts[rank], self._parallel.coord(rank)
        return open_port(self._net, host, coord, lambda: self.mailbox.post(Woken()))

    def _on_free(self, pages: list[int], space: PageSpace = PageSpace.TOKENS) -> None:
        """Poison pages that went back to the allocator."""
        self.executor.poison(pages, space)

    def _lose_memory(self) -> None:
        """Poison all pages: their memory has gone back to the system."""
        self.executor.poison_all()

    def _reports(self) -> RankReports:
        return OwnReport()

    def _steps(self, table: PageTable) -> Executor:
        """Return the executor that the scheduler runs its steps with."""
        return self.executor

    def _input_source(self) -> InputSource:
        return self.mailbox

    def _aux(self) -> MetadataBuffers:
        return MetadataBuffers(self._shape.num_aux, shareable=False, draft_hidden_bytes=self._hidden_bytes)

    @property
    def _hidden_bytes(self) -> int | None:
        return None if self.drafter is None else HIDDEN_BYTES

    def _engine(self) -> CopyEngine:
        net, shape = self._net, self._shape
        net.mailboxes[self.instance] = self.mailbox
        net.processes[self.instance] = [self.instance]
        lives = net.mailboxes.__contains__
        return SimCopyEngine(net, self.instance, lives, notifies=shape.notifies, fences=shape.fences)

    def _ranks(self) -> tuple[RankMemory, ...]:
        """Return the memory that peers write to."""
        return (rank_memory(self.layout, SINGLE, self.instance, self.executor.buffers),)

    # ------------------------------------------------------------------ inside

    def _transfer(self, dp_size: int) -> KVManager:
        aux, facts = self._aux(), dict[str, str | int](model="hash")
        if self._net.faults.update:
            facts[WEIGHTS] = name_of(self._shape.model_weights)
        self._open_pools(aux)
        args = KVArgs(
            instance=self.instance,
            layout=self.layout,
            shape=self._parallel,
            dp_size=dp_size,
            ranks=self._ranks(),
            aux=aux,
            facts=facts,
            draft_facts={} if self.drafter is None else {"draft.weights": self.drafter.weights},
            secret=self.instance,
        )
        socket, directory = self._reach_the_world()
        return KVManager(
            args,
            socket,
            self._engine(),
            directory,
            self._time(),
            TransferTimes(
                bootstrap_timeout_s=400.0, waiting_timeout_s=600.0, sessions=SessionTimes(heartbeat_s=5.0, misses=6)
            ),
        )

    def _reach_the_world(self) -> tuple[ControlSocket, Directory]:
        self._net.mailboxes[self.endpoint] = self.mailbox
        return SimSocket(self._net, self.endpoint), SimDirectory(self._net, self.instance)

    def _open_pools(self, aux: MetadataBuffers) -> None:
        """Register the pools that peers copy from and to."""
        net = self._net
        for windows, pools in zip(self.executor.windows, self.executor.pools, strict=True):
            for window, pool in zip(windows, pools, strict=True):
                space = window.group.space
                allocator = self.memory.allocator_of(space)
                net.pools[int(pool.ctypes.data)] = Pool(window.group.page_bytes, allocator, self._grants(space))
        net.pools[aux.buffer[0]] = Pool(aux.slot_bytes, self.memory.aux.allocator, self._grants(None), is_aux=True)

    def _kv_checksum(self) -> KVChecksum | None:
        verify, write = self._shape.kv_checksum, self._write_kv_line
        if not verify and write is None:
            return None
        facts = {"layout_fingerprint": self.layout.fingerprint(), "page_bytes": self.layout.page_bytes}
        return KVChecksum(HashHasher(self.executor), self.layout, facts, write, verify=verify)

    def _grants(self, space: PageSpace | None) -> Grants:
        """Return the `Grants` of the KV pages of a space; None: of the aux slots."""

        def grants(verb: Verb, page: int, key: MemoryKey) -> bool:
            assert self.kv is not None
            if verb == "reads":
                out = self.kv.send_side.outgoing.get(key)
                leases = [] if out is None else out.leases
                pool = self.memory.aux if space is None else self.memory.pages
                return any(page in _pages(lease, space) for lease in leases if lease in pool.live_leases)
            entry = self.kv.receive_side.published.get(key)
            if entry is None:
                return False
            lease, aux = entry.leases
            if space is None:
                return page in aux.pages
            first = self.layout.whole_pages(entry.cached_tokens) if space is PageSpace.TOKENS else 0
            return page in _pages(lease, space)[first:]

        return grants

    def _hear(self, message: ToApi) -> None:
        match message:
            case OutputBatch(outputs=outputs):
                for output in outputs:
                    self.halves[output.rid].add(output)
            case ExtractReply(rid=rid) if message.failure is None:
                self.extracted[rid] = message
            case KVPart(rid=rid):
                self.kv_parts[rid].append(message)
            case CommandReply():
                self.replies[message.query_id] = message
            case StateReply() | EngineReady():
                pass


def monolith_tokens(shape: Shape, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the tokens that an aggregated server generates for each prompt."""
    return [half.tokens for half in monolith_halves(shape, prompts)]


def monolith_halves(shape: Shape, prompts: Sequence[Prompt]) -> list[RequestHalf]:
    """Return all output of an aggregated server for each prompt."""
    net = SimNet(0, ManualClock(), Faults())
    roomy = Shape(
        page_tokens=shape.page_tokens,
        num_pages=512,
        num_rows=64,
        prefix_cache=False,
        num_heads=shape.num_heads,
        window=shape.window,
        has_state=shape.has_state,
        model_weights=shape.model_weights,
        is_hybrid=shape.is_hybrid,
        num_window_pages=4096,
        num_slots=64,
        echo=shape.echo,
    )
    node = SimNode("null", roomy, net, "mono", "mono")
    for i, prompt in enumerate(prompts):
        node.mailbox.post(request(f"r{i}", prompt, None))
    for _ in range(100_000):
        node.scheduler.step()
        if node.idle:
            break
    assert node.idle and not node.leaks(), node.leaks()
    return [node.halves[f"r{i}"] for i in range(len(prompts))]


def _pages(lease: Lease, space: PageSpace | None) -> list[int]:
    """Return the pages of `lease` in a space; None: the aux slots."""
    if space is None or space is PageSpace.TOKENS:
        return lease.pages
    if lease.groups is None:
        return []
    if space is PageSpace.WINDOW:
        return list(lease.groups.window.values())
    return [] if lease.groups.slot is None else [lease.groups.slot]
