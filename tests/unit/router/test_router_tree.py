"""The prefix tree against the plainest model there is: for each owner, the set of all texts that it was sent."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.router.policies import prefix_tree as tree_module
from pdserve.router.policies.prefix_tree import PrefixTree, common_length

TEXTS = st.text(alphabet="abc", min_size=1, max_size=10)
OWNERS = ("p", "q", "r")
EXAMPLES = settings(max_examples=60, deadline=None)


def prefixes(texts: set[str]) -> set[str]:
    return {text[:end] for text in texts for end in range(1, len(text) + 1)}


def check(tree: PrefixTree) -> None:
    """What must hold of every tree: sizes add up, who has a node has its parent, nothing is empty or nobody's."""
    sizes = dict.fromkeys(OWNERS, 0)
    for node in tree.nodes():
        assert node.text
        assert node.owners
        assert all(child.text[0] == first for first, child in node.children.items())
        assert all(set(child.owners) <= set(node.owners) for child in node.children.values())
        for owner in node.owners:
            sizes[owner] += len(node.text)
    assert sizes == {owner: tree.size(owner) for owner in OWNERS}
    counted = Counter(owner for node in tree.nodes() for owner in node.owners)
    assert all(counted[owner] == tree.num_nodes(owner) for owner in OWNERS)


def test_short_texts_are_bounded_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "MAX_NODES", 100)
    tree = PrefixTree()
    for i in range(250):
        tree.insert(chr(1000 + i), "p")
    assert tree.is_over("p", 1 << 20, slack=1) and tree.is_over("p", 1 << 20)
    tree.evict(1 << 20)
    assert [node.text for node in tree.nodes()].count(chr(1249)) == 1 and tree.size("p") == 100
    check(tree)
    tree.forget("p")
    assert not list(tree.nodes())


@EXAMPLES
@given(
    sent=st.lists(st.tuples(TEXTS, st.sampled_from(OWNERS)), max_size=20),
    asked=TEXTS,
    among=st.sets(st.sampled_from(OWNERS)),
)
def test_the_longest_beginning_is_found_for_whoever_may_be_chosen(
    sent: list[tuple[str, str]], asked: str, among: set[str]
) -> None:
    tree = PrefixTree()
    known: dict[str, set[str]] = {owner: set() for owner in OWNERS}
    for text, owner in sent:
        tree.insert(text, owner)
        known[owner].add(text)
    check(tree)
    for owner in OWNERS:
        assert tree.size(owner) == len(prefixes(known[owner]))
    best = max(
        (len(asked[:end]) for end in range(len(asked) + 1) for owner in among if asked[:end] in prefixes(known[owner])),
        default=0,
    )
    owner, length = tree.match(asked, among)
    assert length == best
    assert (owner is None) == (best == 0)
    if owner is not None:
        assert owner in among
        assert asked[:length] in prefixes(known[owner])


@EXAMPLES
@given(
    sent=st.lists(st.tuples(TEXTS, st.sampled_from(OWNERS)), max_size=20),
    limit=st.integers(0, 30),
    gone=st.sampled_from(OWNERS),
)
def test_eviction_keeps_within_the_limit_and_forgetting_leaves_nothing(
    sent: list[tuple[str, str]], limit: int, gone: str
) -> None:
    tree = PrefixTree()
    for text, owner in sent:
        tree.insert(text, owner)
    before = {owner: tree.size(owner) for owner in OWNERS}
    tree.evict(limit)
    check(tree)
    for owner in OWNERS:
        assert tree.size(owner) <= limit or before[owner] <= limit
        assert tree.size(owner) == before[owner] or before[owner] > limit, "nobody loses for another"
    tree.forget(gone)
    check(tree)
    assert tree.size(gone) == 0
    for owner in OWNERS:
        tree.forget(owner)
    assert list(tree.nodes()) == []


def test_what_was_sent_longest_ago_goes_first() -> None:
    tree = PrefixTree()
    for text in ("old old", "older still", "new"):
        tree.insert(text, "p")
    tree.insert("old old", "p")
    tree.evict(12)
    assert tree.match("older still", "p") == ("p", 3)
    assert tree.match("old old", "p") == ("p", 7)
    assert tree.match("new", "p") == ("p", 3)


def test_of_two_that_have_as_much_the_one_that_was_sent_it_last_is_taken() -> None:
    tree = PrefixTree()
    for owner in ("p", "q", "p"):
        tree.insert("same", owner)
    assert tree.match("same", {"p", "q"}) == ("p", 4)
    tree.insert("same", "q")
    assert tree.match("same", {"p", "q"}) == ("q", 4)


@EXAMPLES
@given(
    text=st.text(alphabet="ab", max_size=20),
    start=st.integers(0, 20),
    piece=st.text(alphabet="ab", min_size=1, max_size=20),
)
def test_common_length_is_what_counting_says(text: str, start: int, piece: str) -> None:
    expected = 0
    for ours, theirs in zip(text[start:], piece, strict=False):
        if ours != theirs:
            break
        expected += 1
    assert common_length(text, min(start, len(text)), piece) == expected
