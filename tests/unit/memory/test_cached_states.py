"""States on radix nodes: where they are valid, their own LRU, and what a request can take."""

from __future__ import annotations

from pdserve.memory.cached_states import CachedStates, RadixNode
from pdserve.memory.group_pools import GroupPoolSizes
from pdserve.memory.kv_memory import KVMemory, PageTable
from pdserve.memory.lease import Lease
from pdserve.memory.prefix_cache import RadixTree
from pdserve.sim.hash_lm import hash_layout
from tests.unit.memory.kit import PAGE_TOKENS, letters


class Tree:
    """A radix tree with states; one letter is one page."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.states = CachedStates(self.freed.append)
        self.tree = RadixTree(PAGE_TOKENS, "lru", self.states)

    def insert(self, text: str, first_page: int) -> RadixNode:
        return self.tree.insert(letters(text), range(first_page, first_page + len(text))).node

    def deepest(self, text: str) -> int | None:
        node = self.tree.deepest_state(letters(text), len(text))
        return None if node is None else node.state


def test_a_state_counts_at_the_end_of_its_node_only() -> None:
    it = Tree()
    assert it.states.add(it.insert("abc", 0), 7)
    assert (it.deepest("abc"), it.deepest("abcd"), it.deepest("ab"), it.deepest("abx")) == (7, 7, None, None)
    middle = it.tree.node_at(letters("ab"))
    assert middle is not None and middle.state is None, "the lower half keeps the state"
    assert it.states.add(middle, 8)
    assert (it.deepest("abc"), it.deepest("abx"), it.deepest("a")) == (7, 8, None)
    assert it.tree.node_at(letters("abq")) is None


def test_pages_behind_a_state_begin_a_node_of_their_own() -> None:
    it = Tree()
    it.states.add(it.insert("ab", 0), 7)
    longer = it.insert("abcd", 0)
    assert (longer.end, longer.state, it.deepest("abcd")) == (4, None, 7)


def test_a_node_has_one_state() -> None:
    it = Tree()
    node = it.insert("ab", 0)
    assert it.states.add(node, 7) and not it.states.add(node, 8)
    assert node.state == 7 and len(it.states) == 1


def test_states_go_in_an_order_of_their_own_and_pages_stay() -> None:
    it = Tree()
    one, two, three = (it.insert(text, 10 * i) for i, text in enumerate(("ax", "bx", "cx")))
    for slot, node in enumerate((one, two, three)):
        it.states.add(node, slot)
    it.states.use(one)
    it.states.lock(two)
    version = it.states.version
    assert [it.states.evict() for _ in range(3)] == [2, 0, None], "a locked state stays"
    assert it.states.version > version and it.tree.num_cached == 6 and it.freed == []
    it.states.unlock(two)
    assert it.states.evict() == 1


def test_a_state_goes_with_the_end_of_its_node() -> None:
    it = Tree()
    it.states.add(it.insert("abc", 0), 7)
    it.tree.evict(1)
    assert it.freed == [7] and it.deepest("abc") is None and it.tree.num_cached == 2
    it.states.add(it.insert("ab", 0), 8)
    it.tree.clear()
    assert it.freed == [7, 8] and len(it.states) == 0


def memory_of(num_slots: int) -> KVMemory:
    layout = hash_layout(PAGE_TOKENS, has_state=True)
    sizes = GroupPoolSizes(num_slots=num_slots)
    return KVMemory(layout, 12, PageTable(4, 12), 2, prefix_cache=True, group_sizes=sizes)


def run(memory: KVMemory, text: str, keep: int | None = None) -> Lease:
    """A request that has computed all of `text`, and keeps its state behind `keep` pages."""
    lease = memory.reserve_tokens(len(text) * PAGE_TOKENS, text, letters(text), (len(text) - 1) * PAGE_TOKENS)
    assert lease is not None and lease.groups is not None
    if keep is not None:
        assert memory.groups.keep(lease.groups, keep * PAGE_TOKENS, evict=True) >= 0
    memory.groups.copied(lease.groups)
    memory.cache(lease, letters(text))
    return lease


def end(memory: KVMemory, lease: Lease, text: str) -> None:
    memory.cache(lease, letters(text), ending=True)
    lease.drop("request")


def test_a_request_takes_pages_up_to_the_deepest_state() -> None:
    memory = memory_of(4)
    end(memory, run(memory, "abcd", keep=2), "abcd")
    wanted = letters("abcdef")
    assert memory.match_prefix(wanted, 99) == 2 * PAGE_TOKENS
    assert memory.match_pages(wanted, 99) == 4 * PAGE_TOKENS
    assert memory.has_state_at(letters("ab")) and not memory.has_state_at(letters("abcd"))
    lease = memory.reserve_tokens(6 * PAGE_TOKENS, "next", wanted, 5 * PAGE_TOKENS)
    assert lease is not None and lease.groups is not None and lease.num_prefix_pages == 2
    source = memory.groups.source_of(lease.groups)
    assert source >= 0 and source != lease.groups.slot
    assert memory.groups.states is not None and memory.groups.states.num_evictable == 0, "it is being copied"
    memory.groups.copied(lease.groups)
    assert memory.groups.states.num_evictable == 1
    lease.drop("request")
    received = memory.reserve_tokens(6 * PAGE_TOKENS, "transfer", wanted, 5 * PAGE_TOKENS, needs_state=False)
    assert received is not None and received.groups is not None and received.num_prefix_pages == 4
    assert memory.groups.source_of(received.groups) == -1
    received.drop("request")
    assert memory.audit() == []


def test_the_only_slot_moves_from_the_cache_to_the_request() -> None:
    memory = memory_of(2)
    other = memory.reserve_tokens(PAGE_TOKENS, "other")
    first = memory.reserve_tokens(PAGE_TOKENS, "first")
    assert other is not None and first is not None and memory.reserve_tokens(1, "late") is None
    first.drop("request")
    lease = run(memory, "abc")
    assert lease.groups is not None
    assert memory.groups.keep(lease.groups, 2 * PAGE_TOKENS, evict=True) == -1
    lease.drop("request")
    other.drop("request")
    end(memory, run(memory, "abc", keep=2), "abc")
    other = memory.reserve_tokens(PAGE_TOKENS, "other")
    assert other is not None and memory.groups.states is not None
    cached = next(memory.groups.states.slots())
    lease = memory.reserve_tokens(3 * PAGE_TOKENS, "next", letters("abx"), 2 * PAGE_TOKENS)
    assert lease is not None and lease.groups is not None
    assert (lease.groups.slot, memory.groups.source_of(lease.groups), lease.num_prefix_pages) == (cached, -1, 2)
    assert len(memory.groups.states) == 0 and memory.audit() == []


def test_a_state_behind_pages_of_another_request_waits_unless_its_slot_is_needed() -> None:
    memory = memory_of(3)
    end(memory, run(memory, "ab"), "ab")
    lease = run(memory, "abc", keep=3)
    assert lease.groups is not None and memory.counts()["slots_cached"] == 0
    assert list(lease.groups.kept) == [3 * PAGE_TOKENS], "the cache has its first pages from another request"
    end(memory, lease, "abc")
    assert memory.has_state_at(letters("abc"))
    waiting = run(memory, "abcd"[:2] + "x", keep=3)
    assert waiting.groups is not None and waiting.groups.kept
    others = [memory.reserve_tokens(PAGE_TOKENS, name) for name in ("one", "two")]
    assert all(other is not None for other in others) and not waiting.groups.kept
    assert memory.reserve_tokens(PAGE_TOKENS, "three") is None and memory.audit() == []
