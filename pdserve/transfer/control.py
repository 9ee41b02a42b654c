"""The control socket over zmq: one PULL socket that peers push to, and one PUSH socket per peer.

All belong to the scheduler thread, which takes what has arrived through its mailbox (`Source`); zmq's own thread moves
the bytes. Sends never block: what a dead or slow peer does not take is dropped, and `Sessions` repeats it.
"""

from __future__ import annotations

import contextlib
import logging

import zmq

from pdserve.errors import ConfigError
from pdserve.transfer.events import FrameArrived
from pdserve.transfer.wire import MAX_FRAME_BYTES

log = logging.getLogger(__name__)

_SEND_QUEUE = 4096
_RECEIVE_QUEUE = 65536
"""Frames of one peer that wait for a step to end."""
_POLLIN = int(zmq.POLLIN)
_MAX_TAKEN = 4096
"""Frames that are handled at once."""


class ZmqControlSocket:
    """`ControlSocket` on `host`, at a free port. Port 0 is the only choice: peers learn it from the handshake.

    A `Source` of `FrameArrived` for the mailbox of the thread that made it.
    """

    def __init__(self, host: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._pull.setsockopt(zmq.LINGER, 0)
        self._pull.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
        self._pull.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        bracketed = f"[{host}]" if ":" in host else host
        if ":" in host:
            self._pull.setsockopt(zmq.IPV6, 1)
        try:
            port = self._pull.bind_to_random_port(f"tcp://{bracketed}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot listen on {host} for peers: {error}", field="disaggregation_host") from error
        self.endpoint = f"{bracketed}:{port}"
        self._push: dict[str, zmq.Socket[bytes]] = {}

    def fileno(self) -> int:
        """See `Source`."""
        return int(self._pull.getsockopt(zmq.FD))

    def ready(self) -> bool:
        """See `Source`."""
        return bool(int(self._pull.getsockopt(zmq.EVENTS)) & _POLLIN)

    def take(self) -> list[FrameArrived]:
        """See `Source`."""
        frames: list[FrameArrived] = []
        while len(frames) < _MAX_TAKEN and self.ready():
            frames.append(FrameArrived(self._pull.recv(zmq.NOBLOCK)))
        return frames

    def send(self, endpoint: str, frame: bytes) -> None:
        """See `ControlSocket`."""
        try:
            socket = self._push.get(endpoint) or self._connect(endpoint)
        except zmq.ZMQError as error:
            log.warning("cannot send to %r: %s", endpoint, error)  # a peer's word is no reason to fall over
            return
        with contextlib.suppress(zmq.Again):
            socket.send(frame, zmq.NOBLOCK)

    def forget(self, endpoint: str) -> None:
        """See `ControlSocket`."""
        socket = self._push.pop(endpoint, None)
        if socket is not None:
            socket.close(linger=0)

    def close(self) -> None:
        """Stop listening. Scheduler thread, after its last send; nobody may wait for us any more."""
        self._pull.close(linger=0)
        for endpoint in list(self._push):
            self._push.pop(endpoint).close(linger=100)
        self._context.term()

    def _connect(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        if endpoint.startswith("["):
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.connect(f"tcp://{endpoint}")
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        self._push[endpoint] = socket
        return socket
