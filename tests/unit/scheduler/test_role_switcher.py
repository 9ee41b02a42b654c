"""When a scheduler takes another role: idle and quiet, in time, and not when a rank cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from pdserve.base.clock import ManualClock
from pdserve.errors import ConfigError, RankError
from pdserve.protocol.messages import CommandReply, SwitchRole, ToApi
from pdserve.scheduler.role_switcher import OpenedRole, RoleSwitcher
from pdserve.scheduler.roles.base import SchedulerRole


class Opener:
    """Opens a role that is an object, or raises `error`."""

    def __init__(self) -> None:
        self.is_quiet = True
        self.error: Exception | None = None
        self.opened = OpenedRole(role=cast(SchedulerRole, object()), kv=None)
        self.events: list[str] = []

    @property
    def present(self) -> SwitchRole:
        fields: dict[str, str | int | float | bool | None] = {"disaggregation_mode": "prefill"}
        return SwitchRole(query_id="", disagg=fields, server="s", bootstrap_port=8998, timeout_s=0.0)

    def prepare(self, command: SwitchRole) -> Callable[[], OpenedRole]:
        self.events.append("prepare")
        if self.error is not None:
            raise self.error
        return lambda: self.opened

    def announce(self) -> None:
        self.events.append("announce")


class Bench:
    def __init__(self) -> None:
        self.clock, self.opener = ManualClock(), Opener()
        self.replies: list[tuple[str, bool, str]] = []
        self.switcher = RoleSwitcher(self.opener, self.clock, self.hear)

    def hear(self, message: ToApi) -> None:
        assert isinstance(message, CommandReply)
        self.replies.append((message.query_id, message.ok, message.message))

    def ask(self, query_id: str = "q") -> None:
        self.switcher.accept(SwitchRole(query_id=query_id, disagg={}, server="s", bootstrap_port=None, timeout_s=5.0))


def test_the_role_changes_once_the_scheduler_is_idle_and_the_ranks_agree() -> None:
    bench = Bench()
    bench.ask()
    assert bench.switcher.run(False, None) is None
    bench.opener.is_quiet = False
    assert bench.switcher.run(True, None) is None
    assert bench.switcher.is_pending and not bench.replies and not bench.opener.events
    bench.opener.is_quiet = True
    assert bench.switcher.run(True, None) is bench.opener.opened
    bench.switcher.finish()
    assert bench.replies == [("q", True, "ok")] and not bench.switcher.is_pending
    assert bench.opener.events == ["prepare", "announce"]


def test_a_scheduler_that_does_not_become_idle_in_time_keeps_its_role() -> None:
    bench = Bench()
    bench.ask()
    bench.clock.advance(5.0)
    assert bench.switcher.run(False, None) is None and bench.switcher.is_pending
    bench.clock.advance(0.1)
    assert bench.switcher.run(False, None) is None
    assert bench.replies == [("q", False, "requests or transfers have not ended within 5 s")]
    assert bench.opener.events == ["announce"] and not bench.switcher.is_pending


def test_a_rank_that_cannot_open_the_parts_keeps_the_role_and_a_lost_rank_ends_the_engine() -> None:
    bench = Bench()
    bench.opener.error = ConfigError("rank 1: no NIC")
    bench.ask()
    assert bench.switcher.run(True, None) is None
    assert bench.replies == [("q", False, "rank 1: no NIC")] and not bench.switcher.is_pending
    bench.opener.error = RankError("rank 1 is lost")
    bench.ask()
    with pytest.raises(RankError):
        bench.switcher.run(True, None)


def test_a_second_command_ends_the_first() -> None:
    bench = Bench()
    bench.ask("a")
    bench.ask("b")
    assert bench.replies == [("a", False, "another role change was requested")]
    assert bench.switcher.run(True, None) is bench.opener.opened
    bench.switcher.finish()
    assert bench.replies[1:] == [("b", True, "ok")]
