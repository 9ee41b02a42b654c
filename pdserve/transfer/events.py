"""What threads report to the scheduler's mailbox about transfers; and the seams that threads stand behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pdserve.protocol.failure import Failure
from pdserve.transfer.plan import PageCopy
from pdserve.transfer.wire import MemoryKey

Address = tuple[str, int]
"""Host and port of a bootstrap server."""


class LayersReady(Protocol):
    """A gate: whether some layers of a step are written.

    Called by copy workers, never by the scheduler thread. Once True, always True.
    """

    def __call__(self, timeout_s: float, /) -> bool:
        """Wait up to so many seconds; True when they are."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class LayerGate:
    """The gate of the first `num_layers` layers of the model in a step. `wait` is what `LayerEvents.wait` is: of the
    layers that this rank has.
    """

    num_layers: int
    wait: Callable[[int, float], bool]

    def __call__(self, timeout_s: float, /) -> bool:
        """See `LayersReady`."""
        return self.wait(self.num_layers, timeout_s)


Gates = Sequence[tuple[range, LayersReady]]
"""Layer ranges which together cover all layers once, each with its gate. None at all: everything is written."""
Piece = tuple[int, int, tuple[PageCopy, ...]]
"""Source base address, destination base address, and copies between the two pools."""


class FrameArrived(msgspec.Struct, frozen=True, tag=True):
    """Bytes came in on the control socket."""

    frame: bytes


class PrefillFound(msgspec.Struct, frozen=True, tag=True):
    """The bootstrap server at `address` says which replicas serve there: instance and control endpoint of each."""

    address: Address
    replicas: tuple[tuple[str, str], ...]


class PrefillNotFound(msgspec.Struct, frozen=True, tag=True):
    """The bootstrap server at `address` did not give an answer in time."""

    address: Address
    failure: Failure


class PeerGone(msgspec.Struct, frozen=True, tag=True):
    """The connection to the peer's endpoint was refused: no process listens there.

    The session ends. It is no proof that the process is dead: its pages are free only once it is fenced.
    """

    instance: str


class PeerListens(msgspec.Struct, frozen=True, tag=True):
    """Somebody listens at the peer's endpoint. Its process lives, though it may be busy or stopped."""

    instance: str


class PeerHandshakeFailed(msgspec.Struct, frozen=True, tag=True):
    """The encrypted connection to `endpoint` could not be made: the process there has another control token.

    Told again for as long as it goes on. A process that is no pdserve server looks the same.
    """

    endpoint: str


class HandshakesFailed(msgspec.Struct, frozen=True, tag=True):
    """So many connections at the control port, or from here to peers, failed in their handshake since the last time."""

    count: int


@dataclasses.dataclass(slots=True)
class CopyJob:
    """One batch of copies from one of our ranks to one of a peer's.

    Not begun before `ready`, its gate, is open; None: there is nothing to wait for.

    `cancelled` is set by the scheduler thread; a worker that has not started the job then skips it.
    """

    key: MemoryKey
    index: int
    peer: str
    transport_address: str
    pieces: tuple[Piece, ...]
    """One per layout group, or one for the aux slot."""
    num_bytes: int
    ready: LayersReady | None = None
    cancelled: bool = False
    rank: int = 0
    """Which of our ranks copies: each is a process of its own."""


class CopyDone(msgspec.Struct, frozen=True, tag=True):
    """Job `index` of `key` has ended: well (`failure` None), or not. `settled`: no byte of it moves any more.

    `write_s` is the time in the transport; waiting for a gate is no part of it.
    """

    key: MemoryKey
    index: int
    failure: Failure | None
    settled: bool
    write_s: float

    @classmethod
    def of(cls, job: CopyJob, failure: Failure | None, *, settled: bool, write_s: float) -> CopyDone:
        """How `job` has ended."""
        return cls(job.key, job.index, failure, settled, write_s)


class Notified(msgspec.Struct, frozen=True, tag=True):
    """How `expect` ended: our rank `rank` has been notified of all writes of `key`, or in good time of all but
    `num_missing`.
    """

    key: MemoryKey
    num_missing: int
    rank: int = 0


class PeerConnected(msgspec.Struct, frozen=True, tag="Reached"):
    """How `reach` ended: our rank `rank` can write to the rank of a peer behind `transport_address`, or why not."""

    transport_address: str
    failure: Failure | None
    rank: int = 0


class ReceiverOpened(msgspec.Struct, frozen=True, tag=True):
    """How `open_receiver` ended at our rank `rank`: the address that `peer` alone may be told, or why there is none."""

    peer: str
    transport_address: str
    failure: Failure | None
    rank: int = 0


class PeerFenced(msgspec.Struct, frozen=True, tag=True):
    """How `fence` ended at our rank `rank`. `fenced`: nothing of `peer`'s lands there any more; else it may."""

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
        """Seconds after which a failed, unsettled write, or a write of a dead peer, is known to have stopped."""
        ...

    @property
    def notifies(self) -> bool:
        """Whether receivers are notified of each copy job that is not empty, and so may `expect` it."""
        ...

    def reach(self, rank: int, transport_address: str) -> bool:
        """Whether our rank `rank` can write there. When not, or where nobody can say at once, it connects, and a
        `PeerConnected` will be posted. Never blocks.
        """
        ...

    def submit(self, job: CopyJob) -> None:
        """Queue `job`; never blocks."""
        ...

    def cancel(self, job: CopyJob) -> None:
        """`job.cancelled` was set: whoever has it and has not begun may drop it. A `CopyDone` comes all the same."""
        ...

    def forget(self, transport_address: str) -> None:
        """The peer behind this address is gone."""
        ...

    def expect(self, key: MemoryKey, rank: int, count: int) -> bool:
        """Whether our rank `rank` has been notified of `count` writes of `key`. When not, or where nobody can say at
        once, a `Notified` will be posted. Once a key and rank.
        """
        ...

    @property
    def fence_drain_timeout_s(self) -> float:
        """Seconds after `PeerFenced` until nothing of that peer's can land. 0.0 where that was measured."""
        ...

    def open_receiver(self, rank: int, peer: str) -> None:
        """Have our rank `rank` open a receiving engine for `peer`; posts `ReceiverOpened`. Never blocks.

        `peer` names one session with a peer: a later session has another name.
        """
        ...

    def fence(self, rank: int, peer: str) -> None:
        """Have nothing of `peer`'s land at our rank `rank` any more; posts `PeerFenced`. Never blocks."""
        ...


class ControlSocket(Protocol):
    """Sends frames to peers; what arrives is posted as `FrameArrived`. May lose, repeat and reorder."""

    @property
    def endpoint(self) -> str:
        """How peers reach us, `host:port`."""
        ...

    def send(self, endpoint: str, frame: bytes) -> None:
        """Send `frame`; never blocks. Scheduler thread."""
        ...

    def forget(self, endpoint: str) -> None:
        """Close what is open to `endpoint`. Scheduler thread."""
        ...


class Directory(Protocol):
    """Finds prefill servers and looks whether peers live; answers come as events. Called by the scheduler thread."""

    def find(self, address: Address) -> None:
        """Ask the bootstrap server; posts `PrefillFound` or `PrefillNotFound`."""
        ...

    def probe(self, instance: str, endpoint: str) -> None:
        """See whether anybody listens at `endpoint`: posts `PeerListens`, or `PeerGone` when nobody does.

        When that host does not answer at all, nothing is posted: it may be dead, or out of reach and still writing.
        """
        ...
