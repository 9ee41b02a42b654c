"""The proxies that cut links for the chaos run: what they hold up, refuse and reset, and that nothing is lost by it."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from benchmarks.chaos_proxies import BOOTSTRAP, CONTROL, HOST, HTTP, MOONCAKE, Proxies, ask_for_proxy
from tests.waiting import wait_until

DEADLINE_S = 30.0
BRIEFLY_S = 0.3
"""How long is looked for what must not come."""


class Listener:
    """Takes connections and keeps them."""

    def __init__(self, port: int = 0) -> None:
        self._socket = socket.create_server((HOST, port))
        self._socket.settimeout(DEADLINE_S)
        self.port = self._socket.getsockname()[1]
        self._taken: list[socket.socket] = []

    def take(self) -> socket.socket:
        connection, _ = self._socket.accept()
        connection.settimeout(DEADLINE_S)
        self._taken.append(connection)
        return connection

    def close(self) -> None:
        for each in (self._socket, *self._taken):
            each.close()


class Links:
    """Proxies before a listener of server `b`; clients are `a` when they say so."""

    def __init__(self) -> None:
        self.owners: dict[int, str] = {}
        self.proxies = Proxies(lambda port: self.owners.get(port, ""))
        self.listener = Listener()
        self.clients: list[socket.socket] = []

    def connect(self, port: int, name: str = "") -> socket.socket:
        client = socket.socket()
        self.clients.append(client)
        client.bind((HOST, 0))
        self.owners[client.getsockname()[1]] = name
        client.settimeout(DEADLINE_S)
        client.connect((HOST, port))
        return client

    def pair(self, port: int, name: str = "") -> tuple[socket.socket, socket.socket]:
        """Both ends of a connection through the proxy at `port`."""
        client = self.connect(port, name)
        return client, self.listener.take()

    def close(self) -> None:
        self.proxies.close()
        self.listener.close()
        for client in self.clients:
            client.close()


@pytest.fixture
def links() -> Iterator[Links]:
    opened = Links()
    yield opened
    opened.close()


def take(connection: socket.socket, count: int) -> bytes:
    """That many bytes, or fewer where the connection ends."""
    said = b""
    while len(said) < count and (part := connection.recv(count - len(said))):
        said += part
    return said


def hears_nothing(connection: socket.socket) -> bool:
    connection.settimeout(BRIEFLY_S)
    with pytest.raises(TimeoutError):
        connection.recv(1)
    connection.settimeout(DEADLINE_S)
    return True


def exchange(client: socket.socket, server: socket.socket) -> None:
    """More than a buffer each way, and the end."""
    for sender, receiver in ((client, server), (server, client)):
        data = bytes(range(256)) * 4096
        sending = threading.Thread(target=sender.sendall, args=(data,))
        sending.start()
        assert take(receiver, len(data)) == data
        sending.join(DEADLINE_S)
        sender.shutdown(socket.SHUT_WR)
        assert receiver.recv(1) == b""


def test_what_is_said_passes_both_ways_and_so_does_the_end(links: Links) -> None:
    exchange(*links.pair(links.proxies.open("b", HTTP, links.listener.port)))


def test_a_cut_link_is_silent_and_loses_nothing(links: Links) -> None:
    port = links.proxies.open("b", CONTROL, links.listener.port)
    client, server = links.pair(port, "a")
    for cut_off in ("a", "b"):
        links.proxies.cut(cut_off)
        client.sendall(b"there")
        server.sendall(b"back")
        assert hears_nothing(server) and hears_nothing(client)
        links.proxies.heal()
        assert take(server, 5) == b"there" and take(client, 4) == b"back"
    exchange(client, server)


def test_a_server_that_is_cut_off_takes_no_connection_until_it_is_whole_again(links: Links) -> None:
    port = links.proxies.open("b", HTTP, links.listener.port)
    for _ in range(2):
        links.proxies.cut("b")
        with socket.socket() as late:
            late.settimeout(BRIEFLY_S)
            with pytest.raises(TimeoutError):
                late.connect((HOST, port))
        links.proxies.heal()
        client, server = links.pair(port)
        client.sendall(b"x")
        assert take(server, 1) == b"x"


def test_one_direction_between_two_servers(links: Links) -> None:
    port = links.proxies.open("b", BOOTSTRAP, links.listener.port)
    client, server = links.pair(port, "a")
    other, others = links.pair(port, "c")
    links.proxies.hold("a", "b")
    client.sendall(b"held")
    client.shutdown(socket.SHUT_WR)
    server.sendall(b"passed")
    other.sendall(b"free")
    assert take(client, 6) == b"passed" and take(others, 4) == b"free"
    assert hears_nothing(server)
    links.proxies.heal()
    assert take(server, 5) == b"held"


def test_what_is_refused_is_reset_and_comes_back_at_the_same_port(links: Links) -> None:
    port = links.proxies.open("b", HTTP, links.listener.port)
    client, server = links.pair(port)
    links.proxies.refuse("b")
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    with pytest.raises(ConnectionResetError):
        server.recv(1)
    with pytest.raises(ConnectionRefusedError):
        links.connect(port)
    links.proxies.heal()
    exchange(*links.pair(port))


def test_a_slow_link_keeps_the_order(links: Links) -> None:
    client, server = links.pair(links.proxies.open("b", HTTP, links.listener.port))
    links.proxies.slow_down("b", 0.01)
    for number in range(20):
        client.sendall(b"%02d" % number)
    assert take(server, 40) == b"".join(b"%02d" % number for number in range(20))


def test_a_port_whose_server_has_ended_refuses_until_there_is_another(links: Links) -> None:
    port = links.proxies.open("b", HTTP, links.listener.port)
    links.listener.close()

    def refuses() -> bool:
        with contextlib.suppress(ConnectionResetError):
            try:
                assert links.connect(port).recv(1) == b""
            except ConnectionRefusedError:
                return True
        return False

    wait_until(refuses, "the system refuses")
    links.proxies.drop("b")
    links.listener = Listener()
    assert links.proxies.open("b", HTTP, links.listener.port, at=port) == port
    exchange(*links.pair(port))


def test_connections_to_what_is_dropped_are_reset(links: Links) -> None:
    port = links.proxies.open("b", HTTP, links.listener.port)
    client, _ = links.pair(port)
    links.proxies.drop("b")
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    with pytest.raises(ConnectionRefusedError):
        links.connect(port)


@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_mooncake_s_handshake_tells_a_proxy_s_port(links: Links, size: int) -> None:
    """Whatever pieces it comes in; the other messages stay as they are."""
    data = Listener()
    port = ask_for_proxy(links.proxies.port, "b", MOONCAKE, links.listener.port)
    client, server = links.pair(port, "a")
    bodies = [b'\x03{"status":"success"}\n', b'\x01{"tcp_data_port":%d,"tcp_proto_version":2}\n' % data.port]
    said = b"".join(struct.pack("<Q", len(body)) + body for body in bodies)
    for first in range(0, len(said), size):
        server.sendall(said[first : first + size])
    heard = []
    for _ in bodies:
        (length,) = struct.unpack("<Q", take(client, 8))
        heard.append(take(client, length))
    assert heard[0] == bodies[0]
    told = json.loads(heard[1][1:])
    assert told["tcp_proto_version"] == 2 and told["tcp_data_port"] != data.port
    sender = links.connect(told["tcp_data_port"], "a")
    receiver = data.take()
    links.proxies.hold("a", "b")
    sender.sendall(b"page")
    assert hears_nothing(receiver)
    links.proxies.heal()
    assert take(receiver, 4) == b"page"
    data.close()
