"""Bugs of role changes in place that `test_cluster_mutations` plants."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from pdserve.memory.cache_recorder import CacheRecorder
from pdserve.memory.kv_memory import KVMemory
from pdserve.protocol.messages import SwitchRole
from pdserve.ranks.input_log import FollowerLog
from pdserve.scheduler.engine_memory import EngineMemory, ManagedMemory
from pdserve.scheduler.role_switcher import OpenedRole, RoleSwitcher
from pdserve.sim.in_place import SimRoles
from pdserve.sim.node import SimNode
from pdserve.transfer.manager import KVManager

Patch = pytest.MonkeyPatch


def a_role_change_waits_for_no_transfer(patch: Patch) -> None:
    """The prefix cache is kept, and with it pages into which a peer still writes."""
    run, change_role = RoleSwitcher.run, KVMemory.change_role

    def hasty(self: RoleSwitcher, idle: bool, kv: KVManager | None) -> OpenedRole | None:
        return run(self, True, kv)

    def careless(self: KVMemory, num_aux: int, *, prefix_cache: bool, recorder: CacheRecorder | None = None) -> None:
        for pool in (self.pages, self.aux):
            for lease in list(pool.live_leases):
                lease.drop("remote")
                lease.drop("send")
                lease.drop("request")
        change_role(self, num_aux, prefix_cache=prefix_cache, recorder=recorder)

    patch.setattr(RoleSwitcher, "run", hasty)
    patch.setattr(KVMemory, "change_role", careless)


def a_role_change_keeps_the_instance(patch: Patch) -> None:
    """Peers take the new role for the process that they know."""
    prepare = SimRoles.prepare

    def same(self: SimRoles, command: SwitchRole) -> Callable[[], OpenedRole]:
        assert isinstance(self._node, SimNode)
        settings = command.disagg | {"endpoint": self._node.endpoint, "instance": self._node.instance}
        return prepare(self, msgspec.structs.replace(command, disagg=settings))

    patch.setattr(SimRoles, "prepare", same)


def a_rank_changes_its_role_a_turn_later(patch: Patch) -> None:
    run = RoleSwitcher.run
    late: set[RoleSwitcher] = set()

    def slow(self: RoleSwitcher, idle: bool, kv: KVManager | None) -> OpenedRole | None:
        if isinstance(self._clock, FollowerLog) and self not in late:
            late.add(self)
            return None
        late.discard(self)
        return run(self, idle, kv)

    patch.setattr(RoleSwitcher, "run", slow)


def a_release_keeps_the_prefix_cache(patch: Patch) -> None:
    """Prompts read pages whose memory was given back."""
    patch.setattr(ManagedMemory, "_drop_cached", lambda self: None)


def a_release_keeps_the_sessions(patch: Patch) -> None:
    """The transfer manager stays, and with it what peers know of the server."""
    poll = EngineMemory.poll

    def kept(self: EngineMemory, idle: bool, kv: KVManager | None, flush: Callable[[], object]) -> OpenedRole | None:
        return poll(self, True, None, flush)

    patch.setattr(EngineMemory, "poll", kept)
