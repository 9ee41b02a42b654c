"""`RadixNode`: one node of the prefix cache, see `prefix_cache` and `cached_states`."""

from __future__ import annotations


class RadixNode:
    """Some pages behind those of `parent`. Written by its tree only.

    `key`: the tokens of `pages`. `end`: pages from the root to the end of this node. `locks`: locked paths through this
    node. `stamp`: order of the last use. `hits`: number of reuses. `queued`: True while the eviction heap has an entry
    for this node. `state`: slot with the recurrent state at `end`, see `CachedStates`; None: none is cached.
    """

    __slots__ = ("children", "end", "hits", "key", "locks", "pages", "parent", "priority", "queued", "stamp", "state")

    def __init__(self, parent: RadixNode | None, key: bytearray, pages: list[int], end: int) -> None:
        self.parent = parent
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
