"""The directory against addresses that strangers name, and peers that vanish: what it sends, and what it tells."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from pdserve.base.hosts import parse_host_patterns
from pdserve.base.mailbox import Mailbox
from pdserve.protocol.failure import Failure
from pdserve.transfer import directory as probes
from pdserve.transfer.bootstrap import BootstrapServer
from pdserve.transfer.bootstrap_client import register_route
from pdserve.transfer.directory import HttpDirectory
from pdserve.transfer.events import Address, PeerGone, PeerListens, PrefillFound, PrefillNotFound, TransferEvent
from pdserve.transfer.lookups import MAX_REPLICAS, MAX_UNKNOWN_AT_ONCE, MAX_UNKNOWN_OF_A_HOST
from tests.unit.transfer.test_bootstrap import OTHER_SECRET, SECRET, route
from tests.waiting import DEADLINE_S, events_of, until, wait_until

HOST = "127.0.0.1"
PATIENCE_S = 0.6
TALK_S = 60.0
"""A listener waits no longer for its client."""
INTERNAL = b"INTERNAL of whatever listens here"
Serve = Callable[[socket.socket], None]


class Listener:
    """A stranger's: serves each connection as told, and keeps what it is sent."""

    def __init__(self, serve: Serve, host: str = HOST, port: int = 0) -> None:
        self.seen = b""
        self.num_connections = 0
        self._serve = serve
        self._socket = socket.create_server((host, port))
        self.address: Address = (host, self._socket.getsockname()[1])
        self._connections: list[socket.socket] = []
        self._talks: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all threads. A `close` alone would not wake one that waits in `accept` or `recv`."""
        _shut_down(self._socket)
        self._thread.join(DEADLINE_S)
        self._socket.close()
        for connection in self._connections:
            _shut_down(connection)
        for talk in self._talks:
            talk.join(DEADLINE_S)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                connection.settimeout(TALK_S)
                self.num_connections += 1
                self._connections.append(connection)
                self._talks.append(threading.Thread(target=self._talk, args=(connection,), daemon=True))
                self._talks[-1].start()

    def _talk(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            self.seen += connection.recv(65536)
            self._serve(connection)


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def answer(status: str, body: bytes, *headers: str) -> Serve:
    """Says so at once."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return lambda connection: connection.sendall("\r\n".join(lines).encode() + body)


def drip(connection: socket.socket) -> None:
    """An answer that never ends, slowly."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        connection.sendall(b" ")
        time.sleep(0.05)


def flood(connection: socket.socket) -> None:
    """An answer that never ends, fast."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b" " * 65536)


def flood_of_headers(connection: socket.socket) -> None:
    """One that does not even begin."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"X-More: " + b"y" * 5000 + b"\r\n")


def silent(connection: socket.socket) -> None:
    """No answer."""
    connection.recv(1)


STRANGERS: dict[str, Serve] = {
    "forbids": answer("403 Forbidden", INTERNAL),
    "no_json": answer("200 OK", INTERNAL),
    "challenge": answer("200 OK", msgspec.json.encode({"nonce": "0" * 80, "proof": "0" * 64})),
    "no_token": answer("409 Conflict", INTERNAL),
    "compressed": answer("200 OK", b"\x1f\x8b" + INTERNAL, "Content-Encoding: gzip"),
    "no_http": lambda connection: connection.sendall(b"SSH-2.0-OpenSSH\r\n"),
    "silent": silent,
    "drip": drip,
    "flood": flood,
    "flood_of_headers": flood_of_headers,
}


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def open_directory(mailbox: Mailbox[TransferEvent], stack: contextlib.ExitStack) -> Callable[..., HttpDirectory]:
    def opened(token: str = SECRET, allowed: str | None = None, patience_s: float = PATIENCE_S) -> HttpDirectory:
        patterns = None if allowed is None else parse_host_patterns("--disaggregation-allowed-prefill", allowed)
        directory = HttpDirectory(mailbox.post, token, patience_s, patterns)
        stack.callback(directory.close)
        return directory

    return opened


@pytest.fixture
def prefill(stack: contextlib.ExitStack) -> BootstrapServer:
    server = BootstrapServer(HOST, 0, token=SECRET)
    stack.callback(server.close)
    register_route(HOST, server.port, route(), SECRET)
    return server


def closed_port() -> int:
    with socket.create_server((HOST, 0)) as taken:
        return int(taken.getsockname()[1])


def failure_of(event: TransferEvent) -> Failure:
    assert isinstance(event, PrefillNotFound), event
    return event.failure


def anonymous(event: TransferEvent) -> Failure:
    """What a client is told, without the address that it named itself."""
    assert isinstance(event, PrefillNotFound)
    named = f"{event.address[0]}:{event.address[1]}"
    failure = event.failure
    return msgspec.structs.replace(
        failure, message=failure.message.replace(named, "A"), origin=failure.origin.replace(named, "A")
    )


def test_an_unknown_address_is_sent_no_secret_and_told_nothing_apart(
    mailbox: Mailbox[TransferEvent],
    open_directory: Callable[..., HttpDirectory],
    stack: contextlib.ExitStack,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hosts = itertools.cycle(["127.0.0.2", "127.0.0.3"])  # a host has a share of the look-ups
    target = Listener(silent)
    redirects = answer("302 Found", b"", f"Location: http://{HOST}:{target.address[1]}/route")
    listeners = [Listener(serve, next(hosts)) for serve in (*STRANGERS.values(), redirects)]
    for listener in (target, *listeners):
        stack.callback(listener.close)
    others = [BootstrapServer(HOST, 0, token=token) for token in ("", OTHER_SECRET)]
    for other in others:
        stack.callback(other.close)
    addresses = [listener.address for listener in listeners] + [(HOST, closed_port()), ("no-such-host.invalid", 80)]
    addresses += [(HOST, other.port) for other in others]
    directory = open_directory()
    for address in addresses:
        directory.find(address)
    events = events_of(mailbox, len(addresses))
    assert [anonymous(event) for event in events] == [FAILURE] * len(addresses)
    told = caplog.text
    assert target.num_connections == 0, "redirects are not followed"
    for listener in listeners:
        assert SECRET.encode() not in listener.seen
        assert b"authorization" not in listener.seen.lower()
        assert b"pdserve-proof" not in listener.seen.lower()
    assert "refuses (" in told or "is no pdserve bootstrap server" in told, "the log has what the client is not told"
    assert SECRET not in told


FAILURE = Failure(
    code="prefill_not_found",
    message="no prefill server of this deployment was found at A (bootstrap_host and bootstrap_port): it may be down "
    "or out of reach, or its PDSERVE_CONTROL_TOKEN is not the decode server's; the log of the decode server says which",
    origin="A",
    retryable=True,
    status=502,
)


def test_an_answer_without_an_end_is_read_up_to_a_limit(
    mailbox: Mailbox[TransferEvent], open_directory: Callable[..., HttpDirectory], stack: contextlib.ExitStack
) -> None:
    """Long before the deadline: a long body is refused at once, and headers without an end count as no answer."""
    bodies, headers = Listener(flood), Listener(flood_of_headers)
    directory = open_directory(allowed=HOST, patience_s=1000.0)
    for listener in (bodies, headers):
        stack.callback(listener.close)
        directory.find(listener.address)
    (event,) = events_of(mailbox, 1)
    assert isinstance(event, PrefillNotFound) and event.address == bodies.address
    assert "is no pdserve bootstrap server" in event.failure.message and not event.failure.retryable
    wait_until(lambda: headers.num_connections > 1, "another try after the one whose headers did not end")
    assert bodies.num_connections == 1


def test_addresses_that_hang_hold_up_none_that_answers(
    mailbox: Mailbox[TransferEvent],
    open_directory: Callable[..., HttpDirectory],
    prefill: BootstrapServer,
    stack: contextlib.ExitStack,
) -> None:
    directory = open_directory(patience_s=30.0)
    hosts = [f"127.0.0.{2 + i}" for i in range(MAX_UNKNOWN_AT_ONCE // MAX_UNKNOWN_OF_A_HOST + 2)]
    listeners = [Listener(drip, host) for host in hosts for _ in range(MAX_UNKNOWN_OF_A_HOST)]
    for listener in listeners:
        stack.callback(listener.close)
        directory.find(listener.address)
    directory.find((HOST, prefill.port))
    events = events_of(mailbox, len(listeners) - MAX_UNKNOWN_AT_ONCE + 2)
    found = [event for event in events if isinstance(event, PrefillFound)]
    busy = [failure_of(event) for event in events if event not in found]
    assert [event.address for event in found] == [(HOST, prefill.port)]
    assert {(failure.code, failure.retryable, failure.status) for failure in busy} == {("bootstrap_busy", True, 503)}


def test_a_host_has_a_share_of_the_look_ups(
    mailbox: Mailbox[TransferEvent], open_directory: Callable[..., HttpDirectory], stack: contextlib.ExitStack
) -> None:
    directory = open_directory(patience_s=30.0)
    listeners = [Listener(silent) for _ in range(MAX_UNKNOWN_OF_A_HOST + 3)]
    for listener in listeners:
        stack.callback(listener.close)
        directory.find(listener.address)
    events = events_of(mailbox, 3)
    assert [failure_of(event).code for event in events] == ["bootstrap_busy"] * 3
    assert {event.address for event in events if isinstance(event, PrefillNotFound)} == {
        listener.address for listener in listeners[:3]
    }


@pytest.mark.parametrize(
    ("ours", "theirs", "what"),
    [
        (SECRET, OTHER_SECRET, "another control token"),
        (SECRET, "", "no control token"),
        ("", SECRET, "a control token, this server has none"),
    ],
)
def test_of_a_listed_address_a_wrong_token_is_told_at_once(
    mailbox: Mailbox[TransferEvent],
    open_directory: Callable[..., HttpDirectory],
    stack: contextlib.ExitStack,
    ours: str,
    theirs: str,
    what: str,
) -> None:
    server = BootstrapServer(HOST, 0, token=theirs)
    stack.callback(server.close)
    open_directory(ours, allowed=HOST, patience_s=30.0).find((HOST, server.port))
    (event,) = events_of(mailbox, 1)
    failure = failure_of(event)
    assert (failure.code, failure.status, failure.retryable) == ("control_token_mismatch", 502, False)
    assert what in failure.message and "set PDSERVE_CONTROL_TOKEN" in failure.message


def test_of_an_address_that_was_found_before_the_cause_is_told_at_once(
    mailbox: Mailbox[TransferEvent], open_directory: Callable[..., HttpDirectory], prefill: BootstrapServer
) -> None:
    directory = open_directory(patience_s=30.0)
    address = (HOST, prefill.port)
    directory.find(address)
    (found,) = events_of(mailbox, 1)
    assert found == PrefillFound(address, (("first-0", f"{HOST}:4321"),))
    prefill.close()
    successor = BootstrapServer(*address, token=OTHER_SECRET)
    directory.find(address)
    (event,) = events_of(mailbox, 1)
    successor.close()
    failure = failure_of(event)
    assert "another control token" in failure.message and not failure.retryable


def test_only_addresses_on_the_list_are_dialled(
    mailbox: Mailbox[TransferEvent],
    open_directory: Callable[..., HttpDirectory],
    prefill: BootstrapServer,
    stack: contextlib.ExitStack,
) -> None:
    stranger = Listener(silent, "127.0.0.2")
    stack.callback(stranger.close)
    directory = open_directory(allowed=f"{HOST}:{prefill.port}, [::1]")
    directory.find(stranger.address)
    directory.find((HOST, prefill.port))
    refused, found = events_of(mailbox, 2)
    assert failure_of(refused).status == 400 and "bootstrap_host" in failure_of(refused).message
    assert isinstance(found, PrefillFound)
    assert stranger.num_connections == 0


def test_a_server_of_too_many_replicas_is_none(
    mailbox: Mailbox[TransferEvent], open_directory: Callable[..., HttpDirectory], stack: contextlib.ExitStack
) -> None:
    crowd = Listener(answer("200 OK", msgspec.json.encode(route(dp_size=MAX_REPLICAS + 1))))
    stack.callback(crowd.close)
    open_directory(token="", allowed=HOST, patience_s=30.0).find(crowd.address)
    (event,) = events_of(mailbox, 1)
    failure = failure_of(event)
    assert f"{MAX_REPLICAS + 1} replicas" in failure.message and not failure.retryable
    assert crowd.num_connections == 1, "no replica is asked for"


def test_a_server_that_is_just_starting_is_found_within_the_patience(
    mailbox: Mailbox[TransferEvent], open_directory: Callable[..., HttpDirectory], stack: contextlib.ExitStack
) -> None:
    port = closed_port()
    open_directory(patience_s=30.0).find((HOST, port))
    server = BootstrapServer(HOST, port, token=SECRET)
    stack.callback(server.close)
    register_route(HOST, port, route(), SECRET)
    (event,) = events_of(mailbox, 1)
    assert isinstance(event, PrefillFound)


# ---------------------------------------------------------------------- probes


class BlackHole:
    """An address where the connection is never made: the backlog is full."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        listener = stack.enter_context(socket.socket())
        listener.bind((HOST, 0))
        listener.listen(0)
        self.endpoint = f"{HOST}:{listener.getsockname()[1]}"
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(listener.getsockname())


async def test_a_death_is_known_at_once_beside_peers_that_vanished(stack: contextlib.ExitStack) -> None:
    events: asyncio.Queue[TransferEvent] = asyncio.Queue()
    all_probes = probes.Probes(events.put_nowait, timeout_s=1000.0)
    holes = [BlackHole(stack) for _ in range(50)]
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(20):
            for number, hole in enumerate(holes):
                all_probes.start(f"hole-{number}", hole.endpoint)
        with socket.create_server((HOST, 0)) as server:
            endpoint = f"{HOST}:{server.getsockname()[1]}"
            all_probes.start("real", endpoint)
            assert await events.get() == PeerListens("real")
        all_probes.start("real", endpoint)
        assert await events.get() == PeerGone("real")
    await until(lambda: all_probes.num_running == len(holes))
    all_probes.close()


def test_a_peer_is_probed_by_the_directory_s_thread(
    mailbox: Mailbox[TransferEvent], open_directory: Callable[..., HttpDirectory]
) -> None:
    directory = open_directory()
    with socket.create_server((HOST, 0)) as server:
        directory.probe("real", f"{HOST}:{server.getsockname()[1]}")
        assert events_of(mailbox, 1) == [PeerListens("real")]


async def test_a_peer_that_does_not_answer_is_probed_ever_less_often_and_forgotten_at_last(
    stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "MIN_PAUSE_S", 1000.0)
    events: list[TransferEvent] = []
    all_probes = probes.Probes(events.append, timeout_s=0.02)

    async def end() -> None:
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=DEADLINE_S)
        assert all_probes.num_running == 0

    all_probes.start("hole", BlackHole(stack).endpoint)
    await end()
    all_probes.start("hole", "127.0.0.1:1")
    assert all_probes.num_running == 0 and events == [], "it pauses"
    with monkeypatch.context() as patch:
        patch.setattr(probes, "FORGET_AFTER_S", 0.0)
        all_probes.start("other", "nonsense")
    await end()
    assert events == []
    all_probes.start("hole", "127.0.0.1:1")
    await end()
    assert events == [PeerGone("hole")], "its pause is forgotten"
    all_probes.close()
