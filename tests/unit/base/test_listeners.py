"""Ports with a filter: only the given addresses reach them, connections from before go on."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdserve.base.hosts import MAX_SOURCES
from pdserve.base.listeners import (
    allow_sources,
    close_pending,
    close_port,
    drop_connections,
    filter_program,
    listening_sockets,
    ports_closed_afterwards,
)

BRIEFLY_S = 0.2
SO_ATTACH_FILTER, SO_LOCK_FILTER = 26, 44
PASS_ALL = struct.pack("HBBI", 0x06, 0, 0, 0xFFFFFFFF)
"""A classic BPF instruction: keep the whole packet."""
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


def connect(server: socket.socket, source: str | None = None) -> socket.socket:
    """A client, at the address `source`."""
    bound = None if source is None else (source, 0)
    return socket.create_connection(server.getsockname()[:2], timeout=BRIEFLY_S, source_address=bound)


def check_open(server: socket.socket, source: str | None = None) -> None:
    with connect(server, source) as client, server.accept()[0] as accepted:
        client.sendall(b"x")
        assert accepted.recv(1) == b"x"


def check_closed(server: socket.socket, source: str | None = None) -> None:
    with pytest.raises(TimeoutError):
        connect(server, source)


@pytest.mark.parametrize("family", HOSTS)
def test_what_was_opened_inside_takes_no_more_connections(family: int) -> None:
    with contextlib.ExitStack() as opened:
        older = opened.enter_context(listening(family))
        with ports_closed_afterwards():
            server = opened.enter_context(listening(family))
            check_open(server)
            client = opened.enter_context(connect(server))
            accepted = opened.enter_context(server.accept()[0])
        check_closed(server)
        client.sendall(b"before")
        assert accepted.recv(10) == b"before"
        check_open(older)


def test_a_port_is_closed_by_its_number() -> None:
    with listening() as server, listening() as other:
        close_port(server.getsockname()[1])
        check_closed(server)
        check_open(other)


def test_a_kernel_that_refuses_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """It refuses another filter on a socket whose filter is locked."""
    program = ctypes.create_string_buffer(PASS_ALL, len(PASS_ALL))
    with listening() as server:
        filter_of_one = struct.pack("HP", 1, ctypes.addressof(program))
        server.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filter_of_one)
        server.setsockopt(socket.SOL_SOCKET, SO_LOCK_FILTER, 1)
        port = server.getsockname()[1]
        close_port(port)
        check_open(server)
    assert f"port {port} keeps its former filter: the kernel refuses the filter" in caplog.text


def test_a_port_whose_filter_is_too_long_is_told_to_be_open_or_to_keep_its_former_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    too_many = [f"10.0.{n // 250}.{n % 250}" for n in range(2100)]
    with listening() as server:
        port = port_of(server)
        allow_sources([inode_of(server)], too_many)
        assert f"port {port} stays open: the kernel refuses the filter" in caplog.text
        check_open(server)
        allow_sources([inode_of(server)], ())
        allow_sources([inode_of(server)], too_many)
        assert f"port {port} keeps its former filter: the kernel refuses the filter" in caplog.text
        check_closed(server)


def inode_of(server: socket.socket) -> int:
    return os.fstat(server.fileno()).st_ino


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


def test_only_the_given_addresses_connect_and_open_connections_go_on() -> None:
    with listening() as server, connect(server, "127.0.0.2") as before, server.accept()[0] as accepted:
        allow_sources([inode_of(server)], ["127.0.0.1", "127.0.0.3"])
        check_closed(server, "127.0.0.2")
        for source in ("127.0.0.1", "127.0.0.3"):
            check_open(server, source)
        before.sendall(b"x")
        assert accepted.recv(1) == b"x"


def test_a_new_set_replaces_the_former_one_and_an_accepted_connection_keeps_its_own() -> None:
    with listening() as server:
        allow_sources([inode_of(server)], ["127.0.0.2"])
        with connect(server, "127.0.0.2") as client, server.accept()[0] as accepted:
            allow_sources([inode_of(server)], ["127.0.0.1", "fd00::9"])
            check_open(server, "127.0.0.1")
            check_closed(server, "127.0.0.2")
            client.sendall(b"x" * 100_000)
            assert accepted.recv(1) == b"x"
        allow_sources([inode_of(server)], ["a name", ""])
        check_closed(server)
        allow_sources([inode_of(server)], None)
        check_open(server, "127.0.0.2")


def test_ipv6_addresses_are_compared_in_full() -> None:
    with listening(socket.AF_INET6) as server:
        for others in (["::2"], ["1::1"], ["0:1::1"], ["::1:0:1"], ["127.0.0.1", "0.0.0.1"], []):
            allow_sources([inode_of(server)], others)
            check_closed(server)
        allow_sources([inode_of(server)], ["fe80::1%lo", "1::1", "::1", "127.0.0.1"])
        check_open(server)


def test_a_socket_of_both_families_compares_what_is_in_the_packets() -> None:
    with (
        listening(socket.AF_INET6) as probe,
        socket.create_server(("::", 0), family=probe.family, dualstack_ipv6=True) as server,
    ):
        for allowed, family in (("::ffff:127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
            allow_sources([inode_of(server)], [allowed])
            for each, host in HOSTS.items():
                try:
                    socket.create_connection((host, port_of(server)), timeout=BRIEFLY_S).close()
                except TimeoutError:
                    assert each != family, host
                else:
                    assert each == family, host


def test_the_kernel_takes_a_filter_of_many_addresses() -> None:
    addresses = [f"10.0.{high}.{low}" for high in range(2) for low in range(45)] + [f"fd00::{n}" for n in range(100)]
    assert len([*addresses, *HOSTS]) == MAX_SOURCES
    with listening() as server, listening(socket.AF_INET6) as other:
        inodes = [inode_of(server), inode_of(other)]
        assert listening_sockets().items() >= {inodes[0]: port_of(server), inodes[1]: port_of(other)}.items()
        allow_sources(inodes, addresses)
        check_closed(server)
        check_closed(other)
        allow_sources(inodes, [*addresses, *HOSTS.values()])
        check_open(server)
        check_open(other)


def test_a_filter_passes_no_packet_of_another_protocol() -> None:
    """Neither version 4 nor 6: the instruction after both comparisons drops it."""
    program = filter_program(["127.0.0.1"])
    assert program[2][3] == 4 and program[3][3] == 6
    assert program[4] == filter_program([])[0]


STRANGER = """
import socket, sys
clients = [socket.create_connection((sys.argv[2], int(sys.argv[1])), timeout=10.0) for _ in range(2)]
for client in clients:
    client.sendall(b"before")
print("connected", flush=True)
for client in clients:
    try:
        print(client.recv(10), flush=True)
    except ConnectionResetError:
        print(b"", flush=True)
"""
"""A process that connects twice and tells what it received."""


@contextlib.contextmanager
def stranger_at(port: int, host: str = "127.0.0.1") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", STRANGER, str(port), host]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "connected\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("host", ["127.0.0.1", "", "::"])
def test_connections_from_before_end_and_what_they_sent_is_not_read(host: str) -> None:
    """Whether they were accepted or not; those of other sockets go on, also with the same port number."""
    with contextlib.ExitStack() as opened:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = opened.enter_context(socket.create_server((host, 0), family=family, dualstack_ipv6=":" in host))
        server.settimeout(10.0)
        stranger = opened.enter_context(stranger_at(port_of(server)))
        accepted = opened.enter_context(server.accept()[0])
        other = opened.enter_context(listening() if host != "127.0.0.1" else at("127.0.0.9", port_of(server)))
        near = opened.enter_context(connect(other))
        far = opened.enter_context(other.accept()[0])
        near.sendall(b"before")
        allow_sources([inode_of(server)], ())
        drop_connections([inode_of(server)])
        assert accepted.recv(10) == b""
        assert stranger.stdout is not None and [stranger.stdout.readline() for _ in range(2)] == ["b''\n"] * 2
        assert far.recv(10) == b"before"
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize("is_accepted", [True, False])
def test_connections_of_the_process_to_itself_go_on(is_accepted: bool) -> None:
    """A NIXL agent has one, and registers no memory without it."""
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(listening())
        own = opened.enter_context(connect(server))
        accepted = opened.enter_context(server.accept()[0]) if is_accepted else None
        stranger = opened.enter_context(stranger_at(port_of(server)))
        allow_sources([inode_of(server)], ())
        drop_connections([inode_of(server)])
        if accepted is None:
            accepted = opened.enter_context(server.accept()[0])
        else:
            assert stranger.stdout is not None and stranger.stdout.readline() == "b''\n"
        own.sendall(b"own")
        allow_sources([inode_of(server)], None)
        assert accepted.recv(10) == b"own"


def test_a_connection_to_another_host_at_the_same_port_keeps_no_strangers_connection() -> None:
    """127.0.0.9 stands for the other host: it is not among the addresses of this host's interfaces."""
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("::", 0), family=socket.AF_INET6))
        other = opened.enter_context(at("127.0.0.9", port_of(server)))
        opened.enter_context(connect(other))
        stranger = opened.enter_context(stranger_at(port_of(server), "::1"))
        allow_sources([inode_of(server)], ())
        drop_connections([inode_of(server)])
        assert stranger.stdout is not None and [stranger.stdout.readline() for _ in range(2)] == ["b''\n"] * 2


def test_sockets_that_cannot_be_looked_at_are_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a free descriptor a listener would get no filter."""

    def no_descriptor_left(descriptor: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with listening() as server:
        inodes = [inode_of(server)]
        with monkeypatch.context() as patch:
            patch.setattr(os, "dup", no_descriptor_left)
            with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                allow_sources(inodes, ())


@contextlib.contextmanager
def at(host: str, port: int) -> Iterator[socket.socket]:
    with socket.create_server((host, port)) as server:
        server.settimeout(10.0)
        yield server


@pytest.mark.parametrize("timeout", [None, 0.0, 5.0])
def test_closing_what_waits_neither_blocks_nor_changes_the_library_s_flag(timeout: float | None) -> None:
    with listening() as server:
        server.settimeout(timeout)
        before = os.get_blocking(server.fileno())
        with connect(server) as client, socket.socket(fileno=os.dup(server.fileno())) as duplicate:
            close_pending(duplicate)
            close_pending(duplicate)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
        assert os.get_blocking(server.fileno()) == before == (timeout is None)


class TakenOver(socket.socket):
    """A listener that its library makes non-blocking while a connection is accepted, as asio does."""

    def accept(self) -> tuple[socket.socket, object]:
        os.set_blocking(self.fileno(), False)
        return super().accept()


def test_a_listener_that_its_library_makes_non_blocking_meanwhile_stays_so() -> None:
    with listening() as server, contextlib.ExitStack() as clients:
        server.settimeout(None)
        with TakenOver(fileno=os.dup(server.fileno())) as duplicate:
            for _ in range(2):
                clients.enter_context(connect(server))
            close_pending(duplicate)
        assert not os.get_blocking(server.fileno()), "its library would wait forever in accept"


def test_a_receive_timeout_of_the_library_is_kept() -> None:
    second = struct.pack("ll", 1, 500_000)
    with listening() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, second)
        with connect(server), socket.socket(fileno=os.dup(server.fileno())) as duplicate:
            close_pending(duplicate)
        seconds, micros = struct.unpack("ll", server.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
    assert seconds == 1 and micros >= 500_000
