"""Window pages in the prefix cache: where a prompt can continue, what is evicted, and who frees a page."""

from __future__ import annotations

import pytest

from pdserve.memory.cached_windows import CachedWindows
from pdserve.memory.group_pools import GroupPoolSizes
from pdserve.memory.kv_memory import KVMemory, PageTable
from pdserve.memory.layout import PageSpace
from pdserve.memory.lease import Lease
from pdserve.sim.hash_lm import hash_layout
from tests.unit.memory.kit import PAGE_TOKENS, letters

WINDOW = 2 * PAGE_TOKENS + 1
"""A token behind whole pages reads the two pages before it."""
NUM_WINDOW_PAGES = 12


def memory_of(num_pages: int = 24, num_window_pages: int = NUM_WINDOW_PAGES) -> KVMemory:
    layout = hash_layout(PAGE_TOKENS, window=WINDOW, is_hybrid=False)
    sizes = GroupPoolSizes(num_window_pages=num_window_pages, step_tokens=2 * PAGE_TOKENS)
    return KVMemory(layout, num_pages, PageTable(4, 12, has_window=True), 2, prefix_cache=True, group_sizes=sizes)


def run(memory: KVMemory, text: str) -> Lease:
    """A request that has computed all of `text`, two pages a step; each step is over before the next begins."""
    num_tokens = len(text) * PAGE_TOKENS
    lease = memory.reserve_tokens(num_tokens, text, letters(text), num_tokens - 1, max_len=num_tokens)
    assert lease is not None and lease.groups is not None
    for start in range(lease.num_prefix_pages, len(text), 2):
        end = min(start + 2, len(text))
        released = memory.cover_window(lease, None, start * PAGE_TOKENS, end * PAGE_TOKENS)
        memory.groups.give_back(lease.groups, released)
        memory.cache(lease, letters(text[:end]))
    return lease


def end(memory: KVMemory, lease: Lease, text: str) -> None:
    memory.cache(lease, letters(text), ending=True)
    lease.drop("request")
    assert memory.audit() == []


def match(memory: KVMemory, text: str) -> int:
    """Pages of `text` that a request can use."""
    return memory.match_prefix(letters(text), 99) // PAGE_TOKENS


def test_a_match_is_cut_back_to_a_page_behind_which_the_window_is_cached() -> None:
    windows = CachedWindows(lambda pages: None)
    for token_page in (0, 1, 3, 4, 6):
        windows.add(token_page, 10 + token_page)

    def usable(num_pages: int) -> int:
        return windows.usable(reversed(range(num_pages)), num_pages, lambda pages: max(0, pages - 2))

    assert [usable(n) for n in range(8)] == [0, 1, 2, 2, 2, 5, 5, 5]


def test_a_later_prompt_continues_where_an_earlier_one_ended_and_at_a_junction() -> None:
    memory = memory_of()
    end(memory, run(memory, "abcdef"), "abcdef")
    assert memory.counts()["window_pages_cached"] == 6, "there is room for all of them"
    assert [match(memory, text) for text in ("abcdefgh", "abcdxy", "abxy", "axy")] == [6, 4, 2, 1]
    lease = memory.reserve_tokens(8 * PAGE_TOKENS, "next", letters("abcdefgh"), 7 * PAGE_TOKENS)
    assert lease is not None and lease.groups is not None
    assert sorted(lease.groups.window) == [4, 5] and len(lease.groups.cached) == 2
    lease.drop("request")
    assert memory.audit() == []


def test_the_pages_of_a_prompt_under_way_can_be_shared() -> None:
    memory = memory_of()
    first = run(memory, "abcd")
    assert match(memory, "abcdef") == 4
    second = run(memory, "abcdef")
    assert first.groups is not None and second.groups is not None and second.num_prefix_pages == 4
    assert memory.audit() == []
    end(memory, first, "abcd")
    end(memory, second, "abcdef")
    assert match(memory, "abcdefg") == 6


def test_the_least_recently_used_pages_make_room() -> None:
    memory = memory_of(num_window_pages=NUM_WINDOW_PAGES)
    end(memory, run(memory, "abcdef"), "abcdef")
    end(memory, run(memory, "ghijkl"), "ghijkl")
    assert memory.counts()["window_pages_free"] == 0
    end(memory, run(memory, "mnop"), "mnop")
    assert memory.groups.windows is not None and memory.groups.windows.num_evicted == 4
    assert (match(memory, "abcdef"), match(memory, "ghijkl"), match(memory, "mnop")) == (6, 6, 4)
    assert match(memory, "abcd") == 0, "the pages that were read last are those of the end"
    assert memory.audit() == []


def test_window_pages_go_with_their_token_pages() -> None:
    memory = memory_of()
    end(memory, run(memory, "abcd"), "abcd")
    assert memory.flush() == 4
    counts = memory.counts()
    assert (counts["window_pages_cached"], counts["window_pages_free"]) == (0, NUM_WINDOW_PAGES)
    assert memory.audit() == []


def test_a_page_whose_token_page_leaves_the_cache_stays_with_the_request_that_reads_it() -> None:
    """The tree has the token pages of one request, and the cache the window pages of another with the same tokens."""
    memory = memory_of()
    windows = memory.groups.windows
    assert windows is not None
    end(memory, run(memory, "abcd"), "abcd")
    evicted = [windows.evict() for _ in range(4)]
    memory.groups.free_window([page for page in evicted if page is not None])
    assert match(memory, "abcd") == 0
    again = run(memory, "abcd")
    assert again.num_prefix_pages == 0 and again.groups is not None and again.groups.cached
    assert match(memory, "abcde") == 4, "the tree's pages have a window again"
    assert memory.pages.tree is not None and memory.flush() == 4
    assert len(windows) == 0 and memory.audit() == []
    held = list(again.groups.window.values())
    allocator = memory.groups.allocator_of(PageSpace.WINDOW)
    assert not any(allocator.is_free(page) for page in held)
    end(memory, again, "abcd")
    assert match(memory, "abcd") == 4


@pytest.mark.parametrize("num_pages", [1, 2, 4])
def test_no_page_is_lost_when_requests_end_early(num_pages: int) -> None:
    memory = memory_of()
    lease = run(memory, "abcd"[:num_pages])
    lease.drop("request")
    assert memory.audit() == []
    counts = memory.counts()
    assert counts["window_pages_free"] + counts["window_pages_cached"] == NUM_WINDOW_PAGES
