"""Copy workers and gates: what is not written yet waits, and holds up nothing else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from pdserve.base.mailbox import Mailbox
from pdserve.transfer import copy_workers as gated_module
from pdserve.transfer import copy_workers as workers_module
from pdserve.transfer.copy_workers import CopyWorkers, GatedJobs
from pdserve.transfer.events import CopyDone, CopyJob, LayersReady, TransferEvent
from pdserve.transfer.plan import PageCopy
from pdserve.transfer.transport import MemoryRegion
from pdserve.transfer.transports.memory import MemoryHub, MemoryTransport
from pdserve.transfer.wire import MemoryKey
from tests.unit.transfer.waiting import DEADLINE_S, events_of, wait_until

NUM_SLOTS, SLOT_BYTES = 8, 16


class Gate:
    """Opened by the test; knows who asked."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.asked_by: set[str] = set()
        self.longest_s = 0.0

    def __call__(self, timeout_s: float) -> bool:
        self.asked_by.add(threading.current_thread().name)
        self.longest_s = max(self.longest_s, timeout_s)
        return self.event.wait(timeout_s)


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

    def submit(self, peer: str, slot: int, ready: LayersReady | None, room: int = 1) -> CopyJob:
        """Copy one slot to `peer`."""
        copy = PageCopy(slot * SLOT_BYTES, slot * SLOT_BYTES, SLOT_BYTES)
        piece = (self.source.ctypes.data, self.peers[peer].ctypes.data, (copy,))
        job = CopyJob(MemoryKey(room, 1, peer), slot, peer, peer, (piece,), SLOT_BYTES, ready)
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
    assert not any(thread.is_alive() for thread in rig.workers._threads)


def test_what_is_copied_is_what_was_there_when_the_gate_opened(rig: Rig) -> None:
    gate = Gate()
    rig.source[:] = 1
    rig.submit(rig.one, 0, gate)
    wait_until(lambda: gate.asked_by, "the worker waits")
    rig.source[:] = 2
    gate.event.set()
    (report,) = rig.ended(1)
    assert report.failure is None
    assert rig.arrived(rig.one) == [2] + [0] * 7
    assert gate.asked_by == {"kv-copy-0"}
    assert gate.longest_s < 1.0, "only short waits, for other work may come"


def test_jobs_of_other_peers_and_other_keys_pass_a_closed_gate(rig: Rig) -> None:
    rig.source[:] = 1
    gate, opened = Gate(), Gate()
    opened.event.set()
    rig.submit(rig.one, 0, gate)
    wait_until(lambda: gate.asked_by, "the worker waits")
    for peer, slot, ready, room in (
        (rig.two, 1, None, 2),
        (rig.one, 2, None, 3),
        (rig.one, 3, opened, 4),
        (rig.one, 4, None, 1),
    ):
        rig.submit(peer, slot, ready, room)
    assert {report.index for report in rig.ended(4)} == {1, 2, 3, 4}
    assert rig.arrived(rig.one) == [0, 0, 1, 1, 1, 0, 0, 0]
    gate.event.set()
    assert [report.index for report in rig.ended(1)] == [0]
    assert rig.arrived(rig.one)[0] == 1


def test_gates_may_open_in_any_order(rig: Rig) -> None:
    gates = [Gate() for _ in range(4)]
    for slot, gate in enumerate(gates):
        rig.submit(rig.one, slot, gate)
    for slot in (2, 3, 0, 1):
        gates[slot].event.set()
        assert [report.index for report in rig.ended(1)] == [slot]


def test_a_cancelled_job_does_not_wait_for_its_gate(rig: Rig) -> None:
    rig.source[:] = 1
    gate = Gate()
    cancelled, kept = rig.submit(rig.one, 0, gate), rig.submit(rig.one, 1, gate)
    wait_until(lambda: gate.asked_by, "the worker waits")
    cancelled.cancelled = True
    (report,) = rig.ended(1)
    assert report.index == cancelled.index and report.settled
    assert report.failure is not None and report.failure.code == "cancelled"
    gate.event.set()
    (report,) = rig.ended(1)
    assert report.index == kept.index and report.failure is None
    assert rig.arrived(rig.one) == [0, 1] + [0] * 6


def test_closing_does_not_wait_for_a_gate(rig: Rig) -> None:
    gate = Gate()
    for slot in range(3):
        rig.submit(rig.one, slot, gate)
    wait_until(lambda: gate.asked_by, "the worker waits")
    rig.workers.close()
    reports = rig.ended(3)
    assert [report.failure is not None and report.failure.code for report in reports] == ["cancelled"] * 3
    assert not any(thread.is_alive() for thread in rig.workers._threads)
    assert rig.arrived(rig.one) == [0] * 8


def test_a_gate_that_never_opens_fails_its_jobs_and_nothing_else(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_module, "GATE_TIMEOUT_S", 0.05)
    rig.source[:] = 1
    rig.submit(rig.one, 0, lambda timeout_s: False)
    (report,) = rig.ended(1)
    assert report.failure is not None and report.settled
    assert (report.failure.code, report.failure.status) == ("layers_not_written", 500)
    rig.submit(rig.one, 1, None)
    assert rig.ended(1)[0].failure is None
    assert rig.arrived(rig.one) == [0, 1] + [0] * 6


def test_a_gate_that_raises_fails_its_jobs_and_the_thread_goes_on(rig: Rig) -> None:
    def broken(timeout_s: float) -> bool:
        raise RuntimeError("the device is lost")

    rig.submit(rig.one, 0, broken)
    rig.submit(rig.one, 1, broken)
    for report in rig.ended(2):
        assert report.failure is not None and report.failure.code == "layers_not_written"
    rig.submit(rig.one, 2, None)
    assert rig.ended(1)[0].failure is None


def test_jobs_for_a_forgotten_peer_do_not_wait_for_their_gates(rig: Rig) -> None:
    gate = Gate()
    rig.submit(rig.one, 0, gate)
    rig.submit(rig.two, 1, gate)
    rig.workers.forget(rig.one)
    (report,) = rig.ended(1)
    assert report.key.origin == rig.one
    assert report.failure is not None and report.failure.code == "peer_gone" and report.settled
    gate.event.set()
    (report,) = rig.ended(1)
    assert report.key.origin == rig.two and report.failure is None


def test_waiting_for_a_gate_is_no_part_of_the_write_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Time:
        """A clock that only the gate moves."""

        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Time()
    monkeypatch.setattr(workers_module, "time", clock)
    proceed = threading.Event()

    def slow(timeout_s: float) -> bool:
        clock.now += 100.0
        return proceed.wait(timeout_s)

    rig.submit(rig.one, 0, slow)
    wait_until(lambda: clock.now > 500, "the worker has waited")
    proceed.set()
    (report,) = rig.ended(1)
    assert report.failure is None and report.write_s == 0.0


class Orders(queue.SimpleQueue[object]):
    """Knows how it was waited on."""

    def __init__(self) -> None:
        self.waits: list[float | None] = []

    def get(self, block: bool = True, timeout: float | None = None) -> object:
        self.waits.append(timeout)
        return super().get(block, timeout)


def _job(slot: int, peer: str = "peer") -> CopyJob:
    return CopyJob(MemoryKey(1, 1, peer), slot, peer, peer, (), 0)


def test_a_gate_that_says_no_at_once_is_not_asked_in_a_tight_loop() -> None:
    jobs, orders = GatedJobs(), Orders()
    jobs.add(_job(0), lambda timeout_s: False)
    assert workers_module._next_order(orders, jobs) is None  # type: ignore[arg-type]
    (waited,) = orders.waits
    assert waited is not None and 0 < waited <= workers_module.GATE_SLICE_S
    orders.put(_job(1))
    assert workers_module._next_order(orders, jobs) is not None  # type: ignore[arg-type]


def test_with_nothing_kept_aside_a_worker_sleeps() -> None:
    orders = Orders()
    orders.put(_job(1))
    assert workers_module._next_order(orders, GatedJobs()) is not None  # type: ignore[arg-type]
    assert orders.waits == [None]


def test_a_gate_is_asked_once_for_all_jobs_behind_it() -> None:
    asked: list[float] = []

    def gate(timeout_s: float) -> bool:
        asked.append(timeout_s)
        return len(asked) > 1

    jobs = GatedJobs()
    for slot in range(50):
        jobs.add(_job(slot), gate)
    assert not list(jobs.take()) and asked == [0.0]
    assert [job.index for job, failure in jobs.take() if failure is None] == list(range(50))
    assert asked == [0.0, 0.0] and not jobs


def test_time_is_up_for_a_gate_only_after_the_limit() -> None:
    now = 0.0
    jobs = GatedJobs(lambda: now)
    jobs.add(_job(0), lambda timeout_s: False)
    now = gated_module.GATE_TIMEOUT_S - 1
    assert not list(jobs.take()) and jobs
    now += 1
    assert [failure.code for _, failure in jobs.take() if failure is not None] == ["layers_not_written"]
    assert not jobs and not jobs.wait(0.0)


def test_nothing_is_left_of_a_gate_whose_jobs_were_all_cancelled() -> None:
    jobs, cancelled = GatedJobs(), [_job(0), _job(1)]
    for job in cancelled:
        jobs.add(job, lambda timeout_s: pytest.fail("nobody waits for this gate any more"))
        job.cancelled = True
    assert [failure.code for _, failure in jobs.take() if failure is not None] == ["cancelled"] * 2
    assert not jobs


def test_clearing_keeps_none() -> None:
    def shut(timeout_s: float) -> bool:
        return False

    jobs = GatedJobs()
    for slot, gate in enumerate((shut, shut, lambda timeout_s: False)):
        jobs.add(_job(slot), gate)
    assert [job.index for job in jobs.clear()] == [0, 1, 2]
    assert not jobs


def test_many_layers_of_many_keys_all_arrive_once() -> None:
    rig = Rig()
    rig.source[:] = np.repeat(np.arange(1, NUM_SLOTS + 1, dtype=np.uint8), SLOT_BYTES)
    gates = [Gate() for _ in range(NUM_SLOTS)]
    for peer in rig.peers:
        for slot, gate in enumerate(gates):
            rig.submit(peer, slot, gate)
    opener = threading.Thread(target=lambda: [gate.event.set() for gate in gates])
    opener.start()
    reports = rig.ended(2 * NUM_SLOTS)
    opener.join(DEADLINE_S)
    assert all(report.failure is None for report in reports)
    assert len({(report.key.origin, report.index) for report in reports}) == 2 * NUM_SLOTS
    for peer in rig.peers:
        assert rig.arrived(peer) == list(range(1, NUM_SLOTS + 1))
    rig.workers.close()
