"""Publishes KV events over ZMQ, on the thread "kv-events". The wire is that of vLLM and SGLang.

    events   XPUB    [topic, number (8 bytes, big-endian), batch]
    replay   ROUTER  request ["", first number]; answers ["", topic, number, batch] ..., end ["", "", -1, ""]

What their publishers lack: the socket is an XPUB, so a new subscription is seen, and the content of the cache is
published then. A replay that cannot be satisfied is answered with its end alone, and `AllBlocksCleared` and the content
are published. The scheduler never waits: it appends to a bounded queue. A slow subscriber loses batches, which it sees
by their numbers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable

import zmq

from pdserve.base.log import SparingLog
from pdserve.config.kv_events_group import FIELD, FLAG, Endpoint, KVEventsConfig
from pdserve.errors import ConfigError
from pdserve.memory.cache_recorder import CacheChange
from pdserve.observe.kv_events import KVEventStream, Numbered

log = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
SNAPSHOT_GAP_S = 0.1
"""Least time between two snapshots: requests that come meanwhile share one."""
_MOST_SUBSCRIPTIONS = 1000
_MAX_REQUEST_BYTES = 4096


class KVEventPublisher:
    """Binds its sockets, and publishes what `post` is given until `close`.

    Raises:
        ConfigError: an endpoint cannot be used.
    """

    def __init__(self, config: KVEventsConfig, stream: KVEventStream, dp_rank: int = 0) -> None:
        self._stream, self._config = stream, config
        self._topic = config.topic.encode()
        self._queue: deque[list[CacheChange]] = deque()
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        self._num_replays = self._num_snapshots = 0
        self._snapshot: bool | None = None
        """A snapshot is due; True: after `AllBlocksCleared`."""
        self._next_snapshot = 0.0
        self._invalid = SparingLog(log)
        try:
            self._events = self._open(zmq.XPUB, "endpoint", config.endpoint, dp_rank, bind=config.binds)
            self.endpoint = self._address(self._events)
            self.replay_endpoint: str | None = None
            """Address of the replay socket; None without one."""
            if config.replay_endpoint is not None:
                self._replay = self._open(zmq.ROUTER, "replay_endpoint", config.replay_endpoint, dp_rank, bind=True)
                self.replay_endpoint = self._address(self._replay)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = self._ended = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether the queue is neither full nor closed."""
        return len(self._queue) < self._config.max_queue_size and not self._ended

    def post(self, changes: list[CacheChange]) -> bool:
        """Queue the changes of a turn; False, without queueing them, when the queue is full. Never waits."""
        if not self.has_room:
            return False
        self._queue.append(changes)
        os.eventfd_write(self._bell, 1)
        return True

    def facts(self) -> dict[str, float]:
        """Return counts for `/get_server_info`."""
        return {
            "kv_events_batches": float(self._stream.next_seq),
            "kv_events_blocks": float(self._stream.num_blocks),
            "kv_events_queued": float(len(self._queue)),
            "kv_events_replays": float(self._num_replays),
            "kv_events_snapshots": float(self._num_snapshots),
        }

    def close(self) -> None:
        """Publish what is queued and end the thread."""
        if self._thread.is_alive():
            self._stopping = True
            os.eventfd_write(self._bell, 1)
            self._thread.join()
            os.close(self._bell)

    # ------------------------------------------------------------------ sockets

    def _open(self, kind: int, field: str, endpoint: Endpoint, dp_rank: int, *, bind: bool) -> zmq.Socket[bytes]:
        address = endpoint.of_replica(dp_rank)
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        hwm = self._config.hwm if kind == zmq.XPUB else 2 * self._config.buffer_steps + 2
        socket.set(zmq.SNDHWM, hwm)
        socket.set(zmq.RCVHWM, _MOST_SUBSCRIPTIONS)
        socket.set(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IPV6, "[" in address)
        if kind == zmq.XPUB:
            socket.set(zmq.XPUB_VERBOSE, 1)  # tells of each subscription, not only of the first to a topic
        try:
            if bind:
                socket.bind(address)
            else:
                socket.connect(address)
        except zmq.ZMQError as error:
            verb = "bound" if bind else "connected"
            raise ConfigError(f"{FLAG}: {field} {address} cannot be {verb}: {error}", field=FIELD) from error
        return socket

    @staticmethod
    def _address(socket: zmq.Socket[bytes]) -> str:
        """Return the endpoint, with the port that the kernel chose where the configured one is 0."""
        return socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        for socket in (self._events, self._replay):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        try:
            while not self._stopping:
                poller.poll(self._timeout_ms())
                self._turn()
            self._turn()
        except Exception:
            log.exception("KV events have ended")
        finally:
            self._ended = True
            self._queue.clear()
            self._context.destroy(linger=200)

    def _timeout_ms(self) -> int | None:
        if self._snapshot is None:
            return None
        return max(0, round((self._next_snapshot - time.monotonic()) * 1000))

    def _turn(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        self._read_subscriptions()
        for _ in range(len(self._queue)):  # later ones ring the bell again, so that replays and snapshots have a turn
            self._send(self._stream.apply(self._queue.popleft()))
        if self._replay is not None:
            self._answer_replays(self._replay)
        if self._snapshot is not None and time.monotonic() >= self._next_snapshot:
            cleared, self._snapshot = self._snapshot, None
            self._num_snapshots += 1
            self._send(self._stream.snapshot(cleared=cleared))
            self._next_snapshot = time.monotonic() + SNAPSHOT_GAP_S

    def _send(self, batches: Iterable[Numbered]) -> None:
        for batch in batches:
            self._events.send_multipart((self._topic, batch.seq.to_bytes(8, "big"), batch.payload))

    def _read_subscriptions(self) -> None:
        for _ in range(_MOST_SUBSCRIPTIONS):
            try:
                message = self._events.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if message[:1] == b"\1" and self._topic.startswith(message[1:]):
                self._snapshot = bool(self._snapshot)

    def _answer_replays(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(_MOST_SUBSCRIPTIONS):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                self._invalid.warning("a request for a replay of KV events is refused: it must be an empty frame and "
                                      "a number of 8 bytes")  # fmt: skip
                continue
            batches = self._stream.replay(int.from_bytes(frames[2], "big"))
            self._num_replays += 1
            for batch in batches or ():
                socket.send_multipart((frames[0], b"", self._topic, batch.seq.to_bytes(8, "big"), batch.payload))
            socket.send_multipart((frames[0], b"", b"", END, b""))
            if batches is None:
                self._snapshot = True
