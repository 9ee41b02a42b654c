"""The host tier's slots: what a copy reserves, what the tree has afterwards, and what a later prompt can take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdserve.base.parallel import ParallelShape
from pdserve.config import ServerConfig
from pdserve.config.groups import ParallelConfig
from pdserve.engine.build_tier import check_host_memory, layouts_on_host
from pdserve.errors import ConfigError
from pdserve.memory.layout import PageSpace
from pdserve.memory.prefix_cache import token_bytes
from pdserve.memory.tiers.host_memory import HostMemory
from pdserve.memory.tiers.host_pool import HostPool
from pdserve.sim.hash_layout import hash_layout

TOKENS, WINDOW, SLOTS = PageSpace.TOKENS, PageSpace.WINDOW, PageSpace.SLOTS
PLAIN = hash_layout(4)
HYBRID = hash_layout(4, window=6, has_state=True)
PROMPT = token_bytes(range(16))


def stored(pool: HostPool, tokens: bytes, numbers: range = range(0), *, state: bool = False) -> list[int]:
    """Store the prompt, as after a copy; returns its slots."""
    lease = pool.reserve(tokens, len(tokens) // 16, "copy", numbers, state=state)
    assert lease is not None
    slots = list(lease.pages)
    pool.store(lease, tokens)
    lease.drop("tier")
    return slots


def test_slots_are_found_once_they_are_stored_and_the_least_recently_used_go_first() -> None:
    freed: list[int] = []
    pool = HostPool(PLAIN, {TOKENS: 5}, on_free=lambda space, slots: freed.extend(slots))
    lease = pool.reserve(PROMPT, 4, "copy")
    assert lease is not None and pool.match(PROMPT, 16) == 0 and pool.num_used_tokens == 16
    assert pool.reserve(token_bytes(range(90, 98)), 2, "copy") is None, "one slot is free, and none can be evicted"
    pool.store(lease, PROMPT)
    lease.drop("tier")
    assert pool.match(PROMPT, 16) == 16 and pool.match(PROMPT, 15) == 12 and not pool.audit()
    stored(pool, token_bytes(range(90, 98)))
    assert pool.match(PROMPT, 16) == 12 and len(freed) == 1, "the end of the older prompt has gone"


def test_a_locked_slot_is_not_evicted_and_the_known_part_is_not_copied_again() -> None:
    pool = HostPool(PLAIN, {TOKENS: 4})
    slots = stored(pool, PROMPT[:32])
    locked = pool.lock(PROMPT[:32], "load")
    assert locked is not None and locked.pages == slots and locked.held_only_by("tier")
    longer = pool.reserve(PROMPT, 4, "copy")
    assert longer is not None and longer.num_prefix_pages == 2 and longer.pages[:2] == slots
    longer.drop("tier")
    assert pool.reserve(token_bytes(range(50, 62)), 3, "copy") is None
    locked.drop("tier")
    assert pool.reserve(token_bytes(range(50, 62)), 3, "copy") is not None and pool.lock(PROMPT[:32], "load") is None


def test_window_pages_and_states_come_with_the_pages_that_need_them() -> None:
    pool = HostPool(HYBRID, {TOKENS: 8, WINDOW: 4, SLOTS: 2})
    stored(pool, PROMPT)
    assert pool.match_pages(PROMPT, 16) == 16 and pool.match(PROMPT, 16) == 0, "neither state nor window pages"
    lease = pool.reserve(PROMPT, 4, "copy", range(2, 4), state=True)
    assert lease is not None and lease.groups is not None
    assert {2, 3} <= lease.groups.window.keys() and lease.groups.kept.keys() == {16}
    pool.store(lease, PROMPT)
    lease.drop("tier")
    assert pool.match(PROMPT, 16) == 16 and not pool.audit()
    locked = pool.lock(PROMPT, "load", range(2, 4), state=True)
    assert locked is not None and locked.groups is not None and locked.groups.source is locked.node
    assert pool.reserve(b"", 0, "retracted", range(3)) is None, "two of four window slots are locked"
    locked.drop("tier")
    assert not pool.audit() and pool.counts()["host_slots_cached"] == 1


def test_what_a_copy_did_not_write_is_not_found() -> None:
    pool = HostPool(HYBRID, {TOKENS: 8, WINDOW: 4, SLOTS: 2})
    lease = pool.reserve(PROMPT, 4, "copy", range(2, 4), state=True)
    assert lease is not None
    pool.drop_unread(lease, [3], state=True)
    pool.store(lease, PROMPT)
    lease.drop("tier")
    assert pool.match_pages(PROMPT, 16) == 16 and pool.match(PROMPT, 16) == 0 and not pool.audit()
    counts = pool.counts()
    assert (counts["host_slots_free"], counts["host_window_pages_cached"], counts["host_window_pages_free"]) == (
        2,
        1,
        3,
    )


def test_a_retracted_request_has_slots_that_no_prompt_finds() -> None:
    pool = HostPool(HYBRID, {TOKENS: 4, WINDOW: 4, SLOTS: 1})
    stored(pool, PROMPT, range(2, 4), state=True)
    lease = pool.reserve(b"", 4, "r1", range(2), state=True)
    assert lease is not None and pool.match_pages(PROMPT, 16) == 0 and pool.reserve(b"", 1, "r2") is None
    lease.drop("tier")
    counts = pool.counts()
    assert counts["host_pages_free"] == 4 and counts["host_slots_free"] == 1 and not pool.audit()


def test_bytes_of_a_slot_and_a_flush() -> None:
    pool = HostPool(PLAIN, {TOKENS: 4}, HostMemory(PLAIN, {TOKENS: 4}))
    (first, *_) = stored(pool, PROMPT)
    pool.slot_bytes(PageSpace.TOKENS, first)[:2] = b"ab"
    assert bytes(pool.slot_bytes(PageSpace.TOKENS, first)[:2]) == b"ab" and pool.num_tokens == 16
    locked = pool.lock(PROMPT[:16], "load")
    assert pool.flush() == 3 and locked is not None and pool.match(PROMPT, 16) == 4


@pytest.mark.parametrize(("by_size", "field"), [(True, "hicache_size"), (False, "hicache_ratio")])
def test_a_host_without_the_memory_for_the_slots_refuses_the_flag(by_size: bool, field: str) -> None:
    slots = {TOKENS: 4, WINDOW: 2, SLOTS: 1}
    needed = sum(count * HYBRID.space_bytes(space) for space, count in slots.items())
    check_host_memory([HYBRID], slots, by_size=by_size, available=needed)
    with pytest.raises(ConfigError, match=f"lower --{field.replace('_', '-')}") as refused:
        check_host_memory([HYBRID], slots, by_size=by_size, available=needed - 1)
    assert refused.value.field == field
    for space in slots:  # no prompt could go on from what is there
        with pytest.raises(ConfigError, match=f"raise --{field.replace('_', '-')}") as refused:
            check_host_memory([HYBRID], slots | {space: 0}, by_size=by_size, available=needed)
        assert refused.value.field == field


def test_a_host_tier_may_be_limited_to_a_share_of_the_free_memory() -> None:
    slots = {TOKENS: 4}
    needed = 4 * PLAIN.space_bytes(TOKENS)
    check_host_memory([PLAIN], slots, by_size=False, available=2 * needed, fraction=0.5)
    with pytest.raises(ConfigError, match="50% of it for the tier; lower --hicache-ratio"):
        check_host_memory([PLAIN], slots, by_size=False, available=2 * needed - 2, fraction=0.5)


def test_the_ranks_of_a_host_share_its_memory() -> None:
    layout, slots = hash_layout(4, num_heads=2), {TOKENS: 4}
    config = ServerConfig(parallel=ParallelConfig(tp_size=2, pp_size=2, nnodes=2, dp_size=1))
    shape = ParallelShape(tp_size=2, pp_size=2)
    for rank in range(4):
        built = SimpleNamespace(device=SimpleNamespace(type="cpu"), coord=shape.coord(rank), layout=layout)
        found = layouts_on_host(config, built)  # type: ignore[arg-type]
        assert found == [layout.of_rank(shape.coord(one)) for one in ((0, 1), (2, 3))[rank // 2]]
    needed = sum(4 * one.space_bytes(TOKENS) for one in found)
    check_host_memory(found, slots, by_size=True, available=needed)
    with pytest.raises(ConfigError, match="for 2 ranks of this host"):
        check_host_memory(found, slots, by_size=True, available=needed - 1)
