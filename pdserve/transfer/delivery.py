"""At-least-once delivery of messages to peers with a session: sequence numbers, repeats and acks.

    send ──> Packet(seq) ──> repeated each `resend_s` until a packet of the peer acknowledges it
    a received packet ──> its ack rides on the next packet to that peer, or is sent alone after `ACK_DELAY_S`

Owned by `Sessions`; scheduler thread only.
"""

from __future__ import annotations

import itertools

from pdserve.base.clock import Clock
from pdserve.transfer.events import ControlSocket
from pdserve.transfer.peers import Peer
from pdserve.transfer.wire import MAX_ACKS, Ack, Body, Packet, Wire

ACK_DELAY_S = 0.02
"""Seconds that an ack waits for a packet to carry it, so that no peer is woken in the middle of a copy."""


class Delivery:
    """Sends packets to peers. `resend_s`: seconds between two repeats of a message."""

    def __init__(self, instance: str, wire: Wire, socket: ControlSocket, clock: Clock, resend_s: float) -> None:
        self._instance = instance
        self._wire = wire
        self._socket = socket
        self._clock = clock
        self._resend_s = resend_s
        self._seq = itertools.count(1)

    def next_seq(self) -> int:
        """Return a number that was not used before."""
        return next(self._seq)

    def send(self, peer: Peer, body: Body) -> None:
        """Deliver `body` at least once, unless the session ends first."""
        seq = self.next_seq()
        frame = self.send_packet(peer, seq, body)
        peer.unacked[seq] = (self._clock.now() + self._resend_s, frame)

    def send_packet(self, peer: Peer, seq: int, body: Body) -> bytes:
        """Send `body` once, with all acks due; return the frame. `seq` 0: the packet needs no ack."""
        acks, peer.owed_acks = tuple(peer.owed_acks), []
        packet = Packet(
            sender=self._instance, receiver=peer.instance, session=peer.session, seq=seq, body=body, acks=acks
        )
        frame = self._wire.encode(packet)
        self._socket.send(peer.endpoint, frame)
        return frame

    def owe_ack(self, peer: Peer, seq: int) -> None:
        """Acknowledge a received packet with the next packet to `peer`. `seq` 0: it needs no ack."""
        if not seq:
            return
        if not peer.owed_acks:
            peer.owes_since = self._clock.now()
        peer.owed_acks.append(seq)
        if len(peer.owed_acks) == MAX_ACKS:
            self.flush(peer)

    def flush(self, peer: Peer) -> None:
        """Send the acks that wait for a packet to carry them."""
        if peer.owed_acks:
            self.send_packet(peer, 0, Ack())

    def tick(self, peer: Peer, now: float) -> None:
        """Send acks that have waited for `ACK_DELAY_S`, and repeat messages without an ack."""
        if now - peer.owes_since >= ACK_DELAY_S:
            self.flush(peer)
        for seq, (due, frame) in list(peer.unacked.items()):
            if now >= due:
                peer.unacked[seq] = (now + self._resend_s, frame)
                self._socket.send(peer.endpoint, frame)
