"""Addresses, lengths, type and geometry of state on the wire, and how a peer's are checked."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdserve.base.parallel import ParallelShape
from pdserve.memory.layout import KVLayout
from pdserve.sim.hash_lm import hash_layout
from pdserve.transfer.plan import pool_regions, rank_memory
from pdserve.transfer.room import check_prompt_fits_pages, check_receiver_pages
from pdserve.transfer.wire import Hello, MemoryKey, StateFacts, StatePlane, TransferInfo, WireRegion

HYBRID = hash_layout(4, num_heads=2, window=3)
SHAPE = ParallelShape(tp_size=2)
BUFFERS = [(1 << 20, 4096), (2 << 20, 2048), (3 << 20, 1024), (4 << 20, 512)]


def hello_of(layout: KVLayout, shape: ParallelShape = SHAPE) -> Hello:
    buffers = BUFFERS[: len(layout.groups)]
    return Hello(
        endpoint="h:1",
        facts={},
        tp_size=shape.tp_size,
        pp_size=shape.pp_size,
        ranks=tuple(rank_memory(layout, shape.coord(rank), "t", buffers) for rank in range(shape.num_ranks)),
        aux_region=WireRegion(1, 640),
        aux_slot_bytes=64,
        answer=False,
    )


INFO = TransferInfo(
    key=MemoryKey(1, 1, "d"),
    cached_tokens=0,
    pages=((0, 1, 2),),
    state_indices=((4, 5), (3,), (3,)),
    aux_slot=0,
    prompt_digest="d",
)


def test_a_rank_names_type_and_geometry_of_each_state_pool() -> None:
    memory = hello_of(HYBRID).ranks[1]
    assert memory.kv_regions == (WireRegion(1 << 20, 4096),)
    assert [(region.address, region.num_bytes) for region in memory.state_regions] == BUFFERS[1:]
    window, state, stamp = (region.facts for region in memory.state_regions)
    assert [facts.state_type for facts in (window, state, stamp)] == ["swa", "mamba", "mamba"]
    assert (state.group, state.layers, state.item_bytes, state.layer_bytes) == ("state", (2,), 32, 32)
    assert state.planes == (StatePlane("conv", 0, 16, 1, 1), StatePlane("state", 16, 8, 2, 2))
    assert stamp.planes == (StatePlane("stamp", 0, 16, 0, 1),)
    assert [region.address for region in pool_regions(HYBRID, memory)] == [address for address, _ in BUFFERS]


@pytest.mark.parametrize("window", [0, 3])
def test_frames_without_state_have_no_field_of_it(window: int) -> None:
    hello = msgspec.msgpack.decode(msgspec.msgpack.encode(hello_of(hash_layout(4, num_heads=2, window=window))))
    assert all(("state_regions" in rank) == bool(window) for rank in hello["ranks"])
    info = msgspec.structs.replace(INFO, state_indices=INFO.state_indices if window else ())
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(info))
    assert ("state_indices" in sent) == bool(window) and sent["cached_tokens"] == 0


def test_state_that_fits_is_accepted() -> None:
    assert check_receiver_pages(INFO, hello_of(HYBRID), HYBRID, 64) is None
    assert check_prompt_fits_pages(INFO, 12, HYBRID) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"state_indices": ()}, "state_indices has 0 groups, expected 3"),
        ({"state_indices": ((4, 5), (40,), (3,))}, "page 40 lies outside the pool of group state"),
        ({"pages": ()}, "pages has 0 groups, expected 1"),
    ],
)
def test_items_that_are_not_the_peers_are_refused(change: dict[str, Any], says: str) -> None:
    info = msgspec.structs.replace(INFO, **change)
    assert says in str(check_receiver_pages(info, hello_of(HYBRID), HYBRID, 64))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"group": "ssm"}, "group of group state is ssm, expected state"),
        ({"state_type": "swa"}, "state_type of group state is swa, expected mamba"),
        ({"item_bytes": 64}, "item_bytes of group state is 64, expected 32"),
        ({"layers": (1,)}, "layers of group state is (1,), expected (2,)"),
        ({"planes": ()}, "planes of group state is ()"),
    ],
)
def test_another_geometry_is_refused_by_field(change: dict[str, Any], says: str) -> None:
    hello = hello_of(HYBRID)
    last = hello.ranks[1]
    window, state, stamp = last.state_regions
    other = msgspec.structs.replace(state, facts=msgspec.structs.replace(state.facts, **change))
    wrong = msgspec.structs.replace(last, state_regions=(window, other, stamp))
    hello = msgspec.structs.replace(hello, ranks=(hello.ranks[0], wrong))
    found = check_receiver_pages(INFO, hello, HYBRID, 64)
    assert found is not None and found.startswith("state_regions of rank 1: ") and says in found


def test_every_field_of_the_geometry_is_compared() -> None:
    assert StateFacts.__struct_fields__ == ("group", "state_type", "item_bytes", "layer_bytes", "layers", "planes")


def test_a_prompt_without_a_slot_does_not_fit() -> None:
    info = msgspec.structs.replace(INFO, state_indices=((4, 5), (), (3,)))
    assert "pages has 0 pages of group state" in str(check_prompt_fits_pages(info, 12, HYBRID))


def test_the_layout_says_its_state_type() -> None:
    assert hash_layout(4).state_type == "none" and "state_type" not in hash_layout(4).fields()
    assert HYBRID.state_type == HYBRID.fields()["state_type"] == "mamba,swa"
    assert hash_layout(4, has_state=True).state_type == "mamba"
