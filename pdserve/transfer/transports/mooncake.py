"""Mooncake's TransferEngine, over RDMA where there is a NIC and TCP elsewhere.

The design follows from these measurements of the engine:

- It does not check the protocol name and silently falls back, so `choose_protocol` looks for a NIC itself.
- More than 2,048 outstanding entries to a peer block it: every write takes permits from the link's `WritePermits`.
- It sends unregistered local ranges without an error: `RegionSet` checks them.
- A failed batch continues: entries queued for a stalled peer are retried one after the other, for minutes, and read the
  source pages at that time. Destroying the engine ends that. So over TCP each peer has its own engines, and a failed
  write destroys them before it raises: then it is settled.
- One engine copies in one thread, which limits it over TCP: each peer has two engines, each with a writing thread.
- It caches sessions, and a restarted peer may get the same session (host:port from a range of 2,000). Turning the cache
  off costs ten times the time per entry; a new engine per connection costs a millisecond and starts with no cache.
- Unregistering memory does not end a write under way to it; destroying the receiving engine does, over TCP at once. So
  each peer has its own receiving engine. Over RDMA that was not measured: see `fence_drain_timeout_s`.
- A batch call reports its end only to a spinning wait. The first and the last entry are separate submissions, which can
  be polled between sleeps: the first detects a dead or stopped peer, and the last arrives when nearly all has.

The base engine, which exists from the start, sends over RDMA, and receives from peers that use `address`.

Both ports of an engine listen on all interfaces whatever its address, and are not authenticated. So they are filtered:
a receiving engine accepts connections from its peer's addresses only. Engines that send over TCP accept none, as the
base engine before `address`. Over RDMA the base engine accepts all: a receiving engine connects back to the sender.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.transport import Copy, MemoryRegion, RegionSet, TransportFacts
from pdserve.transfer.transports.host_info import choose_protocol
from pdserve.transfer.transports.link import Link, LinkedPeers
from pdserve.transfer.transports.mooncake_engine import MooncakeEngine, MooncakeReceiver
from pdserve.transfer.transports.receiving import EnginePorts, Listeners, ReceivingEngines

MAX_OUTSTANDING = 1024
TCP_ENGINES = 2
"""Sending engines for each peer: one engine copies in one thread."""
BATCH_ENTRIES = 512
POLL_S = 0.0003
SLOWEST_BYTES_PER_S = 10e6
PROGRESS_TIMEOUT_S = 5
RDMA_DRAIN_TIMEOUT_S = 30.0
TCP_TIMEOUTS = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")


def set_environment(protocol: str) -> int:
    """Set the engine's environment variables that the user left unset. Must run before the engine is imported.

    The engine reads some of them at import and the TCP timeouts each time it arms a timer.

    Returns:
        The longer TCP timeout in force, in seconds, after which the engine drops a stalled entry.
    """
    os.environ.setdefault("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535")
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", str(PROGRESS_TIMEOUT_S))
    os.environ.setdefault("MC_TCP_STATUS_TIMEOUT_SEC", os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"])
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", "30")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    if protocol == "tcp":
        os.environ.setdefault("MC_FORCE_TCP", "1")
    try:
        return max(1, *(int(os.environ[name]) for name in TCP_TIMEOUTS))
    except ValueError:
        raise ConfigError(f"{' and '.join(TCP_TIMEOUTS)} must be whole numbers of seconds") from None


def session_of(address: str) -> str:
    """Return the engine's session in `host:port/incarnation`. Raises TransferError when the address is malformed."""
    session, slash, incarnation = address.partition("/")
    host, colon, port = session.rpartition(":")
    if not (slash and colon and host and incarnation and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise TransferError(f"not a mooncake address: {address[:100]!r}", code="bad_address", retryable=False)
    return session


class MooncakeTransport:
    """Writes through Mooncake's TransferEngine. For threads see `Transport`."""

    name = "mooncake"

    def __init__(self, host: str, protocol: str, ib_device: str, tcp_timeout_s: int) -> None:
        writers = TCP_ENGINES if protocol == "tcp" else 1
        self.facts = TransportFacts(
            protocol=protocol, moves_bytes=True, writers=writers, max_outstanding=MAX_OUTSTANDING
        )
        self.drain_timeout_s = RDMA_DRAIN_TIMEOUT_S if protocol == "rdma" else 2.0 * tcp_timeout_s + 1.0
        self._timeout_s = 3.0 * tcp_timeout_s
        self._start = (host, protocol, ib_device)
        self.fence_drain_timeout_s = RDMA_DRAIN_TIMEOUT_S if protocol == "rdma" else 0.0
        self._ports = EnginePorts.of_tcp_engines(self.name)
        self._base_listeners: Listeners = {}
        if protocol == "rdma":
            self._base = MooncakeEngine(*self._start)
        else:
            self._base, self._base_listeners = self._ports.start(lambda: MooncakeEngine(*self._start))
        self._regions = RegionSet()
        self._receivers = ReceivingEngines(self._ports, lambda: MooncakeReceiver(*self._start), self._prepare)
        self._peers: LinkedPeers[MooncakeEngine, str] = LinkedPeers(self._open_link)

    @classmethod
    def open(cls, host: str, ib_device: str | None) -> MooncakeTransport:
        """Start the engine. Raises ConfigError when the library is missing or the engine does not start."""
        protocol = choose_protocol(ib_device)
        try:
            return cls(host, protocol, ib_device or "", set_environment(protocol))
        except TransferError as error:
            raise ConfigError(str(error), field="host") from error

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make regions readable and writable through the engine."""
        self._regions.add(regions)
        for region in regions:
            self._base.register(region)

    def address(self) -> str:
        """`host:port/incarnation`."""
        self._ports.allow(self._base_listeners, None)
        return self._base.address

    def open_receiver(self, peer: str) -> str:
        """Create a receiving engine for `peer`: two ports and two threads more; over RDMA it registers all memory
        again.
        """
        return self._receivers.open(peer).address

    def allow_sources(self, peer: str, addresses: Sequence[str]) -> None:
        """Let both ports of the engine of `peer` accept connections from these addresses."""
        self._receivers.allow_sources(peer, addresses)

    def fence(self, peer: str) -> bool:
        """Destroy the engine of `peer`, in some milliseconds."""
        return self._receivers.fence(peer)

    def connect(self, address: str) -> None:
        """Open a link to the peer, unless one exists."""
        self._peers.connect(address, session_of(address))

    def disconnect(self, address: str) -> None:
        """Forget a peer. Writes under way to it fail, and over TCP are settled when they raise."""
        self._peers.disconnect(address)

    def write(self, address: str, copies: Sequence[Copy]) -> None:
        """Write batches of at most `BATCH_ENTRIES`, one after the other; several threads share the window.

        After a failure the next write reopens the link, at most once every `REOPEN_INTERVAL_S`.
        """
        peer = self._peers.get(address)
        self._regions.check_sources(copies)
        full = [copy for copy in copies if copy.num_bytes]
        if not full:
            return
        link = peer.usable_link()
        for first in range(0, len(full), BATCH_ENTRIES):
            self._write_batch(link, full[first : first + BATCH_ENTRIES])

    def close(self) -> None:
        """Cut all links and stop receiving."""
        self._peers.close()
        self._receivers.close()
        self._base.destroy()

    def _prepare(self, engine: MooncakeEngine) -> None:
        for region in self._regions.regions:
            engine.register(region)

    def _open_link(self, session: str) -> Link[MooncakeEngine]:
        """Open a link over new engines (TCP) or the shared one (RDMA). Raises TransferError when no peer answers."""
        owned = self.facts.protocol == "tcp"
        engines = [self._new_sender() for _ in range(TCP_ENGINES)] if owned else [self._base]
        try:
            for engine in engines:
                if owned:
                    self._prepare(engine)
                engine.reach(session)
        except TransferError:
            if owned:
                for engine in engines:
                    engine.destroy()
            raise
        return Link(engines, session, owned=owned, num_permits=MAX_OUTSTANDING)

    def _new_sender(self) -> MooncakeEngine:
        """Create a sending engine. It also listens, though to no address, and has all local memory registered, so it
        must not use a spent port.
        """
        return self._ports.start(lambda: MooncakeEngine(*self._start))[0]

    def _write_batch(self, link: Link[MooncakeEngine], copies: Sequence[Copy]) -> None:
        num_bytes = sum(copy.num_bytes for copy in copies)
        timeout_s = self._timeout_s + num_bytes / SLOWEST_BYTES_PER_S
        with link.borrow() as engine, link.window.hold(len(copies)):
            failure = _run_batch(engine, link, copies, timeout_s)
            if failure is not None and self.facts.protocol == "tcp":
                link.doom()
        if failure is not None:
            raise TransferError(
                f"write of {len(copies)} copies, {num_bytes} bytes to {link.session}: {failure}",
                code="engine_failed",
                settled=link.await_cut(self.drain_timeout_s),
            )


def _run_batch(
    engine: MooncakeEngine, link: Link[MooncakeEngine], copies: Sequence[Copy], timeout_s: float
) -> str | None:
    """Write one batch and sleep until it ends. Returns None when all has landed, else the failure."""
    if link.doomed:
        return "another write on the link failed"
    deadline = time.monotonic() + timeout_s
    head = engine.submit_one(link.session, copies[0])
    batch = engine.submit_batch(link.session, copies[1:-1]) if len(copies) > 2 else None
    tail = engine.submit_one(link.session, copies[-1]) if len(copies) > 1 else head
    if not (head and tail) or batch == 0:
        return "the engine takes no more"
    failure = _await_one(engine, link, head, deadline)
    if failure is None and tail != head:
        failure = _await_one(engine, link, tail, deadline)
    if failure is None and batch is not None and engine.finish_batch(batch) != 0:
        return "the engine reports a failed batch"
    return failure


def _await_one(engine: MooncakeEngine, link: Link[MooncakeEngine], submission: int, deadline: float) -> str | None:
    while (status := engine.check(submission)) == 0:
        if link.doomed:
            return "another write on the link failed"
        if time.monotonic() > deadline:
            return "no end within the time limit"
        time.sleep(POLL_S)
    return None if status == 1 else f"the engine reports status {status}"
