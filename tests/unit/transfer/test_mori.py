"""The mori adapter against a recording stub of `mori.io`, with the signatures of its Python package."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import itertools
import sys
import types
import weakref
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest

from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.registry import open_transport
from pdserve.transfer.transport import Copy, MemoryRegion, Transport
from pdserve.transfer.transports import mori
from pdserve.transfer.transports.mori import PREFIX, decode_address

PORTS = itertools.count(30_000)


class BackendType(enum.Enum):
    RDMA = 2


class MemoryLocationType(enum.Enum):
    CPU = 1
    GPU = 2


@dataclasses.dataclass(frozen=True)
class IOEngineConfig:
    host: str = ""
    port: int = 0


@dataclasses.dataclass(frozen=True)
class RdmaBackendConfig:
    qp_per_transfer: int = 1


class Packed(msgspec.Struct, frozen=True):
    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> Packed:
        return msgspec.msgpack.decode(data, type=cls)


class EngineDesc(Packed, frozen=True):
    key: str
    host: str
    port: int


class MemoryDesc(Packed, frozen=True):
    engine_key: str
    data: int
    size: int
    device_id: int
    loc: str


class TransferStatus:
    """Arrived, failed, or under way for so many more looks."""

    def __init__(self, looks: int, message: str = "") -> None:
        self._looks = looks
        self._message = message

    def Succeeded(self) -> bool:
        self._looks -= 1
        return self._looks < 0 and not self._message

    def Failed(self) -> bool:
        return bool(self._message)

    def Message(self) -> str:
        return self._message


class IOEngine:
    """Records; a batch is a memmove per entry, and its states take some looks to arrive."""

    made: list[IOEngine]
    message = ""
    looks = 3

    def __init__(self, key: str, config: IOEngineConfig) -> None:
        self.desc = EngineDesc(key, config.host, next(PORTS))
        self.backends: list[tuple[BackendType, RdmaBackendConfig]] = []
        self.remotes: dict[str, EngineDesc] = {}
        self.batches: list[tuple[list[list[int]], list[list[int]], list[list[int]], list[int]]] = []
        self.made.append(self)

    def create_backend(self, type: BackendType, config: RdmaBackendConfig) -> None:
        self.backends.append((type, config))

    def get_engine_desc(self) -> EngineDesc:
        return self.desc

    def register_remote_engine(self, engine_desc: EngineDesc) -> None:
        self.remotes[engine_desc.key] = engine_desc

    def deregister_remote_engine(self, engine_desc: EngineDesc) -> None:
        del self.remotes[engine_desc.key]

    def register_memory(self, ptr: int, size: int, device_id: int, mem_loc: MemoryLocationType) -> MemoryDesc:
        assert isinstance(mem_loc, MemoryLocationType)
        return MemoryDesc(self.desc.key, ptr, size, device_id, mem_loc.name)

    def allocate_transfer_uid(self) -> int:
        return next(PORTS)

    def batch_write(
        self,
        local: Sequence[MemoryDesc],
        local_offsets: Sequence[Sequence[int]],
        remote: Sequence[MemoryDesc],
        remote_offsets: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        transfer_uids: Sequence[int],
    ) -> list[TransferStatus]:
        assert len(set(transfer_uids)) == len(transfer_uids)
        self.batches.append(
            ([*map(list, local_offsets)], [*map(list, remote_offsets)], [*map(list, sizes)], [*transfer_uids])
        )
        for source, froms, target, tos, lengths in zip(
            local, local_offsets, remote, remote_offsets, sizes, strict=True
        ):
            assert source.engine_key == self.desc.key and target.engine_key in self.remotes
            for here, there, length in zip(froms, tos, lengths, strict=True):
                assert here + length <= source.size and there + length <= target.size
                if not self.message:
                    ctypes.memmove(target.data + there, source.data + here, length)
        return [TransferStatus(self.looks, self.message) for _ in sizes]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[IOEngine]:
    """The engines made through the stub."""
    module = types.ModuleType("mori.io")
    names = (IOEngine, IOEngineConfig, BackendType, RdmaBackendConfig, MemoryLocationType, EngineDesc, MemoryDesc)
    module.__dict__.update({one.__name__: one for one in names})
    monkeypatch.setitem(sys.modules, "mori", types.ModuleType("mori"))
    monkeypatch.setitem(sys.modules, "mori.io", module)
    monkeypatch.setattr(IOEngine, "made", [], raising=False)
    return IOEngine.made


@dataclasses.dataclass
class Side:
    """One transport with two regions."""

    transport: Transport
    memory: np.ndarray
    regions: tuple[MemoryRegion, MemoryRegion]

    @classmethod
    def make(cls, fill: int) -> Side:
        memory = np.full(1 << 16, fill, dtype=np.uint8)
        start = int(memory.ctypes.data)
        regions = (MemoryRegion(start, 1 << 12), MemoryRegion(start + (1 << 13), 1 << 12))
        transport = open_transport("mori", "10.0.0.2")
        transport.register(regions[:1])
        transport.register(regions[1:])
        return cls(transport, memory, regions)


@pytest.fixture
def sides(engines: list[IOEngine]) -> Iterator[tuple[Side, Side]]:
    sender, receiver = Side.make(9), Side.make(0)
    sender.transport.connect(receiver.transport.address())
    yield sender, receiver
    sender.transport.close()
    receiver.transport.close()


def test_an_address_carries_the_engine_and_its_regions(sides: tuple[Side, Side], engines: list[IOEngine]) -> None:
    sender, receiver = sides
    card = decode_address(receiver.transport.address())
    assert EngineDesc.unpack(card.engine) == engines[1].desc
    assert [(it.address, it.num_bytes) for it in card.regions] == [(r.address, r.num_bytes) for r in receiver.regions]
    assert MemoryDesc.unpack(card.regions[1].descriptor).loc == "CPU"
    assert [engine.backends for engine in engines] == [[(BackendType.RDMA, RdmaBackendConfig())]] * 2
    assert sender.transport.address() != receiver.transport.address()


def test_copies_become_offsets_one_row_for_each_pair_of_regions(
    sides: tuple[Side, Side], engines: list[IOEngine]
) -> None:
    sender, receiver = sides
    (here, here2), (there, there2) = sender.regions, receiver.regions
    copies = [
        Copy(here.address + 8, there.address + 16, 4),
        Copy(here2.address, there.address + 64, 8),
        Copy(here.address + 32, there.address + 32, 4),
        Copy(here.address, there.address, 0),
        Copy(here2.address + 4088, there2.address + 4088, 8),
    ]
    sender.transport.write(receiver.transport.address(), copies)
    local, remote, sizes, uids = engines[0].batches[0]
    assert local == [[8, 32], [0], [4088]]
    assert remote == [[16, 32], [64], [4088]]
    assert sizes == [[4, 4], [8], [8]]
    assert len(uids) == 3
    assert int((receiver.memory == 9).sum()) == 24


def test_a_fence_lets_go_of_the_engine_of_that_peer_and_no_other(
    sides: tuple[Side, Side], engines: list[IOEngine]
) -> None:
    _, receiver = sides
    cards = [decode_address(receiver.transport.open_receiver(peer)) for peer in ("a", "b")]
    for number, card in enumerate(cards):
        engine = engines[2 + number]
        assert EngineDesc.unpack(card.engine) == engine.desc
        assert {MemoryDesc.unpack(region.descriptor).engine_key for region in card.regions} == {engine.desc.key}
        assert [(it.address, it.num_bytes) for it in card.regions] == [
            (r.address, r.num_bytes) for r in receiver.regions
        ]
    fenced = weakref.ref(engines[2])
    del engine
    engines.clear()
    assert receiver.transport.fence("a") and receiver.transport.fence_drain_timeout_s == mori.DRAIN_TIMEOUT_S
    assert fenced() is None
    assert decode_address(receiver.transport.open_receiver("b")) == cards[1]
    assert decode_address(receiver.transport.open_receiver("a")).engine != cards[0].engine


def test_a_failed_and_a_stalled_write_are_not_settled(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = sides
    copy = Copy(sender.regions[0].address, receiver.regions[0].address, 8)
    monkeypatch.setattr(IOEngine, "message", "completion with error 12")
    with pytest.raises(TransferError, match="completion with error 12") as caught:
        sender.transport.write(receiver.transport.address(), [copy])
    assert not caught.value.settled
    monkeypatch.setattr(IOEngine, "message", "")
    monkeypatch.setattr(IOEngine, "looks", 10**9)
    monkeypatch.setattr(mori, "STALL_S", 0.01)
    with pytest.raises(TransferError, match="time limit") as caught:
        sender.transport.write(receiver.transport.address(), [copy])
    assert not caught.value.settled


def test_ranges_and_peers_that_are_not_known_never_reach_the_engine(
    sides: tuple[Side, Side], engines: list[IOEngine]
) -> None:
    sender, receiver = sides
    source, target = sender.regions[0].address, receiver.regions[0].address
    for copy in (Copy(source - 8, target, 8), Copy(source, target - 8, 8), Copy(source, target + 4090, 8)):
        with pytest.raises(TransferError, match="not registered") as caught:
            sender.transport.write(receiver.transport.address(), [copy])
        assert caught.value.settled
    sender.transport.disconnect(receiver.transport.address())
    with pytest.raises(TransferError, match="not connected"):
        sender.transport.write(receiver.transport.address(), [Copy(source, target, 8)])
    assert engines[0].batches == []
    assert engines[0].remotes == {}


@pytest.mark.parametrize("address", ["", "fake", PREFIX, PREFIX + "%%%", PREFIX + "gA=="])
def test_a_malformed_address_is_refused_for_good(address: str) -> None:
    with pytest.raises(TransferError, match="not a mori address") as caught:
        decode_address(address)
    assert not caught.value.retryable


def test_a_missing_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mori.io", None)
    monkeypatch.setitem(sys.modules, "mori", None)
    with pytest.raises(ConfigError, match="pip install amd-mori"):
        open_transport("mori", "127.0.0.1")
