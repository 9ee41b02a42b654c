"""DRAFT groups are optional: servers with different drafters connect, and equal groups are sent with the last layer.

The aux slot of a server with a drafter is longer; its drafts and hidden state are sent to an equal drafter alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec
import pytest

from pdserve.base.parallel import ParallelShape
from pdserve.memory.draft_groups import draft_fields, draft_groups, with_draft, without_drafts
from pdserve.memory.layout import GroupKind, KVGroup, KVLayout, attention_group
from pdserve.transfer.aux import MAX_FIRST_DRAFTS, AuxRecord, MetadataBuffers
from pdserve.transfer.peers import check_hello
from pdserve.transfer.plan import ChunkPart, ChunkPlanner, rank_memory
from pdserve.transfer.room import check_draft_pages, check_receiver_pages
from pdserve.transfer.wire import Hello, MemoryKey, TransferInfo, WireRegion

NUM_LAYERS, PAGES = 4, 8
FULL = attention_group(num_layers=NUM_LAYERS, page_tokens=4, num_kv_heads=2, head_dim=2, dtype="bfloat16")
DRAFT = attention_group(
    kind=GroupKind.DRAFT, num_layers=NUM_LAYERS, layers=(2, 3), page_tokens=4, num_kv_heads=4, head_dim=2,
    dtype="bfloat16",
)  # fmt: skip
PLAIN = KVLayout((FULL,))
DRAFTING = with_draft(PLAIN, DRAFT)
OTHER = with_draft(PLAIN, dataclasses.replace(DRAFT, layers=(3,)))
ONE, TWO = ParallelShape(), ParallelShape(tp_size=2)
AUX = (900, 64)


def buffers_of(layout: KVLayout, shape: ParallelShape, rank: int) -> list[tuple[int, int]]:
    """A pool of `PAGES` pages for each group, the one after the other."""
    own = layout.of_rank(shape.coord(rank))
    return [((index + 1 + 10 * rank) << 20, group.bytes_of(PAGES)) for index, group in enumerate(own.groups)]


def hello_of(layout: KVLayout, shape: ParallelShape = ONE, *, answer: bool = False) -> Hello:
    return Hello(
        endpoint="h:1",
        facts=layout.fields(),
        tp_size=shape.tp_size,
        ranks=tuple(
            rank_memory(layout, shape.coord(rank), f"t{rank}", buffers_of(layout, shape, rank))
            for rank in range(shape.num_ranks)
        ),
        aux_region=WireRegion(1, 640),
        aux_slot_bytes=AUX[1],
        answer=answer,
        draft_facts=draft_fields(layout) or msgspec.UNSET,
    )


def planner_of(layout: KVLayout, shape: ParallelShape = ONE) -> ChunkPlanner:
    return ChunkPlanner.of(layout, shape, hello_of(layout, shape).ranks, AUX)


def written(parts: list[ChunkPart], group: KVGroup, base: int) -> int:
    """Bytes that the parts write into the pool of `group` at `base`."""
    end = base + group.bytes_of(PAGES)
    return sum(
        copy.num_bytes
        for part in parts
        for _, address, copies in part.pieces
        for copy in copies
        if base <= address + copy.destination < end
    )


def test_what_peers_must_agree_on_does_not_tell_of_drafts() -> None:
    assert DRAFTING.fields() == OTHER.fields() == PLAIN.fields()
    assert without_drafts(DRAFTING) == PLAIN and draft_groups(DRAFTING) == (DRAFT,)
    assert draft_fields(PLAIN) == {} and draft_fields(DRAFTING) != draft_fields(OTHER)
    assert draft_fields(DRAFTING)["draft.num_kv_heads"] == 4


@pytest.mark.parametrize("ours", [PLAIN, DRAFTING, OTHER])
@pytest.mark.parametrize("theirs", [PLAIN, DRAFTING, OTHER])
def test_servers_connect_whatever_their_drafters_are(ours: KVLayout, theirs: KVLayout) -> None:
    check_hello(hello_of(ours), hello_of(theirs, answer=True), {})
    is_equal = ours is theirs and ours is not PLAIN
    planner, peer = planner_of(ours), hello_of(theirs)
    assert planner.sends_drafts(peer) == is_equal
    parts = planner.pages(peer, [[1, 2]], [[5, 3]], range(NUM_LAYERS))
    assert written(parts, FULL, 1 << 20) == 2 * FULL.page_bytes
    assert sum(part.num_bytes for part in parts) == 2 * (ours if is_equal else PLAIN).page_bytes


def test_all_draft_layers_go_with_the_models_last_layer() -> None:
    planner, peer = planner_of(DRAFTING), hello_of(DRAFTING)
    lower = planner.pages(peer, [[1]], [[5]], range(3))
    assert [part.num_layers for part in lower] == [3] and written(lower, DRAFT, 2 << 20) == 0
    upper = planner.pages(peer, [[1]], [[5]], range(3, NUM_LAYERS))
    assert [part.num_layers for part in upper] == [4] and written(upper, DRAFT, 2 << 20) == DRAFT.page_bytes
    (copy,) = upper[0].pieces[1][2]
    assert (copy.source, copy.destination) == (DRAFT.page_bytes, 5 * DRAFT.page_bytes)
    assert planner.pages(peer, [[]], [[]], range(NUM_LAYERS)) == []


@pytest.mark.parametrize(("source", "target"), [(ONE, TWO), (TWO, ONE), (TWO, TWO)])
def test_draft_heads_are_split_between_ranks(source: ParallelShape, target: ParallelShape) -> None:
    planner, peer = planner_of(DRAFTING, source), hello_of(DRAFTING, target)
    parts = planner.pages(peer, [[1]], [[5]], range(NUM_LAYERS))
    assert {(part.rank, part.transport_address) for part in parts} <= set(planner.rank_pairs(peer))
    for rank in range(target.num_ranks):
        group = DRAFT.of_rank(target.coord(rank))
        assert written(parts, group, (2 + 10 * rank) << 20) == group.page_bytes


def test_frames_of_a_server_without_a_drafter_have_no_field_of_it() -> None:
    for layout, expected in ((PLAIN, False), (DRAFTING, True)):
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(hello_of(layout)))
        assert ("draft_facts" in sent) == expected
        assert all(("draft_regions" in rank) == expected for rank in sent["ranks"])


def test_pages_outside_the_draft_pools_are_refused() -> None:
    info = TransferInfo(
        key=MemoryKey(1, 1, "d"), cached_tokens=0, pages=((0, PAGES - 1),), aux_slot=0, prompt_digest="d"
    )
    hello = hello_of(DRAFTING)
    assert check_receiver_pages(info, hello, PLAIN, AUX[1]) is None
    assert check_draft_pages(info, hello, (DRAFT,)) is None
    (memory,) = hello.ranks
    small = msgspec.structs.replace(memory, draft_regions=(WireRegion(2 << 20, DRAFT.page_bytes),))
    for ranks, says in (
        ((small,), "page 7 lies outside the pool of group draft"),
        ((msgspec.structs.replace(memory, draft_regions=()),), "draft_regions has 0 pools, expected 1"),
    ):
        wrong = msgspec.structs.replace(hello, ranks=ranks)
        assert check_draft_pages(info, wrong, (DRAFT,)) == says


RECORD = AuxRecord(7, 2, 91, drafts=(5, 2**40, 6), draft_hidden=bytes(range(48)))


def test_an_aux_slot_has_drafts_and_a_hidden_state_where_a_model_drafts() -> None:
    plain, drafting = MetadataBuffers(2), MetadataBuffers(2, draft_hidden_bytes=48)
    for buffers, expected in (
        (drafting, RECORD),
        (plain, dataclasses.replace(RECORD, drafts=(), draft_hidden=b"")),
    ):
        buffers.write(1, RECORD)
        assert buffers.read(1) == expected
        buffers.clear(1)
        assert buffers.read(1) == AuxRecord(0, 0, 0, logprob=0.0)
    assert plain.slot_bytes == plain.common_bytes == drafting.common_bytes < drafting.slot_bytes


def test_the_common_bytes_of_a_slot_are_read_by_servers_with_and_without_a_drafter() -> None:
    """Those of recorded slots: no field has moved."""
    plain, drafting = MetadataBuffers(1), MetadataBuffers(1, draft_hidden_bytes=48)
    drafting.write(0, RECORD)
    common = drafting.take_out(0)[: drafting.common_bytes]
    plain.put_in(0, common)
    assert plain.read(0) == dataclasses.replace(RECORD, drafts=(), draft_hidden=b"")
    drafting.clear(0)
    drafting.put_in(0, common + bytes(drafting.slot_bytes - drafting.common_bytes))
    assert drafting.read(0) == plain.read(0)


def test_a_drafter_without_hidden_states_sends_drafts_alone() -> None:
    """No more than the slot has room for."""
    buffers = MetadataBuffers(1, draft_hidden_bytes=0)
    drafts = tuple(range(MAX_FIRST_DRAFTS + 3))
    buffers.write(0, dataclasses.replace(RECORD, drafts=drafts, draft_hidden=b""))
    read = buffers.read(0)
    assert (read.drafts, read.draft_hidden) == (drafts[:MAX_FIRST_DRAFTS], b"")


WEIGHTS: dict[str, Mapping[str, str | int]] = {
    name: draft_fields(DRAFTING) | {"draft.weights": name} for name in ("one", "two")
}


@pytest.mark.parametrize(("theirs", "num_bytes"), [("one", 256), ("two", 192), (None, 192)])
def test_a_peer_with_other_weights_gets_no_draft_kv_and_the_common_bytes_of_the_slot(
    theirs: str | None, num_bytes: int
) -> None:
    hello = hello_of(PLAIN if theirs is None else DRAFTING)
    slot_bytes = 192 if theirs is None else 256
    facts = msgspec.UNSET if theirs is None else dict(WEIGHTS[theirs])
    hello = msgspec.structs.replace(hello, draft_facts=facts, aux_slot_bytes=slot_bytes)
    planner = ChunkPlanner.of(
        DRAFTING, ONE, hello_of(DRAFTING).ranks, (900, 256), draft_facts=WEIGHTS["one"], aux_common_bytes=192
    )
    assert planner.sends_drafts(hello) == (theirs == "one")
    (part,) = planner.with_aux([], hello, 3, 2)
    ((_, _, (copy,)),) = part.pieces
    assert (copy.source, copy.destination, copy.num_bytes) == (3 * 256, 2 * slot_bytes, num_bytes)


def test_a_receiver_whose_aux_slots_are_too_short_is_refused() -> None:
    info = TransferInfo(key=MemoryKey(1, 1, "d"), cached_tokens=0, pages=((0,),), aux_slot=9, prompt_digest="d")
    hello = hello_of(PLAIN)
    assert check_receiver_pages(info, hello, PLAIN, 64) is None
    assert check_receiver_pages(info, hello, PLAIN, 65) == "aux_slot_bytes is 64, expected at least 65"
    info = msgspec.structs.replace(info, aux_slot=10)
    assert check_receiver_pages(info, hello, PLAIN, 64) == "aux slot 10 lies outside its buffer"
