"""Messages to processes without a session: resets of ended sessions, and challenges.

    a packet of an unknown session    ─> Reset: its sender ends that session, too
    a session that has ended here     ─> Reset, repeated while the sender's writes are not fenced
    a Hello that would end a session  ─> Ping(nonce) to its endpoint; accepted once its sender has repeated the nonce

Owned by `Sessions`; scheduler thread only.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TypeVar

from pdserve.base.clock import Clock
from pdserve.transfer.events import ControlSocket
from pdserve.transfer.peers import Peer
from pdserve.transfer.wire import Body, Packet, Ping, Pong, Reset, Wire

T = TypeVar("T")

MAX_REMEMBERED = 1024
"""Most ended sessions and most challenges that are kept, the newest."""
MAX_ENDPOINTS = 256
"""Most open connections to processes without a session. Beyond it nothing is sent to a new endpoint."""


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

    def owns(self, instance: str, endpoint: str, session: int) -> bool:
        """Return whether `instance` has proved that it is the process at `endpoint` and has begun `session`.

        If not, it is challenged there. Any other process drops packets that are not addressed to it, and the process of
        that name answers for sessions of its own only.
        """
        challenge = self._challenges.get((instance, session))
        if challenge is None or challenge.endpoint != endpoint:
            challenge = _Challenge(endpoint, self._mint(f"challenge {instance}"))
            _remember(self._challenges, (instance, session), challenge)
        if challenge.proved:
            del self._challenges[instance, session]
            return True
        self._send(instance, endpoint, session, Ping(nonce=challenge.nonce, endpoint=self._socket.endpoint))
        return False

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
