"""Copies of a replica of many ranks: each rank runs its own, and all that becomes of them goes to the leader."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pdserve.base.mailbox import Mailbox
from pdserve.base.parallel import ParallelShape
from pdserve.memory.kv_memory import PageTable
from pdserve.ranks.copies import RankCopies
from pdserve.sim.hash_lm import HashExecutor, hash_layout
from pdserve.transfer import notifications as notifications_module
from pdserve.transfer.copy_workers import CopyWorkers
from pdserve.transfer.events import CopyDone, CopyJob, Notified, ReceiverOpened, TransferEvent
from pdserve.transfer.notifications import encode_note
from pdserve.transfer.plan import PageCopy
from pdserve.transfer.room import KVPoll
from pdserve.transfer.transport import MemoryRegion
from pdserve.transfer.transports.memory import MemoryHub
from pdserve.transfer.wire import MemoryKey
from tests.unit.ranks.kit import replica
from tests.unit.transfer.notifying import NotifyingMemory
from tests.waiting import events_of, wait_until

SIZE, DRAIN_TIMEOUT_S, FENCE_DRAIN_TIMEOUT_S = 1024, 7.0, 5.0
KEY = MemoryKey(1, 2, "o")


class Bench:
    """A leader and one follower, each with memory and copy threads of its own, and a peer that they write to.

    Both schedulers are given every job; what the follower tells comes over a real link.
    """

    def __init__(self, hub: MemoryHub) -> None:
        peers = dict[str, NotifyingMemory]()
        self.transports = [NotifyingMemory(hub, peers) for _ in range(3)]
        self.memory = [np.full(SIZE, 10 + rank, dtype=np.uint8) for rank in range(2)]
        self.peer = np.zeros(SIZE, dtype=np.uint8)
        for transport, held in zip(self.transports, (*self.memory, self.peer), strict=True):
            transport.register([MemoryRegion(held.ctypes.data, SIZE)])
        self.mailbox: Mailbox[TransferEvent] = Mailbox()
        self.copies: list[RankCopies] = []
        self.workers: list[CopyWorkers] = []

    def open(self, rank: int, report) -> None:  # type: ignore[no-untyped-def]
        copies = RankCopies(rank)
        workers = CopyWorkers(self.transports[rank], copies.post, 1)
        copies.drive(workers, DRAIN_TIMEOUT_S, FENCE_DRAIN_TIMEOUT_S, report)
        self.workers.append(workers)
        self.copies.append(copies)

    def submit(self, rank: int, index: int = 0, address: str | None = None, *, cancelled: bool = False) -> CopyJob:
        """Copies the second half of a rank's memory to the first half of the peer's."""
        piece = (self.memory[rank].ctypes.data, self.peer.ctypes.data, (PageCopy(SIZE // 2, 0, SIZE // 2),))
        where = self.transports[2].address() if address is None else address
        job = CopyJob(KEY, index, "peer", where, (piece,), SIZE // 2, rank=rank, cancelled=cancelled)
        for copies in self.copies:
            copies.submit(job)
        return job

    def ended(self) -> CopyDone:
        """What the leader hears next, which must be all."""
        (event,) = events_of(self.mailbox, 1)
        assert isinstance(event, CopyDone) and not self.mailbox.drain()
        return event


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(MemoryHub())

    def make(rank: int) -> tuple[HashExecutor, PageTable]:
        table = PageTable(2, 4)
        return HashExecutor(hash_layout(4), 101, table), table

    with replica(ParallelShape(tp_size=2), make) as (_, followers, (thread,)):
        assert thread.leader is not None
        bench.open(0, bench.mailbox.post)
        bench.open(1, thread.leader.report)
        followers.on_copied(bench.mailbox.post)
        yield bench
        for workers in bench.workers:
            workers.close()


def test_each_rank_copies_its_own_pages_once(bench: Bench) -> None:
    for rank in (0, 1):
        bench.submit(rank, index=rank)
        done = bench.ended()
        assert (done.key, done.index, done.failure, done.settled) == (KEY, rank, None, True) and done.write_s >= 0
        assert bench.peer[: SIZE // 2].tolist() == [10 + rank] * (SIZE // 2) and not bench.peer[SIZE // 2 :].any()
    assert [copies.drain_timeout_s for copies in bench.copies] == [DRAIN_TIMEOUT_S] * 2, "the longest of all ranks"
    assert [copies.fence_drain_timeout_s for copies in bench.copies] == [FENCE_DRAIN_TIMEOUT_S] * 2


def test_a_failure_on_a_follower_is_heard_as_a_value(bench: Bench) -> None:
    bench.submit(1, address="nobody")
    done = bench.ended()
    assert done.failure is not None and done.failure.code == "peer_unreachable" and done.settled


def test_a_cancelled_job_is_not_begun_and_ends_all_the_same(bench: Bench) -> None:
    job = bench.submit(1, cancelled=True)
    for copies in bench.copies:
        copies.cancel(job)
    done = bench.ended()
    assert done.failure is not None and done.failure.code == "cancelled" and not bench.peer.any()


def test_an_address_that_comes_before_the_leader_asks_for_it_is_kept() -> None:
    """A follower may be a turn's end ahead. Without it the leader would wait for an address that comes no more."""
    leader, opened = RankCopies(0), ReceiverOpened("s", "there", None, 1)
    leader.heard(opened)
    assert leader.agreed(*leader.poll()) == [], "nothing is pending"
    leader.open_receiver(1, "s")
    items, values = leader.poll()
    theirs = torch.tensor([[KVPoll.SUCCESS, 1, 0]], dtype=torch.int64)
    assert leader.agreed(items, torch.minimum(values, theirs)) == [opened]
    assert not leader.num_pending and not leader.num_reports


def test_every_rank_forgets_a_peer_that_is_gone(bench: Bench) -> None:
    for rank in (0, 1):
        bench.submit(rank)
        assert bench.ended().failure is None
    address = bench.transports[2].address()
    assert [workers.num_threads for workers in bench.workers] == [1, 1]
    for copies in bench.copies:
        copies.forget(address)
    wait_until(lambda: not any(workers.num_threads for workers in bench.workers), "the peer's threads end")


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_is_notified_of_all_ranks_hear_by_the_leader(
    rank: int, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what it knows at once: the others' schedulers do not."""
    assert all(copies.notifies for copies in bench.copies)
    monkeypatch.setattr(notifications_module, "TIMEOUT_S", 0.2)
    assert not any(copies.expect(KEY, rank, 3) for copies in bench.copies)
    assert events_of(bench.mailbox, 1) == [Notified(KEY, 3, rank)]
    other = MemoryKey(1, 3, "o")
    for index in (5, 6):
        bench.transports[rank].notes.came.put(encode_note(other, index))
    assert not any(copies.expect(other, rank, 2) for copies in bench.copies)
    assert events_of(bench.mailbox, 1) == [Notified(other, 0, rank)]
