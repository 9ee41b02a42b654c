"""The ascend adapter against a recording stub of `memfabric_hybrid`, with the signatures of its release 1.3.0."""

from __future__ import annotations

import ctypes
import enum
import sys
import types
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from pdserve.errors import ConfigError, TransferError
from pdserve.transfer.registry import open_transport
from pdserve.transfer.transport import Copy, MemoryRegion, Transport
from pdserve.transfer.transports.ascend import BATCH_COPIES, session_of

STORE = "tcp://10.0.0.1:9000"


class TransDataOpType(enum.Enum):
    """As the library's."""

    SDMA = 1
    HOST_RDMA = 2
    DEVICE_RDMA = 3


class TransferEngine:
    """Records calls; a write between two of them is a memmove if both ranges are registered. Codes as the library's."""

    TransDataOpType = TransDataOpType
    made: list[TransferEngine]
    initialize_code = 0

    def __init__(self) -> None:
        self.port = 20_000 + len(self.made)
        self.made.append(self)
        self.started: tuple[object, ...] | None = None
        self.ended = False
        self.regions: list[tuple[int, int]] = []
        self.batches: list[int] = []

    def get_rpc_port(self) -> int:
        return self.port

    def initialize(
        self, store_url: str, session_id: str, role: str, device_id: int, data_op_type: TransDataOpType
    ) -> int:
        self.started = (store_url, session_id, role, device_id, data_op_type)
        return self.initialize_code

    def batch_register_memory(self, buffer_addrs: Sequence[int], capacities: Sequence[int]) -> int:
        self.regions += zip(buffer_addrs, capacities, strict=True)
        return 0

    def batch_transfer_sync_write(
        self, dest_session: str, buffers: Sequence[int], peer_buffers: Sequence[int], lengths: Sequence[int]
    ) -> int:
        assert self.started is not None and self.started[2] == "Prefill" and not self.ended
        self.batches.append(len(buffers))
        peer = next((e for e in self.made if e.started and e.started[1] == dest_session and not e.ended), None)
        if peer is None or peer.started is None or peer.started[2] != "Decode":
            return -1
        for source, destination, length in zip(buffers, peer_buffers, lengths, strict=True):
            if not any(start <= destination and destination + length <= start + n for start, n in peer.regions):
                return -2
            assert any(start <= source and source + length <= start + n for start, n in self.regions)
            ctypes.memmove(destination, source, length)
        return 0

    def destroy(self) -> None:
        self.ended = True

    def unInitialize(self) -> None:
        self.ended = True


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[TransferEngine]:
    """The engines made through the stub."""
    module = types.ModuleType("memfabric_hybrid")
    module.__dict__["TransferEngine"] = TransferEngine
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", module)
    monkeypatch.setattr(TransferEngine, "made", [], raising=False)
    monkeypatch.setenv("ASCEND_MF_STORE_URL", STORE)
    monkeypatch.setenv("ASCEND_DEVICE_ID", "3")
    monkeypatch.delenv("ASCEND_MF_TRANSFER_PROTOCOL", raising=False)
    return TransferEngine.made


Side = tuple[Transport, np.ndarray, MemoryRegion]


def side(fill: int) -> Side:
    memory = np.full(1 << 16, fill, dtype=np.uint8)
    region = MemoryRegion(int(memory.ctypes.data), memory.size)
    transport = open_transport("ascend", "10.0.0.2")
    transport.register([region])
    return transport, memory, region


@pytest.fixture
def sides(engines: list[TransferEngine]) -> Iterator[tuple[Side, Side]]:
    sender, receiver = side(7), side(0)
    sender[0].connect(receiver[0].address())
    yield sender, receiver
    for transport, _, _ in (sender, receiver):
        transport.close()


def test_each_process_receives_from_the_start_and_sends_from_its_first_peer_on(
    sides: tuple[Side, Side], engines: list[TransferEngine]
) -> None:
    (_, _, region), _ = sides
    started = [engine.started for engine in engines]
    assert started == [
        (STORE, "10.0.0.2:20000", "Decode", 3, TransDataOpType.SDMA),
        (STORE, "10.0.0.2:20001", "Decode", 3, TransDataOpType.SDMA),
        (STORE, "10.0.0.2:20002", "Prefill", 3, TransDataOpType.SDMA),
    ]
    assert engines[0].regions == engines[2].regions == [(region.address, region.num_bytes)]


def test_bytes_arrive_in_batches_that_the_engine_takes(sides: tuple[Side, Side], engines: list[TransferEngine]) -> None:
    (sender, _, source), (receiver, memory, target) = sides
    copies = [Copy(source.address + 8 * n, target.address + 16 * n, 8) for n in range(BATCH_COPIES + 5)]
    sender.write(receiver.address(), [*copies, Copy(source.address, target.address, 0)])
    expected = np.zeros_like(memory)
    for n in range(len(copies)):
        expected[16 * n : 16 * n + 8] = 7
    assert np.array_equal(memory, expected)
    assert engines[2].batches == [BATCH_COPIES, 5]


def test_what_the_engine_reports_as_failed_is_not_settled(sides: tuple[Side, Side]) -> None:
    (sender, _, source), (receiver, _, target) = sides
    with pytest.raises(TransferError, match="code -2") as caught:
        sender.write(receiver.address(), [Copy(source.address, target.address + (1 << 20), 8)])
    assert not caught.value.settled
    address = receiver.address()
    receiver.close()
    with pytest.raises(TransferError, match="code -1") as caught:
        sender.write(address, [Copy(source.address, target.address, 8)])
    assert not caught.value.settled


def test_a_fence_destroys_the_engine_of_that_peer_and_no_other(
    sides: tuple[Side, Side], engines: list[TransferEngine]
) -> None:
    (sender, _, source), (receiver, memory, target) = sides
    addresses = [receiver.open_receiver(peer) for peer in ("a", "b")]
    assert [engine.regions for engine in engines[3:]] == [[(target.address, target.num_bytes)]] * 2
    assert receiver.open_receiver("a") == addresses[0]
    for address in addresses:
        sender.connect(address)
        sender.write(address, [Copy(source.address, target.address, 8)])
    assert receiver.fence("a") and receiver.fence_drain_timeout_s == receiver.drain_timeout_s == 30.0
    memory[:] = 0
    with pytest.raises(TransferError):
        sender.write(addresses[0], [Copy(source.address, target.address, 8)])
    assert not memory.any()
    sender.write(addresses[1], [Copy(source.address, target.address, 8)])
    assert memory.any() and receiver.open_receiver("a") not in addresses


def test_ranges_and_peers_that_are_not_known_never_reach_the_engine(
    sides: tuple[Side, Side], engines: list[TransferEngine]
) -> None:
    (sender, _, source), (receiver, _, target) = sides
    with pytest.raises(TransferError, match="not registered") as caught:
        sender.write(receiver.address(), [Copy(source.address - 8, target.address, 8)])
    assert caught.value.settled
    sender.disconnect(receiver.address())
    with pytest.raises(TransferError, match="not connected") as caught:
        sender.write(receiver.address(), [Copy(source.address, target.address, 8)])
    assert caught.value.settled
    assert engines[2].batches == []


def test_a_new_life_has_a_new_address_and_close_ends_both_engines(engines: list[TransferEngine]) -> None:
    first, _, _ = side(1)
    first.connect(first.address())
    first.close()
    assert [engine.ended for engine in engines] == [True, True]
    engines.clear()  # so that the next gets the same port
    second, _, _ = side(1)
    assert session_of(first.address()) == session_of(second.address())
    assert first.address() != second.address()


@pytest.mark.parametrize("address", ["", "host:1", "host:1/", ":1/a", "host/a", "host:x/a", "h:0/a", "h:65536/a"])
def test_a_malformed_address_is_refused_for_good(address: str) -> None:
    with pytest.raises(TransferError, match="not an ascend address") as caught:
        session_of(address)
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("name", "value"),
    [("ASCEND_MF_STORE_URL", ""), ("ASCEND_MF_TRANSFER_PROTOCOL", "carrier-pigeon"), ("ASCEND_DEVICE_ID", "two")],
)
def test_a_wrong_environment_is_named(
    engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        open_transport("ascend", "10.0.0.2")
    assert engines == []


def test_an_engine_that_does_not_start_and_one_that_is_not_there_say_so(
    engines: list[TransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransferEngine, "initialize_code", -1)
    with pytest.raises(ConfigError, match=r"Decode.*code -1"):
        open_transport("ascend", "10.0.0.2")
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", None)
    with pytest.raises(ConfigError, match="pip install memfabric-hybrid"):
        open_transport("ascend", "10.0.0.2")
