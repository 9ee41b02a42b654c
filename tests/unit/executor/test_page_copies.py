"""Copies between pool and host tier beside steps: every byte of every group, in order, with a handle that ends."""

from __future__ import annotations

import threading

import pytest
import torch

from pdserve.executor.page_copies import EndedCopy, HostTierCopies, PageCopier, PendingCopy
from pdserve.memory.layout import GroupKind, KVLayout, PageSpace, attention_group
from pdserve.memory.tiers.host_memory import HostMemory, PageCopies, num_copied, parts_of, slots_for
from pdserve.model.attention.page_gather import GroupPool

CPU = torch.device("cpu")
TOKENS, WINDOW = PageSpace.TOKENS, PageSpace.WINDOW
BOUND_S = 30


def layout() -> KVLayout:
    full = attention_group(num_layers=4, layers=(0, 2), page_tokens=4, num_kv_heads=2, head_dim=8, dtype="bfloat16")
    window = attention_group(
        num_layers=4, layers=(1, 3), page_tokens=4, num_kv_heads=2, head_dim=8, dtype="float32",
        kind=GroupKind.WINDOW, window=8,
    )  # fmt: skip
    draft = attention_group(
        num_layers=4, layers=(3,), page_tokens=4, num_kv_heads=1, head_dim=8, dtype="bfloat16", kind=GroupKind.DRAFT
    )
    return KVLayout((full, window, draft))


def random_pools(of: KVLayout) -> tuple[GroupPool, ...]:
    pools = tuple(GroupPool(group, 12, CPU) for group in of.groups)
    for seed, pool in enumerate(pools):
        generator = torch.Generator().manual_seed(seed)
        rows = pool.pages_as_bytes
        rows.copy_(torch.randint(0, 256, rows.shape, dtype=torch.uint8, generator=generator))
    return pools


def wait(handle: object) -> None:
    ended = threading.Event()
    handle.on_end(ended.set)  # type: ignore[attr-defined]
    assert ended.wait(BOUND_S)
    assert handle.is_done  # type: ignore[attr-defined]


def test_every_byte_of_all_groups_comes_back_into_other_pages() -> None:
    of = layout()
    pools = random_pools(of)
    before = [pool.pages_as_bytes.clone() for pool in pools]
    host = HostMemory(of, {TOKENS: 9, WINDOW: 7})
    copier = PageCopier(pools, host, CPU)
    saved = [PageCopies(TOKENS, (3, 0, 11), (8, 0, 4)), PageCopies(WINDOW, (5, 6), (6, 1))]
    assert num_copied(saved) == 5
    save = copier.start_save(saved)
    load = copier.start_load([PageCopies(TOKENS, (1, 2, 4), (8, 0, 4)), PageCopies(WINDOW, (9, 10), (6, 1))])
    wait(load)
    assert save.is_done
    copier.close()
    copier.close()
    for group, pages in ((0, ((3, 1), (0, 2), (11, 4))), (1, ((5, 9), (6, 10))), (2, ((3, 1), (0, 2), (11, 4)))):
        for source, target in pages:
            assert torch.equal(pools[group].pages_as_bytes[target], before[group][source])
        kept = [page for page in range(12) if page not in {target for _, target in pages}]
        assert torch.equal(pools[group].pages_as_bytes[kept], before[group][kept])


def test_a_slot_has_the_pages_of_all_groups_of_its_space_as_bytes() -> None:
    of = layout()
    full, draft = of.groups[0].page_bytes, of.groups[2].page_bytes
    assert [(part.group, part.start, part.num_bytes) for part in parts_of(of, TOKENS)] == [
        (0, 0, full),
        (2, full, draft),
    ]
    host = HostMemory(of, {TOKENS: 2})
    host.slot(TOKENS, 1)[:3] = b"abc"
    assert bytes(host.slot(TOKENS, 1)[:4]) == b"abc\0" and len(host.slot(TOKENS, 1)) == full + draft
    assert not any(host.slot(TOKENS, 0)) and host.slabs[WINDOW].size == 0
    assert host.num_bytes == 2 * (full + draft)


def test_the_size_of_the_tier_is_a_ratio_or_a_number_of_bytes() -> None:
    of, pages = layout(), {TOKENS: 10, WINDOW: 4}
    assert slots_for(of, pages, ratio=2.0) == {TOKENS: 20, WINDOW: 8}
    pool = 10 * of.space_bytes(TOKENS) + 4 * of.space_bytes(WINDOW)
    assert slots_for(of, pages, ratio=2.0, num_bytes=pool // 2) == {TOKENS: 5, WINDOW: 2}
    assert PageSpace.SLOTS not in slots_for(of, {**pages, PageSpace.SLOTS: 3}, ratio=1.0)


def test_a_failed_copy_raises_where_it_is_polled_and_later_ones_are_made() -> None:
    of = layout()
    copier = PageCopier(random_pools(of), HostMemory(of, {TOKENS: 2}), CPU)
    bad = copier.start_save([PageCopies(TOKENS, (1,), (0,))])
    wait(bad)
    copier._move = None  # type: ignore[assignment, method-assign]
    failing = copier.start_save([PageCopies(TOKENS, (1,), (0,))])
    ended = threading.Event()
    failing.on_end(ended.set)
    assert ended.wait(BOUND_S)
    with pytest.raises(TypeError):
        assert failing.is_done
    del copier._move
    wait(copier.start_save([PageCopies(TOKENS, (1,), (0,))]))
    copier.close()


def test_a_handle_calls_its_reader_once_before_or_after_the_end() -> None:
    calls: list[str] = []
    early, late = PendingCopy(), PendingCopy()
    early.on_end(lambda: calls.append("early"))
    assert not early.is_done and not calls
    early.end()
    late.end()
    late.on_end(lambda: calls.append("late"))
    EndedCopy().on_end(lambda: calls.append("ended"))
    assert calls == ["early", "late", "ended"] and early.is_done and late.is_done


def test_an_executor_without_a_tier_refuses_copies() -> None:
    with pytest.raises(AssertionError, match="no host tier"):
        HostTierCopies().start_save([])
