"""Peers: handshake, at-least-once delivery, heartbeats, and the difference between a silent peer and a dead one.

    unknown -> CONNECTING -> READY <-> SILENT          a SILENT peer may come back, and may still write
                    |           \\______/ -> gone      a gone peer cannot write: its leases are fenced
                    -> REFUSED

Owned by `KVManager`; scheduler thread only. Results come back as `Notice` values for the manager to act on.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping

import msgspec

from pdserve.base.clock import Clock
from pdserve.errors import HandshakeError, ProtocolError
from pdserve.protocol.failure import Failure
from pdserve.transfer.events import Address, ControlSocket, Directory, PrefillFound, PrefillNotFound
from pdserve.transfer.peers import DialFailed, Message, Notice, Peer, PeerLost, PeerReady, PeerState, check_hello
from pdserve.transfer.wire import MAX_ACKS, Ack, Body, Hello, Packet, Ping, Pong, Refusal, Wire

log = logging.getLogger(__name__)

BUSY_FACTOR = 10
"""A peer that answers no ping but still listens may be in a long step: it gets this many times the misses."""
MAX_GONE = 1024
ACK_DELAY_S = 0.02
"""How long an ack waits for a packet that it can ride on: less to send, and nobody is woken in the middle of a copy."""


@dataclasses.dataclass(frozen=True, slots=True)
class SessionTimes:
    """Seconds."""

    heartbeat_s: float = 2.0
    misses: int = 3
    resend_s: float = 1.0


class Sessions:
    """All peers of this process. `me` is what we say in a handshake; `decode_sizes`: see `check_hello`."""

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
        decode_sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.instance = instance
        self._decode_sizes = decode_sizes or {}
        self._me = me
        self._wire = wire
        self._socket = socket
        self._directory = directory
        self._clock = clock
        self._times = times
        self._counters = counters
        self._peers: dict[str, Peer] = {}
        self.last_refusal: str | None = None
        """The newest handshake that one side refused: peer, field and reason, for `/get_server_info`."""
        self._dialled: dict[Address, tuple[str, ...]] = {}
        """Instances behind an address; empty while the directory is being asked."""
        self._seq = itertools.count(1)
        self._gone: OrderedDict[str, None] = OrderedDict()

    # ------------------------------------------------------------------ asking for peers

    def dial(self, address: Address) -> tuple[Peer | None, ...]:
        """The replicas behind a bootstrap address, by number: each once it is READY, None before.

        Empty while they are being looked for (`PeerReady`/`DialFailed` follow).
        """
        if address not in self._dialled:
            self._dialled[address] = ()
            self._directory.find(address)
        peers = (self._peers.get(instance) for instance in self._dialled[address])
        return tuple(peer if peer is not None and peer.state is PeerState.READY else None for peer in peers)

    def peer(self, instance: str) -> Peer | None:
        """The peer of that instance id, in whatever state."""
        return self._peers.get(instance)

    def __iter__(self) -> itertools.chain[Peer]:
        return itertools.chain(self._peers.values())

    @property
    def num_unacked(self) -> int:
        """Messages that no peer has acknowledged yet."""
        return sum(len(peer.unacked) for peer in self._peers.values())

    @property
    def owes_acks(self) -> bool:
        """True while something has arrived that we have not acknowledged: `tick` soon will."""
        return any(peer.owed_acks for peer in self._peers.values())

    def send(self, peer: Peer, body: Body) -> None:
        """Deliver `body` at least once, unless the peer dies first."""
        seq = next(self._seq)
        frame = self._send_packet(peer, seq, body)
        peer.unacked[seq] = (self._clock.now() + self._times.resend_s, frame)

    def flush(self) -> None:
        """Send all acks that wait for company. Before a step is computed, which takes who knows how long."""
        for peer in self._peers.values():
            if peer.owed_acks:
                self._send_packet(peer, 0, Ack())

    # ------------------------------------------------------------------ what comes in

    def found(self, event: PrefillFound) -> list[Notice]:
        """The directory knows who serves at an address: shake hands, or use the sessions there are."""
        notices: list[Notice] = []
        instances = tuple(instance for instance, _ in event.replicas)
        for old in list(self._peers.values()):
            if event.address in old.addresses and old.instance not in instances:
                notices += self.gone(old.instance)
        self._dialled[event.address] = instances
        for instance, endpoint in event.replicas:
            peer = self._peers.get(instance) or self._add(instance, endpoint)
            peer.addresses[event.address] = None
            if peer.state is PeerState.READY:
                notices.append(PeerReady(peer))
            else:
                peer.state, peer.num_missed, peer.listened_at = PeerState.CONNECTING, 0, 0
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
            count = self._counters["control_frames_refused"]
            if count & (count - 1) == 0:  # whoever floods the port must not flood the log
                log.warning("control frame refused (%d so far): %s", count, error)
            return []
        if packet.receiver != self.instance:
            self._counters["control_frames_misaddressed"] += 1
            return []
        peer = self._peers.get(packet.sender)
        if peer is not None:
            for seq in packet.acks:
                peer.unacked.pop(seq, None)
        if isinstance(packet.body, Hello):
            return self._hello(packet, packet.body)
        if peer is None or (peer.hello is None and not isinstance(packet.body, Ack | Ping | Pong | Refusal)):
            self._counters["control_frames_unexpected"] += 1
            return []
        notices = self._heard(peer)
        match packet.body:
            case Ack() | Pong():
                return notices
            case Ping():
                self._send_packet(peer, 0, Pong())
                return notices
            case Refusal(field=field, message=message):
                self._owe_ack(peer, packet.seq)
                return notices + self._refused(peer, field, message)
            case body:
                self._owe_ack(peer, packet.seq)
                return [*notices, Message(peer, body)]

    def gone(self, instance: str) -> list[Notice]:
        """The process of a peer is known to be dead."""
        peer = self._peers.get(instance)
        if peer is None:
            return []
        self._forget(peer)
        self._gone[instance] = None
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
        failure = Failure(code="peer_gone", message=f"peer {peer.endpoint} is gone", origin=peer.endpoint)
        self._undial(peer, failure)  # who still waits for a session asks the bootstrap server again
        return [PeerLost(peer, failure, gone=True)]

    def listens(self, instance: str) -> None:
        """Somebody listens at the peer's endpoint: it may be busy rather than dead."""
        peer = self._peers.get(instance)
        if peer is not None:
            peer.listened_at = peer.num_missed

    def tick(self) -> list[Notice]:
        """Heartbeats, acks, repeats, and peers that have fallen silent. Once a step."""
        now = self._clock.now()
        notices: list[Notice] = []
        for peer in list(self._peers.values()):
            if peer.owed_acks and now - peer.owes_since >= ACK_DELAY_S:
                self._send_packet(peer, 0, Ack())
            self._resend(peer, now)
            if now - peer.last_ping < self._times.heartbeat_s:
                continue
            peer.last_ping = now
            if peer.state is PeerState.REFUSED:
                self._forget(peer)
            else:
                notices += self._ping(peer)
        return notices

    def next_timer_s(self) -> float | None:
        """Seconds until `tick` has something to do; None when there are no peers."""
        return min(self._times.heartbeat_s, self._times.resend_s) if self._peers else None

    # ------------------------------------------------------------------ inside

    def _add(self, instance: str, endpoint: str) -> Peer:
        now = self._clock.now()
        peer = Peer(instance, endpoint, PeerState.CONNECTING, last_ping=now, heard_at=now)
        self._peers[instance] = peer
        return peer

    def _hello(self, packet: Packet, hello: Hello) -> list[Notice]:
        notices: list[Notice] = []
        peer = self._peers.get(packet.sender)
        if peer is None:
            if hello.answer:
                return []
            for old in [old for old in self._peers.values() if old.endpoint == hello.endpoint]:
                if packet.sender in self._gone:
                    return []  # said before its successor came
                notices += self.gone(old.instance)
            peer = self._add(packet.sender, hello.endpoint)
        notices += self._heard(peer)
        self._owe_ack(peer, packet.seq)
        try:
            check_hello(self._me, hello, self._decode_sizes)
        except HandshakeError as error:
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
        peer.num_missed = peer.listened_at = 0
        peer.heard_at = self._clock.now()
        if peer.state is PeerState.SILENT:
            peer.state = PeerState.READY if peer.hello is not None else PeerState.CONNECTING
            if peer.state is PeerState.READY:
                return [PeerReady(peer)]
        return []

    def _refused(self, peer: Peer, field: str, message: str) -> list[Notice]:
        """One of us refused the other. The peer stays for one heartbeat more, so that it hears so for certain."""
        if peer.state is not PeerState.REFUSED:
            self._counters["handshakes_refused"] += 1
            log.warning("handshake with %s refused: %s: %s", peer.endpoint, field, message)
            self.last_refusal = f"{peer.endpoint}: {field}: {message}"
        peer.state, peer.last_ping = PeerState.REFUSED, self._clock.now()
        failure = Failure(
            code="handshake_refused", message=f"{field}: {message}", origin=peer.endpoint, retryable=False, status=500
        )
        return self._undial(peer, failure)

    def _ping(self, peer: Peer) -> list[Notice]:
        """A heartbeat to `peer`; is it silent?"""
        if peer.num_missed:
            self._directory.probe(peer.instance, peer.endpoint)
        self._send_packet(peer, 0, Ping())
        misses, patience = peer.num_missed, self._times.misses
        peer.num_missed += 1
        listens = misses - peer.listened_at < patience and misses < patience * BUSY_FACTOR
        if peer.state is PeerState.SILENT or misses < patience or listens:
            return []
        connecting, peer.state = peer.state is PeerState.CONNECTING, PeerState.SILENT
        peer.silent_at = self._clock.now()
        message = f"peer {peer.endpoint} has not answered {misses} heartbeats"
        failure = Failure(code="peer_silent", message=message, origin=peer.endpoint)
        dials = self._undial(peer, failure)
        return [PeerLost(peer, failure, gone=False), *(dials if connecting else ())]

    def _undial(self, peer: Peer, failure: Failure) -> list[Notice]:
        """Have the addresses of `peer` looked up again next time; who waits there now is told."""
        addresses = [address for address in peer.addresses if peer.instance in self._dialled.get(address, ())]
        for address in addresses:
            del self._dialled[address]
        peer.addresses.clear()
        return [DialFailed(address, failure) for address in addresses]

    def _forget(self, peer: Peer) -> None:
        del self._peers[peer.instance]
        self._socket.forget(peer.endpoint)

    def _resend(self, peer: Peer, now: float) -> None:
        for seq, (due, frame) in list(peer.unacked.items()):
            if now >= due:
                peer.unacked[seq] = (now + self._times.resend_s, frame)
                self._socket.send(peer.endpoint, frame)

    def _send_packet(self, peer: Peer, seq: int, body: Body) -> bytes:
        """Send it once, with the acks that we owe; returns the frame. `seq` 0: it wants no ack itself."""
        acks, peer.owed_acks = tuple(peer.owed_acks), []
        packet = Packet(sender=self.instance, receiver=peer.instance, seq=seq, body=body, acks=acks)
        frame = self._wire.encode(packet)
        self._socket.send(peer.endpoint, frame)
        return frame

    def _owe_ack(self, peer: Peer, seq: int) -> None:
        if not seq:
            return
        if not peer.owed_acks:
            peer.owes_since = self._clock.now()
        peer.owed_acks.append(seq)
        if len(peer.owed_acks) == MAX_ACKS:
            self._send_packet(peer, 0, Ack())
