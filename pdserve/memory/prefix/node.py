"""A node of the radix tree. Made and written by `radix.RadixTree`, read by the audit."""

from __future__ import annotations


class RadixNode:
    """Some pages behind those of `parent`. Written by its tree only.

    `key` has the tokens of `pages`; `end` counts the pages from the root to the end of this node; `locks` how many
    locked paths lead through it; `stamp` orders last uses; `hits` counts re-uses; `queued` says that the eviction heap
    has an entry for it.
    """

    __slots__ = ("children", "end", "hits", "key", "locks", "pages", "parent", "priority", "queued", "stamp")

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
