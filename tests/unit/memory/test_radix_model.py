"""The radix tree against a dict from token prefixes to pages, under each policy."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.memory.cached_states import RadixNode
from pdserve.memory.prefix_cache import Eviction, RadixTree
from tests.unit.memory.kit import PAGE_TOKENS, NaiveCache, Prefix, content_of, prefixes, tokens_of

priorities = st.integers(0, 2)
max_pages = st.integers(0, 7)


class TreeMachine(RuleBasedStateMachine):
    """Everything that the tree answers, the naive cache answers too."""

    eviction: Eviction = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree(PAGE_TOKENS, self.eviction)
        self.naive = NaiveCache(self.eviction)
        self.locked: list[tuple[RadixNode, Prefix]] = []
        self.names = itertools.count()
        self.seen: tuple[int, dict[Prefix, int]] = (self.tree.version, {})

    @rule(prefix=prefixes, priority=priorities)
    def insert(self, prefix: Prefix, priority: int) -> None:
        self._insert(prefix, priority, None)

    @precondition(lambda self: self.locked)
    @rule(data=st.data(), more=prefixes, priority=priorities)
    def insert_behind_a_lock_which_moves(self, data: st.DataObject, more: Prefix, priority: int) -> None:
        held, prefix = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        node = self._insert(prefix + more, priority, held)
        self.locked.append((node, prefix + more))

    def _insert(self, prefix: Prefix, priority: int, held: RadixNode | None) -> RadixNode:
        pages = [next(self.names) for _ in prefix]
        inserted = self.tree.insert(tokens_of(prefix), pages, priority, held)
        taken = self.naive.insert(prefix, pages, priority)
        assert list(range(inserted.taken_from, inserted.taken_to)) == taken
        assert self.tree.pages_of(inserted.node) == self.naive.pages(prefix)
        return inserted.node

    @rule(prefix=prefixes, most=max_pages, use=st.booleans(), lock=st.booleans())
    def match(self, prefix: Prefix, most: int, use: bool, lock: bool) -> None:
        expected = self.naive.match(prefix, most)
        assert self.tree.peek(tokens_of(prefix), most) == len(expected)
        found = self.tree.match(tokens_of(prefix), most)
        assert (found.num_pages, found.node.end) == (len(expected), len(expected))
        assert self.tree.pages_of(found.node) == self.naive.pages(expected)
        if use:
            self.tree.use(found.node)
            self.naive.use(expected)
        if lock:
            self.tree.lock(found.node)
            self.locked.append((found.node, expected))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node, prefix = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        assert self.tree.pages_of(node) == self.naive.pages(prefix), "a lock stays where it was, splits or not"
        self.tree.unlock(node)

    @rule(num_pages=st.integers(0, 5))
    def evict(self, num_pages: int) -> None:
        self.naive.locks = [prefix for _, prefix in self.locked]
        assert sorted(self.tree.evict(num_pages)) == sorted(self.naive.evict(num_pages))

    @rule()
    def clear(self) -> None:
        self.naive.locks = [prefix for _, prefix in self.locked]
        assert sorted(self.tree.clear()) == sorted(self.naive.clear())

    @invariant()
    def the_content_is_the_same(self) -> None:
        content = content_of(self.tree)
        assert content == {prefix: entry.page for prefix, entry in self.naive.entries.items()}
        self.naive.locks = [prefix for _, prefix in self.locked]
        assert self.tree.num_cached == len(content)
        assert self.tree.num_evictable == len(self.naive.evictable())
        version, before = self.seen
        assert (self.tree.version == version) == (content == before)
        self.seen = (self.tree.version, content)


class LfuMachine(TreeMachine):
    """The same with the least often used first."""

    eviction: Eviction = "lfu"


class PriorityMachine(TreeMachine):
    """The same with the lowest priority first."""

    eviction: Eviction = "priority"


BOUNDS = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLru = TreeMachine.TestCase
TestLru.settings = BOUNDS
TestLfu = LfuMachine.TestCase
TestLfu.settings = BOUNDS
TestPriority = PriorityMachine.TestCase
TestPriority.settings = BOUNDS
