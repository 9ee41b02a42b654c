"""Small pools and short prompts for the memory tests, and what a naive prefix cache does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hypothesis import strategies as st

from pdserve.memory.kv_memory import KVMemory, PageTable
from pdserve.memory.prefix_cache import Eviction, RadixTree, token_bytes
from pdserve.sim.hash_lm import hash_layout

PAGE_TOKENS = 2
PAGES: tuple[tuple[int, int], ...] = ((0, 0), (0, 1), (1, 0))
"""Few and alike, so that prompts share beginnings, and pages their first tokens."""
Prefix = tuple[tuple[int, int], ...]
prefixes = st.lists(st.sampled_from(PAGES), max_size=6).map(tuple)
LAYOUT = hash_layout(PAGE_TOKENS, num_layers=1)


def tokens_of(prefix: Sequence[tuple[int, int]]) -> bytes:
    """The bytes of all tokens of some pages."""
    return token_bytes([token for page in prefix for token in page])


def letters(text: str) -> bytes:
    """Tokens of a prompt in which every letter stands for a page."""
    return token_bytes([token for letter in text for token in (ord(letter), 7)])


def make_memory(num_pages: int, freed: list[int] | None = None, eviction: Eviction = "lru") -> KVMemory:
    """Memory with a prefix cache, pages of `PAGE_TOKENS` tokens; `freed` collects what comes back."""
    on_free = None if freed is None else freed.extend
    return KVMemory(LAYOUT, num_pages, PageTable(3, 8), 2, on_free, prefix_cache=True, eviction=eviction)


def content_of(tree: RadixTree) -> dict[Prefix, int]:
    """What a tree has, page by page, read off its nodes; checks that the nodes fit together."""
    size = 4 * PAGE_TOKENS
    upto: dict[int, bytes] = {}
    content: dict[Prefix, int] = {}
    for node in tree.nodes():
        assert node.pages and len(node.key) == len(node.pages) * size
        assert node.parent is not None and node.parent.children[bytes(node.key[:size])] is node
        before = upto.get(id(node.parent), b"")
        upto[id(node)] = before + node.key
        assert node.end * size == len(upto[id(node)])
        for i, page in enumerate(node.pages):
            prefix = _prefix_of((before + node.key)[: len(before) + (i + 1) * size])
            assert prefix not in content
            content[prefix] = page
    return content


def _prefix_of(tokens: bytes) -> Prefix:
    named = {tokens_of([page]): page for page in PAGES}
    size = 4 * PAGE_TOKENS
    return tuple(named[tokens[at : at + size]] for at in range(0, len(tokens), size))


@dataclasses.dataclass
class Entry:
    """One cached page of the naive cache."""

    page: int
    stamp: int
    hits: int
    priority: int


class NaiveCache:
    """A prefix cache as a dict from token prefixes to single pages; everything is found by looking at all of them."""

    def __init__(self, eviction: Eviction) -> None:
        self.entries: dict[Prefix, Entry] = {}
        self.locks: list[Prefix] = []
        self._eviction = eviction
        self._clock = 0

    def match(self, prefix: Prefix, max_pages: int) -> Prefix:
        """The longest cached beginning."""
        num = 0
        while num < min(len(prefix), max_pages) and prefix[: num + 1] in self.entries:
            num += 1
        return prefix[:num]

    def pages(self, prefix: Prefix) -> list[int]:
        """The pages of a cached prefix."""
        return [self.entries[prefix[: i + 1]].page for i in range(len(prefix))]

    def use(self, prefix: Prefix) -> None:
        """Count a re-use."""
        self._clock += 1
        for i in range(len(prefix)):
            entry = self.entries[prefix[: i + 1]]
            entry.stamp, entry.hits = self._clock, entry.hits + 1

    def insert(self, prefix: Prefix, pages: Sequence[int], priority: int) -> list[int]:
        """Keep what is new; returns the indices of the pages that were taken."""
        self._clock += 1
        taken = []
        for i, page in enumerate(pages):
            entry = self.entries.get(prefix[: i + 1])
            if entry is None:
                self.entries[prefix[: i + 1]] = Entry(page, self._clock, 0, priority)
                taken.append(i)
            else:
                entry.stamp, entry.priority = self._clock, max(entry.priority, priority)
        return taken

    def is_locked(self, prefix: Prefix) -> bool:
        """Whether a locked path leads through the last page of `prefix`."""
        return any(lock[: len(prefix)] == prefix for lock in self.locks)

    def evictable(self) -> list[Prefix]:
        """Prefixes whose last page is not locked."""
        return [prefix for prefix in self.entries if not self.is_locked(prefix)]

    def evict(self, num_pages: int) -> list[int]:
        """Page by page, the first by the policy of those that nothing is behind."""
        freed: list[int] = []
        while len(freed) < num_pages:
            inner = {prefix[:-1] for prefix in self.entries}
            leaves = [prefix for prefix in self.evictable() if prefix not in inner]
            if not leaves:
                break
            freed.append(self.entries.pop(min(leaves, key=self._order)).page)
        return freed

    def clear(self) -> list[int]:
        """All that is not locked."""
        return [self.entries.pop(prefix).page for prefix in self.evictable()]

    def _order(self, prefix: Prefix) -> tuple[int, int]:
        entry = self.entries[prefix]
        rank = {"lru": 0, "lfu": entry.hits, "priority": entry.priority}[self._eviction]
        return rank, entry.stamp
