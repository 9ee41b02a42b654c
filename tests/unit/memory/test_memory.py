"""Allocator, leases, page table, layout, and the facade over them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.memory.kv_memory import KVMemory, PageTable
from pdserve.memory.layout import GroupKind, KVGroup, KVLayout, Plane, Shard, attention_group, pages_for
from pdserve.memory.lease import Hold, Lease, LeasePool, PageAllocator

HOLDS: tuple[Hold, ...] = ("request", "remote", "send")
NUM_PAGES = 12
FIELDS = {"num_layers": 3, "page_tokens": 16, "num_kv_heads": 2, "head_dim": 8, "dtype": "float32"}
GROUP = attention_group(**FIELDS)  # type: ignore[arg-type]


class LeaseMachine(RuleBasedStateMachine):
    """Leases against a model that only knows sets."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.pool = LeasePool(PageAllocator(NUM_PAGES, self.freed.extend))
        self.leases: list[tuple[Lease, list[int], set[Hold]]] = []

    @rule(num_pages=st.integers(0, NUM_PAGES + 2))
    def reserve(self, num_pages: int) -> None:
        free = self.pool.num_free
        lease = self.pool.reserve(num_pages)
        assert (lease is None) == (num_pages > free)
        if lease is not None:
            assert len(set(lease.pages)) == num_pages
            self.leases.append((lease, list(lease.pages), {"request"}))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), name=st.sampled_from(HOLDS))
    def hold(self, data: st.DataObject, name: Hold) -> None:
        lease, _, holds = data.draw(st.sampled_from(self.leases))
        if holds:
            lease.hold(name)
            holds.add(name)
        else:
            with pytest.raises(AssertionError):
                lease.hold(name)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), name=st.sampled_from(HOLDS))
    def drop(self, data: st.DataObject, name: Hold) -> None:
        lease, pages, holds = data.draw(st.sampled_from(self.leases))
        last = holds == {name}
        del self.freed[:]
        lease.drop(name)
        holds.discard(name)
        assert self.freed == (pages if last else [])

    @invariant()
    def pages_are_free_exactly_when_nobody_holds_them(self) -> None:
        held = [page for _, pages, holds in self.leases if holds for page in pages]
        assert len(held) == len(set(held)), "two leases share a page"
        assert self.pool.num_free == NUM_PAGES - len(held)
        assert {page for page in range(NUM_PAGES) if not self.pool.allocator.is_free(page)} == set(held)
        for lease, pages, holds in self.leases:
            assert lease.alive == bool(holds)
            assert lease.pages == (pages if holds else [])
            assert {name for name in HOLDS if lease.held_by(name)} == holds


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_page_rests_as_long_as_possible_before_it_is_used_again() -> None:
    allocator = PageAllocator(4)
    first = allocator.take(2)
    assert first == [0, 1]
    allocator.give_back(first)
    assert allocator.take(4) == [2, 3, 0, 1]


def test_a_page_freed_twice_is_our_mistake() -> None:
    allocator = PageAllocator(2)
    pages = allocator.take(1)
    assert pages is not None
    allocator.give_back(pages)
    with pytest.raises(AssertionError, match="page 0 freed twice"):
        allocator.give_back(pages)


def test_nothing_is_taken_when_there_are_too_few() -> None:
    allocator = PageAllocator(3)
    assert allocator.take(4) is None
    assert allocator.num_free == 3


def test_rows_hold_their_pages_and_come_back() -> None:
    table = PageTable(num_rows=2, max_pages_per_row=4)
    first, second = table.open([5, 6]), table.open([7])
    assert first is not None and second is not None and first != second
    assert table.open([1]) is None and table.num_free == 0
    table.extend(first, 2, [8, 9])
    assert table.pages[first].tolist() == [5, 6, 8, 9]
    table.close(first)
    assert table.num_free == 1
    with pytest.raises(AssertionError, match="closed twice"):
        table.close(first)


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (1500, 94)])
def test_pages_for_tokens(num_tokens: int, num_pages: int) -> None:
    assert pages_for(num_tokens, 16) == num_pages


def test_a_page_is_one_piece_of_all_layers() -> None:
    assert GROUP.page_shape == (3, 2, 2, 16, 8)
    assert GROUP.layer_bytes == 2 * 2 * 16 * 8 * 4
    assert GROUP.page_bytes == 3 * GROUP.layer_bytes
    assert KVLayout((GROUP,)).token_bytes == GROUP.page_bytes // 16
    assert KVLayout((GROUP, dataclasses.replace(GROUP, layers=(1,)))).page_bytes == 4 * GROUP.layer_bytes
    assert GROUP.pages_in(3 * GROUP.page_bytes - 1) == 2 and GROUP.pages_in(1) == 1


@pytest.mark.parametrize("kind", [GroupKind.FULL, GroupKind.MLA])
def test_a_block_is_found_where_a_page_has_it(kind: GroupKind) -> None:
    group = attention_group(**FIELDS | {"kind": kind})  # type: ignore[arg-type]
    blocks = np.arange(group.page_blocks).reshape(group.page_shape[:3])
    for layer, plane, head in np.ndindex(blocks.shape):
        assert group.block(layer, plane, head) == blocks[layer, plane, head]
    assert group.page_blocks * group.head_bytes == group.page_bytes


def test_planes_of_another_size_are_aligned_to_their_dtype_and_named_in_the_facts() -> None:
    planes = (
        Plane(name="conv", num_heads=1, num_heads_total=1, rows=3, width=1, dtype="bfloat16", shard=Shard.KEY_HEAD),
        Plane(name="s", num_heads=1, num_heads_total=1, rows=1, width=3, dtype="float32", shard=Shard.VALUE_HEAD),
    )
    group = KVGroup(name="state", kind=GroupKind.STATE, layers=(0, 2), num_model_layers=3, page_tokens=0, planes=planes)
    assert (group.plane_offsets, group.layer_bytes, group.page_bytes) == ((0, 8), 20, 40)
    assert not group.is_uniform and KVLayout((GROUP, group)).token_bytes == KVLayout((GROUP,)).token_bytes
    facts = KVLayout((GROUP, group)).fields()
    assert facts["state.layers"] == "0,2" and facts["state.conv.shard"] == "key_head" and facts["state.s.width"] == 3


def test_positions_and_pages_are_numbers_or_arrays() -> None:
    layout = KVLayout((GROUP,))
    assert layout.page_and_slot(35) == (2, 3)
    index, slots = GROUP.page_and_slot(np.array([0, 15, 16]))
    assert index.tolist() == [0, 0, 1] and slots.tolist() == [0, 15, 0]
    assert GROUP.pages_for(np.array([0, 16, 17])).tolist() == [0, 1, 2]
    assert layout.pages_for(17) == 2 and layout.whole_pages(31) == 1 and layout.tokens_in(3) == 48
    assert [layout.round_down(num_tokens) for num_tokens in (15, 16, 31, 32)] == [0, 16, 16, 32]
    assert layout.bytes_of(3) == 48 * layout.token_bytes and layout.bytes_of(0) == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_layers": 4}, "num_layers"),
        ({"page_tokens": 32}, "page_size"),
        ({"dtype": "bfloat16"}, "kv_cache_dtype"),
        ({"head_dim": 16}, "head_dim"),
        ({"num_kv_heads": 1}, "num_kv_heads"),
    ],
)
def test_every_difference_has_a_name_and_another_fingerprint(change: dict[str, int | str], field: str) -> None:
    ours, theirs = KVLayout((GROUP,)), KVLayout((attention_group(**FIELDS | change),))  # type: ignore[arg-type]
    assert [name for name, value in ours.fields().items() if theirs.fields()[name] != value] == [field]
    assert ours.fingerprint() != theirs.fingerprint()
    assert ours.fingerprint() == KVLayout((dataclasses.replace(GROUP),)).fingerprint()


def test_groups_are_told_apart_by_name() -> None:
    layout = KVLayout((GROUP, dataclasses.replace(GROUP, name="window", layers=(1,), window=32)))
    assert layout.fields()["num_layers"] == 3 and "full.layers" not in layout.fields()
    assert layout.fields()["window.layers"] == "1"
    assert layout.fields()["window.window"] == 32
    assert layout.fields()["num_groups"] == 2


def test_counts_return_to_their_totals() -> None:
    memory = KVMemory(KVLayout((GROUP,)), 8, PageTable(2, 8), num_aux=3)
    assert memory.max_tokens == 128
    assert memory.reserve_tokens(129) is None
    lease, aux = memory.reserve_tokens(33), memory.aux.reserve(1)
    assert lease is not None and aux is not None
    row = memory.table.open(lease.pages)
    assert row is not None
    counts = memory.counts()
    assert (counts["pages_free"], counts["rows_free"], counts["aux_free"]) == (5, 1, 2)
    memory.table.close(row)
    lease.drop("request")
    aux.drop("request")
    counts = memory.counts()
    assert all(counts[f"{name}_free"] == counts[f"{name}_total"] for name in ("pages", "rows", "aux"))
