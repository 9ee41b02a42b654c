"""AMD's MoRI-IO: RDMA between GPUs. Written against its published Python interface; not tested on hardware.

The engine writes between memory descriptors, at offsets, while `Transport` uses absolute addresses. So an address holds
the engine's description, and the start and the descriptor of each region.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.transport import Copy, MemoryRegion, TransportFacts
from pdserve.transfer.transports.host_info import (
    choose_protocol,
    decode_card,
    encode_card,
    not_an_address,
    place_of,
    wanted_nics,
)
from pdserve.transfer.transports.link import RegionSet
from pdserve.transfer.transports.receiving import EnginePorts, ReceivingEngines

DRAIN_TIMEOUT_S = 30.0
STALL_S = 15.0
"""Seconds after which an unfinished batch is given up, plus time for its length."""
SLOWEST_BYTES_PER_S = 10e6
POLL_S = 0.0002
BATCH_COPIES = 1024
PREFIX = "mori:"
FIELD = "disaggregation_transfer_backend"


class MoriRegion(msgspec.Struct, frozen=True, array_like=True):
    """A registered region in an address."""

    address: int
    num_bytes: int
    descriptor: bytes


class MoriEndpointInfo(msgspec.Struct, frozen=True):
    """Content of an address. The engine's description identifies one incarnation of an engine."""

    engine: bytes
    regions: tuple[MoriRegion, ...]


def encode_address(card: MoriEndpointInfo) -> str:
    """Encode the address content as text."""
    return encode_card(PREFIX, card)


def decode_address(address: str) -> MoriEndpointInfo:
    """Decode an address. Raises TransferError (settled, not retryable) when it is malformed."""
    card = decode_card(PREFIX, address, MoriEndpointInfo)
    if not card.engine:
        raise not_an_address(PREFIX, address)
    return card


@dataclasses.dataclass(frozen=True)
class DescribedRegion:
    """Regions with the engine's descriptors, here or at a peer."""

    regions: tuple[tuple[MemoryRegion, Any], ...]

    def find(self, address: int, num_bytes: int) -> int | None:
        """Return the index of the region that holds the range; None when no region does."""
        for index, (region, _) in enumerate(self.regions):
            if region.address <= address and address + num_bytes <= region.address + region.num_bytes:
                return index
        return None


@dataclasses.dataclass(frozen=True)
class MoriPeer:
    """A connected peer."""

    engine: Any
    memory: DescribedRegion


class MoriEngine:
    """One IOEngine and its descriptors of local memory."""

    def __init__(self, native: Any, host: str) -> None:
        self._native = native
        self.memory = DescribedRegion(())
        try:
            self.native = native.IOEngine(f"pdserve-{uuid.uuid4().hex[:16]}", native.IOEngineConfig(host=host, port=0))
            self.native.create_backend(native.BackendType.RDMA, native.RdmaBackendConfig())
        except Exception as error:
            raise ConfigError(f"mori does not start on host {host!r}: {error!r}", field=FIELD) from error

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register regions. Raises TransferError when the engine refuses one."""
        self.memory = DescribedRegion((*self.memory.regions, *((region, self._describe(region)) for region in regions)))

    def address(self) -> str:
        """Return the engine's description and those of all regions, as text."""
        regions = (MoriRegion(region.address, region.num_bytes, it.pack()) for region, it in self.memory.regions)
        return encode_address(MoriEndpointInfo(self.native.get_engine_desc().pack(), tuple(regions)))

    def destroy(self) -> None:
        """Drop the references to the engine, which ends it: its interface has no call for that."""
        self.memory = DescribedRegion(())
        self.native = None

    def _describe(self, region: MemoryRegion) -> Any:
        place, kinds = place_of(region.address), self._native.MemoryLocationType
        device, kind = (-1, kinds.CPU) if place.device is None else (place.device, kinds.GPU)
        try:
            return self.native.register_memory(region.address, region.num_bytes, device, kind)
        except Exception as error:
            raise TransferError(f"mori refuses {region}: {error!r}", code="bad_region", retryable=False) from None


class MoriTransport:
    """Writes through MoRI's IOEngine. For threads see `Transport`."""

    name = "mori"
    drain_timeout_s = DRAIN_TIMEOUT_S
    fence_drain_timeout_s = DRAIN_TIMEOUT_S

    def __init__(self, native: Any, host: str) -> None:
        self.facts = TransportFacts(protocol="rdma", moves_bytes=True)
        self._native = native
        self._regions = RegionSet()
        self._lock = threading.Lock()
        self._peers: dict[str, MoriPeer] = {}
        self._abandoned: list[Any] = []  # the engine still writes into the states of transfers that were given up
        self._base = MoriEngine(native, host)
        self._receivers = ReceivingEngines(
            EnginePorts(), lambda: MoriEngine(native, host), lambda engine: engine.register(self._regions.regions)
        )

    @classmethod
    def open(cls, host: str, ib_device: str | None) -> MoriTransport:
        """Start the engine. Raises ConfigError when the library or a NIC is missing, or the engine does not start."""
        choose_protocol(ib_device)
        if nics := wanted_nics(ib_device):
            os.environ.setdefault("MORI_RDMA_DEVICES", ",".join(nics))
        try:
            native = importlib.import_module("mori.io")
        except ImportError as error:
            raise ConfigError(
                f"transfer backend mori cannot be loaded ({error}); `pip install amd-mori` and ROCm", field=FIELD
            ) from error
        return cls(native, host)

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make regions readable and writable through the engine."""
        self._regions.add(regions)
        self._base.register(regions)

    def address(self) -> str:
        """Return the engine's description and those of all regions, as text."""
        return self._base.address()

    def open_receiver(self, peer: str) -> str:
        """Create a receiving engine for `peer`, which registers all memory again."""
        return self._receivers.open(peer).address()

    def allow_sources(self, peer: str, addresses: Sequence[str]) -> None:
        """Do nothing: which sources its engine needs is not known."""

    def fence(self, peer: str) -> bool:
        """Drop the engine of `peer`. Not measured: writes under way drain for `fence_drain_timeout_s`."""
        return self._receivers.fence(peer)

    def connect(self, address: str) -> None:
        """Register the peer with the engine, which connects with the first write."""
        card = decode_address(address)
        try:
            engine = self._native.EngineDesc.unpack(card.engine)
            regions = tuple(
                (MemoryRegion(it.address, it.num_bytes), self._native.MemoryDesc.unpack(it.descriptor))
                for it in card.regions
            )
            with self._lock:
                if address not in self._peers:
                    self._base.native.register_remote_engine(engine)
                    self._peers[address] = MoriPeer(engine, DescribedRegion(regions))
        except Exception as error:
            raise TransferError(f"mori refuses the peer: {error!r}", code="peer_unreachable") from None

    def disconnect(self, address: str) -> None:
        """Forget a peer."""
        with self._lock:
            peer = self._peers.pop(address, None)
        if peer is not None:
            with contextlib.suppress(Exception):  # it may be gone already
                self._base.native.deregister_remote_engine(peer.engine)

    def write(self, address: str, copies: Sequence[Copy]) -> None:
        """Write batches of at most `BATCH_COPIES`, one after the other. A failure that the engine reports is not
        settled.
        """
        with self._lock:
            peer = self._peers.get(address)
        if peer is None:
            raise TransferError(f"not connected to {address[:100]}", code="not_connected", retryable=False)
        self._regions.check_sources(copies)
        full = [(copy, *self._find(peer, copy)) for copy in copies if copy.num_bytes]
        for first in range(0, len(full), BATCH_COPIES):
            self._write_batch(peer, full[first : first + BATCH_COPIES])

    def close(self) -> None:
        """Destroy all engines."""
        with self._lock:
            addresses = list(self._peers)
        for address in addresses:
            self.disconnect(address)
        self._receivers.close()
        self._base.destroy()

    def _find(self, peer: MoriPeer, copy: Copy) -> tuple[int, int]:
        """Return the regions of a copy, here and at the peer. Raises TransferError (settled) when the peer has none."""
        here = self._base.memory.find(copy.source, copy.num_bytes)
        there = peer.memory.find(copy.destination, copy.num_bytes)
        assert here is not None, "sources were checked"
        if there is None:
            raise TransferError(
                f"{copy.destination:#x} + {copy.num_bytes} bytes is not registered at the peer",
                code="bad_range",
                retryable=False,
            )
        return here, there

    def _write_batch(self, peer: MoriPeer, batch: Sequence[tuple[Copy, int, int]]) -> None:
        """Write a batch with one engine call, one row per pair of regions; then sleep until all rows have ended."""
        rows: dict[tuple[int, int], list[Copy]] = {}
        for copy, here, there in batch:
            rows.setdefault((here, there), []).append(copy)
        sources = [self._base.memory.regions[here] for here, _ in rows]
        destinations = [peer.memory.regions[there] for _, there in rows]
        try:
            states = self._base.native.batch_write(
                [descriptor for _, descriptor in sources],
                [
                    [c.source - start.address for c in row]
                    for row, (start, _) in zip(rows.values(), sources, strict=True)
                ],
                [descriptor for _, descriptor in destinations],
                [
                    [c.destination - start.address for c in row]
                    for row, (start, _) in zip(rows.values(), destinations, strict=True)
                ],
                [[c.num_bytes for c in row] for row in rows.values()],
                [self._base.native.allocate_transfer_uid() for _ in rows],
            )
        except Exception as error:
            raise TransferError(f"mori: {error!r}", code="engine_failed", settled=False) from None
        deadline = time.monotonic() + STALL_S + sum(copy.num_bytes for copy, _, _ in batch) / SLOWEST_BYTES_PER_S
        if (failure := _await_all(states, deadline)) is not None:
            self._abandoned.append(states)
            raise TransferError(f"mori: {failure}", code="engine_failed", settled=False)


def _await_all(states: Sequence[Any], deadline: float) -> str | None:
    """Return None when all transfers have arrived, else the failure of the first that did not."""
    for state in states:
        while not state.Succeeded():
            if state.Failed():
                return str(state.Message())
            if time.monotonic() > deadline:
                return "no end within the time limit"
            time.sleep(POLL_S)
    return None
