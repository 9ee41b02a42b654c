"""The encrypted control socket: who gets through, what the others are told, and what strangers can do to the port."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator

import pytest
import zmq

from pdserve.transfer.control import CurveKeys, ZmqControlSocket
from pdserve.transfer.events import FrameArrived, HandshakesFailed, PeerHandshakeFailed
from tests.waiting import wait_until

HOST = "127.0.0.1"
TOKEN = "a-token-that-is-long-enough"
OTHER = "another-that-is-long-enough"
Opened = Callable[[str], "Taking"]

GREETING = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00%s" + bytes(32)
CURVE = GREETING % b"CURVE".ljust(20, b"\x00")
NULL = GREETING % b"NULL".ljust(20, b"\x00")
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"
LONG = struct.Struct(">Q")
STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(range(256)),
    "zmtp 1.0": b"\x01\x00" + b"\x05\x00junk" * 10,
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(200),
    "no encryption": NULL + READY + b"\x00\x04junk",
    "no hello": CURVE + os.urandom(400),
    "junk in the hello": CURVE + b"\x04\xc8\x05HELLO\x01\x00" + os.urandom(192),
    "a giant command": CURVE + b"\x06" + LONG.pack(1 << 40),
    "a giant frame": CURVE + b"\x02" + LONG.pack((1 << 63) - 1) + bytes(1000),
    "half a command": CURVE + b"\x06" + LONG.pack(1 << 20) + bytes(1000),
}


class Taking:
    """A control socket, and all that it took."""

    def __init__(self, token: str) -> None:
        self.socket = ZmqControlSocket(HOST, token)
        self.frames: list[bytes] = []
        self.failed_at: list[str] = []
        self.num_failed = 0

    def take(self) -> None:
        for event in self.socket.take():
            match event:
                case FrameArrived(frame=frame, source=source):
                    assert source == HOST
                    self.frames.append(frame)
                case PeerHandshakeFailed(endpoint=endpoint):
                    self.failed_at.append(endpoint)
                case HandshakesFailed(count=count):
                    self.num_failed += count


@pytest.fixture
def opened() -> Iterator[Opened]:
    made: list[Taking] = []

    def make(token: str) -> Taking:
        made.append(Taking(token))
        return made[-1]

    yield make
    for each in made:
        each.socket.close()


def send_until_it_comes(sender: Taking, receiver: Taking, frame: bytes) -> None:
    def came() -> bool:
        sender.socket.send(receiver.socket.endpoint, frame)
        sender.take()
        receiver.take()
        return frame in receiver.frames

    wait_until(came, "the frame")


def raw(receiver: Taking) -> socket.socket:
    host, _, port = receiver.socket.endpoint.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def test_processes_with_one_token_understand_each_other_and_others_read_nothing(opened: Opened) -> None:
    decode, prefill, relayed = opened(TOKEN), opened(TOKEN), b""
    host, _, port = prefill.socket.endpoint.rpartition(":")
    with socket.create_server((HOST, 0)) as relay:
        secret = b"prompt-digest-of-somebody"
        decode.socket.send(f"{HOST}:{relay.getsockname()[1]}", secret)
        near, _ = relay.accept()
        with near, socket.create_connection((host, int(port)), timeout=5) as far:
            near.setblocking(False)
            far.setblocking(False)

            def passed() -> bool:
                nonlocal relayed
                for source, sink in ((near, far), (far, near)):
                    try:
                        data = source.recv(65536)
                    except BlockingIOError:
                        continue
                    relayed += data
                    sink.sendall(data)
                prefill.take()
                return secret in prefill.frames

            wait_until(passed, "the frame through the relay")
    assert secret not in relayed
    assert prefill.frames == [secret]


@pytest.mark.parametrize(("ours", "theirs"), [(TOKEN, OTHER), (TOKEN, ""), ("", TOKEN)])
def test_another_token_is_told_at_both_ends(
    opened: Opened, ours: str, theirs: str, caplog: pytest.LogCaptureFixture
) -> None:
    decode, prefill = opened(ours), opened(theirs)
    endpoint = prefill.socket.endpoint

    def told() -> bool:
        decode.socket.send(endpoint, b"hello")
        decode.take()
        prefill.take()
        return bool(decode.failed_at and decode.num_failed and prefill.num_failed)

    wait_until(told, "the failed handshake")
    assert set(decode.failed_at) == {endpoint}
    assert prefill.frames == [] and prefill.failed_at == []
    assert "another PDSERVE_CONTROL_TOKEN" in caplog.text
    assert "handshakes at the control port failed" in caplog.text


@pytest.mark.parametrize("token", [TOKEN, ""])
def test_connections_that_close_before_they_say_anything_are_not_counted(opened: Opened, token: str) -> None:
    """Peers look so whether a process still listens."""
    decode, prefill = opened(token), opened(token)
    host, _, port = prefill.socket.endpoint.rpartition(":")
    for _ in range(20):
        socket.create_connection((host, int(port)), timeout=5).close()
    decode.socket.send(prefill.socket.endpoint, b"hello")

    def arrived() -> bool:
        prefill.take()
        return prefill.frames == [b"hello"]

    wait_until(arrived, "the frame after the probes")
    prefill.take()
    assert prefill.num_failed == 0


@pytest.mark.parametrize("before", [OTHER, ""])
def test_a_peer_that_comes_with_the_right_token_is_reached_though_another_was_there_before(
    opened: Opened, before: str
) -> None:
    decode, wrong = opened(TOKEN), opened(before)
    endpoint = wrong.socket.endpoint

    def told() -> bool:
        decode.socket.send(endpoint, b"hello")
        decode.take()
        return bool(decode.failed_at)

    wait_until(told, "the failed handshake")
    wrong.socket.close()
    _, _, port = endpoint.rpartition(":")
    with zmq.Context() as context, context.socket(zmq.PULL) as right:
        keys = CurveKeys.of(TOKEN)
        right.curve_server, right.curve_publickey, right.curve_secretkey = True, keys.public, keys.secret
        right.bind(f"tcp://{HOST}:{port}")

        def came() -> bool:
            decode.socket.send(endpoint, b"hello")
            decode.take()
            return bool(right.poll(10))

        wait_until(came, "a frame at the successor")


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_at_the_port_changes_nothing(opened: Opened, stranger: str) -> None:
    prefill, decode = opened(TOKEN), opened(TOKEN)
    with raw(prefill) as connection:
        connection.sendall(STRANGERS[stranger])
        send_until_it_comes(decode, prefill, b"hello")
    assert set(prefill.frames) == {b"hello"}


def test_one_who_knows_the_curve_but_not_the_token_gets_nothing_through(opened: Opened) -> None:
    prefill, decode = opened(TOKEN), opened(TOKEN)
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.linger = 0
        push.curve_serverkey, push.curve_publickey, push.curve_secretkey = public, public, secret
        push.connect(f"tcp://{prefill.socket.endpoint}")
        push.send(b"forged")

        def refused() -> bool:
            prefill.take()
            return prefill.num_failed >= 3

        wait_until(refused, "refused handshakes")
    send_until_it_comes(decode, prefill, b"hello")
    assert b"forged" not in prefill.frames


def test_a_peer_that_stands_still_or_dies_in_a_handshake_is_not_taken_for_one_with_another_token(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.transfer.control._HANDSHAKE_MS", 100)
    decode = opened(TOKEN)
    with socket.create_server((HOST, 0)) as stopped:
        endpoint = f"{HOST}:{stopped.getsockname()[1]}"
        decode.socket.send(endpoint, b"hello")
        first, _ = stopped.accept()
        first.close()

        def timed_out() -> bool:
            decode.socket.send(endpoint, b"hello")  # a connection that zmq gave up is opened again with a send
            decode.take()
            return decode.num_failed >= 4

        wait_until(timed_out, "handshakes that timed out")
    assert decode.failed_at == []
