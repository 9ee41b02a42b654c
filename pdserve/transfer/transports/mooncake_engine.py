"""Typed door to the untyped `mooncake.engine`, and the set of engines of one process. Used by `mooncake` only.

engine 0: started first, receives for the life of the process, and sends until it is renewed
engine n: sends only; made by `renew`, destroyed when the next one takes over and its last write has returned
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.transport import Copy, MemoryRegion

logger = logging.getLogger(__name__)

RENEW_INTERVAL_S = 5.0
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
    """One native TransferEngine. All calls are thread-safe and release the GIL."""

    def __init__(self, host: str, protocol: str, ib_device: str) -> None:
        self._native = _new_native()
        if (code := int(self._native.initialize(host, "P2PHANDSHAKE", protocol, ib_device))) != 0:
            raise ConfigError(f"mooncake does not start on host {host!r} with {protocol}: code {code}", field="host")
        self.session = f"{host}:{self._native.get_rpc_port()}"
        self.num_borrowers = 0

    def register(self, region: MemoryRegion) -> None:
        """Register one region. Raises TransferError with the engine's code."""
        if (code := int(self._native.register_memory(region.address, region.num_bytes))) != 0:
            raise TransferError(f"mooncake refuses {region}: code {code}", code="bad_region", retryable=False)

    def unregister(self, region: MemoryRegion) -> None:
        """Forget one region. This is no fence: writes under way still land."""
        self._native.unregister_memory(region.address)

    def probe(self, session: str) -> int:
        """0 when something answers at `session`; it may be another process than before."""
        return int(self._native.send_probe(session))

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


class EngineSet:
    """The receiving engine, and the sending one that can be replaced. Thread-safe."""

    def __init__(self, host: str, protocol: str, ib_device: str) -> None:
        self._start = (host, protocol, ib_device)
        self._receiver = Engine(*self._start)
        self._sender = self._receiver
        self._regions: list[MemoryRegion] = []
        self._retired: list[Engine] = []
        self._lock = threading.Lock()
        self._renewed_at = float("-inf")

    @property
    def session(self) -> str:
        """Where peers reach the receiving engine."""
        return self._receiver.session

    @property
    def sender(self) -> Engine:
        """The engine that new writes use."""
        return self._sender

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register with both engines."""
        with self._lock:
            for region in regions:
                for engine in {self._receiver, self._sender}:
                    engine.register(region)
                self._regions.append(region)

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Engine]:
        """The sending engine, kept alive for the length of a write."""
        with self._lock:
            engine = self._sender
            engine.num_borrowers += 1
        try:
            yield engine
        finally:
            with self._lock:
                engine.num_borrowers -= 1

    def renew(self, reason: str) -> None:
        """Send through a new engine from now on; not more often than every `RENEW_INTERVAL_S` seconds."""
        with self._lock:
            if time.monotonic() - self._renewed_at < RENEW_INTERVAL_S:
                return
            self._renewed_at = time.monotonic()
            logger.warning("new sending engine: %s", reason)
            engine = Engine(*self._start)
            for region in self._regions:
                engine.register(region)
            if self._sender is not self._receiver:
                self._retired.append(self._sender)
            self._sender = engine
            self._retired = [old for old in self._retired if old.num_borrowers]

    def close(self) -> None:
        """Drop all engines."""
        with self._lock:
            for region in self._regions:
                for engine in {self._receiver, self._sender}:
                    engine.unregister(region)
            self._regions.clear()
            self._retired.clear()
