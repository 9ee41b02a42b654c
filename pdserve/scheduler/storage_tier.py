"""The storage tier: prompts are read from a store while they wait, and computed pages are written to it.

    request is admitted ── look_up ──> found ── get ──> slots of the host tier, in its tree ──> request may start
    slots in the host tier's tree ── put ──> store                                              (StorageWriter)

The host tier gives the pages to the device, as any other pages that it has. A request waits for the store as
`--hicache-storage-prefetch-policy` says. Nothing else waits: a page is sent to the store from slots that are kept for
at most `PUT_LIMIT_S`, and what the store has is never the only copy that a request needs.

With window pages or recurrent states a prompt is read up to an end at which the store has both, see `PrefixEnds`.
A request whose KV another server sends needs token pages alone, as window pages and state come with them.

All ranks run this code on the same input; `StoragePort` returns what all of them have got. Scheduler thread.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from pdserve.base.clock import Clock
from pdserve.config.storage_options import StorageOptions
from pdserve.config.tier_group import PrefetchPolicy
from pdserve.memory.cached_groups import first_window, has_state_behind
from pdserve.memory.kv_memory import KVMemory
from pdserve.memory.layout import PageSpace
from pdserve.memory.lease import Lease, is_shared
from pdserve.memory.page_keys import KeyNamespace
from pdserve.memory.tiers.host_pool import HostPool
from pdserve.memory.tiers.prefix_ends import PageKey, PrefixEnds, token_keys
from pdserve.memory.tiers.storage_port import StoragePort
from pdserve.scheduler.request import Req
from pdserve.scheduler.storage_writer import Chain, StorageWriter

MOST_WAIT_S = 60.0
"""Seconds after which a request starts though `wait_complete` is not fulfilled."""
POOL_SHARE = 0.5
"""Largest part of the host tier that one prompt's pages from the store may take."""
UNFULFILLED = "storage_prefetch_unfulfilled_tokens"


@dataclasses.dataclass(slots=True)
class _Prefetch:
    """A prompt that is looked up, or read into `lease`. `first`: the page at which that begins.

    `ends`: None where token pages are enough. While it is read: `keys` are the token pages from `first` on, the window
    pages `windows`, and with `has_state` the state.
    """

    req: Req
    chain: Chain
    first: int
    deadline_s: float
    ends: PrefixEnds | None
    job: int | None = None
    lease: Lease | None = None
    keys: Sequence[PageKey] = ()
    windows: Sequence[int] = ()
    has_state: bool = False
    gave_up: bool = False

    @property
    def num_token_pages(self) -> int:
        """Token pages that are read."""
        return len(self.keys) - len(self.windows) - self.has_state


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
        state_grid: int = 0,
    ) -> None:
        """`stores_decode`: running requests are stored in strides of `options.decode_stride` tokens. `state_grid`:
        states lie behind multiples of this number of tokens, whole pages; 0 without states.
        """
        self._port, self._host, self._memory = port, host, memory
        self._namespace, self._clock, self._counters = namespace, clock, counters
        self._options, self._policy = options, policy
        self._stride = -(-options.decode_stride // namespace.page_tokens) * namespace.page_tokens * stores_decode
        self._reading: dict[Req, _Prefetch] = {}
        self._state_grid = state_grid // namespace.page_tokens
        self._jobs: dict[int, Callable[[int], None]] = {}
        self._num_named = 0
        self.writer = StorageWriter(port, host, memory, namespace, clock, counters, self._jobs.__setitem__)
        """Sends computed pages to the store."""

    def change_namespace(self, namespace: KeyNamespace) -> None:
        """Look up and store pages under the keys of other weights from now on. No job is under way."""
        assert not self._jobs and not self._reading, "a page of the former weights is on its way"
        self._namespace = namespace
        self.writer.change_namespace(namespace)

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
        has_groups = self._memory.groups.is_used and req.receiver is None
        in_host = known = self._host.match_pages(tokens, most * size) // size
        if has_groups:
            known = self._host.match(tokens, most * size) // size
        on_device = self._memory.match_prefix if has_groups else self._memory.match_pages
        known = max(known, on_device(tokens, most * size) // size)
        missing = (most - known) * size
        if missing < max(1, self._options.threshold_tokens):
            self._miss("below_threshold", missing)
            return
        chain = Chain(self._namespace, req)
        ends = None
        if has_groups:  # an end behind which there is no state is of no use, so the limit of `_read` comes first
            most = min(most, in_host + self._most_pages)
            ends = PrefixEnds(chain.upto(most), in_host, known, self._state_grid, self._first_window)
        deadline_s = self._clock.now() + min(self._options.deadline_s(missing), MOST_WAIT_S)
        if self._policy == "wait_complete":
            deadline_s = self._clock.now() + MOST_WAIT_S
        reading = self._reading[req] = _Prefetch(req, chain, in_host, deadline_s, ends)
        job = reading.job = self._port.look_up(chain.root, token_keys(chain.upto(most)[in_host:]), ends)
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
        """Return whether a running request is stored when `num_computed` of its tokens are computed."""
        return self._stride > 0 and num_computed % self._stride == 0

    def computed(self, req: Req) -> None:
        """Note the whole pages of `req` that are computed, to be sent once the host tier has them."""
        self.writer.computed(req, self._reading[req].chain if req in self._reading else None)

    # ------------------------------------------------------------------ each turn

    def poll(self) -> None:
        """Take the ends of jobs, give up late ones, and send what the host tier has got."""
        for end in self._port.poll():
            self._jobs.pop(end.number)(end.num_pages)
        now = self._clock.now()
        for reading in list(self._reading.values()):
            if now >= reading.deadline_s:
                self._give_up(reading, late=True)
        self.writer.poll()

    @property
    def num_jobs(self) -> int:
        """Jobs under way. While there are any, deadlines may pass without an event."""
        return len(self._jobs)

    def clear(self) -> str:
        """Remove all objects of the store, in the background; returns a message."""
        self.writer.forget_all()
        self._port.clear()
        return "the store is being cleared"

    def facts(self) -> Mapping[str, float | str]:
        """Return the state of the store's client, and the number of jobs, for `/get_server_info`."""
        own = {"reading": float(len(self._reading)), **self.writer.facts()}
        return {f"hicache_storage_{name}": value for name, value in {**self._port.facts(), **own}.items()}

    # ------------------------------------------------------------------ inside

    def _name(self, what: str, rid: str) -> str:
        """Return a label for the audit that no request has."""
        self._num_named += 1
        return f"{what} {self._num_named} of {rid}"

    @property
    def _most_pages(self) -> int:
        """Pages of the host tier that one prompt may take."""
        return int(POOL_SHARE * self._host.slots.pages.num_total)

    @property
    def _first_window(self) -> Callable[[int], int] | None:
        """See `PrefixEnds`."""
        memory = self._memory
        return (lambda end: first_window(memory, end)) if memory.layout.window else None

    def _look_up_ended(self, reading: _Prefetch, num_found: int) -> None:
        """Read the pages that the store has into slots of the host tier."""
        reading.job = None
        ends = reading.ends
        end = reading.first + num_found if ends is None else num_found or ends.after
        if not reading.gave_up:
            self.writer.forget(reading.chain, end)
        if not num_found or reading.gave_up:
            self._end(reading, "deadline" if reading.gave_up else "storage_transfer", 0)
            return
        self._counters["storage_prefetch_hit_tokens"] += max(0, end - reading.first) * self._namespace.page_tokens
        if ends is None:
            end = min(end, reading.first + self._most_pages)
        self._read(reading, end)

    def _read(self, reading: _Prefetch, end: int) -> None:
        """Read what the host tier lacks of the first `end` pages, and of what a prompt needs behind them."""
        size = self._namespace.page_tokens
        tokens, ends = reading.req.token_bytes(end * size), reading.ends
        numbers = range(0) if ends is None or ends.first_window is None else range(ends.first_window(end), end)
        has_state = ends is not None and ends.grid > 0 and not has_state_behind(self._host.slots, tokens, end)
        num_found = max(0, end - reading.first)
        lease = self._host.reserve(tokens, end, self._name("storage", reading.req.rid), numbers, state=has_state)
        if lease is None:
            self._end(reading, "host_capacity", num_found)
            return
        first, windows = lease.num_prefix_pages, [number for number in numbers if not is_shared(lease, number)]
        digests = reading.chain.upto(end)
        keys, slots = token_keys(digests[first:]), lease.pages[first:]
        if lease.groups is not None:
            keys += [PageKey(digests[number], PageSpace.WINDOW) for number in windows]
            slots += [lease.groups.window[number] for number in windows]
            keys += [PageKey(digests[end - 1], PageSpace.SLOTS)] * has_state
            slots += lease.groups.kept.values()
        if not keys:
            lease.drop("tier")
            self._end(reading, "device_covered", num_found)
            return
        reading.first, reading.lease, reading.keys = first, lease, keys
        reading.windows, reading.has_state = windows, has_state
        job = reading.job = self._port.get(reading.chain.root, keys, slots)
        self._jobs[job] = lambda num_read: self._read_ended(reading, num_read)

    def _read_ended(self, reading: _Prefetch, num_read: int) -> None:
        """Give what was read to the host tier's tree."""
        size = self._namespace.page_tokens
        lease = reading.lease
        assert lease is not None
        num_pages = min(num_read, reading.num_token_pages)
        num_windows = min(num_read - num_pages, len(reading.windows))
        is_complete = num_read == len(reading.keys)
        end = reading.first + num_pages
        self._host.drop_unread(lease, reading.windows[num_windows:], state=reading.has_state and not is_complete)
        if num_read:
            self._host.store(lease, reading.req.token_bytes(end * size))
            self._counters["prefetched_tokens"] += num_pages * size
            self._counters["prefetched_window_pages"] += num_windows
            self._counters["prefetched_states"] += reading.has_state and is_complete
            self.writer.remember(reading.keys[:num_read])
        if num_pages:
            reading.req.storage_pages = (reading.first, end)
        if not reading.gave_up:
            self.writer.forget_keys(reading.keys[num_read:])
            self.writer.forget(reading.chain, end)
        lease.drop("tier")
        if not is_complete and reading.ends is not None:
            self._miss("state_missing", num_pages * size)
        self._end(reading, "deadline" if reading.gave_up else "storage_transfer", reading.num_token_pages - num_pages)

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
