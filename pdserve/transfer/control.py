"""The control socket over zmq: one PULL socket that peers push to, and one PUSH socket per peer.

All belong to the scheduler thread, which takes what has arrived through its mailbox (`EventSource`); zmq's own thread
moves the bytes. Sends never block: what a dead or slow peer does not take is dropped, and `Sessions` repeats it.

With a control token connections are encrypted (CURVE). All processes with one token derive the same key pair from it.
CURVE asks a client for the server's public key, so one who does not know the token cannot complete a handshake, and a
recording cannot be read later even with the token. The seal of each frame (`wire`) stays inside.

zmq repeats a failed handshake in silence, or gives a connection up in silence. Monitors tell which: a peer with another
token is told to the mailbox, and a connection that zmq gave up is made anew with the next send.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import logging
import struct
import time

import zmq
from zmq.utils import z85

from pdserve.base.log import SparingLog
from pdserve.base.proof import ControlKey
from pdserve.errors import ConfigError
from pdserve.transfer.events import FrameArrived, HandshakesFailed, PeerHandshakeFailed
from pdserve.transfer.wire import MAX_FRAME_BYTES

log = logging.getLogger(__name__)

_SEND_QUEUE = 4096
_RECEIVE_QUEUE = 65536
"""Frames of one peer that wait for a step to end."""
_POLLIN = int(zmq.POLLIN)
_MAX_TAKEN = 4096
"""Frames that are handled at once."""
_CURVE_OVERHEAD = 64
"""Bytes that CURVE adds to a frame, and a few more."""
_HANDSHAKE_MS = 5000
"""A stranger's connection that says nothing is closed then. zmq's own thread shakes hands, however long a step is."""
_UNACKED_MS = 3000
"""A connection is made anew when the peer's host has not acknowledged its bytes for so long. The system repeats them
after pauses that double, so it would find out late that a cut link is whole again. Lost frames are said again."""
_CONNECT_MS = 2000
_MAX_SOCKETS = 16384
_LOOK_EVERY_S = 0.25
"""Pause between looks at the monitors, which costs a system call or two per peer."""
_TELL_EVERY_S = 1.0
"""A handshake that goes on failing is told again after this pause."""
_DISTINCT_FAILURES = 2
"""A peer that dies in the middle of a handshake looks like one with another token, once."""

_FAILED = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_CLOSED = frozenset({errno.EPIPE, errno.ECONNRESET})
"""Values of `_FAILED` where the other end closed the connection. At the control port peers do so to probe us."""
_REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL) | int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
_RETRIED = int(zmq.EVENT_CONNECT_RETRIED) | int(zmq.EVENT_CONNECT_DELAYED) | int(zmq.EVENT_CONNECTED)


@dataclasses.dataclass(frozen=True)
class CurveKeys:
    """A CURVE key pair in Z85."""

    public: bytes
    secret: bytes = dataclasses.field(repr=False)

    @classmethod
    def of(cls, token: str) -> CurveKeys:
        """The one key pair of all processes with this token.

        Raises:
            ConfigError: this libzmq has no CURVE.
        """
        if not zmq.has("curve"):
            message = "PDSERVE_CONTROL_TOKEN needs a libzmq with CURVE, which pyzmq's wheels have; this one has none"
            raise ConfigError(message)
        secret = z85.encode(ControlKey(token).secret("curve"))
        return cls(zmq.curve_public(secret), secret)


@dataclasses.dataclass(slots=True)
class _Link:
    """The connection to one peer, and what its monitor said of it."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    num_failed: int = 0
    """Handshakes that the other end broke off, since one succeeded."""
    told_s: float = -float("inf")
    given_up: bool = False
    """zmq has closed the connection and does not say that it tries again."""


class ZmqControlSocket:
    """`ControlSocket` on `host`, at a free port. Port 0 is the only choice: peers learn it from the handshake.

    An `EventSource` of what arrives, for the mailbox of the thread that made it. With a `token` connections are
    encrypted.

    Raises:
        ConfigError: `host` is not ours, or this libzmq cannot encrypt.
    """

    def __init__(self, host: str, token: str = "") -> None:
        self._keys = CurveKeys.of(token) if token else None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._names = itertools.count(1)
        self._links: dict[str, _Link] = {}
        self._failures = SparingLog(log)
        self._looked_s = -float("inf")
        self._pull = self._context.socket(zmq.PULL)
        self._pull.setsockopt(zmq.LINGER, 0)
        self._pull.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
        self._pull.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + (_CURVE_OVERHEAD if self._keys else 0))
        self._secure(self._pull, listens=True)
        bracketed = f"[{host}]" if ":" in host else host
        if ":" in host:
            self._pull.setsockopt(zmq.IPV6, 1)
        try:
            port = self._pull.bind_to_random_port(f"tcp://{bracketed}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot listen on {host} for peers: {error}", field="disaggregation_host") from error
        self.endpoint = f"{bracketed}:{port}"
        self._pull_monitor = self._monitor(self._pull, _FAILED | _REFUSED)

    def fileno(self) -> int:
        """See `EventSource`."""
        return int(self._pull.getsockopt(zmq.FD))

    def ready(self) -> bool:
        """See `EventSource`."""
        return _readable(self._pull)

    def take(self) -> list[FrameArrived | PeerHandshakeFailed | HandshakesFailed]:
        """See `EventSource`."""
        events: list[FrameArrived | PeerHandshakeFailed | HandshakesFailed] = []
        while len(events) < _MAX_TAKEN and _readable(self._pull):
            events.append(FrameArrived(self._pull.recv(zmq.NOBLOCK)))
        now = time.monotonic()
        if now - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now
            events += self._look(now)
        return events

    def send(self, endpoint: str, frame: bytes) -> None:
        """See `ControlSocket`."""
        try:
            link = self._links.get(endpoint) or self._connect(endpoint)
        except zmq.ZMQError as error:
            self._failures.warning("cannot send to %r: %s", endpoint, error)  # a peer's word is no reason to fall over
            return
        with contextlib.suppress(zmq.Again):
            link.socket.send(frame, zmq.NOBLOCK)

    def forget(self, endpoint: str) -> None:
        """See `ControlSocket`."""
        link = self._links.pop(endpoint, None)
        if link is not None:
            _close(link.socket, link.monitor, linger_ms=0)

    def close(self) -> None:
        """Stop listening. Scheduler thread, after its last send; nobody may wait for us any more."""
        _close(self._pull, self._pull_monitor, linger_ms=0)
        for endpoint in list(self._links):
            link = self._links.pop(endpoint)
            _close(link.socket, link.monitor, linger_ms=100)
        self._context.term()

    # ------------------------------------------------------------------ inside

    def _connect(self, endpoint: str) -> _Link:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.TCP_MAXRT, _UNACKED_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        self._secure(socket, listens=False)
        if endpoint.startswith("["):
            socket.setsockopt(zmq.IPV6, 1)
        monitor = self._monitor(socket, _FAILED | _REFUSED | _SUCCEEDED | _DISCONNECTED | _RETRIED)
        try:
            socket.connect(f"tcp://{endpoint}")
        except zmq.ZMQError:
            _close(socket, monitor, linger_ms=0)
            raise
        link = self._links[endpoint] = _Link(socket, monitor)
        return link

    def _secure(self, socket: zmq.Socket[bytes], *, listens: bool) -> None:
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        if self._keys is None:
            return
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        if listens:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.public)

    def _monitor(self, socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
        """What `socket` says of its connections. Without a limit: zmq's thread would wait for us to read it."""
        address = f"inproc://monitor-{next(self._names)}"
        socket.monitor(address, events)
        monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.connect(address)
        return monitor

    def _look(self, now: float) -> list[PeerHandshakeFailed | HandshakesFailed]:
        """What the monitors have to say."""
        said = _said(self._pull_monitor)
        num_failed = sum(not (kind & _FAILED and value in _CLOSED) for kind, value in said)
        if num_failed:
            self._failures.warning(
                "%d handshakes at the control port failed: no pdserve, or another PDSERVE_CONTROL_TOKEN", num_failed
            )
        events: list[PeerHandshakeFailed | HandshakesFailed] = []
        for endpoint, link in list(self._links.items()):
            num_failed += self._look_at(link)
            if link.num_failed >= _DISTINCT_FAILURES and now - link.told_s >= _TELL_EVERY_S:
                link.told_s = now
                self._failures.warning("no encrypted connection to %r: it has another PDSERVE_CONTROL_TOKEN", endpoint)
                events.append(PeerHandshakeFailed(endpoint))
            if link.given_up:
                self.forget(endpoint)
        if num_failed:
            events.append(HandshakesFailed(num_failed))
        return events

    def _look_at(self, link: _Link) -> int:
        """Take what the monitor of a peer says; how many handshakes failed."""
        num_failed = 0
        for kind, value in _said(link.monitor):
            if kind & _SUCCEEDED:
                link.num_failed = 0
            elif kind & _REFUSED:
                num_failed, link.num_failed = num_failed + 1, _DISTINCT_FAILURES
            elif kind & _FAILED:
                num_failed += 1
                link.num_failed += value in _CLOSED  # else it has said nothing in time
            link.given_up = bool(kind & _DISCONNECTED) or (link.given_up and not kind & _RETRIED)
        return num_failed


def _readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def _said(monitor: zmq.Socket[bytes]) -> list[tuple[int, int]]:
    """Kind and value of what a monitor has to say, oldest first."""
    said: list[tuple[int, int]] = []
    while _readable(monitor):
        event, _ = monitor.recv_multipart(zmq.NOBLOCK)
        said.append(struct.unpack("=Hi", event))
    return said


def _close(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], *, linger_ms: int) -> None:
    if socket.closed:
        return
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=linger_ms)
