"""Replicas in one process: a leader here, and followers that obey in threads, over real sockets on loopback."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch.distributed import HashStore

from pdserve.base.parallel import ParallelShape
from pdserve.errors import PdserveError
from pdserve.executor.interface import Executor
from pdserve.memory.page_table import PageTable
from pdserve.ranks.computing import Computer
from pdserve.ranks.follower import Leader, reports_steps
from pdserve.ranks.followers import Followers, meet_followers
from pdserve.ranks.orders import RankReady
from pdserve.ranks.steps import StepLog
from pdserve.ranks.watch import LinkTimes

TOKEN = "secret"
HOST = "127.0.0.1"
TIMES = LinkTimes(beat_s=0.05, silent_s=5.0, join_s=10.0, grace_s=0.1)
MEET_S = 10.0


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
    """Makes the executor of a follower, and its table."""

    def __call__(self, rank: int) -> tuple[Executor, PageTable]: ...


class FollowerThread:
    """One follower. `error` is what its computing thread ended with."""

    def __init__(self, shape: ParallelShape, rank: int, store: HashStore, make: MakeRank, num_layers: int = 3) -> None:
        self.place, self._store = shape.place(rank), store
        self.executor, self.table = make(rank)
        self.steps = StepLog(range(num_layers))
        self.losses = Losses()
        self.error: BaseException | None = None
        self.leader: Leader | None = None
        self._thread = threading.Thread(target=self._run, name=f"follower-{rank}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.leader = Leader(
                self.place, self._store, TOKEN, host=HOST, on_lost=self.losses, times=TIMES, timeout_s=MEET_S
            )
            self.leader.agree(100 + self.place.rank)
            self.leader.report(RankReady(num_pages=101, memory=None, samples={}, settle_s=0.0))
            self.computer = Computer(
                self.executor, self.table, self.steps, self.leader.report, reports_steps=reports_steps(self.place)
            )
            self.computer.run(self.leader.orders)
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


@contextlib.contextmanager
def replica(
    shape: ParallelShape, make: MakeRank, losses: Losses | None = None
) -> Iterator[tuple[Followers, Sequence[FollowerThread]]]:
    """A leader's door, and its followers; all are ready."""
    store = HashStore()
    threads = [FollowerThread(shape, rank, store, make) for rank in range(1, shape.num_ranks)]
    followers = meet_followers(
        shape, store, TOKEN, host=HOST, on_lost=losses or Losses(), times=TIMES, timeout_s=MEET_S
    )
    try:
        assert followers.agree(1000) == 101
        assert len(followers.wait_ready()) == len(threads)
        yield followers, threads
    finally:
        followers.close()
        for thread in threads:
            thread.join()
