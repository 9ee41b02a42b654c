"""A transport over plain TCP sockets: one listener for each peer, one connection for each write at a time.

docs/tutorials/new-transport.md explains it. The contract of each method is that of `pdserve.transfer.transport`.

    writer    connect ── token ──>  receiver    one byte: accepted
    write     number of copies, then (destination, length, bytes) each  ──>  one byte: all landed, or a range is wrong
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import socket
import struct
import threading
import uuid
from collections.abc import Iterator, Sequence

from pdserve.errors import TransferError
from pdserve.transfer.transport import Copy, MemoryRegion, TransportFacts, TransportOptions
from pdserve.transfer.transports.link import RegionSet

STALL_S = 5.0
"""A connection without progress for so long has failed."""
TOKEN_BYTES = 16
COUNT, RANGE = struct.Struct("<I"), struct.Struct("<QQ")
NO_LINGER = struct.pack("ii", 1, 0)
LANDED, BAD_RANGE = b"\x01", b"\x00"


class SocketReceiver:
    """The listener for one peer, and a thread for each of its connections. `close` ends all of them.

    `allowed` None: connections from every address are accepted.
    """

    def __init__(self, host: str, regions: RegionSet, *, open_to_all: bool) -> None:
        self._regions = regions
        self._token = uuid.uuid4().bytes
        self.allowed: set[str] | None = None if open_to_all else set()
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=64)
        self._lock = threading.Lock()
        self._closed = False
        self._connections: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, name="socket-accept", daemon=True)]
        self._threads[0].start()
        self.address = f"socket:{host}:{self._listener.getsockname()[1]}:{self._token.hex()}"

    def _accept(self) -> None:
        while True:
            try:
                connection, source = self._listener.accept()
            except OSError:  # closed
                return
            with self._lock:
                if self._closed or (self.allowed is not None and source[0] not in self.allowed):
                    connection.close()
                    continue
                self._connections.add(connection)
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                thread = threading.Thread(target=self._serve, args=(connection,), name="socket-peer", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Take writes of one connection until it ends."""
        with contextlib.suppress(OSError), connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _receive(connection, TOKEN_BYTES) != self._token:
                return
            connection.sendall(LANDED)
            while True:
                connection.sendall(LANDED if self._take_write(connection) else BAD_RANGE)
        with self._lock:
            self._connections.discard(connection)

    def _take_write(self, connection: socket.socket) -> bool:
        """Receive one write into memory; False, and nothing changed from there on, if a range is not registered."""
        (count,) = COUNT.unpack(_receive(connection, COUNT.size))
        good = True
        for _ in range(count):
            destination, num_bytes = RANGE.unpack(_receive(connection, RANGE.size))
            good = good and self._regions.holds(destination, num_bytes)
            if good:
                _receive_into(connection, memoryview(_memory(destination, num_bytes)))
            else:
                _skip(connection, num_bytes)
        return good

    def close(self) -> None:
        """Close listener and connections, and wait for their threads: no byte is written to memory afterwards."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes `recv`
        for thread in self._threads:
            thread.join()


class SocketWriter:
    """Connections to one peer. A write takes an idle one, or opens another."""

    def __init__(self, address: str) -> None:
        """Raises TransferError for a malformed address."""
        try:
            kind, rest = address.split(":", 1)
            host, port, token = rest.rsplit(":", 2)
            self._where, self._token = (host, int(port)), bytes.fromhex(token)
            if kind != "socket" or len(self._token) != TOKEN_BYTES:
                raise ValueError(address)
        except ValueError:
            raise TransferError(f"{address!r} is no address of this transport", code="bad_address") from None
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []

    def open(self) -> None:
        """Make sure that there is a connection. Raises TransferError."""
        self._put(self._take())

    def write(self, copies: Sequence[Copy]) -> None:
        """Send the copies and wait until they have landed. Raises TransferError."""
        connection = self._take()
        try:
            connection.sendall(COUNT.pack(len(copies)))
            for copy in copies:
                connection.sendall(RANGE.pack(copy.destination, copy.num_bytes))
                connection.sendall(_memory(copy.source, copy.num_bytes))
            answer = _receive(connection, 1)
        except OSError as error:
            # Closed so, the kernel sends nothing more of what it holds: the write is settled.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            connection.close()
            raise TransferError(f"the write to {self._where} failed: {error}") from error
        self._put(connection)
        if answer != LANDED:
            raise TransferError(f"a destination is not registered at {self._where}", code="bad_range", retryable=False)

    def _take(self) -> socket.socket:
        """Return a connection that no other thread has. Raises TransferError (settled) if none can be opened."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            connection = socket.create_connection(self._where, STALL_S)
            try:
                connection.settimeout(STALL_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(self._token)
                _receive(connection, 1)
            except OSError:
                connection.close()
                raise
        except OSError as error:
            text = f"nothing answers at {self._where}: {error}"
            raise TransferError(text, code="peer_unreachable") from error
        return connection

    def _put(self, connection: socket.socket) -> None:
        with self._lock:
            self._idle.append(connection)

    def close(self) -> None:
        """Close idle connections; writes under way end by themselves."""
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()


class SocketTransport:
    """See `pdserve.transfer.transport.Transport` for threads and errors."""

    name = "socket"
    facts = TransportFacts(protocol="tcp", moves_bytes=True, writers=2)
    drain_timeout_s = STALL_S
    fence_drain_timeout_s = 0.0
    """`SocketReceiver.close` waits for the threads that store bytes; tests/conformance/test_fence.py measured it."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._regions = RegionSet()
        self._lock = threading.Lock()
        self._own: SocketReceiver | None = None
        self._receivers: dict[str, SocketReceiver] = {}
        self._writers: dict[str, SocketWriter] = {}
        self._closed = False

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make regions readable for `write` and writable for peers."""
        self._regions.add(regions)

    def address(self) -> str:
        """Return the address of a listener that accepts connections from everywhere."""
        if self._own is None:
            self._own = SocketReceiver(self._host, self._regions, open_to_all=True)
        return self._own.address

    def open_receiver(self, peer: str) -> str:
        """Open a listener for `peer` alone, and return its address."""
        with self._lock:
            if peer not in self._receivers:
                self._receivers[peer] = SocketReceiver(self._host, self._regions, open_to_all=False)
            return self._receivers[peer].address

    def allow_sources(self, peer: str, addresses: Sequence[str]) -> None:
        """Accept connections from these IP addresses, too."""
        with self._lock:
            receiver = self._receivers.get(peer)
            if receiver is not None and receiver.allowed is not None:
                receiver.allowed.update(_numeric(addresses))

    def fence(self, peer: str) -> bool:
        """Close the listener of `peer` and its connections."""
        with self._lock:
            receiver = self._receivers.pop(peer, None)
        if receiver is not None:
            receiver.close()
        return True

    def connect(self, address: str) -> None:
        """Open a connection to a peer."""
        writer = SocketWriter(address)
        writer.open()
        with self._lock:
            former, self._writers[address] = self._writers.get(address), writer
        if former is not None:
            former.close()

    def disconnect(self, address: str) -> None:
        """Forget a peer."""
        with self._lock:
            writer = self._writers.pop(address, None)
        if writer is not None:
            writer.close()

    def write(self, address: str, copies: Sequence[Copy]) -> None:
        """Copy, and return when every byte is in the peer's memory."""
        self._regions.check_sources(copies)
        with self._lock:
            writer = self._writers.get(address)
        if writer is None:
            raise TransferError(f"{address} is not connected", code="peer_unreachable")
        if wanted := [copy for copy in copies if copy.num_bytes]:
            writer.write(wanted)

    def close(self) -> None:
        """Close all connections and listeners."""
        for address in list(self._writers):
            self.disconnect(address)
        for peer in list(self._receivers):
            self.fence(peer)
        if self._own is not None:
            self._own.close()


def open_transport(host: str, options: TransportOptions) -> SocketTransport:
    """Open the transport; pdserve calls it through the entry point. `host`: the address that peers reach us at."""
    return SocketTransport(host)


def _memory(address: int, num_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """Return registered memory as a buffer."""
    return (ctypes.c_char * num_bytes).from_address(address)


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Return exactly `num_bytes`. Raises OSError if the connection ends before."""
    received = bytearray(num_bytes)
    _receive_into(connection, memoryview(received))
    return bytes(received)


def _receive_into(connection: socket.socket, buffer: memoryview) -> None:
    buffer = buffer.cast("B")
    while len(buffer):
        count = connection.recv_into(buffer)
        if count == 0:
            raise ConnectionResetError("the peer has closed the connection")
        buffer = buffer[count:]


def _skip(connection: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        num_bytes -= len(_receive(connection, min(num_bytes, 1 << 16)))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _numeric(addresses: Sequence[str]) -> Iterator[str]:
    """Yield the IP addresses; names are left out."""
    for address in addresses:
        with contextlib.suppress(ValueError):
            yield str(ipaddress.ip_address(address))
