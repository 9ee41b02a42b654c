"""Simulated replicas that are split over ranks: each rank copies from and to its own pool.

    rank 0   schedules, computes for all ranks, and writes the input log    ── frames, look-ups ──> the world
    rank r   follows the log with its own scheduler, now or some turns later; copies from and to its own pool

Facts that one rank alone knows (how its copies ended) are agreed on by a MIN over all ranks' values (`Consensus`).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import msgspec
import torch
from torch import Tensor

from pdserve.base.clock import Clock
from pdserve.base.mailbox import Woken
from pdserve.base.parallel import ParallelShape
from pdserve.engine.follower_role import NoDirectory, SilentSocket
from pdserve.errors import PdserveError
from pdserve.executor.interface import BatchPlan, CopyHandle, Executor, HostPages, StepHandle, StepResult
from pdserve.memory.kv_memory import PageTable
from pdserve.memory.layout import KVLayout, PageSpace
from pdserve.memory.slot_stamp import SlotStamp
from pdserve.memory.tiers.host_memory import PageCopies
from pdserve.memory.tiers.storage_port import StoragePort
from pdserve.protocol.hidden_states import HiddenParams
from pdserve.protocol.logprobs import Logprobs
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.ranks.consensus import Consensus
from pdserve.ranks.copies import Outcome, RankCopies
from pdserve.ranks.input_log import FollowerLog, InputLog, LeaderLog
from pdserve.ranks.messages import Entry
from pdserve.ranks.rank_copies import CopyReports, RankCopyEnds
from pdserve.ranks.rank_executor import RankExecutor, SharedMetadata
from pdserve.ranks.rank_reports import GroupReports, RankReports
from pdserve.ranks.rank_storage import RankStoragePort, StorageReports
from pdserve.scheduler.input_source import FollowerInputSource, LeaderInputSource
from pdserve.scheduler.roles.base import SchedulerRole
from pdserve.scheduler.scheduler import Event, InputSource
from pdserve.sim.hash_lm import HashExecutor
from pdserve.sim.network import SimCopyEngine, SimNet
from pdserve.sim.node import SimNode
from pdserve.sim.shape import Shape
from pdserve.transfer.aux import MetadataBuffers
from pdserve.transfer.checksum import RankDigest
from pdserve.transfer.events import ControlSocket, CopyEngine, Directory, TransferEvent
from pdserve.transfer.plan import rank_memory
from pdserve.transfer.wire import RankMemory

LEADER_LASTS_S = 10.0
"""Seconds until a rank notices the loss of another rank and ends. It may copy until then."""


class RankedNode(SimNode):
    """A replica of several ranks: rank 0, which schedules, and its followers."""

    def __init__(
        self,
        mode: str,
        shape: Shape,
        net: SimNet,
        endpoint: str,
        instance: str,
        *,
        clock: Clock,
        parallel: ParallelShape,
        dp_size: int = 1,
    ) -> None:
        self._entries: list[deque[Entry]] = [deque() for _ in range(parallel.num_ranks)]
        self.stalled = False
        """Whether a rank is lost, so that no step ends any more."""
        reduction = _Reduction(parallel.num_ranks)
        log = LeaderLog(clock, self.log_entry)
        self._rank = _Rank(0, log, net, instance, reduction, self._wake)
        super().__init__(mode, shape, net, endpoint, instance, clock=clock, parallel=parallel, dp_size=dp_size)
        self.followers: list[_Follower] = []
        for number in range(1, parallel.num_ranks):
            own_log = FollowerLog(f"rank {number}", log.now(), self._entries[number].popleft)
            rank = _Rank(number, own_log, net, instance, reduction, lambda: None, self._heard)
            self.followers.append(_Follower(self, rank, dp_size))

    def step(self) -> None:
        """Run one turn of rank 0, which computes for all ranks. Followers catch up now, or some turns later."""
        if self.stalled:
            return
        self.scheduler.step()
        for follower in self.followers:
            if self._net.rng.random() < 0.7:
                follower.catch_up()

    @property
    def idle(self) -> bool:
        """See `SimNode.idle`; covers all ranks."""
        if not super().idle or self._rank.copies.num_pending:
            return False
        for follower in self.followers:
            follower.catch_up()
            assert follower.memory.counts() == self.memory.counts(), "a follower's memory counts differ from rank 0's"
        return True

    def lose_a_process(self, rng: random.Random) -> float:
        """Kill one rank. No step ends without it; the other ranks notice the loss and end as well."""
        self.stalled = True
        del self._net.mailboxes[rng.choice([name for name in self.processes if name in self._net.mailboxes])]
        if self.processes[0] not in self._net.mailboxes:
            self._hang_up()
        return LEADER_LASTS_S

    def change_role(self, mode: str, endpoint: str, instance: str) -> SchedulerRole:
        """See `SimNode.change_role`."""
        self._rank.begin_role(instance)
        role = super().change_role(mode, endpoint, instance)
        self._role_source.change_consensus(self._rank.consensus)
        return role

    @property
    def is_quiet(self) -> bool:
        """See `SimNode.is_quiet`."""
        return not self._rank.copies.num_pending

    def _reports(self) -> RankReports:
        return GroupReports(_Alone(), self._rank.log)

    def role_change_fails(self) -> bool:
        """See `SimNode.role_change_fails`."""
        return self._rank.log.answer(super().role_change_fails)

    def load_ends(self) -> str | None:
        """See `SimNode.load_ends`."""
        found = super().load_ends()
        return _text(self._rank.log.answer(lambda: msgspec.msgpack.encode(found)))

    def may_install(self, query_id: str) -> bool:
        """See `SimNode.may_install`."""
        found = super().may_install(query_id)
        return self._rank.log.answer(lambda: found)

    def has_entries(self, number: int) -> bool:
        """Whether the log has entries that rank `number` has not followed."""
        return bool(self._entries[number])

    def log_entry(self, entry: Entry) -> None:
        """Add an entry to the log of each follower."""
        for entries in self._entries[1:]:
            entries.append(entry)

    def _wake(self) -> None:
        self.mailbox.post(Woken())

    def _heard(self, event: Outcome) -> None:
        self._rank.consensus.heard(event)

    def _time(self) -> Clock:
        return self._rank.log

    def _steps(self, table: PageTable) -> Executor:
        executor = RankExecutor(self.executor, table, self.layout, self._parallel.coord(0), _Alone(), self._rank.log)
        self.copy_reports = CopyReports(self._parallel.num_ranks, self._wake)
        executor.copy_ends = RankCopyEnds(self._rank.log, self.copy_reports.add, self.copy_reports)
        return executor

    def _open_tier(self, num_slots: Mapping[PageSpace, int]) -> None:
        super()._open_tier(num_slots)
        self.executor.tier_ranks = (0,)

    def _storage_port(self) -> StoragePort:
        self.storage_reports = StorageReports(self._parallel.num_ranks, self._wake)
        return RankStoragePort(
            self.rank_storage_port(0), self._rank.log, self.storage_reports.add, self.storage_reports
        )

    def _input_source(self) -> InputSource:
        self._role_source = LeaderInputSource(self.mailbox, self._rank.log, self._rank.consensus)
        return self._role_source

    def _aux(self) -> MetadataBuffers:
        return SharedMetadata(
            self._shape.num_aux, self._rank.log, shareable=False, draft_hidden_bytes=self._hidden_bytes
        )

    def _engine(self) -> CopyEngine:
        net, number = self._net, self._parallel.num_ranks
        net.mailboxes[self.instance] = self.mailbox
        net.processes[self.instance] = [self._rank.process(rank) for rank in range(number)]
        return self._rank.open(self._shape)

    def _ranks(self) -> tuple[RankMemory, ...]:
        names = [self._rank.process(rank) for rank in range(self._parallel.num_ranks)]
        return tuple(
            rank_memory(self.layout, self._parallel.coord(rank), name, self.executor.buffers_of(rank))
            for rank, name in enumerate(names)
        )


class _Rank:
    """One rank's process, as the net knows it, and its part in the consensus of all ranks."""

    def __init__(
        self,
        number: int,
        log: InputLog,
        net: SimNet,
        instance: str,
        reduction: _Reduction,
        wake: Callable[[], None],
        report_to_leader: Callable[[Outcome], None] | None = None,
    ) -> None:
        self.number, self.log = number, log
        self._net, self._reduction, self._wake = net, reduction, wake
        self._report_to_leader = report_to_leader
        self.begin_role(instance)

    def begin_role(self, instance: str) -> None:
        """Begin the agreement of a role, as another instance. Nothing is pending in the former one."""
        self._instance = instance
        self.copies = RankCopies(self.number)

        def begin(values: Tensor, then: Callable[[], None]) -> _Arrival:
            return self._reduction.begin(self.number, values, then)

        now = self._net.clock.now
        self.consensus = Consensus(self.copies, begin, self.log, lambda: None, self._wake, in_step=False, now=now)
        self._report = self._report_to_leader or self.consensus.heard

    def process(self, rank: int) -> str:
        """Return the net's name for the process of a rank of this replica."""
        return f"{self._instance}.{rank}"

    def open(self, shape: Shape) -> CopyEngine:
        """Make the rank's copy engine and start it."""
        net, name = self._net, self.process(self.number)
        net.mailboxes[name] = self
        lives = net.mailboxes.__contains__
        own = SimCopyEngine(net, name, lives, notifies=shape.notifies, fences=shape.fences)
        self.copies.drive(own, own.drain_timeout_s, own.fence_drain_timeout_s, self._report)
        return self.copies

    def post(self, event: Event) -> None:
        """Receive an event of the rank's copy engine."""
        self.copies.post(cast(TransferEvent, event))


class _Follower(SimNode):
    """A rank other than 0: its scheduler repeats rank 0's decisions, and its engine copies from its own pool."""

    def __init__(self, leader: RankedNode, rank: _Rank, dp_size: int) -> None:
        self._leader, self._rank = leader, rank
        net, shape = leader._net, leader._shape
        name = rank.process(rank.number)
        clock, parallel = leader.clock, leader._parallel
        super().__init__(
            leader.mode, shape, net, leader.endpoint, leader.instance, clock=clock, parallel=parallel, dp_size=dp_size
        )
        self.name = name

    def change_role(self, mode: str, endpoint: str, instance: str) -> SchedulerRole:
        """See `SimNode.change_role`. Rank 0 has told the net of the new instance."""
        self.mode, self.endpoint, self.instance = mode, endpoint, instance
        self._net.mailboxes.pop(self.name, None)
        self._rank.begin_role(instance)
        self.name = self._rank.process(self._rank.number)
        context = self.scheduler.context
        context.limits = self._limits()
        self.memory.change_role(self._shape.num_aux, prefix_cache=self._caches_prefixes)
        role = self.open_role(context)
        self._role_source.change_consensus(self._rank.consensus)
        return role

    @property
    def is_quiet(self) -> bool:
        """See `SimNode.is_quiet`."""
        return not self._rank.copies.num_pending

    def role_change_fails(self) -> bool:
        """See `SimNode.role_change_fails`. Rank 0 draws."""
        return self._rank.log.answer(lambda: False)

    def load_ends(self) -> str | None:
        """See `SimNode.load_ends`. Rank 0 draws."""
        return _text(self._rank.log.answer(bytes))

    def may_install(self, query_id: str) -> bool:
        """See `SimNode.may_install`. Rank 0 knows."""
        return self._rank.log.answer(bool)

    def take_weights(self, number: int) -> None:
        """See `SimNode.take_weights`. Rank 0 has changed the model, which computes for all ranks."""

    def _reports(self) -> RankReports:
        return GroupReports(_Alone(), self._rank.log)

    def _lose_memory(self) -> None:
        """Do nothing: rank 0 has poisoned the pages in all pools."""

    def catch_up(self) -> None:
        """Follow the log up to its end."""
        while self._leader.has_entries(self._rank.number):
            self.scheduler.step()

    def _time(self) -> Clock:
        return self._rank.log

    def _model(self, table: PageTable) -> HashExecutor:
        return self._leader.executor

    def _open_tier(self, num_slots: Mapping[PageSpace, int]) -> None:
        """Do nothing: rank 0 has opened the tier of all ranks."""

    def _on_slots_free(self, space: PageSpace, slots: list[int]) -> None:
        """Do nothing: rank 0 has poisoned the slots of all ranks."""

    def _on_free(self, pages: list[int], space: PageSpace = PageSpace.TOKENS) -> None:
        """Do nothing: rank 0 has poisoned the pages in all pools."""

    def _steps(self, table: PageTable) -> Executor:
        local = _ComputedElsewhere(self._leader.executor, self._rank.number)
        coord = self._parallel.coord(self._rank.number)
        executor = RankExecutor(local, table, self.layout, coord, _Alone(), self._rank.log)
        executor.copy_ends = RankCopyEnds(self._rank.log, self._leader.copy_reports.add)
        return executor

    def _storage_port(self) -> StoragePort:
        own = self._leader.rank_storage_port(self._rank.number)
        return RankStoragePort(own, self._rank.log, self._leader.storage_reports.add)

    def _input_source(self) -> InputSource:
        self._role_source = FollowerInputSource(self._rank.log, self._rank.consensus)
        return self._role_source

    def _aux(self) -> MetadataBuffers:
        return SharedMetadata(
            self._shape.num_aux, self._rank.log, shareable=False, draft_hidden_bytes=self._hidden_bytes
        )

    def _reach_the_world(self) -> tuple[ControlSocket, Directory]:
        return SilentSocket(self.endpoint), NoDirectory()

    def _engine(self) -> CopyEngine:
        return self._rank.open(self._shape)

    def _ranks(self) -> tuple[RankMemory, ...]:
        assert self._leader.kv is not None
        return self._leader.kv.args.ranks

    def _open_pools(self, aux: MetadataBuffers) -> None:
        """Do nothing: rank 0 has registered the pools of all ranks."""


def _text(answer: bytes) -> str | None:
    found: str | None = msgspec.msgpack.decode(answer, type=str | None)
    return found


class _ComputedElsewhere:
    """Implements `Executor` of a follower: rank 0 has computed each step before the follower reaches it."""

    def __init__(self, executor: HashExecutor, rank: int) -> None:
        self._executor, self._rank = executor, rank
        self.buffers = executor.buffers_of(rank)

    @property
    def layout(self) -> KVLayout:
        """See `Executor`."""
        return self._executor.layout

    def open_row(
        self,
        row: int,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        sampling: CoreSamplingParams,
        logprobs: Logprobs | None,
        draft_hidden: bytes = b"",
        hidden: HiddenParams | None = None,
        input_embeds: bytes = b"",
    ) -> None:
        """See `Executor`."""

    def close_row(self, row: int) -> None:
        """See `Executor`."""

    def draft_hidden(self, row: int) -> bytes:
        """See `Executor`. Rank 0 sends it."""
        return b""

    def launch(self, plan: BatchPlan, *, layer_events: bool = False) -> StepHandle:
        """See `Executor`."""
        events = self._executor.events_of(plan.step) if layer_events else None
        return StepHandle(plan, events, lambda: StepResult(plan.step, ()))

    def resolve(self, handle: StepHandle) -> StepResult:
        """See `Executor`."""
        return handle.finish()

    def offload(self, pages: Sequence[Sequence[int]]) -> HostPages:
        """See `Executor`. Rank 0 has saved the pages of all ranks."""
        return _NoPages()

    def restore(self, saved: HostPages, pages: Sequence[Sequence[int]]) -> None:
        """See `Executor`."""

    def start_save(self, copies: Sequence[PageCopies]) -> CopyHandle:
        """See `Executor`: copies this rank's pages."""
        assert self._executor.tier is not None, "there is no host tier"
        return self._executor.tier.start(copies, (self._rank,), to_host=True)

    def start_load(self, copies: Sequence[PageCopies]) -> CopyHandle:
        """See `Executor`: copies this rank's pages."""
        assert self._executor.tier is not None, "there is no host tier"
        return self._executor.tier.start(copies, (self._rank,), to_host=False)

    def poll_copies(self) -> None:
        """See `Executor`."""

    def copy_now(self, copies: Sequence[PageCopies], *, to_host: bool) -> None:
        """See `Executor`. Rank 0 has copied the pages of all ranks."""

    def zero(self, pages: Sequence[Sequence[int]]) -> None:
        """See `Executor`."""

    def seal(self, slot: int, stamp: SlotStamp) -> None:
        """See `Executor`. Rank 0 completes the slots of all ranks."""

    def has_stamp(self, slot: int, stamp: SlotStamp) -> bool:
        """See `Executor`. Rank 0's answer counts."""
        return True


class _NoPages:
    """Implements `HostPages`."""

    num_bytes = 0

    def export(self) -> None:
        """See `HostPages`."""
        return


class _Alone:
    """Implements `RankGroup` for a rank that no other rank waits for."""

    def computed(self, step: int) -> None:
        """See `RankGroup`."""

    def offloaded(self, number: int) -> None:
        """See `RankGroup`."""

    def digested(self, number: int, own: RankDigest) -> tuple[RankDigest, ...]:
        """See `RankGroup`."""
        return (own,)

    def reported(self, number: int, own: bytes) -> tuple[bytes, ...]:
        """See `RankGroup`."""
        return (own,)

    def root_cause(self) -> PdserveError | None:
        """See `RankGroup`."""
        return None


class _Arrival:
    """Implements `Arrival` of a reduction that must be complete when `wait` is called."""

    def __init__(self, brought: list[tuple[Tensor, Callable[[], None]]], count: int) -> None:
        self._brought, self._count = brought, count

    def wait(self) -> None:
        """See `Arrival`."""
        assert len(self._brought) == self._count, "a rank would block on another rank"


class _Reduction:
    """MIN over the values of all ranks in a round; the last rank completes the round."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._rounds: list[list[tuple[Tensor, Callable[[], None]]]] = []
        self._counts = [0] * num_ranks

    def begin(self, rank: int, values: Tensor, then: Callable[[], None]) -> _Arrival:
        """Contribute `values`, which become the minimum over all ranks; then `then` is called."""
        number = self._counts[rank]
        self._counts[rank] += 1
        if number == len(self._rounds):
            self._rounds.append([])
        brought = self._rounds[number]
        brought.append((values, then))
        if len(brought) == self._num_ranks:
            least = torch.stack([each for each, _ in brought]).amin(0)
            for each, end in brought:
                each.copy_(least)
                end()
        return _Arrival(brought, self._num_ranks)
