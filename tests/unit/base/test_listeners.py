"""Ports that are closed after the start: strangers reach them no more, connections from before go on."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from pdserve.base import listeners
from pdserve.base.listeners import close_port, ports_closed_afterwards

BRIEFLY_S = 0.2
HOSTS = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


@contextlib.contextmanager
def listening(family: int = socket.AF_INET) -> Iterator[socket.socket]:
    with socket.socket(family) as server:
        try:
            server.bind((HOSTS[family], 0))
        except OSError:
            pytest.skip("no IPv6")
        server.listen(5)
        server.settimeout(10.0)
        yield server


def connect(server: socket.socket) -> socket.socket:
    """A client."""
    return socket.create_connection(server.getsockname()[:2], timeout=BRIEFLY_S)


def check_open(server: socket.socket) -> None:
    with connect(server) as client, server.accept()[0] as accepted:
        client.sendall(b"x")
        assert accepted.recv(1) == b"x"


@pytest.mark.parametrize("family", HOSTS)
def test_what_was_opened_inside_takes_no_more_connections(family: int) -> None:
    with contextlib.ExitStack() as opened:
        older = opened.enter_context(listening(family))
        with ports_closed_afterwards():
            server = opened.enter_context(listening(family))
            check_open(server)
            client = opened.enter_context(connect(server))
            accepted = opened.enter_context(server.accept()[0])
        with pytest.raises(TimeoutError):
            connect(server)
        client.sendall(b"before")
        assert accepted.recv(10) == b"before"
        check_open(older)


def test_a_port_is_closed_by_its_number() -> None:
    with listening() as server, listening() as other:
        close_port(server.getsockname()[1])
        with pytest.raises(TimeoutError):
            connect(server)
        check_open(other)


def test_a_kernel_that_refuses_is_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(listeners, "_SO_ATTACH_FILTER", 0x7FFF)
    with listening() as server:
        port = server.getsockname()[1]
        close_port(port)
        check_open(server)
    assert f"port {port} could not be closed and stays open" in caplog.text
