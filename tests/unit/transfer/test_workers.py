"""Copy workers over a scripted transport: what they report, and that they end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from pdserve.base.mailbox import Mailbox
from pdserve.engine.kv_log import SubmissionLog
from pdserve.errors import TransferError
from pdserve.transfer import copy_workers as workers_module
from pdserve.transfer.copy_workers import CopyWorkers
from pdserve.transfer.events import (
    CopyDone,
    CopyJob,
    PeerConnected,
    PeerFenced,
    ReceiverOpened,
    TransferEvent,
)
from pdserve.transfer.plan import PageCopy
from pdserve.transfer.transport import Copy, MemoryRegion, TransportFacts
from pdserve.transfer.wire import MemoryKey
from tests.waiting import events_of, wait_until


class ScriptedTransport:
    """`Transport` that does what each peer's address says."""

    name = "scripted"
    facts = TransportFacts(protocol="none", moves_bytes=True)
    drain_timeout_s = 3.0
    fence_drain_timeout_s = 2.0

    def __init__(self) -> None:
        self.receivers: list[tuple[str, str]] = []
        self.connects: list[str] = []
        self.disconnects: list[str] = []
        self.written: list[tuple[str, list[Copy], str]] = []
        self.hang = threading.Event()

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Nothing to do."""

    def address(self) -> str:
        return "here"

    def open_receiver(self, peer: str) -> str:
        self.receivers.append(("open", peer))
        if peer.startswith("hangs"):
            self.hang.wait(60)
        if peer.startswith("refused"):
            raise TransferError("no ports left", code="engine_failed")
        if peer.startswith("crash"):
            raise RuntimeError("a bug")
        return f"{len(self.receivers)}"

    def allow_sources(self, peer: str, addresses: Sequence[str]) -> None:
        self.receivers.append(("allow", peer))
        if peer.startswith("crash"):
            raise RuntimeError("a bug")

    def fence(self, peer: str) -> bool:
        self.receivers.append(("fence", peer))
        if peer.startswith("crash"):
            raise RuntimeError("a bug")
        return not peer.startswith("alive")

    def connect(self, address: str) -> None:
        self.connects.append(address)
        if address.startswith("unreachable"):
            raise TransferError("nobody there", code="peer_unreachable")

    def disconnect(self, address: str) -> None:
        self.disconnects.append(address)
        if address.startswith("hangs"):
            self.hang.set()

    def write(self, address: str, copies: Sequence[Copy]) -> None:
        self.written.append((address, list(copies), threading.current_thread().name))
        if address.startswith("hangs"):
            self.hang.wait(60)
            raise TransferError("cut off", settled=True)
        if address.startswith("unsettled"):
            raise TransferError("late bytes", code="engine_failed", settled=False)
        if address.startswith("crash"):
            raise RuntimeError("a bug")

    def close(self) -> None:
        """Nothing to do."""


def _job(address: str, index: int = 0) -> CopyJob:
    pieces = ((1000, 5000, (PageCopy(16, 32, 8), PageCopy(0, 0, 8))), (2000, 9000, (PageCopy(64, 64, 64),)))
    return CopyJob(MemoryKey(1, 1, address), index, address, address, pieces, num_bytes=80)


@pytest.fixture
def transport() -> ScriptedTransport:
    return ScriptedTransport()


@pytest.fixture
def workers(transport: ScriptedTransport, mailbox: Mailbox[TransferEvent]) -> Iterator[CopyWorkers]:
    workers = CopyWorkers(transport, mailbox.post, num_threads=2)
    yield workers
    transport.hang.set()
    workers.close()
    assert workers.num_threads == 0


def _reports(mailbox: Mailbox[TransferEvent], count: int) -> list[CopyDone]:
    return [event for event in events_of(mailbox, count) if isinstance(event, CopyDone)]


def test_each_submission_is_logged_with_its_buffers_and_its_failure(
    transport: ScriptedTransport, mailbox: Mailbox[TransferEvent]
) -> None:
    lines: list[dict[str, Any]] = []
    log = SubmissionLog(lines.append, transport, dp_rank=1, device="cpu", ib_device="mlx5_0")
    workers = CopyWorkers(transport, mailbox.post, 1, log)
    workers.submit(_job("peer"))
    workers.submit(_job("unsettled"))
    _reports(mailbox, 2)
    workers.close()
    sent, failed = sorted(lines, key=lambda line: line["peer"])
    assert sent["event"] == "kv.submission"
    assert (sent["key"], sent["room"], sent["index"]) == ("1/1/peer", "1", 0)
    assert (sent["num_buffers"], sent["bytes"], sent["error"]) == (3, 80, None)
    assert sent["buffers"] == [[1016, 5032, 8], [1000, 5000, 8], [2064, 9064, 64]]
    assert (sent["transport"], sent["protocol"]) == (transport.name, transport.facts.protocol)
    assert (sent["device"], sent["ib_device"], sent["dp_rank"], sent["rank"]) == ("cpu", "mlx5_0", 1, 0)
    assert sent["latency_s"] >= 0
    assert failed["error"] == "engine_failed: late bytes"


def test_pieces_become_absolute_copies_and_one_connection(
    workers: CopyWorkers, transport: ScriptedTransport, mailbox: Mailbox[TransferEvent]
) -> None:
    for index in range(3):
        workers.submit(_job("peer", index))
    reports = _reports(mailbox, 3)
    assert [report.index for report in reports] == [0, 1, 2], "in order"
    assert all(report.failure is None and report.settled for report in reports)
    assert transport.connects == ["peer"]
    assert transport.written[0][1] == [Copy(1016, 5032, 8), Copy(1000, 5000, 8), Copy(2064, 9064, 64)]
    assert len({thread for _, _, thread in transport.written}) == 1
    assert (workers.drain_timeout_s, workers.fence_drain_timeout_s) == (3.0, 2.0)


@pytest.mark.parametrize(
    ("address", "code", "settled", "status"),
    [
        ("unreachable", "peer_unreachable", True, 502),
        ("unsettled", "engine_failed", False, 502),
        ("crash", "internal", False, 500),
    ],
)
def test_failures_are_reported_as_values_and_the_thread_goes_on(
    workers: CopyWorkers, mailbox: Mailbox[TransferEvent], address: str, code: str, settled: bool, status: int
) -> None:
    workers.submit(_job(address))
    workers.submit(_job("good"))
    workers.submit(_job("well"))
    reports = {report.key.origin: report for report in _reports(mailbox, 3)}
    failed = reports[address]
    assert failed.failure is not None
    assert (failed.failure.code, failed.settled, failed.failure.status) == (code, settled, status)
    assert reports["good"].failure is None and reports["well"].failure is None


def test_a_peer_is_connected_to_before_there_is_anything_to_copy(
    workers: CopyWorkers, transport: ScriptedTransport, mailbox: Mailbox[TransferEvent]
) -> None:
    assert not workers.connect(0, "peer")
    assert events_of(mailbox, 1) == [PeerConnected("peer", None)] and transport.connects == ["peer"]
    assert workers.connect(0, "peer"), "known by now"
    workers.submit(_job("peer"))
    assert _reports(mailbox, 1)[0].failure is None and transport.connects == ["peer"]
    assert not workers.connect(0, "unreachable")
    (event,) = events_of(mailbox, 1)
    assert isinstance(event, PeerConnected) and event.failure is not None and event.failure.code == "peer_unreachable"
    assert not workers.connect(0, "unreachable"), "perhaps by now"
    events_of(mailbox, 1)
    workers.forget("peer")
    assert not workers.connect(0, "peer"), "another process, perhaps"
    events_of(mailbox, 1)


def test_a_bug_in_connecting_is_a_value_too(
    workers: CopyWorkers,
    transport: ScriptedTransport,
    mailbox: Mailbox[TransferEvent],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def connect(address: str) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(transport, "connect", connect)
    workers.connect(0, "peer")
    (event,) = events_of(mailbox, 1)
    assert isinstance(event, PeerConnected) and event.failure is not None and event.failure.code == "internal"


def test_a_cancelled_job_is_reported_unwritten(
    workers: CopyWorkers, transport: ScriptedTransport, mailbox: Mailbox[TransferEvent]
) -> None:
    job = _job("peer")
    job.cancelled = True
    workers.submit(job)
    (report,) = _reports(mailbox, 1)
    assert report.failure is not None and report.failure.code == "cancelled" and report.settled
    assert not transport.written


def test_peers_that_hang_delay_nobody_else_however_many_they_are(
    workers: CopyWorkers, transport: ScriptedTransport, mailbox: Mailbox[TransferEvent]
) -> None:
    hanging = [f"hangs {number}" for number in range(5)]
    workers.submit(_job("first"))
    for peer in hanging:
        workers.submit(_job(peer))
    wait_until(lambda: len(transport.written) == 6, "all of them hang, each in a thread of its own")
    for index in range(3):
        workers.submit(_job("first", index + 1))
        workers.submit(_job("later", index))
    reports = _reports(mailbox, 7)
    assert sorted(report.key.origin for report in reports) == ["first"] * 4 + ["later"] * 3
    assert all(report.failure is None for report in reports)
    transport.hang.set()
    assert sorted(report.key.origin for report in _reports(mailbox, 5)) == hanging


def test_the_threads_of_a_peer_end_when_it_is_forgotten(
    workers: CopyWorkers, transport: ScriptedTransport, mailbox: Mailbox[TransferEvent]
) -> None:
    threads: list[weakref.ref[threading.Thread]] = []
    for number in range(20):
        workers.submit(_job(f"peer {number}"))
        _reports(mailbox, 1)
        threads += [weakref.ref(thread) for thread in threading.enumerate() if thread.name == f"kv-copy-{number}"]
        workers.forget(f"peer {number}")
        wait_until(lambda: workers.num_threads == 0, "its thread ends")
    workers.submit(_job("last"))
    _reports(mailbox, 1)
    gc.collect()
    assert len(threads) >= 20 and not any(thread() for thread in threads), "threads that have ended are let go"


def test_a_transport_with_several_writers_writes_to_one_peer_from_several_threads(
    mailbox: Mailbox[TransferEvent],
) -> None:
    transport = ScriptedTransport()
    transport.facts = TransportFacts(protocol="none", moves_bytes=True, writers=2)
    workers = CopyWorkers(transport, mailbox.post, num_threads=2)
    workers.submit(_job("hangs", 0))
    wait_until(lambda: len(transport.written) == 1, "one thread hangs")
    workers.submit(_job("hangs", 1))
    wait_until(lambda: len(transport.written) == 2, "the other one is free, and takes the next job")
    workers.forget("hangs")
    transport.hang.set()
    assert sorted(report.index for report in _reports(mailbox, 2)) == [0, 1]
    wait_until(lambda: transport.disconnects == ["hangs"] * 3, "at once, and by each of its threads")
    workers.close()
    assert len({thread for _, _, thread in transport.written}) == 2


def test_a_forgotten_peer_is_disconnected_also_behind_a_connect_that_was_running(
    workers: CopyWorkers, transport: ScriptedTransport, mailbox: Mailbox[TransferEvent]
) -> None:
    workers.submit(_job("peer"))
    _reports(mailbox, 1)
    workers.forget("peer")
    wait_until(lambda: transport.disconnects == ["peer", "peer"], "once at once, once by the worker")
    workers.submit(_job("peer"))
    _reports(mailbox, 1)
    assert transport.connects == ["peer", "peer"]


def test_a_peer_that_came_back_is_connected_to_again_when_its_old_thread_lets_go_of_it_late(
    workers: CopyWorkers, transport: ScriptedTransport, mailbox: Mailbox[TransferEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    linked = set[str]()
    monkeypatch.setattr(transport, "connect", linked.add)

    def write(address: str, copies: Sequence[Copy]) -> None:
        if address not in linked:
            raise TransferError(f"not connected to {address}", code="not_connected")

    monkeypatch.setattr(transport, "write", write)
    workers.submit(_job("peer", 0))
    _reports(mailbox, 1)
    linked.clear()
    workers.submit(_job("peer", 1))
    workers.submit(_job("peer", 2))
    lost, good = _reports(mailbox, 2)
    assert lost.failure is not None and good.failure is None, "one job is lost, and no more"


def test_without_threads_a_job_fails_and_the_next_one_may_go(
    workers: CopyWorkers, mailbox: Mailbox[TransferEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        workers.submit(_job("peer", 0))
    (report,) = _reports(mailbox, 1)
    assert report.failure is not None and report.failure.code == "no_threads" and report.settled
    workers.submit(_job("peer", 1))
    (report,) = _reports(mailbox, 1)
    assert report.failure is None


def test_closing_cuts_off_what_runs_and_begins_nothing_more(
    transport: ScriptedTransport, mailbox: Mailbox[TransferEvent]
) -> None:
    workers = CopyWorkers(transport, mailbox.post, num_threads=1)
    for index in range(3):
        workers.submit(_job("hangs", index))
    wait_until(lambda: transport.written, "the first copy runs")
    workers.close()
    reports = _reports(mailbox, 3)
    assert all(report.failure is not None for report in reports)
    assert len(transport.written) == 1
    assert workers.num_threads == 0


def test_closing_leaves_a_thread_behind_rather_than_hang(
    transport: ScriptedTransport, mailbox: Mailbox[TransferEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(transport, "disconnect", lambda address: None)
    workers = CopyWorkers(transport, mailbox.post, num_threads=1)
    workers.submit(_job("hangs"))
    wait_until(lambda: transport.written, "the copy runs")
    workers.close()
    assert workers.num_threads == 1
    transport.hang.set()
    wait_until(lambda: workers.num_threads == 0, "its end")


def test_what_becomes_of_receiving_engines_is_told_as_values(
    workers: CopyWorkers,
    transport: ScriptedTransport,
    mailbox: Mailbox[TransferEvent],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for peer in ("good", "refused", "crash", "alive"):
        workers.open_receiver(0, peer)
        workers.allow_sources(0, peer, ["10.0.0.2"])
        workers.fence(0, peer)
    events = events_of(mailbox, 8)
    opened = {event.peer: event for event in events if isinstance(event, ReceiverOpened)}
    fenced = {event.peer: event.fenced for event in events if isinstance(event, PeerFenced)}
    assert opened["good"].transport_address and opened["good"].failure is None
    assert opened["refused"].failure is not None and opened["refused"].failure.code == "engine_failed"
    assert opened["crash"].failure is not None and opened["crash"].failure.code == "internal"
    assert fenced == {"good": True, "refused": True, "crash": False, "alive": False}
    wait_until(lambda: ("allow", "good") in transport.receivers, "a fence may overtake it")
    orders = [order for order, peer in transport.receivers if peer == "good"]
    assert orders[0] == "open" and sorted(orders) == ["allow", "fence", "open"]
    wait_until(lambda: "connections of crash from 10.0.0.2 may be refused" in caplog.text, "the log tells")


def test_receiving_engines_of_a_peer_are_seen_to_in_order_and_those_of_others_meanwhile(
    workers: CopyWorkers, transport: ScriptedTransport, mailbox: Mailbox[TransferEvent]
) -> None:
    workers.open_receiver(0, "hangs")
    workers.fence(0, "hangs")
    workers.open_receiver(0, "hangs")
    for _ in range(5):
        workers.fence(0, "other")
    assert events_of(mailbox, 5) == [PeerFenced("other", True)] * 5
    wait_until(lambda: ("open", "hangs") in transport.receivers, "its engine is being opened")
    assert [order for order in transport.receivers if order[1] == "hangs"] == [("open", "hangs")]
    transport.hang.set()
    events = events_of(mailbox, 3)
    assert [type(event) for event in events] == [ReceiverOpened, PeerFenced, ReceiverOpened]


def test_closing_waits_for_an_engine_that_is_being_opened_and_opens_no_more(
    transport: ScriptedTransport, mailbox: Mailbox[TransferEvent]
) -> None:
    workers = CopyWorkers(transport, mailbox.post, num_threads=2)
    for number in range(10):
        workers.open_receiver(0, f"hangs {number}")
    workers.open_receiver(0, "hangs 0")
    wait_until(lambda: len(transport.receivers) == workers_module.NUM_RECEIVER_THREADS, "all threads are busy")
    threading.Timer(0.1, transport.hang.set).start()
    workers.close()
    assert len(events_of(mailbox, 4)) == len(transport.receivers) == 4
    workers.fence(0, "late")
    assert len(transport.receivers) == 4


def test_engines_that_are_being_opened_hold_up_no_source_of_an_open_one(
    workers: CopyWorkers, transport: ScriptedTransport, mailbox: Mailbox[TransferEvent]
) -> None:
    """Its peer connects as soon as it has our Hello."""
    workers.open_receiver(0, "good")
    assert [type(event) for event in events_of(mailbox, 1)] == [ReceiverOpened]
    hanging = [f"hangs-{n}" for n in range(workers_module.NUM_RECEIVER_THREADS + 1)]
    for peer in hanging:
        workers.open_receiver(0, peer)
        workers.allow_sources(0, peer, ["10.0.0.2"])
    wait_until(lambda: len(transport.receivers) > workers_module.NUM_RECEIVER_THREADS, "all threads hang")
    workers.allow_sources(0, "good", ["10.0.0.2"])
    wait_until(lambda: ("allow", "good") in transport.receivers, "beside them")
    assert [peer for order, peer in transport.receivers if order == "allow"] == ["good"]
    transport.hang.set()
    events_of(mailbox, len(hanging))
    wait_until(lambda: len(transport.receivers) == 2 * len(hanging) + 2, "the sources of the others")
    for peer in hanging:
        assert transport.receivers.index(("open", peer)) < transport.receivers.index(("allow", peer))
