"""The real control socket, the copy workers and the directory: what their threads report, and that they end."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import zmq

from pdserve.base.clock import MonotonicClock
from pdserve.base.mailbox import Mailbox
from pdserve.errors import ConfigError, TransferError
from pdserve.transfer import workers as workers_module
from pdserve.transfer.control import ZmqControlSocket
from pdserve.transfer.directory import HttpDirectory
from pdserve.transfer.events import (
    CopyDone,
    CopyJob,
    FrameArrived,
    PeerGone,
    PeerListens,
    PrefillFound,
    PrefillNotFound,
    TransferEvent,
)
from pdserve.transfer.plan import PageCopy
from pdserve.transfer.sessions import Sessions, SessionTimes
from pdserve.transfer.transport import Copy, MemoryRegion, TransportFacts
from pdserve.transfer.wire import Hello, Key, Packet, Ping, Region, Wire
from pdserve.transfer.workers import CopyWorkers
from tests.unit.transfer.kit import KitDirectory

DEADLINE_S = 10.0


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Poll with a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.005)


def events_of(mailbox: Mailbox[TransferEvent], count: int) -> list[TransferEvent]:
    """The next `count` events."""
    events: list[TransferEvent] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(events) < count:
        assert time.monotonic() < deadline, f"{len(events)} of {count} events: {events}"
        mailbox.wait(0.1)
        events += mailbox.drain()
    assert len(events) == count
    return events


@pytest.fixture
def mailbox() -> Mailbox[TransferEvent]:
    return Mailbox()


@pytest.fixture
def control(mailbox: Mailbox[TransferEvent]) -> Iterator[ZmqControlSocket]:
    control = ZmqControlSocket("127.0.0.1", mailbox.post)
    yield control
    control.close()


class Member:
    """`Sessions` on a real socket, drained by the test."""

    def __init__(self, name: str, token: str = "t") -> None:
        self.mailbox: Mailbox[TransferEvent] = Mailbox()
        self.socket = ZmqControlSocket("127.0.0.1", self.mailbox.post)
        self.counters: Counter[str] = Counter()
        hello = Hello(
            endpoint=self.socket.endpoint,
            facts={"page_size": 16},
            transport_address=name,
            kv_regions=(Region(1, 1),),
            aux_region=Region(1, 1),
            aux_slot_bytes=64,
            answer=False,
        )
        times = SessionTimes(resend_s=0.1)
        self.sessions = Sessions(
            name, hello, Wire(token), self.socket, KitDirectory(), MonotonicClock(), times, self.counters
        )

    def turn(self) -> None:
        for event in self.mailbox.drain():
            assert isinstance(event, FrameArrived)
            self.sessions.arrived(event.frame)
        self.sessions.tick()


@pytest.fixture
def members() -> Iterator[list[Member]]:
    members = [Member("prefill"), Member("decode")]
    yield members
    for member in members:
        member.socket.close()


def _shake_hands(members: list[Member]) -> None:
    prefill, decode = members
    decode.sessions.found(PrefillFound(("h", 1), "prefill", prefill.socket.endpoint))

    def ready() -> bool:
        for member in members:
            member.turn()
        return decode.sessions.dial(("h", 1)) is not None and not decode.sessions.num_unacked

    wait_until(ready, "a session over zmq")


def test_a_session_over_real_sockets_survives_junk_on_the_port(members: list[Member]) -> None:
    prefill, _ = members
    host, _, port = prefill.socket.endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(range(256)))  # frames, says the oldest zmq protocol
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(f"tcp://{prefill.socket.endpoint}")
        intruder = Packet(sender="x", receiver="prefill", seq=1, body=Ping())
        junk = [b"", b"\x00", os.urandom(500), b"\x80\x04\x95pickle", Wire("guess").encode(intruder)]
        for frame in junk:
            push.send(frame)
        push.send_multipart([b"two", b"parts"])

        def counted() -> bool:
            prefill.turn()
            return prefill.counters["control_frames_refused"] >= len(junk) + 2

        wait_until(counted, "all junk is counted")
    _shake_hands(members)
    assert prefill.sessions.peer("x") is None


def test_a_hello_with_a_nonsense_endpoint_does_not_stop_the_server(members: list[Member]) -> None:
    prefill, _ = members
    for number, endpoint in enumerate(("junk", "", "a b:1", "h:99999999", "[::1]:x")):
        hello = Hello(
            endpoint=endpoint,
            facts={"page_size": 16},
            transport_address="x",
            kv_regions=(),
            aux_region=Region(1, 1),
            aux_slot_bytes=64,
            answer=False,
        )
        packet = Packet(sender=f"x{number}", receiver="prefill", seq=1, body=hello)
        prefill.sessions.arrived(Wire("t").encode(packet))
        prefill.turn()
    _shake_hands(members)


def test_frames_to_nobody_are_dropped_and_closing_does_not_hang(mailbox: Mailbox[TransferEvent]) -> None:
    control = ZmqControlSocket("127.0.0.1", mailbox.post)
    with socket.create_server(("127.0.0.1", 0)) as server:
        dead = f"127.0.0.1:{server.getsockname()[1]}"
    for _ in range(5000):
        control.send(dead, b"x" * 100)
    control.forget(dead)
    control.forget(dead)
    control.send(dead, b"again")
    closer = threading.Thread(target=control.close)
    closer.start()
    closer.join(DEADLINE_S)
    assert not closer.is_alive()


def test_a_host_that_is_not_ours_is_a_config_error(mailbox: Mailbox[TransferEvent]) -> None:
    with pytest.raises(ConfigError) as caught:
        ZmqControlSocket("192.0.2.1", mailbox.post)
    assert caught.value.field == "disaggregation_host"


def test_probes_tell_listening_from_gone_and_say_nothing_of_nonsense(mailbox: Mailbox[TransferEvent]) -> None:
    directory = HttpDirectory(mailbox.post, token="")
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        directory.probe("a", endpoint)
        assert events_of(mailbox, 1) == [PeerListens("a")]
    for nonsense in ("junk", "h:port"):
        directory.probe("n", nonsense)
    directory.probe("a", endpoint)
    assert events_of(mailbox, 1) == [PeerGone("a")]
    directory.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "\ud800", "a b", "x" * 300])
def test_a_search_always_ends_with_an_answer(mailbox: Mailbox[TransferEvent], host: str) -> None:
    directory = HttpDirectory(mailbox.post, token="", patience_s=0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    directory.find((host, port))
    (event,) = events_of(mailbox, 1)
    assert isinstance(event, PrefillNotFound) and event.address == (host, port)
    directory.close()


class ScriptedTransport:
    """`Transport` that does what each peer's address says."""

    name = "scripted"
    facts = TransportFacts(protocol="none", moves_bytes=True)
    settle_s = 3.0

    def __init__(self) -> None:
        self.connects: list[str] = []
        self.disconnects: list[str] = []
        self.written: list[tuple[str, list[Copy], str]] = []
        self.hang = threading.Event()

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Nothing to do."""

    def address(self) -> str:
        return "here"

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
    return CopyJob(Key(1, 1, address), index, address, address, pieces, num_bytes=80)


@pytest.fixture
def transport() -> ScriptedTransport:
    return ScriptedTransport()


@pytest.fixture
def workers(transport: ScriptedTransport, mailbox: Mailbox[TransferEvent]) -> Iterator[CopyWorkers]:
    workers = CopyWorkers(transport, mailbox.post, num_threads=2)
    yield workers
    transport.hang.set()
    workers.close()
    assert not any(thread.is_alive() for thread in workers._threads)


def _reports(mailbox: Mailbox[TransferEvent], count: int) -> list[CopyDone]:
    return [event for event in events_of(mailbox, count) if isinstance(event, CopyDone)]


def test_pieces_become_absolute_copies_and_one_connection(
    workers: CopyWorkers, transport: ScriptedTransport, mailbox: Mailbox[TransferEvent]
) -> None:
    for index in range(3):
        workers.submit(_job("peer", index))
    reports = _reports(mailbox, 3)
    assert [report.job.index for report in reports] == [0, 1, 2], "in order"
    assert all(report.failure is None and report.settled for report in reports)
    assert transport.connects == ["peer"]
    assert transport.written[0][1] == [Copy(1016, 5032, 8), Copy(1000, 5000, 8), Copy(2064, 9064, 64)]
    assert len({thread for _, _, thread in transport.written}) == 1
    assert (workers.address, workers.settle_s) == ("here", 3.0)


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
    reports = {report.job.peer: report for report in _reports(mailbox, 3)}
    failed = reports[address]
    assert failed.failure is not None
    assert (failed.failure.code, failed.settled, failed.failure.status) == (code, settled, status)
    assert reports["good"].failure is None and reports["well"].failure is None


def test_a_cancelled_job_is_reported_unwritten(
    workers: CopyWorkers, transport: ScriptedTransport, mailbox: Mailbox[TransferEvent]
) -> None:
    job = _job("peer")
    job.cancelled = True
    workers.submit(job)
    (report,) = _reports(mailbox, 1)
    assert report.failure is not None and report.failure.code == "cancelled" and report.settled
    assert not transport.written


def test_a_peer_that_hangs_does_not_delay_peers_of_other_threads(
    workers: CopyWorkers, transport: ScriptedTransport, mailbox: Mailbox[TransferEvent]
) -> None:
    workers.submit(_job("first"))
    workers.submit(_job("hangs"))
    workers.forget("first")
    for index in range(3):
        workers.submit(_job("later", index))
    assert {report.job.peer for report in _reports(mailbox, 4)} == {"first", "later"}
    transport.hang.set()
    assert [report.job.peer for report in _reports(mailbox, 1)] == ["hangs"]


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
    assert not any(thread.is_alive() for thread in workers._threads)


def test_closing_leaves_a_thread_behind_rather_than_hang(
    transport: ScriptedTransport, mailbox: Mailbox[TransferEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(transport, "disconnect", lambda address: None)
    workers = CopyWorkers(transport, mailbox.post, num_threads=1)
    workers.submit(_job("hangs"))
    wait_until(lambda: transport.written, "the copy runs")
    workers.close()
    assert workers._threads[0].is_alive()
    transport.hang.set()
    workers._threads[0].join(DEADLINE_S)
    assert not workers._threads[0].is_alive()
