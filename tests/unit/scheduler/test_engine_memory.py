"""When an engine releases memory: nothing lives, all ranks can, and the role without transfers replaces the present."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import cast

import msgspec
import pytest

from pdserve.base.clock import ManualClock
from pdserve.errors import ConfigError, ModelError, RankError, RequestError
from pdserve.model.named_weights import NamedRows
from pdserve.protocol.engine_memory import GetWeights, ReleaseMemory, ResumeMemory, WeightRows
from pdserve.protocol.messages import CommandReply, SwitchRole, ToApi
from pdserve.ranks.input_log import FollowerLog, LeaderLog
from pdserve.ranks.messages import Entry
from pdserve.ranks.rank_reports import GroupReports, OwnReport, RankReports
from pdserve.scheduler.engine_memory import EngineMemory
from pdserve.scheduler.role_switcher import OpenedRole
from pdserve.transfer.manager import KVManager
from tests.unit.ranks.reductions import Unaided
from tests.unit.scheduler.test_role_switcher import Opener

ALL = ("kv_cache", "weights", "cuda_graph")


class Memory:
    """Notes what is done, and fails with `trouble`."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.trouble: dict[str, str] = {}
        self.rows: list[NamedRows] = []

    def _do(self, what: str, tags: Collection[str] = ()) -> None:
        if what in self.trouble:
            raise ModelError(self.trouble[what])
        self.done.append(" ".join((what, *tags)))

    def read(self, name: str, max_rows: int) -> list[NamedRows]:
        self._do("read")
        return self.rows

    def prepare(self, tags: Collection[str]) -> None:
        self._do("prepare", tags)

    def cancel(self) -> None:
        self._do("cancel")

    def release(self, tags: Collection[str]) -> int:
        self._do("release", tags)
        return 1

    def restore(self, tags: Collection[str]) -> None:
        self._do("restore", tags)


class Manager:
    def __init__(self) -> None:
        self.num_ended = 0

    def end_sessions(self) -> None:
        self.num_ended += 1


class Bench:
    def __init__(self, reports: RankReports | None = None) -> None:
        self.clock, self.opener, self.device, self.kv = ManualClock(), Opener(), Memory(), Manager()
        self.replies: list[CommandReply] = []
        self.num_flushes = 0
        self.memory = EngineMemory(self.device, self.opener, reports or OwnReport(), self.clock, self.hear)

    def hear(self, message: ToApi) -> None:
        assert isinstance(message, CommandReply)
        self.replies.append(message)

    def flush(self) -> None:
        self.num_flushes += 1

    def release(self, *tags: str, idle: bool = True) -> OpenedRole | None:
        self.memory.release(ReleaseMemory(query_id="r", tags=tags, timeout_s=5.0), 0)
        return self.memory.poll(idle, cast(KVManager, self.kv), self.flush)

    def resume(self, *tags: str) -> OpenedRole | None:
        return self.memory.resume(ResumeMemory(query_id="s", tags=tags, server="new"))


def released_of(bench: Bench) -> str:
    return bench.memory.released


def test_memory_goes_and_comes_with_the_role() -> None:
    bench, commands = Bench(), list[SwitchRole]()
    prepare = bench.opener.prepare

    def noted(command: SwitchRole) -> Callable[[], OpenedRole]:
        commands.append(command)
        return prepare(command)

    bench.opener.prepare = noted  # type: ignore[method-assign]
    assert bench.release(*ALL) is bench.opener.opened and bench.replies[0].ok
    assert bench.device.done == ["prepare kv_cache weights cuda_graph", "release kv_cache weights cuda_graph"]
    assert (bench.kv.num_ended, bench.num_flushes, bench.memory.released) == (1, 1, ",".join(ALL))
    with pytest.raises(RequestError, match="until /resume_memory_occupation") as refused:
        bench.memory.require()
    assert (refused.value.status, refused.value.code) == (503, "memory_released")
    assert bench.resume("weights") is None and bench.memory.released == "kv_cache,cuda_graph"
    assert bench.resume(*ALL) is bench.opener.opened and bench.memory.released == ""
    bench.memory.require()
    closed, opened = commands
    assert (closed.disagg["disaggregation_mode"], closed.bootstrap_port) == ("null", None)
    assert (opened.disagg["disaggregation_mode"], opened.bootstrap_port, opened.server) == ("prefill", 8998, "new")


def test_requests_and_transfers_keep_the_memory() -> None:
    bench = Bench()
    bench.memory.release(ReleaseMemory(query_id="r", tags=ALL, timeout_s=5.0), 3)
    assert not bench.memory.is_pending and "3 requests are live" in bench.replies[0].message
    bench.memory.release(ReleaseMemory(query_id="u", tags=ALL, timeout_s=5.0), 0, updates=True)
    assert "being updated" in bench.replies[1].message
    assert bench.release(*ALL, idle=False) is None and bench.memory.is_pending
    bench.clock.advance(5.1)
    assert bench.memory.poll(False, None, bench.flush) is None
    assert "have not ended within 5 s" in bench.replies[2].message
    assert not bench.device.done and not bench.memory.released


def test_a_failure_changes_nothing() -> None:
    bench = Bench()
    bench.device.trouble["prepare"] = "the disk is full"
    assert bench.release(*ALL) is None and bench.replies[-1].message == "the disk is full"
    bench.device.trouble, bench.opener.error = {}, ConfigError("no NIC")
    assert bench.release(*ALL) is None and bench.replies[-1].message == "no NIC"
    assert bench.device.done[-1] == "cancel" and not released_of(bench) and bench.kv.num_ended == 0
    bench.opener.error = None
    assert bench.release(*ALL) is not None
    bench.opener.error = ConfigError("no port")
    assert bench.resume(*ALL) is None and "no port" in bench.replies[-1].message
    assert released_of(bench) == "kv_cache", "the weights are back"
    bench.opener.error, bench.device.trouble = None, {"restore": "the file is gone"}
    assert bench.resume(*ALL) is None
    assert released_of(bench) == "kv_cache"
    bench.device.trouble = {}
    assert bench.resume(*ALL) is not None
    assert not released_of(bench)
    bench.opener.error = RankError("rank 1 is lost")
    with pytest.raises(RankError):
        bench.release(*ALL)


class Pair(Unaided):
    """`RankGroup` of two ranks in one process: rank 0 sees what rank 1 has reported."""

    def __init__(self, reported: deque[bytes], *, leads: bool) -> None:
        self._reported, self._leads = reported, leads

    def reported(self, number: int, own: bytes) -> tuple[bytes, ...]:
        if self._leads:
            return own, self._reported.popleft()
        self._reported.append(own)
        return (own,)


def two_ranks(run: Callable[[Bench, int], None]) -> list[Bench]:
    """Run the same on two ranks, each in its thread: rank 1 reports first, and reads rank 0's answers."""
    reported: deque[bytes] = deque()
    entries: deque[Entry] = deque()
    arrived = threading.Semaphore(0)

    def send(entry: Entry) -> None:
        entries.append(entry)
        arrived.release()

    def receive() -> Entry:
        assert arrived.acquire(timeout=20.0)
        return entries.popleft()

    follower = Bench(GroupReports(Pair(reported, leads=False), FollowerLog("rank 1", 0.0, receive)))
    thread = threading.Thread(target=run, args=(follower, 1))
    thread.start()

    class Waits(Pair):
        def reported(self, number: int, own: bytes) -> tuple[bytes, ...]:
            while not reported:
                thread.join(0.001)
            return super().reported(number, own)

    leader = Bench(GroupReports(Waits(reported, leads=True), LeaderLog(ManualClock(), send)))
    run(leader, 0)
    thread.join(20.0)
    assert not thread.is_alive()
    return [leader, follower]


def test_no_rank_releases_where_one_cannot() -> None:
    def run(bench: Bench, rank: int) -> None:
        if rank == 1:
            bench.device.trouble["prepare"] = "the disk is full"
        assert bench.release(*ALL) is None

    ranks = two_ranks(run)
    assert [bench.replies[-1].message for bench in ranks] == ["rank 1: the disk is full"] * 2
    assert ranks[0].device.done == ["prepare kv_cache weights cuda_graph", "cancel"]


def test_rows_of_all_ranks_are_joined_and_unknown_names_are_told() -> None:
    def run(bench: Bench, rank: int) -> None:
        bench.device.rows = [NamedRows(shape=(4, 1), rows=(2 * rank, 2 * rank + 1), values=bytes([0, 0, 128, 63]) * 2)]
        bench.memory.read(GetWeights(query_id="g", name="a", max_rows=3))
        bench.device.trouble["read"] = "this model has no tensor b"
        bench.memory.read(GetWeights(query_id="h", name="b", max_rows=3))

    leader, _ = two_ranks(run)
    found = msgspec.msgpack.decode(leader.replies[0].payload, type=WeightRows)
    assert found.shape == (3, 1) and found.values == bytes([0, 0, 128, 63]) * 3
    assert leader.replies[1].message == "rank 0: this model has no tensor b"
