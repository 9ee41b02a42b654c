"""Typed wrapper of the untyped `mooncake.engine`. Used by `mooncake` only."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import queue
import socket
import struct
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from pdserve.base.hosts import LOOPBACK
from pdserve.base.listeners import attach_filter, close_pending, tcp_sockets
from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.transport import Copy, MemoryRegion
from pdserve.transfer.transports.receiving import UNREACHABLE_HINT

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 3.0
BRIEF_TIMEVAL = struct.pack("@ll", 0, 1000)
"""One millisecond as a `struct timeval`."""
MAX_STARTS = 16
PORT_TAKEN = "Address already in use"
INSTALL_HELP = (
    "install the engine: `pip install mooncake-transfer-engine-non-cuda` on a machine without CUDA "
    "(`mooncake-transfer-engine` for CUDA 12, `mooncake-transfer-engine-cuda13` for CUDA 13), "
    "and `apt-get install libibverbs1`"
)


def new_native() -> Any:
    """Make a native engine. Raises ConfigError when the library is missing."""
    try:
        return importlib.import_module("mooncake.engine").TransferEngine()
    except ImportError as error:
        raise ConfigError(
            f"transfer backend mooncake cannot be loaded ({error}); {INSTALL_HELP}",
            field="disaggregation_transfer_backend",
        ) from error


def start_native(host: str, protocol: str, ib_device: str, new_native: Callable[[], Any] = new_native) -> Any:
    """Return a native engine that listens.

    The engine picks free ports and binds them later, so another process may take them first; then it is started again.

    Raises:
        ConfigError: the engine does not start on this host.
        TransferError: its ports were taken each time, or it fails in another way.
    """
    for _ in range(MAX_STARTS):
        native = new_native()
        try:
            code = int(native.initialize(host, "P2PHANDSHAKE", protocol, ib_device))
        except RuntimeError as error:
            if PORT_TAKEN not in str(error):
                raise TransferError(f"mooncake does not start: {error}", code="engine_failed") from error
            log.info("mooncake is started once more: %s", error)
            continue
        if code != 0:
            raise ConfigError(f"mooncake does not start on host {host!r} with {protocol}: code {code}", field="host")
        return native
    raise TransferError(f"mooncake does not start: its ports were taken {MAX_STARTS} times", code="engine_failed")


class MooncakeEngine:
    """One native TransferEngine, made by `new_native`. Calls are thread-safe and release the GIL."""

    def __init__(self, host: str, protocol: str, ib_device: str, new_native: Callable[[], Any] = new_native) -> None:
        self._native = start_native(host, protocol, ib_device, new_native)
        self._port = int(self._native.get_rpc_port())
        self._lock = threading.Lock()
        self._num_probes = 0
        self.session = f"{host}:{self._port}"
        self.address = f"{self.session}/{uuid.uuid4().hex[:16]}"
        """`host:port/incarnation`: a session may be reused, an address is not."""

    def register(self, region: MemoryRegion) -> None:
        """Register one region. Raises TransferError with the engine's code."""
        if (code := int(self._native.register_memory(region.address, region.num_bytes))) != 0:
            raise TransferError(f"mooncake refuses {region}: code {code}", code="bad_region", retryable=False)

    def reach(self, session: str) -> None:
        """Probe a peer, and fetch the addresses of its regions and its data port.

        A stopped peer would block both calls for a minute each, so they run in a thread that is abandoned on timeout.
        The thread holds the engine; an engine that is destroyed meanwhile ends with the last such thread.

        Raises:
            TransferError: no peer answers within `PROBE_TIMEOUT_S`; nothing was written.
        """
        answers: queue.Queue[int] = queue.Queue()

        def ask(native: Any) -> None:
            try:
                code = int(native.send_probe(session))
                answers.put(code if code != 0 or open_session(native, session) else -1)
            finally:
                with self._lock:
                    self._num_probes -= 1
                    given_up = self._native is None and self._num_probes == 0
                if given_up:
                    speed_up_shutdown(self._port)

        with self._lock:  # no local variable for the engine: a traceback would keep it alive
            self._num_probes += 1
            thread = threading.Thread(target=ask, args=(self._native,), name="mooncake-probe", daemon=True)
        thread.start()
        try:
            code = answers.get(timeout=PROBE_TIMEOUT_S)
        except queue.Empty:
            message = f"the transfer engine at {session} does not answer. {UNREACHABLE_HINT}"
            raise TransferError(message, code="peer_unreachable") from None
        if code != 0:
            message = f"no transfer engine at {session}: code {code}. {UNREACHABLE_HINT}"
            raise TransferError(message, code="peer_unreachable")

    def submit_batch(self, session: str, copies: Sequence[Copy]) -> int:
        """Start a batch; 0 when the engine refuses. Each batch must go through `finish_batch` once."""
        sources = [copy.source for copy in copies]
        destinations = [copy.destination for copy in copies]
        lengths = [copy.num_bytes for copy in copies]
        return int(self._native.batch_transfer_async_write(session, sources, destinations, lengths))

    def finish_batch(self, batch: int) -> int:
        """Wait for a batch, spinning. Returns 0 when all arrived, -1 when one failed (the rest may be under way)."""
        return int(self._native.get_batch_transfer_status([batch]))

    def submit_one(self, session: str, copy: Copy) -> int:
        """Start one copy; 0 when the engine refuses."""
        return int(self._native.transfer_submit_write(session, copy.source, copy.destination, copy.num_bytes))

    def check(self, submission: int) -> int:
        """Return 0 for under way, 1 for arrived, negative for failed. Any result but 0 releases the submission."""
        return int(self._native.transfer_check_status(submission))

    def destroy(self) -> None:
        """Close all connections and end all threads: no byte moves after this. Takes some milliseconds."""
        with self._lock:
            native, self._native = self._native, None
            ends = native is not None and self._num_probes == 0
        if ends:
            speed_up_shutdown(self._port)


class MooncakeReceiver(MooncakeEngine):
    """An engine that never calls a peer, so that no probe thread can keep it alive."""

    def destroy(self) -> None:
        """See `MooncakeEngine`. Asserts that the engine is gone, since a fence depends on it."""
        alive = None if self._native is None else weakref.ref(self._native)
        super().destroy()
        if alive is not None and alive() is not None:
            gc.collect()  # for example an exception's traceback
            assert alive() is None, "a reference to the destroyed engine is left"


def open_session(native: Any, session: str) -> bool:
    """Make an engine fetch the addresses of a peer's regions and its data port; False when the peer does not answer.

    An empty batch does that and releases the GIL. The call that requests an address keeps the GIL: with a peer that was
    stopped between two answers, it would block all threads of this process for a minute.
    """
    batch = int(native.batch_transfer_async_write(session, [], [], []))
    return batch != 0 and int(native.get_batch_transfer_status([batch])) == 0


def speed_up_shutdown(port: int) -> None:
    """Make the engine that answers on `port` end in milliseconds. Call it right before its last reference is dropped.

    The destructor joins the engine's accept thread and holds the GIL meanwhile. That thread accepts a connection, reads
    from it with a timeout of 5 s per read, and only then checks whether to stop. A silent connection would block all
    threads of this process. This function replaces the listening socket by one with a timeout of 1 ms, and wakes the
    thread with one connection, which a filter at the port must let through. It also shuts down the connections that the
    thread reads from. If a step fails, the destructor waits as before.
    """
    with contextlib.suppress(OSError):
        for descriptor, _, listener in tcp_sockets(listening=True):
            if listener.getsockname()[1] != port:
                continue
            with socket.create_server((LOOPBACK[0], 0)) as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, BRIEF_TIMEVAL)
                os.dup2(other.fileno(), descriptor, inheritable=False)
                close_pending(listener)
                attach_filter(listener, LOOPBACK)
                loopback = LOOPBACK[listener.family == socket.AF_INET6]
                socket.create_connection((loopback, port), timeout=PROBE_TIMEOUT_S).close()
    with contextlib.suppress(OSError):
        for _, _, connection in tcp_sockets(listening=False):
            with contextlib.suppress(OSError):
                if connection.getsockname()[1] == port:
                    connection.shutdown(socket.SHUT_RDWR)
