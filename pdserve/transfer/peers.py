"""State of one peer in `Sessions`, notices to the manager, and the comparison of the facts of two servers."""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Mapping

from pdserve.errors import HandshakeError
from pdserve.protocol.failure import Failure
from pdserve.protocol.messages import Flow
from pdserve.transfer.events import Address
from pdserve.transfer.plan import check_shapes
from pdserve.transfer.wire import Abort, Done, Ended, Hello, Meta, Told

WINDOW_S = 5.0
"""Time window of `Flow.recent_bytes_s`, in seconds."""


class FlowMeter:
    """Counts the bytes and transfers of one direction of one peer. Scheduler thread only; constant time and memory."""

    def __init__(self) -> None:
        self._bytes = 0
        self._transfers = 0
        self._failures = 0
        self._write_s = 0.0
        self._recent: deque[tuple[int, int]] = deque()
        """Whole seconds, and the bytes that were moved in each."""

    def moved(self, num_bytes: int, write_s: float, now: float) -> None:
        """Add `num_bytes` landed bytes, for which the sender's transport took `write_s` seconds."""
        self._bytes += num_bytes
        self._write_s += write_s
        second = int(now)
        if self._recent and self._recent[-1][0] == second:
            num_bytes += self._recent.pop()[1]
        self._recent.append((second, num_bytes))
        self._forget(now)

    def ended(self, *, well: bool) -> None:
        """Count the end of a transfer: a success when `well`, else a failure."""
        self._transfers += well
        self._failures += not well

    def flow(self, in_flight: int, now: float) -> Flow:
        """Return the counters as a message."""
        self._forget(now)
        return Flow(
            bytes=self._bytes,
            transfers=self._transfers,
            failures=self._failures,
            write_s=self._write_s,
            in_flight=in_flight,
            recent_bytes_s=sum(count for _, count in self._recent) / WINDOW_S,
        )

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] <= now - WINDOW_S:
            self._recent.popleft()


RoomMessage = Meta | Told | Done | Ended | Abort


class PeerState(enum.Enum):
    """State of a session with a peer."""

    CONNECTING = "connecting"
    READY = "ready"
    SILENT = "silent"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True, slots=True)
class SessionTimes:
    """Session times in seconds. A session ends after its peer was silent for `silent_timeout_s`."""

    heartbeat_s: float = 2.0
    misses: int = 3
    resend_s: float = 1.0
    silent_timeout_s: float = 30.0


@dataclasses.dataclass(slots=True)
class Peer:
    """One process at the other end. `hello` is its handshake; the bootstrap servers at `addresses` list it."""

    instance: str
    endpoint: str
    state: PeerState
    last_ping: float
    session: int
    """Session number; see `Hello`."""
    receiver: str | None = None
    """Name of our receiving engines in this session; None where the peer dialled us."""
    greeting: Hello | None = None
    """Our handshake, once our receiving engines are open; None before, and where the peer dialled us."""
    hello: Hello | None = None
    addresses: dict[Address, None] = dataclasses.field(default_factory=dict)
    """Bootstrap addresses in order of arrival: all ranks of a replica must iterate over them in the same order."""
    unacked: dict[int, tuple[float, bytes]] = dataclasses.field(default_factory=dict)
    """seq -> (time of the next resend, frame)."""
    owed_acks: list[int] = dataclasses.field(default_factory=list)
    """Sequence numbers of received packets that are not acknowledged yet."""
    owes_since: float = 0.0
    num_missed: int = 0
    """Pings sent since the last received packet. A count, not a time: a long local step is no silence of the peer."""
    listened_at: int = 0
    """`num_missed` when a probe last found a listening process at the endpoint."""
    heard_at: float = 0.0
    """Time of the last received packet, for display only; the state depends on `num_missed`."""
    silent_at: float | None = None
    """When the peer first became SILENT since its last packet; a repeated Hello does not reset it. None: not silent."""
    sent: FlowMeter = dataclasses.field(default_factory=FlowMeter)
    received: FlowMeter = dataclasses.field(default_factory=FlowMeter)


@dataclasses.dataclass(frozen=True, slots=True)
class PeerReady:
    """The handshake with `peer` is complete."""

    peer: Peer


@dataclasses.dataclass(frozen=True, slots=True)
class DialFailed:
    """No session with the prefill server at `address` can be established."""

    address: Address
    failure: Failure


@dataclasses.dataclass(frozen=True, slots=True)
class PeerLost:
    """`peer` no longer answers; `gone`: the session has ended. The peer may still write until it is fenced."""

    peer: Peer
    failure: Failure
    gone: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """`peer` sent `body` about a room."""

    peer: Peer
    body: RoomMessage


@dataclasses.dataclass(frozen=True, slots=True)
class SenderQuiesced:
    """The sender of the ended session with the receiving engines `receiver` has promised to write no more."""

    receiver: str


Notice = PeerReady | DialFailed | PeerLost | SenderQuiesced | Message


def check_hello(ours: Hello, theirs: Hello, decode_sizes: Mapping[str, int]) -> None:
    """Check that a session may begin: all facts are equal, and the parallel sizes of both replicas work together.

    `decode_sizes` maps flag names to the sizes that a decode server must have, where a prefill server was started with
    such flags.

    Raises:
        HandshakeError: naming the first field that does not match.
    """
    check_facts(ours.facts, theirs.facts)
    _check_split(ours.facts, theirs)
    if len(theirs.ranks) != theirs.shape.num_ranks:
        raise HandshakeError("ranks", theirs.shape.num_ranks, len(theirs.ranks))
    decode, prefill = (ours, theirs) if theirs.answer else (theirs, ours)  # decode dials, prefill answers
    check_shapes(prefill.shape, decode.shape)
    tp_size = decode.tp_size * decode.dp_size if decode.dp_attention else decode.tp_size  # the value of its flag
    sizes = {"disaggregation_decode_tp": tp_size, "disaggregation_decode_dp": decode.dp_size}
    for field, size in decode_sizes.items():
        if sizes[field] != size:
            raise HandshakeError(field, size, sizes[field])


def _check_split(facts: Mapping[str, str | int], hello: Hello) -> None:
    """Check that the model can be split by the parallel sizes in `hello`."""
    for fact, count in facts.items():
        if not isinstance(count, int):
            continue
        if fact.endswith("num_kv_heads") and count % hello.tp_size and hello.tp_size % count:
            raise HandshakeError("tp_size", f"one that {count} KV heads can be split over", hello.tp_size)
        if fact.endswith("num_layers") and hello.pp_size > count:
            raise HandshakeError("pp_size", f"at most {count} stages", hello.pp_size)


def check_facts(ours: dict[str, str | int], theirs: dict[str, str | int]) -> None:
    """Check that every fact is equal on both sides.

    Raises:
        HandshakeError: naming the first field, in our order, that differs or is missing on one side.
    """
    for field in (*ours, *(f for f in theirs if f not in ours)):
        if ours.get(field) != theirs.get(field):
            raise HandshakeError(field, ours.get(field), theirs.get(field))
