"""Sessions with peers: handshake, heartbeats, and the end of sessions. `delivery` sends their messages.

    unknown -> CONNECTING -> READY <-> SILENT          a SILENT peer may come back, and may still write
                    |           \\______/ -> ended     the peer is sent a Reset; its later writes are fenced
                    -> REFUSED

A session ends when the peer's port refuses a connection, or when the peer is silent for too long. It also ends when
another process answers for the peer's endpoint, and when the peer or an operator ends it. None of these proves that the
peer has stopped writing. The pages are free once `SessionReceivers` has fenced the peer, or once the peer has promised
to write no more. A peer that is alive after its session has ended opens a new session.

A session has a direction: the process that dials receives KV, the other one sends. Two processes that both send have
two sessions with each other, and no message of one session acts in the other.

Owned by `KVManager`; scheduler thread only. Results are returned as `Notice` values for the manager to act on. All
ranks of a replica run the same session logic, so nothing here is drawn at random: see `_mint`.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import msgspec

from pdserve.base.clock import Clock
from pdserve.errors import HandshakeError, ProtocolError
from pdserve.protocol.failure import Failure
from pdserve.transfer.delivery import Delivery
from pdserve.transfer.events import Address, ControlSocket, Directory, PrefillFound, PrefillNotFound, ReceiverOpened
from pdserve.transfer.peers import (
    DialFailed,
    Message,
    Notice,
    Peer,
    PeerLost,
    PeerReady,
    PeerState,
    PeerTable,
    SenderQuiesced,
    SessionTimes,
    UnknownPeers,
    check_hello,
)
from pdserve.transfer.receiving_engines import SessionReceivers
from pdserve.transfer.wire import WEIGHTS, Ack, Body, Hello, Packet, Ping, Pong, Refusal, Reset, Wire

log = logging.getLogger(__name__)

MAX_PEERS = 2048
"""With this many peers, the server refuses the Hello of any other process."""
MAX_ADDRESSES = 64
"""Most bootstrap addresses kept per peer (the newest). Requests name them, and one server can have many names."""
BUSY_FACTOR = 10
"""Factor on the allowed missed pings of a peer that still listens: it may be in a long step."""


class Sessions:
    """All peers of this process. `me` is our handshake; for `peer_sizes` see `check_hello`.

    `secret` is shared by our ranks only. `writes_in(session)` is True while we may still write to pages that a peer
    published in that session.
    """

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
        receivers: SessionReceivers,
        writes_in: Callable[[int], bool],
        secret: str,
        peer_sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.instance = instance
        self._peer_sizes = peer_sizes or {}
        self._me = me
        self._wire = wire
        self._socket = socket
        self._directory = directory
        self._clock = clock
        self._times = times
        self._counters = counters
        self._receivers = receivers
        self._secret = hashlib.blake2b(secret.encode(), digest_size=32).digest()
        self._peers = PeerTable()
        self.last_refusal: str | None = None
        """The last refused handshake (peer, field and reason), for `/get_server_info`; None: none yet."""
        self._dialled: dict[Address, tuple[str, ...]] = {}
        """Instances behind an address; empty while the directory looks the address up."""
        self._delivery = Delivery(instance, wire, socket, clock, times.resend_s)
        self._number = itertools.count(1)
        self._unknown = UnknownPeers(instance, wire, socket, clock, self._nonce, writes_in, quiet_s=times.resend_s)

    @property
    def weights(self) -> str:
        """Version and fingerprint of our weights, see `KVArgs`; empty where handshakes compare none."""
        return str(self._me.facts.get(WEIGHTS, ""))

    def change_weights(self, weights: str) -> None:
        """Use other weights from now on. No room is live. Sessions go on: rooms compare the weights of their sides."""
        self._me = msgspec.structs.replace(self._me, facts=self._me.facts | {WEIGHTS: weights})
        for peer in self._peers:
            if peer.own_hello is not None:
                peer.own_hello = msgspec.structs.replace(peer.own_hello, facts=self._me.facts)

    # ------------------------------------------------------------------ dialling

    def dial(self, address: Address) -> tuple[Peer | None, ...]:
        """Return the replicas behind a bootstrap address, by number: each peer once it is READY, None before.

        Empty while the address is looked up (`PeerReady` or `DialFailed` follows).
        """
        if address not in self._dialled:
            self._dialled[address] = ()
            self._directory.find(address)
        peers = (self._peers.get(instance, dialled=True) for instance in self._dialled[address])
        return tuple(peer if peer is not None and peer.state is PeerState.READY else None for peer in peers)

    def peer(self, instance: str, *, dialled: bool | None = None) -> Peer | None:
        """Return the peer of that instance id, in any state; None when it is unknown.

        `dialled`: the one that we dialled, which sends to us, or the one that dialled us; None: either, that one first.
        """
        if dialled is not None:
            return self._peers.get(instance, dialled=dialled)
        return next(iter(self._peers.of(instance)), None)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers)

    @property
    def num_unacked(self) -> int:
        """Number of messages that no peer has acknowledged yet."""
        return sum(len(peer.unacked) for peer in self._peers)

    @property
    def owes_acks(self) -> bool:
        """True while a received packet is not acknowledged; `tick` will send the ack."""
        return any(peer.owed_acks for peer in self._peers)

    def send(self, peer: Peer, body: Body) -> None:
        """Deliver `body` at least once, unless the session ends first."""
        self._delivery.send(peer, body)

    def flush(self) -> None:
        """Send all acks that wait for a packet to carry them. Called before a step, whose duration is not known."""
        for peer in self._peers:
            self._delivery.flush(peer)

    # ------------------------------------------------------------------ events and packets

    def found(self, event: PrefillFound) -> list[Notice]:
        """Handle the directory's answer: start handshakes with the replicas at an address, or use existing sessions."""
        notices: list[Notice] = []
        instances = tuple(instance for instance, _ in event.replicas)
        for old in self._peers:
            if event.address not in old.addresses or old.instance in instances:
                continue
            if len(old.addresses) > 1 and old.state is PeerState.READY and old.num_missed <= 1:
                del old.addresses[event.address]  # the peer lives; this address belongs to another server now
            else:
                notices += self._end(old, _gone(old))
        self._dialled[event.address] = instances
        for instance, endpoint in event.replicas:
            peer = self._peers.get(instance, dialled=True)
            if peer is not None and peer.state is PeerState.REFUSED:
                self._drop(peer)
                peer = None
            if peer is None:
                peer = self._dial_peer(instance, endpoint)
            peer.addresses[event.address] = None
            if len(peer.addresses) > MAX_ADDRESSES:
                oldest = next(iter(peer.addresses))
                del peer.addresses[oldest]
                self._dialled.pop(oldest, None)
            if peer.state is PeerState.READY:
                notices.append(PeerReady(peer))
            elif peer.own_hello is not None and peer.state is not PeerState.CONNECTING:
                peer.state, peer.num_missed, peer.listened_at = PeerState.CONNECTING, 0, 0
                self.send(peer, peer.own_hello)
        return notices

    def receiver_opened(self, event: ReceiverOpened) -> list[Notice]:
        """Handle an opened receiver: send our Hello once all ranks can receive; end the session when one cannot."""
        opened = self._receivers.opened(event)
        if opened is None:
            return []
        peer = next((it for it in self._peers if it.receiver == opened.name), None)
        assert peer is not None, "the receiver of an ended session is fenced"
        if opened.failure is not None:
            notices = self._undial(peer, opened.failure)
            return [*self._end(peer, opened.failure, tell=False), *notices]
        ranks = tuple(
            msgspec.structs.replace(rank, transport_address=address)
            for rank, address in zip(self._me.ranks, opened.addresses, strict=True)
        )
        peer.own_hello = msgspec.structs.replace(self._me, ranks=ranks, session=peer.session)
        self.send(peer, peer.own_hello)
        return []

    def not_found(self, event: PrefillNotFound) -> list[Notice]:
        """Handle the directory's failure to find an address."""
        self._dialled.pop(event.address, None)
        return [DialFailed(event.address, event.failure)]

    def arrived(self, frame: bytes, source: str) -> list[Notice]:
        """Handle a frame from the network address `source`; a frame that does not decode is counted and dropped."""
        try:
            packet = self._wire.decode(frame)
        except ProtocolError as error:
            self._counters["control_frames_refused"] += 1
            count = self._counters["control_frames_refused"]
            if count & (count - 1) == 0:  # a flood of frames must not flood the log
                log.warning("control frame refused (%d so far): %s", count, error)
            return []
        if packet.receiver != self.instance:
            self._counters["control_frames_misaddressed"] += 1
            is_ours = self._peers.in_session(packet.sender, packet.session) is not None  # forged
            if isinstance(packet.body, Ping) and not (packet.body.nonce or is_ours):
                self._unknown.reset_sender(packet, packet.body.endpoint)  # the former process at our endpoint is gone
            return []
        match packet.body:
            case Hello():
                return self._hello(packet, packet.body, source)
            case Reset():
                return self._reset(packet, packet.body)
            case Ping(nonce=nonce, endpoint=endpoint) if nonce:
                peer = self._peers.in_session(packet.sender, packet.session)
                if peer is not None and peer.endpoint == endpoint:
                    self._unknown.repeat(peer, nonce)  # proves that our Hello's endpoint is ours
                return []
            case Pong(nonce=nonce) if nonce:
                self._unknown.repeated(packet.sender, packet.session, nonce)
                return []
        peer = self._peers.in_session(packet.sender, packet.session)
        if peer is None:
            self._counters["control_frames_unexpected"] += 1
            self._unknown.reset_sender(packet, packet.body.endpoint if isinstance(packet.body, Ping) else "")
            return []
        for seq in packet.acks:
            peer.unacked.pop(seq, None)
        if peer.hello is None and not isinstance(packet.body, Ack | Ping | Pong | Refusal):
            self._counters["control_frames_unexpected"] += 1
            return []
        notices = self._heard(peer)
        match packet.body:
            case Ack() | Pong():
                return notices
            case Ping():
                self._delivery.send_packet(peer, 0, Pong())
                return notices
            case Refusal(field=field, message=message):
                self._delivery.owe_ack(peer, packet.seq)
                return notices + self._refused(peer, field, message)
            case body:
                self._delivery.owe_ack(peer, packet.seq)
                return [*notices, Message(peer, body)]

    def gone(self, instance: str) -> list[Notice]:
        """End the sessions with a process: a connection to it was refused, or an operator declared it dead."""
        return [notice for peer in self._peers.of(instance) for notice in self._end(peer, _gone(peer))]

    def handshake_failed(self, endpoint: str) -> list[Notice]:
        """Handle a failed encrypted connection to `endpoint`. Sessions past CONNECTING go on."""
        notices: list[Notice] = []
        for peer in self._peers:
            if peer.endpoint != endpoint or peer.state is not PeerState.CONNECTING:
                continue
            message = f"the server at {endpoint} has another PDSERVE_CONTROL_TOKEN, or only one of both has one"
            failure = Failure(code="handshake_refused", message=message, origin=endpoint, retryable=False, status=502)
            self.last_refusal = f"{endpoint}: {message}"
            self._counters["handshakes_refused"] += 1
            dials = self._undial(peer, failure)
            notices += [*self._end(peer, failure), *dials]
        return notices

    def receivers_of(self, instance: str) -> list[str]:
        """Return our receiving engines into which `instance` writes, or may still write."""
        now = [peer.receiver for peer in self._peers.of(instance) if peer.receiver is not None]
        return now + [name for name in self._unknown.receivers_of(instance) if self._receivers.is_fencing(name)]

    def listens(self, instance: str) -> None:
        """Record that a process listens at the peer's endpoint: the peer may be busy rather than dead."""
        for peer in self._peers.of(instance):
            peer.listened_at = peer.num_missed

    def tick(self) -> list[Notice]:
        """Send heartbeats, acks and repeats, and detect silent peers. Called once a step."""
        now = self._clock.now()
        notices: list[Notice] = []
        for peer in self._peers:
            self._delivery.tick(peer, now)
            if now - peer.last_ping < self._times.heartbeat_s:
                continue
            peer.last_ping = now
            if peer.state is PeerState.REFUSED:
                self._drop(peer)
            elif peer.silent_at is not None and now - peer.silent_at >= self._times.silent_timeout_s:
                message = f"peer {peer.endpoint} has been silent for {now - peer.silent_at:.0f} s"
                notices += self._end(peer, Failure(code="peer_silent", message=message, origin=peer.endpoint))
            else:
                notices += self._ping(peer)
        if self._receivers.num_fencing:
            self._unknown.remind(self._receivers.is_fencing, self._times.heartbeat_s)
        if self._unknown.busy:
            used = (peer.endpoint for peer in self._peers)
            self._unknown.close_sockets(2 * self._times.heartbeat_s, lambda: used)
        return notices

    def next_timer_s(self) -> float | None:
        """Seconds until `tick` has work; None without peers, ended sessions to reset and fences."""
        busy = self._peers or self._unknown.busy or self._receivers.num_fencing
        return min(self._times.heartbeat_s, self._times.resend_s) if busy else None

    # ------------------------------------------------------------------ handshake

    def _dial_peer(self, instance: str, endpoint: str) -> Peer:
        """Start a new session with a prefill server: our ranks open receiving engines for it first."""
        number = next(self._number)
        peer = self._add(instance, endpoint, self._mint(instance, number), dialled=True)
        peer.receiver = f"{instance}#{number}"
        self._receivers.open(peer.receiver, endpoint)
        return peer

    def _mint(self, instance: str, number: int) -> int:
        """Return a 63-bit number that only our ranks know, and the peer once it is sent. Never 0."""
        digest = hashlib.blake2b(f"{instance}#{number}".encode(), key=self._secret, digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1 or 1

    def _nonce(self, purpose: str) -> int:
        return self._mint(purpose, self._delivery.next_seq())

    def _has_ended(self, instance: str, session: int) -> bool:
        """True when a session with `instance` of that number has ended: it does not begin again."""
        return self._unknown.session(instance, session) is not None

    def _add(self, instance: str, endpoint: str, session: int, *, dialled: bool) -> Peer:
        now = self._clock.now()
        peer = Peer(instance, endpoint, PeerState.CONNECTING, now, session, dialled, heard_at=now)
        self._peers.add(peer)
        return peer

    def _hello(self, packet: Packet, hello: Hello, source: str) -> list[Notice]:
        notices: list[Notice] = []
        peer = self._peers.in_session(packet.sender, hello.session)
        if peer is not None and peer.dialled != hello.answer:
            self._counters["hellos_refused"] += 1  # of the other direction: the session goes on
            return []
        if peer is None:
            if hello.answer or self._has_ended(packet.sender, hello.session):
                self._counters["hellos_replayed"] += 1
                self._unknown.reset_sender(packet, hello.endpoint)
                return []
            if not self._may_begin(packet.sender, hello):
                return []
            for old in self._rivals(packet.sender, hello):
                failure = Failure(code="peer_gone", message=f"peer {old.endpoint} reconnected", origin=old.endpoint)
                notices += self._end(old, failure)
            peer = self._add(packet.sender, hello.endpoint, hello.session, dialled=False)
        for seq in packet.acks:
            peer.unacked.pop(seq, None)
        notices += self._heard(peer)
        self._delivery.owe_ack(peer, packet.seq)
        try:
            check_hello(self._me, hello, self._peer_sizes)
        except HandshakeError as error:
            self.send(peer, Refusal(field=error.field, message=str(error)))
            return notices + self._refused(peer, error.field, str(error))
        first = peer.hello is None
        peer.hello = hello
        if not hello.answer:
            self.send(peer, self._answer_to(hello))
        elif peer.receiver is not None:
            self._receivers.allow(peer.receiver, source, hello)
        if first or peer.state is not PeerState.READY:
            peer.state = PeerState.READY
            notices.append(PeerReady(peer))
        return notices

    def _answer_to(self, hello: Hello) -> Hello:
        """Return our Hello without transport addresses: the answering side only sends."""
        ranks = tuple(msgspec.structs.replace(rank, transport_address="") for rank in self._me.ranks)
        return msgspec.structs.replace(self._me, ranks=ranks, answer=True, session=hello.session)

    def _rivals(self, instance: str, hello: Hello) -> list[Peer]:
        """Peers that dialled us and that a new session of `instance` at the endpoint of `hello` replaces."""
        same = (it for it in self._peers if it.instance == instance or it.endpoint == hello.endpoint)
        return [it for it in same if not it.dialled]

    def _may_begin(self, instance: str, hello: Hello) -> bool:
        """Return whether a new session may begin and replace existing ones with its instance or at its endpoint.

        An instance does not move. Sessions that we dialled are never replaced by a Hello.
        """
        rivals = self._rivals(instance, hello)
        moved = any(it.endpoint != hello.endpoint for it in self._peers.of(instance))
        if moved or (not rivals and len(self._peers) >= MAX_PEERS):
            self._counters["hellos_refused"] += 1
            return False
        return self._unknown.may_begin(instance, hello.endpoint, hello.session, ends_others=bool(rivals))

    def _refused(self, peer: Peer, field: str, message: str) -> list[Notice]:
        """Handle a refused handshake. The peer is kept for one more heartbeat, so that the Refusal is delivered."""
        if peer.state is not PeerState.REFUSED:
            self._counters["handshakes_refused"] += 1
            log.warning("handshake with %s refused: %s: %s", peer.endpoint, field, message)
            self.last_refusal = f"{peer.endpoint}: {field}: {message}"
        peer.state, peer.last_ping = PeerState.REFUSED, self._clock.now()
        failure = Failure(
            code="handshake_refused", message=f"{field}: {message}", origin=peer.endpoint, retryable=False, status=500
        )
        return self._undial(peer, failure)

    # ------------------------------------------------------------------ the end of sessions

    def _end(self, peer: Peer, failure: Failure, *, tell: bool = True) -> list[Notice]:
        """End the session with `peer`, and send a Reset when `tell` is set: the peer may be alive."""
        self._drop(peer)
        if tell:
            self._unknown.reset(peer.instance, peer.endpoint, peer.session, answer=False)
        self._undial(peer, failure)  # rooms that still wait for a session look the address up again
        return [PeerLost(peer, failure, gone=True)]

    def _drop(self, peer: Peer) -> None:
        """Remove `peer`, keep the session's number, and fence its receiver."""
        self._peers.remove(peer)
        self._unknown.ended(peer)
        if peer.receiver is not None:
            self._receivers.fence(peer.receiver)

    def _reset(self, packet: Packet, reset: Reset) -> list[Notice]:
        """Handle a Reset: the peer, or the process that has its endpoint now, has no session of this number."""
        replaced = self._peers.replaced_by(packet.sender, packet.session, reset.endpoint)
        notices = [notice for peer in replaced for notice in self._end(peer, _gone(peer))]
        peer = self._peers.in_session(packet.sender, packet.session)
        if peer is not None:
            failure = Failure(code="peer_gone", message=f"peer {peer.endpoint} ended the session", origin=peer.endpoint)
            notices += self._end(peer, failure, tell=False)
        ended = self._unknown.session(packet.sender, packet.session)
        if ended is not None and ended.receiver is not None and reset.quiesced:
            notices.append(SenderQuiesced(ended.receiver))
        if not reset.answer:
            self._unknown.reset_sender(packet, reset.endpoint, limited=False)
        return notices

    # ------------------------------------------------------------------ heartbeats and delivery

    def _heard(self, peer: Peer) -> list[Notice]:
        peer.num_missed = peer.listened_at = 0
        peer.heard_at, peer.silent_at = self._clock.now(), None
        if peer.state is PeerState.SILENT:
            peer.state = PeerState.READY if peer.hello is not None else PeerState.CONNECTING
            if peer.state is PeerState.READY:
                return [PeerReady(peer)]
        return []

    def _ping(self, peer: Peer) -> list[Notice]:
        """Ping `peer`, and check whether it is silent. A peer without a handshake is sent its Hello again instead."""
        if peer.num_missed:
            self._directory.probe(peer.instance, peer.endpoint)
        if peer.hello is not None:
            self._delivery.send_packet(peer, 0, Ping(endpoint=self._socket.endpoint))
        misses, patience = peer.num_missed, self._times.misses
        peer.num_missed += 1
        listens = misses - peer.listened_at < patience and misses < patience * BUSY_FACTOR
        if peer.state is PeerState.SILENT or misses < patience or listens:
            if misses and misses % patience == 0:
                for address in peer.addresses:  # another process may have its endpoint and answer our probes
                    self._directory.find(address)
            return []
        connecting, peer.state = peer.state is PeerState.CONNECTING, PeerState.SILENT
        if peer.silent_at is None:
            peer.silent_at = self._clock.now()
        message = f"peer {peer.endpoint} has not answered {misses} heartbeats"
        failure = Failure(code="peer_silent", message=message, origin=peer.endpoint)
        dials = self._undial(peer, failure)
        return [PeerLost(peer, failure, gone=False), *(dials if connecting else ())]

    def _undial(self, peer: Peer, failure: Failure) -> list[Notice]:
        """Drop the look-up results for the addresses of `peer`, and return a failure for the rooms that wait there."""
        addresses = [address for address in peer.addresses if peer.instance in self._dialled.get(address, ())]
        for address in addresses:
            del self._dialled[address]
        peer.addresses.clear()
        return [DialFailed(address, failure) for address in addresses]


def _gone(peer: Peer) -> Failure:
    return Failure(code="peer_gone", message=f"peer {peer.endpoint} is gone", origin=peer.endpoint)
