"""The simulated copy engine and layer events: jobs start after their layers, and play the same from a seed."""

from __future__ import annotations

import numpy as np
import pytest

from pdserve.base.clock import ManualClock
from pdserve.base.mailbox import Mailbox
from pdserve.memory.layer_events import ALL_WRITTEN, CountedLayerEvents, LayerEvents
from pdserve.memory.lease import PageAllocator
from pdserve.scheduler.scheduler import Event
from pdserve.sim.network import Faults, Pool, SimCopyEngine, SimNet
from pdserve.transfer.events import CopyDone, CopyJob
from pdserve.transfer.plan import PageCopy
from pdserve.transfer.wire import MemoryKey

PAGE_BYTES = 8
ONCE = Faults(repeated=0.0)


class Rig:
    """A prefill server's engine, and the pools of both sides with one page each."""

    def __init__(self, faults: Faults = ONCE, seed: int = 0) -> None:
        self.clock = ManualClock()
        self.net = SimNet(seed, self.clock, faults)
        self.mailbox: Mailbox[Event] = Mailbox()
        self.net.mailboxes |= {"prefill:0": self.mailbox, "decode:0": Mailbox()}
        self.engine = SimCopyEngine(self.net, "prefill:0", lambda endpoint: endpoint in self.net.mailboxes)
        self.receiver = SimCopyEngine(self.net, "decode:0", lambda endpoint: endpoint in self.net.mailboxes)
        self.net.processes["prefill-0"] = ["prefill:0"]
        self.receiver.open_receiver(0, "prefill-0#1")
        self.net.deliver()
        self.source = np.full(PAGE_BYTES, 7, dtype=np.uint8)
        self.target = np.zeros(PAGE_BYTES, dtype=np.uint8)
        for memory in (self.source, self.target):
            allocator = PageAllocator(1)
            allocator.take(1)
            self.net.pools[memory.ctypes.data] = Pool(PAGE_BYTES, allocator)

    def submit(self, events: LayerEvents) -> CopyJob:
        """Copy the page."""
        piece = (self.source.ctypes.data, self.target.ctypes.data, (PageCopy(0, 0, PAGE_BYTES),))
        key, address = MemoryKey(1, 1, "decode-0"), "decode:0/prefill-0#1"
        job = CopyJob(key, 0, "decode-0", address, (piece,), PAGE_BYTES, events, num_layers=1)
        self.engine.submit(job)
        return job

    def pass_time(self, seconds: float) -> list[CopyDone]:
        """What was reported meanwhile."""
        for _ in range(round(seconds)):
            self.clock.advance(1.0)
            self.net.deliver()
        return [event for event in self.mailbox.drain() if isinstance(event, CopyDone)]


def step() -> CountedLayerEvents:
    """Layer events of a step of one layer."""
    return CountedLayerEvents(range(1))


def test_a_job_is_copied_after_its_layers_are_written() -> None:
    rig, events = Rig(), step()
    rig.submit(events)
    assert not rig.pass_time(50) and not rig.target.any()
    events.on_layer(0)
    (report,) = rig.pass_time(10)
    assert report.failure is None and (rig.target == 7).all()
    assert not rig.net.busy


def test_a_cancelled_job_ends_without_its_layers() -> None:
    rig, events = Rig(), step()
    job = rig.submit(events)
    rig.pass_time(10)
    job.cancelled = True
    rig.engine.cancel(job)
    (report,) = rig.pass_time(10)
    assert report.failure is not None and report.failure.code == "cancelled" and report.settled
    events.on_layer(0)
    assert not rig.pass_time(10) and not rig.target.any() and not rig.net.busy


def test_layers_that_are_never_written_fail_the_job() -> None:
    rig, events = Rig(), step()
    rig.submit(events)
    events.end()
    (report,) = rig.pass_time(10)
    assert report.failure is not None and report.failure.code == "layers_not_written" and report.settled
    assert not rig.net.busy


@pytest.mark.parametrize("victim", ["prefill:0", "decode:0"])
def test_a_dead_server_leaves_no_job_behind(victim: str) -> None:
    rig, events = Rig(), step()
    rig.submit(events)
    rig.pass_time(5)
    del rig.net.mailboxes[victim]
    events.on_layer(0)
    reports = rig.pass_time(10)
    assert [report.failure is not None and report.failure.code for report in reports] == (
        ["peer_gone"] if victim == "decode:0" else []
    )
    assert not rig.net.busy


def test_a_world_without_delays_copies_at_once() -> None:
    rig, events = Rig(Faults(repeated=0.0, max_delay_s=0.0)), step()
    rig.submit(events)
    assert not rig.pass_time(3)
    events.on_layer(0)
    assert len(rig.pass_time(1)) == 1


def test_the_same_seed_copies_at_the_same_time() -> None:
    def play(seed: int) -> list[float]:
        """When each of ten jobs was reported."""
        rig, times = Rig(seed=seed), list[float]()
        for _ in range(10):
            rig.submit(ALL_WRITTEN)
            while not rig.mailbox.drain():
                assert rig.clock.now() < 60.0
                rig.clock.advance(0.001)
                rig.net.deliver()
            times.append(rig.clock.now())
        return times

    assert play(1) == play(1) != play(2)
