"""State of one peer in `Sessions`, and messages to processes without a session: resets and challenges.

    a packet of an unknown session    ─> Reset: its sender ends that session, too
    a session that has ended here     ─> Reset, repeated while the sender's writes are not fenced
    a Hello that would end a session  ─> Ping(nonce) to its endpoint; accepted once its sender has repeated the nonce

Owned by `Sessions`; scheduler thread only.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from pdserve.base.clock import Clock
from pdserve.errors import HandshakeError
from pdserve.memory.layout import Shard
from pdserve.protocol.engine_state import Flow
from pdserve.protocol.failure import Failure
from pdserve.transfer.events import Address, ControlSocket
from pdserve.transfer.plan import check_shapes
from pdserve.transfer.wire import (
    WEIGHTS,
    Abort,
    Body,
    Hello,
    Packet,
    Ping,
    Pong,
    PromptLogprobsPart,
    Reset,
    TransferDone,
    TransferEnded,
    TransferInfo,
    Wire,
)

T = TypeVar("T")

WINDOW_S = 5.0
"""Time window of `Flow.recent_bytes_s`, in seconds."""
MAX_REMEMBERED = 1024
"""Most ended sessions and most challenges that are kept, the newest."""
MAX_ENDPOINTS = 256
"""Most open connections to processes without a session. Beyond it nothing is sent to a new endpoint."""


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


RoomMessage = TransferInfo | PromptLogprobsPart | TransferDone | TransferEnded | Abort


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
    dialled: bool = False
    """True: we dialled the peer, which sends to us. False: it dialled us, and we send."""
    receiver: str | None = None
    """Name of our receiving engines in this session; None where the peer dialled us."""
    own_hello: Hello | None = None
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
    """Pings sent since the last received packet. It counts pings, so a long local step does not make a peer silent."""
    listened_at: int = 0
    """`num_missed` when a probe last found a listening process at the endpoint."""
    heard_at: float = 0.0
    """Time of the last received packet, for display only; the state depends on `num_missed`."""
    silent_at: float | None = None
    """When the peer first became SILENT since its last packet; a repeated Hello does not reset it. None: not silent."""
    sent: FlowMeter = dataclasses.field(default_factory=FlowMeter)
    received: FlowMeter = dataclasses.field(default_factory=FlowMeter)


class PeerTable:
    """The peers by instance and direction: two processes that both send have two sessions with each other.

    Iteration is in the order of addition, which is the same on all ranks.
    """

    def __init__(self) -> None:
        self._peers: dict[tuple[str, bool], Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        """Iterate over a copy: the table may change meanwhile."""
        return iter(list(self._peers.values()))

    def add(self, peer: Peer) -> None:
        """Add a peer."""
        self._peers[peer.instance, peer.dialled] = peer

    def remove(self, peer: Peer) -> None:
        """Remove a peer."""
        del self._peers[peer.instance, peer.dialled]

    def get(self, instance: str, *, dialled: bool) -> Peer | None:
        """Return the peer of that instance in one direction; None when there is none."""
        return self._peers.get((instance, dialled))

    def of(self, instance: str) -> list[Peer]:
        """Return the peers of that instance in both directions, the dialled one first."""
        found = (self._peers.get((instance, dialled)) for dialled in (True, False))
        return [peer for peer in found if peer is not None]

    def in_session(self, instance: str, session: int) -> Peer | None:
        """Return the peer of that instance whose session has this number; None when there is none."""
        return next((peer for peer in self.of(instance) if peer.session == session), None)

    def replaced_by(self, instance: str, session: int, endpoint: str) -> list[Peer]:
        """Return the peers of that session, which only we and the peer know, for whose endpoint `instance` answers."""
        return [it for it in self if it.session == session and it.endpoint == endpoint and it.instance != instance]


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


def check_hello(ours: Hello, theirs: Hello, peer_sizes: Mapping[str, int]) -> None:
    """Check that a session may begin: all facts are equal, and the parallel sizes of both replicas work together.

    `peer_sizes` maps flag names to the sizes that the peer must have, where this server was started with such flags.
    The fact `WEIGHTS` may change in a session, also while a Hello is on its way: each room compares it, no handshake.

    Raises:
        HandshakeError: naming the first field that does not match.
    """
    check_facts(*({name: fact for name, fact in one.facts.items() if name != WEIGHTS} for one in (ours, theirs)))
    _check_split(ours.facts, theirs)
    if len(theirs.ranks) != theirs.shape.num_ranks:
        raise HandshakeError("ranks", theirs.shape.num_ranks, len(theirs.ranks))
    decode, prefill = (ours, theirs) if theirs.answer else (theirs, ours)  # decode dials, prefill answers
    check_shapes(prefill.shape, decode.shape)
    tp_size = decode.tp_size * decode.dp_size if decode.dp_attention else decode.tp_size  # the value of its flag
    sizes = {
        "disaggregation_decode_tp": tp_size,
        "disaggregation_decode_dp": decode.dp_size,
        "disaggregation_prefill_pp": prefill.pp_size,
    }
    for field, size in peer_sizes.items():
        if field.startswith("disaggregation_prefill_") == theirs.answer and sizes[field] != size:
            raise HandshakeError(field, size, sizes[field])


SPLIT_SHARDS = frozenset({Shard.KV_HEAD.value, Shard.KEY_HEAD.value, Shard.VALUE_HEAD.value})


def _check_split(facts: Mapping[str, str | int], hello: Hello) -> None:
    """Check that the model can be split by the parallel sizes in `hello`."""
    for fact, count in facts.items():
        if not isinstance(count, int):
            continue
        if not count % hello.tp_size or not hello.tp_size % count:
            pass
        elif fact.endswith("num_kv_heads"):
            raise HandshakeError("tp_size", f"one that {count} KV heads can be split over", hello.tp_size)
        elif fact.endswith(".num_heads") and facts[fact.replace("num_heads", "shard")] in SPLIT_SHARDS:
            text = f"one that the {count} heads of {fact.removesuffix('.num_heads')} can be split over"
            raise HandshakeError("tp_size", text, hello.tp_size)
        if fact == "num_layers" and hello.pp_size > count:
            raise HandshakeError("pp_size", f"at most {count} stages", hello.pp_size)


def check_facts(ours: dict[str, str | int], theirs: dict[str, str | int]) -> None:
    """Check that every fact is equal on both sides.

    Raises:
        HandshakeError: naming the first field, in our order, that differs or is missing on one side.
    """
    for field in (*ours, *(f for f in theirs if f not in ours)):
        if ours.get(field) != theirs.get(field):
            raise HandshakeError(field, ours.get(field), theirs.get(field))


@dataclasses.dataclass(frozen=True, slots=True)
class EndedSession:
    """An ended session. `receiver`: the name of our receiving engines for it; None where we were the sender."""

    instance: str
    session: int
    endpoint: str
    receiver: str | None


@dataclasses.dataclass(slots=True)
class _Challenge:
    """The nonce that the sender of a Hello must repeat from its endpoint."""

    endpoint: str
    nonce: int
    proved: bool = False


class UnknownPeers:
    """Sends to processes that are no peers; remembers ended sessions.

    `mint` makes a nonce that the ranks of this replica agree on. `writes_in`: see `Sessions`. `quiet_s` is the minimum
    time in seconds between two limited resets to the same endpoint.
    """

    def __init__(
        self,
        instance: str,
        wire: Wire,
        socket: ControlSocket,
        clock: Clock,
        mint: Callable[[str], int],
        writes_in: Callable[[int], bool],
        quiet_s: float,
    ) -> None:
        self._instance = instance
        self._wire = wire
        self._socket = socket
        self._clock = clock
        self._mint = mint
        self._writes_in = writes_in
        self._quiet_s = quiet_s
        self._ended: OrderedDict[tuple[str, int], EndedSession] = OrderedDict()
        self._challenges: OrderedDict[tuple[str, int], _Challenge] = OrderedDict()
        """By the instance and the session of the Hello, until the Hello is accepted."""
        self._said_at: dict[str, float] = {}
        """Time of the last message to an endpoint. Its connection is closed some time later."""

    # ------------------------------------------------------------------ ended sessions

    def ended(self, peer: Peer) -> None:
        """Remember the ended session with `peer`."""
        key = (peer.instance, peer.session)
        _remember(self._ended, key, EndedSession(peer.instance, peer.session, peer.endpoint, peer.receiver))
        self._said_at[peer.endpoint] = self._clock.now()

    def session(self, instance: str, number: int) -> EndedSession | None:
        """Return the ended session of that instance and number; None when it is not remembered."""
        return self._ended.get((instance, number))

    def receivers_of(self, instance: str) -> list[str]:
        """Return the receiving engines of ended sessions with `instance`."""
        ended = self._ended.values()
        return [it.receiver for it in ended if it.instance == instance and it.receiver is not None]

    def reset(self, instance: str, endpoint: str, session: int, *, answer: bool) -> None:
        """Send a Reset: there is no such session here. `Reset.quiesced` is False while we may still write in it."""
        body = Reset(endpoint=self._socket.endpoint, quiesced=not self._writes_in(session), answer=answer)
        self._send(instance, endpoint, session, body)

    def reset_sender(self, packet: Packet, endpoint: str, *, limited: bool = True) -> None:
        """Send a Reset to the sender of a packet of an unknown session, if its endpoint is known.

        The endpoint is that of the ended session, else `endpoint`. `limited`: at most one message per `quiet_s`.
        """
        ended = self.session(packet.sender, packet.session)
        endpoint = endpoint if ended is None else ended.endpoint
        last = self._said_at.get(endpoint)
        if endpoint and not (limited and last is not None and self._clock.now() - last < self._quiet_s):
            self.reset(packet.sender, endpoint, packet.session, answer=True)

    def remind(self, is_fencing: Callable[[str], bool], interval_s: float) -> None:
        """Repeat the Reset to senders that are not fenced yet, which may then promise to write no more."""
        now = self._clock.now()
        for ended in self._ended.values():
            last = self._said_at.get(ended.endpoint)
            if ended.receiver is None or not is_fencing(ended.receiver):
                continue
            if last is None or now - last >= interval_s:
                self.reset(ended.instance, ended.endpoint, ended.session, answer=False)

    # ------------------------------------------------------------------ challenges

    def may_begin(self, instance: str, endpoint: str, session: int, *, ends_others: bool) -> bool:
        """Return whether `session` of `instance` may begin; one that `ends_others` needs a proof.

        The proof is that `instance` is the process at `endpoint` and has begun `session`. Without it `instance` is
        challenged there. Any other process drops packets that are not addressed to it, and the process of that name
        answers for sessions of its own only. When a session begins, older proofs of its instance are forgotten: with
        them a late copy of a Hello could end the new session.
        """
        if ends_others and not self.is_proved(instance, endpoint, session):
            return False
        for key in [key for key in self._challenges if key[0] == instance]:
            del self._challenges[key]
        return True

    def is_proved(self, instance: str, endpoint: str, session: int) -> bool:
        """Return whether a challenge was answered; if not, send it."""
        challenge = self._challenges.get((instance, session))
        if challenge is None or challenge.endpoint != endpoint:
            challenge = _Challenge(endpoint, self._mint(f"challenge {instance}"))
            _remember(self._challenges, (instance, session), challenge)
        if not challenge.proved:
            self._send(instance, endpoint, session, Ping(nonce=challenge.nonce, endpoint=self._socket.endpoint))
        return challenge.proved

    def repeated(self, instance: str, session: int, nonce: int) -> None:
        """Check the answer of `instance` to a challenge."""
        challenge = self._challenges.get((instance, session))
        if challenge is not None and challenge.nonce == nonce:
            challenge.proved = True

    def repeat(self, peer: Peer, nonce: int) -> None:
        """Answer a challenge of `peer`."""
        self._send(peer.instance, peer.endpoint, peer.session, Pong(nonce=nonce))

    # ------------------------------------------------------------------ sockets

    def close_sockets(self, linger_s: float, used: Callable[[], Iterator[str]]) -> None:
        """Close connections to endpoints that are not `used`, `linger_s` seconds after the last message."""
        now = self._clock.now()
        late = [it for it, at in self._said_at.items() if now - at >= linger_s]
        kept = set(used()) if late else set()
        for endpoint in late:
            del self._said_at[endpoint]
            if endpoint not in kept:
                self._socket.forget(endpoint)

    @property
    def busy(self) -> bool:
        """True while a connection to a process that is no peer is open."""
        return bool(self._said_at)

    def _send(self, instance: str, endpoint: str, session: int, body: Body) -> None:
        """Send `body` once, unless too many endpoints are open. It is not acknowledged."""
        if endpoint not in self._said_at and len(self._said_at) >= MAX_ENDPOINTS:
            return
        self._said_at[endpoint] = self._clock.now()
        packet = Packet(sender=self._instance, receiver=instance, session=session, seq=0, body=body)
        self._socket.send(endpoint, self._wire.encode(packet))


K = TypeVar("K")


def _remember(into: OrderedDict[K, T], key: K, value: T) -> None:
    """Keep the newest `MAX_REMEMBERED` entries."""
    into.pop(key, None)
    into[key] = value
    if len(into) > MAX_REMEMBERED:
        into.popitem(last=False)
