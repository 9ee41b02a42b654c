"""What `Sessions` knows of one peer, what it tells the manager about it, and the comparison of two servers' facts."""

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
"""`Flow.recent_bytes_s` looks back so far."""


class FlowMeter:
    """One direction of one peer. Scheduler thread only; constant time and memory."""

    def __init__(self) -> None:
        self._bytes = 0
        self._transfers = 0
        self._failures = 0
        self._write_s = 0.0
        self._recent: deque[tuple[int, int]] = deque()
        """Whole seconds, and the bytes that were moved in each."""

    def moved(self, num_bytes: int, write_s: float, now: float) -> None:
        """So many bytes have landed, which took the sender's transport `write_s`."""
        self._bytes += num_bytes
        self._write_s += write_s
        second = int(now)
        if self._recent and self._recent[-1][0] == second:
            num_bytes += self._recent.pop()[1]
        self._recent.append((second, num_bytes))
        self._forget(now)

    def ended(self, *, well: bool) -> None:
        """A transfer has ended."""
        self._transfers += well
        self._failures += not well

    def flow(self, in_flight: int, now: float) -> Flow:
        """All of it as a message."""
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
    """Where a session with a peer stands."""

    CONNECTING = "connecting"
    READY = "ready"
    SILENT = "silent"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True, slots=True)
class SessionTimes:
    """Seconds. A session ends after its peer was silent for `silent_timeout_s`."""

    heartbeat_s: float = 2.0
    misses: int = 3
    resend_s: float = 1.0
    silent_timeout_s: float = 30.0


@dataclasses.dataclass(slots=True)
class Peer:
    """One process at the other end. `hello` is what it said of itself; the bootstrap servers at `addresses` name it."""

    instance: str
    endpoint: str
    state: PeerState
    last_ping: float
    session: int
    """See `Hello`."""
    receiver: str | None = None
    """The name of our receiving engines for this session; None where the peer dialled us."""
    greeting: Hello | None = None
    """What we say in the handshake, once our receiving engines are open; None where the peer dialled us."""
    hello: Hello | None = None
    addresses: dict[Address, None] = dataclasses.field(default_factory=dict)
    """In the order in which they were heard: all ranks of a replica must go through them alike."""
    unacked: dict[int, tuple[float, bytes]] = dataclasses.field(default_factory=dict)
    """seq -> (time to send again, frame)"""
    owed_acks: list[int] = dataclasses.field(default_factory=list)
    """What has arrived from it and was not acknowledged yet."""
    owes_since: float = 0.0
    num_missed: int = 0
    """Pings sent since anything was heard. Counted, not timed: a long step of ours is no silence of the peer."""
    listened_at: int = 0
    """`num_missed` when a probe last found that somebody listens there."""
    heard_at: float = 0.0
    """When anything was heard of it last, for people; its state goes by `num_missed`."""
    silent_at: float | None = None
    """When it was first taken for silent since anything was heard of it; greeting it again changes nothing."""
    sent: FlowMeter = dataclasses.field(default_factory=FlowMeter)
    received: FlowMeter = dataclasses.field(default_factory=FlowMeter)


@dataclasses.dataclass(frozen=True, slots=True)
class PeerReady:
    """The handshake with `peer` is complete."""

    peer: Peer


@dataclasses.dataclass(frozen=True, slots=True)
class DialFailed:
    """No session with the prefill server at `address` can be had."""

    address: Address
    failure: Failure


@dataclasses.dataclass(frozen=True, slots=True)
class PeerLost:
    """`peer` no longer answers; `gone` when the session has ended. It may still write until it is fenced."""

    peer: Peer
    failure: Failure
    gone: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """`peer` said `body` about a room."""

    peer: Peer
    body: RoomMessage


@dataclasses.dataclass(frozen=True, slots=True)
class SenderQuiesced:
    """The sender of the ended session that had the receiving engines `receiver` has promised to write no more."""

    receiver: str


Notice = PeerReady | DialFailed | PeerLost | SenderQuiesced | Message


def check_hello(ours: Hello, theirs: Hello, decode_sizes: Mapping[str, int]) -> None:
    """A session may begin: all facts agree, and the two replicas are split so that one can feed the other.

    `decode_sizes` are the only ones that a decode server may have, by flag, where a prefill server was told.

    Raises:
        HandshakeError: naming the first field that does not fit.
    """
    check_facts(ours.facts, theirs.facts)
    _check_split(ours.facts, theirs)
    if len(theirs.ranks) != theirs.shape.num_ranks:
        raise HandshakeError("ranks", theirs.shape.num_ranks, len(theirs.ranks))
    decode, prefill = (ours, theirs) if theirs.answer else (theirs, ours)  # decode asks, prefill answers
    check_shapes(prefill.shape, decode.shape)
    tp_size = decode.tp_size * decode.dp_size if decode.dp_attention else decode.tp_size  # as its flag has it
    sizes = {"disaggregation_decode_tp": tp_size, "disaggregation_decode_dp": decode.dp_size}
    for field, size in decode_sizes.items():
        if sizes[field] != size:
            raise HandshakeError(field, size, sizes[field])


def _check_split(facts: Mapping[str, str | int], hello: Hello) -> None:
    """The model that both have can be split as `hello` says."""
    for fact, count in facts.items():
        if not isinstance(count, int):
            continue
        if fact.endswith("num_kv_heads") and count % hello.tp_size and hello.tp_size % count:
            raise HandshakeError("tp_size", f"one that {count} KV heads can be split over", hello.tp_size)
        if fact.endswith("num_layers") and hello.pp_size > count:
            raise HandshakeError("pp_size", f"at most {count} stages", hello.pp_size)


def check_facts(ours: dict[str, str | int], theirs: dict[str, str | int]) -> None:
    """Both sides must agree on every fact.

    Raises:
        HandshakeError: naming the first field, in our order, that differs or is missing on one side.
    """
    for field in (*ours, *(f for f in theirs if f not in ours)):
        if ours.get(field) != theirs.get(field):
            raise HandshakeError(field, ours.get(field), theirs.get(field))
