"""Within one host, from CPU memory to CPU memory: the peer's pools are mapped here, and a copy is a memmove.

Nothing but the two processes takes part, so what `write` promises is simple: when it returns or raises, it moves
nothing any more, whatever the peer does. A peer that is stopped is written to all the same. The mapping outlives a
dead peer: the connection of `shm_share` tells, before and after each batch of a write.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from pdserve.errors import TransferError
from pdserve.transfer.transport import Copy, MemoryRegion, RegionSet, TransportFacts
from pdserve.transfer.transports.mover import MemcpyEngine, Move
from pdserve.transfer.transports.shm_share import MappedPeer, Share, open_peer

SETTLE_S = 5.0
"""Writes settle as they end. This is for other ranks of a replica whose leader is dead: by then they have ended too."""
BATCH_BYTES = 32 << 20
"""So much is moved before we look again whether the peer was given up: some milliseconds."""


class ShmTransport:
    """Writes into mapped memory of processes of this host. See `Transport` for who calls what from where."""

    name = "shm"
    facts = TransportFacts(protocol="memory", moves_bytes=True, writers=2)
    settle_s = SETTLE_S
    fence_settle_s = 0.0

    def __init__(self) -> None:
        """Raises ConfigError where the host has no identity."""
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
        """A socket of its own for `peer`."""
        return self._share.address(peer)

    def fence(self, peer: str) -> bool:
        """Shut the socket of `peer`. True once all processes are dead that have mapped our memory as that peer.

        One that lives is asked to stop: it does so within `BATCH_BYTES`, but that cannot be seen from here.
        """
        return self._share.fence(peer)

    def connect(self, address: str) -> None:
        """Map the peer's memory, unless it is."""
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
        """memmove each copy, after all ranges were checked on both sides."""
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
        """Be seen as gone, and let go of all peers."""
        with self._lock:
            self._closed = True
        for address in list(self._peers):
            self.disconnect(address)
        self._share.close()


def _moves(peer: MappedPeer, copies: Sequence[Copy]) -> list[Move]:
    """Where in this process the copies end. Raises TransferError when the peer has not registered a destination."""
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
    """Runs of moves of about `BATCH_BYTES`."""
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
        raise TransferError(f"the process at {address} has ended, or shut us out", code="peer_unreachable")
