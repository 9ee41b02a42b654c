"""Memory that other processes can map: what can be found, what is given back, what is refused."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.config.groups import DisaggConfig
from pdserve.memory import shared
from pdserve.memory.layout import attention_group
from pdserve.model.attention.page_gather import KVPool
from pdserve.transfer.aux import MetadataBuffers


def descriptors() -> int:
    """Open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def test_memory_is_found_by_any_range_in_it_and_by_none_beside_it() -> None:
    memory = shared.allocate(10_000)
    start = shared.address_of(memory)
    assert start % mmap.PAGESIZE == 0
    segment = shared.find(start + 100, 9_900)
    assert segment is not None and (segment.address, segment.num_bytes) == (start, 10_000)
    assert shared.find(start, 10_001) is shared.find(start - 1, 10) is None


class Cycle:
    """Lets go of memory when the garbage collector comes, and not before."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory, self.itself = memory, self


def test_memory_may_be_let_go_of_while_other_memory_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same thread, wherever the garbage collector happens to come."""
    gc.collect()
    before = descriptors()
    memory = [shared.allocate(4096) for _ in range(8)]
    addresses = list(map(shared.address_of, memory))
    cycles = [Cycle(each) for each in memory[:-1]]
    holds = shared.Segment.holds
    has_collected: list[bool] = []

    def collected(segment: shared.Segment, address: int, num_bytes: int) -> bool:
        if not has_collected:
            has_collected.append(True)
            gc.collect()
        return holds(segment, address, num_bytes)

    monkeypatch.setattr(shared.Segment, "holds", collected)
    found: list[shared.Segment | None] = []
    asking = threading.Thread(target=lambda: found.append(shared.find(addresses[-1], 4096)), daemon=True)
    del memory[:-1], cycles
    asking.start()
    asking.join(20.0)
    assert not asking.is_alive() and has_collected, "it waits for itself"
    assert found[0] is not None and found[0].address == addresses[-1]
    monkeypatch.undo()
    del memory
    assert not any(shared.find(address, 4096) for address in addresses)
    assert descriptors() == before


def test_a_second_mapping_sees_the_same_bytes() -> None:
    memory = shared.allocate(8192)
    segment = shared.find(shared.address_of(memory), 8192)
    assert segment is not None
    other = shared.map_whole(segment.descriptor, 8192)
    np.frombuffer(other, np.uint8)[5000] = 7
    assert memory[5000] == 7 and memory[4999] == 0


def test_memory_of_a_pool_and_of_aux_slots_can_be_shared_and_is_given_back() -> None:
    gc.collect()
    before = descriptors()
    group = attention_group(
        name="kv",  num_layers=2, page_tokens=4, num_kv_heads=2, head_dim=8,
        dtype="float32",
    )  # fmt: skip
    pool, aux = KVPool(group, 3, torch.device("cpu")), MetadataBuffers(5)
    addresses = [pool.buffer, aux.buffer]
    assert all(shared.find(*buffer) is not None for buffer in addresses)
    rows = pool.layer(0)
    del pool
    rows[0] = 1.0
    assert shared.find(*addresses[0]) is not None, "a view keeps the memory"
    del rows, aux
    gc.collect()
    assert shared.find(*addresses[0]) is shared.find(*addresses[1]) is None
    assert descriptors() == before


def test_memory_of_a_pool_that_nobody_shall_map_is_private() -> None:
    before = descriptors()
    group = attention_group(
        name="kv",  num_layers=1, page_tokens=4, num_kv_heads=1, head_dim=8,
        dtype="float32",
    )  # fmt: skip
    pool = KVPool(group, 3, torch.device("cpu"), shareable=False)
    address, num_bytes = pool.buffer
    assert shared.find(address, num_bytes) is None and descriptors() == before
    assert address % mmap.PAGESIZE == 0 and not pool.pages.any()
    pool.pages.fill_(1.0)
    assert not pool.layer(0)[pool.null_page].any()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, False),
        ({"disaggregation_transfer_backend": "shm", "enable_pd_role_switch": False}, False),
        ({"disaggregation_transfer_backend": "shm", "enable_pd_role_switch": True}, True),
        ({"disaggregation_mode": "prefill"}, False),
        ({"disaggregation_mode": "prefill", "disaggregation_transfer_backend": "auto"}, True),
        ({"disaggregation_mode": "decode", "disaggregation_transfer_backend": "shm"}, True),
    ],
)
def test_only_who_may_be_mapped_shares(flags: dict[str, Any], expected: bool) -> None:
    assert DisaggConfig(**flags).may_share_memory is expected


def test_nobody_can_truncate_it_and_a_file_that_could_be_is_refused() -> None:
    memory = shared.allocate(8192)
    segment = shared.find(shared.address_of(memory), 8192)
    assert segment is not None
    with pytest.raises(PermissionError):
        os.ftruncate(segment.descriptor, 4096)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(loose, 8192)
        with pytest.raises(ValueError, match="truncated"):
            shared.map_whole(loose, 8192)
        with pytest.raises(ValueError, match="mmap length"):
            shared.map_whole(segment.descriptor, 8193)
    finally:
        os.close(loose)
