"""The storage tier: prompts are read from a store while they wait, and computed pages are written to it.

    request is admitted ── look_up ──> found ── get ──> slots of the host tier, in its tree ──> request may start
    slots in the host tier's tree ── put ──> store

The host tier gives the pages to the device, as any other pages that it has. A request waits for the store as
`--hicache-storage-prefetch-policy` says. Nothing else waits: a page is sent to the store from slots that are kept for
at most `PUT_LIMIT_S`, and what the store has is never the only copy that a request needs.

All ranks run this code on the same input; `StoragePort` returns what all of them have got. Scheduler thread.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pdserve.base.clock import Clock
from pdserve.config.storage_options import StorageOptions
from pdserve.config.tier_group import PrefetchPolicy
from pdserve.memory.kv_memory import KVMemory
from pdserve.memory.lease import Lease
from pdserve.memory.page_keys import KeyNamespace
from pdserve.memory.prefix_cache import TOKEN_BYTES
from pdserve.memory.tiers.host_pool import HostPool
from pdserve.memory.tiers.storage_port import StoragePort
from pdserve.scheduler.request import Req

PUT_LIMIT_S = 10.0
"""Seconds for which a put keeps its slots of the host tier."""
MOST_WAIT_S = 60.0
"""Seconds after which a request starts though `wait_complete` is not fulfilled."""
MOST_UNSENT = 256
"""Prompts whose pages are noted until the host tier has them; the oldest ones are dropped."""
MOST_PUTS = 8
"""Puts under way."""
MOST_KNOWN = 1 << 16
"""Keys that are remembered as stored, so that their pages are not sent again."""
POOL_SHARE = 0.5
"""Largest part of the host tier that one prompt's pages from the store may take."""
UNFULFILLED = "storage_prefetch_unfulfilled_tokens"


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
class _Prefetch:
    """A prompt that is looked up, or read into `lease`. `first`: the page at which that begins."""

    req: Req
    chain: Chain
    first: int
    deadline_s: float
    job: int | None
    num_found: int = 0
    lease: Lease | None = None
    gave_up: bool = False


@dataclasses.dataclass(slots=True)
class _Unsent:
    """Computed pages of a request that are sent once the host tier has them: all but the first `num_sent`."""

    tokens: bytes
    chain: Chain
    num_pages: int
    num_sent: int = 0
    job: int | None = None


@dataclasses.dataclass(slots=True)
class _Put:
    """Pages that are read from the slots of `lease`."""

    lease: Lease
    owner: str
    digests: Sequence[bytes]
    until_s: float


class StorageTier:
    """Reads prompts from `port` into slots of `host` and writes slots to it. `memory`: the KV memory of the device.

    `counters`: those of the scheduler. `clock`: its clock, which all ranks share.
    """

    def __init__(
        self,
        port: StoragePort,
        host: HostPool,
        memory: KVMemory,
        namespace: KeyNamespace,
        clock: Clock,
        counters: Counter[str],
        *,
        options: StorageOptions,
        policy: PrefetchPolicy,
        stores_decode: bool = False,
    ) -> None:
        """`stores_decode`: running requests are stored in strides of `options.decode_stride` tokens."""
        self._port, self._host, self._memory = port, host, memory
        self._namespace, self._clock, self._counters = namespace, clock, counters
        self._options, self._policy = options, policy
        self._stride = -(-options.decode_stride // namespace.page_tokens) * namespace.page_tokens * stores_decode
        self._reading: dict[Req, _Prefetch] = {}
        self._unsent: OrderedDict[Req, _Unsent] = OrderedDict()
        self._puts: dict[int, _Put] = {}
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._jobs: dict[int, Callable[[int], None]] = {}
        self._seen_version = -1
        self._num_named = 0

    # ------------------------------------------------------------------ requests that wait

    def admit(self, req: Req) -> None:
        """Look up the pages of a new request's prompt that neither the device nor the host tier has.

        Nothing is read for a request that brings its KV, or takes none from the cache; nor without a prefix cache, as
        in a decode server that was a prefill server before.
        """
        if req.spec.probe or not req.cacheable or req.saved is not None or not self._memory.has_prefix_cache:
            return
        size = self._namespace.page_tokens
        most = req.most_cached // size
        tokens = req.token_bytes(most * size)
        in_host = self._host.match_pages(tokens, most * size) // size
        on_device = self._memory.match_prefix(tokens, most * size) // size
        missing = (most - max(in_host, on_device)) * size
        if missing < max(1, self._options.threshold_tokens):
            self._miss("below_threshold", missing)
            return
        chain = Chain(self._namespace, req)
        job = self._port.look_up(chain.root, chain.upto(most)[in_host:])
        deadline_s = self._clock.now() + min(self._options.deadline_s(missing), MOST_WAIT_S)
        if self._policy == "wait_complete":
            deadline_s = self._clock.now() + MOST_WAIT_S
        reading = self._reading[req] = _Prefetch(req, chain, in_host, deadline_s, job)
        self._jobs[job] = lambda num_found: self._look_up_ended(reading, num_found)

    def is_ready(self, req: Req, may_start: Callable[[], bool]) -> bool:
        """Return whether a waiting request has what the store gives it.

        With the policy `best_effort` the read ends when `may_start` returns that the request could start.
        """
        reading = self._reading.get(req)
        if reading is None:
            return True
        if self._policy == "best_effort" and not reading.gave_up and may_start():
            self._give_up(reading, late=False)
        return False

    def is_reading(self, req: Req) -> bool:
        """Return whether a request waits for the store."""
        return req in self._reading

    def forget(self, req: Req) -> None:
        """Give up what a request that ends has read so far."""
        reading = self._reading.get(req)
        if reading is not None:
            self._give_up(reading, late=False)

    # ------------------------------------------------------------------ computed pages

    def is_due(self, num_computed: int) -> bool:
        """Return whether a running request is stored now that so many of its tokens are computed."""
        return self._stride > 0 and num_computed % self._stride == 0

    def computed(self, req: Req) -> None:
        """Note the whole pages of `req` that are computed, to be sent once the host tier has them."""
        size = self._namespace.page_tokens
        num_pages = req.computed // size
        if not num_pages or req.spec.probe or not req.cacheable:
            return
        found = self._unsent.get(req)
        if found is None:
            chain = self._reading[req].chain if req in self._reading else Chain(self._namespace, req)
            found = self._unsent[req] = _Unsent(b"", chain, 0)
        if num_pages > found.num_pages:
            found.tokens, found.num_pages = req.token_bytes(num_pages * size), num_pages
            found.chain.upto(num_pages)
            self._seen_version = -1
        while len(self._unsent) > MOST_UNSENT:
            _, dropped = self._unsent.popitem(last=False)
            self._drop(dropped.num_pages - dropped.num_sent)

    # ------------------------------------------------------------------ each turn

    def poll(self) -> None:
        """Take the ends of jobs, give up late ones, and send what the host tier has got."""
        for end in self._port.poll():
            self._jobs.pop(end.number)(end.num_pages)
        now = self._clock.now()
        for reading in list(self._reading.values()):
            if now >= reading.deadline_s:
                self._give_up(reading, late=True)
        for number, put in self._puts.items():
            if now >= put.until_s:
                self._port.give_up(number, late=True)
        if self._unsent and self._host_version != self._seen_version:
            self._send()

    @property
    def num_jobs(self) -> int:
        """Jobs under way. While there are any, deadlines may pass without an event."""
        return len(self._jobs)

    def clear(self) -> str:
        """Remove all objects of the store, in the background; returns a message."""
        self._known.clear()
        self._port.clear()
        return "the store is being cleared"

    def facts(self) -> Mapping[str, float | str]:
        """Return the state of the store's client, and the number of jobs, for `/get_server_info`."""
        own = {"reading": float(len(self._reading)), "unsent": float(len(self._unsent)), "puts": float(len(self._puts))}
        return {f"hicache_storage_{name}": value for name, value in {**self._port.facts(), **own}.items()}

    # ------------------------------------------------------------------ inside

    def _name(self, what: str, rid: str) -> str:
        """Return a label for the audit that no request has."""
        self._num_named += 1
        return f"{what} {self._num_named} of {rid}"

    def _look_up_ended(self, reading: _Prefetch, num_found: int) -> None:
        """Read the pages that the store has into slots of the host tier."""
        size = self._namespace.page_tokens
        reading.job = None
        if not reading.gave_up:
            self._forget(reading.chain, reading.first + num_found)
        if not num_found or reading.gave_up:
            self._end(reading, "deadline" if reading.gave_up else "storage_transfer", 0)
            return
        self._counters["storage_prefetch_hit_tokens"] += num_found * size
        most = int(POOL_SHARE * self._host.slots.pages.num_total)
        end = reading.first + min(num_found, most)
        tokens = reading.req.token_bytes(end * size)
        lease = self._host.reserve(tokens, end, self._name("storage", reading.req.rid))
        if lease is None or lease.num_prefix_pages >= end:
            if lease is not None:
                lease.drop("tier")
            self._end(reading, "host_capacity" if lease is None else "device_covered", num_found)
            return
        reading.first, reading.lease = lease.num_prefix_pages, lease
        reading.num_found = end - reading.first
        digests = reading.chain.upto(end)[reading.first :]
        reading.job = self._port.get(reading.chain.root, digests, lease.pages[reading.first :])
        self._jobs[reading.job] = lambda num_read: self._read_ended(reading, num_read)

    def _read_ended(self, reading: _Prefetch, num_read: int) -> None:
        """Give the pages that were read to the host tier's tree."""
        size = self._namespace.page_tokens
        lease = reading.lease
        assert lease is not None
        end = reading.first + num_read
        if num_read:
            self._host.store(lease, reading.req.token_bytes(end * size))
            self._counters["prefetched_tokens"] += num_read * size
            self._remember(reading.chain.upto(end)[reading.first :])
            reading.req.storage_pages = (reading.first, end)
        if not reading.gave_up:
            self._forget(reading.chain, end)
        lease.drop("tier")
        self._end(reading, "deadline" if reading.gave_up else "storage_transfer", reading.num_found - num_read)

    def _end(self, reading: _Prefetch, reason: str, num_missed: int) -> None:
        del self._reading[reading.req]
        self._miss(reason, num_missed * self._namespace.page_tokens)

    def _give_up(self, reading: _Prefetch, *, late: bool) -> None:
        if not reading.gave_up and reading.job is not None:
            reading.gave_up = True
            self._port.give_up(reading.job, late=late)

    def _miss(self, reason: str, num_tokens: int) -> None:
        if num_tokens:
            self._counters[f"{UNFULFILLED}.{reason}"] += num_tokens

    def _drop(self, num_pages: int) -> None:
        self._counters["hicache_backup_dropped_tokens"] += num_pages * self._namespace.page_tokens

    @property
    def _host_version(self) -> int:
        tree = self._host.slots.pages.tree
        return 0 if tree is None else tree.version

    def _send(self) -> None:
        """Start puts of pages that the host tier has got."""
        size = self._namespace.page_tokens
        self._seen_version = self._host_version
        for req, unsent in list(self._unsent.items()):
            if unsent.job is not None:
                continue
            have = self._host.match_pages(unsent.tokens, unsent.num_pages * size) // size
            digests = unsent.chain.upto(unsent.num_pages)
            while unsent.num_sent < have and digests[unsent.num_sent] in self._known:
                unsent.num_sent += 1
            if unsent.num_sent < have:
                if len(self._puts) >= MOST_PUTS:
                    self._seen_version = -1
                    return
                self._put(req, unsent, have)
            elif unsent.num_sent >= unsent.num_pages:
                del self._unsent[req]

    def _put(self, req: Req, unsent: _Unsent, end: int) -> None:
        size = self._namespace.page_tokens
        owner = self._name("storage", req.rid)
        lease = self._host.lock(unsent.tokens[: end * size * TOKEN_BYTES], owner)
        if lease is None:
            return
        digests = unsent.chain.upto(end)[unsent.num_sent :]
        number = self._port.put(unsent.chain.root, digests, lease.pages[unsent.num_sent : end])
        self._puts[number] = _Put(lease, owner, digests, self._clock.now() + PUT_LIMIT_S)
        unsent.job, unsent.num_sent = number, end
        self._jobs[number] = lambda num_sent: self._put_ended(req, number, num_sent)

    def _put_ended(self, req: Req, number: int, num_sent: int) -> None:
        put = self._puts.pop(number)
        put.lease.drop("tier")
        self._counters["backuped_tokens"] += num_sent * self._namespace.page_tokens
        self._remember(put.digests[:num_sent])
        self._drop(len(put.digests) - num_sent)
        unsent = self._unsent.get(req)
        if unsent is not None and unsent.job == number:
            unsent.job = None
            if unsent.num_sent >= unsent.num_pages:
                del self._unsent[req]
        self._seen_version = -1

    def _forget(self, chain: Chain, first: int) -> None:
        """Note that page `first` of a prompt was not found: it, and those behind it, are sent when computed again."""
        for digest in chain.digests[first:]:
            self._known.pop(digest, None)

    def _remember(self, digests: Sequence[bytes]) -> None:
        """Note that pages are stored. They may be lost all the same; they are then computed again."""
        for digest in digests:
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
