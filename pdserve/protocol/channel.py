"""The message channel between the API process and its scheduler process.

Two one-way streams of framed messages: requests to the scheduler, outputs to the API process. Between processes it is a
pair of zmq PUSH/PULL sockets on `ipc://` paths in a private directory (mode 0700, so other users cannot connect). In
tests it is a pair of queues. The server owns the API end, on its event loop. The scheduler owns the other end: its
ingress thread calls `recv` and `beat`, the scheduler thread calls `send`, and no third thread may use that end.

    API process                                      scheduler process
    ZmqApiChannel.send   PUSH ── to_scheduler ──> PULL   ZmqSchedulerChannel.recv   (ingress thread)
    ZmqApiChannel.recv   PULL <──── to_api ────── PUSH   ZmqSchedulerChannel.send   (scheduler thread)
                              <──── to_api ────── PUSH   ZmqSchedulerChannel.beat   (ingress thread)

Sends never block: the queues are unbounded. The API process bounds the requests it sends
(`server/engine_client/live_requests.py`), and the scheduler bounds the requests it admits.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import queue
import shutil
import threading
from typing import Protocol

import zmq

from pdserve.base.run_folders import make_run_folder
from pdserve.errors import EngineDeadError
from pdserve.protocol.codec import Codec
from pdserve.protocol.engine_state import SchedulerHeartbeat
from pdserve.protocol.messages import ToApi, ToScheduler

MAX_IPC_PATH = 100
"""Bytes. Linux limits Unix socket paths to 107 bytes; this leaves a margin."""


class ApiChannel(Protocol):
    """The API process's end of the channel; event loop only."""

    async def send(self, message: ToScheduler) -> None:
        """Send `message` to the scheduler, in order; does not wait until the scheduler reads it."""
        ...

    async def recv(self) -> ToApi:
        """Wait for the next message from the scheduler.

        Raises:
            ProtocolError: the frame is not a valid message; the channel stays usable.
            EngineDeadError: the channel is closed.
        """
        ...

    def close(self) -> None:
        """Close the sockets."""
        ...


class SchedulerChannel(Protocol):
    """The scheduler process's end of the channel."""

    def recv(self, timeout_s: float) -> ToScheduler | None:
        """Return the next message, or None after `timeout_s` seconds; ingress thread only.

        Raises:
            ProtocolError: the frame is not a valid message; the channel stays usable.
        """
        ...

    def send(self, message: ToApi) -> None:
        """Send `message` to the API process, in order; scheduler thread only."""
        ...

    def beat(self, message: SchedulerHeartbeat) -> None:
        """Send a heartbeat to the API process, unordered with the messages of `send`; ingress thread only."""
        ...

    def close(self) -> None:
        """Close the sockets; called when both threads have ended."""
        ...


@dataclasses.dataclass(frozen=True)
class ChannelAddress:
    """Directory of the two sockets; plain data, so that it can be passed to a spawned process."""

    directory: str

    @property
    def to_scheduler(self) -> str:
        """Endpoint that the scheduler binds and the API process pushes to."""
        return f"ipc://{self.directory}/to_scheduler"

    @property
    def to_api(self) -> str:
        """Endpoint that the API process binds and the scheduler pushes to."""
        return f"ipc://{self.directory}/to_api"


def create_channel_address() -> ChannelAddress:
    """Create the private directory. Called by the process that starts API and scheduler, which also removes it."""
    return ChannelAddress(make_run_folder(MAX_IPC_PATH - len("/to_scheduler")))


def remove_channel_address(address: ChannelAddress) -> None:
    """Remove the directory and the sockets in it."""
    shutil.rmtree(address.directory, ignore_errors=True)


def _without_limits(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)


class ZmqApiChannel:
    """`ApiChannel` over zmq; construct it inside a running event loop.

    The loop watches the socket's file descriptor, which is readable after any zmq event, not only a message. It stays
    readable until the socket is polled. The loop stops watching when the descriptor fires and no `recv` is waiting.
    """

    def __init__(self, address: ChannelAddress) -> None:
        self._down: Codec[ToScheduler] = Codec(ToScheduler)
        self._up: Codec[ToApi] = Codec(ToApi)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self._pull = self._context.socket(zmq.PULL)
        for socket in (self._push, self._pull):
            _without_limits(socket)
        self._pull.bind(address.to_api)
        self._push.connect(address.to_scheduler)
        self._loop = asyncio.get_running_loop()
        self._handle = int(self._pull.getsockopt(zmq.FD))
        self._watched = False
        self._waiter: asyncio.Future[None] | None = None

    async def send(self, message: ToScheduler) -> None:
        """See `ApiChannel.send`."""
        if self._push.closed:
            raise _closed()
        self._push.send(self._down.encode(message), zmq.NOBLOCK)

    async def recv(self) -> ToApi:
        """See `ApiChannel.recv`."""
        while not self._pull.closed:
            try:
                frame = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                await self._news()
            else:
                return self._up.decode(frame)
        raise _closed()

    def close(self) -> None:
        """See `ApiChannel.close`. Messages already sent have 200 ms to leave the socket."""
        self._look_away()
        self._push.close(linger=200)
        self._pull.close(linger=0)
        self._context.term()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _news(self) -> None:
        if not self._watched:
            self._loop.add_reader(self._handle, self._on_readable)
            self._watched = True
        self._waiter = self._loop.create_future()
        await self._waiter

    def _on_readable(self) -> None:
        if self._waiter is None or self._waiter.done():
            self._look_away()
        else:
            self._waiter.set_result(None)

    def _look_away(self) -> None:
        if self._watched:
            self._loop.remove_reader(self._handle)
            self._watched = False


def _closed() -> EngineDeadError:
    return EngineDeadError("the channel to the scheduler is closed")


class ZmqSchedulerChannel:
    """`SchedulerChannel` over zmq. Each method has its own socket, so that no two threads share one."""

    def __init__(self, address: ChannelAddress) -> None:
        self._down: Codec[ToScheduler] = Codec(ToScheduler)
        self._up: Codec[ToApi] = Codec(ToApi)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self._beats = self._context.socket(zmq.PUSH)
        self._pull = self._context.socket(zmq.PULL)
        for socket in (self._push, self._beats, self._pull):
            _without_limits(socket)
        self._pull.bind(address.to_scheduler)
        self._push.connect(address.to_api)
        self._beats.connect(address.to_api)

    def recv(self, timeout_s: float) -> ToScheduler | None:
        """See `SchedulerChannel.recv`."""
        if not self._pull.poll(round(timeout_s * 1000), zmq.POLLIN):
            return None
        return self._down.decode(self._pull.recv())

    def send(self, message: ToApi) -> None:
        """See `SchedulerChannel.send`."""
        self._push.send(self._up.encode(message))

    def beat(self, message: SchedulerHeartbeat) -> None:
        """See `SchedulerChannel.beat`."""
        self._beats.send(self._up.encode(message))

    def close(self) -> None:
        """See `SchedulerChannel.close`. Messages of `send` have 200 ms to leave the socket."""
        self._push.close(linger=200)
        self._beats.close(linger=0)
        self._pull.close(linger=0)
        self._context.term()


class MemoryApiChannel:
    """`ApiChannel` of an in-memory pair. Messages pass through the codec, as between processes."""

    def __init__(self, frames_down: queue.SimpleQueue[bytes]) -> None:
        self._down: Codec[ToScheduler] = Codec(ToScheduler)
        self._up: Codec[ToApi] = Codec(ToApi)
        self._frames_down = frames_down
        self._frames_up: collections.deque[bytes] = collections.deque()
        self._lock = threading.Lock()
        self._reader: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._closed = False

    async def send(self, message: ToScheduler) -> None:
        """See `ApiChannel.send`."""
        if self._closed:
            raise EngineDeadError("the channel to the scheduler is closed")
        self._frames_down.put(self._down.encode(message))

    async def recv(self) -> ToApi:
        """See `ApiChannel.recv`."""
        while True:
            with self._lock:
                if self._frames_up:
                    return self._up.decode(self._frames_up.popleft())
                if self._closed:
                    raise EngineDeadError("the channel to the scheduler is closed")
                if self._reader is None:
                    self._reader = (asyncio.get_running_loop(), asyncio.Event())
                arrived = self._reader[1]
                arrived.clear()
            await arrived.wait()

    def deliver(self, message: ToApi) -> None:
        """Put `message` into the queue of `recv`. Called by the scheduler end, from any thread."""
        frame = self._up.encode(message)
        with self._lock:
            self._frames_up.append(frame)
        self._wake()

    def close(self) -> None:
        """See `ApiChannel.close`."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            reader = self._reader
        if reader is not None and not reader[0].is_closed():
            reader[0].call_soon_threadsafe(reader[1].set)


class MemorySchedulerChannel:
    """`SchedulerChannel` of an in-memory pair."""

    def __init__(self, frames_down: queue.SimpleQueue[bytes], api: MemoryApiChannel) -> None:
        self._down: Codec[ToScheduler] = Codec(ToScheduler)
        self._frames_down = frames_down
        self._api = api

    def recv(self, timeout_s: float) -> ToScheduler | None:
        """See `SchedulerChannel.recv`."""
        try:
            return self._down.decode(self._frames_down.get(timeout=timeout_s))
        except queue.Empty:
            return None

    def send(self, message: ToApi) -> None:
        """See `SchedulerChannel.send`."""
        self._api.deliver(message)

    def beat(self, message: SchedulerHeartbeat) -> None:
        """See `SchedulerChannel.beat`."""
        self._api.deliver(message)

    def close(self) -> None:
        """See `SchedulerChannel.close`."""


def memory_channel_pair() -> tuple[MemoryApiChannel, MemorySchedulerChannel]:
    """Create both ends of a channel inside one process, for tests and the simulator."""
    frames_down: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    api = MemoryApiChannel(frames_down)
    return api, MemorySchedulerChannel(frames_down, api)
