"""How the memory of one process comes to be mapped in another of the same host. Used by `shm` only.

    receiver: `Share`                          sender: `open_peer`
    listens for each peer (`local_peers`)      the address names host and socket
    sends regions and their files  ── SCM_RIGHTS ─> maps the files, closes them, keeps the connection
    dies, closes, fences the peer  ── EOF ───────> sees it before the next write

A mapping cannot be taken back. So a peer is fenced when all processes are dead that have come to its socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Sequence

import msgspec

from pdserve.errors import TransferError
from pdserve.memory import shared
from pdserve.transfer.transport import MemoryRegion, RegionSet
from pdserve.transfer.transports.local_peers import LocalPeers, call, host_identity, is_open

MAX_REGIONS = 128
"""Regions of one process; the kernel passes at most 253 files in one message."""
MAX_OFFER_BYTES = 1 << 16
_PREFIX = "shm"


class SharedWindow(msgspec.Struct, frozen=True):
    """A region: `[address, address + num_bytes)` in the receiver is at `offset` of a file of `file_bytes`."""

    address: int
    num_bytes: int
    offset: int
    file_bytes: int


class Offer(msgspec.Struct, frozen=True):
    """What the receiver sends, with one file for each window."""

    incarnation: str
    windows: tuple[SharedWindow, ...]


class Share:
    """The receiving end: shows regions to who connects, each peer at a socket of its own."""

    def __init__(self) -> None:
        """Raises ConfigError where the host has no identity."""
        self._host = host_identity()
        self._windows: tuple[SharedWindow, ...] = ()
        self._files: tuple[int, ...] = ()
        self._peers = LocalPeers("kv-shm", self._show)

    def address(self, peer: str | None) -> str:
        """Where `peer` alone connects; with None, anybody. Raises TransferError when there can be no such socket."""
        return f"{_PREFIX}:{self._host}:{self._peers.open(peer)}"

    def add(self, regions: Sequence[MemoryRegion]) -> None:
        """Show more regions to those who connect from now on.

        Raises:
            TransferError: a region is not in memory that can be shared; then none is added.
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
        """Show nothing more to `peer`. True when no process that mapped something lives."""
        return self._peers.fence(peer)

    def close(self) -> None:
        """Be seen as gone. Mappings that others have stay theirs."""
        self._peers.close()

    def _show(self, connection: socket.socket, name: str) -> None:
        offer = msgspec.msgpack.encode(Offer(name, self._windows))
        socket.send_fds(connection, [offer], self._files)


class MappedPeer:
    """A peer's memory as we see it. Unmapped, and the connection closed, with the last reference: no write is cut.

    `given_up` is set when nobody wants it any more; writers look at it between two copies.
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
        """For each of `regions`: what to add to the peer's address to get ours."""
        self._keep = keep
        self._connection = connection
        weakref.finalize(self, os.close, connection).atexit = False

    @property
    def is_alive(self) -> bool:
        """False once the peer's process has ended, or has fenced us. A stopped one is alive."""
        return is_open(self._connection)


def open_peer(address: str) -> MappedPeer:
    """Map the memory of the process behind `address`.

    Raises:
        TransferError: the address is malformed or of another host, nobody answers, or what answers is no `Share` of
            our user.
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
