"""The parts of a follower rank that a role change replaces; see `role.py` for rank 0's.

    rank 0      SwitchRole in the input log ── waits for all ── Answer(RoleDecision): all ranks change, or none
    follower    opens its transport beside the present one ── RolePrepared ──┘

A follower sends nothing to peers and looks up no addresses: rank 0 does that. Main thread of the rank's process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable

import msgspec

from pdserve.base.hosts import outward_addresses
from pdserve.config import ServerConfig
from pdserve.config.resolve import disagg_fields, with_disagg
from pdserve.engine.assemble import Fact, fit_to_role, make_kv_checksum, make_role
from pdserve.engine.build_transfer import make_consensus, make_manager, open_workers
from pdserve.engine.kv_log import open_kv_log
from pdserve.engine.role import OnRole, ignore_role
from pdserve.errors import ConfigError, PdserveError
from pdserve.executor.factory import LoadedEngine
from pdserve.executor.kv_pages import PoolHasher
from pdserve.model.parallel import Parallel
from pdserve.protocol.messages import SwitchRole
from pdserve.ranks.consensus import Consensus
from pdserve.ranks.copies import RankCopies
from pdserve.ranks.input_log import FollowerLog
from pdserve.ranks.messages import RoleDecision, RolePrepared, TransferStart, Trouble
from pdserve.ranks.rank0_link import Rank0Link
from pdserve.ranks.rank_executor import GroupHasher, SharedMetadata
from pdserve.ranks.rendezvous import transfer_host
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.role_switcher import OpenedRole
from pdserve.transfer.copy_workers import CopyWorkers
from pdserve.transfer.events import Address
from pdserve.transfer.manager import KVManager
from pdserve.transfer.plan import rank_memory
from pdserve.transfer.transport import Transport
from pdserve.transfer.wire import RankMemory

log = logging.getLogger(__name__)


class SilentSocket:
    """Implements `ControlSocket` without sending: rank 0, at `endpoint`, talks to peers."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def send(self, endpoint: str, frame: bytes) -> None:
        """See `ControlSocket`."""

    def forget(self, endpoint: str) -> None:
        """See `ControlSocket`."""


class NoDirectory:
    """Implements `Directory` without look-ups: rank 0 looks addresses up and shares the results."""

    def find(self, address: Address) -> None:
        """See `Directory`."""

    def probe(self, instance: str, endpoint: str) -> None:
        """See `Directory`."""


@dataclasses.dataclass(frozen=True)
class Copying:
    """The objects this rank copies KV with."""

    transport: Transport
    workers: CopyWorkers
    copies: RankCopies


@dataclasses.dataclass(frozen=True)
class FollowerParts:
    """What one role has beside the engine. `copying`, `memory`: None in a monolith. `stack` closes the parts."""

    config: ServerConfig
    parallel: Parallel
    copying: Copying | None
    memory: RankMemory | None
    stack: contextlib.ExitStack

    @property
    def drain_timeout_s(self) -> float:
        """See `RankReady`."""
        return 0.0 if self.copying is None else self.copying.workers.drain_timeout_s

    @property
    def fence_drain_timeout_s(self) -> float:
        """See `RankReady`."""
        return 0.0 if self.copying is None else self.copying.workers.fence_drain_timeout_s


def open_parts(config: ServerConfig, built: LoadedEngine, parallel: Parallel, dp_rank: int) -> FollowerParts:
    """Open what the role of `config` needs on this rank. Raises ConfigError, and what transports raise."""
    if config.disagg.disaggregation_mode == "null":
        return FollowerParts(config, parallel, None, None, contextlib.ExitStack())
    coord = built.coord
    with contextlib.ExitStack() as stack:
        copies = RankCopies(coord.rank)
        write_line = open_kv_log(config, dp_rank, coord.rank, stack)
        transport, workers = open_workers(config, built, copies.post, stack, dp_rank, write_line)
        hosts = outward_addresses(transfer_host(config))
        memory = rank_memory(built.layout, coord, "", built.executor.buffers, hosts)
        return FollowerParts(config, parallel, Copying(transport, workers, copies), memory, stack.pop_all())


class FollowerRoles:
    """Opens the roles of a follower; implements `RoleOpener`. `parts`: those of the first role."""

    def __init__(
        self,
        built: LoadedEngine,
        leader: Rank0Link,
        inputs: FollowerLog,
        context: SchedulerContext,
        parts: FollowerParts,
        token: str,
        dp_rank: int,
    ) -> None:
        self._built = built
        self._leader = leader
        self._inputs = inputs
        self._context = context
        self._parts = parts
        self._token = token
        self._dp_rank = dp_rank
        self._num_changes = 0
        self.consensus: Consensus | None = None
        self.on_consensus: Callable[[Consensus | None], None] = lambda consensus: None
        """See `LeaderRoles`."""
        self.on_role: OnRole = ignore_role

    @property
    def is_quiet(self) -> bool:
        """See `RoleOpener`."""
        return self.consensus is None or self.consensus.num_pending == 0

    @property
    def present(self) -> SwitchRole:
        """See `RoleOpener`."""
        fields = disagg_fields(self._parts.config)
        return SwitchRole(query_id="", disagg=fields, server="", bootstrap_port=None, timeout_s=0.0)

    def begin(self, start: TransferStart | None) -> OpenedRole:
        """Make the role object of the opened parts, with rank 0's settings of transfers."""
        config, copying, built = self._parts.config, self._parts.copying, self._built
        kv: KVManager | None = None
        kv_checksum, self.consensus = None, None
        if copying is not None:
            assert start is not None, "rank 0 sent no transfer settings"
            copies, inputs, leader = copying.copies, self._inputs, self._leader
            copies.drive(copying.workers, start.drain_timeout_s, start.fence_drain_timeout_s, leader.report)
            self.consensus = make_consensus(copies, self._parts.parallel, inputs, leader, _do_nothing)
            self._parts.stack.callback(self.consensus.close)
            num_aux = self._context.memory.aux.num_total
            aux = SharedMetadata(num_aux, inputs, draft_hidden_bytes=built.draft_hidden_bytes)
            socket, directory = SilentSocket(start.endpoint), NoDirectory()
            kv = make_manager(
                config, built, start, aux, socket, copies, directory, inputs, self._token, copying.transport
            )
            pages = PoolHasher(built.executor.pools, built.layout, built.coord)
            facts: dict[str, Fact] = {
                "instance": start.instance,
                "dp_rank": self._dp_rank,
                "dtype": built.dtype,
                "layout_fingerprint": built.layout.fingerprint(),
            }
            kv_checksum = make_kv_checksum(config, built, GroupHasher(pages, leader, inputs), facts, None)
        role = make_role(config, self._context, kv, kv_checksum)
        return OpenedRole(role=role, kv=kv, profile_name=f"DP-{self._dp_rank}-RANK-{built.coord.rank}")

    def prepare(self, command: SwitchRole) -> Callable[[], OpenedRole]:
        """See `RoleOpener`."""
        self._num_changes += 1
        number = self._num_changes
        parts: FollowerParts | None = None
        try:
            config = with_disagg(self._parts.config, command.disagg)
            parts = open_parts(config, self._built, self._parts.parallel, self._dp_rank)
            report = RolePrepared(
                number=number,
                memory=parts.memory,
                drain_timeout_s=parts.drain_timeout_s,
                fence_drain_timeout_s=parts.fence_drain_timeout_s,
            )
        except Exception as error:
            if not isinstance(error, PdserveError):
                log.exception("the parts of the new role cannot be opened")
            report = RolePrepared(number=number, trouble=Trouble.of(error))
        self._leader.report(report)
        answer = self._inputs.answer(_never)
        assert isinstance(answer, bytes)
        decision = msgspec.msgpack.decode(answer, type=RoleDecision)
        if decision.failure is not None or parts is None:
            if parts is not None:
                parts.stack.close()
            raise ConfigError(decision.failure or "this rank cannot open the parts of the new role")
        return functools.partial(self._change_to, parts, decision.transfer)

    def announce(self) -> None:
        """See `RoleOpener`."""

    def close(self) -> None:
        """Close the parts of the present role."""
        self._parts.stack.close()

    def _change_to(self, parts: FollowerParts, start: TransferStart | None) -> OpenedRole:
        try:
            self._parts.stack.close()
        except Exception:
            log.exception("a part of the former role did not close")
        self._parts = parts
        fit_to_role(self._context, parts.config, self._built, None)
        opened = self.begin(start)
        self.on_consensus(self.consensus)
        self.on_role(parts.config.disagg.disaggregation_mode)
        return opened


def _do_nothing() -> None:
    """Ignore the wake-up: rank 0 decides when followers take a reduction."""


def _never() -> bytes:
    raise AssertionError("rank 0 decides")
