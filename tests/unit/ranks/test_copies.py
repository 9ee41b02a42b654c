"""Copies out of a follower's pages: run there, reported here, and never before what they copy is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from pdserve.base.mailbox import Mailbox
from pdserve.base.parallel import ParallelShape
from pdserve.executor.interface import BatchPlan
from pdserve.executor.marks import CountedMarks
from pdserve.memory.page_table import PageTable
from pdserve.ranks.copies import RankCopies
from pdserve.ranks.copying import Copier
from pdserve.ranks.leader import GroupExecutor
from pdserve.ranks.orders import RankReady
from pdserve.sim.hash_lm import HashExecutor, hash_layout
from pdserve.transfer import notifications as notifications_module
from pdserve.transfer.events import CopyDone, CopyJob, LayerGate, Notified, TransferEvent
from pdserve.transfer.notifications import encode_note
from pdserve.transfer.plan import PageCopy
from pdserve.transfer.transport import MemoryRegion
from pdserve.transfer.transports.memory import MemoryHub, MemoryTransport
from pdserve.transfer.wire import Key
from pdserve.transfer.workers import CopyWorkers
from tests.unit.ranks.kit import FollowerThread, replica
from tests.unit.transfer.notifying import NotifyingMemory
from tests.unit.transfer.waiting import events_of, wait_until

LAYOUT = hash_layout(4)
SIZE = 1024


@dataclasses.dataclass
class Bench:
    """A leader and one follower, each with memory of its own, and a peer that they write to."""

    copies: RankCopies
    executor: GroupExecutor
    mailbox: Mailbox[TransferEvent]
    thread: FollowerThread
    memory: list[np.ndarray]
    peer: np.ndarray
    transports: list[MemoryTransport]
    """Of the ranks, and of the peer."""

    def job(self, rank: int, gate: LayerGate | None = None, address: str | None = None) -> CopyJob:
        """Copies the second half of a rank's memory to the first half of the peer's."""
        piece = (self.memory[rank].ctypes.data, self.peer.ctypes.data, (PageCopy(SIZE // 2, 0, SIZE // 2),))
        where = self.transports[2].address() if address is None else address
        return CopyJob(Key(1, 2, "o"), 3, "peer", where, (piece,), SIZE // 2, gate, rank=rank)

    def ended(self) -> CopyDone:
        """The next report."""
        (event,) = events_of(self.mailbox, 1)
        assert isinstance(event, CopyDone)
        return event


@pytest.fixture
def bench() -> Iterator[Bench]:
    hub = MemoryHub()
    yield from _bench([MemoryTransport(hub) for _ in range(3)])


@pytest.fixture
def notified() -> Iterator[Bench]:
    """Over a transport that notifies."""
    hub, peers = MemoryHub(), dict[str, NotifyingMemory]()
    yield from _bench([NotifyingMemory(hub, peers) for _ in range(3)])


def _bench(transports: Sequence[MemoryTransport]) -> Iterator[Bench]:
    memory = [np.full(SIZE, 10 + rank, dtype=np.uint8) for rank in range(2)]
    peer = np.zeros(SIZE, dtype=np.uint8)
    for transport, held in zip(transports, (*memory, peer), strict=True):
        transport.register([MemoryRegion(held.ctypes.data, SIZE)])

    def make(rank: int = 0) -> tuple[HashExecutor, PageTable]:
        table = PageTable(2, 4)
        return HashExecutor(LAYOUT, 101, table), table

    local, table = make()
    mailbox: Mailbox[TransferEvent] = Mailbox()
    own = CopyWorkers(transports[0], mailbox.post, 1)
    theirs: list[CopyWorkers] = []
    with replica(ParallelShape(tp_size=2), make) as (followers, (thread,)):
        assert thread.leader is not None

        def open_engine(post):  # type: ignore[no-untyped-def]
            theirs.append(CopyWorkers(transports[1], post, 1))
            return theirs[0]

        thread.leader.copy_with(Copier(open_engine, thread.steps, thread.leader.report))
        executor = GroupExecutor(local, table, LAYOUT, followers)
        ready = [RankReady(num_pages=1, memory=None, samples={}, settle_s=7.0)]
        copies = RankCopies(own, followers, ready, lambda: executor.last_resolved, mailbox.post)
        yield Bench(copies, executor, mailbox, thread, memory, peer, list(transports))
    own.close()
    theirs[0].close()


def test_each_rank_copies_its_own_pages(bench: Bench) -> None:
    for rank in (0, 1):
        job = bench.job(rank)
        bench.copies.submit(job)
        done = bench.ended()
        assert done.job is job and done.failure is None and done.settled and done.write_s >= 0
        assert bench.peer[: SIZE // 2].tolist() == [10 + rank] * (SIZE // 2) and not bench.peer[SIZE // 2 :].any()
    assert bench.copies.settle_s == 7.0, "the longest of all ranks"


def test_a_failure_on_a_follower_is_reported_as_a_value(bench: Bench) -> None:
    bench.copies.submit(bench.job(1, address="nobody"))
    done = bench.ended()
    assert done.failure is not None and done.failure.code == "peer_unreachable" and done.settled


def test_a_job_waits_for_the_follower_s_own_layers_of_its_step(bench: Bench) -> None:
    marks = CountedMarks()
    job = bench.job(1, LayerGate(5, 2, marks.wait))
    marks.on_layer(2)  # of the leader: it says nothing about the follower
    bench.copies.submit(job)
    behind = bench.job(1)
    bench.copies.submit(behind)
    assert bench.ended().job is behind, "nothing was computed yet, so it has nothing to wait for"
    theirs = CountedMarks()
    bench.thread.steps.begun(5, theirs)
    theirs.on_layer(0)
    bench.copies.submit(bench.job(1))
    assert bench.ended().job is not job
    theirs.on_layer(1)
    assert bench.ended().job is job


def test_a_job_without_a_gate_waits_for_the_step_that_the_leader_has_resolved(bench: Bench) -> None:
    resolved = [3]
    bench.copies._last_resolved = lambda: resolved[0]
    job = bench.job(1)
    bench.copies.submit(job)
    resolved[0] = 2
    bench.thread.steps.done(2)
    earlier = bench.job(1)
    bench.copies.submit(earlier)
    assert bench.ended().job is earlier
    bench.thread.steps.done(3)
    assert bench.ended().job is job


def test_a_cancelled_job_is_not_begun(bench: Bench) -> None:
    job = bench.job(1, LayerGate(5, 2, CountedMarks().wait))
    bench.copies.submit(job)
    job.cancelled = True
    bench.copies.cancel(job)
    done = bench.ended()
    assert done.job is job and done.failure is not None and done.failure.code == "cancelled" and done.settled
    assert not bench.peer.any()
    bench.copies.cancel(job)  # too late: nothing happens


def test_jobs_for_a_peer_that_is_gone_are_dropped_on_every_rank(bench: Bench) -> None:
    job = bench.job(1, LayerGate(5, 2, CountedMarks().wait))
    bench.copies.submit(job)
    bench.copies.forget(job.transport_address)
    done = bench.ended()
    assert done.job is job and done.failure is not None and done.failure.code == "peer_gone"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_says_when_it_has_been_notified_of_what_peers_write_to_it(
    rank: int, notified: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = notified.transports[rank]
    assert isinstance(transport, NotifyingMemory) and notified.copies.notifies
    monkeypatch.setattr(notifications_module, "TIMEOUT_S", 0.2)
    assert not notified.copies.expect(Key(1, 2, "o"), rank, 3)
    assert events_of(notified.mailbox, 1) == [Notified(Key(1, 2, "o"), 3, rank)], "as many as it was asked for"
    for index in (5, 6):
        transport.notes.came.put(encode_note(Key(1, 3, "o"), index))
    found = notified.copies.expect(Key(1, 3, "o"), rank, 2)
    assert found == (rank == 0), "a follower says so itself"
    assert found or events_of(notified.mailbox, 1) == [Notified(Key(1, 3, "o"), 0, rank)]


def test_a_step_that_is_computed_opens_what_waits_for_it(bench: Bench) -> None:
    handle = bench.executor.launch(BatchPlan(1, ()), layer_marks=True)
    assert handle.marks is not None
    job = bench.job(1, LayerGate(1, 3, handle.marks.wait))
    bench.copies.submit(job)
    bench.executor.resolve(handle)
    assert bench.ended().job is job
    wait_until(lambda: bench.thread.steps.gate(1, None) is None, "the follower has computed the step")
