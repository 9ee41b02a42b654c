"""Writes computed pages to the store: from slots of the host tier, as soon as that has them.

    pages are computed ──> noted ──> the host tier has them ── put ──> store

With window pages and recurrent states, those that the prefix cache of the device has then are noted too. States are
stored one put each, behind the token pages that they cover. Scheduler thread; the same calls on all ranks.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pdserve.base.clock import Clock
from pdserve.memory.cached_groups import first_window, state_ends, window_numbers
from pdserve.memory.kv_memory import KVMemory
from pdserve.memory.layout import PageSpace
from pdserve.memory.lease import Lease
from pdserve.memory.page_keys import KeyNamespace
from pdserve.memory.prefix_cache import TOKEN_BYTES
from pdserve.memory.tiers.host_pool import HostPool
from pdserve.memory.tiers.prefix_ends import PageKey, token_keys
from pdserve.memory.tiers.storage_port import StoragePort
from pdserve.scheduler.request import Req

PUT_LIMIT_S = 10.0
"""Seconds for which a put keeps its slots of the host tier."""
MOST_UNSENT = 256
"""Prompts whose pages are noted until the host tier has them; the oldest ones are dropped."""
MOST_PUTS = 8
"""Puts under way."""
MOST_KNOWN = 1 << 16
"""Keys that are remembered as stored, so that their pages are not sent again."""
WINDOW_SHARE = 2 * MOST_PUTS
"""A put keeps at most this part of the host tier's window pages: 1/16, so that copies find others."""

Started = Callable[[int, Callable[[int], None]], None]
"""Takes the number of a job and what is called at its end with the number of pages."""


class Chain:
    """The digests of a prompt's pages, computed as far as they are needed."""

    def __init__(self, namespace: KeyNamespace, req: Req) -> None:
        self.root = namespace.root(req.adapter_digest, req.spec.cache_salt)
        self._namespace, self._req = namespace, req
        self.digests: list[bytes] = []
        """Those that are computed."""

    def upto(self, num_pages: int) -> list[bytes]:
        """Return the digests of the first `num_pages` pages."""
        have, size = len(self.digests), self._namespace.page_tokens
        if have < num_pages:
            spec, first, end = self._req.spec, have * size, num_pages * size
            tokens = [*spec.input_ids, *self._req.output_ids][first:end]
            before = self.digests[-1] if have else self.root
            self.digests += self._namespace.chain(before, np.asarray(tokens, dtype="<u4").tobytes())
        return self.digests[:num_pages]


@dataclasses.dataclass(slots=True)
class _Unsent:
    """Computed pages of a request that are sent once the host tier has them: all but the first `num_sent`.

    `states`: ends in pages, ascending, of states to send; `windows`: numbers of window pages to send.
    """

    tokens: bytes
    chain: Chain
    num_pages: int
    num_sent: int = 0
    job: int | None = None
    states: list[int] = dataclasses.field(default_factory=list)
    windows: list[int] = dataclasses.field(default_factory=list)
    tried: set[PageKey] = dataclasses.field(default_factory=set)
    """States and window pages that a put had."""

    @property
    def is_complete(self) -> bool:
        """Whether all has been sent once."""
        return self.num_sent >= self.num_pages and not self.states and not self.windows


@dataclasses.dataclass(slots=True)
class _Put:
    """Pages that are read from the slots of `lease`: the first `num_token_pages` of `keys` are token pages."""

    lease: Lease
    keys: Sequence[PageKey]
    num_token_pages: int
    until_s: float


class StorageWriter:
    """Sends the pages of `host` to `port`. `memory`: the KV memory of the device. `started` gets each job."""

    def __init__(
        self,
        port: StoragePort,
        host: HostPool,
        memory: KVMemory,
        namespace: KeyNamespace,
        clock: Clock,
        counters: Counter[str],
        started: Started,
    ) -> None:
        self._port, self._host, self._memory = port, host, memory
        self._namespace, self._clock, self._counters, self._started = namespace, clock, counters, started
        self._unsent: OrderedDict[Req, _Unsent] = OrderedDict()
        self._puts: dict[int, _Put] = {}
        self._known: OrderedDict[PageKey, None] = OrderedDict()
        self._seen_version = -1
        self._num_named = 0

    def change_namespace(self, namespace: KeyNamespace) -> None:
        """Store pages under other keys from now on. Those of before are gone: what was not sent is dropped."""
        for unsent in self._unsent.values():
            self._drop(unsent.num_pages - unsent.num_sent)
        self._unsent.clear()
        self._namespace = namespace

    def computed(self, req: Req, chain: Chain | None) -> None:
        """Note the whole pages of `req` that are computed. `chain`: its digests, where some are computed."""
        size = self._namespace.page_tokens
        num_pages = req.computed // size
        if not num_pages or req.spec.probe or not req.cacheable:
            return
        found = self._unsent.get(req)
        if found is None:
            found = self._unsent[req] = _Unsent(b"", chain or Chain(self._namespace, req), 0)
        if num_pages > found.num_pages:
            found.tokens, found.num_pages = req.token_bytes(num_pages * size), num_pages
            found.chain.upto(num_pages)
            self._seen_version = -1
        if self._memory.groups.is_used:
            self._note_groups(found)
        while len(self._unsent) > MOST_UNSENT:
            _, dropped = self._unsent.popitem(last=False)
            self._drop(dropped.num_pages - dropped.num_sent)

    def poll(self) -> None:
        """Give up late puts, and send what the host tier has got."""
        now = self._clock.now()
        for number, put in self._puts.items():
            if now >= put.until_s:
                self._port.give_up(number, late=True)
        if self._unsent and self._host.slots.cache_version != self._seen_version:
            self._send()

    def facts(self) -> dict[str, float]:
        """Return counts for `/get_server_info`."""
        return {"unsent": float(len(self._unsent)), "puts": float(len(self._puts))}

    # ------------------------------------------------------------------ what the store has

    def forget_all(self) -> None:
        """Note that the store was cleared."""
        self._known.clear()

    def forget(self, chain: Chain, first: int) -> None:
        """Note that page `first` of a prompt was not found: it, and those behind it, are sent when computed again."""
        for space in PageSpace if self._memory.groups.is_used else (PageSpace.TOKENS,):
            self.forget_keys(PageKey(digest, space) for digest in chain.digests[first:])

    def forget_keys(self, keys: Iterable[PageKey]) -> None:
        """Note that these pages were not found."""
        for key in keys:
            self._known.pop(key, None)

    def remember(self, keys: Iterable[PageKey]) -> None:
        """Note that pages are stored. They may be lost all the same; they are then computed again."""
        for key in keys:
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    # ------------------------------------------------------------------ inside

    def _note_groups(self, unsent: _Unsent) -> None:
        """Note the states and window pages of the prompt that the device has, and that were not sent.

        With states, those window pages alone that a prompt needs which continues from a state.
        """
        digests = unsent.chain.upto(unsent.num_pages)
        ends = state_ends(self._memory, unsent.tokens, unsent.num_pages)
        numbers = window_numbers(self._memory, unsent.tokens, unsent.num_pages)
        if self._memory.layout.has_state:
            numbers &= {number for end in ends for number in range(first_window(self._memory, end), end)}
        unsent.states = [end for end in ends if self._is_new(unsent, PageKey(digests[end - 1], PageSpace.SLOTS))]
        unsent.windows = [n for n in sorted(numbers) if self._is_new(unsent, PageKey(digests[n], PageSpace.WINDOW))]
        if unsent.states or unsent.windows:
            self._seen_version = -1

    def _is_new(self, unsent: _Unsent, key: PageKey) -> bool:
        return key not in self._known and key not in unsent.tried

    def _send(self) -> None:
        """Start puts of pages that the host tier has got."""
        self._seen_version = self._host.slots.cache_version
        for req, unsent in list(self._unsent.items()):
            if unsent.job is not None:
                continue
            if len(self._puts) >= MOST_PUTS:
                self._seen_version = -1
                return
            self._send_some(req, unsent)
            if unsent.job is None and unsent.is_complete:
                del self._unsent[req]

    def _send_some(self, req: Req, unsent: _Unsent) -> None:
        """Start a put of what the host tier has of a prompt up to its next state, if that is anything new."""
        size = self._namespace.page_tokens
        have = self._host.match_pages(unsent.tokens, unsent.num_pages * size) // size
        digests = unsent.chain.upto(unsent.num_pages)
        end, has_state, numbers = have, False, list[int]()
        if unsent.states or unsent.windows:
            in_host = set(state_ends(self._host.slots, unsent.tokens, have))
            states = [one for one in unsent.states if one in in_host]
            end, has_state = (states[0], True) if states else (have, False)
            windows = window_numbers(self._host.slots, unsent.tokens, end)
            most = max(1, self._host.slots.groups.allocator_of(PageSpace.WINDOW).num_pages // WINDOW_SHARE)
            numbers = [number for number in unsent.windows if number in windows][:most]
        while unsent.num_sent < end and PageKey(digests[unsent.num_sent]) in self._known:
            unsent.num_sent += 1
        if unsent.num_sent < end or has_state or numbers:
            self._put(req, unsent, end, numbers, has_state=has_state)
        elif unsent.num_sent >= unsent.num_pages:
            self._prune(unsent)

    def _prune(self, unsent: _Unsent) -> None:
        """Drop states and window pages that have left both the device and the host tier, or never came to be saved."""
        ends = {*state_ends(self._memory, unsent.tokens, unsent.num_pages)}
        numbers = window_numbers(self._memory, unsent.tokens, unsent.num_pages)
        unsent.states = [end for end in unsent.states if end in ends]
        unsent.windows = [number for number in unsent.windows if number in numbers]

    def _put(self, req: Req, unsent: _Unsent, end: int, numbers: Sequence[int], *, has_state: bool) -> None:
        """Start a put of the unsent token pages up to `end`, of window pages, and of the state behind `end`."""
        tokens = unsent.tokens[: end * self._namespace.page_tokens * TOKEN_BYTES]
        self._num_named += 1
        owner = f"put {self._num_named} of {req.rid}"
        lease = self._host.lock(tokens, owner, numbers, state=has_state)
        if lease is None and numbers:  # too many window pages are committed now: they follow later
            numbers = ()
            if unsent.num_sent < end or has_state:
                lease = self._host.lock(tokens, owner, state=has_state)
        if lease is None:
            return
        digests = unsent.chain.upto(end)
        keys, slots = token_keys(digests[unsent.num_sent :]), lease.pages[unsent.num_sent : end]
        num_token_pages = len(keys)
        groups = lease.groups
        for number in numbers if groups is not None else ():
            assert groups is not None
            keys.append(PageKey(digests[number], PageSpace.WINDOW))
            slots.append(groups.window[number])
        if has_state:
            assert groups is not None and groups.source is not None and groups.source.state is not None
            keys.append(PageKey(digests[end - 1], PageSpace.SLOTS))
            slots.append(groups.source.state)
        job = self._port.put(unsent.chain.root, keys, slots)
        self._puts[job] = _Put(lease, keys, num_token_pages, self._clock.now() + PUT_LIMIT_S)
        unsent.job, unsent.num_sent = job, max(unsent.num_sent, end)
        unsent.states = [one for one in unsent.states if not (has_state and one == end)]
        unsent.windows = [one for one in unsent.windows if one not in numbers]
        unsent.tried.update(keys[num_token_pages:])
        self._started(job, lambda num_sent: self._put_ended(req, job, num_sent))

    def _put_ended(self, req: Req, job: int, num_sent: int) -> None:
        put = self._puts.pop(job)
        put.lease.drop("tier")
        num_token_pages = min(num_sent, put.num_token_pages)
        self._counters["backuped_tokens"] += num_token_pages * self._namespace.page_tokens
        self._counters["backuped_states"] += sum(key.space is PageSpace.SLOTS for key in put.keys[:num_sent])
        self._counters["backuped_window_pages"] += sum(key.space is PageSpace.WINDOW for key in put.keys[:num_sent])
        self.remember(put.keys[:num_sent])
        self._drop(put.num_token_pages - num_token_pages)
        unsent = self._unsent.get(req)
        if unsent is not None and unsent.job == job:
            unsent.job = None
            if unsent.is_complete:
                del self._unsent[req]
        self._seen_version = -1

    def _drop(self, num_pages: int) -> None:
        self._counters["hicache_backup_dropped_tokens"] += num_pages * self._namespace.page_tokens
