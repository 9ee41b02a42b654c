"""What a prefix cache has of a prompt besides token pages: the ends of states, and the numbers of window pages.

The same questions are asked of the device's cache, of the host tier's, and before a prompt is stored.
"""

from __future__ import annotations

from pdserve.memory.kv_memory import KVMemory


def state_ends(memory: KVMemory, token_ids: bytes, num_pages: int) -> list[int]:
    """Return the ends, in pages, ascending, of the states that the prefix cache has on the path of `token_ids`.

    At most behind the first `num_pages` pages. Empty without a cache or without STATE groups. Changes nothing.
    """
    tree = memory.pages.tree
    if tree is None or tree.states is None:
        return []
    found: list[int] = []
    node = tree.deepest_state(token_ids, num_pages)
    while node is not None and node.parent is not None:
        if node.state is not None:
            found.append(node.end)
        node = node.parent
    return found[::-1]


def has_state_behind(memory: KVMemory, token_ids: bytes, num_pages: int) -> bool:
    """Return whether the prefix cache has the state behind the first `num_pages` pages of `token_ids`."""
    tree = memory.pages.tree
    node = None if tree is None or tree.states is None else tree.deepest_state(token_ids, num_pages)
    return node is not None and node.end == num_pages


def window_numbers(memory: KVMemory, token_ids: bytes, num_pages: int) -> set[int]:
    """Return the numbers of the window pages that the prefix cache has of the first `num_pages` pages of `token_ids`.

    Empty without a cache or without WINDOW groups. Changes nothing.
    """
    tree, windows = memory.pages.tree, memory.groups.windows
    if tree is None or windows is None:
        return set()
    end = tree.peek(token_ids, num_pages)
    backwards = enumerate(tree.backwards(token_ids, end), 1)
    return {end - index for index, page in backwards if windows.find(page) is not None}


def first_window(memory: KVMemory, end: int) -> int:
    """Return the first window page that must be cached for a prompt to continue behind `end` pages: at least the last
    one, see `CachedWindows.usable`.
    """
    return min(memory.first_read(end), max(0, end - 1))
