"""Readers of KV events that other projects have: SGLang's own structs, and llm-d's rules for replays.

Sources: `sglang/srt/disaggregation/kv_events.py` as installed in `.venv-peers` (its classes are cut out, as the module
imports CUDA code); `pkg/kvevents/zmq_subscriber.go` of llm-d-router 0539d49a, whose rules are written down here.
"""

from __future__ import annotations

import ast
import enum
import random
import typing
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from pdserve.config.kv_events_group import WireForm
from pdserve.observe.kv_publisher import END
from tests.kv_reader import CacheCopy, events_of
from tests.rules.test_gateways import converted
from tests.unit.memory.kit import PAGE_TOKENS, letters
from tests.unit.observe.test_kv_events import make, one_turn
from tests.unit.observe.test_kv_publisher import Cache, prompts
from tests.waiting import wait_until

PEERS = Path(__file__).parents[2] / ".venv-peers"
SGLANG = sorted(PEERS.glob("sglang_bench/lib/python3*/site-packages/sglang/srt/disaggregation/kv_events.py"))
"""`scripts/setup_peers.sh sglang_bench` installs it."""
STRUCTS = ("EventBatch", "KVCacheEvent", "BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch")
LLM_D = '"endpoint": "tcp://127.0.0.1:0", "bind": true, "replay_endpoint": "tcp://127.0.0.1:0", "format": "array"'
TOPIC = "kv@10.0.0.1:30000@model"


@pytest.fixture(scope="module")
def sglang() -> dict[str, Any]:
    """SGLang's structs by name."""
    if not SGLANG:
        pytest.skip("needs SGLang in .venv-peers")
    classes = [node for node in ast.parse(SGLANG[0].read_text()).body if isinstance(node, ast.ClassDef)]
    wanted: list[ast.stmt] = [node for node in classes if node.name in STRUCTS]
    found: dict[str, Any] = {"msgspec": msgspec, "enum": enum, **vars(typing)}
    exec(compile(ast.Module(wanted, []), str(SGLANG[0]), "exec", dont_inherit=True), found)
    return {name: found[name] for name in STRUCTS}


def payloads(wire_form: WireForm) -> list[bytes]:
    """Batches with pages that are stored, evicted, and cleared."""
    tree, sink, stream = make(wire_form)
    found = []
    tree.insert(letters("ab"), [4, 9])
    found += one_turn(tree, sink, stream)
    tree.evict(1)
    found += one_turn(tree, sink, stream)
    tree.clear()
    found += one_turn(tree, sink, stream)
    return [batch.payload for batch in found]


def test_sglangs_structs_read_every_event(sglang: dict[str, Any]) -> None:
    decoder = msgspec.msgpack.Decoder(sglang["KVEventBatch"])
    batches = [decoder.decode(payload) for payload in payloads("map")]
    assert {batch.attn_dp_rank for batch in batches} == {3}
    events = [event for batch in batches for event in batch.events]
    kinds = ["BlockStored", "BlockRemoved", "BlockRemoved", "AllBlocksCleared"]
    assert [type(event).__name__ for event in events] == kinds
    stored, evicted = events[:2]
    assert stored.token_ids == [ord("a"), 7, ord("b"), 7] and stored.block_size == PAGE_TOKENS
    assert (stored.parent_block_hash, stored.medium, len(stored.block_hashes)) == (None, "GPU", 2)
    assert evicted.block_hashes == stored.block_hashes[1:] and evicted.medium == "GPU"


def test_sglang_sends_and_reads_maps_only(sglang: dict[str, Any]) -> None:
    """The arrays of `"format": "array"` are for readers of older releases."""
    hashes = {"block_hashes": [1], "parent_block_hash": None, "token_ids": [5, 6], "block_size": 2, "lora_id": None}
    sent = msgspec.msgpack.encode(sglang["KVEventBatch"](1.0, [sglang["BlockStored"](**hashes)]))
    [event] = msgspec.msgpack.decode(sent)[1]
    assert event["type"] == "BlockStored"
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(payloads("array")[0], type=sglang["KVEventBatch"])


class LlmDSubscriber:
    """llm-d's subscriber of one pod: it replays on connect, after a gap, and when numbers fall.

    An answer to a replay must be contiguous from the number that was asked for, or begin later and be contiguous from
    there: then the index is emptied first. The end alone is accepted for a replay from 0, and else a failure: the index
    is emptied, and live batches are dropped until a cooldown is over, see `end_cooldown`.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._context = stack.enter_context(zmq.Context())
        self._sub: zmq.Socket[bytes] | None = None
        self._replay_endpoint = ""
        self.index = CacheCopy()
        self.taken: list[int] = []
        self.replays: list[int] = []
        self.last_live: int | None = None
        self._last: int | None = None
        self._cools_down = False

    def connect(self, cache: Cache) -> None:
        """Subscribe to a publisher; its content is replayed unless something is known."""
        if self._sub is not None:
            self._sub.close(0)
        assert cache.publisher.replay_endpoint is not None
        self._sub, self._replay_endpoint = self._context.socket(zmq.SUB), cache.publisher.replay_endpoint
        self._sub.connect(cache.publisher.endpoint)
        self._sub.subscribe("kv@")
        if self._last is None:
            self._replay(0)

    def close(self) -> None:
        self._context.destroy(0)

    def end_cooldown(self) -> None:
        self._cools_down = False

    def drop(self, count: int) -> None:
        """Lose live batches on the way."""
        assert self._sub is not None
        for _ in range(count):
            assert self._sub.poll(20_000), "a batch to lose"
            self._sub.recv_multipart()

    def until_read(self, cache: Cache) -> None:
        """Read live batches up to the last one of a publisher that publishes nothing more."""

        def read() -> bool:
            self.poll()
            return self.last_live == cache.published("kv_events_batches") - 1

        wait_until(read, "all live batches are read")

    def until(self, expected: set[tuple[int, ...]]) -> None:
        """Read live batches until the index has these prompts."""

        def reached() -> bool:
            self.poll()
            return self.index.prompts() == expected

        wait_until(reached, f"{len(expected)} prefixes; there are {len(self.index.prompts())}")

    def poll(self) -> None:
        """Read the live batches that are there."""
        assert self._sub is not None
        while self._sub.poll(50):
            topic, number, payload = self._sub.recv_multipart()
            assert topic == TOPIC.encode() and len(number) == 8
            self._live(int.from_bytes(number, "big"), payload)

    def _live(self, seq: int, payload: bytes) -> None:
        replayed = False
        if self.last_live is not None and seq < self.last_live:
            self._reset()
            self._cools_down, replayed = False, True
            self._replay(0)
        if seq == self.last_live:
            return
        self.last_live = seq
        if self._last is not None and seq > self._last + 1:
            if self._cools_down or not self._replay(self._last + 1):
                return
        elif self._last is None and seq > 0 and (replayed or self._cools_down or not self._replay(0)):
            return
        if self._last is None or seq == self._last + 1:
            self._take(seq, payload)

    def _replay(self, start: int) -> bool:
        self.replays.append(start)
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.connect(self._replay_endpoint)
            dealer.send_multipart((b"", start.to_bytes(8, "big")))
            expected, count = start, 0
            while True:
                assert dealer.poll(20_000), "no answer to the replay"
                empty, topic, number, payload = dealer.recv_multipart()
                assert not empty
                if not payload:
                    assert (topic, number) == (b"", END)
                    break
                seq = int.from_bytes(number, "big")
                if not count and seq > expected:
                    self._reset()
                    expected = seq
                assert (topic, seq) == (TOPIC.encode(), expected), "contiguous from the requested number"
                self._take(seq, payload)
                expected, count = expected + 1, count + 1
        if count or not start:
            self._cools_down = False
            return True
        self._reset()
        self._cools_down = True
        return False

    def _reset(self) -> None:
        self.index, self._last = CacheCopy(), None

    def _take(self, seq: int, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload)[1]:
            converted(event)
        for event in events_of(payload):
            self.index.apply(event)
        self.taken.append(seq)
        self._last = seq


def served(stack: ExitStack, **more: object) -> Cache:
    extra = "".join(f', "{name}": {value}' for name, value in more.items())
    return Cache(stack, f'{LLM_D}, "topic": "{TOPIC}"{extra}')


def test_llm_d_replays_on_connect_and_after_a_gap() -> None:
    """Every answer is contiguous from the requested number, and no batch is taken twice."""
    with ExitStack() as stack:
        cache, reader = served(stack), LlmDSubscriber(stack)
        for text in ("ab", "abc", "xy"):
            cache.insert(text)
        wait_until(lambda: cache.published("kv_events_batches") == 3, "all are published")
        reader.connect(cache)
        assert reader.index.prompts() == prompts("abc", "xy") and reader.replays == [0]
        wait_until(lambda: cache.published("kv_events_batches") == 4, "the subscription is answered")
        reader.until_read(cache)
        for text in ("abcd", "abcde", "z"):
            cache.insert(text)
        reader.drop(2)
        reader.until(prompts("abcde", "xy", "z"))
        assert reader.replays == [0, 4] and reader.taken == list(range(7))


def test_llm_d_has_the_content_again_after_batches_that_no_replay_has() -> None:
    """The end alone answers both replays; the content comes live, behind `AllBlocksCleared`."""
    with ExitStack() as stack:
        cache, reader = served(stack, buffer_steps=3), LlmDSubscriber(stack)
        cache.insert("ab")
        reader.connect(cache)
        wait_until(lambda: cache.published("kv_events_batches") == 2, "the subscription is answered")
        reader.until_read(cache)
        texts = random.Random(1).sample("cdefghijklmnop", 8)
        for text in texts:
            cache.insert(text)
        reader.drop(5)
        wait_until(lambda: cache.published("kv_events_batches") == 10, "all are published")
        reader.until_read(cache)
        wait_until(lambda: cache.published("kv_events_snapshots") == 2, "the failed replay is answered")
        cache.insert("q")
        reader.until_read(cache)
        assert reader.replays == [0, 2] and not reader.index.blocks, "live batches are dropped"
        reader.end_cooldown()
        cache.insert("r")
        reader.until(prompts("ab", "q", "r", *texts))
        assert reader.replays == [0, 2, 0]


def test_llm_d_begins_again_when_a_server_has_restarted() -> None:
    with ExitStack() as stack:
        first, reader = served(stack), LlmDSubscriber(stack)
        for text in ("a", "ab", "abc", "abcd", "abcde", "abcdef"):
            first.insert(text)
        reader.connect(first)
        first.insert("z")
        reader.until(prompts("abcdef", "z"))
        second = served(stack)
        second.insert("xy")
        wait_until(lambda: second.published("kv_events_batches") == 1, "its numbers begin at 0")
        reader.connect(second)
        reader.until(prompts("xy"))
        assert reader.replays[-1] == 0
        second.insert("xyz")
        reader.until(prompts("xyz"))
