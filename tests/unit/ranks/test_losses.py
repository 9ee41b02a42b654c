"""Ranks that die, stop, or do not belong: every other one ends, and says whom it lost."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore

from pdserve.base.parallel import ParallelShape
from pdserve.config.groups import MemoryConfig, ServerConfig
from pdserve.errors import ConfigError, PdserveError, RankError
from pdserve.ranks.failure_detector import LinkTimes, PeerRank
from pdserve.ranks.links import RankLink
from pdserve.ranks.messages import Alive, PoolSize, ToFollower, ToLeader, follower_codec, leader_codec
from pdserve.ranks.rank0_link import Rank0Link
from pdserve.ranks.rendezvous import Facts, Introduction, facts_of, rank_names
from pdserve.ranks.worker_links import WorkerLinks, meet_followers
from tests.unit.ranks.kit import HOST, TIMES, TOKEN, Losses, Tap, talking
from tests.waiting import wait_until

SCRIPT = Path(__file__).with_name("follower_process.py")
ROOT = Path(__file__).resolve().parents[3]


@contextlib.contextmanager
def processes(path: Path, num_ranks: int, token: str = TOKEN) -> Iterator[list[subprocess.Popen[str]]]:
    """Follower processes; those that live at the end are killed."""
    command = [sys.executable, str(SCRIPT), str(path), str(num_ranks)]
    started = [
        subprocess.Popen([*command, str(rank), token], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(1, num_ranks)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()


def lead(path: Path, num_ranks: int, losses: Losses, silent_s: float = 30.0) -> WorkerLinks:
    shape = ParallelShape(tp_size=num_ranks)
    times = LinkTimes(beat_s=0.1, silent_s=silent_s)
    store = FileStore(str(path), num_ranks)
    followers = meet_followers(shape, store, TOKEN, host=HOST, on_lost=losses, times=times, timeout_s=60.0)
    assert followers.agree(40) == 40
    followers.wait_ready()
    return followers


def lead_by(links: RankLink[ToFollower, ToLeader], path: Path, shape: ParallelShape) -> None:
    """Lead the replica that meets at `path` over `links`."""
    introduction = Introduction(rank_names(shape), 0, FileStore(str(path), shape.num_ranks), TOKEN, {}, 60.0)
    introduction.publish(links.endpoint, links.nonce)
    followers = WorkerLinks(shape, links, introduction.lookup_followers(), TOKEN, Losses())
    assert followers.agree(40) == 40
    followers.wait_ready()


def ends_with(process: subprocess.Popen[str], status: int) -> str:
    """Wait for the process; what it logged."""
    _, logged = process.communicate(timeout=20)
    assert process.returncode == status, logged
    return logged


def test_a_killed_rank_is_named_and_the_others_end_too(tmp_path: Path) -> None:
    losses = Losses()
    with processes(tmp_path / "store", 3) as (first, second):
        followers = lead(tmp_path / "store", 3, losses)
        second.kill()
        error = losses.wait()
        assert isinstance(error, RankError)
        assert f"rank 2 (tp 2, pp 0) on {socket.gethostname()}, pid {second.pid}, is gone" in str(error)
        assert "rank 1" not in str(error)
        assert "rank 2" in ends_with(first, 1), "the leader has told it"
        with pytest.raises(RankError, match="rank 2"):
            followers.offloaded(1)
        followers.close()


def test_a_stopped_rank_is_silent(tmp_path: Path) -> None:
    losses = Losses()
    with processes(tmp_path / "store", 2) as (process,):
        followers = lead(tmp_path / "store", 2, losses, silent_s=1.0)
        process.send_signal(signal.SIGSTOP)
        error = losses.wait()
        process.send_signal(signal.SIGCONT)
        assert "rank 1" in str(error) and "is silent for" in str(error) and "its last message was" in str(error)
        followers.close()


def test_a_follower_ends_when_its_leader_is_gone_or_says_so(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("gone", "refuses", "stops")]
    with contextlib.ExitStack() as stack:
        (gone,), (refusing,), (stopping,) = (stack.enter_context(processes(path, 2)) for path in paths)
        links: RankLink[ToFollower, ToLeader] = RankLink(0, HOST, follower_codec(), leader_codec(), TIMES)
        lead_by(links, paths[0], ParallelShape(tp_size=2))
        leaders = [lead(path, 2, Losses()) for path in paths[1:]]
        links.close()  # not a word: as a leader that is killed
        leaders[0].close(ConfigError("a flag is wrong", field="x"))
        leaders[1].close()
        assert "rank 0 (tp 0, pp 0)" in ends_with(gone, 1)
        assert "a flag is wrong" in ends_with(refusing, 2)
        assert ends_with(stopping, 0) == ""


def test_another_token_is_refused_on_both_sides() -> None:
    ours, theirs = refusals(TOKEN, {}, "another", {})
    for number, error in ((1, ours), (0, theirs)):
        assert f"rank {number} (tp {number}, pp 0) was started with another PDSERVE_CONTROL_TOKEN" in str(error)
        assert isinstance(error, RankError)


def test_ranks_that_were_started_differently_refuse_each_other_by_the_flag() -> None:
    one, other = (ServerConfig(memory=MemoryConfig(page_size=size)) for size in (16, 32))
    for error in refusals(TOKEN, facts_of(one), TOKEN, facts_of(other)):
        assert isinstance(error, ConfigError) and error.field == "page_size"
        assert re.search(r"has page_size (16|32), rank \d \(tp \d, pp 0\) has (16|32);", str(error))


def refusals(token: str, facts: Facts, their_token: str, their_facts: Facts) -> tuple[PdserveError, PdserveError]:
    """What leader and follower say that do not fit together."""
    store, shape = HashStore(), ParallelShape(tp_size=2)
    said: list[PdserveError] = []

    def follow() -> None:
        try:
            Rank0Link(
                shape.coord(1),
                store,
                their_token,
                host=HOST,
                facts=their_facts,
                on_lost=Losses(),
                times=TIMES,
                timeout_s=10.0,
            )
        except PdserveError as error:
            said.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    with pytest.raises(PdserveError) as caught:
        meet_followers(shape, store, token, host=HOST, facts=facts, on_lost=Losses(), times=TIMES, timeout_s=10.0)
    thread.join()
    return caught.value, said[0]


def test_who_refuses_to_meet_is_heard_by_those_who_wait_for_others() -> None:
    """A host that was told of more ranks refuses the leader, which waits for a rank that never comes."""
    store, wider = HashStore(), ParallelShape(tp_size=4)
    facts = [{"tp_size": str(size)} for size in (2, 4)]
    said: list[PdserveError] = []

    def follow() -> None:
        with pytest.raises(ConfigError) as caught:
            Rank0Link(
                wider.coord(2), store, TOKEN, host=HOST, facts=facts[1], on_lost=Losses(), times=TIMES, timeout_s=30.0
            )
        said.append(caught.value)

    thread = threading.Thread(target=follow)
    thread.start()
    with pytest.raises(ConfigError, match="tp_size"):
        meet_followers(
            ParallelShape(tp_size=2), store, TOKEN, host=HOST, facts=facts[0], on_lost=Losses(), times=TIMES,
            timeout_s=30.0,
        )  # fmt: skip
    thread.join()
    assert said[0].field == "tp_size"


def test_a_follower_that_still_loads_ends_with_its_leader() -> None:
    store, shape = HashStore(), ParallelShape(tp_size=2)
    outcome: list[PdserveError] = []

    def follow() -> None:
        leader = Rank0Link(shape.coord(1), store, TOKEN, host=HOST, facts={}, on_lost=Losses(), times=TIMES)
        with pytest.raises(RankError) as caught:
            leader.agree(5)
        outcome.append(caught.value)
        leader.close()

    thread = threading.Thread(target=follow)
    thread.start()
    meet_followers(shape, store, TOKEN, host=HOST, facts={}, on_lost=Losses(), times=TIMES).close()
    thread.join(20)
    assert not thread.is_alive() and "before all ranks had loaded" in str(outcome[0])


def test_a_peer_that_nobody_listens_for_is_lost() -> None:
    links: RankLink[ToFollower, ToLeader] = RankLink(
        0, HOST, follower_codec(), leader_codec(), LinkTimes(beat_s=0.05, silent_s=0.5)
    )
    gone = RankLink(1, HOST, leader_codec(), follower_codec(), TIMES)
    gone.close()
    losses = Losses()
    links.connect(
        [PeerRank(1, "rank 1", gone.endpoint, gone.nonce)],
        TOKEN,
        alive=Alive(),
        on_message=lambda *_: None,
        on_lost=losses,
    )
    assert "rank 1 cannot be reached; it never sent a message" in str(losses.wait())
    links.close()


def test_a_rank_that_never_comes_is_named() -> None:
    with pytest.raises(RankError, match=r"rank 1 \(tp 1, pp 0\) did not come within 0\.1 s"):
        meet_followers(
            ParallelShape(tp_size=2), HashStore(), TOKEN, host=HOST, on_lost=Losses(), times=TIMES, timeout_s=0.1
        )


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1 for other ranks"):
        RankLink(0, "192.0.2.1", follower_codec(), leader_codec())


def test_a_lost_order_is_not_passed_over(tap: Tap) -> None:
    """The second of three frames does not arrive."""
    with talking(tap=tap.endpoint) as (leader, follower, got, losses):
        leader.broadcast(PoolSize(1))
        leader.broadcast(PoolSize(2))
        first, _, third = tap.take(3)
        tap.send(follower, [first, third])
        assert "rank 0 failed: its message 3 came where 2 was expected" in str(losses.wait())
        assert PoolSize(2) not in got


def test_a_rank_that_computes_for_long_is_not_silent() -> None:
    """Heartbeats have a thread of their own."""
    times = LinkTimes(beat_s=0.05, silent_s=0.4, grace_s=0.1)
    with talking(times) as (_, follower, _, losses):
        since = follower.num_heard
        wait_until(lambda: follower.num_heard > since + 20, "heartbeats for longer than a rank may be silent")
        assert not losses.errors
