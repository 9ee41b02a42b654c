"""A copy of the prefix cache that is made from events equals it, from every point at which a reader joins."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from pdserve.config.kv_events_group import WireForm
from pdserve.memory.cache_recorder import AdapterKeys, CacheAdapter, CacheChange, CacheRecorder
from pdserve.memory.cached_states import CachedStates, RadixNode
from pdserve.memory.group_pools import GroupPoolSizes
from pdserve.memory.kv_memory import KVMemory, PageTable
from pdserve.memory.layout import PageSpace
from pdserve.memory.page_keys import KeyNamespace, short_hash
from pdserve.memory.prefix_cache import RadixTree, SaltedTokens, token_bytes
from pdserve.observe.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventStream,
    Numbered,
    groups_of,
)
from pdserve.observe.kv_keys import Group
from pdserve.sim.hash_lm import hash_layout
from tests.kv_reader import CacheCopy, Follower, events_of
from tests.unit.memory.kit import PAGE_TOKENS, Prefix, content_of, letters, prefixes, tokens_of

NAMESPACE = KeyNamespace("w1", True, "l1", "float32", PAGE_TOKENS)
GROUPS = {
    PageSpace.TOKENS: Group(0, "full_attention"),
    PageSpace.WINDOW: Group(1, "sliding_window", 5),
    PageSpace.SLOTS: Group(2, "mamba"),
}


class Collected:
    """A sink that keeps changes; `has_room` False: it takes none."""

    def __init__(self) -> None:
        self.turns: list[list[CacheChange]] = []
        self.has_room = True

    def post(self, changes: list[CacheChange]) -> bool:
        if self.has_room:
            self.turns.append(changes)
        return self.has_room

    def take(self) -> Iterator[list[CacheChange]]:
        turns, self.turns = self.turns, []
        yield from turns


def flat(prefix: Prefix) -> tuple[int, ...]:
    return tuple(token for page in prefix for token in page)


def followed(batches: list[Numbered]) -> CacheCopy:
    follower = Follower()
    for batch in batches:
        assert follower.take(batch.seq, batch.payload)
    return follower.copy


class Readers(RuleBasedStateMachine):
    """Readers join, lose batches and replay while a cache changes; few batches are kept for replay."""

    wire_form: WireForm = "map"

    def __init__(self) -> None:
        super().__init__()
        self.sink = Collected()
        self.recorder = CacheRecorder(self.sink)
        self.tree = RadixTree(PAGE_TOKENS, recorder=self.recorder)
        self.stream = KVEventStream(NAMESPACE, GROUPS, wire_form=self.wire_form, buffer_steps=3)
        self.readers: list[Follower] = []
        self.locked: list[RadixNode] = []
        self.num_pages = 0

    @rule(prefix=prefixes, lock=st.booleans())
    def insert(self, prefix: Prefix, lock: bool) -> None:
        pages = range(self.num_pages, self.num_pages + len(prefix))
        self.num_pages += len(prefix)
        node = self.tree.insert(tokens_of(prefix), pages).node
        if lock:
            self.tree.lock(node)
            self.locked.append(node)

    @rule(prefix=prefixes, most=st.integers(0, 5))
    def split(self, prefix: Prefix, most: int) -> None:
        self.tree.match(tokens_of(prefix), most)

    @precondition(lambda self: self.locked)
    @rule()
    def unlock(self) -> None:
        self.tree.unlock(self.locked.pop(0))

    @rule(num_pages=st.integers(1, 4))
    def evict(self, num_pages: int) -> None:
        self.tree.evict(num_pages)

    @rule()
    def clear(self) -> None:
        self.tree.clear()

    @rule(lost=st.sets(st.integers(0, 4)))
    def turn(self, lost: set[int]) -> None:
        """A turn of the scheduler ends; some readers lose its batch."""
        self.recorder.flush(self.tree.describe)
        for changes in self.sink.take():
            self._send(self.stream.apply(changes), lost)

    @rule(lost=st.sets(st.integers(0, 4)))
    def full_turn(self, lost: set[int]) -> None:
        """The queue of the publisher is full."""
        self.sink.has_room = False
        self.turn(lost)
        self.sink.has_room = True

    @rule(lost=st.sets(st.integers(0, 4)))
    def join(self, lost: set[int]) -> None:
        self.readers.append(Follower())
        self._send(list(self.stream.snapshot()), lost - {len(self.readers) - 1})

    def _send(self, batches: list[Numbered], lost: set[int]) -> None:
        unanswered = False
        for batch in batches:
            for reader in (reader for i, reader in enumerate(self.readers) if i not in lost):
                if not reader.take(batch.seq, batch.payload):
                    unanswered |= not self._replay(reader)
        if unanswered:
            self._send(list(self.stream.snapshot(cleared=True)), set())

    def _replay(self, reader: Follower) -> bool:
        found = self.stream.replay(reader.next_seq or 0)
        for batch in found or ():
            assert reader.take(batch.seq, batch.payload)
        return found is not None

    @rule()
    def compare(self) -> None:
        self.turn(set())
        unanswered = [reader for reader in self.readers if not self._replay(reader)]
        if unanswered:
            self._send(list(self.stream.snapshot(cleared=True)), set())
        expected = {flat(prefix) for prefix in content_of(self.tree)}
        assert self.stream.num_blocks == len(expected)
        for reader in self.readers:
            assert reader.copy.prompts() == expected and len(reader.copy.blocks.get(0, {})) == len(expected)

    def teardown(self) -> None:
        self.compare()


class ArrayReaders(Readers):
    """The same with events as arrays."""

    wire_form: WireForm = "array"


BOUNDS = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestMaps = Readers.TestCase
TestMaps.settings = BOUNDS
TestArrays = ArrayReaders.TestCase
TestArrays.settings = BOUNDS


def one_turn(tree: RadixTree, sink: Collected, stream: KVEventStream) -> list[Numbered]:
    assert tree.recorder is not None
    tree.recorder.flush(tree.describe)
    return [batch for changes in sink.take() for batch in stream.apply(changes)]


def make(wire_form: WireForm = "map") -> tuple[RadixTree, Collected, KVEventStream]:
    sink = Collected()
    tree = RadixTree(PAGE_TOKENS, recorder=CacheRecorder(sink))
    return tree, sink, KVEventStream(NAMESPACE, GROUPS, dp_rank=3, wire_form=wire_form, clock=lambda: 12.5)


def test_keys_are_the_chain_of_sha256_below_the_namespace() -> None:
    tree, sink, stream = make()
    tree.insert(letters("ab"), [4, 9])
    [batch] = one_turn(tree, sink, stream)
    [stored] = events_of(batch.payload)
    first = hashlib.sha256(NAMESPACE.root() + letters("a")).digest()
    second = hashlib.sha256(first + letters("b")).digest()
    assert NAMESPACE.chain(NAMESPACE.root(), letters("ab")) == [first, second]
    assert stored == BlockStored(
        block_hashes=[short_hash(first), short_hash(second)],
        parent_block_hash=None,
        token_ids=[ord("a"), 7, ord("b"), 7],
        block_size=PAGE_TOKENS,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    assert -(1 << 63) <= short_hash(first) < 1 << 63


@pytest.mark.parametrize(
    "other",
    [
        KeyNamespace("w2", True, "l1", "float32", PAGE_TOKENS),
        KeyNamespace("w1", False, "l1", "float32", PAGE_TOKENS),
        KeyNamespace("w1", True, "l2", "float32", PAGE_TOKENS),
        KeyNamespace("w1", True, "l1", "bfloat16", PAGE_TOKENS),
        KeyNamespace("w1", True, "l1", "float32", 4),
        KeyNamespace("w1", True, "l1", "float32", PAGE_TOKENS, model="with YaRN"),
    ],
)
def test_each_field_of_the_namespace_changes_all_keys(other: KeyNamespace) -> None:
    assert other.root() != NAMESPACE.root() != NAMESPACE.root(adapter="x")


def test_the_wire_forms_of_each_event() -> None:
    """As arrays, fields stand in vLLM's order behind the name of the event."""
    events = []
    for wire_form in ("map", "array"):
        tree, sink, stream = make(wire_form)
        tree.insert(letters("ab"), [0, 1])
        tree.evict(1)
        tree.clear()
        [batch] = one_turn(tree, sink, stream)
        ts, found, dp_rank = msgspec.msgpack.decode(batch.payload)
        assert (batch.seq, ts, dp_rank) == (0, 12.5, 3)
        events.append(found)
    maps, arrays = events
    a, b = maps[0]["block_hashes"]
    assert maps[1] == {"type": "BlockRemoved", "block_hashes": [b], "medium": "GPU", "group_idx": 0}
    assert maps[2:] == [
        {"type": "BlockRemoved", "block_hashes": [a], "medium": "GPU", "group_idx": 0},
        {"type": "AllBlocksCleared"},
    ]
    needed = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
    assert maps[0].keys() >= set(needed), "vLLM's structs have no default for these"
    assert arrays[0] == ["BlockStored", *(maps[0][name] for name in needed), None, 0, "full_attention", None]
    assert arrays[1] == ["BlockRemoved", [b], "GPU", 0]
    assert arrays[3] == ["AllBlocksCleared"]


def test_pages_of_an_adapter_have_its_name_and_keys_of_their_own() -> None:
    sink, shift = Collected(), 12
    adapter = CacheAdapter(2, "poet", "d1")
    recorder = CacheRecorder(sink, AdapterKeys(shift, {2: adapter}.__getitem__))
    tree = RadixTree(PAGE_TOKENS, recorder=recorder)
    stream = KVEventStream(NAMESPACE, GROUPS)
    tokens = [5, 6, 7, 8]
    tree.insert(token_bytes([token + (2 << shift) for token in tokens]), [0, 1])
    tree.insert(token_bytes(tokens), [2, 3])
    [batch] = one_turn(tree, sink, stream)
    with_adapter, without = events_of(batch.payload)
    assert isinstance(with_adapter, BlockStored) and isinstance(without, BlockStored)
    assert with_adapter.token_ids == without.token_ids == tokens
    assert (with_adapter.lora_name, with_adapter.lora_id) == ("poet", 2)
    assert with_adapter.extra_keys == [["poet"], ["poet"]] and without.extra_keys is None
    assert not set(with_adapter.block_hashes) & set(without.block_hashes)
    assert short_hash(NAMESPACE.chain(NAMESPACE.root("d1"), token_bytes(tokens))[1]) == with_adapter.block_hashes[1]


def test_pages_of_a_salt_say_it_in_the_first_block_and_have_keys_of_their_own() -> None:
    sink = Collected()
    tree = RadixTree(PAGE_TOKENS, recorder=CacheRecorder(sink))
    stream = KVEventStream(NAMESPACE, GROUPS)
    tokens = token_bytes([5, 6, 7, 8])
    tree.insert(SaltedTokens.of(tokens, "tenant"), [0, 1])
    tree.insert(tokens, [2, 3])
    [batch] = one_turn(tree, sink, stream)
    salted, plain = events_of(batch.payload)
    assert isinstance(salted, BlockStored) and isinstance(plain, BlockStored)
    assert salted.extra_keys == [["tenant"], None] and plain.extra_keys is None
    assert salted.token_ids == plain.token_ids and not set(salted.block_hashes) & set(plain.block_hashes)
    root = NAMESPACE.root(salt="tenant")
    assert root != NAMESPACE.root() and NAMESPACE.root("tenant") != root
    assert short_hash(NAMESPACE.chain(root, tokens)[1]) == salted.block_hashes[1]
    [snapshot] = stream.snapshot()
    stored = [event for event in events_of(snapshot.payload) if isinstance(event, BlockStored)]
    assert [event.extra_keys for event in stored] == [[["tenant"], None], None]


def test_window_pages_are_events_of_their_group() -> None:
    """Window pages come with requests, and go by eviction, with their token pages, and when the cache is flushed."""
    sink = Collected()
    layout = hash_layout(PAGE_TOKENS, window=2 * PAGE_TOKENS + 1, is_hybrid=False)
    sizes = GroupPoolSizes(num_window_pages=12, step_tokens=2 * PAGE_TOKENS)
    table = PageTable(4, 12, has_window=True)
    memory = KVMemory(layout, 24, table, 2, prefix_cache=True, group_sizes=sizes, recorder=CacheRecorder(sink))
    groups = groups_of(layout)
    stream, copy = KVEventStream(NAMESPACE, groups), CacheCopy()

    def compare() -> None:
        memory.flush_changes()
        for changes in sink.take():
            for batch in stream.apply(changes):
                for event in events_of(batch.payload):
                    copy.apply(event)
        tree, windows = memory.pages.tree, memory.groups.windows
        assert tree is not None and windows is not None
        fresh = followed(list(stream.snapshot()))
        for one in (copy, fresh):
            assert len(one.prompts(groups[PageSpace.WINDOW].index)) == len(windows)
            assert len(one.prompts()) == tree.num_cached

    for text in ("abcdef", "ghijkl", "mnop", "abcxyz"):
        num_tokens = len(text) * PAGE_TOKENS
        lease = memory.reserve_tokens(num_tokens, text, letters(text), num_tokens - 1, max_len=num_tokens)
        assert lease is not None and lease.groups is not None
        for start in range(lease.num_prefix_pages, len(text), 2):
            end = min(start + 2, len(text))
            released = memory.cover_window(lease, None, start * PAGE_TOKENS, end * PAGE_TOKENS)
            memory.groups.give_back(lease.groups, released)
            memory.cache(lease, letters(text[:end]))
            compare()
        memory.cache(lease, letters(text), ending=True)
        lease.drop("request")
        compare()
    assert memory.groups.windows is not None and memory.groups.windows.num_evicted > 0
    memory.flush()
    compare()
    assert copy.prompts() == set()


def test_states_are_events_of_their_group() -> None:
    sink = Collected()
    recorder = CacheRecorder(sink)
    states = CachedStates(lambda slot: None, recorder)
    tree = RadixTree(PAGE_TOKENS, "lru", states, recorder=recorder)
    stream, copy = KVEventStream(NAMESPACE, GROUPS), CacheCopy()

    def with_states() -> set[tuple[int, ...]]:
        for batch in one_turn(tree, sink, stream):
            for event in events_of(batch.payload):
                copy.apply(event)
        assert followed(list(stream.snapshot(cleared=True))).prompts(2) == copy.prompts(2)
        return copy.prompts(2)

    abc, ab = (tuple(int(token) for token in memoryview(letters(text)).cast("i")) for text in ("abc", "ab"))
    states.add(tree.insert(letters("abc"), [0, 1, 2]).node, 7)
    assert with_states() == {abc}
    middle = tree.node_at(letters("ab"))
    assert middle is not None
    states.add(middle, 8)
    assert with_states() == {abc, ab}, "the lower half keeps its state when a node is split"
    states.evict()
    assert with_states() == {ab}
    tree.evict(3)
    assert with_states() == set()


def test_a_snapshot_is_cut_into_batches_and_the_buffer_is_bounded() -> None:
    tree, sink, stream = make()
    for i in range(1500):
        tree.insert(token_bytes([i, 1, i, 2]), [2 * i, 2 * i + 1])
    one_turn(tree, sink, stream)
    batches = list(stream.snapshot(cleared=True))
    assert len(batches) == 3 and isinstance(events_of(batches[0].payload)[0], AllBlocksCleared)
    assert len(followed(batches).prompts()) == 3000
    assert [batch.seq for batch in batches] == [1, 2, 3] and stream.next_seq == 4
    tree, sink, _ = make()
    few = KVEventStream(NAMESPACE, GROUPS, buffer_steps=1)
    for page in range(3):
        tree.clear()
        tree.insert(letters("a"), [page])
        one_turn(tree, sink, few)
    assert few.replay(2) is not None and few.replay(3) == []
    assert few.replay(1) is None and few.replay(4) is None, "left the buffer; was never sent"


def test_a_reader_that_joins_an_empty_cache_sees_that_it_has_lost_the_first_batch() -> None:
    tree, sink, stream = make()
    reader = Follower()
    for batch in stream.snapshot():
        assert reader.take(batch.seq, batch.payload)
    tree.insert(letters("a"), [0])
    one_turn(tree, sink, stream)
    tree.insert(letters("b"), [1])
    [second] = one_turn(tree, sink, stream)
    assert not reader.take(second.seq, second.payload)


def test_nothing_is_said_when_nothing_changes() -> None:
    tree, sink, stream = make()
    tree.insert(letters("ab"), [0, 1])
    assert len(one_turn(tree, sink, stream)) == 1
    tree.insert(letters("ab"), [5, 6])
    tree.match(letters("a"), 1)
    assert one_turn(tree, sink, stream) == []
    freed = tree.evict(1)
    [batch] = one_turn(tree, sink, stream)
    assert freed == [1] and [type(event) for event in events_of(batch.payload)] == [BlockRemoved]


def test_each_turn_that_the_publisher_does_not_take_is_counted_and_the_content_follows() -> None:
    tree, sink, stream = make()
    assert tree.recorder is not None
    sink.has_room = False
    for text in ("a", "ab", "ab"):
        tree.insert(letters(text), range(len(text)))
        tree.recorder.flush(tree.describe)
    assert tree.recorder.num_lost == 2 and not sink.turns, "the third one had no changes"
    sink.has_room = True
    [batch] = one_turn(tree, sink, stream)
    assert isinstance(events_of(batch.payload)[0], AllBlocksCleared)
    assert len(followed([batch]).prompts()) == 2 and tree.recorder.num_lost == 2


def test_blocks_of_the_host_tier_have_a_medium_of_their_own_and_survive_a_clear_of_the_device() -> None:
    """A page that leaves the device stays known for the host tier, whose slot numbers are other ones."""
    sink = Collected()
    device = RadixTree(PAGE_TOKENS, recorder=CacheRecorder(sink))
    host = RadixTree(PAGE_TOKENS, recorder=CacheRecorder(sink, of_host=True))
    stream = KVEventStream(NAMESPACE, GROUPS)
    tokens = tokens_of(tuple((n,) * PAGE_TOKENS for n in range(3)))
    pages = len(tokens) // (4 * PAGE_TOKENS)

    def events() -> list[tuple[str, str | None, int]]:
        for tree in (device, host):
            assert tree.recorder is not None
            tree.recorder.flush(tree.describe)
        found = [
            event for changes in sink.take() for batch in stream.apply(changes) for event in events_of(batch.payload)
        ]
        return [
            (type(event).__name__, getattr(event, "medium", None), len(getattr(event, "block_hashes", ())))
            for event in found
        ]

    device.insert(tokens, range(pages))
    host.insert(tokens, range(50, 50 + pages))
    assert events() == [("BlockStored", "GPU", pages), ("BlockStored", "CPU", pages)]
    device.evict(1)
    assert events() == [("BlockRemoved", "GPU", 1)]
    device.clear()
    gone = events()
    assert gone[-2:] == [("AllBlocksCleared", None, 0), ("BlockStored", "CPU", pages)], "readers forget both tiers"
    snapshot = [event for batch in stream.snapshot() for event in events_of(batch.payload)]
    assert [event.medium for event in snapshot if isinstance(event, BlockStored)] == ["CPU"]
    host.clear()
    assert events() == [("BlockRemoved", "CPU", pages)]


@pytest.mark.parametrize("is_full", [False, True])
def test_pages_of_other_weights_have_other_keys_also_where_the_sink_was_full(is_full: bool) -> None:
    sink, other = Collected(), KeyNamespace("w2", True, "l1", "float32", PAGE_TOKENS)
    recorder = CacheRecorder(sink)
    tree = RadixTree(PAGE_TOKENS, recorder=recorder)
    stream = KVEventStream(NAMESPACE, GROUPS, wire_form="map", buffer_steps=3)
    tokens = token_bytes(list(range(PAGE_TOKENS)))

    def hashes() -> list[int]:
        recorder.flush(tree.describe)
        batches = [batch for changes in sink.take() for batch in stream.apply(changes)]
        events = [event for batch in batches for event in events_of(batch.payload)]
        return [number for event in events if isinstance(event, BlockStored) for number in event.block_hashes]

    tree.insert(tokens, [1])
    (before,) = hashes()
    sink.has_room = not is_full
    tree.clear()
    recorder.weights_changed(other)
    assert hashes() == []
    sink.has_room = True
    tree.insert(tokens, [1])
    (after,) = hashes()
    chains = [space.chain(space.root(), tokens)[0] for space in (NAMESPACE, other)]
    assert [before, after] == [short_hash(digest) for digest in chains]
