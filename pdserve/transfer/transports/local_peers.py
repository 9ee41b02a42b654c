"""Tracks the processes of this host that connected as a peer, and whether they are alive. Used by `shm` and `nixl`: a
process can write into directly accessible memory until it is dead.

    receiver: `LocalPeers`                               sender: `call`
    listens at an abstract unix socket for each peer     gets the socket's name in the address
    checks that the caller is of our user <── connect ── checks that the listener is of our user
    records the process, sends a greeting ─────────────> keeps the connection while it may write
    fences the peer: closes the socket   ── EOF ───────> writes no more, after its next check
    sees the end of the process, and EOF <── dies ──────

An abstract socket leaves no file when its process is killed. It belongs to a network namespace: processes of another
namespace cannot connect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import select
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable

from pdserve.errors import ConfigError, TransferError

log = logging.getLogger(__name__)

BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
CONNECT_TIMEOUT_S = 3.0
SO_PEERPIDFD = 77
"""Available since Linux 6.5; the `socket` module has no name for it."""
RETRY_S = 0.1
_CREDENTIALS = struct.Struct("3i")
_INT = struct.Struct("i")


def host_identity() -> str:
    """Return an id that all processes of one running kernel share. Raises ConfigError where there is none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"transfer backends shm and nixl need {BOOT_ID} ({error}); use mooncake",
            field="disaggregation_transfer_backend",
        ) from error


@dataclasses.dataclass(eq=False)
class _Process:
    """A process that connected as a peer, and its open connections.

    `pidfd` becomes readable when the process has ended; None where the kernel gives none: then its end is never known.
    """

    pid: int
    pidfd: int | None
    connections: list[socket.socket] = dataclasses.field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return self.pidfd is not None and _is_readable(self.pidfd)

    @property
    def is_over(self) -> bool:
        """True when the process and its forks have ended: forks would share its memory, but also its connections."""
        for connection in [one for one in self.connections if not is_open(one.fileno())]:
            self.connections.remove(connection)
            connection.close()
        return self.has_ended and not self.connections

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        if self.pidfd is not None:
            os.close(self.pidfd)


@dataclasses.dataclass
class _Peer:
    """One peer's socket (None once closed), and the processes that connected to it or to a former one."""

    name: str = ""
    listener: socket.socket | None = None
    processes: list[_Process] = dataclasses.field(default_factory=list)

    def forget_ended(self) -> None:
        for process in [one for one in self.processes if one.is_over]:
            self.processes.remove(process)
            process.close()


class LocalPeers:
    """One socket with an unguessable name for each peer. Thread-safe; the first `open` starts a thread.

    `greet` sends the greeting over a non-blocking connection; its second argument is the socket's name. The peer None
    stands for any process.
    """

    def __init__(self, thread_name: str, greet: Callable[[socket.socket, str], None]) -> None:
        self._greet = greet
        self._lock = threading.Lock()
        self._peers: dict[str | None, _Peer] = {}
        self._listening: dict[int, _Peer] = {}
        self._closed = False
        self._poll = select.epoll()
        self._wake = os.eventfd(0)
        self._poll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._serve, name=thread_name, daemon=True)

    def open(self, peer: str | None) -> str:
        """Return the name of the socket for `peer`, bound if there is none. Raises TransferError when that fails."""
        with self._lock:
            if self._closed:
                raise TransferError("the transport is closed", code="closed", retryable=False)
            entry = self._peers.setdefault(peer, _Peer())
            if entry.listener is None:
                try:
                    self._listen(entry)
                except (OSError, RuntimeError) as error:  # no descriptor, no thread
                    raise TransferError(f"no socket for a peer of this host: {error}", code="engine_failed") from None
            return entry.name

    def fence(self, peer: str | None) -> bool:
        """Close the socket of `peer`. True when every process that connected to it is dead, or none connected."""
        with self._lock:
            entry = self._peers.get(peer)
            if entry is None:
                return True
            self._shut(entry)
            for process in entry.processes:
                for connection in process.connections:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_WR)
            entry.forget_ended()
            if entry.processes:
                return False
            del self._peers[peer]
            return True

    def close(self) -> None:
        """Close all sockets. Connected processes see EOF, and are tracked no more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join()
        for entry in self._peers.values():
            self._shut(entry)
            for process in entry.processes:
                process.close()
        self._peers.clear()
        self._poll.close()
        os.close(self._wake)

    def _listen(self, entry: _Peer) -> None:
        if self._thread.ident is None:
            self._thread.start()
        name = uuid.uuid4().hex
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(socket_name(name))
            listener.listen(128)
            self._poll.register(listener.fileno(), select.EPOLLIN)
        except OSError:
            listener.close()
            raise
        entry.name, entry.listener = name, listener
        self._listening[listener.fileno()] = entry

    def _shut(self, entry: _Peer) -> None:
        if entry.listener is not None:
            self._poll.unregister(entry.listener.fileno())
            del self._listening[entry.listener.fileno()]
            entry.listener.shutdown(socket.SHUT_RDWR)  # also where a child has inherited it
            entry.listener.close()
            entry.listener = None

    def _serve(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll():
                try:
                    with self._lock:
                        if self._closed:
                            return
                        entry = self._listening.get(descriptor)
                        if entry is not None and entry.listener is not None:  # else it was closed meanwhile
                            self._accept(entry, entry.listener)
                except OSError as error:
                    log.warning("cannot accept a connection of a process of this host: %s", error)
                    time.sleep(RETRY_S)  # for example out of descriptors

    def _accept(self, entry: _Peer, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        entry.forget_ended()
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            try:
                connection.setblocking(False)
                process = _process_of(connection, entry.processes)
                if process not in entry.processes:
                    stack.callback(process.close)
                self._greet(connection, entry.name)
            except OSError as error:
                log.warning("a process of this host was refused: %s", error)
                return
            stack.pop_all()
        process.connections.append(connection)
        if process not in entry.processes:
            entry.processes.append(process)


def call(name: str, address: str) -> socket.socket:
    """Connect to the socket called `name`, on which a greeting follows; the connection has a timeout.

    Raises:
        TransferError: no process answers, or the listener is of another user. The text names `address`.
    """
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            connection.connect(socket_name(name))
            _, user = _credentials_of(connection)
        except TimeoutError:
            raise TransferError(f"the process at {address} does not answer", code="peer_unreachable") from None
        except OSError as error:
            raise TransferError(f"no process at {address}: {error}", code="peer_unreachable") from error
        if user != os.geteuid():
            raise TransferError(f"{address} is of user {user}", code="bad_peer", retryable=False)
        stack.pop_all()
    return connection


def socket_name(name: str) -> str:
    """Return the address of an abstract unix socket."""
    return f"\0pdserve-shm-{name}"


def is_open(connection: int) -> bool:
    """Return False once the other end is closed, or has sent an unexpected byte. `connection` must be non-blocking."""
    try:
        os.read(connection, 1)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _credentials_of(connection: socket.socket) -> tuple[int, int]:
    """Return pid and user id of the process at the other end, from the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return int(pid), int(user)


def _process_of(connection: socket.socket, known: list[_Process]) -> _Process:
    """Return the process at the other end, from `known` or new. Raises OSError when it is another user's or ended."""
    pid, user = _credentials_of(connection)
    if user != os.geteuid():
        raise PermissionError(f"it is of user {user}, we are of {os.geteuid()}")
    for process in known:
        if process.pid == pid and process.pidfd is not None and not process.has_ended:
            return process
    return _Process(pid, _open_pidfd(connection, pid))


def _open_pidfd(connection: socket.socket, pid: int) -> int | None:
    """Open the pidfd for `_Process.pidfd`, or return None. Raises OSError when the process has ended."""
    with contextlib.suppress(OSError):
        return int(_INT.unpack(connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, _INT.size))[0])
    if pid == 0:
        return None  # of another process namespace, on an older kernel
    pidfd = os.pidfd_open(pid)
    if not is_open(connection.fileno()):
        os.close(pidfd)  # the pid may belong to a later process
        raise ConnectionResetError("it has ended")
    return pidfd


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
