"""How the memory of one process comes to be mapped in another of the same host. Used by `shm` only.

    receiver: `Share`                                   sender: `open_peer`
    listens at an abstract unix socket                  the address names host, socket and incarnation
    who connects must be of our user    <── connect ──  who listens must be of our user
    sends regions and their files       ── SCM_RIGHTS ─> maps the files, closes them, keeps the connection
    dies, or closes                     ── EOF ───────> sees it before the next write

An abstract socket leaves nothing behind when its process is killed. It belongs to a network namespace: a process in
another one is not reached, and that is said as for another host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import socket
import struct
import threading
import uuid
import weakref
from collections.abc import Sequence

import msgspec

from pdserve.errors import ConfigError, TransferError
from pdserve.memory import shared
from pdserve.transfer.transport import MemoryRegion, RegionSet

log = logging.getLogger(__name__)

BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
CONNECT_TIMEOUT_S = 3.0
MAX_REGIONS = 128
"""Regions of one process; the kernel passes at most 253 files in one message."""
MAX_OFFER_BYTES = 1 << 16
_PREFIX = "shm"
_CREDENTIALS = struct.Struct("3i")


class Window(msgspec.Struct, frozen=True):
    """A region: `[address, address + num_bytes)` in the receiver is at `offset` of a file of `file_bytes`."""

    address: int
    num_bytes: int
    offset: int
    file_bytes: int


class Offer(msgspec.Struct, frozen=True):
    """What the receiver sends, with one file for each window."""

    incarnation: str
    windows: tuple[Window, ...]


def host_identity() -> str:
    """The same in all processes of one running kernel. Raises ConfigError where there is none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"transfer backend shm needs {BOOT_ID} ({error}); use mooncake", field="disaggregation_transfer_backend"
        ) from error


class Share:
    """The receiving end: shows regions to whoever of our user connects. A thread of its own, until `close`."""

    def __init__(self) -> None:
        self._incarnation = uuid.uuid4().hex
        self.address = f"{_PREFIX}:{host_identity()}:{self._incarnation}"
        self._windows: tuple[Window, ...] = ()
        self._files: tuple[int, ...] = ()
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(_socket_name(self._incarnation))
        self._listener.listen(128)
        self._thread = threading.Thread(target=self._serve, name="kv-shm", daemon=True)
        self._thread.start()

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
            windows.append(Window(region.address, region.num_bytes, offset, segment.num_bytes))
            files.append(segment.descriptor)
        if len(windows) > MAX_REGIONS:
            raise TransferError(f"cannot register more than {MAX_REGIONS} regions", code="bad_region", retryable=False)
        self._windows, self._files = tuple(windows), tuple(files)

    def close(self) -> None:
        """Be seen as gone. Mappings that others have stay theirs."""
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._thread.join()
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._forget_gone()
            try:
                self._show(connection)
            except OSError as error:
                log.warning("a process could not be shown our memory: %s", error)
                connection.close()

    def _show(self, connection: socket.socket) -> None:
        if _user_of(connection) != os.geteuid():
            raise PermissionError(f"it is of user {_user_of(connection)}, we are of {os.geteuid()}")
        connection.setblocking(False)
        offer = msgspec.msgpack.encode(Offer(self._incarnation, self._windows))
        socket.send_fds(connection, [offer], self._files)
        self._connections.append(connection)

    def _forget_gone(self) -> None:
        gone = [connection for connection in self._connections if not _is_open(connection.fileno())]
        for connection in gone:
            self._connections.remove(connection)
            connection.close()


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
        """False once the peer's process has ended. A stopped one is alive."""
        return _is_open(self._connection)


def open_peer(address: str) -> MappedPeer:
    """Map the memory of the process behind `address`.

    Raises:
        TransferError: the address is malformed or of another host, nobody answers, or what answers is no `Share` of
            our user.
    """
    incarnation = _incarnation_of(address)
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            connection.connect(_socket_name(incarnation))
            if _user_of(connection) != os.geteuid():
                raise TransferError(f"{address} is of user {_user_of(connection)}", code="bad_peer", retryable=False)
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


def _socket_name(incarnation: str) -> str:
    return f"\0pdserve-shm-{incarnation}"


def _user_of(connection: socket.socket) -> int:
    """The user id of the process at the other end, as the kernel says."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def _is_open(connection: int) -> bool:
    """False once the other end is closed, or has said what it had no reason to say. `connection` does not block."""
    try:
        os.read(connection, 1)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
