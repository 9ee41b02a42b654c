"""The parts of rank 0 that a role change replaces; the engine, its memory and its prefix cache stay.

    stays      weights, executor, KV pool, rows, prefix cache, KV events, counters, channel, links between the ranks
    replaced   role object, transport and its copy workers, control socket, transfer manager (a new instance),
               directory, route at the bootstrap server, consensus, KV log

The new parts are opened while the old ones still run, so a failure leaves the old role as it was. Scheduler thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from pdserve.base.mailbox import Mailbox
from pdserve.base.startup_times import TRANSFER
from pdserve.config import DisaggMode, ServerConfig
from pdserve.config.resolve import disagg_fields, with_disagg
from pdserve.engine.assemble import Fact, fit_to_role, make_kv_checksum, make_role, num_aux_slots
from pdserve.engine.build_transfer import OpenedTransfer, ReplicaId, open_transfer
from pdserve.engine.kv_events import KVEvents, open_kv_events
from pdserve.engine.kv_log import open_kv_log
from pdserve.engine.replica import ReplicaEngine
from pdserve.errors import ConfigError, PdserveError, RankError
from pdserve.memory.page_keys import KeyNamespace
from pdserve.protocol.messages import SwitchRole
from pdserve.protocol.weights import weights_name
from pdserve.ranks.consensus import Consensus
from pdserve.ranks.messages import RankReady, RoleDecision, RolePrepared
from pdserve.scheduler.context import SchedulerContext
from pdserve.scheduler.kv_checksum import WriteLine
from pdserve.scheduler.role_switcher import OpenedRole
from pdserve.scheduler.scheduler import Event
from pdserve.scheduler.step_log import DecodeStepLog
from pdserve.transfer.events import TransferEvent

log = logging.getLogger(__name__)

Reports = Callable[[], Sequence[RankReady | RolePrepared]]
"""Waits for the reports of all followers and returns them in rank order; empty for a single rank."""


OnRole = Callable[[DisaggMode], None]
"""Called with each later role of the process, to name the process after it."""


def ignore_role(role: DisaggMode) -> None:
    """Default `OnRole`; does nothing."""


@dataclasses.dataclass(frozen=True)
class RoleParts:
    """What one role has beside the engine. `stack` closes it."""

    config: ServerConfig
    replica: ReplicaId
    transfer: OpenedTransfer | None
    write_line: WriteLine | None
    stack: contextlib.ExitStack


class LeaderRoles:
    """Opens the roles of rank 0; implements `RoleOpener`.

    `facts` are those that no role changes. `events`: the publisher of KV events, None where it is off so far. `stack`
    ends with the process. `announce` sends `EngineReady` with facts.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: ReplicaEngine,
        mailbox: Mailbox[Event],
        replica: ReplicaId,
        token: str,
        facts: dict[str, Fact],
        events: KVEvents | None,
        stack: contextlib.ExitStack,
        announce: Callable[[dict[str, Fact]], None],
    ) -> None:
        self._config = config
        self._engine = engine
        self._mailbox = mailbox
        self._replica = replica
        self._token = token
        self._facts = facts
        self.events = events
        self._stack = stack
        self._announce = announce
        self._present: RoleParts | None = None
        self._present_facts: dict[str, Fact] = {}
        self._weights = weights_name(config.model.weight_version, engine.weights_fingerprint)
        self._num_changes = 0
        self.on_consensus: Callable[[Consensus | None], None] = lambda consensus: None
        """Called with the consensus of each later role; None: nothing is transferred."""
        self.on_role: OnRole = ignore_role
        stack.callback(self._close)

    @property
    def consensus(self) -> Consensus | None:
        """The consensus of the present role; None for a single rank, or where nothing is transferred."""
        present = self._present
        return None if present is None or present.transfer is None else present.transfer.consensus

    @property
    def is_quiet(self) -> bool:
        """See `RoleOpener`."""
        return self.consensus is None or self.consensus.num_pending == 0

    @property
    def present(self) -> SwitchRole:
        """See `RoleOpener`."""
        assert self._present is not None
        config, replica = self._present.config, self._present.replica
        return SwitchRole(
            query_id="", disagg=disagg_fields(config), server=replica.server, bootstrap_port=replica.bootstrap_port,
            timeout_s=0.0,
        )  # fmt: skip

    def open_first(self, context: SchedulerContext, storage: KeyNamespace | None) -> OpenedRole:
        """Open the first role, with the reports that followers gave when they became ready. `storage`: see `Begin`."""
        self._context = context
        group = self._engine.group
        with self._engine.startup.part(TRANSFER):
            parts = self._open(self._config, self._replica, lambda: () if group is None else group.ready)
        opened = self._begin(parts)
        if group is not None:
            group.begin(None if parts.transfer is None else parts.transfer.start, storage)
        return opened

    def prepare(self, command: SwitchRole) -> Callable[[], OpenedRole]:
        """See `RoleOpener`."""
        self._num_changes += 1
        group, reports = self._engine.group, self._reports(self._num_changes)
        parts: RoleParts | None = None
        failure: PdserveError | None = None
        try:
            config = with_disagg(self._config, command.disagg)
            replica = dataclasses.replace(self._replica, server=command.server, bootstrap_port=command.bootstrap_port)
            if config.kv_events is not None and self.events is None and config.wants_prefix_cache:
                self.events = open_kv_events(config, self._engine, self._replica.dp_rank, self._stack)
            parts = self._open(config, replica, reports)
            reports()
        except RankError:
            raise
        except PdserveError as error:
            failure = error
        except Exception as error:
            log.exception("the parts of the new role cannot be opened")
            failure = ConfigError(f"{type(error).__name__}: {error}")
        if group is not None:
            with contextlib.suppress(ConfigError):
                reports()  # a rank whose report is not taken would answer the next change with it
            start = None if parts is None or parts.transfer is None else parts.transfer.start
            decision = RoleDecision(None if failure is None else str(failure), start)
            group.log.answer(lambda: msgspec.msgpack.encode(decision))
        if failure is not None or parts is None:
            if parts is not None:
                _close_quietly(parts.stack)
            assert failure is not None
            raise failure
        opened = parts
        return lambda: self._change_to(opened)

    def announce(self) -> None:
        """See `RoleOpener`."""
        self._announce(self._present_facts)

    def change_weights(self, facts: Mapping[str, Fact], weights: str) -> None:
        """Take and announce the facts of other weights; roles that follow begin with `weights`, see `weights_name`."""
        self._weights = weights
        self._facts |= facts
        self._present_facts |= facts
        self._announce(self._present_facts)

    # ------------------------------------------------------------------ inside

    def _reports(self, number: int) -> Reports:
        """Return the reports of change `number`, which are waited for once."""
        group, taken = self._engine.group, list[Sequence[RolePrepared]]()

        def reports() -> Sequence[RolePrepared]:
            if not taken:
                taken.append(() if group is None else group.followers.wait_role(number))
            for rank, one in enumerate(taken[0], 1):
                if one.trouble is not None:
                    raise ConfigError(f"rank {rank}: {one.trouble.message}", field=one.trouble.field)
            return taken[0]

        return reports

    def _open(self, config: ServerConfig, replica: ReplicaId, reports: Reports) -> RoleParts:
        """Open the parts of the role of `config`; closes them again if one cannot be opened."""
        with contextlib.ExitStack() as stack:
            write_line = open_kv_log(config, replica.dp_rank, 0, stack)
            transfer = None
            if config.disagg.disaggregation_mode != "null":
                num_aux = num_aux_slots(config, self._engine.built.table.num_rows)
                transfer = open_transfer(
                    config, self._engine, self._mailbox, num_aux, replica, self._token, stack, write_line, reports,
                    self._weights,
                )  # fmt: skip
            return RoleParts(config, replica, transfer, write_line, stack.pop_all())

    def _change_to(self, parts: RoleParts) -> OpenedRole:
        """Close the present role's parts, and begin the new role."""
        assert self._present is not None
        _close_quietly(self._present.stack)
        self._mailbox.discard(lambda event: isinstance(event, TransferEvent))  # of threads that have ended
        recorder = None if self.events is None else self.events.recorder
        fit_to_role(self._context, parts.config, self._engine.built, recorder)
        opened = self._begin(parts)
        self.on_consensus(self.consensus)
        self.on_role(parts.config.disagg.disaggregation_mode)
        return opened

    def _begin(self, parts: RoleParts) -> OpenedRole:
        """Make the role object of opened parts."""
        config, transfer, built = parts.config, parts.transfer, self._engine.built
        mode, dp_rank = config.disagg.disaggregation_mode, self._replica.dp_rank
        facts = self._facts | {"disaggregation_mode": mode} | ({} if transfer is None else transfer.facts)
        if self.events is not None:
            facts |= self.events.endpoints()
        step_log, kv_checksum = None, None
        if parts.write_line is not None and mode != "prefill":
            step_log = DecodeStepLog(parts.write_line, built.layout, dp_rank=dp_rank)
        if transfer is not None:
            if self._engine.group is not None and transfer.consensus is not None:
                self._engine.group.followers.on_copied(transfer.consensus.heard)
            kv_checksum = make_kv_checksum(config, built, self._engine.hasher(), facts, parts.write_line)
        kv = None if transfer is None else transfer.kv
        role = make_role(config, self._context, kv, kv_checksum, step_log)
        self._present, self._present_facts = parts, facts
        return OpenedRole(
            role=role,
            kv=kv,
            facts=facts,
            profile_name=f"{mode if mode != 'null' else 'server'}-DP-{dp_rank}",
        )

    def live_facts(self) -> dict[str, str | float]:
        """Return the facts that change while the engine runs."""
        return {**self._engine.facts(), **({} if self.events is None else self.events.facts())}

    def _close(self) -> None:
        if self._present is not None:
            self._present.stack.close()


def _close_quietly(stack: contextlib.ExitStack) -> None:
    """Close the parts of a role that has ended; an error of one of them is logged, since the new role can begin."""
    try:
        stack.close()
    except Exception:
        log.exception("a part of the former role did not close")
