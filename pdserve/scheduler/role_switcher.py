"""Role change of a running engine: weights, KV pool, prefix cache, rows and graphs stay.

    SwitchRole ──> wait until nothing is live or under way ──> open the new role's parts, on all ranks
                     └─ timeout: the role stays                    ├─ a rank cannot: all close theirs, the role stays
                                                                   └─ all can: the old parts close, the new role begins

Each rank has a switcher, and the input log gives all ranks the same command in the same turn. What a role needs beside
the engine is an `OpenedRole`: role object, transfer manager and limits. Scheduler thread.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from pdserve.base.clock import Clock
from pdserve.errors import PdserveError, RankError
from pdserve.protocol.messages import CommandReply, SwitchRole, ToApi
from pdserve.scheduler.roles.base import SchedulerRole
from pdserve.transfer.manager import KVManager

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedRole:
    """A role and its transfer manager (None in a monolith). `facts`: see `Scheduler`; `profile_name` too."""

    role: SchedulerRole
    kv: KVManager | None
    facts: Mapping[str, str | int | float | bool | None] = dataclasses.field(default_factory=dict)
    profile_name: str = "TP-0"


class RoleOpener(Protocol):
    """Opens the parts of a role on one rank. The composition roots of the ranks' processes make it."""

    @property
    def is_quiet(self) -> bool:
        """Whether the ranks agree on the outcomes of all copies; equal on all ranks in the same turn."""
        ...

    @property
    def present(self) -> SwitchRole:
        """The command that opens the present role. Only rank 0's names the server."""
        ...

    def prepare(self, command: SwitchRole) -> Callable[[], OpenedRole]:
        """Open the parts of the new role on all ranks, beside those of the present one, which still run.

        Returns a function that closes the present role's parts and makes the new role; it does not fail.

        Raises:
            PdserveError: a rank cannot open them; those that were opened are closed on all ranks.
            RankError: a rank is lost, which ends the engine.
        """
        ...

    def announce(self) -> None:
        """Send `EngineReady` with the facts of the present role. Does nothing on ranks other than 0."""
        ...


class RoleSwitcher:
    """Carries out a `SwitchRole` once the scheduler is idle. `send` gives replies to the API process."""

    def __init__(self, opener: RoleOpener, clock: Clock, send: Callable[[ToApi], None]) -> None:
        self._opener = opener
        self._clock = clock
        self._send = send
        self._pending: SwitchRole | None = None
        self._deadline = 0.0

    @property
    def is_pending(self) -> bool:
        """True while a command waits for the end of the last request, step or transfer."""
        return self._pending is not None

    def accept(self, command: SwitchRole) -> None:
        """Take a command. A second one ends the first, whose caller has given up."""
        if self._pending is not None:
            self._reply(self._pending, False, "another role change was requested")
        self._pending, self._deadline = command, self._clock.now() + command.timeout_s

    def run(self, idle: bool, kv: KVManager | None) -> OpenedRole | None:
        """Change the role if the scheduler is idle; returns the new role, None while the present one stays.

        `kv`: the present transfer manager. `finish` must follow once the new role is in use.
        """
        command = self._pending
        assert command is not None
        if kv is not None:  # the server takes no requests, so the other halves of these do not come
            kv.forget_early()
        if not idle or not self._opener.is_quiet:
            if self._clock.now() > self._deadline:
                self._refuse(command, f"requests or transfers have not ended within {command.timeout_s:g} s")
            return None
        try:
            commit = self._opener.prepare(command)
        except RankError:
            raise
        except PdserveError as error:
            log.error("the role stays: %s", error)
            self._refuse(command, str(error))
            return None
        if kv is not None:
            kv.end_sessions()
        return commit()

    def finish(self) -> None:
        """Report that the new role takes requests."""
        command, self._pending = self._pending, None
        assert command is not None
        self._reply(command, True, "ok")

    def _refuse(self, command: SwitchRole, why: str) -> None:
        self._pending = None
        self._reply(command, False, why)

    def _reply(self, command: SwitchRole, ok: bool, message: str) -> None:
        self._opener.announce()
        self._send(CommandReply(query_id=command.query_id, ok=ok, message=message))
