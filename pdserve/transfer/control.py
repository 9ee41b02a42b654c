"""The control socket over zmq: one PULL socket that peers push to, and one PUSH socket per peer.

The PULL socket belongs to a thread that posts every frame to the mailbox; the PUSH sockets belong to the scheduler
thread. Sends never block: what a dead or slow peer does not take is dropped, and `Sessions` repeats it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

import zmq

from pdserve.errors import ConfigError
from pdserve.transfer.events import FrameArrived, TransferEvent
from pdserve.transfer.wire import MAX_FRAME_BYTES

log = logging.getLogger(__name__)

_SEND_QUEUE = 4096
_POLL_MS = 200


class ZmqControlSocket:
    """`ControlSocket` on `host`, at a free port. Port 0 is the only choice: peers learn it from the handshake."""

    def __init__(self, host: str, post: Callable[[TransferEvent], None]) -> None:
        self._post = post
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._pull.setsockopt(zmq.LINGER, 0)
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
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="kv-control", daemon=True)
        self._thread.start()

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
        """Stop listening. Scheduler thread, after its last send."""
        self._closing.set()
        self._thread.join()
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

    def _listen(self) -> None:
        try:
            while not self._closing.is_set():
                if self._pull.poll(_POLL_MS):
                    self._post(FrameArrived(self._pull.recv()))
        finally:
            self._pull.close(linger=0)  # an open socket would hold up `close` for ever
