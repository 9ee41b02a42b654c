"""Publishes the load of a replica over ZMQ, on the thread "load-events". Wire and names are SGLang's.

    XPUB    ["load", number (8 bytes, big-endian), LoadStat as a msgpack array]

The scheduler posts the present load and never waits. The thread sends a load that has changed at once, and the last one
again each second, and to a new subscriber. A load replaces the one before, so a slow subscriber loses nothing but time.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading

import msgspec
import zmq

from pdserve.config.kv_events_group import LOAD_FIELD, LOAD_FLAG, Endpoint
from pdserve.errors import ConfigError

log = logging.getLogger(__name__)

TOPIC = "load"
HEARTBEAT_MS = 1000
"""Milliseconds after which an unchanged load is sent again."""
_HWM = 8
_MOST_SUBSCRIPTIONS = 1000


class LoadStat(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The load of a replica, as an array behind its name `LoadStat`. Fields and their order are SGLang's.

    `num_tokens`: KV tokens in use, of `max_total_num_tokens`. `waiting_uncached_tokens`: known tokens of live requests
    that this server has to compute before their first new token; cached prefixes that are not looked up yet count.
    `num_total_tokens`: both of them. `max_running_requests`: rows. The last two are totals since the start: prompt
    tokens that were computed, and microseconds of steps with prompt tokens.
    """

    num_running_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    max_total_num_tokens: int
    attn_dp_rank: int | None
    waiting_uncached_tokens: int
    num_total_tokens: int
    max_running_requests: int
    total_prefill_uncached_tokens: int
    total_prefill_busy_us: int


class LoadPublisher:
    """Binds its socket, and publishes what `post` is given until `close`.

    Raises:
        ConfigError: the endpoint cannot be used.
    """

    def __init__(self, endpoint: Endpoint, dp_rank: int = 0) -> None:
        address = endpoint.of_replica(dp_rank)
        self._encoder = msgspec.msgpack.Encoder()
        self._numbers = itertools.count()
        self._newest: LoadStat | None = None
        self._sent: LoadStat | None = None
        self._context = zmq.Context()
        try:
            socket = self._context.socket(zmq.XPUB)
            socket.set(zmq.SNDHWM, _HWM)
            socket.set(zmq.RCVHWM, _MOST_SUBSCRIPTIONS)
            socket.set(zmq.MAXMSGSIZE, 4096)
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.IPV6, "[" in address)
            socket.set(zmq.XPUB_VERBOSE, 1)
            socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"{LOAD_FLAG}: {address} cannot be bound: {error}", field=LOAD_FIELD) from error
        self._socket: zmq.Socket[bytes] = socket
        self.endpoint = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        """Address of the socket, with the port that the kernel chose where the configured one is 0."""
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="load-events", daemon=True)
        self._thread.start()

    def post(self, stat: LoadStat) -> None:
        """Publish a load. Scheduler thread; never waits."""
        if stat != self._newest:
            self._newest = stat
            os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """End the thread and close the socket."""
        if self._thread.is_alive():
            self._stopping = True
            os.eventfd_write(self._bell, 1)
            self._thread.join()
            os.close(self._bell)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        try:
            while not self._stopping:
                due = not poller.poll(HEARTBEAT_MS)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                due |= self._has_subscribed()
                stat = self._newest
                if stat is not None and (due or stat != self._sent):
                    number = next(self._numbers).to_bytes(8, "big")
                    self._socket.send_multipart((TOPIC.encode(), number, self._encoder.encode(stat)))
                    self._sent = stat
        except Exception:
            log.exception("load events have ended")
        finally:
            self._context.destroy(linger=0)

    def _has_subscribed(self) -> bool:
        """Take the subscriptions that have come; True when one of them is new."""
        subscribed = False
        for _ in range(_MOST_SUBSCRIPTIONS):
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            subscribed |= message[:1] == b"\1"
        return subscribed
