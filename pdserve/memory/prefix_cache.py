"""The prefix cache: a radix tree that maps prompt prefixes to the KV pages that hold them. Owned by one `LeasePool`.

Keys are bytes of int32 token ids, cut at whole pages. Every node but the root has at least one page. No two children
of a node begin with the same page and salt (`SaltedTokens`), so a prompt has exactly one path:

    root ── [A B C] ─┬─ [D E]          a lock on E's node locks A..E: a lock counts on every node up to the root
                     └─ [F]            splitting gives both halves the same locks, stamp, hits and priority

Eviction takes pages from the ends of unlocked leaves, in the order of the policy, through a heap with at most one entry
a node. Ranks only grow, so an outdated entry is detected when it is popped, and is pushed again.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, SupportsIndex

import numpy as np

from pdserve.memory.cache_recorder import CacheRecorder
from pdserve.memory.cached_states import CachedStates, RadixNode
from pdserve.memory.cached_windows import CachedWindows
from pdserve.memory.layout import PageSpace

Eviction = Literal["lru", "lfu", "priority"]
TOKEN_BYTES = 4


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Return token ids as int32 bytes, the format of keys."""
    return np.asarray(token_ids, dtype=np.int32).tobytes()


class SaltedTokens(bytes):
    """The tokens of a prompt whose request has a cache salt: the prefix cache gives it pages of this salt alone.

    Slices from the first token on keep the salt. Tokens of another salt, or of none, are not equal.
    """

    salt: str

    @classmethod
    def of(cls, tokens: bytes, salt: str) -> SaltedTokens:
        """Return `tokens`, the int32 bytes of a prompt from its first token on, with a salt that is not empty."""
        assert salt
        salted = cls(tokens)
        salted.salt = salt
        return salted

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SaltedTokens) and other.salt == self.salt and bytes.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.salt, bytes.__hash__(self)))

    def __getitem__(self, index: SupportsIndex | slice) -> bytes:  # type: ignore[override]
        """Return a part as bytes, with the salt when it begins at the first token."""
        part = super().__getitem__(index)
        if isinstance(part, int):
            raise TypeError("tokens of a prompt are read in slices")
        begins = isinstance(index, slice) and not index.start and index.step is None
        return SaltedTokens.of(part, self.salt) if begins else part


def salt_of(tokens: bytes) -> str:
    """Return the cache salt of a prompt's tokens; empty without one."""
    return tokens.salt if isinstance(tokens, SaltedTokens) else ""


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: `num_pages` pages, which end where `node` ends. Valid until the tree changes."""

    node: RadixNode
    num_pages: int


_NONE_GOING: Mapping[RadixNode, int] = {}


def path_to(node: RadixNode | None) -> Iterator[RadixNode]:
    """Yield `node` and its parents, without the root; nothing for None."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


@dataclasses.dataclass(frozen=True, slots=True)
class Inserted:
    """Result of an insert: the tree has taken pages `[taken_from, taken_to)`; the pages before were cached already.

    `node` ends exactly behind the last inserted page.
    """

    node: RadixNode
    taken_from: int
    taken_to: int


class RadixTree:
    """Cached pages by their tokens. Scheduler thread only. `num_evictable` counts the pages of unlocked nodes.

    `version` changes whenever the content of the tree changes. `states`: of a model with STATE groups; `windows`: of a
    model with WINDOW groups. `recorder` gets each change; None: changes are not recorded.
    """

    def __init__(
        self,
        page_tokens: int,
        eviction: Eviction = "lru",
        states: CachedStates | None = None,
        windows: CachedWindows | None = None,
        recorder: CacheRecorder | None = None,
    ) -> None:
        self.page_tokens = page_tokens
        self.states = states
        self.windows = windows
        self.recorder = recorder
        self.eviction: Eviction = eviction
        self.num_cached = 0
        self.num_evictable = 0
        self.version = 0
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._root = RadixNode(None, bytearray(), [], 0)
        self._heap: list[tuple[int, int, int, RadixNode]] = []
        self._num_pushed = 0
        self._clock = 0

    def peek(self, tokens: bytes, max_pages: int) -> int:
        """Return how many pages of `tokens` are cached, at most `max_pages`. Changes nothing."""
        node, used = self._walk(tokens, max_pages)
        return node.end - len(node.pages) + used

    def peek_locked(self, tokens: bytes, max_pages: int, going: Mapping[RadixNode, int] | None = None) -> int:
        """Return how many pages of `tokens` are cached and locked: another lock makes no further page unevictable.

        At most `max_pages`. `going`: locks by node that do not count. Changes nothing.
        """
        node, used = self._walk(tokens, max_pages)
        gone = going or _NONE_GOING
        if node.locks > gone.get(node, 0):
            return node.end - len(node.pages) + used
        while node.parent is not None and node.locks <= gone.get(node, 0):
            node = node.parent
        return node.end

    def match(self, tokens: bytes, max_pages: int) -> Match:
        """Return the longest cached prefix of `tokens`, at most `max_pages`. May split a node; counts no use."""
        node, used = self._walk(tokens, max_pages)
        if used < len(node.pages):
            node = self._split(node, used)
        return Match(node, node.end)

    def deepest_state(self, tokens: bytes, max_pages: int) -> RadixNode | None:
        """Return the last node with a state on the path of the first `max_pages` pages of `tokens`; None without one.

        Changes nothing.
        """
        found, used = self._walk(tokens, max_pages)
        node = found if used == len(found.pages) else found.parent
        while node is not None and node.state is None:
            node = node.parent
        return node

    def usable(self, tokens: bytes, max_pages: int, first_read: Callable[[int], int]) -> int:
        """Return the leading pages of `tokens`, at most `max_pages`, behind which a prompt can continue.

        With states they end at a state, and with windows at a page behind which the window pages are cached, see
        `CachedWindows.usable` for `first_read`. Changes nothing.
        """
        num_pages = max_pages
        while True:
            if self.states is not None:
                node = self.deepest_state(tokens, num_pages)
                num_pages = 0 if node is None else node.end
            else:
                num_pages = self.peek(tokens, num_pages)
            if self.windows is None or num_pages == 0:
                return num_pages
            usable = self.windows.usable(self.backwards(tokens, num_pages), num_pages, first_read)
            if usable == num_pages or self.states is None:
                return usable
            num_pages = usable

    def backwards(self, tokens: bytes, max_pages: int) -> Iterator[int]:
        """Yield the cached pages of `tokens`, at most the first `max_pages`, from the last to the first."""
        found, used = self._walk(tokens, max_pages)
        yield from reversed(found.pages[:used])
        for node in path_to(found.parent):
            yield from reversed(node.pages)

    def node_at(self, tokens: bytes) -> RadixNode | None:
        """Return the node that ends with the pages of `tokens`, all whole; None when they are not all cached.

        May split a node; counts no use.
        """
        num_pages = len(tokens) // self._page_bytes
        if num_pages == 0 or self.peek(tokens, num_pages) < num_pages:
            return None
        return self.match(tokens, num_pages).node

    def use(self, node: RadixNode) -> None:
        """Count a reuse of all pages down to `node`."""
        self._clock += 1
        step: RadixNode | None = node
        while step is not None:
            step.stamp = self._clock
            step.hits += 1
            step = step.parent

    def lock(self, node: RadixNode) -> None:
        """Protect all pages down to `node` from eviction, until the same number of `unlock` calls."""
        assert self._holds(node), "lock of a node that was evicted"
        while node.parent is not None:
            if node.locks == 0:
                self.num_evictable -= len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, node: RadixNode) -> None:
        """Remove one lock from all nodes down to `node`."""
        while node.parent is not None:
            assert node.locks > 0, "unlocked more often than locked"
            node.locks -= 1
            if node.locks == 0:
                self.num_evictable += len(node.pages)
                self._queue(node)
            node = node.parent

    def pages_of(self, node: RadixNode) -> list[int]:
        """Return the pages from the root to the end of `node`, in token order."""
        parts: list[list[int]] = []
        while node.parent is not None:
            parts.append(node.pages)
            node = node.parent
        return [page for part in reversed(parts) for page in part]

    def insert(self, tokens: bytes, pages: Sequence[int], priority: int = 0, held: RadixNode | None = None) -> Inserted:
        """Insert `pages`, which hold the KV of `tokens` (exactly that many whole pages); take those that are not cached
        yet.

        `held`: a node on this path that the caller has locked; its lock moves to the returned node.
        """
        assert len(tokens) == len(pages) * self._page_bytes, f"{len(pages)} pages for {len(tokens)} bytes of tokens"
        found = self.match(tokens, len(pages))
        node, taken_from = found.node, found.num_pages
        alone = self._is_only_for(node, held, priority)
        self._visit(node, priority)
        if taken_from < len(pages):
            key, new = bytearray(tokens[taken_from * self._page_bytes :]), list(pages[taken_from:])
            if alone:
                self._append(node, key, new)
            else:
                node = self._add_child(node, key, new, priority, salt_of(tokens))
        if held is not None and node is not held:
            assert node.end >= held.end, f"{len(pages)} pages where {held.end} are locked already"
            self.lock(node)
            self.unlock(held)
        return Inserted(node, taken_from, len(pages))

    def evict(self, num_pages: int) -> list[int]:
        """Evict `num_pages` pages, or all unlocked ones if those are fewer. The caller owns the returned pages."""
        freed: list[int] = []
        while len(freed) < num_pages and self._heap:
            rank, stamp, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.children or node.locks or not self._holds(node):
                continue
            if (rank, stamp) == (self._rank(node), node.stamp):
                freed += self._trim(node, num_pages - len(freed))
            self._queue(node)
        self._dropped(freed)
        return freed

    def clear(self) -> list[int]:
        """Evict all unlocked pages. The caller owns the returned pages."""
        freed: list[int] = []
        kept, gone = [self._root], list[RadixNode]()
        while kept:
            node = kept.pop()
            node.queued = False
            gone += [child for child in node.children.values() if child.locks == 0]
            node.children = {first: child for first, child in node.children.items() if child.locks}
            kept += node.children.values()
        while gone:
            node = gone.pop()
            gone += node.children.values()
            freed += node.pages
            self._drop_state(node)
            node.pages, node.parent = [], None
        self._heap.clear()
        self._dropped(freed)
        if self.recorder is not None and self.num_cached == 0:
            self.recorder.cleared()
        return freed

    def coldest(self, count: int) -> list[RadixNode]:
        """Return the nodes whose ends eviction would take first, at most `count`. Changes nothing."""
        entries = (one for one in self._heap if not one[3].children and not one[3].locks and self._holds(one[3]))
        return [node for _, _, _, node in heapq.nsmallest(count, entries)]

    def tokens_of(self, node: RadixNode) -> bytes:
        """Return the tokens of all pages down to the end of `node`, with the salt."""
        tokens = b"".join(bytes(step.key) for step in reversed(list(path_to(node))))
        return SaltedTokens.of(tokens, node.salt) if node.salt else tokens

    @property
    def num_queued(self) -> int:
        """Entries of the eviction heap, at most one for each node."""
        return len(self._heap)

    def nodes(self) -> Iterator[RadixNode]:
        """Yield all nodes but the root, parents before their children. For the audit."""
        open_nodes = list(self._root.children.values())
        while open_nodes:
            node = open_nodes.pop()
            yield node
            open_nodes += node.children.values()

    def describe(self) -> None:
        """Record all pages, window pages and states as if they were new."""
        assert self.recorder is not None
        for node in self.nodes():
            self._record(node, 0)
        if self.windows is not None:
            for page in self.windows.token_pages():
                self.recorder.group_changed(PageSpace.WINDOW, page, stored=True)
        if self.states is not None:
            for node in self.states.nodes():
                self.recorder.group_changed(PageSpace.SLOTS, node.pages[-1], stored=True)

    def _record(self, node: RadixNode, first: int) -> None:
        """Record the pages of `node` from the index `first` on as new."""
        assert self.recorder is not None and node.parent is not None
        before = node.pages[first - 1 : first] if first else node.parent.pages[-1:]
        key = bytes(node.key[first * self._page_bytes :])
        self.recorder.stored(before[0] if before else None, node.pages[first:], key, node.salt)

    def _walk(self, tokens: bytes, max_pages: int) -> tuple[RadixNode, int]:
        """Return the deepest node that `tokens` reach, and how many of its pages they cover (for the root: 0)."""
        size, node, at = self._page_bytes, self._root, 0
        end = min(max_pages, len(tokens) // size) * size
        salt = salt_of(tokens).encode()
        while at < end:
            child = node.children.get(tokens[at : at + size] if at else salt + tokens[:size])
            if child is None:
                break
            if len(child.key) > end - at or not tokens.startswith(child.key, at):
                return child, self._common_pages(child, tokens, at, end)
            node, at = child, at + len(child.key)
        return node, len(node.pages)

    def _common_pages(self, node: RadixNode, tokens: bytes, at: int, end: int) -> int:
        """Return the number of whole pages in which `node.key` and `tokens[at:end]` agree."""
        num_tokens = min(len(node.key), end - at) // TOKEN_BYTES
        ours = np.frombuffer(node.key, np.int32, num_tokens)
        differs = ours != np.frombuffer(tokens, np.int32, num_tokens, at)
        first = int(differs.argmax()) if differs.any() else num_tokens
        return first // self.page_tokens

    def _split(self, node: RadixNode, num_pages: int) -> RadixNode:
        """Split `node` behind its first `num_pages` pages. `node` becomes the lower half; returns the upper."""
        assert 0 < num_pages < len(node.pages) and node.parent is not None
        cut = num_pages * self._page_bytes
        end = node.end - len(node.pages) + num_pages
        upper = RadixNode(node.parent, node.key[:cut], node.pages[:num_pages], end, node.salt)
        upper.locks, upper.stamp, upper.hits, upper.priority = node.locks, node.stamp, node.hits, node.priority
        node.parent.children[self._first(upper)] = upper
        del node.key[:cut], node.pages[:num_pages]
        node.parent = upper
        upper.children[self._first(node)] = node
        return upper

    def _is_only_for(self, node: RadixNode, held: RadixNode | None, priority: int) -> bool:
        """True when new pages may be appended to `node` itself: a leaf without state, without reuse and without locks
        but the caller's.
        """
        if node.parent is None or node.children or node.hits or node.priority != priority or node.state is not None:
            return False
        return node.locks == (1 if node is held else 0)

    def _append(self, node: RadixNode, key: bytearray, pages: list[int]) -> None:
        node.key += key
        node.pages += pages
        node.end += len(pages)
        self._grew(node, len(pages))

    def _add_child(self, parent: RadixNode, key: bytearray, pages: list[int], priority: int, salt: str) -> RadixNode:
        node = RadixNode(parent, key, pages, parent.end + len(pages), salt)
        node.stamp, node.priority = self._clock, priority
        parent.children[self._first(node)] = node
        self._grew(node, len(pages))
        return node

    def _grew(self, node: RadixNode, num_pages: int) -> None:
        self.num_cached += num_pages
        self.version += 1
        if self.recorder is not None:
            self._record(node, len(node.pages) - num_pages)
        if node.locks == 0:
            self.num_evictable += num_pages
            self._queue(node)

    def _dropped(self, pages: list[int]) -> None:
        """Update the counts after unlocked pages have left the tree."""
        self.num_cached -= len(pages)
        self.num_evictable -= len(pages)
        self.version += bool(pages)
        if self.windows is not None:
            self.windows.drop(pages)
        if self.recorder is not None:
            self.recorder.removed(pages)

    def _trim(self, node: RadixNode, num_pages: int) -> list[int]:
        """Take up to `num_pages` pages from the end of an unlocked leaf; removes the leaf when it has none left."""
        keep = max(0, len(node.pages) - num_pages)
        freed = node.pages[keep:]
        self._drop_state(node)
        if keep == 0:
            self._remove(node)
        else:
            node.end -= len(freed)
            del node.key[keep * self._page_bytes :]
        del node.pages[keep:]
        return freed

    def _remove(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[self._first(node)]
        node.parent = None
        self._queue(parent)

    def _drop_state(self, node: RadixNode) -> None:
        if self.states is not None:
            self.states.drop(node)

    def _queue(self, node: RadixNode) -> None:
        """Push `node` to the eviction heap, if it is an unlocked leaf without an entry."""
        if node.parent is None or node.children or node.locks or node.queued:
            return
        self._num_pushed += 1
        node.queued = True
        heapq.heappush(self._heap, (self._rank(node), node.stamp, self._num_pushed, node))

    def _rank(self, node: RadixNode) -> int:
        match self.eviction:
            case "lru":
                return 0
            case "lfu":
                return node.hits
            case "priority":
                return node.priority

    def _visit(self, node: RadixNode, priority: int) -> None:
        """Stamp all nodes down to `node` as used now, by a request of that priority."""
        self._clock += 1
        step: RadixNode | None = node
        while step is not None:
            step.stamp = self._clock
            step.priority = max(step.priority, priority)
            step = step.parent

    def _holds(self, node: RadixNode) -> bool:
        return node.parent is not None or node is self._root

    def _first(self, node: RadixNode) -> bytes:
        """Return the key of `node` among the children of its parent: its first page, at the root behind the salt."""
        first = bytes(node.key[: self._page_bytes])
        return node.salt.encode() + first if node.parent is self._root else first
