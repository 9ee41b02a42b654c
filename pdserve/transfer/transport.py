"""Interface between pdserve and transfer engines. A transport copies bytes; it knows no pages, rooms or requests.

`engine/build_transfer.py` opens one per rank with `open_transport`; `CopyWorkers` writes through it. Threads:

    scheduler thread   open_transport, register, address, close
    copy workers       connect, write, write_and_notify (several at once, also to the same peer)
    kv-disconnect      disconnect (copy workers and, at the end, the scheduler thread call it as well)
    kv-receivers       open_receiver, the allow_sources that are called before it ends, fence (several at once)
    kv-sources         later allow_sources, which a fence may overtake
    any                take_notifications (one at a time)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec


@dataclasses.dataclass(frozen=True)
class MemoryRegion:
    """Memory of this process that may be read by `write` and written by peers: absolute address and length in bytes."""

    address: int
    num_bytes: int


class Copy(msgspec.Struct, frozen=True, gc=False):
    """`num_bytes` bytes from `source` here to `destination` in the peer; both absolute addresses."""

    source: int
    destination: int
    num_bytes: int


MooncakeProtocol = Literal["tcp", "rdma", "auto"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransportOptions:
    """Settings of an engine. `ib_device`: names of RDMA NICs, comma-separated; None: all.

    `ib_traffic_class`: 0 to 255, for `mooncake` and `nixl`; None: the engine's default.
    """

    ib_device: str | None = None
    ib_traffic_class: int | None = None
    mooncake_protocol: MooncakeProtocol = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransportFacts:
    """Properties of a transport on this machine; logged at start and shown in `/server_info`."""

    protocol: str
    """Medium of the bytes: `rdma`, `tcp`, `memory`, or `none`."""
    moves_bytes: bool
    """False: no bytes arrive. Decode zeroes its fresh pages, so the output has no meaning."""
    max_outstanding: int | None = None
    """Most copies under way to one peer at a time, over all threads; None: no limit."""
    writers: int = 1
    """Copy workers that share the jobs for one peer.

    More than one helps where the thread itself copies: one copies while the other prepares its next copy or waits for
    the GIL.
    """
    notifies: bool = False
    """True: the transport is a `NotifyingTransport`."""


class Transport(Protocol):
    """Moves bytes into the memory of peers."""

    @property
    def name(self) -> str:
        """The name in `--disaggregation-transfer-backend`. Any thread, any time."""
        ...

    @property
    def facts(self) -> TransportFacts:
        """Properties on this machine. Any thread, any time."""
        ...

    @property
    def drain_timeout_s(self) -> float:
        """Seconds after an unsettled failure until no byte of that write is read here or sent any more.

        A receiver that was stopped meanwhile may have bytes in its own buffers: its time starts when it runs again. Any
        thread, any time.
        """
        ...

    @property
    def fence_drain_timeout_s(self) -> float:
        """Seconds after `fence` has returned True until no write of the peer can land; 0.0 where that was measured.

        Any thread, any time.
        """
        ...

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make regions readable for `write` and writable for peers.

        Scheduler thread, at start-up, before any process gets `address`. Regions must not overlap, and stay allocated
        until `close`.

        Raises:
            TransferError: the engine refuses a region (empty, overlapping, locked-memory limit).
        """
        ...

    def address(self) -> str:
        """Return an address at which any process may write, and which no `fence` ends: for tools and tests.

        Peers pass it to `connect`. Unique to this incarnation of this process. Scheduler thread, after `register`.
        """
        ...

    def open_receiver(self, peer: str) -> str:
        """Open a receiving engine for `peer` alone, and return its address, which no other peer receives.

        `peer` names one session with a process: `f"{instance}#{number}"`, see `Peer.receiver`.

        While the engine is open, calls return the same address; after a `fence`, one that was never used before. The
        engine may accept no connection before `allow_sources`.

        A copy worker or control thread, after `register`; may block for some seconds (RDMA registers memory).

        Raises:
            TransferError: the engine does not start.
        """
        ...

    def allow_sources(self, peer: str, addresses: Sequence[str]) -> None:
        """Let the receiving engine of `peer` accept connections from these IP addresses, too.

        An engine over TCP accepts connections from no address before the first call. Names among the addresses, unknown
        peers, and all calls where the engine does not listen on TCP are ignored.

        A control thread.
        """
        ...

    def fence(self, peer: str) -> bool:
        """Destroy the receiving engine of `peer`; return True when no write of the peer can land any more.

        False: that is not known (`shm`: the peer's process lives); a later call may return True. Unknown peers: True.
        Writes through `address` are not ended.

        A control thread; may block for seconds.
        """
        ...

    def connect(self, address: str) -> None:
        """Prepare writing to a peer. A restarted peer has a new address, and needs a new `connect`.

        A copy worker or control thread, before the first `write` to the peer; never the scheduler thread, since a
        stopped peer can block the call for a minute.

        Raises:
            TransferError: the address is malformed, or no process answers there; nothing was written.
        """
        ...

    def disconnect(self, address: str) -> None:
        """Forget a peer; unknown ones are ignored. Writes under way to it end by themselves, successfully or not.

        Any thread; may block for up to a second.
        """
        ...

    def write(self, address: str, copies: Sequence[Copy]) -> None:
        """Copy, and return when every byte is in the peer's memory. Empty copies are skipped.

        Copy-worker threads, several at once.

        Raises:
            TransferError: `settled` True: no byte of this write will move any more. `settled` False: some bytes may
                have landed and more may, for up to `drain_timeout_s` seconds. Until then neither source nor destination
                may be reused.
        """
        ...

    def close(self) -> None:
        """Close the transport; later calls raise. Scheduler thread, after the copy workers have stopped."""
        ...


class NotifyingTransport(Transport, Protocol):
    """A transport whose engine notifies the receiver of a write when every byte of it has landed."""

    def write_and_notify(self, address: str, copies: Sequence[Copy], note: bytes) -> None:
        """Write as `write` does; at least one copy must not be empty.

        When all bytes are in the peer's memory, and not before, `note` is among its notifications, once. When this
        raises, the note may or may not arrive.
        """
        ...

    def take_notifications(self) -> Sequence[bytes]:
        """Return the notes of peers' writes since the last call. One call at a time, any thread; does not block."""
        ...
