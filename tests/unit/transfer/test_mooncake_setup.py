"""What the mooncake transport decides before the engine runs: protocol, environment, addresses; and its permits."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.base.listeners import tcp_sockets
from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.registry import open_transport
from pdserve.transfer.transport import TransportOptions
from pdserve.transfer.transports import mooncake
from pdserve.transfer.transports.host_info import choose_protocol
from pdserve.transfer.transports.link import WritePermits
from pdserve.transfer.transports.mooncake import (
    BRIEF_TIMEVAL,
    TCP_TIMEOUTS,
    MooncakeEngine,
    open_session,
    session_of,
    set_environment,
    speed_up_shutdown,
    start_native,
)
from tests.waiting import wait_until

ENGINE_VARIABLES = (
    *TCP_TIMEOUTS,
    "MC_FORCE_TCP",
    "MC_IB_TC",
    "MC_LOG_LEVEL",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER",
    "MC_TRANSFER_TIMEOUT",
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the engine's variables is set, and what a test sets is gone after it."""
    for name in ENGINE_VARIABLES:
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)


def test_tcp_is_chosen_without_a_nic_and_rdma_with_one(tmp_path: Path) -> None:
    assert choose_protocol(None, tmp_path / "absent") == "tcp"
    assert choose_protocol(None, tmp_path) == "tcp"
    (tmp_path / "mlx5_0").mkdir()
    assert choose_protocol(None, tmp_path) == "rdma"
    assert choose_protocol("mlx5_0", tmp_path) == "rdma"
    assert choose_protocol(None, tmp_path, asked="tcp") == "tcp"
    assert choose_protocol(None, tmp_path, asked="rdma") == "rdma"
    with pytest.raises(ConfigError, match="no RDMA device") as caught:
        choose_protocol(None, tmp_path / "absent", asked="rdma")
    assert caught.value.field == "mooncake_protocol"


@pytest.mark.parametrize("named", ["mlx5_9", "mlx5_0,mlx5_9", " mlx5_0 , mlx5_9"])
def test_a_nic_that_does_not_exist_is_refused_by_name(tmp_path: Path, named: str) -> None:
    (tmp_path / "mlx5_0").mkdir()
    with pytest.raises(ConfigError, match="mlx5_9") as caught:
        choose_protocol(named, tmp_path)
    assert caught.value.field == "disaggregation_ib_device"


def test_the_user_s_environment_wins_and_tcp_is_forced_only_for_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set_environment("rdma") == 5
    assert "MC_FORCE_TCP" not in os.environ
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "9")
    assert set_environment("tcp") == 9
    assert os.environ["MC_FORCE_TCP"] == "1"


def test_the_traffic_class_reaches_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MC_IB_TC", "1")
    set_environment("rdma")
    assert os.environ["MC_IB_TC"] == "1" and not caplog.messages
    set_environment("rdma", 106)
    assert os.environ["MC_IB_TC"] == "106" and not caplog.messages
    set_environment("tcp", 106)
    assert caplog.messages == ["--disaggregation-ib-traffic-class has no effect: the transfer protocol is tcp"]


@pytest.mark.skipif(Path("/sys/class/infiniband").is_dir(), reason="this host has RDMA devices")
def test_rdma_without_a_nic_is_refused_before_the_engine_starts() -> None:
    with pytest.raises(ConfigError, match="--mooncake-protocol is rdma") as caught:
        open_transport("mooncake", "127.0.0.1", TransportOptions(mooncake_protocol="rdma"))
    assert caught.value.field == "mooncake_protocol"


def test_a_timeout_that_is_no_number_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "soon")
    with pytest.raises(ConfigError, match="MC_TCP_PROGRESS_TIMEOUT_SEC"):
        set_environment("tcp")


def test_a_session_is_found_in_its_address() -> None:
    assert session_of("127.0.0.1:15001/abc") == "127.0.0.1:15001"
    assert session_of("[::1]:15001/abc") == "[::1]:15001"


@pytest.mark.parametrize(
    "address", ["", "fake", "host:1", "host:1/", ":1/a", "host/a", "host:x/a", "h:0/a", "h:65536/a"]
)
def test_a_malformed_address_is_refused_for_good(address: str) -> None:
    with pytest.raises(TransferError, match="not a mooncake address") as caught:
        session_of(address)
    assert not caught.value.retryable


def test_a_missing_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(ConfigError, match=r"pdserve\[mooncake\].*libibverbs1") as caught:
        open_transport("mooncake", "127.0.0.1")
    assert caught.value.field == "disaggregation_transfer_backend"


def test_a_window_never_hands_out_more_permits_than_it_has() -> None:
    window, lock = WritePermits(10), threading.Lock()
    held, most = 0, 0

    def work(size: int) -> None:
        nonlocal held, most
        for _ in range(200):
            with window.hold(size):
                with lock:
                    held += size
                    most = max(most, held)
                with lock:
                    held -= size

    threads = [threading.Thread(target=work, args=(size,)) for size in (1, 3, 7, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert 0 < most <= 10


def test_a_peer_that_never_answers_holds_up_its_own_thread_only() -> None:
    """The engine's call must let go of the interpreter's lock: who else would close the connection it waits on?"""
    set_environment("tcp")
    native = start_native("127.0.0.1", "tcp", "")
    answers: list[bool] = []
    try:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            silent.settimeout(90.0)
            session = f"127.0.0.1:{silent.getsockname()[1]}"
            asking = threading.Thread(target=lambda: answers.append(open_session(native, session)))
            asking.start()
            connection, _ = silent.accept()
            with connection:
                assert not _has_ended(connection), "it gave up before we could do anything"
            asking.join(timeout=90.0)
        assert answers == [False]
    finally:
        speed_up_shutdown(int(native.get_rpc_port()))


def sockets_at(port: int, *, listening: bool) -> list[int]:
    """Descriptors."""
    found = tcp_sockets(listening=listening)
    return [descriptor for descriptor, _, one in found if one.getsockname()[1] == port]


def test_where_an_engine_listens_is_found() -> None:
    """What `speed_up_shutdown` needs: without it each engine's end stops all threads for a second."""
    set_environment("tcp")
    engine = MooncakeEngine("127.0.0.1", "tcp", "")
    port = int(engine.session.rpartition(":")[2])
    assert len(sockets_at(port, listening=True)) == 1
    with socket.create_connection(("127.0.0.1", port), timeout=30.0) as connection:
        near = connection.getsockname()[1]
        assert sockets_at(near, listening=False) == [connection.fileno()]
        assert sockets_at(near, listening=True) == [], "this one is connected, it does not listen"
    engine.destroy()
    assert sockets_at(port, listening=True) == [], "it has ended"


def test_an_engine_ends_where_its_sockets_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later than otherwise: a fence whose engine does not end never frees the pages."""

    def fail(*, listening: bool) -> None:
        raise OSError("no descriptor is left")

    set_environment("tcp")
    engine = MooncakeEngine("127.0.0.1", "tcp", "")
    port = int(engine.session.rpartition(":")[2])
    with monkeypatch.context() as patch:
        patch.setattr(mooncake, "tcp_sockets", fail)
        engine.destroy()
    assert sockets_at(port, listening=True) == []


@pytest.mark.parametrize("said", [b"", b"\x10\x00\x00"])
def test_strangers_who_say_nothing_do_not_hold_up_the_end_of_an_engine(said: bytes) -> None:
    """The engine waits 5 s for what each says, and at its end the interpreter's lock is kept meanwhile."""
    set_environment("tcp")
    engine = MooncakeEngine("127.0.0.1", "tcp", "")
    port = int(engine.session.rpartition(":")[2])
    with contextlib.ExitStack() as opened:
        strangers = [opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(3)]
        for stranger in strangers:
            stranger.sendall(said)
        wait_until(lambda: sockets_at(port, listening=False), "the engine reads from the first one")
        assert not any(map(_has_ended, strangers))
        speed_up_shutdown(port)
        assert all(map(_has_ended, strangers))
        assert sockets_at(port, listening=True) == [], "nobody else comes in"
        engine.destroy()


class KitNative:
    """Listens, like the engine, and says at its end whether the thread that accepts would have been woken."""

    def __init__(self, ends: list[tuple[bool, bool]], may_answer: threading.Event | None = None) -> None:
        self._ends = ends
        self._may_answer = may_answer or threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._awaited = self._listener.dup()
        """Where the thread that accepts is at; its descriptor is given another socket."""

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return int(self._listener.getsockname()[1])

    def send_probe(self, session: str) -> int:
        assert self._may_answer.wait(30.0)
        return -1

    def __del__(self) -> None:
        limit = self._listener.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, len(BRIEF_TIMEVAL))
        self._awaited.setblocking(False)
        try:
            self._awaited.accept()[0].close()
            woken = True
        except BlockingIOError:
            woken = False
        self._awaited.close()
        self._listener.close()
        self._ends.append((limit != bytes(len(limit)), woken))


def test_an_engine_is_told_to_hurry_right_before_its_end() -> None:
    ends: list[tuple[bool, bool]] = []
    engine = MooncakeEngine("127.0.0.1", "tcp", "", lambda: KitNative(ends))
    engine.destroy()
    assert ends == [(True, True)]
    engine.destroy()
    assert len(ends) == 1


def test_an_engine_given_up_while_it_asks_ends_when_it_has_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[tuple[bool, bool]] = []
    may_answer = threading.Event()
    monkeypatch.setattr(mooncake, "PROBE_TIMEOUT_S", 0.1)
    engine = MooncakeEngine("127.0.0.1", "tcp", "", lambda: KitNative(ends, may_answer))
    with pytest.raises(TransferError, match="does not answer"):
        engine.reach("127.0.0.1:1")
    engine.destroy()
    assert ends == [], "its thread is still in a call"
    may_answer.set()
    wait_until(lambda: ends == [(True, True)], "the end of the engine")


def _has_ended(connection: socket.socket) -> bool:
    """Whether the other side has closed; what it sent before does not matter."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True


def test_an_engine_whose_ports_were_taken_meanwhile_is_started_once_more() -> None:
    ends: list[tuple[bool, bool]] = []
    failures: Iterator[str] = iter(["bind: Address already in use"] * 2)

    class Unlucky(KitNative):
        def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
            for failure in failures:
                raise RuntimeError(failure)
            return 0

    def start() -> MooncakeEngine:
        return MooncakeEngine("127.0.0.1", "tcp", "", lambda: Unlucky(ends))

    start().destroy()
    gc.collect()  # tracebacks of the failures may hold the engines
    assert len(ends) == 3
    failures = itertools.repeat("bind: Address already in use")
    with pytest.raises(TransferError, match="ports were taken"):
        start()
    failures = itertools.repeat("no memory")
    with pytest.raises(TransferError, match="no memory"):
        start()
