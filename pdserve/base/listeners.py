"""Filters at the listening TCP sockets of this process, in Linux's socket layer. Used for ports that a library opens.

    close_port(1234)                       drops all new connections
    allow_sources(inodes, ["10.0.0.2"])    drops new connections from all other addresses; replaces the former filter

A library may listen at one port number on several local addresses, with a socket for each. So sockets are told apart by
their inodes.

The kernel runs the filter on each packet that reaches the listening socket, on the last one of a handshake as well, and
on each packet of the connections that it accepted since. Connections from before have no filter or the former one:
`drop_connections` ends them. The library notices nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import select
import socket
import stat
import struct
from collections.abc import Collection, Iterable, Iterator

from pdserve.base.hosts import IPAddress, own_addresses, parse_address

log = logging.getLogger(__name__)

_SO_ATTACH_FILTER = 26
"""With `getsockopt` the same number reads the filter."""
_NETWORK_HEADER = (1 << 32) - 0x100000
"""`SKF_NET_OFF`: loads at this offset and above read the IP header."""
_IPV4_SOURCE, _IPV6_SOURCE = 12, 8
"""Offsets of the source address in the IP header."""
_LOAD_BYTE, _LOAD_WORD, _LOAD_KEPT, _KEEP = 0x30, 0x20, 0x60, 0x02
_SHIFT_RIGHT, _IF_EQUAL, _JUMP, _RETURN = 0x74, 0x15, 0x05, 0x06
_PASS, _DROP = (1 << 32) - 1, 0
"""Bytes of the packet that the filter keeps."""
MAX_PENDING = 4096
"""Most connections that `close_pending` closes, as many as Linux lets wait by default."""
ACCEPT_S = 0.001
"""How long an accept of a blocking socket waits for a connection that the library has taken first."""
_TIMEVAL = struct.Struct("ll")
"""Seconds and microseconds of `SO_RCVTIMEO`."""
MAX_READS = 1024
READ_BYTES = 1 << 16
_Address = tuple[IPAddress | None, int]
"""Host and port of an end of a connection."""
Instruction = tuple[int, int, int, int]
"""Of classic BPF: code, instructions to skip if true, and if false, operand."""


@contextlib.contextmanager
def ports_closed_afterwards() -> Iterator[None]:
    """Close the ports that any thread of the process opened in the `with` block.

    If the kernel refuses the filter, the ports stay open, and a warning is logged.
    """
    before = listening_sockets()
    yield
    allow_sources(listening_sockets().keys() - before.keys(), ())


def close_port(port: int) -> None:
    """Close a TCP port of this process; no effect without such a listener. Logs a warning if the kernel refuses."""
    allow_sources([inode for inode, number in listening_sockets().items() if number == port], ())


def allow_sources(inodes: Collection[int], addresses: Iterable[str] | None) -> None:
    """Accept new connections at these listening TCP sockets only from these IP addresses; None: from all.

    Inodes without a listener are ignored. Logs a warning for each socket where the kernel refuses the filter.
    """
    sources = None if addresses is None else tuple(addresses)
    for _, inode, listener in tcp_sockets(listening=True):
        if inode in inodes:
            attach_filter(listener, sources)


def drop_connections(inodes: Collection[int]) -> None:
    """End the connections of these listening TCP sockets, those that wait to be accepted and those of this process.

    The library never gets the bytes that it had not read by then. Call it after `allow_sources`, so that no connections
    are added. Connections of this process to itself are kept, since UCX makes one. While such a connection waits to be
    accepted, no pending connection at that socket is closed.
    """
    here = {parse_address(address) for address in own_addresses()}
    ends = {(_local(one), _remote(one)) for _, _, one in tcp_sockets(listening=False)}
    made = [remote for local, remote in ends if (remote, local) not in ends]
    waiting = [remote for remote in made if remote is not None and remote[0] in here]
    at: list[tuple[int, _Address]] = []
    for _, inode, listener in tcp_sockets(listening=True):
        if inode in inodes:
            at.append((listener.family, _local(listener)))
            if not any(_is_at(remote, _local(listener)) for remote in waiting):
                close_pending(listener)
    for _, _, connection in tcp_sockets(listening=False):
        local = _local(connection)
        is_accepted = any(family == connection.family and _is_at(local, accepting) for family, accepting in at)
        if is_accepted and (_remote(connection), local) not in ends:
            _end(connection)


def close_pending(listener: socket.socket) -> None:
    """Close the connections that wait to be accepted. Waits for at most `ACCEPT_S`.

    `listener` has no timeout of its own. The library shares its flags and may set them at any time, so O_NONBLOCK stays
    as it is: an accept of the library would wait forever if its socket were made blocking again behind its back. A
    blocking socket has the receive timeout `ACCEPT_S` meanwhile.
    """
    pending = select.poll()
    pending.register(listener, select.POLLIN)
    if not pending.poll(0):
        return
    before = listener.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.size)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(0, int(ACCEPT_S * 1e6)))
    try:
        for _ in range(MAX_PENDING):
            listener.accept()[0].close()
    except BlockingIOError:
        pass
    except OSError as error:
        log.warning("port %d keeps connections from before the filter: %s", listener.getsockname()[1], error)
    finally:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, before)


def listening_sockets() -> dict[int, int]:
    """Return the ports at which this process listens over TCP, by the inodes of the listening sockets."""
    return {inode: int(listener.getsockname()[1]) for _, inode, listener in tcp_sockets(listening=True)}


def attach_filter(listener: socket.socket, addresses: Iterable[str] | None) -> None:
    """Accept new connections at `listener` only from these IP addresses; None: from all.

    Logs a warning if the kernel refuses.
    """
    passes_all: list[Instruction] = [(_RETURN, 0, 0, _PASS)]
    program = passes_all if addresses is None else filter_program(addresses)
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    memory = ctypes.create_string_buffer(packed, len(packed))
    option = struct.pack("HP", len(program), ctypes.addressof(memory))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
    except OSError as error:
        state = "keeps its former filter" if _has_filter(listener) else "stays open"
        log.warning("port %d %s: the kernel refuses the filter: %s", listener.getsockname()[1], state, error)


def _has_filter(listener: socket.socket) -> bool:
    """Whether a filter is attached. With length 0 the kernel returns its length only."""
    length = ctypes.c_uint32(0)
    failed = ctypes.CDLL(None).getsockopt(
        listener.fileno(), socket.SOL_SOCKET, _SO_ATTACH_FILTER, None, ctypes.byref(length)
    )
    return not failed and length.value > 0


def filter_program(addresses: Iterable[str]) -> list[Instruction]:
    """Return the filter that passes only packets from these IP addresses.

    Text that is no IP address is ignored. An IPv4-mapped IPv6 address is the IPv4 address, as it is in the packets.
    """
    parsed = (parse_address(address) for address in addresses)
    wanted = sorted({address.packed for address in parsed if address is not None})
    ipv4: list[Instruction] = [(_LOAD_WORD, 0, 0, _NETWORK_HEADER + _IPV4_SOURCE)]
    ipv6: list[Instruction] = []
    for number in range(4):
        ipv6 += [(_LOAD_WORD, 0, 0, _NETWORK_HEADER + _IPV6_SOURCE + 4 * number), (_KEEP, 0, 0, number)]
    for address in wanted:
        words = struct.unpack(f"!{len(address) // 4}I", address)
        if len(words) == 1:
            ipv4 += [(_IF_EQUAL, 0, 1, words[0]), (_RETURN, 0, 0, _PASS)]
            continue
        for number, word in enumerate(words):  # a word that differs skips the rest of this address
            ipv6 += [(_LOAD_KEPT, 0, 0, number), (_IF_EQUAL, 0, 2 * (len(words) - number) - 1, word)]
        ipv6.append((_RETURN, 0, 0, _PASS))
    drop: Instruction = (_RETURN, 0, 0, _DROP)
    if not wanted:
        return [drop]
    return [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_IF_EQUAL, 3, 0, 4),
        (_IF_EQUAL, 1, 0, 6),
        drop,
        (_JUMP, 0, 0, len(ipv4) + 1),
        *ipv4,
        drop,
        *ipv6,
        drop,
    ]


def tcp_sockets(*, listening: bool) -> Iterator[tuple[int, int, socket.socket]]:
    """Yield descriptor, inode and a duplicate of this process's TCP sockets: those that listen, or all others.

    The duplicate is closed after use. Of several descriptors of a socket one is yielded.

    Raises:
        OSError: the process has no free descriptor.
    """
    seen: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError as error:
            if error.errno == errno.EBADF:  # closed meanwhile
                continue
            raise
        status = os.fstat(copy)  # of the duplicate: another file may have the number by now
        if not stat.S_ISSOCK(status.st_mode) or status.st_ino in seen:
            os.close(copy)
            continue
        try:
            duplicate = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        seen.add(status.st_ino)
        with duplicate:
            is_tcp = duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM
            if is_tcp and bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) == listening:
                yield int(name), status.st_ino, duplicate


def _local(of: socket.socket) -> _Address:
    host, port = of.getsockname()[:2]
    return parse_address(host), int(port)


def _remote(of: socket.socket) -> _Address | None:
    """Return the address of the other end; None where it is not connected."""
    try:
        host, port = of.getpeername()[:2]
    except OSError:
        return None
    return parse_address(host), int(port)


def _is_at(local: _Address, listener: _Address) -> bool:
    """Whether a listener with the address `listener` accepts connections to `local`."""
    (host, port), (address, listener_port) = local, listener
    if port != listener_port or host is None or address is None:
        return False
    return address == host or (address.is_unspecified and (address.version == 6 or host.version == 4))


def _end(connection: socket.socket) -> None:
    """Shut a connection down in both directions, and discard the bytes that wait to be read."""
    with contextlib.suppress(OSError):  # the other end has reset it
        connection.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):  # nothing waits
        for _ in range(MAX_READS):
            if not connection.recv(READ_BYTES, socket.MSG_DONTWAIT):
                break
