"""Transport within one host between CPU memories: maps the peer's pools into this process and copies with memmove.

Only the two processes take part, so `write` is always settled: when it returns or raises, it moves no more bytes,
whatever the peer does. Writes to a stopped peer succeed. A mapping outlives a dead peer: the connection of `Share`
detects that, before and after each batch of a write.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from pdserve.base.native import Unavailable, library
from pdserve.errors import TransferError
from pdserve.memory import shared
from pdserve.transfer.transport import Copy, MemoryRegion, TransportFacts
from pdserve.transfer.transports.link import RegionSet
from pdserve.transfer.transports.local_peers import LocalPeers, call, host_identity, is_open

Move = tuple[int, int, int]
"""Destination and source address, both in this process, and bytes."""
SMALL_BYTES = 1 << 16
"""Largest move that keeps the GIL: moving so few bytes takes less time than getting the GIL back."""


class MemcpyEngine:
    """Moves bytes. Thread-safe.

    With the kernel library, the GIL is released once for all moves of a call; else once for each move that is not
    small.
    """

    def __init__(self, *, native: bool = True) -> None:
        """Create an engine. `native` False: do not use the kernel library."""
        self._small = ctypes.PyDLL(None).memmove
        self._small.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._small.restype = None
        self._copy = None
        if native:
            with contextlib.suppress(Unavailable):
                self._copy = library().pdk_copy

    def __call__(self, moves: Sequence[Move]) -> None:
        """Make all moves in order; ranges are not checked."""
        if self._copy is not None and sum(move[2] for move in moves) > SMALL_BYTES:
            table = np.array(moves, dtype=np.int64)
            self._copy(table.ctypes.data, len(table))
            return
        for destination, source, num_bytes in moves:
            move = self._small if num_bytes <= SMALL_BYTES else ctypes.memmove
            move(destination, source, num_bytes)


MAX_REGIONS = 128
"""Most regions of one process; the kernel passes at most 253 files in one message."""
MAX_OFFER_BYTES = 1 << 16
_PREFIX = "shm"


class SharedWindow(msgspec.Struct, frozen=True):
    """A region: `[address, address + num_bytes)` in the receiver is at `offset` of a file of `file_bytes` bytes."""

    address: int
    num_bytes: int
    offset: int
    file_bytes: int


class Offer(msgspec.Struct, frozen=True):
    """Message of the receiver, together with one file descriptor for each window."""

    incarnation: str
    windows: tuple[SharedWindow, ...]


class Share:
    """Receiving end: passes regions to connecting processes; each peer has its own socket."""

    def __init__(self) -> None:
        """Create a share without regions. Raises ConfigError where the host has no identity."""
        self._host = host_identity()
        self._windows: tuple[SharedWindow, ...] = ()
        self._files: tuple[int, ...] = ()
        self._peers = LocalPeers("kv-shm", self._show)

    def address(self, peer: str | None) -> str:
        """Return the address at which only `peer` connects; None: any process. Raises TransferError when no socket can
        be bound.
        """
        return f"{_PREFIX}:{self._host}:{self._peers.open(peer)}"

    def add(self, regions: Sequence[MemoryRegion]) -> None:
        """Add regions for processes that connect from now on.

        Raises:
            TransferError: a region is not in shareable memory; then none is added.
        """
        windows, files = list(self._windows), list(self._files)
        for region in regions:
            segment = shared.find(region.address, region.num_bytes)
            if segment is None:
                raise TransferError(
                    f"cannot register {region}: it is not in memory that others can map (on a GPU, or no memfd here)",
                    code="bad_region",
                    retryable=False,
                )
            offset = region.address - segment.address
            windows.append(SharedWindow(region.address, region.num_bytes, offset, segment.num_bytes))
            files.append(segment.descriptor)
        if len(windows) > MAX_REGIONS:
            raise TransferError(f"cannot register more than {MAX_REGIONS} regions", code="bad_region", retryable=False)
        self._windows, self._files = tuple(windows), tuple(files)

    def fence(self, peer: str) -> bool:
        """Close the socket of `peer`. True when no process that mapped memory as that peer is alive."""
        return self._peers.fence(peer)

    def close(self) -> None:
        """Close all sockets. Existing mappings of peers stay valid."""
        self._peers.close()

    def _show(self, connection: socket.socket, name: str) -> None:
        offer = msgspec.msgpack.encode(Offer(name, self._windows))
        socket.send_fds(connection, [offer], self._files)


class MappedPeer:
    """Mapping of a peer's memory. Unmapped, and the connection closed, with the last reference, so that no write is
    cut.

    `given_up` is set when the peer was disconnected; writers check it between two batches.
    """

    def __init__(self, connection: int, offer: Offer, bases: Sequence[int], keep: object) -> None:
        self.regions = RegionSet()
        self.regions.add([MemoryRegion(window.address, window.num_bytes) for window in offer.windows])
        self.given_up = False
        shifts = {
            window.address: base + window.offset - window.address
            for window, base in zip(offer.windows, bases, strict=True)
        }
        self.shifts = tuple(shifts[region.address] for region in self.regions.regions)
        """For each of `regions`: the offset from the peer's address to the local address."""
        self._keep = keep
        self._connection = connection
        weakref.finalize(self, os.close, connection).atexit = False

    @property
    def is_alive(self) -> bool:
        """False once the peer's process has ended or has fenced this process. A stopped process is alive."""
        return is_open(self._connection)


def open_peer(address: str) -> MappedPeer:
    """Map the memory of the process behind `address`.

    Raises:
        TransferError: the address is malformed or of another host, no process answers, or the answering process is no
            `Share` of our user.
    """
    incarnation = _incarnation_of(address)
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(call(incarnation, address))
        try:
            content, files, _, _ = socket.recv_fds(connection, MAX_OFFER_BYTES, MAX_REGIONS, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            raise TransferError(f"the process at {address} does not answer", code="peer_unreachable") from None
        except OSError as error:
            raise TransferError(f"no process at {address}: {error}", code="peer_unreachable") from error
        for file in files:
            stack.callback(os.close, file)
        try:
            offer = msgspec.msgpack.decode(content, type=Offer)
            if offer.incarnation != incarnation or len(files) != len(offer.windows):
                raise ValueError(f"an offer of {offer.incarnation} with {len(files)} files")
            mappings = [shared.map_whole(file, w.file_bytes) for file, w in zip(files, offer.windows, strict=True)]
            connection.setblocking(False)
            bases = [shared.address_of(mapping) for mapping in mappings]
            return MappedPeer(os.dup(connection.fileno()), offer, bases, mappings)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise TransferError(f"cannot map the memory of {address}: {error}", code="bad_peer") from error


def _incarnation_of(address: str) -> str:
    prefix, _, rest = address.partition(":")
    host, _, incarnation = rest.partition(":")
    if prefix != _PREFIX or not host or len(incarnation) != 32 or not incarnation.isalnum():
        raise TransferError(f"not a shm address: {address[:100]!r}", code="bad_address", retryable=False)
    if host != host_identity():
        raise TransferError(
            f"{address} is on another host (ours is {host_identity()}); shm works within one host only: start both "
            "servers with --disaggregation-transfer-backend mooncake, or auto",
            code="other_host",
            retryable=False,
        )
    return incarnation


DRAIN_TIMEOUT_S = 5.0
"""Writes settle when they end. This delay is for other ranks of a replica whose rank 0 is dead: their writes end by
then.
"""
BATCH_BYTES = 32 << 20
"""Bytes that are moved between two checks whether the peer was given up: some milliseconds."""


class ShmTransport:
    """Writes into mapped memory of processes of this host. For threads see `Transport`."""

    name = "shm"
    facts = TransportFacts(protocol="memory", moves_bytes=True, writers=2)
    drain_timeout_s = DRAIN_TIMEOUT_S
    fence_drain_timeout_s = 0.0

    def __init__(self) -> None:
        """Create a transport. Raises ConfigError where the host has no identity."""
        self._share = Share()
        self._regions = RegionSet()
        self._lock = threading.Lock()
        self._peers: dict[str, MappedPeer] = {}
        self._closed = False
        self._move = MemcpyEngine()

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Let peers map the regions, which `pdserve.memory.shared` must have allocated."""
        checked = RegionSet()
        checked.add([*self._regions.regions, *regions])
        self._share.add(regions)
        self._regions.add(regions)

    def address(self) -> str:
        """`shm:host identity:incarnation`."""
        return self._share.address(None)

    def open_receiver(self, peer: str) -> str:
        """Open a socket for `peer`, and return its address."""
        return self._share.address(peer)

    def allow_sources(self, peer: str, addresses: Sequence[str]) -> None:
        """Do nothing: the kernel identifies peers at their sockets."""

    def fence(self, peer: str) -> bool:
        """Close the socket of `peer`. True once all processes that mapped our memory as that peer are dead.

        A live process is notified and stops within `BATCH_BYTES`, but that cannot be observed from here.
        """
        return self._share.fence(peer)

    def connect(self, address: str) -> None:
        """Map the peer's memory, unless it is mapped."""
        with self._lock:
            if self._closed:
                raise TransferError("the transport is closed", code="closed", retryable=False)
            if address in self._peers:
                return
        peer = open_peer(address)
        with self._lock:
            self._peers.setdefault(address, peer)

    def disconnect(self, address: str) -> None:
        """Forget a peer; its memory is unmapped when the last write to it has ended."""
        with self._lock:
            peer = self._peers.pop(address, None)
        if peer is not None:
            peer.given_up = True

    def write(self, address: str, copies: Sequence[Copy]) -> None:
        """Copy with memmove, after checking all ranges on both sides."""
        with self._lock:
            peer = self._peers.get(address)
        if peer is None:
            raise TransferError(f"not connected to {address}", code="not_connected", retryable=False)
        self._regions.check_sources(copies)
        moves = _moves(peer, copies)
        for batch in _batches(moves):
            if peer.given_up:
                raise TransferError(f"the peer at {address} was given up", code="link_down")
            _check_alive(peer, address)
            self._move(batch)
        _check_alive(peer, address)

    def close(self) -> None:
        """Close all sockets, and forget all peers."""
        with self._lock:
            self._closed = True
        for address in list(self._peers):
            self.disconnect(address)
        self._share.close()


def _moves(peer: MappedPeer, copies: Sequence[Copy]) -> list[Move]:
    """Return the copies with local addresses. Raises TransferError when the peer has not registered a destination."""
    moves, start, end, shift = [], 0, 0, 0
    for copy in copies:
        destination, num_bytes = copy.destination, copy.num_bytes
        if not start <= destination <= destination + num_bytes <= end:  # else in the same region as the last one
            if num_bytes == 0:
                continue
            index = peer.regions.find(destination, num_bytes)
            if index is None:
                raise TransferError(
                    f"destination range {destination:#x} + {num_bytes} bytes is not registered at the peer",
                    code="bad_range",
                    retryable=False,
                )
            region, shift = peer.regions.regions[index], peer.shifts[index]
            start, end = region.address, region.address + region.num_bytes
        moves.append((destination + shift, copy.source, num_bytes))
    return moves


def _batches(moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
    """Yield runs of moves of about `BATCH_BYTES`."""
    first, total = 0, 0
    for index, (_, _, num_bytes) in enumerate(moves):
        total += num_bytes
        if total >= BATCH_BYTES:
            yield moves[first : index + 1]
            first, total = index + 1, 0
    if first < len(moves):
        yield moves[first:]


def _check_alive(peer: MappedPeer, address: str) -> None:
    if not peer.is_alive:
        raise TransferError(f"the process at {address} has ended or fenced this process", code="peer_unreachable")
