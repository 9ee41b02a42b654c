"""Peers: handshake, at-least-once delivery, heartbeats, and the difference between a silent peer and a dead one.

    unknown -> CONNECTING -> READY <-> SILENT          a SILENT peer may come back, and may still write
                    |           \\______/ -> gone      a gone peer cannot write: its leases are fenced
                    -> REFUSED

Owned by `KVManager`; scheduler thread only. Results come back as `Notice` values for the manager to act on.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import logging
from collections import Counter

import msgspec

from pdserve.base.clock import Clock
from pdserve.errors import HandshakeError, ProtocolError
from pdserve.protocol.failure import Failure
from pdserve.transfer.events import Address, ControlSocket, Directory, PrefillFound, PrefillNotFound
from pdserve.transfer.wire import Abort, Ack, Body, Done, Ended, Hello, Meta, Packet, Ping, Pong, Refusal, Wire

log = logging.getLogger(__name__)

RoomMessage = Meta | Done | Ended | Abort


class PeerState(enum.Enum):
    """Where a session with a peer stands."""

    CONNECTING = "connecting"
    READY = "ready"
    SILENT = "silent"
    REFUSED = "refused"


@dataclasses.dataclass(slots=True)
class Peer:
    """One process at the other end. `hello` is what it said of itself."""

    instance: str
    endpoint: str
    state: PeerState
    last_heard: float
    last_ping: float
    hello: Hello | None = None
    address: Address | None = None
    unacked: dict[int, tuple[float, bytes]] = dataclasses.field(default_factory=dict)
    """seq -> (time to send again, frame)"""


@dataclasses.dataclass(frozen=True, slots=True)
class PeerReady:
    """The handshake with `peer` is complete; `address` when we dialled it."""

    peer: Peer


@dataclasses.dataclass(frozen=True, slots=True)
class DialFailed:
    """No session with the prefill server at `address` can be had."""

    address: Address
    failure: Failure


@dataclasses.dataclass(frozen=True, slots=True)
class PeerLost:
    """`peer` no longer answers; `gone` when its process is known to be dead."""

    peer: Peer
    failure: Failure
    gone: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """`peer` said `body` about a room."""

    peer: Peer
    body: RoomMessage


Notice = PeerReady | DialFailed | PeerLost | Message


@dataclasses.dataclass(frozen=True, slots=True)
class SessionTimes:
    """Seconds."""

    heartbeat_s: float = 2.0
    misses: int = 3
    resend_s: float = 1.0


class Sessions:
    """All peers of this process. `me` is what we say in a handshake."""

    def __init__(
        self,
        instance: str,
        me: Hello,
        wire: Wire,
        socket: ControlSocket,
        directory: Directory,
        clock: Clock,
        times: SessionTimes,
        counters: Counter[str],
    ) -> None:
        self.instance = instance
        self._me = me
        self._wire = wire
        self._socket = socket
        self._directory = directory
        self._clock = clock
        self._times = times
        self._counters = counters
        self._peers: dict[str, Peer] = {}
        self._dialled: dict[Address, str | None] = {}
        self._seq = itertools.count(1)

    # ------------------------------------------------------------------ asking for peers

    def dial(self, address: Address) -> Peer | None:
        """The READY peer behind a bootstrap address; None while one is being looked for (`PeerReady`/`DialFailed`
        follow).
        """
        if address not in self._dialled:
            self._dialled[address] = None
            self._directory.find(address)
            return None
        instance = self._dialled[address]
        peer = None if instance is None else self._peers.get(instance)
        return peer if peer is not None and peer.state is PeerState.READY else None

    def peer(self, instance: str) -> Peer | None:
        """The peer of that instance id, in whatever state."""
        return self._peers.get(instance)

    def __iter__(self) -> itertools.chain[Peer]:
        return itertools.chain(self._peers.values())

    @property
    def num_unacked(self) -> int:
        """Messages that no peer has acknowledged yet."""
        return sum(len(peer.unacked) for peer in self._peers.values())

    def send(self, peer: Peer, body: Body) -> None:
        """Deliver `body` at least once, unless the peer dies first."""
        seq = next(self._seq)
        frame = self._wire.encode(Packet(sender=self.instance, receiver=peer.instance, seq=seq, body=body))
        peer.unacked[seq] = (self._clock.now() + self._times.resend_s, frame)
        self._socket.send(peer.endpoint, frame)

    # ------------------------------------------------------------------ what comes in

    def found(self, event: PrefillFound) -> list[Notice]:
        """The directory knows who serves at an address: shake hands, or use the session there is."""
        self._dialled[event.address] = event.instance
        notices: list[Notice] = []
        for old in list(self._peers.values()):
            if old.address == event.address and old.instance != event.instance:
                notices += self.gone(old.instance)
                self._dialled[event.address] = event.instance
        peer = self._peers.get(event.instance)
        if peer is None:
            peer = self._add(event.instance, event.endpoint)
        peer.address = event.address
        if peer.state is PeerState.READY:
            return [*notices, PeerReady(peer)]
        self.send(peer, self._me)
        return notices

    def not_found(self, event: PrefillNotFound) -> list[Notice]:
        """The directory gave up on an address."""
        self._dialled.pop(event.address, None)
        return [DialFailed(event.address, event.failure)]

    def arrived(self, frame: bytes) -> list[Notice]:
        """A frame from the network; junk is counted and dropped."""
        try:
            packet = self._wire.decode(frame)
        except ProtocolError as error:
            self._counters["control_frames_refused"] += 1
            log.warning("control frame refused: %s", error)
            return []
        if packet.receiver != self.instance:
            self._counters["control_frames_misaddressed"] += 1
            return []
        peer = self._peers.get(packet.sender)
        if isinstance(packet.body, Hello):
            return self._hello(packet, packet.body)
        if peer is None:
            return []
        notices = self._heard(peer)
        match packet.body:
            case Ack(seq=seq):
                peer.unacked.pop(seq, None)
                return notices
            case Ping():
                self._send_once(peer, Pong())
                return notices
            case Pong():
                return notices
            case Refusal(field=field, message=message):
                self._ack(peer, packet.seq)
                return notices + self._refused(peer, field, message)
            case body:
                self._ack(peer, packet.seq)
                return [*notices, Message(peer, body)]

    def gone(self, instance: str) -> list[Notice]:
        """The process of a peer is known to be dead."""
        peer = self._peers.pop(instance, None)
        if peer is None:
            return []
        self._undial(peer)
        self._socket.forget(peer.endpoint)
        message = f"peer {peer.endpoint} is gone"
        return [PeerLost(peer, Failure(code="peer_gone", message=message, origin=peer.endpoint), gone=True)]

    def tick(self) -> list[Notice]:
        """Heartbeats, repeats, and peers that have fallen silent. Once a step."""
        now = self._clock.now()
        notices: list[Notice] = []
        for peer in list(self._peers.values()):
            self._resend(peer, now)
            if now - peer.last_ping < self._times.heartbeat_s:
                continue
            if peer.state is PeerState.REFUSED:
                self._peers.pop(peer.instance)
                continue
            peer.last_ping = now
            quiet_s = now - peer.last_heard
            if quiet_s >= 1.5 * self._times.heartbeat_s:
                self._directory.probe(peer.instance, peer.endpoint)
            self._send_once(peer, Ping())
            if peer.state is not PeerState.SILENT and quiet_s >= self._times.misses * self._times.heartbeat_s:
                peer.state = PeerState.SILENT
                self._undial(peer)
                message = f"peer {peer.endpoint} has been silent for {quiet_s:.1f} s"
                notices.append(
                    PeerLost(peer, Failure(code="peer_silent", message=message, origin=peer.endpoint), gone=False)
                )
        return notices

    def next_timer_s(self) -> float | None:
        """Seconds until `tick` has something to do; None when there are no peers."""
        return min(self._times.heartbeat_s, self._times.resend_s) if self._peers else None

    # ------------------------------------------------------------------ inside

    def _add(self, instance: str, endpoint: str) -> Peer:
        now = self._clock.now()
        peer = Peer(instance, endpoint, PeerState.CONNECTING, last_heard=now, last_ping=now)
        self._peers[instance] = peer
        return peer

    def _hello(self, packet: Packet, hello: Hello) -> list[Notice]:
        notices: list[Notice] = []
        peer = self._peers.get(packet.sender)
        if peer is None:
            if hello.answer:
                return []
            for old in list(self._peers.values()):
                if old.endpoint == hello.endpoint:
                    notices += self.gone(old.instance)
            peer = self._add(packet.sender, hello.endpoint)
        notices += self._heard(peer)
        self._ack(peer, packet.seq)
        try:
            check_facts(self._me.facts, hello.facts)
        except HandshakeError as error:
            self._counters["handshakes_refused"] += 1
            log.warning("handshake with %s refused: %s", hello.endpoint, error)
            self.send(peer, Refusal(field=error.field, message=str(error)))
            return notices + self._refused(peer, error.field, str(error))
        first = peer.hello is None
        peer.hello = hello
        if not hello.answer:
            self.send(peer, msgspec.structs.replace(self._me, answer=True))
        if first or peer.state is not PeerState.READY:
            peer.state = PeerState.READY
            notices.append(PeerReady(peer))
        return notices

    def _heard(self, peer: Peer) -> list[Notice]:
        peer.last_heard = self._clock.now()
        if peer.state is PeerState.SILENT:
            peer.state = PeerState.READY if peer.hello is not None else PeerState.CONNECTING
            if peer.state is PeerState.READY:
                return [PeerReady(peer)]
        return []

    def _refused(self, peer: Peer, field: str, message: str) -> list[Notice]:
        peer.state = PeerState.REFUSED
        address = peer.address
        self._undial(peer)
        if address is None:
            return []
        failure = Failure(
            code="handshake_refused", message=f"{field}: {message}", origin=peer.endpoint, retryable=False, status=500
        )
        self._peers.pop(peer.instance, None)
        return [DialFailed(address, failure)]

    def _undial(self, peer: Peer) -> None:
        if peer.address is not None and self._dialled.get(peer.address) == peer.instance:
            del self._dialled[peer.address]

    def _resend(self, peer: Peer, now: float) -> None:
        for seq, (due, frame) in list(peer.unacked.items()):
            if now >= due:
                peer.unacked[seq] = (now + self._times.resend_s, frame)
                self._socket.send(peer.endpoint, frame)

    def _send_once(self, peer: Peer, body: Body) -> None:
        packet = Packet(sender=self.instance, receiver=peer.instance, seq=0, body=body)
        self._socket.send(peer.endpoint, self._wire.encode(packet))

    def _ack(self, peer: Peer, seq: int) -> None:
        if seq:
            self._send_once(peer, Ack(seq))


def check_facts(ours: dict[str, str | int], theirs: dict[str, str | int]) -> None:
    """Both sides must agree on every fact.

    Raises:
        HandshakeError: naming the first field, in our order, that differs or is missing on one side.
    """
    for field in (*ours, *(f for f in theirs if f not in ours)):
        if ours.get(field) != theirs.get(field):
            raise HandshakeError(field, ours.get(field), theirs.get(field))
