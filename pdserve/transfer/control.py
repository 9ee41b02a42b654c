"""The control socket over zmq: one PULL socket that peers push to, and one PUSH socket per peer.

All sockets belong to the scheduler thread, which takes received frames through its mailbox (`EventSource`). zmq's own
thread moves the bytes. Sends never block: frames that a dead or slow peer does not take are dropped, and `Sessions`
repeats them.

With a control token, connections are encrypted (CURVE). All processes with one token derive the same key pair from it.
CURVE requires that a client knows the server's public key, so a process without the token cannot complete a handshake.
A recording cannot be decrypted later, even with the token. The seal of each frame (`wire`) stays inside.

zmq repeats a failed handshake, or gives a connection up, without an error. Monitors report both: a peer with another
token is reported to the mailbox, and a connection that zmq gave up is opened again with the next send.
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
"""Frames of one peer that may wait for the end of a step."""
_POLLIN = int(zmq.POLLIN)
_MAX_TAKEN = 4096
"""Most frames that are handled in one batch."""
_CURVE_OVERHEAD = 64
"""Upper bound of the bytes that CURVE adds to a frame."""
_HANDSHAKE_MS = 5000
"""An unknown connection without a handshake is closed after this time. zmq's thread handles it, also during long steps.
"""
_UNACKED_MS = 3000
"""Milliseconds without a TCP ack from the peer's host after which a connection is opened again.

The kernel retransmits after doubling pauses, so it notices late that a broken link works again. `Sessions` repeats lost
frames.
"""
_CONNECT_MS = 2000
_MAX_SOCKETS = 16384
_LOOK_EVERY_S = 0.25
"""Pause in seconds between reads of the monitors, which cost a system call or two per peer."""
_TELL_EVERY_S = 1.0
"""Pause in seconds between reports of a handshake that keeps failing."""
_DISTINCT_FAILURES = 2
"""Failures from which a peer counts as having another token. A peer that dies in a handshake looks the same once."""

_FAILED = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_CLOSED = frozenset({errno.EPIPE, errno.ECONNRESET})
"""Values of `_FAILED` where the other end closed the connection. Peers' probes close connections at the control port.
"""
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
        """Return the key pair that all processes with this token share.

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
    """The connection to one peer, and the state that its monitor reports."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    num_failed: int = 0
    """Handshakes that the other end closed, since the last success."""
    told_s: float = -float("inf")
    given_up: bool = False
    """True when zmq has closed the connection and does not report a retry."""


class ZmqControlSocket:
    """`ControlSocket` on `host`, at a free port; peers learn the port from the handshake.

    An `EventSource` for the mailbox of the thread that created it. With a `token` connections are encrypted.

    Raises:
        ConfigError: `host` is not an address of this machine, or this libzmq cannot encrypt.
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
            message = self._pull.recv(zmq.NOBLOCK, copy=False)
            events.append(FrameArrived(message.bytes, _source(message)))
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
            self._failures.warning("cannot send to %r: %s", endpoint, error)  # peers name endpoints
            return
        with contextlib.suppress(zmq.Again):
            link.socket.send(frame, zmq.NOBLOCK)

    def forget(self, endpoint: str) -> None:
        """See `ControlSocket`."""
        link = self._links.pop(endpoint, None)
        if link is not None:
            _close(link.socket, link.monitor, linger_ms=0)

    def close(self) -> None:
        """Stop listening. Scheduler thread, after its last send; no peer may still expect an answer."""
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
        """Open a monitor of `socket`'s connections. Its queue has no limit: zmq's thread would block on a full one."""
        address = f"inproc://monitor-{next(self._names)}"
        socket.monitor(address, events)
        monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.connect(address)
        return monitor

    def _look(self, now: float) -> list[PeerHandshakeFailed | HandshakesFailed]:
        """Read all monitors, and return the events for the mailbox."""
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
        """Read the monitor of a peer; return the number of failed handshakes."""
        num_failed = 0
        for kind, value in _said(link.monitor):
            if kind & _SUCCEEDED:
                link.num_failed = 0
            elif kind & _REFUSED:
                num_failed, link.num_failed = num_failed + 1, _DISTINCT_FAILURES
            elif kind & _FAILED:
                num_failed += 1
                link.num_failed += value in _CLOSED  # else it timed out
            link.given_up = bool(kind & _DISCONNECTED) or (link.given_up and not kind & _RETRIED)
        return num_failed


def _readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def _source(message: zmq.Frame) -> str:
    """Return the IP address that `message` came from; empty for old versions of zmq's protocol."""
    try:
        return str(message.get("Peer-Address"))
    except zmq.ZMQError:
        return ""


def _said(monitor: zmq.Socket[bytes]) -> list[tuple[int, int]]:
    """Return kind and value of a monitor's pending events, oldest first."""
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
