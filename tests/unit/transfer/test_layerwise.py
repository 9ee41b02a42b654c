"""Copy workers and layer events: what is not written yet waits, and holds up nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from pdserve.base.mailbox import Mailbox
from pdserve.memory.layer_events import ALL_WRITTEN, CountedLayerEvents, LayerEvents
from pdserve.transfer.copy_workers import CopyWorkers
from pdserve.transfer.events import CopyDone, CopyJob, TransferEvent
from pdserve.transfer.plan import PageCopy
from pdserve.transfer.transport import MemoryRegion
from pdserve.transfer.transports.memory import MemoryHub, MemoryTransport
from pdserve.transfer.wire import MemoryKey
from tests.waiting import DEADLINE_S, events_of

NUM_SLOTS, SLOT_BYTES = 8, 16


class Rig:
    """One copy thread over the memory transport, and two peers."""

    def __init__(self) -> None:
        hub = MemoryHub()
        self.mailbox: Mailbox[TransferEvent] = Mailbox()
        self.source = np.zeros(NUM_SLOTS * SLOT_BYTES, dtype=np.uint8)
        self.peers: dict[str, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}
        self._transports = []
        for memory in (np.zeros_like(self.source), np.zeros_like(self.source)):
            transport = MemoryTransport(hub)
            transport.register([MemoryRegion(memory.ctypes.data, memory.nbytes)])
            self.peers[transport.address()] = memory
            self._transports.append(transport)
        transport = MemoryTransport(hub)
        transport.register([MemoryRegion(self.source.ctypes.data, self.source.nbytes)])
        self.one, self.two = self.peers
        self.workers = CopyWorkers(transport, self.mailbox.post, num_threads=1)

    def submit(
        self, peer: str, slot: int, events: LayerEvents = ALL_WRITTEN, num_layers: int = 1, room: int = 1
    ) -> CopyJob:
        """Copy one slot to `peer` when the first `num_layers` layers are written."""
        copy = PageCopy(slot * SLOT_BYTES, slot * SLOT_BYTES, SLOT_BYTES)
        piece = (self.source.ctypes.data, self.peers[peer].ctypes.data, (copy,))
        job = CopyJob(MemoryKey(room, 1, peer), slot, peer, peer, (piece,), SLOT_BYTES, events, num_layers)
        self.workers.submit(job)
        return job

    def ended(self, count: int) -> list[CopyDone]:
        """The next reports."""
        return [event for event in events_of(self.mailbox, count) if isinstance(event, CopyDone)]

    def arrived(self, peer: str) -> list[int]:
        """The first byte of each slot at `peer`."""
        return self.peers[peer][::SLOT_BYTES].tolist()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.workers.close()
    assert rig.workers.num_threads == 0


def step() -> CountedLayerEvents:
    """Layer events of a step of `NUM_SLOTS` layers that has written none yet."""
    return CountedLayerEvents(range(NUM_SLOTS))


def test_what_is_copied_is_what_was_there_when_the_layer_was_written(rig: Rig) -> None:
    events = step()
    rig.source[:] = 1
    rig.submit(rig.one, 0, events)
    rig.submit(rig.one, 1)
    assert [report.index for report in rig.ended(1)] == [1], "the thread runs, and the first job waits"
    rig.source[:] = 2
    events.on_layer(0)
    (report,) = rig.ended(1)
    assert report.failure is None
    assert rig.arrived(rig.one) == [2, 1] + [0] * 6


def test_jobs_of_other_peers_keys_and_steps_pass_one_that_waits(rig: Rig) -> None:
    rig.source[:] = 1
    events, written = step(), step()
    written.on_layer(0)
    rig.submit(rig.one, 0, events)
    for peer, slot, layers, room in (
        (rig.two, 1, ALL_WRITTEN, 2),
        (rig.one, 2, ALL_WRITTEN, 3),
        (rig.one, 3, written, 4),
        (rig.one, 4, ALL_WRITTEN, 1),
    ):
        rig.submit(peer, slot, layers, room=room)
    assert {report.index for report in rig.ended(4)} == {1, 2, 3, 4}
    assert rig.arrived(rig.one) == [0, 0, 1, 1, 1, 0, 0, 0]
    events.on_layer(0)
    assert [report.index for report in rig.ended(1)] == [0]
    assert rig.arrived(rig.one)[0] == 1


def test_steps_may_write_their_layers_in_any_order(rig: Rig) -> None:
    steps = [step() for _ in range(4)]
    for slot, events in enumerate(steps):
        rig.submit(rig.one, slot, events)
    for slot in (2, 3, 0, 1):
        steps[slot].on_layer(0)
        assert [report.index for report in rig.ended(1)] == [slot]


def test_a_cancelled_job_does_not_wait_for_its_layers(rig: Rig) -> None:
    rig.source[:] = 1
    events = step()
    cancelled, kept = rig.submit(rig.one, 0, events), rig.submit(rig.one, 1, events)
    cancelled.cancelled = True
    rig.workers.cancel(cancelled)
    (report,) = rig.ended(1)
    assert report.index == cancelled.index and report.settled
    assert report.failure is not None and report.failure.code == "cancelled"
    events.on_layer(0)
    (report,) = rig.ended(1)
    assert report.index == kept.index and report.failure is None
    assert rig.arrived(rig.one) == [0, 1] + [0] * 6


def test_a_job_that_ran_is_not_reported_again_when_it_is_cancelled(rig: Rig) -> None:
    job = rig.submit(rig.one, 0)
    assert rig.ended(1)[0].failure is None
    job.cancelled = True
    rig.workers.cancel(job)
    rig.submit(rig.one, 1)
    assert [report.index for report in rig.ended(1)] == [1]


def test_closing_does_not_wait_for_layers(rig: Rig) -> None:
    events = step()
    for slot in range(3):
        rig.submit(rig.one, slot, events)
    rig.workers.close()
    events.on_layer(0)
    reports = rig.ended(3)
    assert [report.failure is not None and report.failure.code for report in reports] == ["cancelled"] * 3
    assert rig.workers.num_threads == 0
    assert rig.arrived(rig.one) == [0] * 8


def test_layers_that_a_failed_step_never_wrote_fail_their_jobs_and_nothing_else(rig: Rig) -> None:
    rig.source[:] = 1
    events = step()
    rig.submit(rig.one, 0, events, num_layers=1)
    rig.submit(rig.one, 1, events, num_layers=2)
    events.on_layer(0)
    assert rig.ended(1)[0].failure is None
    events.end()
    rig.submit(rig.one, 2, events, num_layers=2)
    for report in rig.ended(2):
        assert report.failure is not None and report.settled
        assert (report.failure.code, report.failure.status) == ("layers_not_written", 500)
    rig.submit(rig.one, 3)
    assert rig.ended(1)[0].failure is None
    assert rig.arrived(rig.one) == [1, 0, 0, 1] + [0] * 4


def test_jobs_for_a_forgotten_peer_do_not_wait_for_their_layers(rig: Rig) -> None:
    events = step()
    rig.submit(rig.one, 0, events)
    rig.submit(rig.two, 1, events)
    rig.workers.forget(rig.one)
    (report,) = rig.ended(1)
    assert report.key.origin == rig.one
    assert report.failure is not None and report.failure.code == "peer_gone" and report.settled
    events.on_layer(0)
    (report,) = rig.ended(1)
    assert report.key.origin == rig.two and report.failure is None


def test_many_layers_of_many_keys_all_arrive_once() -> None:
    rig = Rig()
    rig.source[:] = np.repeat(np.arange(1, NUM_SLOTS + 1, dtype=np.uint8), SLOT_BYTES)
    events = step()
    computing = threading.Thread(target=lambda: [events.on_layer(layer) for layer in range(NUM_SLOTS)])
    computing.start()
    for peer in rig.peers:
        for slot in range(NUM_SLOTS):
            rig.submit(peer, slot, events, num_layers=slot + 1)
    reports = rig.ended(2 * NUM_SLOTS)
    computing.join(DEADLINE_S)
    assert all(report.failure is None for report in reports)
    assert len({(report.key.origin, report.index) for report in reports}) == 2 * NUM_SLOTS
    for peer in rig.peers:
        assert rig.arrived(peer) == list(range(1, NUM_SLOTS + 1))
    rig.workers.close()
