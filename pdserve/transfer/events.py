"""Events that threads post to the scheduler's mailbox about transfers, and the interfaces of those threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import msgspec

from pdserve.memory.layer_events import ALL_WRITTEN, LayerEvents
from pdserve.protocol.failure import Failure
from pdserve.transfer.plan import Piece
from pdserve.transfer.wire import MemoryKey

Address = tuple[str, int]
"""Host and port of a bootstrap server."""


class FrameArrived(msgspec.Struct, frozen=True, tag=True):
    """A frame arrived on the control socket, from the IP address `source`; empty: not known."""

    frame: bytes
    source: str = ""


class PrefillFound(msgspec.Struct, frozen=True, tag=True):
    """The bootstrap server at `address` returned its replicas: the instance id and control endpoint of each."""

    address: Address
    replicas: tuple[tuple[str, str], ...]


class PrefillNotFound(msgspec.Struct, frozen=True, tag=True):
    """The bootstrap server at `address` gave no answer in time."""

    address: Address
    failure: Failure


class PeerGone(msgspec.Struct, frozen=True, tag=True):
    """The connection to the peer's endpoint was refused: no process listens there.

    The session ends. The refusal does not prove that the process is dead: its pages are free only once it is fenced.
    """

    instance: str


class PeerListens(msgspec.Struct, frozen=True, tag=True):
    """A process listens at the peer's endpoint. The peer lives, though it may be busy or stopped."""

    instance: str


class PeerHandshakeFailed(msgspec.Struct, frozen=True, tag=True):
    """The encrypted connection to `endpoint` failed: the process there has another control token.

    Posted again for as long as the handshakes fail. A process that is no pdserve server looks the same.
    """

    endpoint: str


class HandshakesFailed(msgspec.Struct, frozen=True, tag=True):
    """`count` handshakes failed since the last event, at the control port or on connections to peers."""

    count: int


@dataclasses.dataclass(slots=True)
class CopyJob:
    """One batch of copies from one local rank to one rank of a peer.

    The job does not start before layers `[0, num_layers)` of the model are written, as `layer_events` report.

    The scheduler thread sets `cancelled`; a worker that has not started the job then skips it.
    """

    key: MemoryKey
    index: int
    peer: str
    transport_address: str
    pieces: tuple[Piece, ...]
    """One per layout group. `ChunkPlanner.with_aux` adds one for the aux slot, which may be the only one."""
    num_bytes: int
    layer_events: LayerEvents = ALL_WRITTEN
    num_layers: int = 0
    cancelled: bool = False
    rank: int = 0
    """Local rank that copies. Each rank is a process of its own."""


class CopyDone(msgspec.Struct, frozen=True, tag=True):
    """Job `index` of `key` has ended; `failure` is None on success. `settled`: no byte of the job moves any more.

    `write_s` is the time in the transport, in seconds, without the wait for the layers.
    """

    key: MemoryKey
    index: int
    failure: Failure | None
    settled: bool
    write_s: float

    @classmethod
    def of(cls, job: CopyJob, failure: Failure | None, *, settled: bool, write_s: float) -> CopyDone:
        """Return the event for the end of `job`."""
        return cls(job.key, job.index, failure, settled, write_s)


class Notified(msgspec.Struct, frozen=True, tag=True):
    """Result of `expect`: local rank `rank` was notified of all writes of `key` except `num_missing` before the
    timeout.
    """

    key: MemoryKey
    num_missing: int
    rank: int = 0


class PeerConnected(msgspec.Struct, frozen=True, tag="Reached"):
    """Result of `connect`: local rank `rank` can write to the peer rank at `transport_address` (`failure` None), or
    cannot.
    """

    transport_address: str
    failure: Failure | None
    rank: int = 0


class ReceiverOpened(msgspec.Struct, frozen=True, tag=True):
    """Result of `open_receiver` at local rank `rank`: the address to send to `peer` only, or the failure."""

    peer: str
    transport_address: str
    failure: Failure | None
    rank: int = 0


class PeerFenced(msgspec.Struct, frozen=True, tag=True):
    """Result of `fence` at local rank `rank`. `fenced`: writes of `peer` cannot land there any more; else they may."""

    peer: str
    fenced: bool
    rank: int = 0


TransferEvent = (
    FrameArrived
    | PrefillFound
    | PrefillNotFound
    | PeerGone
    | PeerListens
    | PeerHandshakeFailed
    | HandshakesFailed
    | CopyDone
    | Notified
    | PeerConnected
    | ReceiverOpened
    | PeerFenced
)


class CopyEngine(Protocol):
    """Runs copy jobs in the background and posts a `CopyDone` for each. Called by the scheduler thread."""

    @property
    def drain_timeout_s(self) -> float:
        """Seconds after which a failed, unsettled write, or a write of a dead peer, has certainly stopped."""
        ...

    @property
    def notifies(self) -> bool:
        """True when receivers are notified of each copy job that is not empty, and so may `expect` it."""
        ...

    def connect(self, rank: int, transport_address: str) -> bool:
        """Return True when local rank `rank` can write there.

        False: the rank connects in the background, or its state is not known at once; a `PeerConnected` follows. Never
        blocks.
        """
        ...

    def submit(self, job: CopyJob) -> None:
        """Queue `job`; never blocks."""
        ...

    def cancel(self, job: CopyJob) -> None:
        """Handle `job.cancelled`, which was just set: a job that has not started may be dropped. A `CopyDone` still
        follows.
        """
        ...

    def forget(self, transport_address: str) -> None:
        """Release the connection to the peer at this address, which is gone."""
        ...

    def expect(self, key: MemoryKey, rank: int, count: int) -> bool:
        """Return True when local rank `rank` has been notified of `count` writes of `key`.

        False: a notification is missing, or the state is not known at once; a `Notified` follows. Call once a key and
        rank.
        """
        ...

    @property
    def fence_drain_timeout_s(self) -> float:
        """Seconds after `PeerFenced` until no write of that peer can land; 0.0 where that was measured."""
        ...

    def open_receiver(self, rank: int, peer: str) -> None:
        """Open a receiving engine for `peer` at local rank `rank`; posts `ReceiverOpened`. Never blocks.

        `peer` names one session with a peer: a later session has another name.
        """
        ...

    def allow_sources(self, rank: int, peer: str, addresses: Sequence[str]) -> None:
        """Let the receiving engine for `peer` at local rank `rank` accept connections from these addresses, too.

        Names among the addresses are ignored. Never blocks; no event follows.
        """
        ...

    def fence(self, rank: int, peer: str) -> None:
        """Stop all writes of `peer` from landing at local rank `rank`; posts `PeerFenced`. Never blocks."""
        ...


class ControlSocket(Protocol):
    """Sends frames to peers; received frames are posted as `FrameArrived`. Frames may get lost, repeat and reorder."""

    @property
    def endpoint(self) -> str:
        """The address at which peers reach this process, `host:port`."""
        ...

    def send(self, endpoint: str, frame: bytes) -> None:
        """Send `frame`; never blocks. Scheduler thread."""
        ...

    def forget(self, endpoint: str) -> None:
        """Close the connection to `endpoint`. Scheduler thread."""
        ...


class Directory(Protocol):
    """Finds prefill servers and probes peers; results are posted as events. Called by the scheduler thread."""

    def find(self, address: Address) -> None:
        """Query the bootstrap server at `address`; posts `PrefillFound` or `PrefillNotFound`."""
        ...

    def probe(self, instance: str, endpoint: str) -> None:
        """Probe whether a process listens at `endpoint`: posts `PeerListens`, or `PeerGone` when the connection is
        refused.

        A host that does not answer at all causes no event: it may be dead, or unreachable and still writing.
        """
        ...
