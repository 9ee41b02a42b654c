"""Engines for peers to write to, without a native one: who gets which, at what ports; and who is a local peer."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pdserve.base.listeners import listening_sockets
from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.transport import Copy, MemoryRegion
from pdserve.transfer.transports import local_peers, receiving
from pdserve.transfer.transports.auto import AutoTransport
from pdserve.transfer.transports.failing import FailingTransport
from pdserve.transfer.transports.local_peers import LocalPeers, call
from pdserve.transfer.transports.memory import MemoryHub, MemoryTransport
from pdserve.transfer.transports.receiving import EnginePorts, ReceivingEngines
from tests.unit.base.test_listeners import stranger_at
from tests.waiting import DEADLINE_S, wait_until


class Listener:
    """An engine that listens at `port`; `ends` says whether it can be destroyed."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self._socket = socket.create_server((host, port))
        self.host = host
        self.port = int(self._socket.getsockname()[1])
        self.ends = True
        self.is_prepared = False

    def destroy(self) -> None:
        assert self.ends, "it does not end"
        self._socket.close()


def make(start: Callable[[], Listener] = Listener) -> ReceivingEngines[Listener]:
    def prepare(engine: Listener) -> None:
        engine.is_prepared = True

    return ReceivingEngines(EnginePorts(), start, prepare)


@pytest.fixture
def engines() -> Iterator[ReceivingEngines[Listener]]:
    engines = make()
    yield engines
    engines.close()


def test_each_peer_has_an_engine_until_it_is_fenced(engines: ReceivingEngines[Listener]) -> None:
    first, other = engines.open("a"), engines.open("b")
    assert first.is_prepared and first is engines.open("a") and first is not other
    assert engines.fence("a") and engines.fence("a") and engines.fence("unknown")
    assert first.port not in listening_sockets().values() and other.port in listening_sockets().values()
    assert engines.open("a") is not first and engines.open("b") is other
    seen: list[Listener] = []
    engines.visit(seen.append)
    assert {engine.port for engine in seen} == {engines.open("a").port, other.port}


def test_what_an_engine_has_to_say_is_taken_before_it_is_destroyed() -> None:
    """So are the notes of writes to an agent that is fenced."""
    taken: list[bool] = []
    engines = ReceivingEngines(
        EnginePorts(),
        Listener,
        lambda engine: None,
        lambda engine: taken.append(engine.port in listening_sockets().values()),
    )
    engines.open("a")
    assert engines.fence("a") and engines.fence("b")
    assert taken == [True]
    engines.close()


def test_no_engine_ever_listens_where_a_fenced_peer_looks_for_its_own() -> None:
    """The next one would: it is made again, at another port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    wanted = iter([port, port, 0, port, 0])
    engines = make(lambda: Listener(next(wanted)))
    assert engines.open("a").port == port
    assert engines.fence("a")
    again = engines.open("a")
    assert again.port != port and port not in listening_sockets().values()
    assert engines.open("b").port not in (port, again.port)
    engines.close()


def test_ports_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "MAX_SPENT", 2)
    monkeypatch.setattr(receiving, "MAX_TRIES", 3)
    ports = EnginePorts()
    first = Listener()
    first.destroy()
    ports.spend({1: first.port})
    made: list[Listener] = []

    def start() -> Listener:
        made.append(Listener(first.port if not made else 0))
        return made[-1]

    engine, found = ports.start(start)
    assert list(found.values()) == [engine.port] and [each.port for each in made] == [first.port, engine.port]
    engine.destroy()
    ports.spend({1: 1, 2: 2})
    made.clear()
    engine, found = ports.start(start)
    assert list(found.values()) == [first.port]
    engine.destroy()


def test_an_engine_whose_ports_cannot_be_filtered_is_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError("no descriptor is left")

    monkeypatch.setattr(receiving, "allow_sources", fail)
    made: list[Listener] = []
    engines = ReceivingEngines(EnginePorts(filtered=True), lambda: made.append(Listener()) or made[-1], lambda _: None)  # type: ignore[func-returns-value]
    with pytest.raises(TransferError, match="no descriptor is left"):
        engines.open("a")
    assert len(made) == 1 and made[0].port not in listening_sockets().values()


def test_an_engine_that_cannot_be_destroyed_leaves_its_peer_unfenced_for_good(
    engines: ReceivingEngines[Listener],
) -> None:
    engine = engines.open("a")
    engine.ends = False
    assert not engines.fence("a") and not engines.fence("a")
    engine.ends = True
    assert engines.open("a") is not engine
    assert not engines.fence("a"), "the former one may still be written to"
    engine.destroy()


def test_an_engine_that_does_not_start_is_a_transfer_error() -> None:
    def start() -> Listener:
        raise ConfigError("no device")

    with pytest.raises(TransferError, match="no device") as caught:
        make(start).open("a")
    assert caught.value.code == "engine_failed"


def test_nothing_is_opened_once_it_is_closed_and_what_was_being_opened_ends() -> None:
    starting, go_on = threading.Event(), threading.Event()
    made: list[Listener] = []

    def start() -> Listener:
        starting.set()
        assert go_on.wait(DEADLINE_S)
        made.append(Listener())
        return made[-1]

    engines = make(start)
    errors: list[TransferError] = []

    def open_one() -> None:
        try:
            engines.open("a")
        except TransferError as error:
            errors.append(error)

    thread = threading.Thread(target=open_one)
    thread.start()
    assert starting.wait(DEADLINE_S)
    engines.close()
    go_on.set()
    thread.join(DEADLINE_S)
    assert [error.code for error in errors] == ["closed"]
    assert made[0].port not in listening_sockets().values()


def connects(engine: Listener, source: str) -> bool:
    """Whether the engine takes a connection from `source`."""
    try:
        socket.create_connection((engine.host, engine.port), timeout=0.2, source_address=(source, 0)).close()
    except TimeoutError:
        return False
    return True


def test_an_engine_accepts_connections_from_its_peers_addresses_alone() -> None:
    engines = ReceivingEngines(EnginePorts(filtered=True), Listener, lambda engine: None)
    first, other = engines.open("a"), engines.open("b")
    assert not connects(first, "127.0.0.1")
    engines.allow_sources("a", ["127.0.0.2", "prefill-0.svc"])
    assert connects(first, "127.0.0.2") and not connects(first, "127.0.0.3")
    engines.allow_sources("a", ["127.0.0.3"])
    engines.allow_sources("unknown", ["127.0.0.4"])
    assert all(connects(first, source) for source in ("127.0.0.1", "127.0.0.2", "127.0.0.3"))
    assert not connects(first, "127.0.0.4") and not connects(other, "127.0.0.2")
    engines.close()


def test_engines_with_one_port_number_on_different_addresses_have_each_their_own_filter() -> None:
    """UCX binds port 0 of each interface's address, and Linux gives equal numbers to different addresses."""
    made: list[Listener] = []

    def start() -> Listener:
        made.append(Listener(made[0].port, "127.0.0.9") if made else Listener())
        return made[-1]

    engines = ReceivingEngines(EnginePorts(filtered=True), start, lambda engine: None)
    first, other = engines.open("a"), engines.open("b")
    assert first.port == other.port and not connects(other, "127.0.0.66")
    allowed = {"a": "127.0.0.2", "b": "127.0.0.3"}
    with pytest.MonkeyPatch.context() as patched:  # addresses of this host are no special ones here
        patched.setattr(receiving, "peer_addresses", tuple)
        for peer, source in allowed.items():
            engines.allow_sources(peer, [source])
    assert connects(first, "127.0.0.2") and not connects(first, "127.0.0.3")
    assert connects(other, "127.0.0.3") and not connects(other, "127.0.0.2")
    engines.close()


@pytest.mark.parametrize("filtered", [True, False])
def test_connections_made_before_the_filter_end_before_memory_is_registered(filtered: bool) -> None:
    with contextlib.ExitStack() as opened:
        left: list[bytes] = []

        class Busy(Listener):
            """Accepts one stranger while it starts; another one waits."""

            def __init__(self) -> None:
                super().__init__()
                opened.enter_context(stranger_at(self.port))
                self.accepted = opened.enter_context(self._socket.accept()[0])

        engines = ReceivingEngines(
            EnginePorts(filtered=filtered), Busy, lambda engine: left.append(engine.accepted.recv(6))
        )
        engines.open("a")
        assert left == [b"" if filtered else b"before"]
        engines.close()


def test_a_peer_has_a_bounded_number_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "MAX_PEER_ADDRESSES", 2)
    engines = ReceivingEngines(EnginePorts(filtered=True), Listener, lambda engine: None)
    engine = engines.open("a")
    engines.allow_sources("a", ["127.0.0.2", "127.0.0.2", "10.0.0.2", "127.0.0.3"])
    assert connects(engine, "127.0.0.2") and not connects(engine, "127.0.0.3")
    engines.close()


@pytest.mark.parametrize(("value", "filtered"), [("", True), ("1", True), (" 0 ", False)])
def test_the_filter_can_be_switched_off_and_the_log_tells(
    value: str, filtered: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("PDSERVE_DATA_PORT_FILTER", value)
    ports = EnginePorts.of_tcp_engines("some")
    assert ("its peer only" in caplog.text) is filtered and ("ALL ADDRESSES" in caplog.text) is not filtered
    engine, found = ports.start(Listener)
    assert connects(engine, "127.0.0.2") is not filtered
    ports.allow(found, None)
    assert connects(engine, "127.0.0.2")
    engine.destroy()


def test_a_wrong_switch_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_DATA_PORT_FILTER", "off")
    with pytest.raises(ConfigError, match="PDSERVE_DATA_PORT_FILTER must be 0 or 1, got 'off'"):
        EnginePorts.of_tcp_engines("some")


@pytest.fixture
def local() -> Iterator[LocalPeers]:
    peers = LocalPeers("test-local", lambda connection, name: connection.send(name.encode()) and None)
    yield peers
    peers.close()


@contextlib.contextmanager
def child(action: Callable[[], None]) -> Iterator[int]:
    """A process that does it and waits; killed in the end."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            signal.pause()
        finally:
            signal.raise_signal(signal.SIGKILL)  # it cleans up nothing of its parent's
    pidfd = os.pidfd_open(pid)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(pidfd)


def test_who_came_is_fenced_when_dead_and_is_told_to_go(local: LocalPeers) -> None:
    name = local.open("a")
    assert local.open("a") == name != local.open("b")
    said_r, said_w = os.pipe()

    def come() -> None:
        connection = call(name, "a")
        os.write(said_w, connection.recv(100)[:1])
        os.write(said_w, b"!" if connection.recv(100) == b"" else b"?")

    with child(come) as pid:
        assert os.read(said_r, 1) == name[:1].encode()
        assert not local.fence("a") and local.fence("b")
        assert os.read(said_r, 1) == b"!"
        with pytest.raises(TransferError, match="no process"):
            call(name, "a")
        assert local.open("a") != name and not local.fence("a")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        wait_until(lambda: local.fence("a"), "the process is dead")
    os.close(said_r)
    os.close(said_w)


def num_descriptors() -> int:
    """Sockets and pidfds of this process. Memory of other tests may be let go of at any time, and is not counted."""
    num = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # it listed itself
            num += os.readlink(f"/proc/self/fd/{name}").startswith(("socket:", "anon_inode:[pidfd]", "pidfd:"))
    return num


def test_a_process_that_has_hung_up_lives_still(local: LocalPeers) -> None:
    descriptors = []
    gc.collect()  # sockets of other tests end here, not in the loop
    for _ in range(5):
        for _ in range(3):
            connection = call(local.open("a"), "a")
            assert connection.recv(100)
            connection.close()
        assert not local.fence("a"), "we have come ourselves, and live"
        descriptors.append(num_descriptors())
    assert len(set(descriptors)) == 1, "one for the process, not for each time that it came"


def test_a_process_lives_on_in_those_that_it_forked(local: LocalPeers) -> None:
    """They have its mappings."""
    name = local.open("a")
    said_r, said_w = os.pipe()

    def come_and_fork() -> None:
        connection = call(name, "a")
        connection.recv(100)
        pid = os.fork()
        if pid:
            os.write(said_w, pid.to_bytes(4, "little"))
            signal.raise_signal(signal.SIGKILL)
        signal.alarm(60)
        signal.pause()  # with the connection

    with child(come_and_fork) as pid:
        grandchild = int.from_bytes(os.read(said_r, 4), "little")
        os.waitpid(pid, 0)
        assert not local.fence("a")
        os.kill(grandchild, signal.SIGKILL)
        wait_until(lambda: local.fence("a"), "both are dead")
    os.close(said_r)
    os.close(said_w)


def test_without_the_kernel_s_word_a_process_is_found_by_its_number(
    local: LocalPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_peers, "SO_PEERPIDFD", 9999)
    name = local.open("a")
    said_r, said_w = os.pipe()
    with child(lambda: os.write(said_w, call(name, "a").recv(100)[:1]) and None) as pid:
        assert os.read(said_r, 1) == name[:1].encode(), "it has come"
        assert not local.fence("a")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        wait_until(lambda: local.fence("a"), "it is dead")
    os.close(said_r)
    os.close(said_w)


def test_a_fence_in_memory_waits_for_the_write_under_way() -> None:
    hub = MemoryHub()
    receiver, sender = MemoryTransport(hub), MemoryTransport(hub)
    memory = np.zeros(64, dtype=np.uint8)
    region = MemoryRegion(int(memory.ctypes.data), 64)
    for transport in (receiver, sender):
        transport.register([region])
    address = receiver.open_receiver("a")
    assert address == receiver.open_receiver("a") != receiver.address()
    with hub.writing(address):
        thread = threading.Thread(target=receiver.fence, args=("a",))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    with pytest.raises(TransferError, match="no peer"):
        sender.write(address, [Copy(region.address, region.address, 0)])
    assert receiver.open_receiver("a") != address


def test_transports_made_of_others_fence_all_of_them() -> None:
    hub = MemoryHub()
    fenced: list[tuple[str, str]] = []

    class Way(MemoryTransport):
        def __init__(self, name: str, fence_drain_timeout_s: float, *, fences: bool) -> None:
            super().__init__(hub)
            self.name, self.fence_drain_timeout_s, self._fences = name, fence_drain_timeout_s, fences  # type: ignore[misc]

        def fence(self, peer: str) -> bool:
            fenced.append((self.name, peer))
            return super().fence(peer) and self._fences

    for fences in (False, True):
        fenced.clear()
        transport = FailingTransport(AutoTransport([Way("one", 0.0, fences=fences), Way("two", 5.0, fences=True)]), 0.5)
        address = transport.open_receiver("a")
        assert transport.open_receiver("a") == address != transport.address() and '"one"' in address
        assert transport.fence_drain_timeout_s == 5.0
        assert transport.fence("a") is fences
        assert fenced == [("one", "a"), ("two", "a")]
        assert transport.open_receiver("a") != address
