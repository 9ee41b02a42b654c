"""The storage tier over a real store in memory: two servers share prompts, and stores that fail cost little."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from pdserve.base.parallel import SINGLE
from pdserve.config.storage_options import StorageOptions
from pdserve.config.tier_group import PrefetchPolicy
from pdserve.memory.kv_memory import KVMemory, PageTable
from pdserve.memory.layout import PageSpace
from pdserve.memory.page_keys import KeyNamespace
from pdserve.memory.tiers.host_memory import HostMemory
from pdserve.memory.tiers.host_pool import HostPool
from pdserve.memory.tiers.memory_store import MemoryStorage
from pdserve.memory.tiers.prefix_ends import PageKey, PrefixEnds
from pdserve.memory.tiers.storage import rank_parts
from pdserve.memory.tiers.storage_client import StorageClient
from pdserve.memory.tiers.storage_port import JobEnd, LocalStoragePort, StoragePort
from pdserve.protocol.messages import GenerateRequest
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.ranks.messages import StorageEnded
from pdserve.ranks.rank_storage import RankStoragePort, StorageReports
from pdserve.scheduler.request import Req, Times
from pdserve.scheduler.storage_tier import MOST_WAIT_S, StorageTier
from pdserve.sim.hash_layout import hash_layout
from tests.waiting import wait_until

LAYOUT = hash_layout(4)
PROMPT = list(range(100, 141))
"""Ten whole pages and one token."""


STRIDES = (
    (1, {"stride": 10, "stores_decode": False}),
    (2, {"stride": 0, "stores_decode": True}),
    (3, {"stride": 10, "stores_decode": True}),
)


class Clock:
    """A clock that a test sets."""

    now_s = 100.0

    def now(self) -> float:
        """The time."""
        return self.now_s


class SlowStore(MemoryStorage):
    """A store that a test stops."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.lies = False

    def exists(self, keys: Sequence[str]) -> int:
        """See `Storage`."""
        return len(keys) if self.lies else super().exists(keys)

    def get_into(self, keys: Sequence[str], buffers: Sequence[memoryview]) -> list[bool]:
        """See `Storage`."""
        assert self.gate.wait(20)
        return super().get_into(keys, buffers)


def namespace_of(weights: str) -> KeyNamespace:
    """The namespace of the pages of these weights."""
    return KeyNamespace(weights, False, LAYOUT.fingerprint(), "uint64", LAYOUT.page_tokens)


class Server:
    """The tiers of one server, with a namespace of its weights."""

    def __init__(
        self,
        store: MemoryStorage,
        *,
        weights: str = "one",
        policy: PrefetchPolicy = "timeout",
        slots: int = 20,
        wrap: Callable[[StoragePort], StoragePort] = lambda port: port,
        stride: int = 0,
        stores_decode: bool = False,
    ) -> None:
        self.clock, self.counters = Clock(), Counter[str]()
        self.client = StorageClient(store)
        self.host_memory = HostMemory(LAYOUT, {PageSpace.TOKENS: slots})
        self.host = HostPool(LAYOUT, {PageSpace.TOKENS: slots}, self.host_memory)
        self.memory = KVMemory(LAYOUT, 32, PageTable(4, 32), num_aux=0, prefix_cache=True)
        self.tier = StorageTier(
            wrap(LocalStoragePort(self.client, rank_parts(SINGLE), self.host.slot_bytes)),
            self.host,
            self.memory,
            namespace_of(weights),
            self.clock,
            self.counters,
            options=StorageOptions(threshold_tokens=8, timeout_base_s=2.0, decode_stride=stride),
            policy=policy,
            stores_decode=stores_decode,
        )

    def request(self, tokens: Sequence[int] = PROMPT, salt: str = "") -> Req:
        """A request that was admitted."""
        spec = GenerateRequest(
            rid="r", input_ids=list(tokens), sampling=CoreSamplingParams(max_new_tokens=4), cache_salt=salt
        )
        req = Req(spec, Times(arrived=0.0))
        self.tier.admit(req)
        return req

    def compute(self, req: Req) -> None:
        """Compute the prompt, and save its pages to the host tier as that does."""
        req.computed = req.seq_len
        num_pages = req.computed // LAYOUT.page_tokens
        tokens = req.token_bytes(num_pages * LAYOUT.page_tokens)
        self.tier.computed(req)
        lease = self.host.reserve(tokens, num_pages, "save")
        assert lease is not None
        for number in range(lease.num_prefix_pages, num_pages):
            self.host.slot_bytes(PageSpace.TOKENS, lease.pages[number])[:] = bytes([number + 1]) * LAYOUT.page_bytes
        self.host.store(lease, tokens)
        lease.drop("tier")
        self.until_idle()

    def until_idle(self) -> None:
        """Poll until nothing is under way."""

        def idle() -> bool:
            self.tier.poll()
            return not self.tier.num_jobs

        wait_until(idle, "the jobs end")
        self.tier.poll()
        assert not self.host.audit() and not self.memory.audit()
        assert not self.host.slots.pages.live_leases

    def has_found(self, num_tokens: int) -> bool:
        """Whether look-ups have found at least `num_tokens` tokens so far."""
        self.tier.poll()
        return self.counters["storage_prefetch_hit_tokens"] >= num_tokens

    def read(self, req: Req) -> list[int]:
        """What the host tier has of a prompt's pages, once the request may start."""

        def ready() -> bool:
            self.tier.poll()
            return self.tier.is_ready(req, lambda: True)

        wait_until(ready, "the request may start")
        tokens = req.token_bytes(40)
        lease = self.host.lock(tokens[: self.host.match(tokens, 40) * 4], "test")
        if lease is None:
            return []
        found = [self.host.slot_bytes(PageSpace.TOKENS, slot)[0] for slot in lease.pages]
        lease.drop("tier")
        return found


@pytest.fixture
def store() -> SlowStore:
    """A store that servers share."""
    return SlowStore()


@pytest.fixture
def make(store: SlowStore) -> Iterator[Callable[..., Server]]:
    """Make servers."""
    made: list[Server] = []

    def one(**options: object) -> Server:
        made.append(Server(store, **options))  # type: ignore[arg-type]
        return made[-1]

    yield one
    store.gate.set()
    for server in made:
        server.client.close()


Make = Callable[..., Server]


def test_a_prompt_of_one_server_is_read_by_another(make: Make) -> None:
    first, second = make(), make()
    first.compute(first.request())
    assert first.counters["backuped_tokens"] == 40
    req = second.request()
    assert not second.tier.is_ready(req, lambda: True)
    assert second.read(req) == list(range(1, 11))
    assert second.counters["prefetched_tokens"] == second.counters["storage_prefetch_hit_tokens"] == 40
    assert req.storage_pages == (0, 10)


def test_other_weights_and_other_salts_have_no_hits(make: Make) -> None:
    first, second = make(), make(weights="two")
    first.compute(first.request())
    assert second.read(second.request()) == []
    assert make().read(make().request(salt="mine")) == []


def test_a_server_with_new_weights_stores_and_finds_pages_of_those_alone(make: Make) -> None:
    old, changed, other = make(), make(), list(range(200, 241))
    old.compute(old.request())
    changed.tier.change_namespace(namespace_of("two"))
    assert changed.read(changed.request()) == [], "pages of the former weights"
    changed.compute(changed.request(other))
    second = make(weights="two")
    assert second.read(second.request(other)) == list(range(1, 11))
    third = make()
    assert third.read(third.request(other)) == []
    changed.tier.change_namespace(namespace_of("one"))
    assert changed.read(changed.request()) == list(range(1, 11)), "the former weights again"


def test_what_was_not_sent_is_dropped_with_its_weights(make: Make) -> None:
    server = make(stride=4, stores_decode=True)
    req = server.request()
    server.until_idle()
    req.computed = req.seq_len
    server.tier.computed(req)
    server.tier.change_namespace(namespace_of("two"))
    server.until_idle()
    assert server.counters["backuped_tokens"] == 0
    one, two = make(), make(weights="two")
    assert one.read(one.request()) == [] and two.read(two.request()) == []


def test_a_known_prefix_is_read_from_there_on_and_sent_once(make: Make) -> None:
    first, second = make(), make()
    first.compute(first.request(PROMPT[:21]))
    first.compute(first.request())
    assert first.counters["backuped_tokens"] == 40, "five pages, then the five others"
    req = second.request(PROMPT[:21])
    assert second.read(req) == [1, 2, 3, 4, 5]
    second.compute(req)
    assert second.counters["backuped_tokens"] == 0, "it was read from the store"
    assert second.read(second.request()) == list(range(1, 11))


def test_short_prompts_are_not_looked_up(make: Make) -> None:
    server = make()
    req = server.request(PROMPT[:8])
    assert server.tier.is_ready(req, lambda: True) and not server.tier.num_jobs
    assert server.counters["storage_prefetch_unfulfilled_tokens.below_threshold"] == 4


def test_running_requests_are_stored_in_strides_of_whole_pages(make: Make) -> None:
    strides = {number: [at for at in range(1, 41) if make(**options).tier.is_due(at)] for number, options in STRIDES}
    assert strides == {1: [], 2: [], 3: [12, 24, 36]}


def test_timeout_takes_what_is_there(make: Make, store: SlowStore) -> None:
    first, second = make(), make()
    first.compute(first.request())
    store.gate.clear()
    req = second.request()
    wait_until(lambda: second.tier.poll() or second.counters["storage_prefetch_hit_tokens"], "the look-up has ended")
    assert not second.tier.is_ready(req, lambda: True)
    second.clock.now_s += 2.1
    assert second.read(req) == []
    assert second.counters["storage_prefetch_unfulfilled_tokens.deadline"] == 40
    assert second.read(second.request()) == [], "the breaker is open: nothing is looked up"
    assert second.counters["storage_prefetch_hit_tokens"] == 40
    store.gate.set()
    second.until_idle()


@pytest.mark.parametrize("end", ["the breaker opens", "the limit"])
def test_wait_complete_waits_for_neither_a_store_that_is_left_alone_nor_for_ever(
    make: Make, store: SlowStore, end: str
) -> None:
    first, second = make(), make(policy="wait_complete")
    first.compute(first.request())
    store.gate.clear()
    req = second.request()
    wait_until(partial(second.has_found, 40), "the look-up has ended")
    second.clock.now_s += MOST_WAIT_S - 0.1
    second.tier.poll()
    assert not second.tier.is_ready(req, lambda: True)
    if end == "the limit":
        second.clock.now_s += 0.2
    else:
        second.client.breaker.late()
    assert second.read(req) == []
    reason = "deadline" if end == "the limit" else "storage_transfer"
    assert second.counters[f"storage_prefetch_unfulfilled_tokens.{reason}"] == 40
    store.gate.set()
    second.until_idle()


def test_best_effort_does_not_wait(make: Make, store: SlowStore) -> None:
    first, second = make(), make(policy="best_effort")
    first.compute(first.request())
    store.gate.clear()
    req = second.request()
    assert second.read(req) == []
    store.gate.set()
    second.until_idle()


def test_best_effort_reads_while_the_request_cannot_start(make: Make, store: SlowStore) -> None:
    first, second = make(), make(policy="best_effort")
    first.compute(first.request())
    req = second.request()
    assert not second.tier.is_ready(req, lambda: False)
    wait_until(lambda: second.tier.poll() or second.tier.is_ready(req, lambda: False), "all pages are read")
    assert second.counters["prefetched_tokens"] == 40


def test_requests_that_start_or_end_early_do_not_open_the_breaker(make: Make, store: SlowStore) -> None:
    first, second = make(), make(policy="best_effort")
    first.compute(first.request())
    store.gate.clear()
    for count, leave in enumerate((lambda req: second.tier.is_ready(req, lambda: True), second.tier.forget), 1):
        req = second.request()
        wait_until(partial(second.has_found, 40 * count), "the look-up has ended")
        leave(req)
        assert second.client.breaker.num_opened == 0
        store.gate.set()
        second.until_idle()
        second.host.flush()
        store.gate.clear()


def test_a_page_that_the_store_lost_is_sent_again(make: Make, store: SlowStore) -> None:
    server = make()
    server.compute(server.request())
    store.clear()
    server.host.flush()
    req = server.request()
    assert server.read(req) == []
    server.compute(req)
    assert server.counters["backuped_tokens"] == 80
    other = make()
    assert other.read(other.request()) == list(range(1, 11))


def test_requests_that_bring_their_kv_are_not_looked_up(make: Make) -> None:
    server = make()
    server.compute(server.request())
    server.host.flush()
    req = Req(server.request().spec, Times(arrived=0.0))
    server.until_idle()
    req.cacheable = False
    server.tier.admit(req)
    assert not server.tier.num_jobs


def test_a_lying_store_costs_nothing_but_the_look_up(make: Make, store: SlowStore) -> None:
    server = make()
    store.lies = True
    assert server.read(server.request()) == []
    assert server.counters["storage_prefetch_unfulfilled_tokens.storage_transfer"] == 40


def test_a_request_that_ends_frees_its_slots(make: Make, store: SlowStore) -> None:
    first, second = make(), make()
    first.compute(first.request())
    store.gate.clear()
    req = second.request()
    wait_until(lambda: second.tier.poll() or second.counters["storage_prefetch_hit_tokens"], "the look-up has ended")
    second.tier.forget(req)
    store.gate.set()
    second.until_idle()


def test_a_prompt_takes_at_most_half_of_the_host_tier(make: Make) -> None:
    first, second = make(), make(slots=8)
    first.compute(first.request())
    assert second.read(second.request()) == [1, 2, 3, 4]


# ---------------------------------------------------------------------- several ranks


class Log:
    """An input log whose answers the follower reads later."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []

    def answer(self, find: Callable[[], bytes]) -> bytes:
        """See `InputLog`, for rank 0."""
        self.answers.append(find())
        return self.answers[-1]


class FollowerLog:
    """The follower's side."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def answer(self, find: Callable[[], bytes]) -> bytes:
        """See `InputLog`."""
        return self._log.answers.pop(0)


class FixedPort:
    """A port whose jobs end when a test says so."""

    def __init__(self) -> None:
        self.num_started = 0
        self.ends: list[JobEnd] = []

    def look_up(self, root: bytes, keys: Sequence[PageKey], ends: PrefixEnds | None = None) -> int:
        """See `StoragePort`."""
        self.num_started += 1
        return self.num_started

    def poll(self) -> list[JobEnd]:
        """See `StoragePort`."""
        ends, self.ends = self.ends, []
        return ends


def test_the_least_of_all_ranks_counts_and_all_ranks_hear_it_in_the_same_turn() -> None:
    log, woken = Log(), list[int]()
    reports = StorageReports(2, lambda: woken.append(1))
    own = [FixedPort(), FixedPort()]
    leader = RankStoragePort(own[0], log, reports.add, reports)  # type: ignore[arg-type]
    follower = RankStoragePort(own[1], FollowerLog(log), reports.add)  # type: ignore[arg-type]
    assert leader.poll() == follower.poll() == [] and not log.answers
    for port in (leader, follower):
        assert [port.look_up(b"", []) for _ in range(3)] == [1, 2, 3]
    own[0].ends = [JobEnd(2, 5), JobEnd(1, 7)]
    assert leader.poll() == [] == follower.poll() and not woken
    own[1].ends = [JobEnd(1, 4), JobEnd(2, 9)]
    assert leader.poll() == [] == follower.poll() and len(woken) == 2
    assert leader.poll() == follower.poll() == [JobEnd(1, 4), JobEnd(2, 5)]
    assert leader.num_pending == follower.num_pending == 1
    reports.add(StorageEnded(3, 1))
    reports.add(StorageEnded(3, 0))
    assert leader.poll() == follower.poll() == [JobEnd(3, 0)]
    assert leader.poll() == [] and not log.answers


def test_a_role_without_a_prefix_cache_reads_nothing_and_the_next_one_finds_what_was_stored(
    make: Callable[..., Server],
) -> None:
    """As a prefill server that becomes a decode server, and returns."""
    server = make()
    server.compute(server.request())
    server.host.flush()
    server.memory.change_role(4, prefix_cache=False)
    assert server.tier.is_ready(server.request(), lambda: True) and server.tier.num_jobs == 0
    server.memory.change_role(0, prefix_cache=True)
    assert server.read(server.request()) == list(range(1, 11))
    assert server.counters["prefetched_tokens"] == 40
