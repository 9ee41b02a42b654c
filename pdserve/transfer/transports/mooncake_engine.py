"""Typed door to the untyped `mooncake.engine`, and the way to one peer through it. Used by `mooncake` only."""

from __future__ import annotations

import contextlib
import importlib
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.transport import Copy, MemoryRegion

PROBE_TIMEOUT_S = 3.0
INSTALL_HELP = (
    "install the engine: `pip install mooncake-transfer-engine-non-cuda` on a machine without CUDA "
    "(`mooncake-transfer-engine` for CUDA 12, `mooncake-transfer-engine-cuda13` for CUDA 13), "
    "and `apt-get install libibverbs1`"
)


def _new_native() -> Any:
    try:
        return importlib.import_module("mooncake.engine").TransferEngine()
    except ImportError as error:
        raise ConfigError(
            f"transfer backend mooncake cannot be loaded ({error}); {INSTALL_HELP}",
            field="disaggregation_transfer_backend",
        ) from error


class Engine:
    """One native TransferEngine. Calls are thread-safe and release the GIL."""

    def __init__(self, host: str, protocol: str, ib_device: str) -> None:
        self._native = _new_native()
        if (code := int(self._native.initialize(host, "P2PHANDSHAKE", protocol, ib_device))) != 0:
            raise ConfigError(f"mooncake does not start on host {host!r} with {protocol}: code {code}", field="host")
        self.session = f"{host}:{self._native.get_rpc_port()}"

    def register(self, region: MemoryRegion) -> None:
        """Register one region. Raises TransferError with the engine's code."""
        if (code := int(self._native.register_memory(region.address, region.num_bytes))) != 0:
            raise TransferError(f"mooncake refuses {region}: code {code}", code="bad_region", retryable=False)

    def reach(self, session: str) -> None:
        """Probe a peer, and fetch where its regions and its data port are.

        A stopped peer would hold both calls up for a minute each, so they run in a thread that is left behind.

        Raises:
            TransferError: nobody answers within `PROBE_TIMEOUT_S`; nothing was written.
        """
        answers: queue.Queue[int] = queue.Queue()
        native = self._native

        def ask() -> None:
            code = int(native.send_probe(session))
            if code == 0:
                native.get_first_buffer_address(session)
            answers.put(code)

        threading.Thread(target=ask, name="mooncake-probe", daemon=True).start()
        try:
            code = answers.get(timeout=PROBE_TIMEOUT_S)
        except queue.Empty:
            raise TransferError(f"the transfer engine at {session} does not answer", code="peer_unreachable") from None
        if code != 0:
            raise TransferError(f"no transfer engine at {session}: code {code}", code="peer_unreachable")

    def submit_batch(self, session: str, copies: Sequence[Copy]) -> int:
        """Start a batch; 0 when the engine refuses. Each batch must go through `finish_batch` once."""
        sources = [copy.source for copy in copies]
        destinations = [copy.destination for copy in copies]
        lengths = [copy.num_bytes for copy in copies]
        return int(self._native.batch_transfer_async_write(session, sources, destinations, lengths))

    def finish_batch(self, batch: int) -> int:
        """Wait for a batch, spinning. 0 when all arrived, -1 when one failed (the others may still be under way)."""
        return int(self._native.get_batch_transfer_status([batch]))

    def submit_one(self, session: str, copy: Copy) -> int:
        """Start one copy; 0 when the engine refuses."""
        return int(self._native.transfer_submit_write(session, copy.source, copy.destination, copy.num_bytes))

    def check(self, submission: int) -> int:
        """0 under way, 1 arrived, negative failed. After anything but 0 the submission is gone."""
        return int(self._native.transfer_check_status(submission))

    def destroy(self) -> None:
        """Close all connections and end all threads: no byte moves after this. Takes up to a second."""
        self._native = None


class Window:
    """Permits for entries under way to one peer. Thread-safe."""

    def __init__(self, num_permits: int) -> None:
        self._free = num_permits
        self._returned = threading.Condition()

    @contextlib.contextmanager
    def hold(self, num_entries: int) -> Iterator[None]:
        """Hold `num_entries` permits, waiting for them; each holder ends within its own time limit."""
        with self._returned:
            self._returned.wait_for(lambda: self._free >= num_entries)
            self._free -= num_entries
        try:
            yield
        finally:
            with self._returned:
                self._free += num_entries
                self._returned.notify_all()


class Link:
    """The way to one peer. With an engine of its own (`owned`), the link can be cut, and then no byte moves on it.

    open ── doom ──> doomed ── last borrower leaves, engine destroyed ──> cut
    """

    def __init__(self, engine: Engine, session: str, *, owned: bool, num_permits: int) -> None:
        self.session = session
        self.window = Window(num_permits)
        self._engine = engine
        self._owned = owned
        self._lock = threading.Lock()
        self._num_borrowers = 0
        self._doomed = False
        self._cut = threading.Event()

    @property
    def doomed(self) -> bool:
        """True once a write on it failed, or it was given up."""
        return self._doomed

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Engine]:
        """The engine for the length of one batch. Raises TransferError (settled) when the link is doomed."""
        with self._lock:
            if self._doomed:
                raise TransferError(f"the link to {self.session} was given up", code="link_down")
            self._num_borrowers += 1
        try:
            yield self._engine
        finally:
            with self._lock:
                self._num_borrowers -= 1
                last = self._doomed and self._num_borrowers == 0
            if last:
                self._end()

    def doom(self) -> None:
        """Let nobody in any more; cut the link when the last borrower has left. Any thread, any number of times."""
        with self._lock:
            if self._doomed:
                return
            self._doomed = True
            last = self._num_borrowers == 0
        if last:
            self._end()

    def await_cut(self, timeout_s: float) -> bool:
        """True when no byte can move on this link any more; False after `timeout_s`, or when the engine is shared."""
        return self._owned and self._cut.wait(timeout_s)

    def _end(self) -> None:
        if self._owned:
            self._engine.destroy()
        self._cut.set()
