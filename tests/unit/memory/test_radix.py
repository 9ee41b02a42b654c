"""The radix tree, one behaviour at a time. A letter is a page."""

from __future__ import annotations

import numpy as np
import pytest

from pdserve.memory.cached_states import RadixNode
from pdserve.memory.prefix_cache import Eviction, RadixTree, SaltedTokens, salt_of, token_bytes
from tests.unit.memory.kit import PAGE_TOKENS, letters


def tree_with(*inserts: tuple[str, list[int]], eviction: Eviction = "lru") -> RadixTree:
    tree = RadixTree(PAGE_TOKENS, eviction)
    for text, pages in inserts:
        tree.insert(letters(text), pages)
    return tree


def locked(tree: RadixTree, text: str) -> RadixNode:
    node = tree.match(letters(text), len(text)).node
    tree.lock(node)
    return node


def shape(tree: RadixTree) -> list[list[int]]:
    return sorted(node.pages for node in tree.nodes())


def test_token_ids_become_int32() -> None:
    assert token_bytes([1, 2**31 - 1]) == np.array([1, 2**31 - 1], np.int32).tobytes()


def test_an_empty_tree_matches_nothing() -> None:
    tree = RadixTree(PAGE_TOKENS)
    found = tree.match(letters("ab"), 2)
    assert (found.num_pages, tree.pages_of(found.node), tree.evict(3), tree.clear()) == (0, [], [], [])


@pytest.mark.parametrize(
    ("text", "max_pages", "num_pages"),
    [
        ("abc", 9, 3),
        ("abcd", 9, 3),
        ("abx", 9, 2),
        ("ab", 9, 2),
        ("abc", 1, 1),
        ("abc", 0, 0),
        ("xbc", 9, 0),
        ("", 9, 0),
    ],
)
def test_the_longest_beginning_is_found(text: str, max_pages: int, num_pages: int) -> None:
    tree = tree_with(("abc", [5, 6, 7]))
    assert tree.peek(letters(text), max_pages) == num_pages
    assert shape(tree) == [[5, 6, 7]], "a peek splits nothing"
    found = tree.match(letters(text), max_pages)
    assert found.num_pages == num_pages
    assert tree.pages_of(found.node) == [5, 6, 7][:num_pages]


def test_a_salt_has_pages_of_its_own() -> None:
    tree = RadixTree(PAGE_TOKENS)
    plain, salts = letters("abcd"), {salt: SaltedTokens.of(letters("abcd"), salt) for salt in ("s", "t", "ss")}
    tree.insert(plain, [0, 1, 2, 3])
    for number, tokens in enumerate(salts.values(), start=1):
        assert tree.peek(tokens, 9) == 0
        tree.insert(tokens[: 2 * 4 * PAGE_TOKENS], [10 * number, 10 * number + 1])
        found = tree.match(tokens, 1)
        assert tree.pages_of(found.node) == [10 * number], "the node is split"
        tree.insert(tokens, [90, 91, 10 * number + 2, 10 * number + 3])
        assert tree.pages_of(tree.match(tokens, 9).node) == [10 * number + at for at in range(4)]
    assert tree.pages_of(tree.match(plain, 9).node) == [0, 1, 2, 3]
    assert len(tree.evict(15)) == 15 and tree.num_cached == 1 and len(tree.clear()) == 1


def test_tokens_keep_their_salt_in_slices_from_the_first_on() -> None:
    tokens = SaltedTokens.of(letters("abc"), "s")
    assert [salt_of(part) for part in (tokens, tokens[:8], tokens[0:4], tokens[4:], tokens[8:9], b"")] == [
        "s", "s", "s", "", "", "",
    ]  # fmt: skip
    assert tokens[4:8] == letters("abc")[4:8]
    others = {letters("abc"), SaltedTokens.of(letters("abc"), "t"), SaltedTokens.of(letters("abd"), "s")}
    assert tokens not in others and tokens in {*others, SaltedTokens.of(letters("abc"), "s")}
    assert tokens != letters("abc") and letters("abc") != tokens


def test_a_page_counts_only_as_a_whole() -> None:
    tree = tree_with(("ab", [5, 6]))
    differs_in_the_last_token = letters("a") + token_bytes([ord("b"), 8])
    assert tree.peek(differs_in_the_last_token, 9) == 1
    assert tree.peek(letters("ab")[:-4], 9) == 1, "half a page of tokens is no page"


def test_a_partial_match_splits_and_both_halves_are_locked() -> None:
    tree = tree_with(("abcd", [0, 1, 2, 3]))
    deep = locked(tree, "abcd")
    assert tree.num_evictable == 0
    upper = tree.match(letters("abx"), 9).node
    assert shape(tree) == [[0, 1], [2, 3]]
    assert (upper.locks, deep.locks, deep.parent) == (1, 1, upper)
    assert tree.pages_of(deep) == [0, 1, 2, 3], "the old node is still the end of the old path"
    tree.unlock(deep)
    assert (upper.locks, deep.locks, tree.num_evictable) == (0, 0, 4)


def test_what_is_cached_already_stays_with_the_caller() -> None:
    tree = tree_with(("abc", [0, 1, 2]))
    again = tree.insert(letters("abc"), [7, 8, 9])
    assert (again.taken_from, again.taken_to) == (3, 3)
    branch = tree.insert(letters("abde"), [7, 8, 9, 10])
    assert (branch.taken_from, branch.taken_to) == (2, 4)
    assert tree.pages_of(branch.node) == [0, 1, 9, 10]
    assert (tree.num_cached, shape(tree)) == (5, [[0, 1], [2], [9, 10]])


def test_chunks_of_one_request_grow_one_node() -> None:
    tree = RadixTree(PAGE_TOKENS)
    node = tree.insert(letters("a"), [0]).node
    tree.lock(node)
    for num in range(2, 6):
        node = tree.insert(letters("abcde"[:num]), list(range(num)), held=node).node
    assert shape(tree) == [[0, 1, 2, 3, 4]]
    assert (node.locks, tree.num_evictable) == (1, 0)


def test_what_somebody_else_uses_does_not_grow() -> None:
    tree = tree_with(("a", [0]))
    other, mine = locked(tree, "a"), locked(tree, "a")
    end = tree.insert(letters("ab"), [0, 1], held=mine).node
    assert (other.pages, end.pages) == ([0], [1])
    assert (other.locks, end.locks) == (2, 1)
    tree.unlock(end)
    assert tree.evict(2) == [1], "the other still has its page"


def test_a_lock_keeps_its_path_and_nothing_else() -> None:
    tree = tree_with(("abc", [0, 1, 2]), ("abd", [0, 1, 3]), ("x", [4]))
    node = locked(tree, "abc")
    assert tree.num_evictable == 2
    assert sorted(tree.evict(9)) == [3, 4]
    assert tree.pages_of(node) == [0, 1, 2]
    tree.unlock(node)
    assert sorted(tree.evict(9)) == [0, 1, 2]
    assert (tree.num_cached, tree.num_evictable) == (0, 0)


def test_only_as_many_pages_go_as_are_needed_from_the_end_of_a_leaf() -> None:
    tree = tree_with(("abcd", [0, 1, 2, 3]))
    assert tree.evict(1) == [3]
    assert tree.peek(letters("abcd"), 9) == 3
    assert tree.evict(2) == [1, 2]
    tree.insert(letters("abcd"), [0, 5, 6, 7])
    assert tree.pages_of(tree.match(letters("abcd"), 9).node) == [0, 5, 6, 7]


def test_a_branch_goes_before_its_stem() -> None:
    tree = tree_with(("ab", [0, 1]), ("ac", [0, 2]))
    assert tree.evict(1) == [1]
    assert tree.evict(1) == [2]
    assert tree.evict(1) == [0]


def test_lru_gives_up_what_was_not_used_for_longest() -> None:
    tree = tree_with(("a", [0]), ("b", [1]), ("c", [2]))
    tree.use(tree.match(letters("a"), 1).node)
    tree.insert(letters("b"), [9])
    assert [tree.evict(1) for _ in range(3)] == [[2], [0], [1]]


def test_lfu_gives_up_what_was_used_least() -> None:
    tree = tree_with(("a", [0]), ("b", [1]), ("c", [2]), eviction="lfu")
    for text in ("a", "a", "c", "b", "b"):
        tree.use(tree.match(letters(text), 1).node)
    assert [tree.evict(1) for _ in range(3)] == [[2], [0], [1]]


def test_the_lowest_priority_goes_first_and_the_oldest_of_it() -> None:
    tree = RadixTree(PAGE_TOKENS, "priority")
    for text, page, priority in (("a", 0, 2), ("b", 1, 0), ("c", 2, 0), ("d", 3, -1)):
        tree.insert(letters(text), [page], priority)
    tree.insert(letters("d"), [9], 1)
    tree.use(tree.match(letters("b"), 1).node)
    assert [tree.evict(1) for _ in range(4)] == [[2], [1], [3], [0]]


def test_looking_is_no_use() -> None:
    tree = tree_with(("a", [0]), ("b", [1]))
    tree.peek(letters("a"), 1)
    tree.unlock(locked(tree, "a"))
    assert tree.evict(1) == [0]


def test_clear_keeps_locked_paths() -> None:
    tree = tree_with(("abc", [0, 1, 2]), ("abd", [0, 1, 3]), ("xyz", [4, 5, 6]))
    node = locked(tree, "ab")
    assert sorted(tree.clear()) == [2, 3, 4, 5, 6]
    assert (tree.num_cached, tree.num_evictable) == (2, 0)
    tree.unlock(node)
    assert sorted(tree.evict(9)) == [0, 1], "what was locked during the clear can go later"


def test_the_version_tells_changes_of_content_only() -> None:
    tree = RadixTree(PAGE_TOKENS)
    versions = [tree.version]
    for change in (lambda: tree.insert(letters("abc"), [0, 1, 2]), lambda: tree.evict(1), tree.clear):
        change()
        assert tree.version not in versions
        versions.append(tree.version)
    tree.insert(letters("abc"), [0, 1, 2])
    version = tree.version
    tree.unlock(locked(tree, "a"))
    tree.insert(letters("ab"), [8, 9])
    tree.use(tree.match(letters("abc"), 3).node)
    assert tree.evict(0) == [] and tree.version == version


def test_an_entry_of_the_heap_is_not_repeated() -> None:
    tree = tree_with(("abc", [0, 1, 2]), ("x", [3]))
    for _ in range(50):
        tree.unlock(locked(tree, "abc"))
        tree.use(tree.match(letters("x"), 1).node)
    assert tree.num_queued == 2
    assert tree.evict(9) == [0, 1, 2, 3]


def test_a_node_that_was_evicted_cannot_be_locked() -> None:
    tree = tree_with(("a", [0]))
    node = tree.match(letters("a"), 1).node
    tree.evict(1)
    with pytest.raises(AssertionError, match="evicted"):
        tree.lock(node)


def test_unlocking_too_often_is_our_mistake() -> None:
    tree = tree_with(("a", [0]))
    node = locked(tree, "a")
    tree.unlock(node)
    with pytest.raises(AssertionError, match="more often"):
        tree.unlock(node)


def test_pages_and_tokens_must_agree() -> None:
    with pytest.raises(AssertionError, match="2 pages for 24 bytes"):
        RadixTree(PAGE_TOKENS).insert(letters("abc"), [0, 1])


@pytest.mark.parametrize("page_tokens", [1, 16])
def test_a_long_prompt_is_matched_up_to_its_first_other_token(page_tokens: int) -> None:
    tokens = np.arange(4096, dtype=np.int32)
    tree = RadixTree(page_tokens)
    tree.insert(tokens.tobytes(), list(range(4096 // page_tokens)))
    for position in (0, 1, 15, 16, 17, 2047, 4095):
        other = tokens.copy()
        other[position] += 70_000
        assert tree.peek(other.tobytes(), 4096) == position // page_tokens


def test_new_pages_do_not_inherit_the_hits_of_those_before() -> None:
    tree = tree_with(("a", [0]), ("x", [2]), eviction="lfu")
    for text in ("a", "a", "x"):
        tree.use(tree.match(letters(text), 1).node)
    tree.insert(letters("ab"), [0, 1])
    assert [tree.evict(1) for _ in range(3)] == [[1], [2], [0]]


def test_new_pages_do_not_inherit_the_priority_of_those_before() -> None:
    tree = RadixTree(PAGE_TOKENS, "priority")
    for text, pages, priority in (("a", [0], 2), ("x", [2], 1), ("ab", [0, 1], 0)):
        tree.insert(letters(text), pages, priority)
    assert [tree.evict(1) for _ in range(3)] == [[1], [2], [0]]


def test_a_request_of_low_priority_takes_none_from_what_it_shares() -> None:
    tree = RadixTree(PAGE_TOKENS, "priority")
    for text, page, priority in (("a", 0, 2), ("x", 1, 1), ("a", 9, 0)):
        tree.insert(letters(text), [page], priority)
    assert [tree.evict(1) for _ in range(2)] == [[1], [0]]
