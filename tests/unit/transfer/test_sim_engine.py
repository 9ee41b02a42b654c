"""The simulated copy engine and gates: it looks again later, gives up in the end, and plays the same from a seed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pdserve.base.clock import ManualClock
from pdserve.base.mailbox import Mailbox
from pdserve.memory.allocator import PageAllocator
from pdserve.scheduler.scheduler import Event
from pdserve.sim.network import Faults, Pool, SimCopyEngine, SimNet
from pdserve.transfer.copy_workers import GATE_TIMEOUT_S
from pdserve.transfer.events import CopyDone, CopyJob, LayersReady
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

    def submit(self, ready: LayersReady | None) -> CopyJob:
        """Copy the page."""
        piece = (self.source.ctypes.data, self.target.ctypes.data, (PageCopy(0, 0, PAGE_BYTES),))
        job = CopyJob(MemoryKey(1, 1, "decode-0"), 0, "decode-0", "decode:0/prefill-0#1", (piece,), PAGE_BYTES, ready)
        self.engine.submit(job)
        return job

    def pass_time(self, seconds: float) -> list[CopyDone]:
        """What was reported meanwhile."""
        for _ in range(round(seconds)):
            self.clock.advance(1.0)
            self.net.deliver()
        return [event for event in self.mailbox.drain() if isinstance(event, CopyDone)]


@dataclasses.dataclass
class Gate:
    """Opened by the test; counts who asks, and must never be waited on."""

    is_open: bool = False
    num_asked: int = 0

    def __call__(self, timeout_s: float) -> bool:
        assert timeout_s == 0.0, "nothing may block in a simulated world"
        self.num_asked += 1
        return self.is_open


def test_a_job_is_copied_after_its_gate_has_opened() -> None:
    rig, gate = Rig(), Gate()
    rig.submit(gate)
    assert not rig.pass_time(50) and not rig.target.any()
    assert gate.num_asked > 10 and rig.net.busy
    gate.is_open = True
    (report,) = rig.pass_time(10)
    assert report.failure is None and (rig.target == 7).all()
    assert not rig.net.busy


def test_a_cancelled_job_ends_without_its_gate() -> None:
    rig = Rig()
    job = rig.submit(Gate())
    rig.pass_time(10)
    job.cancelled = True
    (report,) = rig.pass_time(10)
    assert report.failure is not None and report.failure.code == "cancelled" and report.settled
    assert not rig.target.any() and not rig.net.busy


def test_a_gate_that_never_opens_fails_the_job() -> None:
    rig = Rig()
    rig.submit(Gate())
    assert not rig.pass_time(GATE_TIMEOUT_S - 1)
    (report,) = rig.pass_time(10)
    assert report.failure is not None and report.failure.code == "layers_not_written" and report.settled
    assert not rig.net.busy


@pytest.mark.parametrize("victim", ["prefill:0", "decode:0"])
def test_a_dead_server_leaves_no_job_behind(victim: str) -> None:
    rig = Rig()
    rig.submit(Gate())
    rig.pass_time(5)
    del rig.net.mailboxes[victim]
    reports = rig.pass_time(10)
    assert [report.failure is not None and report.failure.code for report in reports] == (
        ["peer_gone"] if victim == "decode:0" else []
    )
    assert not rig.net.busy


def test_a_world_without_delays_does_not_stand_still_at_a_closed_gate() -> None:
    rig, gate = Rig(Faults(repeated=0.0, max_delay_s=0.0)), Gate()
    rig.submit(gate)
    assert not rig.pass_time(3)
    gate.is_open = True
    assert len(rig.pass_time(1)) == 1


def test_the_same_seed_asks_at_the_same_times() -> None:
    def play(seed: int) -> list[float]:
        rig, times = Rig(seed=seed), list[float]()

        def gate(timeout_s: float) -> bool:
            times.append(rig.clock.now())
            return len(times) == 20

        rig.submit(gate)
        assert len(rig.pass_time(60)) == 1
        return times

    assert play(1) == play(1) != play(2)
