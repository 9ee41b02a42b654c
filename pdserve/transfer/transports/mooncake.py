"""The real engine: Mooncake's TransferEngine, over RDMA where there is a NIC and TCP elsewhere.

What was measured of the engine shapes this file:

- It does not check the protocol name and silently falls back, so `choose_protocol` looks for a NIC itself.
- More than 2,048 outstanding entries to a peer wedge it: every write takes permits from that peer's `Window`.
- A failed write may still send bytes: every failure of the engine is unsettled, for `settle_s` seconds.
- It sends unregistered local ranges without a word: `RegionSet` checks them.
- It caches what it knows of a session, and a restarted peer may get the same session (host:port from a range of 2,000).
  Turning the cache off costs ten times the time per entry, so addresses carry an incarnation, and a session that comes
  back under another incarnation gets a new *sender* engine (`EngineSet`); so does a healthy peer that cannot be written to.
- A batch call reports its end only to a spinning wait. The last entry goes as its own submission, which can be polled
  asleep; when it is there, so is nearly all of the batch.

Both of the engine's ports listen on all interfaces whatever address it is given, and are not authenticated.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
import time
import uuid
from collections.abc import Iterator, Sequence

from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.transport import Copy, MemoryRegion, RegionSet, TransportFacts
from pdserve.transfer.transports.mooncake_engine import Engine, EngineSet

MAX_OUTSTANDING = 1024
BATCH_ENTRIES = 512
POLL_S = 0.0003
SLOWEST_BYTES_PER_S = 10e6
FAILURES_BEFORE_REBUILD = 3
PROGRESS_TIMEOUT_S = 5
INFINIBAND = pathlib.Path("/sys/class/infiniband")


def choose_protocol(ib_device: str | None, infiniband: pathlib.Path = INFINIBAND) -> str:
    """`rdma` where a NIC exists, else `tcp`. Raises ConfigError when a NIC is named that does not exist."""
    nics = sorted(entry.name for entry in infiniband.iterdir()) if infiniband.is_dir() else []
    wanted = [name.strip() for name in (ib_device or "").split(",") if name.strip()]
    for name in wanted:
        if name not in nics:
            raise ConfigError(
                f"there is no RDMA device {name!r} here; there is {', '.join(nics) or 'none'}",
                field="disaggregation_ib_device",
            )
    return "rdma" if nics else "tcp"


def set_environment(protocol: str) -> int:
    """Set the engine's variables that the user left open. Must run before the engine is imported.

    Returns:
        The progress timeout in force, in seconds: how long a stalled write is kept up.
    """
    os.environ.setdefault("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535")
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", str(PROGRESS_TIMEOUT_S))
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", "30")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    if protocol == "tcp":
        os.environ.setdefault("MC_FORCE_TCP", "1")
    try:
        return max(1, int(os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"]))
    except ValueError:
        raise ConfigError("MC_TCP_PROGRESS_TIMEOUT_SEC must be a whole number of seconds") from None


class Window:
    """Permits for entries under way to one peer. Thread-safe."""

    def __init__(self, num_permits: int) -> None:
        self._free = num_permits
        self._returned = threading.Condition()

    @contextlib.contextmanager
    def hold(self, num_entries: int, timeout_s: float) -> Iterator[None]:
        """Hold `num_entries` permits; TransferError (settled) when they do not come free in time."""
        with self._returned:
            if not self._returned.wait_for(lambda: self._free >= num_entries, timeout_s):
                raise TransferError(f"no room for {num_entries} copies within {timeout_s:.0f} s", code="peer_stalled")
            self._free -= num_entries
        try:
            yield
        finally:
            with self._returned:
                self._free += num_entries
                self._returned.notify_all()


class Peer:
    """What we know of one peer. `failures` counts engine failures in a row; guarded by the transport's lock."""

    def __init__(self, session: str) -> None:
        self.session = session
        self.window = Window(MAX_OUTSTANDING)
        self.failures = 0


def split_address(address: str) -> tuple[str, str]:
    """`host:port/incarnation` to (session, incarnation). Raises TransferError when it is something else."""
    session, slash, incarnation = address.partition("/")
    host, colon, port = session.rpartition(":")
    if not (slash and colon and host and incarnation and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise TransferError(f"not a mooncake address: {address[:100]!r}", code="bad_address", retryable=False)
    return session, incarnation


class MooncakeTransport:
    """Writes through Mooncake's TransferEngine. See `Transport` for who calls what from where."""

    name = "mooncake"

    def __init__(self, engines: EngineSet, protocol: str, progress_timeout_s: int) -> None:
        self.facts = TransportFacts(protocol=protocol, moves_bytes=True, max_outstanding=MAX_OUTSTANDING)
        self.settle_s = 2.0 * progress_timeout_s
        self._timeout_s = 3.0 * progress_timeout_s
        self._engines = engines
        self._incarnation = uuid.uuid4().hex[:16]
        self._regions = RegionSet()
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}
        self._seen: dict[str, str] = {}

    @classmethod
    def open(cls, host: str, ib_device: str | None) -> MooncakeTransport:
        """Start the engine. Raises ConfigError when the library is missing or does not start."""
        protocol = choose_protocol(ib_device)
        progress_timeout_s = set_environment(protocol)
        return cls(EngineSet(host, protocol, ib_device or ""), protocol, progress_timeout_s)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make regions readable and writable through the engine."""
        self._regions.add(regions)
        self._engines.register(regions)

    def address(self) -> str:
        """`host:port/incarnation`."""
        return f"{self._engines.session}/{self._incarnation}"

    def connect(self, address: str) -> None:
        """Probe the peer, and renew the sender engine when its session belonged to somebody else before."""
        session, incarnation = split_address(address)
        if self._engines.sender.probe(session) != 0:
            raise TransferError(f"no transfer engine answers at {session}", code="peer_unreachable")
        with self._lock:
            reborn = self._seen.get(session, incarnation) != incarnation
            self._seen[session] = incarnation
            self._peers.setdefault(address, Peer(session))
        if reborn:
            self._engines.renew(f"{session} belongs to another process now")

    def disconnect(self, address: str) -> None:
        """Forget a peer."""
        with self._lock:
            self._peers.pop(address, None)

    def write(self, address: str, copies: Sequence[Copy]) -> None:
        """Batches of at most `BATCH_ENTRIES`, one after the other; several threads fill the window together."""
        with self._lock:
            peer = self._peers.get(address)
        if peer is None:
            raise TransferError(f"not connected to {address}", code="not_connected", retryable=False)
        self._regions.check_sources(copies)
        full = [copy for copy in copies if copy.num_bytes]
        for first in range(0, len(full), BATCH_ENTRIES):
            self._write_batch(peer, full[first : first + BATCH_ENTRIES])

    def _write_batch(self, peer: Peer, copies: Sequence[Copy]) -> None:
        num_bytes = sum(copy.num_bytes for copy in copies)
        timeout_s = self._timeout_s + num_bytes / SLOWEST_BYTES_PER_S
        with peer.window.hold(len(copies), timeout_s), self._engines.borrow() as engine:
            failure = _run_batch(engine, peer.session, copies, timeout_s)
        with self._lock:
            peer.failures = 0 if failure is None else peer.failures + 1
            stuck = peer.failures >= FAILURES_BEFORE_REBUILD
        if failure is None:
            return
        if stuck and engine.probe(peer.session) == 0:
            self._engines.renew(f"{peer.failures} failed writes in a row to {peer.session}, which answers probes")
        raise TransferError(
            f"write of {len(copies)} copies, {num_bytes} bytes to {peer.session}: {failure}",
            code="engine_failed",
            settled=False,
        )

    def close(self) -> None:
        """End the engines. Takes about a second each."""
        with self._lock:
            self._peers.clear()
        self._engines.close()


def _run_batch(engine: Engine, session: str, copies: Sequence[Copy], timeout_s: float) -> str | None:
    """Write one batch and wait asleep for its end. None when all is there, else what went wrong."""
    deadline = time.monotonic() + timeout_s
    batch = engine.submit_batch(session, copies[:-1]) if len(copies) > 1 else None
    if batch is not None and batch == 0:
        return "the engine took no batch"
    last = engine.submit_one(session, copies[-1])
    failure = _await_one(engine, last, deadline) if last else "the engine took no copy"
    if batch is not None and engine.finish_batch(batch) != 0:
        return failure or "the engine reports a failed batch"
    return failure


def _await_one(engine: Engine, submission: int, deadline: float) -> str | None:
    while (status := engine.check(submission)) == 0:
        if time.monotonic() > deadline:
            return "no end within the time limit"
        time.sleep(POLL_S)
    return None if status == 1 else f"the engine reports status {status}"
