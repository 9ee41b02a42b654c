"""The publisher through real sockets: readers that come late, replay, are slow, or send nonsense."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from pdserve.config.kv_events_group import KVEventsConfig, parse_kv_events
from pdserve.errors import ConfigError
from pdserve.memory.cache_recorder import CacheRecorder
from pdserve.memory.prefix_cache import RadixTree
from pdserve.observe.kv_events import KVEventStream
from pdserve.observe.kv_publisher import KVEventPublisher
from tests.kv_reader import Subscriber
from tests.unit.memory.kit import PAGE_TOKENS, letters
from tests.unit.observe.test_kv_events import GROUPS, NAMESPACE
from tests.waiting import wait_until

LOCAL = '"endpoint": "tcp://127.0.0.1:0", "bind": true, "replay_endpoint": "tcp://127.0.0.1:0"'


def parsed(fields: str, num_replicas: int = 1) -> KVEventsConfig:
    config = parse_kv_events(f'{{"publisher": "zmq", {fields}}}', num_replicas)
    assert config is not None
    return config


class Cache:
    """A prefix cache whose changes are published."""

    def __init__(self, stack: ExitStack, fields: str = LOCAL, dp_rank: int = 0) -> None:
        config = parsed(fields)
        kept, form = config.buffer_steps, config.wire_form
        stream = KVEventStream(NAMESPACE, GROUPS, dp_rank=dp_rank, buffer_steps=kept, wire_form=form)
        self.publisher = KVEventPublisher(config, stream, dp_rank)
        stack.callback(self.publisher.close)
        self.recorder = CacheRecorder(self.publisher)
        self.tree = RadixTree(PAGE_TOKENS, recorder=self.recorder)
        self.num_pages = 0

    def insert(self, text: str) -> None:
        self.tree.insert(letters(text), range(self.num_pages, self.num_pages + len(text)))
        self.num_pages += len(text)
        self.recorder.flush(self.tree.describe)

    def clear(self) -> None:
        self.tree.clear()
        self.recorder.flush(self.tree.describe)

    def subscribed(self, stack: ExitStack, topic: str = "", *, small_queue: bool = False) -> Subscriber:
        endpoint, replay = self.publisher.endpoint, self.publisher.replay_endpoint
        subscriber = Subscriber(endpoint, replay, topic, small_queue=small_queue)
        stack.callback(subscriber.close)
        return subscriber

    def published(self, name: str) -> float:
        return self.publisher.facts()[name]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def prompts(*texts: str) -> set[tuple[int, ...]]:
    """What a cache has after these prompts: all their beginnings."""
    return {
        tuple(token for letter in text[:end] for token in (ord(letter), 7))
        for text in texts
        for end in range(1, len(text) + 1)
    }


def test_a_late_reader_gets_the_content_and_then_the_changes(stack: ExitStack) -> None:
    cache = Cache(stack, f'{LOCAL}, "buffer_steps": 1, "topic": "kv@pod@model"')
    for text in ("abc", "abd", "xy"):
        cache.insert(text)
    first = cache.subscribed(stack, "kv@")
    first.until(prompts("abc", "abd", "xy"))
    cache.insert("abcq")
    second = cache.subscribed(stack)
    for reader in (first, second):
        reader.until(prompts("abcq", "abd", "xy"))
    cache.clear()
    for reader in (first, second):
        reader.until(set())
        assert reader.topics == {b"kv@pod@model"}
    wait_until(lambda: cache.published("kv_events_snapshots") >= 1, "one snapshot may answer both subscriptions")


def test_a_reader_of_another_topic_causes_no_snapshot(stack: ExitStack) -> None:
    cache = Cache(stack, f'{LOCAL}, "topic": "ours"')
    cache.insert("ab")
    other, ours = cache.subscribed(stack, "theirs"), cache.subscribed(stack, "ours")
    wait_until(lambda: cache.published("kv_events_snapshots") == 1, "our subscription is answered")
    ours.until(prompts("ab"))
    cache.insert("abc")
    ours.until(prompts("abc"))
    assert not other.poll(0)
    assert cache.published("kv_events_snapshots") == 1


def test_a_replay_gives_the_batches_again_and_one_that_left_the_buffer_the_content(stack: ExitStack) -> None:
    cache = Cache(stack, f'{LOCAL}, "buffer_steps": 3')
    reader = cache.subscribed(stack)
    wait_until(lambda: cache.published("kv_events_snapshots") == 1, "the snapshot of the subscription comes first")
    for text in ("a", "ab", "abc"):
        cache.insert(text)
    reader.until(prompts("abc"))
    at = reader.follower.next_seq
    assert at is not None
    found = reader.replay(at - 1)
    assert [seq for seq, _ in found] == [at - 1] and reader.replay(at) == []
    before = cache.published("kv_events_snapshots")
    for text in ("abcd", "abcde", "abcdef", "abcdefg"):
        cache.insert(text)
    wait_until(lambda: cache.published("kv_events_batches") >= at + 4, "all are published")
    assert reader.replay(0) == [], "it is not in the buffer; everything comes live"
    reader.until(prompts("abcdefg"))
    wait_until(lambda: cache.published("kv_events_snapshots") > before, "a snapshot answers the replay")


def test_malformed_replay_requests_are_refused_and_readers_go_on(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(stack)
    context = stack.enter_context(zmq.Context())
    dealer = stack.enter_context(context.socket(zmq.DEALER))
    assert cache.publisher.replay_endpoint is not None
    dealer.connect(cache.publisher.replay_endpoint)
    for frames in ((b"",), (b"", b"12"), (b"x", b"\0" * 8), (b"", b"\0" * 8, b"")):
        dealer.send_multipart(frames)
    dealer.send_multipart((b"", b"\xff" * 8))
    assert dealer.poll(20_000) and dealer.recv_multipart()[2] == b"\xff" * 8, "only the last one is answered"
    assert "request for a replay" in caplog.text
    cache.insert("ab")
    cache.subscribed(stack).until(prompts("ab"))


def test_a_slow_reader_does_not_delay_the_others(stack: ExitStack, tmp_path: Path) -> None:
    """Its queues and the kernel's buffer are full long before the last batch. Others get all; it sees a gap, replays,
    and has everything. A unix socket, whose buffer does not grow.
    """
    fields = f'"endpoint": "ipc://{tmp_path}/e", "replay_endpoint": "ipc://{tmp_path}/r", "topic": "{"t" * 1000}"'
    cache = Cache(stack, f'{fields}, "hwm": 2')
    slow, other = cache.subscribed(stack, small_queue=True), cache.subscribed(stack)
    cache.insert("a")
    for reader in (slow, other):
        reader.until(prompts("a"))
    texts = [chr(1000 + i) for i in range(400)]
    for text in texts:
        cache.insert(text)
        wait_until(lambda: cache.published("kv_events_queued") == 0, "the publisher has taken it")
        while other.poll(0):
            pass
    while slow.poll(0.1):
        pass
    cache.insert("z")
    for reader in (other, slow):
        reader.until(prompts("a", "z", *texts))
    assert slow.num_gaps > 0


def test_a_publisher_that_has_ended_takes_nothing(stack: ExitStack) -> None:
    cache = Cache(stack)
    reader = cache.subscribed(stack)
    cache.insert("ab")
    reader.until(prompts("ab"))
    assert cache.recorder.num_lost == 0
    cache.publisher.close()
    cache.insert("abc")
    assert cache.recorder.num_lost == 1 and not cache.publisher.has_room


def test_each_replica_has_a_port_of_its_own(stack: ExitStack) -> None:
    config = parsed('"endpoint": "tcp://*:6000", "replay_endpoint": "ipc:///tmp/replay"', 4)
    assert config.binds and config.replay_endpoint is not None
    assert [config.endpoint.of_replica(rank) for rank in (0, 3)] == ["tcp://*:6000", "tcp://*:6003"]
    assert [config.replay_endpoint.of_replica(rank) for rank in (0, 3)] == [
        "ipc:///tmp/replay",
        "ipc:///tmp/replay_dp3",
    ]
    assert parsed('"endpoint": "tcp://reader:6000"').binds is False, "as in vLLM"
    assert not parsed('"topic": ""').endpoint.is_reachable and config.endpoint.is_reachable


def test_an_endpoint_in_use_is_refused_by_its_name(stack: ExitStack) -> None:
    cache = Cache(stack)
    fields = f'"endpoint": "{cache.publisher.endpoint}", "bind": true'
    with pytest.raises(ConfigError, match=r"endpoint tcp://127.0.0.1:\d+ cannot be bound: Address already in use"):
        Cache(stack, fields)


@pytest.mark.parametrize(
    "text", ["{}", '{"publisher": "null"}', '{"publisher": "zmq", "enable_kv_cache_events": false}']
)
def test_events_are_off(text: str) -> None:
    assert parse_kv_events(text) is None
    assert parse_kv_events(None) is None
    assert parse_kv_events('{"enable_kv_cache_events": true}') == KVEventsConfig()
    for name in ("map", "default", "dynamo"):
        assert parse_kv_events(f'{{"publisher": "zmq", "format": "{name}"}}') == KVEventsConfig()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ('"endpiont": "tcp://*:5557"', "endpiont is not known"),
        ('"publisher": "kafka"', "publisher is 'kafka', but must be 'zmq' or 'null'"),
        ('"enable_kv_cache_events": 1', "enable_kv_cache_events must be true or false"),
        ('"endpoint": "*:5557"', r"endpoint is '\*:5557', but must be tcp://HOST:PORT or ipc://PATH"),
        ('"endpoint": 5', "endpoint is 5, but must be tcp"),
        ('"endpoint": "inproc://x"', "endpoint is 'inproc://x', but must be tcp"),
        ('"endpoint": "tcp://*:65535"', "the port of each of 2 replicas must be at most 65535"),
        ('"endpoint": "tcp://reader:0"', "port 0 is only for an endpoint that is bound"),
        ('"replay_endpoint": "tcp://*:5558"', "the ports of 2 replicas from there on"),
        ('"replay_endpoint": 1', "replay_endpoint is 1, but must be tcp"),
        ('"bind": "yes"', "bind must be true or false"),
        ('"buffer_steps": 0', "buffer_steps is 0, but must be a whole number, 1 to"),
        ('"hwm": true', "hwm is True, but"),
        ('"max_queue_size": 1.5', "max_queue_size is 1.5, but"),
        ('"topic": 3', "topic must be a text"),
        ('"format": "json"', "format is 'json', but must be 'map'"),
    ],
)
def test_wrong_values_are_refused_by_the_name_of_the_field(fields: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_kv_events(f'{{"publisher": "zmq", {fields}}}' if "publisher" not in fields else f"{{{fields}}}", 2)
    assert caught.value.field == "kv_events_config"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 5000])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-events-config") as caught:
        parse_kv_events(text)
    assert caught.value.field == "kv_events_config"
