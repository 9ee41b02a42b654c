"""The real control socket and the directory: what their threads report, and that they end."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import zmq

from pdserve.base.clock import MonotonicClock
from pdserve.base.mailbox import Mailbox
from pdserve.errors import ConfigError
from pdserve.transfer.control import ZmqControlSocket
from pdserve.transfer.directory import HttpDirectory
from pdserve.transfer.events import (
    FrameArrived,
    HandshakesFailed,
    PeerGone,
    PeerHandshakeFailed,
    PeerListens,
    PrefillFound,
    PrefillNotFound,
    ReceiverOpened,
    TransferEvent,
)
from pdserve.transfer.peers import SessionTimes
from pdserve.transfer.receiving_engines import SessionReceivers
from pdserve.transfer.sessions import Sessions
from pdserve.transfer.wire import Hello, Packet, Ping, RankMemory, Wire, WireRegion
from tests.unit.transfer.kit import KitDirectory, KitEngine
from tests.waiting import DEADLINE_S, events_of, wait_until


class Member:
    """`Sessions` on a real socket, drained by the test."""

    def __init__(self, name: str, token: str = "t") -> None:
        self.mailbox: Mailbox[TransferEvent] = Mailbox()
        self.socket = ZmqControlSocket("127.0.0.1")
        self.mailbox.attach(self.socket)
        self.counters: Counter[str] = Counter()
        self.told: list[TransferEvent] = []
        hello = Hello(
            endpoint=self.socket.endpoint,
            facts={"page_size": 16},
            ranks=(RankMemory(name, (WireRegion(1, 1),)),),
            aux_region=WireRegion(1, 1),
            aux_slot_bytes=64,
            answer=False,
        )
        self.engine, clock = KitEngine(addresses=[name]), MonotonicClock()
        self.sessions = Sessions(
            name,
            hello,
            Wire(token),
            self.socket,
            KitDirectory(),
            clock,
            SessionTimes(resend_s=0.1),
            self.counters,
            SessionReceivers(self.engine, clock, 1),
            lambda session: False,
            name,
        )

    def turn(self) -> None:
        for event in self.mailbox.drain():
            if isinstance(event, FrameArrived):
                self.sessions.arrived(event.frame, event.source)
            else:
                assert isinstance(event, HandshakesFailed | PeerHandshakeFailed)
                self.told.append(event)
        while self.engine.events:
            event = self.engine.events.pop(0)
            assert isinstance(event, ReceiverOpened)
            self.sessions.receiver_opened(event)
        self.sessions.tick()


@pytest.fixture
def members() -> Iterator[list[Member]]:
    members = [Member("prefill"), Member("decode")]
    yield members
    for member in members:
        member.socket.close()


def _shake_hands(members: list[Member]) -> None:
    prefill, decode = members
    decode.sessions.found(PrefillFound(("h", 1), (("prefill", prefill.socket.endpoint),)))

    def ready() -> bool:
        for member in members:
            member.turn()
        return any(decode.sessions.dial(("h", 1))) and not decode.sessions.num_unacked

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
            ranks=(RankMemory("x", ()),),
            aux_region=WireRegion(1, 1),
            aux_slot_bytes=64,
            answer=False,
        )
        packet = Packet(sender=f"x{number}", receiver="prefill", seq=1, body=hello)
        prefill.sessions.arrived(Wire("t").encode(packet), "")
        prefill.turn()
    _shake_hands(members)


def test_frames_to_nobody_are_dropped_and_closing_does_not_hang() -> None:
    control = ZmqControlSocket("127.0.0.1")
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


def test_a_host_that_is_not_ours_is_a_config_error() -> None:
    with pytest.raises(ConfigError) as caught:
        ZmqControlSocket("192.0.2.1")
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
