"""KVMemory with a prefix cache: shared beginnings, eviction for new leases, locks as long as any hold."""

from __future__ import annotations

import random

import pytest

from pdserve.memory.kv_memory import KVMemory
from pdserve.memory.lease import Lease
from pdserve.memory.prefix_cache import Eviction
from tests.unit.memory.kit import LAYOUT, PAGE_TOKENS, PageTable, letters, make_memory


def serve(memory: KVMemory, text: str, owner: str = "r", priority: int = 0) -> Lease:
    """A request that has computed and cached all of its prompt."""
    num_tokens = len(text) * PAGE_TOKENS
    lease = memory.reserve_tokens(num_tokens, owner, letters(text), num_tokens)
    assert lease is not None
    memory.cache(lease, letters(text), priority)
    return lease


def state(memory: KVMemory) -> tuple[object, ...]:
    tree = memory.pages.tree
    assert tree is not None
    nodes = sorted((node.pages[0], node.end, node.locks, node.stamp, node.hits) for node in tree.nodes())
    return memory.counts(), memory.holders(), tree.version, memory.pages.allocator.free_pages(), nodes


def test_a_second_request_uses_the_pages_of_the_first() -> None:
    memory = make_memory(8)
    first = serve(memory, "abc")
    second = memory.reserve_tokens(4 * PAGE_TOKENS, "r2", letters("abcd"), 4 * PAGE_TOKENS - 1)
    assert second is not None
    assert second.pages[:3] == first.pages and second.num_prefix_pages == 3
    assert memory.holders() == {"r": 0, "r2": 1}
    assert (memory.counts()["pages_cached"], memory.counts()["pages_free"]) == (3, 4)
    assert memory.audit() == []


def test_the_last_token_is_left_to_compute_when_the_caller_says_so() -> None:
    memory = make_memory(8)
    serve(memory, "abc").drop("request")
    assert memory.match_prefix(letters("abc"), 3 * PAGE_TOKENS) == 3 * PAGE_TOKENS
    assert memory.match_prefix(letters("abc"), 3 * PAGE_TOKENS - 1) == 2 * PAGE_TOKENS
    lease = memory.reserve_tokens(3 * PAGE_TOKENS, "r", letters("abc"), 3 * PAGE_TOKENS - 1)
    assert lease is not None and lease.num_prefix_pages == 2
    own = lease.pages[2]
    memory.cache(lease, letters("abc"))
    assert lease.owned == [own], "the cache had this page already"
    lease.drop("request")
    assert memory.counts()["pages_free"] + memory.counts()["pages_cached"] == 8
    assert memory.audit() == []


def test_a_half_full_page_is_not_cached() -> None:
    memory = make_memory(4)
    lease = memory.reserve_tokens(3, "r")
    assert lease is not None
    memory.cache(lease, letters("ab")[: 3 * 4])
    assert memory.counts()["pages_cached"] == 1
    assert lease.owned == lease.pages[1:]


def test_two_that_compute_the_same_at_once_end_with_one_copy() -> None:
    memory = make_memory(8)
    one, two = memory.reserve_tokens(6, "one"), memory.reserve_tokens(8, "two")
    assert one is not None and two is not None
    mine = list(two.pages)
    memory.cache(one, letters("ab"))
    memory.cache(two, letters("abcd"))
    assert two.pages == mine, "page tables stay true"
    assert memory.holders() == {"one": 1, "two": 4}, "or `two` would need its own pages and lock those of `one`"
    memory.cache(two, letters("abcd"), ending=True)
    assert memory.holders() == {"one": 1, "two": 2}, "c and d are cached, a and b are spares"
    memory.cache(one, letters("abc"))
    assert memory.holders() == {"one": 1, "two": 2}
    assert memory.audit() == []
    one.drop("request")
    two.drop("request")
    counts = memory.counts()
    assert (counts["pages_free"], counts["pages_cached"], counts["pages_evictable"]) == (4, 4, 4)
    assert memory.audit() == []


def test_the_match_is_locked_before_room_is_made() -> None:
    freed: list[int] = []
    memory = make_memory(4, freed)
    old = serve(memory, "ab")
    shared = list(old.pages)
    old.drop("request")
    serve(memory, "xy").drop("request")
    lease = memory.reserve_tokens(4 * PAGE_TOKENS, "r", letters("abcd"), 4 * PAGE_TOKENS)
    assert lease is not None and lease.pages[:2] == shared, "`ab` was the oldest"
    assert sorted(freed) == sorted(lease.pages[2:])
    assert memory.match_prefix(letters("xy"), 99) == 0
    assert memory.audit() == []


def test_a_lease_that_cannot_be_had_changes_nothing() -> None:
    freed: list[int] = []
    memory = make_memory(6, freed)
    serve(memory, "abc").drop("request")
    running = memory.reserve_tokens(2 * PAGE_TOKENS, "running")
    assert running is not None
    memory.match_prefix(letters("ab"), 99)
    refused = memory.reserve_tokens(7 * PAGE_TOKENS, "big", letters("abcdefg"), 99)
    before = state(memory)
    assert refused is None and freed == []
    assert memory.reserve_tokens(5 * PAGE_TOKENS, "big") is None
    assert memory.reserve_tokens(5 * PAGE_TOKENS, "big", letters("abcde"), 99) is None
    assert not memory.grow(running, 7 * PAGE_TOKENS)
    assert state(memory) == before and freed == [] and running.pages == [3, 4]
    assert memory.audit() == []


def test_growing_evicts() -> None:
    freed: list[int] = []
    memory = make_memory(4, freed)
    serve(memory, "abc").drop("request")
    lease = memory.reserve_tokens(PAGE_TOKENS, "r")
    assert lease is not None and memory.num_available == 3
    assert memory.grow(lease, PAGE_TOKENS) and len(lease.pages) == 1
    assert memory.grow(lease, PAGE_TOKENS * 2 + 1) and len(lease.pages) == 3
    assert freed == [1, 2] and memory.match_prefix(letters("abc"), 99) == PAGE_TOKENS
    assert memory.grow(lease, PAGE_TOKENS * 4) and not memory.grow(lease, PAGE_TOKENS * 5)
    assert memory.audit() == []


def test_pages_stay_while_a_copy_worker_reads_after_the_request_has_ended() -> None:
    freed: list[int] = []
    memory = make_memory(4, freed)
    serve(memory, "ab").drop("request")
    lease = memory.reserve_tokens(3 * PAGE_TOKENS, "r", letters("abc"), 99)
    assert lease is not None and lease.num_prefix_pages == 2
    lease.hold("send")
    lease.drop("request")
    assert memory.num_available == 1 and memory.flush() == 0
    assert memory.reserve_tokens(2 * PAGE_TOKENS, "next") is None
    assert freed == []
    lease.drop("send")
    assert freed == [2] and memory.num_available == 4
    assert memory.reserve_tokens(4 * PAGE_TOKENS, "next") is not None
    assert memory.audit() == []


def test_caching_fewer_tokens_than_before_keeps_the_lock() -> None:
    memory = make_memory(4)
    lease = serve(memory, "abc")
    memory.cache(lease, letters("a"))
    memory.cache(lease, b"")
    assert memory.counts()["pages_evictable"] == 0
    assert memory.audit() == []


def test_flush_drops_what_no_lease_uses() -> None:
    freed: list[int] = []
    memory = make_memory(6, freed)
    serve(memory, "abc").drop("request")
    lease = memory.reserve_tokens(2 * PAGE_TOKENS, "r", letters("ax"), 99)
    assert lease is not None
    version = memory.cache_version
    assert memory.flush() == 2 and sorted(freed) == [1, 2]
    assert memory.cache_version != version
    assert memory.match_prefix(letters("abc"), 99) == PAGE_TOKENS
    lease.drop("request")
    assert memory.flush() == 1 and memory.counts()["pages_free"] == 6


@pytest.mark.parametrize(
    ("eviction", "survivor"), [("lru", "c"), ("lfu", "a"), ("priority", "b")], ids=["lru", "lfu", "priority"]
)
def test_the_policy_decides_who_survives(eviction: Eviction, survivor: str) -> None:
    memory = make_memory(3, eviction=eviction)
    for text, priority in (("a", 0), ("b", 5), ("c", 0)):
        serve(memory, text, priority=priority).drop("request")
    serve(memory, "a").drop("request")
    serve(memory, "b").drop("request")
    for _ in range(3):
        serve(memory, "a").drop("request")
    for text in ("b", "c"):
        serve(memory, text).drop("request")
    assert memory.reserve_tokens(2 * PAGE_TOKENS, "r") is not None
    assert [text for text in "abc" if memory.match_prefix(letters(text), 99)] == [survivor]


def test_without_a_cache_everything_is_free_at_the_end() -> None:
    memory = KVMemory(LAYOUT, 4, PageTable(1, 4), 1)
    lease = memory.reserve_tokens(4, "r", letters("ab"), 4)
    assert lease is not None and lease.num_prefix_pages == 0
    memory.cache(lease, letters("ab"))
    assert memory.match_prefix(letters("ab"), 99) == 0 and not memory.has_prefix_cache
    assert memory.cache_version == 0 and memory.flush() == 0
    lease.drop("request")
    counts = memory.counts()
    assert (counts["pages_free"], counts["pages_cached"], counts["pages_evictable"]) == (4, 0, 0)
    assert memory.audit() == []


def test_more_cannot_be_cached_than_the_lease_has() -> None:
    memory = make_memory(4)
    lease = memory.reserve_tokens(PAGE_TOKENS, "r")
    assert lease is not None
    with pytest.raises(AssertionError, match="2 pages to cache of a lease of 1"):
        memory.cache(lease, letters("ab"))


def test_a_dead_lease_takes_nothing() -> None:
    memory = make_memory(4)
    lease = serve(memory, "a")
    lease.drop("request")
    with pytest.raises(AssertionError, match="dead lease"):
        memory.grow(lease, 4)
    with pytest.raises(AssertionError, match="dead lease"):
        memory.cache(lease, letters("a"))
    assert memory.audit() == []


def test_a_lease_has_no_more_cached_pages_than_it_asked_for() -> None:
    memory = make_memory(6)
    serve(memory, "abcd").drop("request")
    lease = memory.reserve_tokens(2 * PAGE_TOKENS, "r", letters("abcd"), 4 * PAGE_TOKENS)
    assert lease is not None
    assert (lease.pages, lease.num_prefix_pages) == ([0, 1], 2)
    assert memory.audit() == []


@pytest.mark.parametrize("seed", range(40))
def test_a_release_frees_what_was_foretold_and_a_prompt_takes_what_was_foretold(seed: int) -> None:
    rng = random.Random(seed)
    memory = make_memory(40)
    texts = ["".join(rng.choice("ab") for _ in range(6)) for _ in range(9)]
    leases = []
    for text in texts[:7]:
        tokens = letters(text)
        lease = memory.reserve_tokens(6 * PAGE_TOKENS, text, tokens, 5 * PAGE_TOKENS)
        if lease is not None:
            computed = rng.randint(lease.num_prefix_pages, 6) * 4 * PAGE_TOKENS
            memory.cache(lease, tokens[:computed])
            leases.append((lease, tokens[: rng.choice((computed, 6 * 4 * PAGE_TOKENS))]))
    if seed % 4 == 0:
        leases[0][0].hold("remote")
        leases[0] = leases[0][0], b""
    going = rng.sample(leases, rng.randint(1, len(leases)))
    wanted, most = letters(texts[-1]), 5 * PAGE_TOKENS
    after = memory.preview_release(lease for lease, _ in going)
    expected = memory.num_available + after.num_pages
    taken = memory.num_taken(6 * PAGE_TOKENS, wanted, most, after)
    for lease, tokens in going:
        memory.cache(lease, tokens, ending=True)
        lease.drop("request")
    assert memory.num_available == expected
    if taken <= expected:
        assert memory.reserve_tokens(6 * PAGE_TOKENS, "new", wanted, most) is not None
        assert memory.num_available == expected - taken
    assert memory.audit() == []


def test_a_role_without_a_prefix_cache_leaves_it_unused_until_another_role_uses_it() -> None:
    memory = make_memory(8)
    serve(memory, "abc").drop("request")
    memory.change_role(6, prefix_cache=False)
    assert (memory.aux.num_total, memory.has_prefix_cache) == (6, False)
    assert memory.match_prefix(letters("abc"), 3 * PAGE_TOKENS) == 0
    assert memory.num_taken(3 * PAGE_TOKENS, letters("abc"), 3 * PAGE_TOKENS) == 3
    lease = serve(memory, "abd")
    assert (lease.num_prefix_pages, memory.counts()["pages_cached"]) == (0, 3), "neither used nor filled"
    lease.drop("request")
    serve(memory, "uvwxyz").drop("request")
    assert memory.counts()["pages_cached"] == 2, "its pages give way to a request"
    memory.change_role(6, prefix_cache=True)
    assert memory.match_prefix(letters("abc"), 3 * PAGE_TOKENS) == 2 * PAGE_TOKENS
    assert memory.audit() == []


def test_a_memory_without_a_prefix_cache_begins_one_with_a_role_that_has_it() -> None:
    memory = KVMemory(LAYOUT, 8, PageTable(3, 8), 0)
    serve(memory, "abc").drop("request")
    memory.change_role(2, prefix_cache=True)
    assert memory.match_prefix(letters("abc"), 3 * PAGE_TOKENS) == 0
    serve(memory, "abc").drop("request")
    assert memory.match_prefix(letters("abc"), 3 * PAGE_TOKENS) == 3 * PAGE_TOKENS
    assert memory.audit() == []


def test_a_role_does_not_change_while_a_lease_lives() -> None:
    memory = make_memory(8)
    lease = serve(memory, "abc")
    with pytest.raises(AssertionError, match="still holds pages"):
        memory.change_role(2, prefix_cache=True)
    lease.drop("request")
    memory.change_role(2, prefix_cache=True)
