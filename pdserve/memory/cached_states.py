"""Nodes of the prefix cache, and the recurrent states at their ends: slots in an LRU order of their own.

    root ── [A B C]* ─┬─ [D E]        * has a state: of the tokens A B C. A prompt A B C D F continues from there and
                      └─ [F]*           computes D again; its chunk ends behind D, and leaves a state at that junction

A state covers all tokens up to the end of its node, and no others. When a node is split, the lower half keeps the
state. When the end of a node is evicted, its state goes too. A state may also go alone: the pages stay, and a later
match is cut back to the deepest state above.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from pdserve.memory.cache_recorder import CacheRecorder
from pdserve.memory.layout import PageSpace


class RadixNode:
    """Some pages behind those of `parent`. Written by its tree only.

    `key`: the tokens of `pages`. `end`: pages from the root to the end of this node. `locks`: locked paths through this
    node. `stamp`: order of the last use. `hits`: number of reuses. `queued`: True while the eviction heap has an entry
    for this node. `state`: slot with the recurrent state at `end`, see `CachedStates`; None: none is cached. `salt`:
    see `SaltedTokens`; empty without one.
    """

    __slots__ = (
        "children", "end", "hits", "key", "locks", "pages", "parent", "priority", "queued", "salt", "stamp", "state",
    )  # fmt: skip

    def __init__(self, parent: RadixNode | None, key: bytearray, pages: list[int], end: int, salt: str = "") -> None:
        self.parent = parent
        self.salt = salt
        self.key = key
        self.pages = pages
        self.end = end
        self.children: dict[bytes, RadixNode] = {}
        self.locks = 0
        self.stamp = 0
        self.hits = 0
        self.priority = 0
        self.queued = False
        self.state: int | None = None


class CachedStates:
    """The states of a radix tree. Scheduler thread only.

    A locked state is being copied into a request's slot: it is not evicted. `on_free` gets the slot of a state whose
    pages have left the tree. `version` changes whenever a state comes or goes. `recorder` gets each change; None:
    changes are not recorded.
    """

    def __init__(self, on_free: Callable[[int], None], recorder: CacheRecorder | None = None) -> None:
        self._on_free = on_free
        self.recorder = recorder
        self._by_use: OrderedDict[RadixNode, None] = OrderedDict()
        self._locks: dict[RadixNode, int] = {}
        self.version = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._by_use)

    @property
    def num_evictable(self) -> int:
        """States that no copy reads."""
        return len(self._by_use) - len(self._locks)

    def slots(self) -> Iterator[int]:
        """Yield the slots of all states. For the audit."""
        for node in self._by_use:
            assert node.state is not None
            yield node.state

    def nodes(self) -> Iterator[RadixNode]:
        """Yield the nodes with a state."""
        return iter(self._by_use)

    def add(self, node: RadixNode, slot: int) -> bool:
        """Give `node` the state in `slot`; False, without any change, when it has one already."""
        if node.state is not None:
            self.use(node)
            return False
        node.state = slot
        self._by_use[node] = None
        self._changed(node, stored=True)
        return True

    def use(self, node: RadixNode) -> None:
        """Count a use of the state of `node`."""
        self._by_use.move_to_end(node)

    def lock(self, node: RadixNode) -> int:
        """Protect the state of `node` from eviction, until the same number of `unlock` calls; return its slot."""
        assert node.state is not None, "a copy of a state that was evicted"
        self._locks[node] = self._locks.get(node, 0) + 1
        self.use(node)
        return node.state

    def unlock(self, node: RadixNode) -> None:
        """Remove one lock."""
        left = self._locks[node] - 1
        if left:
            self._locks[node] = left
        else:
            del self._locks[node]

    def is_locked(self, node: RadixNode) -> bool:
        """True while a copy reads the state of `node`."""
        return node in self._locks

    def take(self, node: RadixNode) -> int:
        """Remove the state of `node`, which no copy reads; return its slot, which the caller owns."""
        assert node.state is not None and node not in self._locks, "the state is being copied"
        slot, node.state = node.state, None
        del self._by_use[node]
        self._changed(node, stored=False)
        return slot

    def evict(self) -> int | None:
        """Remove the least recently used state that no copy reads; return its slot, which the caller owns, or None."""
        node = next((node for node in self._by_use if node not in self._locks), None)
        if node is None:
            return None
        self.num_evicted += 1
        return self.take(node)

    def drop(self, node: RadixNode) -> None:
        """Free the state of `node`, if it has one: the end of the node leaves the tree."""
        if node.state is not None:
            self._on_free(self.take(node))

    def _changed(self, node: RadixNode, *, stored: bool) -> None:
        self.version += 1
        if self.recorder is not None:
            self.recorder.group_changed(PageSpace.SLOTS, node.pages[-1], stored=stored)
