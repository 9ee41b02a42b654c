"""Stored objects, the circuit breaker, and a client over stores that block, fail and lie."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.parallel import SINGLE
from pdserve.config.storage_options import parse_storage_options
from pdserve.errors import ConfigError
from pdserve.memory.layout import PageSpace
from pdserve.memory.tiers.breaker import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MOST_LIES,
    StorageBreaker,
    StorageBreakerState,
)
from pdserve.memory.tiers.memory_store import MemoryStorage
from pdserve.memory.tiers.prefix_ends import PageKey, PrefixEnds, token_keys
from pdserve.memory.tiers.storage import Miss, ObjectId, StorageError, check, object_bytes, rank_parts, seal, shard_name
from pdserve.memory.tiers.storage_client import MOST_KEYS, StorageClient, Transfer
from pdserve.memory.tiers.storage_port import JobEnd, LocalStoragePort
from pdserve.memory.tiers.storage_probe import MOST_REPEATS
from tests.waiting import wait_until

SIZE = 1000
PART = shard_name("tokens", tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)


def page_ids(count: int, namespace: int = 1) -> list[ObjectId]:
    """Pages of one prompt."""
    return [ObjectId(bytes([namespace]) * 32, index.to_bytes(32, "big"), PART) for index in range(count)]


def page(index: int) -> bytes:
    """The page of an index."""
    return bytes([index % 251]) * SIZE


def views(count: int) -> list[memoryview]:
    """Pages as buffers."""
    return [memoryview(page(index)) for index in range(count)]


# ---------------------------------------------------------------------- objects


def stored(identity: ObjectId, payload: bytes) -> bytearray:
    """The object of a page."""
    target = bytearray(object_bytes(len(payload)))
    seal(memoryview(target), identity, memoryview(payload))
    return target


@given(st.binary(min_size=1, max_size=300), st.integers(0), st.integers(1, 255))
def test_any_changed_byte_is_a_miss(payload: bytes, at: int, change: int) -> None:
    """Each byte that means something is covered by a field or by the checksum."""
    identity = page_ids(1)[0]
    one = stored(identity, payload)
    assert check(memoryview(one), identity) is None
    at %= len(one)
    one[at] ^= change
    is_filler = 100 <= at < 128
    assert (check(memoryview(one), identity) is None) == is_filler


def test_each_miss_has_its_reason() -> None:
    """A reader says what is wrong with an object."""
    identity = page_ids(1)[0]
    one = stored(identity, b"page")
    others = {
        Miss.NAMESPACE: dataclasses.replace(identity, namespace=bytes(32)),
        Miss.KEY: dataclasses.replace(identity, digest=b"x" * 32),
    }
    for miss, other in others.items():
        assert check(memoryview(one), other) is miss
    assert check(memoryview(one), dataclasses.replace(identity, part="window-t0of1-p0of1")) is Miss.KEY
    assert check(memoryview(one)[:-1], identity) is Miss.LENGTH
    assert check(memoryview(one)[:20], identity) is Miss.NOT_AN_OBJECT
    assert check(memoryview(bytes(len(one))), identity) is Miss.NOT_AN_OBJECT
    one[-1] ^= 1
    assert check(memoryview(one), identity) is Miss.CHECKSUM


def test_keys_tell_everything_apart() -> None:
    """Keys differ with namespace, page and part."""
    first = page_ids(1)[0]
    others = [page_ids(2)[1], page_ids(1, namespace=2)[0]]
    others += [
        dataclasses.replace(first, part=shard_name("tokens", tp_rank=rank, tp_size=2, pp_rank=0, pp_size=1))
        for rank in range(2)
    ]
    keys = [one.key for one in (first, *others)]
    assert len(set(keys)) == len(keys)
    assert all(len(key) <= 128 and key.replace("-", "").replace("_", "").isalnum() for key in keys)


# ---------------------------------------------------------------------- options


def test_options_are_read(tmp_path: Path) -> None:
    """JSON or a file with it; SGLang's names and the backend's own."""
    text = '{"prefetch_threshold": 16, "prefetch_timeout_base": 2, "max_size": "1.5gb", "directory": "/x"}'
    options = parse_storage_options(text)
    assert (options.threshold_tokens, options.deadline_s(4096)) == (16, 3.0)
    assert (options.size("max_size", 1), options.text("directory", "")) == (3 << 29, "/x")
    (tmp_path / "options.json").write_text(text)
    assert parse_storage_options(f"@{tmp_path}/options.json") == options
    assert parse_storage_options(None).threshold_tokens == 256
    assert parse_storage_options('{"decode_offload_stride": 0}').decode_stride == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "a JSON object is needed"),
        ("@/no/such/file", "cannot read /no/such/file"),
        ('{"prefetch_threshold": -1}', "prefetch_threshold must be a number"),
        ('{"prefetch_threshold": 1.5}', "whole number"),
        ('{"decode_offload_stride": 0.5}', "decode_offload_stride must be a whole number"),
        ('{"prefetch_timeout_base": "1"}', "prefetch_timeout_base must be a number"),
    ],
)
def test_wrong_options_are_named(text: str, message: str) -> None:
    """The error says which one."""
    with pytest.raises(ConfigError, match=message) as caught:
        parse_storage_options(text)
    assert caught.value.field == "hicache_storage_backend_extra_config"


@pytest.mark.parametrize("value", ["much", -1, 0, True, "4 parsecs"])
def test_wrong_sizes_are_named(value: object) -> None:
    """So does that of a size."""
    options = parse_storage_options(json.dumps({"max_size": value}))
    with pytest.raises(ConfigError, match="max_size must be a number of bytes"):
        options.size("max_size", 1)


# ---------------------------------------------------------------------- breaker


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


def test_breaker_opens_probes_and_waits_longer() -> None:
    """Each failed probe doubles the pause; a good one closes it."""
    clock = Clock()
    breaker = StorageBreaker(2.0, now=clock)
    assert breaker.allows
    breaker.begin("get")
    breaker.fail("get", "away")
    pause_s = FIRST_PAUSE_S
    for _ in range(3):
        assert breaker.state is StorageBreakerState.OPEN and not breaker.begin_probe()
        clock.now_s += pause_s
        assert breaker.begin_probe() and not breaker.begin_probe()
        assert breaker.state is StorageBreakerState.HALF_OPEN and not breaker.allows
        breaker.begin("get")
        breaker.end_probe("get", "away")
        pause_s *= 2
    clock.now_s += pause_s
    good_probe(breaker)
    assert breaker.allows and breaker.num_opened == 1 and breaker.last_error == "away"


def good_probe(breaker: StorageBreaker) -> None:
    """Probe a store that answers."""
    assert breaker.begin_probe()
    breaker.begin("get")
    breaker.end_probe("get", None)
    assert breaker.allows


@pytest.mark.parametrize("kind", ["late", "lies", "slow", "failed"])
def test_good_probes_do_not_shorten_the_pauses(kind: str) -> None:
    """A store that answers probes and fails requests gets ever fewer of them; reads in time make up for that."""
    clock = Clock()
    breaker = StorageBreaker(2.0, now=clock)

    def fail() -> None:
        breaker.begin("put")
        if kind == "late":
            breaker.late()
        clock.now_s += 3.0 if kind == "slow" else 0.25
        if kind == "failed":
            breaker.fail("put", "away")
        else:
            breaker.succeed("put")
        for _ in range(MOST_LIES if kind == "lies" else 0):
            breaker.read(found=False)

    pauses = []
    for _ in range(9):
        pauses.append(breaker.next_pause_s)
        fail()
        assert not breaker.allows
        clock.now_s += pauses[-1] - 0.5
        assert not breaker.begin_probe()
        clock.now_s += 0.5
        good_probe(breaker)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    for _ in range(3):
        breaker.read(found=True)
    assert breaker.next_pause_s == 7.5
    clock.now_s += LONGEST_PAUSE_S
    fail()
    assert breaker.next_pause_s == 2 * FIRST_PAUSE_S, "it was used for long"


def test_a_call_that_ends_or_fails_beside_a_probe() -> None:
    """The end of a call on the other lane closes nothing; its failure keeps the breaker open."""
    clock = Clock()
    breaker = StorageBreaker(2.0, now=clock)
    for error in (None, "away"):
        breaker.begin("put")
        breaker.late()
        clock.now_s += breaker.next_pause_s / 2
        assert breaker.begin_probe()
        breaker.begin("get")
        if error is None:
            breaker.succeed("put")
        else:
            breaker.fail("put", error)
        assert not breaker.allows
        breaker.end_probe("get", None)
        assert breaker.allows == (error is None)


def test_breaker_is_open_while_a_call_is_stuck() -> None:
    """A call that runs longer than the limit counts before it returns, and no probe is made meanwhile."""
    clock = Clock()
    breaker = StorageBreaker(2.0, now=clock)
    breaker.begin("get")
    clock.now_s += 1.9
    assert breaker.allows
    clock.now_s += 0.2
    assert not breaker.allows and not breaker.begin_probe()
    breaker.succeed("get")
    assert not breaker.allows and "a call took 2.1 s" in breaker.last_error
    clock.now_s += FIRST_PAUSE_S
    assert breaker.begin_probe()


# ---------------------------------------------------------------------- client


class BadStore(MemoryStorage):
    """A store that a test makes block, fail, lie and damage objects."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.is_away = self.lies = False
        self.refuses: set[int] = set()
        """Indices of objects that a put does not take."""
        self.damage = 0
        """Objects read whose last byte is changed."""

    def _pass(self) -> None:
        self.entered.set()
        assert self.gate.wait(20)
        if self.is_away:
            raise StorageError("away")

    def exists(self, keys: Sequence[str]) -> int:
        """See `Storage`."""
        self._pass()
        return len(keys) if self.lies else super().exists(keys)

    def get_into(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """See `Storage`."""
        self._pass()
        found = super().get_into(keys, buffers)
        for buffer in buffers[: self.damage]:
            buffer[-1] ^= 1
        return found

    def put_from(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """See `Storage`."""
        self._pass()
        taken = super().put_from(keys, buffers)
        return [ok and index not in self.refuses for index, ok in enumerate(taken)]


@pytest.fixture
def store() -> BadStore:
    """A good store until a test says otherwise."""
    return BadStore()


@pytest.fixture
def client(store: BadStore) -> Iterator[StorageClient]:
    """A client of it, whose breaker opens for short times."""
    made = StorageClient(store, call_limit_s=5.0)
    yield made
    store.gate.set()
    made.close()


def put(client: StorageClient, count: int) -> None:
    """Store pages."""
    job = client.start_put(page_ids(count), views(count))
    wait_until(lambda: job.is_done, "the pages are stored")


def fetch(client: StorageClient, count: int) -> tuple[Transfer, list[bytearray]]:
    """Read pages; the job and its buffers."""
    buffers = [bytearray(SIZE) for _ in range(count)]
    job = client.start_get(page_ids(count), [memoryview(buffer) for buffer in buffers])
    wait_until(lambda: job.is_done, "the pages are read")
    return job, buffers


def test_pages_go_and_come(client: StorageClient) -> None:
    """Pages of several calls come back, up to the first miss."""
    count = 2 * MOST_KEYS + 5
    put(client, count)
    lookup = client.start_lookup(page_ids(count + 3))
    wait_until(lambda: lookup.is_done, "the look-up is done")
    assert lookup.num_found == count
    job, buffers = fetch(client, count + 3)
    assert job.num_done == count
    assert all(bytes(buffer) == page(index) for index, buffer in enumerate(buffers[:count]))
    assert client.counts.misses == {Miss.ABSENT: 1}
    assert client.facts()["pages_written"] == client.facts()["pages_read"] == count


def test_a_look_up_finds_the_last_end_whose_state_is_stored(client: StorageClient) -> None:
    """The parts of a page are objects of their own, and the search runs on the client's thread."""
    slots = {space: bytearray(SIZE) for space in PageSpace}
    port = LocalStoragePort(client, rank_parts(SINGLE), lambda space, slot: memoryview(slots[space]))
    root, digests = bytes(32), [bytes([number]) * 32 for number in range(1, 6)]
    slots[PageSpace.SLOTS][:] = page(7)
    state = PageKey(digests[2], PageSpace.SLOTS)
    ends = PrefixEnds(digests, 0, 0, 1, None)

    def end_of(job: int) -> int:
        found: list[JobEnd] = []
        wait_until(lambda: found.extend(port.poll()) or found, "the job has ended")
        assert [one.number for one in found] == [job]
        return found[0].num_pages

    assert end_of(port.put(root, token_keys(digests), [0] * 5)) == 5
    assert end_of(port.look_up(root, token_keys(digests))) == 5
    assert end_of(port.look_up(root, token_keys(digests), ends)) == 0, "token pages alone"
    assert end_of(port.put(root, [state], [0])) == 1
    slots[PageSpace.SLOTS][:] = bytes(SIZE)
    assert end_of(port.look_up(root, token_keys(digests), ends)) == 3
    assert end_of(port.get(root, [state], [0])) == 1 and bytes(slots[PageSpace.SLOTS]) == page(7)
    assert end_of(port.get(root, [PageKey(digests[3], PageSpace.SLOTS)], [0])) == 0


def test_damaged_object_is_a_miss(client: StorageClient, store: BadStore) -> None:
    """A damaged page ends the read; its bytes are not copied. The next put replaces it."""
    put(client, 3)
    store.damage = 1
    job, buffers = fetch(client, 3)
    assert job.num_done == 0 and not any(map(any, buffers))
    assert client.counts.misses == {Miss.CHECKSUM: 1}
    store.damage = 0
    assert store.exists([page_ids(1)[0].key]) == 0
    put(client, 3)
    assert fetch(client, 3)[0].num_done == 3


def test_lying_store_is_left_alone(client: StorageClient, store: BadStore) -> None:
    """A store that names what it has not gets no more calls after a few."""
    store.lies = True
    for _ in range(MOST_LIES):
        assert client.breaker.allows
        assert fetch(client, 2)[0].num_done == 0
    assert not client.breaker.allows
    lookup = client.start_lookup(page_ids(2))
    assert lookup.is_done and lookup.num_found == 0


def test_refused_pages_do_not_count_as_sent(client: StorageClient, store: BadStore) -> None:
    """A full store takes no page behind the first refused one in the count, so that all these are sent again later."""
    store.refuses = {1}
    job = client.start_put(page_ids(4), views(4))
    wait_until(lambda: job.is_done, "the pages are stored")
    assert (job.num_done, client.counts.pages_written, client.counts.pages_refused) == (1, 3, 1)
    assert client.breaker.allows


@pytest.mark.parametrize("answer", [-1, 99, None, True, "2"])
def test_a_store_that_answers_nonsense_has_failed(client: StorageClient, store: BadStore, answer: Any) -> None:
    """Its threads go on, and the breaker opens."""
    store.exists = lambda keys: answer  # type: ignore[method-assign]
    job = client.start_lookup(page_ids(3))
    wait_until(lambda: job.is_done, "the look-up has ended")
    assert job.num_found == 0
    assert not client.breaker.allows and "answered" in client.breaker.last_error


def test_a_store_that_forgets_results_has_failed(client: StorageClient, store: BadStore) -> None:
    """Fewer results than objects are no results."""
    put(client, 3)
    store.get_into = lambda keys, buffers: [True]  # type: ignore[method-assign]
    job, _ = fetch(client, 3)
    assert job.num_done == 0
    assert "1 results for 3 objects" in client.breaker.last_error


def test_results_that_are_no_booleans_end_no_thread(client: StorageClient, store: BadStore) -> None:
    """Later jobs go on."""
    store.put_from = lambda keys, buffers: [None, 1, "yes"]  # type: ignore[method-assign,list-item]
    job = client.start_put(page_ids(3), views(3))
    wait_until(lambda: job.is_done, "the pages are stored")
    assert (job.num_done, client.counts.pages_written, client.counts.pages_refused) == (0, 2, 1)


def test_store_that_is_away_is_probed(client: StorageClient, store: BadStore) -> None:
    """A failure opens the breaker; a probe that no request waits for closes it."""
    put(client, 2)
    store.is_away = True
    assert fetch(client, 2)[0].num_done == 0
    assert not client.breaker.allows and client.breaker.last_error == "away"
    dropped = client.start_put(page_ids(1), views(1))
    assert dropped.is_done and client.counts.pages_refused == 1
    store.is_away = False
    wait_until(lambda: client.breaker.allows, "the breaker closes")
    assert fetch(client, 2)[0].num_done == 2


def test_no_byte_lands_after_cancel(client: StorageClient, store: BadStore) -> None:
    """A request gives up on a store that blocks. Its buffers are its own again, whatever the store does later."""
    put(client, 2)
    store.gate.clear()
    store.entered.clear()
    buffers = [bytearray(SIZE) for _ in range(2)]
    job = client.start_get(page_ids(2), [memoryview(buffer) for buffer in buffers])
    assert store.entered.wait(20)
    client.give_up(job, late=True)
    assert job.num_done == 0 and not client.breaker.allows
    store.gate.set()
    wait_until(lambda: job.is_done, "the call returns")
    assert not any(map(any, buffers))


class SlowReads(MemoryStorage):
    """A store that is quick to say what it has, and slow to give it, by a clock of the test."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.read_s, self.num_reads = clock, 0.0, 0

    def get_into(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """See `Storage`."""
        self.num_reads += 1
        self.clock.now_s += self.read_s
        return super().get_into(keys, buffers)


@pytest.fixture
def slow() -> Iterator[tuple[StorageClient, SlowReads]]:
    """A client and a store on the clock of the test."""
    store = SlowReads(Clock())
    client = StorageClient(store, now=store.clock)
    yield client, store
    client.close()


def give_up_late(client: StorageClient, store: SlowReads, deadline_s: float = 1.0) -> None:
    """Read pages that come behind the deadline."""
    read_s, store.read_s = store.read_s, 0.0
    entered, gate = threading.Event(), threading.Event()
    get_into = store.get_into

    def held(keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        entered.set()
        assert gate.wait(20)
        return get_into(keys, buffers)

    store.get_into = held  # type: ignore[method-assign]
    job = client.start_get(page_ids(2), [memoryview(bytearray(SIZE)) for _ in range(2)])
    assert entered.wait(20)
    store.clock.now_s += deadline_s
    client.give_up(job, late=True)
    store.get_into = get_into  # type: ignore[method-assign]
    store.read_s = read_s
    gate.set()
    wait_until(lambda: job.is_done, "the read has ended")


def test_reads_that_are_late_are_paid_for_once(slow: tuple[StorageClient, SlowReads]) -> None:
    """Probes repeat the read, so that the breaker stays open for ever longer pauses until it is quick enough."""
    client, store = slow
    put(client, 2)
    store.read_s = 1.5
    give_up_late(client, store)
    for pause_s in (1, 2, 4, 8):
        assert not client.breaker.allows and client.start_lookup(page_ids(2)).is_done
        num_reads = store.num_reads
        store.clock.now_s += pause_s
        wait_until(lambda before=num_reads: store.num_reads > before, "the store is probed")
        wait_until(lambda: client.breaker.state is StorageBreakerState.OPEN, "the probe has ended")
        assert client.breaker.last_error == "the last read took 1.5 s again"
    store.read_s = 0.5
    store.clock.now_s += 16
    wait_until(lambda: client.breaker.allows, "the breaker closes")
    assert (client.breaker.num_opened, client.breaker.next_pause_s) == (1, 32)
    assert fetch(client, 2)[0].num_done == 2
    assert client.breaker.next_pause_s == 16


def test_one_object_that_is_slow_does_not_end_the_store(slow: tuple[StorageClient, SlowReads]) -> None:
    """After some probes another one asks whether the store answers at all."""
    client, store = slow
    put(client, 2)
    store.read_s = 1.5
    give_up_late(client, store)
    num_reads, probed = store.num_reads, 0
    while not client.breaker.allows:
        assert probed <= MOST_REPEATS
        store.clock.now_s += LONGEST_PAUSE_S
        probed += 1
        wait_until(lambda count=num_reads + probed: client.breaker.allows or store.num_reads >= count, "a probe")
        wait_until(lambda: client.breaker.state is not StorageBreakerState.HALF_OPEN, "it has ended")
    assert store.num_reads == num_reads + MOST_REPEATS


def test_a_store_that_lies_on_costs_no_request(client: StorageClient, store: BadStore) -> None:
    """The probe asks for what was not there, too."""
    store.lies = True
    for _ in range(MOST_LIES):
        assert fetch(client, 2)[0].num_done == 0
    error = "an object that was never stored"
    wait_until(lambda: error in client.breaker.last_error, "the second probe finds the lie as well", 30)
    assert not client.breaker.allows and client.breaker.num_opened == 1


def test_reads_end_when_the_breaker_opens(client: StorageClient, store: BadStore) -> None:
    """A request that waits for all of its pages does not wait for a store that is left alone. Puts go on."""
    port = LocalStoragePort(client, rank_parts(SINGLE), lambda space, slot: memoryview(bytearray(SIZE)))
    keys = token_keys([bytes([number]) * 32 for number in range(3)])
    put(client, 1)
    store.gate.clear()
    store.entered.clear()
    numbers = [port.get(bytes(32), keys, [0] * 3), port.look_up(bytes(32), keys)]
    assert store.entered.wait(20)
    written = port.put(bytes(32), keys, [0] * 3)
    assert not port.poll()
    client.breaker.late()
    assert port.poll() == [JobEnd(number, 0) for number in numbers]
    assert port.num_pending == 1
    store.gate.set()
    found: list[JobEnd] = []
    wait_until(lambda: found.extend(port.poll()) or found, "the put has ended")
    assert [one.number for one in found] == [written] and port.num_pending == 0


def test_blocked_get_does_not_hold_up_puts(client: StorageClient, store: BadStore) -> None:
    """A put has its own thread, and a waiting put can be taken back."""
    store.gate.clear()
    job = client.start_put(page_ids(1), views(1))
    assert store.entered.wait(20)
    waiting = client.start_put(page_ids(2), views(2))
    waiting.cancel()
    store.gate.set()
    wait_until(lambda: job.is_done and waiting.is_done, "both have ended")
    assert client.counts.pages_written == 1


def test_clear_and_close(client: StorageClient, store: BadStore) -> None:
    """The store is cleared in the background; closing twice does nothing."""
    put(client, 2)
    client.clear()
    wait_until(lambda: store.exists([page_ids(1)[0].key]) == 0, "the store is empty")
    client.close()
    client.close()
