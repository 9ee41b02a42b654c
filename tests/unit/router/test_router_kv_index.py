"""The index of cached blocks is what the caches say, and the policy kv_aware chooses by it."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.memory.cache_recorder import (
    CacheAdapter,
    CacheChange,
    CacheCleared,
    CacheRecorder,
    GroupChanged,
    HostChanged,
    PagesRemoved,
    PagesStored,
    WeightsChanged,
)
from pdserve.memory.group_pools import GroupPoolSizes
from pdserve.memory.kv_memory import KVMemory, PageTable
from pdserve.memory.layout import PageSpace
from pdserve.memory.page_keys import KeyNamespace
from pdserve.memory.prefix_cache import RadixTree
from pdserve.observe.kv_events import KVEventStream, groups_of
from pdserve.observe.kv_keys import Group, PromptKeys, ReplicaKeys
from pdserve.router.config.config import PolicyConfig
from pdserve.router.policies import Candidate, KVAware, RoutedRequest, kv_index
from pdserve.router.policies.kv_index import KVIndex
from pdserve.sim.hash_lm import hash_layout
from tests.kv_reader import events_of
from tests.unit.memory.kit import PAGE_TOKENS, Prefix, letters, prefixes, tokens_of
from tests.unit.observe.test_kv_events import NAMESPACE, Collected, one_turn

ALL_TOKENS = Group(0, "full_attention")
POET = CacheAdapter(1, "poet", "d1")
URL = "http://a:1"


def prompt(text: str, **more: str) -> PromptKeys:
    return PromptKeys([token for letter in text for token in (ord(letter), 7)], **more)  # type: ignore[arg-type]


class Followed:
    """A publisher's stream, and the index that follows it."""

    def __init__(self, *groups: Group, spaces: dict[PageSpace, Group] | None = None) -> None:
        self.index = KVIndex()
        self.keys = ReplicaKeys(NAMESPACE, groups or (ALL_TOKENS,), {"poet": "d1"})
        self.stream = KVEventStream(NAMESPACE, spaces or {PageSpace.TOKENS: ALL_TOKENS})
        self.blocks = self.index.add(URL, 0, ReplicaKeys.from_json(self.keys.to_json()))

    def turn(self, *changes: CacheChange) -> None:
        for batch in self.stream.apply(changes):
            for event in events_of(batch.payload):
                self.blocks.apply(event)

    def pages(self, given: PromptKeys) -> int:
        return self.index.num_cached(URL, given) // PAGE_TOKENS


def stored(text: str, first: int = 0, adapter: CacheAdapter | None = None, salt: str = "") -> PagesStored:
    return PagesStored(None, range(first, first + len(text)), letters(text), adapter, salt)


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(st.one_of(prefixes, st.integers(1, 3)), min_size=1, max_size=12),
    asked=st.lists(prefixes, min_size=1, max_size=4),
)
def test_a_prompt_is_cached_as_far_as_in_the_tree(steps: list[Prefix | int], asked: list[Prefix]) -> None:
    """Steps are prompts that are cached, and numbers of pages that are evicted."""
    followed, sink = Followed(), Collected()
    tree, num_pages = RadixTree(PAGE_TOKENS, recorder=CacheRecorder(sink)), 0
    for step in steps:
        if isinstance(step, int):
            tree.evict(step)
        else:
            tree.insert(tokens_of(step), range(num_pages, num_pages + len(step)))
            num_pages += len(step)
        for batch in one_turn(tree, sink, followed.stream):
            for event in events_of(batch.payload):
                followed.blocks.apply(event)
    assert len(followed.blocks) == followed.index.num_blocks == tree.num_cached
    for prefix in asked:
        keys = PromptKeys([token for page in prefix for token in page])
        assert followed.pages(keys) == tree.peek(tokens_of(prefix), len(prefix))


def test_long_prompts_are_hashed_in_pieces_no_further_than_they_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    followed, hashed = Followed(), list[int]()
    chain = KeyNamespace.chain

    def counted(self: KeyNamespace, before: bytes, tokens: bytes) -> list[bytes]:
        hashed.append(len(tokens) // 4 // PAGE_TOKENS)
        return chain(self, before, tokens)

    text = "".join(map(chr, range(300, 1300)))
    followed.turn(stored(text[:150]))
    monkeypatch.setattr(KeyNamespace, "chain", counted)
    for num in (0, 1, 63, 64, 65, 128, 149, 150):
        assert followed.pages(prompt(text[:num] + "?" * 20)) == num
    hashed.clear()
    keys = prompt(text)
    assert followed.pages(keys) == followed.pages(keys) == 150
    assert sum(hashed) == 192, "three pieces, once"


def test_salts_and_adapters_are_worlds_of_their_own() -> None:
    followed = Followed()
    followed.turn(stored("ab"), stored("cd", 2, salt="tenant"), stored("ef", 4, POET), stored("gh", 6, POET, "tenant"))
    assert not followed.blocks.are_keys_outdated
    assert [followed.pages(prompt(text)) for text in ("abx", "cd", "ef", "gh")] == [2, 0, 0, 0]
    assert followed.pages(prompt("cd", salt="tenant")) == 2
    assert followed.pages(prompt("ef", adapter="poet")) == followed.pages(prompt("ef", model="poet")) == 2
    assert followed.pages(prompt("gh", model="poet", salt="tenant")) == 2
    assert followed.pages(prompt("ab", model="tiny")) == 2, "that is the model itself"
    assert followed.pages(prompt("ab", adapter="unknown")) == 0


def test_other_weights_or_an_unknown_adapter_make_the_keys_outdated() -> None:
    followed = Followed()
    other = dataclasses.replace(NAMESPACE, weights="w2")
    followed.turn(stored("ab"))
    followed.turn(CacheCleared(), WeightsChanged(other))
    assert (followed.pages(prompt("ab")), followed.index.num_blocks) == (0, 0)
    assert not followed.blocks.are_keys_outdated
    followed.turn(stored("ab"))
    assert followed.blocks.are_keys_outdated and followed.pages(prompt("ab")) == 0
    followed.blocks.use(dataclasses.replace(followed.keys, namespace=other))
    assert followed.pages(prompt("ab")) == 2 and not followed.blocks.are_keys_outdated
    followed.turn(stored("cd", 2, CacheAdapter(2, "critic", "d2")))
    assert followed.blocks.are_keys_outdated


def test_the_host_tier_counts_and_a_removal_takes_a_block_from_one_tier_only() -> None:
    followed = Followed()
    followed.turn(stored("abc"), HostChanged(stored("abcd")))
    assert (followed.pages(prompt("abcde")), len(followed.blocks)) == (4, 4)
    followed.turn(PagesRemoved([0, 1, 2]))
    assert followed.pages(prompt("abcde")) == 4
    followed.turn(HostChanged(PagesRemoved([3])))
    assert followed.pages(prompt("abcde")) == 3
    followed.turn(HostChanged(CacheCleared()))
    assert (followed.pages(prompt("abcde")), followed.index.num_blocks) == (0, 0)


def test_a_prompt_continues_only_behind_a_cached_state() -> None:
    states = Group(2, "mamba")
    followed = Followed(ALL_TOKENS, states, spaces={PageSpace.TOKENS: ALL_TOKENS, PageSpace.SLOTS: states})
    followed.turn(stored("abcd"))
    assert followed.pages(prompt("abcd")) == 0
    followed.turn(GroupChanged(PageSpace.SLOTS, 1, stored=True), GroupChanged(PageSpace.SLOTS, 3, stored=True))
    assert [followed.pages(prompt(text)) for text in ("abcd", "abc", "a")] == [4, 2, 0]
    followed.turn(GroupChanged(PageSpace.SLOTS, 3, stored=False))
    assert followed.pages(prompt("abcd")) == 2
    followed.turn(PagesRemoved([0, 1, 2, 3]))
    assert len(followed.blocks) == 0, "states go with their pages"


def test_a_prompt_continues_only_behind_the_window_pages_that_it_reads() -> None:
    """Compared with the memory of a model with a window of two and a half pages."""
    sink, layout = Collected(), hash_layout(PAGE_TOKENS, window=2 * PAGE_TOKENS + 1, is_hybrid=False)
    sizes = GroupPoolSizes(num_window_pages=12, step_tokens=2 * PAGE_TOKENS)
    table = PageTable(4, 12, has_window=True)
    memory = KVMemory(layout, 24, table, 2, prefix_cache=True, group_sizes=sizes, recorder=CacheRecorder(sink))
    spaces = groups_of(layout)
    assert spaces[PageSpace.WINDOW].window == 2 * PAGE_TOKENS + 1
    followed, seen = Followed(*spaces.values(), spaces=spaces), set[int]()
    texts = ("abcdef", "ghijkl", "mnop", "abcxyz")
    for text in texts:
        num_tokens = len(text) * PAGE_TOKENS
        lease = memory.reserve_tokens(num_tokens, text, letters(text), num_tokens - 1, max_len=num_tokens)
        assert lease is not None and lease.groups is not None
        for start in range(lease.num_prefix_pages, len(text), 2):
            end = min(start + 2, len(text))
            released = memory.cover_window(lease, None, start * PAGE_TOKENS, end * PAGE_TOKENS)
            memory.groups.give_back(lease.groups, released)
            memory.cache(lease, letters(text[:end]))
        memory.cache(lease, letters(text), ending=True)
        lease.drop("request")
        memory.flush_changes()
        for changes in sink.take():
            followed.turn(*changes)
        for asked in texts:
            for num in range(1, len(asked) + 1):
                given = asked[:num]
                expected = memory.match_prefix(letters(given), num * PAGE_TOKENS)
                assert followed.pages(prompt(given)) * PAGE_TOKENS == expected, given
                seen.add(expected)
    assert memory.groups.windows is not None and memory.groups.windows.num_evicted > 0 and len(seen) > 3


def test_blocks_beyond_the_bound_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_index, "MAX_BLOCKS", 5)
    followed = Followed()
    other = followed.index.add("http://b:1", 0, followed.keys)
    followed.turn(stored("abc"))
    for event in (events_of(batch.payload)[0] for batch in followed.stream.snapshot()):
        other.apply(event)
    assert (len(followed.blocks), len(other), other.num_refused, followed.index.num_blocks) == (3, 2, 1, 5)
    assert followed.index.num_cached("http://b:1", prompt("abc")) == 2 * PAGE_TOKENS
    followed.index.forget(URL)
    followed.turn(stored("xyz", 10))
    assert (followed.index.num_blocks, followed.pages(prompt("xyz"))) == (2, 0), "events of a forgotten worker"


@pytest.mark.parametrize("ids", [[-1], [1 << 32], ["a"], [None], [[1], [2]], [1 << 70], [[1], 2]])
def test_a_prompt_of_no_token_ids_has_no_keys(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        PromptKeys(ids)


def test_keys_of_another_version_are_refused_by_the_field() -> None:
    keys = ReplicaKeys(NAMESPACE, (ALL_TOKENS,), version=1)
    with pytest.raises(ValueError, match="version is 1"):
        ReplicaKeys.from_json(keys.to_json())
    with pytest.raises(ValueError, match="namespace"):
        ReplicaKeys.from_json("{}")


# --- the policy -----------------------------------------------------------------------------------------------------


def policy_with(**texts: str) -> KVAware:
    """The policy, to which workers have told that they cache these texts."""
    policy = KVAware(PolicyConfig(policy="kv_aware", balance_abs_threshold=4, balance_rel_threshold=2.0))
    for name, text in texts.items():
        stream = KVEventStream(NAMESPACE, {PageSpace.TOKENS: ALL_TOKENS})
        blocks = policy.index.add(name, 0, ReplicaKeys(NAMESPACE, (ALL_TOKENS,)))
        for batch in stream.apply([stored(text)]):
            for event in events_of(batch.payload):
                blocks.apply(event)
    return policy


def chosen(policy: KVAware, text: str | None, **loads: float) -> set[str]:
    """The workers that are chosen, over the random choices among equals."""
    request = RoutedRequest(tokens=None if text is None else prompt(text))
    candidates = [Candidate(name, load) for name, load in loads.items()]
    return {candidates[policy.choose(candidates, request, random.Random(seed))].url for seed in range(20)}


def test_the_longest_cached_prefix_wins_unless_its_worker_is_overloaded() -> None:
    policy = policy_with(a="abcdefgh", b="abcdef", c="abcdef")
    assert chosen(policy, "abcdefghij", a=4, b=0, c=0, d=0) == {"a"}
    assert chosen(policy, "abcdefghij", a=5, b=0, c=1, d=0) == {"b"}, "of equals the less loaded"
    assert chosen(policy, "abcdefghij", a=5, b=1, c=1, d=0) == {"b", "c"}
    assert chosen(policy, "abcdefghij", a=9, b=9, c=9, d=0) == {"d"}
    assert chosen(policy, "abcdefghij", a=59, b=55, c=55, d=50) == {"a"}, "not twice the least load"
    policy.forget("a")
    assert chosen(policy, "abcdefghij", a=0, b=0, c=1) == {"b"}


def test_a_short_prefix_or_no_tokens_leave_the_choice_to_the_load() -> None:
    policy = policy_with(a="abcdefgh")
    assert chosen(policy, "abc" + "z" * 7, a=1, b=0) == {"b"}, "three of ten pages are no more than the threshold"
    assert chosen(policy, "abcd" + "z" * 6, a=1, b=0) == {"a"}
    assert chosen(policy, None, a=1, b=0) == {"b"}
    assert chosen(policy, "zzzz", a=0, b=0) == {"a", "b"}
