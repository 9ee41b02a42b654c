"""Replicas in one process: a leader here, and followers in threads, over real sockets on loopback."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import zmq
from torch.distributed import HashStore

from pdserve.base.clock import MonotonicClock
from pdserve.base.parallel import ParallelShape, RankCoord
from pdserve.errors import PdserveError
from pdserve.executor.interface import Executor
from pdserve.memory.kv_memory import PageTable
from pdserve.ranks.failure_detector import LinkTimes, PeerRank
from pdserve.ranks.input_log import FollowerLog, InputLog, LeaderLog, RankGroup
from pdserve.ranks.links import RankLink
from pdserve.ranks.messages import Alive, Begin, RankReady, ToFollower, ToLeader, follower_codec, leader_codec
from pdserve.ranks.rank0_link import Rank0Link, Stopped
from pdserve.ranks.rank_executor import RankExecutor
from pdserve.ranks.worker_links import WorkerLinks, meet_followers

TOKEN = "secret"
HOST = "127.0.0.1"
TIMES = LinkTimes(beat_s=0.05, silent_s=5.0, join_s=10.0, grace_s=0.1)
MEET_S = 10.0
RECEIVE_MS = 10_000


class Losses:
    """An `on_lost` that remembers."""

    def __init__(self) -> None:
        self.errors: list[PdserveError] = []
        self._came = threading.Event()

    def __call__(self, error: PdserveError) -> None:
        self.errors.append(error)
        self._came.set()

    def wait(self) -> PdserveError:
        """The first loss."""
        assert self._came.wait(10.0), "nobody was lost"
        return self.errors[0]


class MakeRank(Protocol):
    """Makes a rank's own executor, and its table."""

    def __call__(self, rank: int) -> tuple[Executor, PageTable]: ...


@dataclasses.dataclass(frozen=True)
class Rank:
    """What a rank works with: `executor` is in step with the others', `own` is its part."""

    coord: RankCoord
    executor: RankExecutor
    own: Executor
    table: PageTable
    rank_group: RankGroup
    log: InputLog


Work = Callable[[Rank], object]


class FollowerThread:
    """One follower, which does `work`. `error` is what that ended with."""

    def __init__(self, shape: ParallelShape, rank: int, store: HashStore, make: MakeRank, work: Work) -> None:
        self.coord, self._store, self._work = shape.coord(rank), store, work
        self.own, self.table = make(rank)
        self.losses = Losses()
        self.error: BaseException | None = None
        self.leader: Rank0Link | None = None
        self._thread = threading.Thread(target=self._run, name=f"follower-{rank}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            leader = self.leader = Rank0Link(
                self.coord, self._store, TOKEN, host=HOST, on_lost=self.losses, times=TIMES, timeout_s=MEET_S
            )
            leader.agree(100 + self.coord.rank)
            leader.report(RankReady(facts={}, memory=None, samples={}, drain_timeout_s=0.0, fence_drain_timeout_s=0.0))
            log = FollowerLog(f"rank {self.coord.rank}", leader.wait_begin().now, leader.next_entry)
            executor = RankExecutor(
                self.own, self.table, self.own.layout, self.coord, leader, log, compute_at_launch=True
            )
            self._work(Rank(self.coord, executor, self.own, self.table, leader, log))
            leader.wait_stop()
        except Stopped:
            pass
        except Exception as error:
            self.error = error
            if self.leader is not None:
                self.leader.close(error)

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join(10.0)
        assert not self._thread.is_alive(), "a follower does not end"
        if self.leader is not None:
            self.leader.close()


def nothing(rank: Rank) -> None:
    """A follower's work where the leader says nothing."""


@contextlib.contextmanager
def replica(
    shape: ParallelShape, make: MakeRank, work: Work = nothing, losses: Losses | None = None
) -> Iterator[tuple[Rank, WorkerLinks, Sequence[FollowerThread]]]:
    """The leader's rank, its door, and its followers, which have begun."""
    store = HashStore()
    threads = [FollowerThread(shape, rank, store, make, work) for rank in range(1, shape.num_ranks)]
    followers = meet_followers(
        shape, store, TOKEN, host=HOST, on_lost=losses or Losses(), times=TIMES, timeout_s=MEET_S
    )
    try:
        assert followers.agree(1000) == 101
        assert len(followers.wait_ready()) == len(threads)
        own, table = make(0)
        log = LeaderLog(MonotonicClock(), followers.broadcast)
        followers.broadcast(Begin(now=log.now(), rebalances=False, transfer=None))
        coord = shape.coord(0)
        executor = RankExecutor(own, table, own.layout, coord, followers, log)
        yield Rank(coord, executor, own, table, followers, log), followers, threads
    finally:
        followers.close()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def talking(
    times: LinkTimes = TIMES, *, tap: str | None = None
) -> Iterator[tuple[RankLink[ToFollower, ToLeader], RankLink[ToLeader, ToFollower], list[ToFollower], Losses]]:
    """Leader and follower, what the follower got, and the losses of both. With `tap` the leader sends there instead."""
    leader: RankLink[ToFollower, ToLeader] = RankLink(0, HOST, follower_codec(), leader_codec(), times)
    follower: RankLink[ToLeader, ToFollower] = RankLink(1, HOST, leader_codec(), follower_codec(), times)
    got: list[ToFollower] = []
    losses = Losses()

    def take(rank: int, order: ToFollower) -> None:
        if not isinstance(order, Alive):
            got.append(order)

    of_leader = PeerRank(0, "rank 0", leader.endpoint, leader.nonce)
    of_follower = PeerRank(1, "rank 1", tap or follower.endpoint, follower.nonce)
    follower.connect([of_leader], TOKEN, alive=Alive(), on_message=take, on_lost=losses)
    leader.connect([of_follower], TOKEN, alive=Alive(), on_message=lambda *_: None, on_lost=losses)
    try:
        yield leader, follower, got, losses
    finally:
        follower.close()
        leader.close()


class Tap:
    """Stands on the way to a rank: takes frames, and sends what it likes to any rank."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._pull = context.socket(zmq.PULL)
        self._pull.linger, self._pull.rcvtimeo = 0, RECEIVE_MS
        self._pull.bind(f"tcp://{HOST}:*")
        self.endpoint = self._pull.getsockopt_string(zmq.LAST_ENDPOINT)
        self._pushes: dict[str, zmq.Socket[bytes]] = {}

    def take(self, count: int) -> list[bytes]:
        """The next frames."""
        return [self._pull.recv() for _ in range(count)]

    def send(
        self, links: RankLink[ToFollower, ToLeader] | RankLink[ToLeader, ToFollower], frames: Sequence[bytes]
    ) -> None:
        """In a connection of its own to each rank."""
        if links.endpoint not in self._pushes:
            push = self._pushes[links.endpoint] = self._context.socket(zmq.PUSH)
            push.linger = 0
            push.connect(links.endpoint)
        for frame in frames:
            self._pushes[links.endpoint].send(frame)
