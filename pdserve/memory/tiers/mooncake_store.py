"""The store `mooncake`: Mooncake Store, an object store in the memory of servers, with a master that knows the places.

    this process                                  child process (mooncake_child.py)
    kv-tier-get ── socket, staging memory ──────> lane "get" ─┐
    kv-tier-put ── socket, staging memory ──────> lane "put" ─┴─> MooncakeDistributedStore ── TCP or RDMA ──> owners
                                                                   └── RPC ──> mooncake_master

The client runs in a child process, because of these measurements:

- Its set-up holds Python's global lock while no master answers: 4.5 s with one try, 91 s with the default.
- A get blocks 30 s when the owner of the object is stopped. No variable shortens that.
- When the master dies, each call takes about 4.3 s.
- An owner that dies leaves objects that `exists` names for 12 s, and that no get can read.
- A put of a key that the store has returns success and keeps the old object; while another writer's unfinished put is
  known to the master, it returns success and stores nothing.

The child owns a segment of the store (`global_segment_size`). The objects in it are lost when the server ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from pdserve.config.storage_options import StorageOptions
from pdserve.config.transfer_engines import MOONCAKE_HELP
from pdserve.errors import ConfigError
from pdserve.memory import shared
from pdserve.memory.tiers.storage import PUT_THREAD, StorageError

log = logging.getLogger(__name__)

STAGING_BYTES = 64 << 20
"""Memory of a lane that the store reads and writes; more where an object, such as a recurrent state, is larger."""
STAGING_UNIT = 2 << 20
"""The memory of a lane is a multiple of this."""
LANES = ("get", "put")
ANSWER_LIMIT_S = 120.0
"""Seconds after which a silent child is ended."""
RESTART_PAUSE_S = 2.0
OPTIONS = (
    "master_server_address", "metadata_server", "local_hostname", "protocol", "device_name", "global_segment_size",
)  # fmt: skip
_LENGTH = struct.Struct("<I")


class LaneCall(msgspec.Struct):
    """A call to the child. `sizes`: bytes of each object, which lie one behind the other in the lane's memory."""

    what: str
    keys: list[str] = msgspec.field(default_factory=list)
    sizes: list[int] = msgspec.field(default_factory=list)


class LaneAnswer(msgspec.Struct):
    """The child's answer, and its first message on each lane. `error`: why the call, or the set-up, failed."""

    ok: list[bool] = msgspec.field(default_factory=list)
    error: str = ""


@dataclasses.dataclass(frozen=True)
class MooncakeOptions:
    """Arguments of Mooncake's `setup`, in SGLang's names."""

    master_server_address: str
    metadata_server: str
    local_hostname: str
    protocol: str
    device_name: str
    global_segment_size: int
    staging_bytes: int = STAGING_BYTES
    """Memory of a lane: at least the largest object."""

    @classmethod
    def of(cls, options: StorageOptions) -> MooncakeOptions:
        """Read the options.

        Raises:
            ConfigError: an option is unknown or wrong.
        """
        options.only(OPTIONS)
        return cls(
            master_server_address=options.text("master_server_address", "127.0.0.1:50051"),
            metadata_server=options.text("metadata_server", "P2PHANDSHAKE"),
            local_hostname=options.text("local_hostname", "127.0.0.1"),
            protocol=options.text("protocol", "tcp"),
            device_name=options.text("device_name", "") if options.of_backend.get("device_name") else "",
            global_segment_size=options.size("global_segment_size", 1 << 30, least=0),
            staging_bytes=max(STAGING_BYTES, -(-options.largest_object // STAGING_UNIT) * STAGING_UNIT),
        )


class MooncakeStorage:
    """Implements `Storage`. The child is started at once, and again when it has ended; no call waits for its set-up."""

    name = "mooncake"

    def __init__(self, options: MooncakeOptions, environment: Mapping[str, str] | None = None) -> None:
        self._options, self._environment = options, dict(environment or {})
        self._lock = threading.Lock()
        self._closed = False
        self._started_at = 0.0
        self._child: _Child | None = None
        self._start()

    @classmethod
    def open(cls, options: StorageOptions) -> MooncakeStorage:
        """Start the child.

        Raises:
            ConfigError: an option is wrong, or Mooncake is not installed.
        """
        found = MooncakeOptions.of(options)
        if importlib.util.find_spec("mooncake") is None:
            raise ConfigError(f"Mooncake is not installed: {MOONCAKE_HELP}", field="hicache_storage_backend")
        return cls(found)

    @property
    def child_pid(self) -> int | None:
        """Process id of the child; None when none runs."""
        child = self._child
        return None if child is None else child.process.pid

    def exists(self, keys: Sequence[str]) -> int:
        """See `Storage.exists`."""
        lane = "put" if threading.current_thread().name == PUT_THREAD else "get"
        ok = self._call(lane, LaneCall("exists", list(keys)))
        return next((index for index, found in enumerate(ok) if not found), len(ok))

    def get_into(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """See `Storage.get_into`."""
        ok: list[bool] = []
        for first, end in _spans(buffers, self._options.staging_bytes):
            some = buffers[first:end]
            child, lane = self._lane("get")
            read = self._call("get", LaneCall("get", list(keys[first:end]), [len(one) for one in some]), child)
            for buffer, at, found in zip(some, _offsets(some), read, strict=True):
                if found:
                    buffer[:] = lane.memory[at : at + len(buffer)]
            ok += read
        return ok

    def put_from(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """See `Storage.put_from`."""
        ok: list[bool] = []
        for first, end in _spans(buffers, self._options.staging_bytes):
            some = buffers[first:end]
            child, lane = self._lane("put")
            for buffer, at in zip(some, _offsets(some), strict=True):
                lane.memory[at : at + len(buffer)] = buffer
            ok += self._call("put", LaneCall("put", list(keys[first:end]), [len(one) for one in some]), child)
        return ok

    def discard(self, keys: Sequence[str]) -> None:
        """See `Storage.discard`."""
        self._call("get", LaneCall("discard", list(keys)))

    def clear(self) -> None:
        """See `Storage.clear`."""
        self._call("put", LaneCall("clear"))

    def close(self) -> None:
        """See `Storage.close`. Ends the child, and with it the objects in its segment."""
        with self._lock:
            self._closed = True
            child, self._child = self._child, None
        if child is not None:
            child.end()

    def _call(self, name: str, call: LaneCall, child: _Child | None = None) -> list[bool]:
        child = child or self._lane(name)[0]
        try:
            answer = child.lanes[name].ask(call)
        except (OSError, msgspec.DecodeError) as error:
            self._end(child)
            raise StorageError(f"the process of Mooncake's client has ended or is silent: {error}") from error
        if answer.error:
            raise StorageError(answer.error)
        return answer.ok

    def _lane(self, name: str) -> tuple[_Child, _Lane]:
        """Return the child and its lane.

        Raises:
            StorageError: the child does not run, is still being set up, or its set-up failed.
        """
        with self._lock:
            child = self._child
            if child is None:
                if not self._closed and time.monotonic() - self._started_at > RESTART_PAUSE_S:
                    self._start()
                raise StorageError("Mooncake's client has ended; it is started again")
        lane = child.lanes[name]
        try:
            state = lane.set_up()
        except (OSError, msgspec.DecodeError) as error:
            self._end(child)
            raise StorageError(f"Mooncake's client ended during its set-up: {error}") from error
        if state is None:
            raise StorageError("Mooncake's client is being set up")
        if state:
            self._end(child)
            raise StorageError(f"Mooncake's client cannot be set up: {state}")
        return child, lane

    def _start(self) -> None:
        self._started_at = time.monotonic()
        self._child = _Child(self._options, self._environment)

    def _end(self, child: _Child) -> None:
        with self._lock:
            if self._child is child:
                self._child = None
        child.end()


class _Lane:
    """A socket to the child, and memory that both have mapped. One thread uses it."""

    def __init__(self, num_bytes: int) -> None:
        self.socket, self.theirs = socket.socketpair()
        self.memory = memoryview(shared.allocate(num_bytes))
        found = shared.find(shared.address_of(self.memory.obj), num_bytes)  # type: ignore[arg-type]
        if found is None:
            raise ConfigError("the store mooncake needs memfd", field="hicache_storage_backend")
        self.descriptor = found.descriptor
        self._is_set_up = False

    def set_up(self) -> str | None:
        """Return the error of the set-up, empty if there is none; None while it is running. Never waits."""
        if self._is_set_up:
            return ""
        self.socket.settimeout(0.0)
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        answer = receive(self.socket, LaneAnswer, 1.0)
        self._is_set_up = not answer.error
        return answer.error

    def ask(self, call: LaneCall) -> LaneAnswer:
        """Send a call; wait for its answer, at most `ANSWER_LIMIT_S` seconds.

        Raises:
            OSError: the child has ended, or is silent.
        """
        self.socket.settimeout(ANSWER_LIMIT_S)
        send(self.socket, call)
        return receive(self.socket, LaneAnswer, ANSWER_LIMIT_S)


class _Child:
    """A process with a client of the store."""

    def __init__(self, options: MooncakeOptions, environment: Mapping[str, str]) -> None:
        self.lanes = {name: _Lane(options.staging_bytes) for name in LANES}
        descriptors = [number for lane in self.lanes.values() for number in (lane.theirs.fileno(), lane.descriptor)]
        numbers = ",".join(map(str, descriptors))
        arguments = [json.dumps(dataclasses.asdict(options)), numbers, str(os.getpid())]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdserve.memory.tiers.mooncake_child", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
            pass_fds=descriptors,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
            process_group=0,
        )
        for lane in self.lanes.values():
            lane.theirs.close()

    def end(self) -> None:
        """Kill the process, which ends calls that wait for it. Idempotent."""
        self.process.kill()
        for lane in self.lanes.values():
            with contextlib.suppress(OSError):
                lane.socket.shutdown(socket.SHUT_RDWR)
        self.process.wait()


def send(target: socket.socket, message: LaneCall | LaneAnswer) -> None:
    """Send a message with its length."""
    encoded = msgspec.msgpack.encode(message)
    target.sendall(_LENGTH.pack(len(encoded)) + encoded)


Message = TypeVar("Message", LaneCall, LaneAnswer)


def receive(source: socket.socket, kind: type[Message], timeout_s: float | None) -> Message:
    """Receive a message.

    Raises:
        OSError: the other end has closed, or nothing came for `timeout_s` seconds (None: no limit).
    """
    source.settimeout(timeout_s)
    (length,) = _LENGTH.unpack(_exactly(source, _LENGTH.size))
    return msgspec.msgpack.decode(_exactly(source, length), type=kind)


def _exactly(source: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = source.recv(count - len(parts))
        if not part:
            raise ConnectionError("the connection is closed")
        parts += part
    return bytes(parts)


def _spans(buffers: Sequence[memoryview], most: int) -> list[tuple[int, int]]:
    """Return `(first, end)` of buffers that fit in a lane's memory of `most` bytes together.

    Raises:
        StorageError: an object is larger.
    """
    spans, first, size = [], 0, 0
    for index, buffer in enumerate(buffers):
        if len(buffer) > most:
            raise StorageError(f"an object of {len(buffer)} bytes is too large; the largest has {most}")
        size += len(buffer)
        if size > most:
            spans.append((first, index))
            first, size = index, len(buffer)
    if first < len(buffers):
        spans.append((first, len(buffers)))
    return spans


def _offsets(buffers: Sequence[memoryview]) -> list[int]:
    return [sum(len(one) for one in buffers[:index]) for index in range(len(buffers))]
