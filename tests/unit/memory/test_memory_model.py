"""KVMemory with a prefix cache against sets: leases come, compute, cache, grow and go, and no KV is ever wrong.

The model writes into every computed page which tokens its KV stands for. A page that is freed forgets it.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.memory.lease import Hold, Lease
from pdserve.memory.prefix_cache import Eviction
from tests.unit.memory.kit import PAGE_TOKENS, Prefix, content_of, make_memory, prefixes, tokens_of

HOLDS: tuple[Hold, ...] = ("request", "remote", "send")
NUM_PAGES = 10


@dataclasses.dataclass
class Tenant:
    """A request: the tokens of its pages, how many of them are computed, how many are locked in the cache."""

    lease: Lease
    owner: str
    prefix: Prefix
    pages: list[int]
    num_computed: int
    num_locked: int
    holds: set[Hold]


class MemoryMachine(RuleBasedStateMachine):
    """Model: the free set, the cached pages by token prefix, the tenants."""

    eviction: Eviction = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.memory = make_memory(NUM_PAGES, self.freed, self.eviction)
        self.free = set(range(NUM_PAGES))
        self.cached: dict[Prefix, int] = {}
        self.content: dict[int, Prefix] = {}
        self.tenants: list[Tenant] = []
        self.num_tenants = 0

    @rule(prefix=prefixes, reuse=st.booleans(), slack=st.integers(0, PAGE_TOKENS - 1), less=st.integers(0, 3))
    def reserve(self, prefix: Prefix, reuse: bool, slack: int, less: int) -> None:
        num_tokens = max(0, len(prefix) * PAGE_TOKENS - slack)
        most = max(0, num_tokens - less) if reuse else 0
        hit = self._longest(prefix, most // PAGE_TOKENS)
        assert self.memory.match_prefix(tokens_of(prefix), most) == len(hit) * PAGE_TOKENS
        fits = len(prefix) - len(hit) <= len(self.free) + len(self._evictable(also_locked=hit))
        self.num_tenants += 1
        owner = f"r{self.num_tenants}"
        lease = self.memory.reserve_tokens(num_tokens, owner, tokens_of(prefix), most)
        if not fits:
            assert lease is None
            assert self._take_back() == 0, "a refused lease evicts nothing"
            return
        assert lease is not None
        self._take_back()
        pages = list(lease.pages)
        assert pages[: len(hit)] == [self.cached[hit[: i + 1]] for i in range(len(hit))]
        assert (lease.num_prefix_pages, len(pages)) == (len(hit), len(prefix))
        self._occupy(pages[len(hit) :])
        self.tenants.append(Tenant(lease, owner, prefix, pages, len(hit), len(hit), {"request"}))

    @precondition(lambda self: self.tenants)
    @rule(
        data=st.data(),
        num_pages=st.integers(1, 4),
        cache=st.booleans(),
        priority=st.integers(0, 2),
        ending=st.booleans(),
    )
    def compute(self, data: st.DataObject, num_pages: int, cache: bool, priority: int, ending: bool) -> None:
        tenant = data.draw(st.sampled_from(self.tenants))
        until = min(len(tenant.pages), tenant.num_computed + num_pages)
        for i in range(tenant.num_computed, until):
            assert tenant.pages[i] not in self.cached.values(), "a cached page is written"
            self.content[tenant.pages[i]] = tenant.prefix[: i + 1]
        tenant.num_computed = until
        if cache:
            self._cache(tenant, until, priority, ending)

    @precondition(lambda self: self.tenants)
    @rule(data=st.data(), ending=st.booleans())
    def cache_less_than_before(self, data: st.DataObject, ending: bool) -> None:
        tenant = data.draw(st.sampled_from(self.tenants))
        self._cache(tenant, data.draw(st.integers(0, tenant.num_computed)), 0, ending)

    def _cache(self, tenant: Tenant, num_pages: int, priority: int, ending: bool) -> None:
        self.memory.cache(tenant.lease, tokens_of(tenant.prefix[:num_pages]), priority, ending=ending)
        seq_len = sum(tenant.prefix[: i + 1] in self.cached for i in range(num_pages))
        if not ending and seq_len > tenant.num_locked:
            return
        for i in range(num_pages):
            self.cached.setdefault(tenant.prefix[: i + 1], tenant.pages[i])
        tenant.num_locked = max(tenant.num_locked, num_pages)
        assert self._take_back() == 0

    @precondition(lambda self: self.tenants)
    @rule(data=st.data(), more=prefixes)
    def grow(self, data: st.DataObject, more: Prefix) -> None:
        tenant = data.draw(st.sampled_from(self.tenants))
        fits = len(more) <= len(self.free) + len(self._evictable())
        num_pages = len(tenant.pages) + len(more)
        assert self.memory.grow(tenant.lease, num_pages * PAGE_TOKENS) == fits
        num_back = self._take_back()
        if not fits:
            assert num_back == 0
            return
        new = tenant.lease.pages[len(tenant.pages) :]
        self._occupy(new)
        tenant.pages += new
        tenant.prefix += more
        assert tenant.lease.pages == tenant.pages and len(tenant.pages) == num_pages

    @precondition(lambda self: self.tenants)
    @rule(data=st.data(), name=st.sampled_from(HOLDS))
    def hold(self, data: st.DataObject, name: Hold) -> None:
        tenant = data.draw(st.sampled_from(self.tenants))
        tenant.lease.hold(name)
        tenant.holds.add(name)

    @precondition(lambda self: self.tenants)
    @rule(data=st.data(), name=st.sampled_from(HOLDS))
    def drop(self, data: st.DataObject, name: Hold) -> None:
        tenant = data.draw(st.sampled_from(self.tenants))
        owned = set(tenant.pages) - set(self.cached.values())
        tenant.lease.drop(name)
        tenant.holds.discard(name)
        assert set(self.freed) == (set() if tenant.holds else owned)
        self._take_back()
        if not tenant.holds:
            self.tenants.remove(tenant)
            assert tenant.lease.pages == []
            with pytest.raises(AssertionError):
                tenant.lease.hold(name)

    @rule()
    def flush(self) -> None:
        expected = {self.cached[prefix] for prefix in self._evictable()}
        assert self.memory.flush() == len(expected)
        assert set(self.freed) == expected
        self._take_back()

    @invariant()
    def no_kv_that_anybody_may_read_is_wrong(self) -> None:
        for tenant in self.tenants:
            for i, page in enumerate(tenant.pages[: tenant.num_computed]):
                assert self.content.get(page) == tenant.prefix[: i + 1]
        for prefix, page in self.cached.items():
            assert self.content.get(page) == prefix

    @invariant()
    def the_books_agree(self) -> None:
        assert self.memory.audit() == []
        tree = self.memory.pages.tree
        assert tree is not None and content_of(tree) == self.cached
        counts = self.memory.counts()
        evictable = len(self._evictable())
        assert (counts["pages_free"], counts["pages_cached"]) == (len(self.free), len(self.cached))
        assert (counts["pages_evictable"], self.memory.num_available) == (evictable, evictable + len(self.free))
        cached = set(self.cached.values())
        owned = {tenant.owner: len(set(tenant.pages) - cached) for tenant in self.tenants}
        assert self.memory.holders() == owned
        assert len(self.free) + len(cached) + sum(owned.values()) == NUM_PAGES
        for tenant in self.tenants:
            assert {name for name in HOLDS if tenant.lease.held_by(name)} == tenant.holds

    def _longest(self, prefix: Prefix, most: int) -> Prefix:
        num = 0
        while num < min(len(prefix), most) and prefix[: num + 1] in self.cached:
            num += 1
        return prefix[:num]

    def _evictable(self, also_locked: Prefix = ()) -> list[Prefix]:
        locked = [tenant.prefix[: tenant.num_locked] for tenant in self.tenants] + [also_locked]
        return [prefix for prefix in self.cached if not any(path[: len(prefix)] == prefix for path in locked)]

    def _occupy(self, pages: list[int]) -> None:
        assert len(set(pages)) == len(pages) and set(pages) <= self.free
        self.free -= set(pages)

    def _take_back(self) -> int:
        """Let the model know which pages came back; returns their number."""
        pages = set(self.freed)
        assert len(pages) == len(self.freed), "freed twice"
        self.freed.clear()
        self.free |= pages
        self.cached = {prefix: page for prefix, page in self.cached.items() if page not in pages}
        self.content = {page: prefix for page, prefix in self.content.items() if page not in pages}
        return len(pages)


class LfuMachine(MemoryMachine):
    """The same with the least often used first."""

    eviction: Eviction = "lfu"


class PriorityMachine(MemoryMachine):
    """The same with the lowest priority first."""

    eviction: Eviction = "priority"


BOUNDS = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestLru = MemoryMachine.TestCase
TestLru.settings = BOUNDS
TestLfu = LfuMachine.TestCase
TestLfu.settings = BOUNDS
TestPriority = PriorityMachine.TestCase
TestPriority.settings = BOUNDS
