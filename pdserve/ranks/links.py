"""Links between the ranks of a replica: one PULL socket each, one PUSH socket to each peer, and a link thread.

    sending threads   RankLink.send, RankLink.broadcast   PUSH (one to each peer, under its lock)
    thread "ranks"    receives from PULL, sends heartbeats, detects losses

Heartbeats have their own thread, so a rank that computes for minutes is not silent. Frames are sealed with the control
token and the nonces of both ends, and numbered. A lost or early frame ends the replica, as a silent or dead peer does.
Repeated frames, and frames of unknown senders, are ignored. Several threads use a PUSH socket, one at a time: its lock
is the memory fence that zmq requires. Sends never block.

Keys of the seals are derived from the control token, which is stretched first: an attacker who reads contacts at the
rendezvous, or frames on the network, can test guesses of the token on them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Generic, NoReturn, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from pdserve.base.proof import ControlKey
from pdserve.errors import ConfigError, ModelError, PdserveError, ProtocolError, RankError
from pdserve.protocol.codec import MAX_RANK_BYTES, SEAL_BYTES, Codec, Seal
from pdserve.ranks.failure_detector import FailureDetector, LinkTimes, PeerRank

log = logging.getLogger(__name__)

Out = TypeVar("Out")
In = TypeVar("In")

_HEADER = struct.Struct("<IQ")
"""Rank of the sender, and its count of frames to this receiver."""
_MAX_FRAME_BYTES = MAX_RANK_BYTES + 64
_WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_MAX_WAITING = 1000
"""Most frames that zmq buffers for each connection. Further frames wait at their sender."""
_POLL_MS = 100
_TAKE_S = 0.05
"""Longest time in seconds to receive frames at once, so that a flood of unknown frames does not delay heartbeats."""
_LINGER_MS = 500
_REFUSED, _LOST = 2, 1
_VERDICT_S = 3.0
_SLICE_S = 0.5
OnLost = Callable[[PdserveError], None]
"""Called with the loss of a rank."""


def end_process(error: PdserveError) -> NoReturn:
    """Log the error, and exit at once: status 2 for a configuration or model error, else 1. The `on_lost` of a server.

    It does not raise, since the main thread may be in an exchange of tensors that never ends.
    """
    log.error("%s", error)
    logging.shutdown()
    os._exit(_REFUSED if isinstance(error, ConfigError | ModelError) else _LOST)


class LinkCondition(threading.Condition):
    """Guards state that messages change on the link thread. The loss of a rank ends every wait, and then the server.

    `on_lost` is called once with the loss, on the link thread.
    """

    def __init__(self, on_lost: OnLost) -> None:
        super().__init__()
        self._on_lost = on_lost
        self._lost: PdserveError | None = None

    def wait_until(self, done: Callable[[], bool], what: str, timeout_s: float | None = None) -> None:
        """Wait until `done()`, which is called under the lock.

        Raises:
            PdserveError: the loss of a rank; or a RankError after `timeout_s` seconds, in which no rank has `what`.
        """
        started = time.monotonic()
        with self:
            while not self.wait_for(lambda: done() or self._lost is not None, _SLICE_S):
                if timeout_s is not None and time.monotonic() - started > timeout_s:
                    raise RankError(f"a live rank has not {what} within {timeout_s:g} s")
            if self._lost is not None:
                raise self._lost

    def root_cause(self) -> PdserveError | None:
        """Return the loss behind a failed exchange, after waiting up to `_VERDICT_S` for it; None: no rank is lost."""
        with self:
            self.wait_for(lambda: self._lost is not None, _VERDICT_S)
            return self._lost

    def lose(self, error: PdserveError) -> None:
        """Record a loss. The peers are notified already. Link thread."""
        with self:
            self._lost = error
            self.notify_all()
        self._on_lost(error)


class _Line:
    """Connection to one peer. `send` from any thread; all else from the link thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], rank: int, peer: PeerRank, seal: Seal) -> None:
        self.peer = peer
        self._rank, self._seal = rank, seal
        self._lock = threading.Lock()
        self._count = 0
        self._socket: zmq.Socket[bytes] | None = context.socket(zmq.PUSH)
        _prepare(self._socket, peer.endpoint)
        self.monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(_WATCHED)
        self._socket.connect(peer.endpoint)

    def send(self, body: bytes) -> None:
        """Pass one message to zmq; does nothing after `close`."""
        with self._lock:
            if self._socket is None:
                return
            self._count += 1
            frame = self._seal.close(_HEADER.pack(self._rank, self._count) + body)
            with contextlib.suppress(zmq.Again):  # a peer that takes no frames becomes silent
                self._socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket; frames sent just before have `_LINGER_MS` to leave."""
        with self._lock:
            if self._socket is not None:
                self._socket.disable_monitor()
                self.monitor.close(linger=0)
                self._socket.close(linger=_LINGER_MS)
                self._socket = None


class RankLink(Generic[Out, In]):
    """One rank's end of the links: sends `Out` and receives `In`.

    Listens at `endpoint` from the constructor on; `connect` starts the thread "ranks", which runs all callbacks. Each
    message goes to `on_message(rank, message)`. The first loss goes to `on_lost(error)`, once, after
    `final_message(error)` was sent to all peers. After `expect_end` nothing counts as a loss.

    Raises:
        ConfigError: nothing can be bound at `host`.
    """

    def __init__(
        self, rank: int, host: str, outgoing: Codec[Out], incoming: Codec[In], times: LinkTimes | None = None
    ) -> None:
        self.rank = rank
        self.times = times or LinkTimes()
        self._outgoing, self._incoming = outgoing, incoming
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        where = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        _prepare(self._pull, where)
        try:
            self._pull.bind(f"{where}:*")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"cannot listen on {host} for other ranks: {error}", field="disaggregation_host"
            ) from error
        self.endpoint = self._pull.getsockopt_string(zmq.LAST_ENDPOINT)
        self.nonce = uuid.uuid4().hex
        self.refused = 0
        """Frames that no peer sealed for this rank, and repeated frames."""
        self.num_heard = 0
        """Messages received from peers."""
        self._lines: dict[int, _Line] = {}
        self._closing = threading.Event()
        self._ending = False
        self._failing: PdserveError | None = None
        self._thread: threading.Thread | None = None

    def connect(
        self,
        peers: Sequence[PeerRank],
        token: str,
        *,
        alive: Out,
        on_message: Callable[[int, In], None],
        on_lost: Callable[[PdserveError], None],
        final_message: Callable[[PdserveError], Out | None] = lambda error: None,
    ) -> None:
        """Connect to `peers`, which listen already and know our `nonce`; `alive` is the heartbeat. Call once."""
        assert self._thread is None, "connected twice"
        self._counts = dict.fromkeys((peer.rank for peer in peers), 0)
        self._seals = {peer.rank: frame_seal(token, peer.nonce, self.nonce) for peer in peers}
        self._lines = {
            peer.rank: _Line(self._context, self.rank, peer, frame_seal(token, self.nonce, peer.nonce))
            for peer in peers
        }
        self._failure_detector = FailureDetector(peers, self.times, time.monotonic())
        self._alive = self._outgoing.encode(alive)
        self._on_message, self._on_lost, self._final_message = on_message, on_lost, final_message
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    def send(self, rank: int, message: Out) -> None:
        """Send to one peer. Any thread; never blocks."""
        self._lines[rank].send(self._outgoing.encode(message))

    def broadcast(self, message: Out) -> None:
        """Send to all peers, encoded once. Any thread; never blocks."""
        body = self._outgoing.encode(message)
        for line in self._lines.values():
            line.send(body)

    def report(self, rank: int, error: PdserveError) -> None:
        """Record that `rank` reported a failure. Called by `on_message`."""
        self._failure_detector.failed(rank, error, time.monotonic())

    def expect_end(self) -> None:
        """Allow peers to end from now on."""
        self._ending = True

    def fail(self, error: PdserveError) -> None:
        """Fail this rank; `on_lost` is called as for a lost peer. Called by `on_message`."""
        self._failing = self._failing or error

    def receive(self) -> bytes:
        """Return the next frame of any process. Raises zmq.Again when there is none. Link thread."""
        return self._pull.recv(zmq.NOBLOCK)

    def close(self, last: Out | None = None) -> None:
        """Send `last` to all peers, and end the thread. Not from that thread; may be called again."""
        self.expect_end()
        if last is not None and not self._closing.is_set():
            self.broadcast(last)
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        else:
            self._pull.close(linger=0)
            self._context.term()

    def _run(self) -> None:
        lost: PdserveError | None = None
        try:
            lost = self._talk()
        except Exception as error:
            log.exception("the thread that talks to other ranks failed")
            lost = RankError(f"rank {self.rank} cannot go on: {type(error).__name__}: {error}")
        if lost is not None and (message := self._final_message(lost)) is not None:
            self.broadcast(message)
        for line in self._lines.values():
            line.close()
        self._pull.close(linger=0)
        self._context.term()
        if lost is not None:
            self._on_lost(lost)

    def _talk(self) -> PdserveError | None:
        """Run until `close`, or a loss, which is returned."""
        poller = zmq.Poller()
        poller.register(self._pull, zmq.POLLIN)
        for line in self._lines.values():
            poller.register(line.monitor, zmq.POLLIN)
        beat_at = 0.0
        while not self._closing.is_set():
            poller.poll(min(_POLL_MS, round(self.times.beat_s * 1000)))
            self._take_all()
            now = time.monotonic()
            self._look_for_closed(now)
            if now >= beat_at:
                beat_at = now + self.times.beat_s
                for line in self._lines.values():
                    line.send(self._alive)
            lost = self._failing or self._failure_detector.root_cause(now)
            if lost is not None and not self._ending:
                return lost
        return None

    def _take_all(self) -> None:
        """Receive frames for at most `_TAKE_S`; zmq alternates between the connections."""
        end = time.monotonic() + _TAKE_S
        while time.monotonic() < end:
            try:
                sealed = self.receive()
            except zmq.Again:
                return
            try:
                rank, count, body = self._open(sealed)
            except ProtocolError as error:
                self.refused += 1
                if self.refused == 1:
                    log.warning("refused a frame that claims to be from another rank (logged once): %s", error)
                continue
            self._take(rank, count, body)

    def _open(self, sealed: bytes) -> tuple[int, int, bytes]:
        """Return sender, its count, and the message. Raises ProtocolError for foreign and for repeated frames."""
        if len(sealed) < SEAL_BYTES + _HEADER.size:
            raise ProtocolError(f"frame of {len(sealed)} bytes")
        rank, count = _HEADER.unpack_from(sealed, SEAL_BYTES)
        if rank not in self._seals:
            raise ProtocolError(f"rank {rank} is no peer")
        frame = self._seals[rank].open(sealed, max_bytes=_MAX_FRAME_BYTES)
        if count <= self._counts[rank]:
            raise ProtocolError(f"message {count} of rank {rank} is repeated")
        return rank, count, frame[_HEADER.size :]

    def _take(self, rank: int, count: int, body: bytes) -> None:
        now = time.monotonic()
        expected = self._counts[rank] = self._counts[rank] + 1
        if count != expected:
            self._failure_detector.failed(
                rank, RankError(f"its message {count} came where {expected} was expected"), now
            )
            return
        try:
            message = self._incoming.decode(body)
        except ProtocolError as error:
            self._failure_detector.failed(rank, RankError(f"its message cannot be decoded: {error}"), now)
            return
        self.num_heard += 1
        self._failure_detector.heard(rank, type(message).__name__, now)
        self._on_message(rank, message)

    def _look_for_closed(self, now: float) -> None:
        for rank, line in self._lines.items():
            while line.monitor.poll(0):
                event = recv_monitor_message(line.monitor)["event"]
                if event == zmq.EVENT_DISCONNECTED:
                    self._failure_detector.closed(rank, now)
                elif event == zmq.EVENT_CONNECT_RETRIED:
                    self._failure_detector.refused(rank, now)
                else:
                    self._failure_detector.reached(rank)


def _prepare(socket: zmq.Socket[bytes], endpoint: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, _MAX_WAITING)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)


def contact_seal(token: str, key: str) -> Seal:
    """Return the seal for an entry of the rendezvous under `key`: under another key it does not open."""
    return _seal(token, "contact", key)


def frame_seal(token: str, sender: str, receiver: str) -> Seal:
    """Return the seal for frames from one rank to another, bound to the nonces that both drew at their start.

    A frame that is sent to another rank, sent back, or kept until a later start does not open.
    """
    return _seal(token, "frame", sender, receiver)


def _seal(token: str, purpose: str, *parts: str) -> Seal:
    """Return a seal. Without a token (allowed on one host only), the key separates purposes but proves nothing."""
    if not token:
        return Seal("\n".join((purpose, *parts)))
    return Seal(ControlKey(token).mac("ranks", purpose.encode(), *(part.encode() for part in parts)).hex())
