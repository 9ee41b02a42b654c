"""A server with a host tier plays a trace: at every point a copy made from its events equals both of its trees.

Traces are JSON lines with `hash_ids`, a page for each. A made-up one is played by default; the slow test plays the one
that the variable PDSERVE_TRACE names, and a reader joins at each of its requests.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pdserve.executor.page_copies import PendingCopy
from pdserve.memory.cache_recorder import CacheChange, CacheRecorder
from pdserve.memory.kv_memory import KVMemory, PageTable
from pdserve.memory.layout import PageSpace
from pdserve.memory.page_keys import KeyNamespace, short_hash
from pdserve.memory.prefix_cache import RadixNode, RadixTree
from pdserve.memory.tiers.host_memory import PageCopies
from pdserve.memory.tiers.host_pool import HostPool
from pdserve.observe.kv_events import KVEventStream
from pdserve.observe.kv_keys import Group
from pdserve.protocol.messages import GenerateRequest
from pdserve.protocol.sampling import CoreSamplingParams
from pdserve.scheduler.host_tier import HostTier
from pdserve.scheduler.request import Req, Times
from pdserve.sim.hash_layout import hash_layout
from tests.kv_reader import Follower

LAYOUT = hash_layout(1)
NAMESPACE = KeyNamespace("w1", True, "l1", "float32", 1)
GROUPS = {PageSpace.TOKENS: Group(0, "full_attention")}
MOST_PAGES = 300
"""Pages of a prompt of a trace that are played; the rest of a longer prompt is left out."""


class Copies:
    """The part of `Executor` for the host tier: copies without bytes, which end two polls after their start."""

    def __init__(self) -> None:
        self._young: list[PendingCopy] = []
        self._old: list[PendingCopy] = []

    def start_save(self, copies: Sequence[PageCopies]) -> PendingCopy:
        self._young.append(PendingCopy())
        return self._young[-1]

    start_load = start_save

    def poll_copies(self) -> None:
        for copy in self._old:
            copy.end()
        self._old, self._young = self._young, []


class Server:
    """A prefix cache over `num_pages` pages and a host tier over `num_slots` slots, and the readers of their events."""

    def __init__(self, num_pages: int, num_slots: int) -> None:
        self._turns: list[list[CacheChange]] = []
        self.memory = KVMemory(
            LAYOUT, num_pages, PageTable(4, num_pages), 2, prefix_cache=True, recorder=CacheRecorder(self)
        )
        self.pool = HostPool(LAYOUT, {PageSpace.TOKENS: num_slots})
        self.pool.record_to(CacheRecorder(self, of_host=True), self.memory)
        self.counters = Counter[str]()
        self.tier = HostTier(self.memory, self.pool, Copies(), self.counters, lambda: 0.0)  # type: ignore[arg-type]
        self.stream = KVEventStream(NAMESPACE, GROUPS)
        self.readers: list[Follower] = []

    def post(self, changes: list[CacheChange]) -> bool:
        """See `ChangeSink`."""
        self._turns.append(changes)
        return True

    def play(self, number: int, tokens: Sequence[int]) -> None:
        """Compute a prompt; its pages come from the host tier as far as that has them, and are saved there."""
        spec = GenerateRequest(rid=str(number), input_ids=list(tokens), sampling=CoreSamplingParams(max_new_tokens=1))
        req = Req(spec, Times(arrived=0.0))
        packed, lease = req.token_bytes(len(tokens)), None
        for _ in range(50):
            if not self.tier.holds_back(req, lambda: True):
                lease = self.memory.reserve_tokens(len(tokens), req.rid, packed, req.most_cached)
            if lease is not None:
                break
            self.turn()
        assert lease is not None, "memory is free once all copies have ended"
        req.computed = len(tokens)
        self.memory.cache(lease, packed, ending=True)
        self.tier.started(req)
        self.tier.cached(req)
        lease.drop("request")
        self.turn()

    def turn(self) -> None:
        """End a turn of the scheduler; the readers get its events."""
        self.tier.poll()
        self.memory.flush_changes()
        turns, self._turns = self._turns, []
        for changes in turns:
            for batch in self.stream.apply(changes):
                assert all(reader.take(batch.seq, batch.payload) for reader in self.readers)

    def join(self) -> None:
        """A reader joins, as the oldest of more than four leaves."""
        self.readers = [*self.readers[-3:], Follower()]
        for batch in self.stream.snapshot():
            assert all(reader.take(batch.seq, batch.payload) for reader in self.readers)

    def check(self) -> None:
        """Compare the copies of all readers with the trees."""
        device, host = self.memory.pages.tree, self.pool.slots.pages.tree
        assert device is not None and host is not None
        on_device, in_host = hashes_of(device), hashes_of(host)
        for reader in self.readers:
            assert reader.copy.blocks.get(0, {}).keys() == on_device
            assert reader.copy.host.get(0, {}).keys() == in_host


def hashes_of(tree: RadixTree) -> set[int]:
    """Hashes of all pages of a tree, from its nodes."""
    ends: dict[RadixNode, bytes] = {}
    hashes: set[int] = set()
    for node in tree.nodes():
        assert node.parent is not None
        chain = NAMESPACE.chain(ends.get(node.parent, NAMESPACE.root()), bytes(node.key))
        ends[node] = chain[-1]
        hashes.update(map(short_hash, chain))
    return hashes


def conversations(seed: int) -> Iterator[list[int]]:
    """Prompts of a few conversations, whose turns are far apart; each begins with one of two texts."""
    rng = random.Random(seed)
    begins = [list(range(k, k + 12)) for k in (0, 100)]
    open_ = [[*rng.choice(begins), 1000 + k] for k in range(6)]
    for turn in range(120):
        index = rng.randrange(len(open_))
        open_[index] = [*open_[index], *(rng.randrange(2000, 9000) for _ in range(rng.randint(1, 9)))]
        if len(open_[index]) > 50:
            open_[index] = [*rng.choice(begins), 1100 + turn]
        yield open_[index]


@pytest.mark.parametrize("seed", range(3))
def test_conversations_are_followed_from_every_point(seed: int) -> None:
    server = Server(num_pages=110, num_slots=160)
    for number, tokens in enumerate(conversations(seed)):
        server.play(number, tokens)
        server.join()
        server.check()
    assert server.memory.pages.num_evicted and server.pool.slots.pages.num_evicted
    assert server.counters["load_back_tokens"] and server.counters["hicache_backup_tokens"]


def made_up_trace(path: Path, num_requests: int, seed: int = 3) -> Path:
    """A file in the form of Mooncake's traces: turns of conversations, far apart, and prompts that never come again.

    All begin with page 0. A turn has the pages of the turns before it; new pages have the next ids.
    """
    rng, next_id, lines = random.Random(seed), 1, []
    open_: list[list[int]] = []
    for number in range(num_requests):
        goes_on = bool(open_) and rng.random() < 0.6
        hash_ids = open_.pop(rng.randrange(len(open_))) if goes_on else [0]
        count = rng.randint(1, 4) if goes_on else rng.randint(3, 20)
        hash_ids = [*hash_ids, *range(next_id, next_id + count)]
        next_id += count
        if rng.random() < 0.7:
            open_.append(hash_ids)
        length = {"input_length": 512 * len(hash_ids) - rng.randrange(512), "output_length": rng.randint(1, 800)}
        lines.append(json.dumps({"timestamp": 300 * number, **length, "hash_ids": hash_ids}))
    path.write_text("\n".join(lines) + "\n")
    return path


def play_trace(path: Path, server: Server, most_requests: int | None = None) -> None:
    """Play a trace. A reader joins at each request; all readers are compared with both trees then."""
    with path.open() as lines:
        for number, line in enumerate(itertools.islice(lines, most_requests)):
            server.play(number, json.loads(line)["hash_ids"][:MOST_PAGES])
            server.join()
            server.check()


def test_a_made_up_trace_is_followed_from_every_point(tmp_path: Path) -> None:
    server = Server(num_pages=260, num_slots=400)
    play_trace(made_up_trace(tmp_path / "trace.jsonl", 200), server)
    assert server.memory.pages.num_evicted > 300 and server.pool.slots.pages.num_evicted > 300
    assert server.counters["load_back_tokens"] > 100


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif("PDSERVE_TRACE" not in os.environ, reason="PDSERVE_TRACE names a trace")
def test_a_trace_is_followed_from_every_point() -> None:
    """The whole trace is played; both tiers are far smaller."""
    server = Server(num_pages=400, num_slots=1600)
    play_trace(Path(os.environ["PDSERVE_TRACE"]), server)
    assert server.memory.pages.num_evicted > 10_000 and server.pool.slots.pages.num_evicted > 10_000
    assert server.counters["load_back_tokens"]
