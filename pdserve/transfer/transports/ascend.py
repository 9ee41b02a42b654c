"""Ascend NPUs through `memfabric_hybrid`. Written against its published Python interface; not tested on hardware.

The engine requires each process to be either `Prefill`, which writes, or `Decode`, which is written to. A transport
does not know its role. So a process starts with one `Decode` engine, and adds one for each peer that writes to it. Its
first connection starts a `Prefill` engine.

    ASCEND_MF_STORE_URL           tcp://host:port of memfabric's store; required
    ASCEND_MF_TRANSFER_PROTOCOL   sdma (default), device_rdma, host_rdma
    ASCEND_DEVICE_ID              number of this process's NPU, default 0
"""

from __future__ import annotations

import importlib
import os
import threading
import uuid
from collections.abc import Sequence
from typing import Any

from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.transport import Copy, MemoryRegion, TransportFacts
from pdserve.transfer.transports.link import RegionSet
from pdserve.transfer.transports.receiving import EnginePorts, ReceivingEngines

DRAIN_TIMEOUT_S = 30.0
BATCH_COPIES = 1024
PROTOCOLS = ("sdma", "device_rdma", "host_rdma")
FIELD = "disaggregation_transfer_backend"


def session_of(address: str) -> str:
    """Return the engine's session in `host:port/incarnation`. Raises TransferError (settled, not retryable)."""
    session, _, incarnation = address.partition("/")
    host, _, port = session.rpartition(":")
    if not (host and incarnation and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise TransferError(f"not an ascend address: {address[:100]!r}", code="bad_address", retryable=False)
    return session


class AscendReceiver:
    """A `Decode` engine that one peer writes to."""

    def __init__(self, native: Any, session: str) -> None:
        self.native = native
        self.address = f"{session}/{uuid.uuid4().hex[:16]}"

    def destroy(self) -> None:
        """Destroy this engine only; `unInitialize` would end the library for the whole process."""
        self.native.destroy()


class AscendTransport:
    """Writes through memfabric's TransferEngine. For threads see `Transport`."""

    name = "ascend"
    drain_timeout_s = DRAIN_TIMEOUT_S
    fence_drain_timeout_s = DRAIN_TIMEOUT_S

    def __init__(self, native: Any, host: str, store_url: str, protocol: str, device: int) -> None:
        self.facts = TransportFacts(protocol=protocol, moves_bytes=True)
        self._native = native
        self._host = host
        self._store_url = store_url
        self._operation = native.TransferEngine.TransDataOpType.__members__[protocol.upper()]
        self._device = device
        self._regions = RegionSet()
        self._lock = threading.Lock()
        self._peers: dict[str, str] = {}
        self._sender: Any = None
        self._base = AscendReceiver(*self._start("Decode"))
        self._receivers = ReceivingEngines(
            EnginePorts(),
            lambda: AscendReceiver(*self._start("Decode")),
            lambda receiver: _register(receiver.native, self._regions.regions),
        )

    @classmethod
    def open(cls, host: str, ib_device: str | None) -> AscendTransport:
        """Start the receiving engine. Raises ConfigError when a setting or the library is missing, or it does not
        start.
        """
        store_url = os.environ.get("ASCEND_MF_STORE_URL", "")
        protocol = os.environ.get("ASCEND_MF_TRANSFER_PROTOCOL", "sdma").lower()
        device = os.environ.get("ASCEND_DEVICE_ID", "0")
        if not store_url:
            raise ConfigError("transfer backend ascend needs ASCEND_MF_STORE_URL, tcp://host:port", field=FIELD)
        if protocol not in PROTOCOLS:
            raise ConfigError(f"ASCEND_MF_TRANSFER_PROTOCOL is {protocol!r}, not one of {', '.join(PROTOCOLS)}")
        if not device.isdecimal():
            raise ConfigError(f"ASCEND_DEVICE_ID is {device!r}, not the number of an NPU")
        try:
            native = importlib.import_module("memfabric_hybrid")
        except ImportError as error:
            raise ConfigError(
                f"transfer backend ascend cannot be loaded ({error}); `pip install memfabric-hybrid` and CANN",
                field=FIELD,
            ) from error
        return cls(native, host, store_url, protocol, int(device))

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make regions writable for peers, and readable for `write`."""
        self._regions.add(regions)
        with self._lock:
            engines = [self._base.native] if self._sender is None else [self._base.native, self._sender]
        for engine in engines:
            _register(engine, regions)

    def address(self) -> str:
        """`host:port/incarnation`."""
        return self._base.address

    def open_receiver(self, peer: str) -> str:
        """Create a `Decode` engine for `peer`, which registers all memory again."""
        return self._receivers.open(peer).address

    def allow_sources(self, peer: str, addresses: Sequence[str]) -> None:
        """Do nothing: which sources its engines need is not known."""

    def fence(self, peer: str) -> bool:
        """Destroy the engine of `peer`. Not measured: writes under way drain for `fence_drain_timeout_s`."""
        return self._receivers.fence(peer)

    def connect(self, address: str) -> None:
        """Start the sending engine for the first peer. The engine looks up the peer at the first write."""
        session = session_of(address)
        with self._lock:
            if self._sender is None:
                try:
                    sender, _ = self._start("Prefill")
                except ConfigError as error:
                    raise TransferError(str(error), code="engine_failed") from None
                _register(sender, self._regions.regions)
                self._sender = sender
            self._peers[address] = session

    def disconnect(self, address: str) -> None:
        """Forget a peer."""
        with self._lock:
            self._peers.pop(address, None)

    def write(self, address: str, copies: Sequence[Copy]) -> None:
        """Write batches of at most `BATCH_COPIES`, one after the other. A failure that the engine reports is not
        settled.
        """
        with self._lock:
            session, sender = self._peers.get(address), self._sender
        if session is None:
            raise TransferError(f"not connected to {address}", code="not_connected", retryable=False)
        self._regions.check_sources(copies)
        full = [copy for copy in copies if copy.num_bytes]
        for first in range(0, len(full), BATCH_COPIES):
            batch = full[first : first + BATCH_COPIES]
            code = int(
                sender.batch_transfer_sync_write(
                    session,
                    [copy.source for copy in batch],
                    [copy.destination for copy in batch],
                    [copy.num_bytes for copy in batch],
                )
            )
            if code != 0:
                raise TransferError(
                    f"write of {len(batch)} copies to {session}: code {code}", code="engine_failed", settled=False
                )

    def close(self) -> None:
        """Destroy all engines."""
        with self._lock:
            self._peers.clear()
            sender, self._sender = self._sender, None
        self._receivers.close()
        if sender is not None:
            sender.unInitialize()
        self._base.native.unInitialize()

    def _start(self, role: str) -> tuple[Any, str]:
        """Start an engine; return it and its session. Raises ConfigError with the engine's code."""
        engine = self._native.TransferEngine()
        session = f"{self._host}:{engine.get_rpc_port()}"
        code = int(engine.initialize(self._store_url, session, role, self._device, self._operation))
        if code != 0:
            raise ConfigError(
                f"memfabric does not start as {role} with store {self._store_url}: code {code}", field=FIELD
            )
        return engine, session


def _register(engine: Any, regions: Sequence[MemoryRegion]) -> None:
    addresses, lengths = [region.address for region in regions], [region.num_bytes for region in regions]
    if regions and (code := int(engine.batch_register_memory(addresses, lengths))) != 0:
        raise TransferError(f"memfabric refuses {list(regions)}: code {code}", code="bad_region", retryable=False)
