"""Role changes in place of simulated servers: how a `SimNode` opens another role, and how a `SimServer` changes.

Mishaps: drain ──> SwitchRole to all replicas ──> all have it: the server is in the other pool
                                            └──> one cannot: those that have changed return
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from pdserve.errors import ConfigError
from pdserve.protocol.messages import CommandReply, SwitchRole
from pdserve.scheduler.role_switcher import OpenedRole
from pdserve.scheduler.roles.base import SchedulerRole
from pdserve.transfer.manager import KVManager

if TYPE_CHECKING:
    from pdserve.sim.server import SimServer

QUIET_S = 5.0
"""Seconds within which a drained replica must have become idle."""


class RoleNode(Protocol):
    """The part of a `SimNode` that a role change needs."""

    kv: KVManager | None

    @property
    def is_quiet(self) -> bool:
        """See `SimNode`."""
        ...

    def role_change_fails(self) -> bool:
        """See `SimNode`."""
        ...

    def change_role(self, mode: str, endpoint: str, instance: str) -> SchedulerRole:
        """See `SimNode`."""
        ...


class SimRoles:
    """Implements `RoleOpener` for a simulated rank. The role and the names of the command stand in `disagg`."""

    def __init__(self, node: RoleNode) -> None:
        self._node = node

    @property
    def is_quiet(self) -> bool:
        """See `RoleOpener`."""
        return self._node.is_quiet

    def prepare(self, command: SwitchRole) -> Callable[[], OpenedRole]:
        """See `RoleOpener`. Fails at random."""
        node = self._node
        if node.role_change_fails():
            raise ConfigError("injected")
        mode, endpoint, instance = (str(command.disagg[name]) for name in ("mode", "endpoint", "instance"))

        def commit() -> OpenedRole:
            role = node.change_role(mode, endpoint, instance)
            return OpenedRole(role=role, kv=node.kv)

        return commit

    def announce(self) -> None:
        """See `RoleOpener`."""


_numbers = itertools.count()


@dataclasses.dataclass(slots=True)
class RoleChangeInPlace:
    """The change of one server to `role`, under way. `goes_back`: replicas that have changed return to the old role."""

    server: SimServer
    role: str
    goes_back: bool = False
    number: int = dataclasses.field(default_factory=_numbers.__next__)

    def begin(self, names: Callable[[str, str], tuple[str, str]]) -> None:
        """Send the command to all replicas. `names` returns an endpoint, perhaps the present one, and an instance."""
        for index, node in enumerate(self.server.replicas):
            endpoint, instance = names(self.role, node.endpoint)
            settings: dict[str, str | int | float | bool | None] = {"mode": self.role}
            settings |= {"endpoint": endpoint, "instance": instance}
            query_id = f"{self.number}.{index}"
            node.mailbox.post(
                SwitchRole(query_id=query_id, disagg=settings, server="", bootstrap_port=None, timeout_s=QUIET_S)
            )

    def outcome(self) -> bool | None:
        """Whether all replicas have the role; None while one has not replied."""
        replies: list[CommandReply] = []
        for index, node in enumerate(self.server.replicas):
            reply = node.replies.get(f"{self.number}.{index}")
            if reply is None:
                return None
            replies.append(reply)
        return all(reply.ok for reply in replies)
