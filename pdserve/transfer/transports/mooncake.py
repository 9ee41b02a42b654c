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

import contextlib
import gc
import importlib
import logging
import os
import queue
import socket
import struct
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from pdserve.base.hosts import LOOPBACK
from pdserve.base.listeners import attach_filter, close_pending, tcp_sockets
from pdserve.config.transfer_engines import MOONCAKE_HELP
from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.transport import Copy, MemoryRegion, TransportFacts, TransportOptions
from pdserve.transfer.transports.host_info import choose_protocol, warn_unused_traffic_class
from pdserve.transfer.transports.link import Link, LinkedPeers, RegionSet
from pdserve.transfer.transports.receiving import UNREACHABLE_HINT, EnginePorts, Listeners, ReceivingEngines

MAX_OUTSTANDING = 1024
TCP_ENGINES = 2
"""Sending engines for each peer: one engine copies in one thread."""
BATCH_ENTRIES = 512
POLL_S = 0.0003
SLOWEST_BYTES_PER_S = 10e6
PROGRESS_TIMEOUT_S = 5
RDMA_DRAIN_TIMEOUT_S = 30.0
FORCE_TCP = "MC_FORCE_TCP"
"""The engine uses TCP if this variable is set, whatever protocol it is given."""
TCP_TIMEOUTS = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")


def set_environment(protocol: str, ib_traffic_class: int | None = None) -> int:
    """Set the engine's environment variables that the user left unset, and that of the traffic class if one is given.
    Must run before the engine is imported.

    The engine reads some of them at import and the TCP timeouts each time it arms a timer.

    Returns:
        The longer TCP timeout in force, in seconds, after which the engine drops a stalled entry.
    """
    os.environ.setdefault("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535")
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", str(PROGRESS_TIMEOUT_S))
    os.environ.setdefault("MC_TCP_STATUS_TIMEOUT_SEC", os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"])
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", "30")
    os.environ.setdefault("MC_LOG_LEVEL", "INFO" if log.isEnabledFor(logging.DEBUG) else "ERROR")
    if protocol == "tcp":
        os.environ.setdefault(FORCE_TCP, "1")
    if ib_traffic_class is not None:
        warn_unused_traffic_class(protocol)
        os.environ["MC_IB_TC"] = str(ib_traffic_class)
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
    def open(cls, host: str, options: TransportOptions) -> MooncakeTransport:
        """Start the engine.

        Raises:
            ConfigError: the library is missing, the engine does not start, or the protocol is not possible here.
        """
        asked = options.mooncake_protocol
        protocol = choose_protocol(options.ib_device, asked=asked)
        if protocol == "rdma" and FORCE_TCP in os.environ:
            if asked == "rdma":
                message = f"--mooncake-protocol is rdma, but {FORCE_TCP} is set; unset one of them"
                raise ConfigError(message, field="mooncake_protocol")
            protocol = "tcp"
        try:
            timeout_s = set_environment(protocol, options.ib_traffic_class)
            return cls(host, protocol, options.ib_device or "", timeout_s)
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


log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 3.0
BRIEF_TIMEVAL = struct.pack("@ll", 0, 1000)
"""One millisecond as a `struct timeval`."""
MAX_STARTS = 16
PORT_TAKEN = "Address already in use"


def new_native() -> Any:
    """Make a native engine. Raises ConfigError when the library is missing."""
    try:
        return importlib.import_module("mooncake.engine").TransferEngine()
    except ImportError as error:
        raise ConfigError(
            f"transfer backend mooncake cannot be loaded ({error}); install it: {MOONCAKE_HELP}",
            field="disaggregation_transfer_backend",
        ) from error


def start_native(host: str, protocol: str, ib_device: str, new_native: Callable[[], Any] = new_native) -> Any:
    """Return a native engine that listens.

    The engine picks free ports and binds them later, so another process may take them first; then it is started again.

    Raises:
        ConfigError: the engine does not start on this host.
        TransferError: its ports were taken each time, or it fails in another way.
    """
    for _ in range(MAX_STARTS):
        native = new_native()
        try:
            code = int(native.initialize(host, "P2PHANDSHAKE", protocol, ib_device))
        except RuntimeError as error:
            if PORT_TAKEN not in str(error):
                raise TransferError(f"mooncake does not start: {error}", code="engine_failed") from error
            text = str(error)  # a kept log record must not keep the traceback, which refers to the engine
            log.info("mooncake is started once more: %s", text)
            continue
        if code != 0:
            raise ConfigError(f"mooncake does not start on host {host!r} with {protocol}: code {code}", field="host")
        return native
    raise TransferError(f"mooncake does not start: its ports were taken {MAX_STARTS} times", code="engine_failed")


class MooncakeEngine:
    """One native TransferEngine, made by `new_native`. Calls are thread-safe and release the GIL."""

    def __init__(self, host: str, protocol: str, ib_device: str, new_native: Callable[[], Any] = new_native) -> None:
        self._native = start_native(host, protocol, ib_device, new_native)
        self._port = int(self._native.get_rpc_port())
        self._lock = threading.Lock()
        self._num_probes = 0
        self.session = f"{host}:{self._port}"
        self.address = f"{self.session}/{uuid.uuid4().hex[:16]}"
        """`host:port/incarnation`: a session may be reused, an address is not."""

    def register(self, region: MemoryRegion) -> None:
        """Register one region. Raises TransferError with the engine's code."""
        if (code := int(self._native.register_memory(region.address, region.num_bytes))) != 0:
            raise TransferError(f"mooncake refuses {region}: code {code}", code="bad_region", retryable=False)

    def reach(self, session: str) -> None:
        """Probe a peer, and fetch the addresses of its regions and its data port.

        A stopped peer would block both calls for a minute each, so they run in a thread that is abandoned on timeout.
        The thread holds the engine; an engine that is destroyed meanwhile ends with the last such thread.

        Raises:
            TransferError: no peer answers within `PROBE_TIMEOUT_S`; nothing was written.
        """
        answers: queue.Queue[int] = queue.Queue()

        def ask(native: Any) -> None:
            try:
                code = int(native.send_probe(session))
                answers.put(code if code != 0 or open_session(native, session) else -1)
            finally:
                with self._lock:
                    self._num_probes -= 1
                    given_up = self._native is None and self._num_probes == 0
                if given_up:
                    speed_up_shutdown(self._port)

        with self._lock:  # no local variable for the engine: a traceback would keep it alive
            self._num_probes += 1
            thread = threading.Thread(target=ask, args=(self._native,), name="mooncake-probe", daemon=True)
        thread.start()
        try:
            code = answers.get(timeout=PROBE_TIMEOUT_S)
        except queue.Empty:
            message = f"the transfer engine at {session} does not answer. {UNREACHABLE_HINT}"
            raise TransferError(message, code="peer_unreachable") from None
        if code != 0:
            message = f"no transfer engine at {session}: code {code}. {UNREACHABLE_HINT}"
            raise TransferError(message, code="peer_unreachable")

    def submit_batch(self, session: str, copies: Sequence[Copy]) -> int:
        """Start a batch; 0 when the engine refuses. Each batch must go through `finish_batch` once."""
        sources = [copy.source for copy in copies]
        destinations = [copy.destination for copy in copies]
        lengths = [copy.num_bytes for copy in copies]
        return int(self._native.batch_transfer_async_write(session, sources, destinations, lengths))

    def finish_batch(self, batch: int) -> int:
        """Wait for a batch, spinning. Returns 0 when all arrived, -1 when one failed (the rest may be under way)."""
        return int(self._native.get_batch_transfer_status([batch]))

    def submit_one(self, session: str, copy: Copy) -> int:
        """Start one copy; 0 when the engine refuses."""
        return int(self._native.transfer_submit_write(session, copy.source, copy.destination, copy.num_bytes))

    def check(self, submission: int) -> int:
        """Return 0 for under way, 1 for arrived, negative for failed. Any result but 0 releases the submission."""
        return int(self._native.transfer_check_status(submission))

    def destroy(self) -> None:
        """Close all connections and end all threads: no byte moves after this. Takes some milliseconds."""
        with self._lock:
            native, self._native = self._native, None
            ends = native is not None and self._num_probes == 0
        if ends:
            speed_up_shutdown(self._port)


class MooncakeReceiver(MooncakeEngine):
    """An engine that never calls a peer, so that no probe thread can keep it alive."""

    def destroy(self) -> None:
        """See `MooncakeEngine`. Asserts that the engine is gone, since a fence depends on it."""
        alive = None if self._native is None else weakref.ref(self._native)
        super().destroy()
        if alive is not None and alive() is not None:
            gc.collect()  # for example an exception's traceback
            assert alive() is None, "a reference to the destroyed engine is left"


def open_session(native: Any, session: str) -> bool:
    """Make an engine fetch the addresses of a peer's regions and its data port; False when the peer does not answer.

    An empty batch does that and releases the GIL. The call that requests an address keeps the GIL: with a peer that was
    stopped between two answers, it would block all threads of this process for a minute.
    """
    batch = int(native.batch_transfer_async_write(session, [], [], []))
    return batch != 0 and int(native.get_batch_transfer_status([batch])) == 0


def speed_up_shutdown(port: int) -> None:
    """Make the engine that answers on `port` end in milliseconds. Call it right before its last reference is dropped.

    The destructor joins the engine's accept thread and holds the GIL meanwhile. That thread accepts a connection, reads
    from it with a timeout of 5 s per read, and only then checks whether to stop. A silent connection would block all
    threads of this process. This function replaces the listening socket by one with a timeout of 1 ms, and wakes the
    thread with one connection, which a filter at the port must let through. It also shuts down the connections that the
    thread reads from. If a step fails, the destructor waits as before.
    """
    with contextlib.suppress(OSError):
        for descriptor, _, listener in tcp_sockets(listening=True):
            if listener.getsockname()[1] != port:
                continue
            with socket.create_server((LOOPBACK[0], 0)) as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, BRIEF_TIMEVAL)
                os.dup2(other.fileno(), descriptor, inheritable=False)
                close_pending(listener)
                attach_filter(listener, LOOPBACK)
                loopback = LOOPBACK[listener.family == socket.AF_INET6]
                socket.create_connection((loopback, port), timeout=PROBE_TIMEOUT_S).close()
    with contextlib.suppress(OSError):
        for _, _, connection in tcp_sockets(listening=False):
            with contextlib.suppress(OSError):
                if connection.getsockname()[1] == port:
                    connection.shutdown(socket.SHUT_RDWR)
