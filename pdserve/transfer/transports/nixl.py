"""NIXL over UCX: RDMA where there is a NIC, else TCP, and direct access to process memory within a host.

The design follows from these measurements of the engine:

- A write to a stopped peer never ends, and neither releasing it nor removing the peer ends it: when the peer runs
  again, source bytes of that later time still land. Destroying the agent ends it, in some tenths of a second. So each
  peer has its own sending agents, and a failed write destroys them before it raises.
- An agent destroys itself when its last reference is dropped; handles hold one. `Agent.destroy` asserts it.
- Neither deregistering memory nor removing the peer stops incoming bytes; destroying the agent does, over TCP at once.
  So each peer has its own receiving agent. Over RDMA that was not measured: see `fence_drain_timeout_s`.
- Within a host, UCX writes into the target's memory directly (`process_vm_writev`, an IPC handle of a GPU), even after
  the target's agent is destroyed. So a sender on this host identifies its process before it writes (`local_peers`), and
  is fenced when that process is dead; unless `UCX_TLS` names networks only.
- A target makes progress only in a thread; a sender makes progress when it polls. Receiving agents have the engine's
  thread, sending agents have none. By default that thread never sleeps: one core for every idle server.
- A transfer is done when the connection has been flushed behind it, which is when its bytes are in the peer's memory.
  The engine's notification tells the peer, on the same connection as the bytes.
- The call that starts a transfer to a process of the same host also makes the copy, in the caller's thread. It holds
  the agent's lock meanwhile: two threads write, each through its own agent. Where a NIC copies, they share one agent.
- UCX listens on all interfaces without authentication, and the target of a transfer may connect back to the sender. So
  all agents accept connections from the peer's addresses only; the base agent accepts none before `address`.
- Naming copies by index into lists prepared once per peer takes a fifth of the time of naming them by address.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from pdserve.base.hosts import LOOPBACK, MAX_HOST_ADDRESSES, outward_addresses, peer_addresses
from pdserve.errors import TransferError
from pdserve.transfer.transport import Copy, MemoryRegion, TransportFacts, TransportOptions
from pdserve.transfer.transports.host_info import (
    choose_protocol,
    decode_card,
    encode_card,
    not_an_address,
    wanted_nics,
    warn_unused_traffic_class,
)
from pdserve.transfer.transports.link import Link, LinkedPeers, RegionSet
from pdserve.transfer.transports.local_peers import LocalPeers, call, host_identity, is_open
from pdserve.transfer.transports.nixl_blocks import Ranges, SpansByKind, split_by_kind
from pdserve.transfer.transports.nixl_engine import (
    KindOfMemory,
    NixlReceiver,
    Sender,
    kind_of,
    load_native,
    spans_by_kind,
)
from pdserve.transfer.transports.receiving import UNREACHABLE_HINT, EnginePorts, ReceivingEngines

BATCH_COPIES = 4096
STALL_S = 15.0
"""Seconds after which an unfinished batch is given up, plus time for its length."""
SLOWEST_BYTES_PER_S = 10e6
PROBE_TIMEOUT_S = 3.0
TCP_DRAIN_TIMEOUT_S = 11.0
RDMA_DRAIN_TIMEOUT_S = 30.0
SYN_RETRIES = 2
"""UCX blocks while it connects to a host that does not answer: for 7 s with this value, 135 s with the kernel's."""
PREFIX = "nixl:"
GREETING = b"nixl"
NETWORKS = frozenset(("tcp", "self", "ib", "rc", "ud", "dc"))
"""Prefixes of `UCX_TLS` values with which bytes go through the target's agent or its NIC."""


class NixlRegion(msgspec.Struct, frozen=True, array_like=True):
    """A registered region in an address."""

    address: int
    num_bytes: int
    kind: str
    device: int


class NixlEndpointInfo(msgspec.Struct, frozen=True):
    """Content of an address: the engine's metadata, which identify one incarnation of an agent, and the registered
    regions.

    The first region is for probes; its content has no meaning.
    """

    metadata: bytes
    regions: tuple[NixlRegion, ...]
    host: str = ""
    local_socket: str = ""
    """Name of the socket at which a sender on `host` identifies itself before it writes; empty: not required."""
    host_addresses: tuple[str, ...] = ()
    """Addresses of the host, from which the agent may connect back to a sender."""


def encode_address(card: NixlEndpointInfo) -> str:
    """Encode the address content as text."""
    return encode_card(PREFIX, card)


def decode_address(address: str) -> NixlEndpointInfo:
    """Decode an address. Raises TransferError (settled, not retryable) when it is malformed."""
    card = decode_card(PREFIX, address, NixlEndpointInfo)
    if not card.metadata or not card.regions:
        raise not_an_address(PREFIX, address)
    return card


def set_environment(ib_device: str | None, ib_traffic_class: int | None = None) -> None:
    """Set the engine's environment variables that the user left unset, and that of the traffic class if one is given.
    Must run before the engine is imported.
    """
    os.environ.setdefault("UCX_TCP_SYN_CNT", str(SYN_RETRIES))
    if nics := wanted_nics(ib_device):
        os.environ.setdefault("UCX_NET_DEVICES", ",".join(f"{nic}:1" for nic in nics))
    if ib_traffic_class is not None:
        os.environ["UCX_IB_TRAFFIC_CLASS"] = str(ib_traffic_class)


def reaches_memory(ucx_tls: str) -> bool:
    """Return whether UCX may write into other processes' memory directly with this `UCX_TLS` value; empty: unset."""
    return not ucx_tls or any(name.partition("_")[0] not in NETWORKS for name in ucx_tls.split(","))


def introduce(card: NixlEndpointInfo) -> socket.socket | None:
    """Identify this process to a peer on this host that requires it. The connection stays open while we may write.

    Returns None where the peer does not require it.

    Raises:
        TransferError: the peer does not answer at the socket.
    """
    if not card.local_socket or card.host != host_identity():
        return None
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(call(card.local_socket, card.local_socket))
        try:
            heard = connection.recv(len(GREETING))
        except OSError:
            heard = b""
        if heard != GREETING:
            raise TransferError("the peer on this host accepts no senders", code="peer_unreachable")
        stack.pop_all()
    return connection


def _greet(connection: socket.socket, name: str) -> None:
    connection.send(GREETING)


@dataclasses.dataclass(eq=False)
class NixlPeer:
    """A connected peer. `there` are its regions by kind of memory; for `introduction` see `introduce`."""

    card: NixlEndpointInfo
    there: SpansByKind
    introduction: socket.socket | None = None

    def introduce(self) -> None:
        """Identify this process to the peer with `introduce`, once."""
        if self.introduction is None:
            self.introduction = introduce(self.card)

    @property
    def has_shut_us_out(self) -> bool:
        """True where the peer is on this host, and has ended or fenced this process."""
        return self.introduction is not None and not is_open(self.introduction.fileno())

    def close(self) -> None:
        """Close the connection to the peer's socket."""
        if self.introduction is not None:
            self.introduction.close()


class NixlTransport:
    """Writes through NIXL. For threads see `Transport`."""

    name = "nixl"

    def __init__(self, native: Any, protocol: str, host: str) -> None:
        self.facts = TransportFacts(protocol=protocol, moves_bytes=True, writers=2, notifies=True)
        self.drain_timeout_s = RDMA_DRAIN_TIMEOUT_S if protocol == "rdma" else TCP_DRAIN_TIMEOUT_S
        self.fence_drain_timeout_s = RDMA_DRAIN_TIMEOUT_S if protocol == "rdma" else 0.0
        self._native = native
        self._host = host_identity()
        self._outward_host = host
        self._ports = EnginePorts.of_tcp_engines(self.name)
        self._base, self._base_listeners = self._ports.start(lambda: NixlReceiver(native))
        self._notes: deque[bytes] = deque()
        """Notes taken from receiving agents, in particular from agents that were about to be destroyed."""
        self._trouble: str | None = None
        """Why an agent's notes cannot be read, as text: the exception would keep a reference to the agent. None:
        readable.
        """
        self._receivers = ReceivingEngines(self._ports, lambda: NixlReceiver(native), self._prepare, self._take_notes)
        self._local_peers: LocalPeers | None = None
        if reaches_memory(os.environ.get("UCX_TLS", "")):
            self._local_peers = LocalPeers("kv-nixl", _greet)
        self._probed = np.zeros(64, dtype=np.uint8)
        self._regions = RegionSet()
        self._known: list[tuple[MemoryRegion, KindOfMemory]] = []
        self._peers: LinkedPeers[Sender, NixlPeer] = LinkedPeers(self._open_link)
        self.register([MemoryRegion(int(self._probed.ctypes.data), self._probed.size)])

    @classmethod
    def open(cls, host: str, options: TransportOptions) -> NixlTransport:
        """Start the engine. Raises ConfigError when the library is missing or the engine does not start."""
        protocol = choose_protocol(options.ib_device)
        if options.ib_traffic_class is not None:
            warn_unused_traffic_class(protocol)
        set_environment(options.ib_device, options.ib_traffic_class)
        return cls(load_native(), protocol, host)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make regions readable and writable through the engine."""
        self._regions.add(regions)
        for region in regions:
            kind = kind_of(region.address)
            self._base.agent.register(region, kind)
            self._known.append((region, kind))
        self._here = spans_by_kind(self._known)

    def address(self) -> str:
        """Return the engine's metadata and all regions, as text of some hundred characters."""
        self._ports.allow(self._base_listeners, None)
        return self._address_of(self._base, None)

    def open_receiver(self, peer: str) -> str:
        """Create a receiving agent for `peer`: one more sleeping thread; over RDMA it registers all memory again."""
        receiver = self._receivers.open(peer)
        receiver.address = receiver.address or self._address_of(receiver, peer)
        return receiver.address

    def allow_sources(self, peer: str, addresses: Sequence[str]) -> None:
        """Let the ports of the agent of `peer` accept connections from these addresses."""
        self._receivers.allow_sources(peer, addresses)

    def fence(self, peer: str) -> bool:
        """Destroy the agent of `peer`, in some milliseconds.

        False while a process of this host that connected as that peer is alive, where UCX may write directly.
        """
        are_dead = self._local_peers is None or self._local_peers.fence(peer)
        return self._receivers.fence(peer) and are_dead

    def connect(self, address: str) -> None:
        """Open a link to the peer, unless one exists."""
        card = decode_address(address)
        there = spans_by_kind(
            [(MemoryRegion(it.address, it.num_bytes), KindOfMemory(it.kind, it.device)) for it in card.regions]
        )
        self._peers.connect(address, NixlPeer(card, there))

    def disconnect(self, address: str) -> None:
        """Forget a peer. Writes under way to it fail, and over TCP are settled when they raise."""
        with contextlib.suppress(TransferError):
            peer = self._peers.get(address).about
            self._peers.disconnect(address)
            peer.close()

    def write(self, address: str, copies: Sequence[Copy]) -> None:
        """Write batches of at most `BATCH_COPIES`, one after the other.

        After a failure the next write reopens the link, at most once every `REOPEN_INTERVAL_S`.
        """
        self.write_and_notify(address, copies, b"")

    def write_and_notify(self, address: str, copies: Sequence[Copy], note: bytes) -> None:
        """Write as `write` does; the last batch carries `note`, after the other batches. An empty note is not sent."""
        peer = self._peers.get(address)
        self._regions.check_sources(copies)
        full = [copy for copy in copies if copy.num_bytes]
        if not full:
            return
        if peer.about.has_shut_us_out:
            raise TransferError("the peer on this host has ended or fenced this process", code="peer_unreachable")
        try:
            parts = split_by_kind(Ranges.of(full), self._here, peer.about.there)
        except ValueError as error:
            raise TransferError(f"{error} at the peer", code="bad_range", retryable=False) from None
        link = peer.usable_link()
        self._write_all(link, [(batch, kinds) for kinds, ranges in parts for batch in _batches(ranges)], STALL_S, note)

    def take_notifications(self) -> Sequence[bytes]:
        """See `NotifyingTransport`."""
        self._take_notes(self._base)
        self._receivers.visit(self._take_notes)
        taken: list[bytes] = []
        while self._notes:
            taken.append(self._notes.popleft())
        trouble, self._trouble = self._trouble, None
        if trouble is not None and not taken:
            raise RuntimeError(trouble)
        return taken

    def close(self) -> None:
        """Cut all links and stop receiving."""
        self._peers.close()
        if self._local_peers is not None:
            self._local_peers.close()
        self._receivers.close()
        self._base.destroy()

    def _prepare(self, receiver: NixlReceiver) -> None:
        for region, kind in self._known:
            receiver.agent.register(region, kind)

    def _take_notes(self, receiver: NixlReceiver) -> None:
        try:
            self._notes.extend(receiver.agent.take_notifications())
        except Exception as error:
            self._trouble = repr(error)

    def _address_of(self, receiver: NixlReceiver, peer: str | None) -> str:
        regions = (NixlRegion(region.address, region.num_bytes, kind.name, kind.device) for region, kind in self._known)
        local_socket = "" if self._local_peers is None else self._local_peers.open(peer)
        card = NixlEndpointInfo(
            receiver.agent.metadata(), tuple(regions), self._host, local_socket, outward_addresses(self._outward_host)
        )
        return encode_address(card)

    def _open_link(self, peer: NixlPeer) -> Link[Sender]:
        """Open a link over new agents. Raises TransferError (settled over TCP) when no peer answers."""
        peer.introduce()
        num_senders = 1 if self.facts.protocol == "rdma" else self.facts.writers
        senders: list[Sender] = []
        try:
            for _ in range(num_senders):
                senders.append(self._new_sender(peer))
        except BaseException:
            for sender in senders:
                sender.destroy()
            raise
        link = Link(senders, senders[0].peer, owned=True, num_permits=1)
        (here, kind), probe = self._known[0], peer.card.regions[0]
        one = Ranges.of([Copy(here.address, probe.address, here.num_bytes)])
        try:
            for _ in senders:  # each connects with its first write; the link alternates between them
                self._write_all(link, [(one, (kind.name, probe.kind))], PROBE_TIMEOUT_S)
        except TransferError as error:
            message = f"no agent of the peer answers: {error}. {UNREACHABLE_HINT}"
            raise TransferError(message, code=error.code, settled=error.settled) from None
        return link

    def _new_sender(self, peer: NixlPeer) -> Sender:
        """Create a sending agent, which also listens, to the peer only. Raises TransferError when no peer answers."""
        sender, opened = self._ports.start(lambda: Sender(self._native, self._known))
        same_host = LOOPBACK if peer.card.host == self._host else ()
        self._ports.allow(opened, peer_addresses([*peer.card.host_addresses[:MAX_HOST_ADDRESSES], *same_host]))
        try:
            sender.connect(peer.card.metadata, peer.there)
        except BaseException:
            sender.destroy()
            raise
        return sender

    def _write_all(
        self, link: Link[Sender], batches: Sequence[tuple[Ranges, tuple[str, str]]], stall_s: float, note: bytes = b""
    ) -> None:
        """Write all batches through one agent, so that the note follows all bytes on one connection."""
        failure, num_copies, num_bytes = None, 0, 0
        with link.borrow() as sender:
            for number, (ranges, kinds) in enumerate(batches, 1):
                num_copies, num_bytes = len(ranges.lengths), int(ranges.lengths.sum())
                deadline = time.monotonic() + stall_s + num_bytes / SLOWEST_BYTES_PER_S
                last = note if number == len(batches) else b""
                failure = sender.run(ranges, kinds, last, lambda: link.doomed, deadline)
                if failure is not None:
                    link.doom()
                    break
        if failure is not None:
            raise TransferError(
                f"write of {num_copies} copies, {num_bytes} bytes to {link.session}: {failure}",
                code="engine_failed",
                settled=link.await_cut(self.drain_timeout_s) and self.facts.protocol == "tcp",
            )


def _batches(ranges: Ranges) -> Iterator[Ranges]:
    for first in range(0, len(ranges.lengths), BATCH_COPIES):
        yield ranges.rows(slice(first, first + BATCH_COPIES))
