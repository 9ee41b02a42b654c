"""The audit finds what is wrong: each kind of damage is done on purpose, and must be named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.memory.kv_memory import KVMemory
from pdserve.memory.lease import Lease
from tests.unit.memory.kit import PAGE_TOKENS, letters, make_memory

Damage = Callable[[KVMemory, Lease, Lease], None]


def busy() -> tuple[KVMemory, Lease, Lease]:
    """Ten pages: `one` has cached 0, 1 and owns 2; `two` shares 0, 1 and owns 3; the rest is free."""
    memory = make_memory(10)
    one = memory.reserve_tokens(3 * PAGE_TOKENS, "one")
    assert one is not None
    memory.cache(one, letters("ab"))
    two = memory.reserve_tokens(3 * PAGE_TOKENS, "two", letters("abc"), 99)
    assert two is not None and two.pages == [0, 1, 3]
    assert memory.table.open(two.pages) is not None
    assert memory.aux.reserve(1, "two") is not None
    return memory, one, two


def drop_a_free_page(memory: KVMemory, one: Lease, two: Lease) -> None:
    allocator = memory.pages.allocator
    pages = allocator.take(allocator.num_free)
    assert pages is not None and pages[-1] == 9
    allocator.give_back(pages[:-1])


def forget_to_mark(memory: KVMemory, one: Lease, two: Lease) -> None:
    allocator = memory.pages.allocator
    listed, marked = allocator.free_pages()
    allocator.free_pages = lambda: (listed, marked[:-1])  # type: ignore[method-assign]


def own_a_free_page(memory: KVMemory, one: Lease, two: Lease) -> None:
    one.pages.append(9)


def own_another_s_page(memory: KVMemory, one: Lease, two: Lease) -> None:
    one.pages.append(3)


def own_a_cached_page(memory: KVMemory, one: Lease, two: Lease) -> None:
    two.spares.append(1)


def own_a_page_of_nowhere(memory: KVMemory, one: Lease, two: Lease) -> None:
    two.pages.append(10)


def lose_a_page(memory: KVMemory, one: Lease, two: Lease) -> None:
    two.pages.pop()


def lose_a_lease(memory: KVMemory, one: Lease, two: Lease) -> None:
    del memory.pages.live_leases[two]


def lock_once_more(memory: KVMemory, one: Lease, two: Lease) -> None:
    assert memory.pages.tree is not None and two.node is not None
    memory.pages.tree.lock(two.node)


def unlock_early(memory: KVMemory, one: Lease, two: Lease) -> None:
    assert memory.pages.tree is not None and two.node is not None
    memory.pages.tree.unlock(two.node)


def evict_under_a_lease(memory: KVMemory, one: Lease, two: Lease) -> None:
    tree = memory.pages.tree
    assert tree is not None and two.node is not None
    tree.unlock(two.node)
    tree.unlock(two.node)
    memory.pages.allocator.give_back(tree.evict(2))


def use_a_page_that_is_not_locked(memory: KVMemory, one: Lease, two: Lease) -> None:
    two.pages[1] = 7


def miscount_the_cache(memory: KVMemory, one: Lease, two: Lease) -> None:
    assert memory.pages.tree is not None
    memory.pages.tree.num_cached += 1
    memory.pages.tree.num_evictable += 1


def keep_a_dead_lease(memory: KVMemory, one: Lease, two: Lease) -> None:
    memory.pages.end = lambda lease: None  # type: ignore[method-assign]
    one.drop("request")


def lose_an_aux_slot(memory: KVMemory, one: Lease, two: Lease) -> None:
    next(iter(memory.aux.live_leases)).pages.clear()


def lose_a_row(memory: KVMemory, one: Lease, two: Lease) -> None:
    memory.table.free_rows.remove(2)


def free_an_open_row(memory: KVMemory, one: Lease, two: Lease) -> None:
    memory.table.free_rows.append(memory.table.open_rows[0])


def free_a_row_twice(memory: KVMemory, one: Lease, two: Lease) -> None:
    memory.table.free_rows.append(memory.table.free_rows[0])


ONE, TWO = "the lease of 'one' held by request", "the lease of 'two' held by request"
CASES: list[tuple[Damage, list[str]]] = [
    (drop_a_free_page, ["pages: no owner of 1 of 10 (9)"]),
    (forget_to_mark, ["pages: free list and free marks differ in 1 of 10 (9)"]),
    (own_a_free_page, [f"pages: page 9 of 10 has 2 owners: the free list and {ONE}"]),
    (own_another_s_page, [f"pages: page 3 of 10 has 2 owners: {ONE} and {TWO}"]),
    (own_a_cached_page, [f"pages: page 1 of 10 has 2 owners: the cache and {TWO}"]),
    (own_a_page_of_nowhere, [f"pages: {TWO} has page 10, which does not exist"]),
    (lose_a_page, ["pages: no owner of 1 of 10 (3)"]),
    (
        lose_a_lease,
        [
            "pages: no owner of 1 of 10 (3)",
            "pages: 2 cached pages (0, 1) have 2 locks, live leases have 1",
        ],
    ),
    (lock_once_more, ["pages: 2 cached pages (0, 1) have 3 locks, live leases have 2"]),
    (unlock_early, ["pages: 2 cached pages (0, 1) have 1 locks, live leases have 2"]),
    (
        evict_under_a_lease,
        [f"pages: {ONE} locks 2 pages that left the cache", f"pages: {TWO} locks 2 pages that left the cache"],
    ),
    (use_a_page_that_is_not_locked, [f"pages: {TWO} uses 1 pages (7) that it does not lock"]),
    (
        miscount_the_cache,
        [
            "pages: the cache has 2 pages and counts 3",
            "pages: 0 cached pages are not locked, the cache counts 1",
        ],
    ),
    (keep_a_dead_lease, ["pages: lease of 'one' held by none has ended and still has 3 pages"]),
    (lose_an_aux_slot, ["aux: no owner of 1 of 2 (0)"]),
    (lose_a_row, ["rows: 1 of 3 are lost: [2]"]),
    (free_an_open_row, ["rows: 1 of 3 are both open and free: [0]"]),
    (free_a_row_twice, ["rows: the free list has 1 rows twice"]),
]


@pytest.mark.parametrize(("damage", "expected"), CASES, ids=[damage.__name__ for damage, _ in CASES])
def test_damage_is_found_and_named(damage: Damage, expected: list[str]) -> None:
    memory, one, two = busy()
    assert memory.audit() == []
    damage(memory, one, two)
    assert memory.audit() == expected


def test_an_empty_memory_is_in_order() -> None:
    assert make_memory(0).audit() == []


def test_a_long_list_is_cut() -> None:
    memory = make_memory(40)
    assert memory.pages.allocator.take(40) is not None
    assert memory.audit() == ["pages: no owner of 40 of 40 (0, 1, 2, 3, 4, 5, 6, 7, ...)"]


def test_holders_say_who_has_what() -> None:
    memory, one, two = busy()
    assert memory.holders() == {"one": 1, "two": 1}
    two.hold("send")
    two.drop("request")
    assert [repr(lease) for lease in memory.pages.live_leases] == [
        "lease of 'one' held by request",
        "lease of 'two' held by send",
    ]
    two.drop("send")
    one.drop("request")
    assert memory.holders() == {} and not memory.pages.live_leases
