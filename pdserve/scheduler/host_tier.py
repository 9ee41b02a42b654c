"""The scheduler's side of the host tier: when pages are saved to host memory, and when they come back.

    a prompt's pages enter the radix tree ──> save: pages ──> slots ──> the tier's tree has them
    a waiting request finds more in the tier ──> load: slots ──> pages ──> the radix tree has them ──> it starts

A copy runs beside steps. Until its end a lease with the hold `tier` keeps the pages and another one keeps the slots, so
neither is evicted or reused. Only then the bytes are in a tree, where requests find them. All ranks start the same
copies in the same turn, and take their end in the same turn (`CopyHandle.is_done`), so their trees stay equal.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal

from pdserve.executor.interface import CopyHandle, Executor
from pdserve.memory.cached_groups import first_window, has_state_behind, state_ends, window_numbers
from pdserve.memory.kv_memory import KVMemory
from pdserve.memory.layout import PageSpace
from pdserve.memory.lease import Lease, is_shared
from pdserve.memory.prefix_cache import TOKEN_BYTES, RadixTree
from pdserve.memory.tiers.host_memory import PageCopies, num_copied
from pdserve.memory.tiers.host_pool import HostPool
from pdserve.protocol.cached_tokens import CachedTokensDetails
from pdserve.scheduler.request import Req
from pdserve.scheduler.storage_tier import StorageTier

WritePolicy = Literal["write_back", "write_through", "write_through_selective"]
MAX_SAVES, MAX_LOADS = 4, 8
"""Most copies of each direction under way."""
MAX_PENDING = 1024
"""Most prompts whose pages wait for their save."""
_OWNERS = ("save of", "load for", "retracted")
"""How the owners of this module's leases begin, and those of `RetractedKV`."""
CLEAN_SHARE = 8
"""With `write_back`, pages are saved while fewer than this part of the pool is free: 1/8."""


def _do_nothing() -> None:
    """Ignore the end of a copy: the loop polls anyway."""


@dataclasses.dataclass(slots=True, eq=False)
class TierCopy:
    """A copy under way: between pages of the lease `device` and slots of the lease `host`, which hold `token_ids`.

    `num_tokens`: tokens whose pages are copied. `is_wanted` False: the result does not enter a tree.
    """

    rid: str
    token_ids: bytes
    device: Lease
    host: Lease
    handle: CopyHandle
    num_tokens: int
    num_bytes: int
    began_at: float
    is_wanted: bool = True
    has_reader: bool = True
    """False once the request that waits for a load has left."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Pending:
    """The tokens of cached pages to save; states at positions up to `after` pages are saved, or cannot be."""

    token_ids: bytes
    after: int = 0


class HostTier:
    """Saves pages of the prefix cache to the host tier, and loads them back. Scheduler thread only.

    `counters` are the scheduler's. `now` is its clock, which all ranks share.
    """

    def __init__(
        self,
        memory: KVMemory,
        pool: HostPool,
        executor: Executor,
        counters: Counter[str],
        now: Callable[[], float],
        policy: WritePolicy = "write_through",
        wake: Callable[[], None] = _do_nothing,
    ) -> None:
        """`wake` is called on any thread when a copy has ended on this rank."""
        self._memory, self.pool, self._executor = memory, pool, executor
        self._counters, self._now, self.policy, self._wake = counters, now, policy, wake
        self._layout = memory.layout
        self._pending: OrderedDict[str, _Pending] = OrderedDict()
        self._parked: set[str] = set()
        """Those of `_pending` that agree with a save under way; looked at again once a save has ended."""
        self._saves: list[TierCopy] = []
        self._loads: dict[str, TierCopy] = {}
        self._loaded: dict[str, int] = {}
        """Tokens that were loaded for a waiting request, by its rid; each request loads once before it starts."""
        self._seen_version = -1
        self.storage: StorageTier | None = None
        """The store below this tier; None without one."""
        self.load_back_s = self.backup_s = 0.0
        """Seconds that loads, and saves, have taken from their start to their end, all together."""

    # ------------------------------------------------------------------ called by the scheduler

    @property
    def num_copies(self) -> int:
        """Copies under way, which hold pages of the device."""
        return len(self._saves) + len(self._loads)

    @property
    def num_running(self) -> int:
        """Copies under way, and jobs of the store. The jobs hold slots alone, and may go on over a role change."""
        return self.num_copies + (0 if self.storage is None else self.storage.num_jobs)

    @property
    def has_work(self) -> bool:
        """Whether a later `poll` has something to do, though no event is posted."""
        return bool(self._pending) or self.num_running > 0

    def cached(self, req: Req) -> None:
        """Note that the prefix cache has the whole computed pages of a request."""
        if not self._memory.has_prefix_cache:
            return
        if self.storage is not None:
            self.storage.computed(req)
        num_pages = self._layout.whole_pages(req.computed)
        if self.policy == "write_back" or num_pages == 0:
            return
        self._add(req.rid, req.token_bytes(self._layout.tokens_in(num_pages)))

    def poll(self) -> None:
        """Take the copies that have ended, and start saves; the same for the store. Called once a turn."""
        if self.storage is not None:
            self.storage.poll()
        if self._saves or self._loads:
            self._executor.poll_copies()
        for copy in [copy for copy in self._saves if copy.handle.is_done]:
            self._saves.remove(copy)
            self._end_save(copy)
        for rid, copy in [(rid, copy) for rid, copy in self._loads.items() if copy.handle.is_done]:
            del self._loads[rid]
            self._end_load(copy)
        if not self._memory.has_prefix_cache:
            self._forget_pending()
            return
        if self.policy == "write_back":
            self._find_dirty()
        self._start_saves()

    def holds_back(self, req: Req, may_start: Callable[[], bool], pages_only: int | None = None) -> bool:
        """Return whether a waiting request waits for a load, which this call may start.

        `may_start`: whether the request could start now; only then memory is taken for a load. `pages_only`: most
        tokens of a request that takes token pages alone from the cache, as a transfer brings window pages and state;
        None: it needs all.
        """
        if req.rid in self._loads or (self.storage is not None and not self.storage.is_ready(req, may_start)):
            return True
        is_known = req.rid in self._loaded or req.saved is not None or req.spec.probe or not req.cacheable
        if is_known or not self._memory.has_prefix_cache:
            return False
        token_ids = req.token_bytes(req.seq_len)
        if pages_only is None:
            hit, known = self.pool.match(token_ids, req.most_cached), self._memory.match_prefix
        else:
            hit, known = self.pool.match_pages(token_ids, pages_only), self._memory.match_pages
        most = req.most_cached if pages_only is None else pages_only
        if hit <= known(token_ids, most) or not may_start():
            return False
        wanted = token_ids[: hit * TOKEN_BYTES]
        if len(self._loads) == MAX_LOADS or any(_agree(copy.token_ids, wanted) for copy in self._loads.values()):
            return True
        return self._start_load(req.rid, wanted, has_groups=pages_only is None)

    def is_loading(self, req: Req) -> bool:
        """Whether a waiting request waits for a load, or for the store."""
        return req.rid in self._loads or (self.storage is not None and self.storage.is_reading(req))

    def started(self, req: Req) -> CachedTokensDetails:
        """Note that a waiting request has started; return where the tokens of `Req.num_cached` were."""
        loaded = min(self._loaded.pop(req.rid, 0), req.num_cached)
        device = req.num_cached - loaded
        if self.storage is None:
            return CachedTokensDetails(device=device, host=loaded)
        first, end = (self._layout.tokens_in(pages) for pages in req.storage_pages or (0, 0))
        storage = max(0, min(end, req.num_cached) - max(first, device))
        return CachedTokensDetails(device=device, host=loaded - storage, storage=storage)

    def left(self, req: Req) -> None:
        """Note that a request has left. A load for it goes on, for later requests."""
        if self.storage is not None:
            self.storage.forget(req)
        self._loaded.pop(req.rid, None)
        if req.rid in self._loads:
            self._loads[req.rid].has_reader = False

    def flush(self) -> int:
        """Drop all slots that no copy uses, and the results of copies under way; return the number of slots."""
        self._forget_pending()
        for copy in (*self._saves, *self._loads.values()):
            copy.is_wanted = False
        return self.pool.flush()

    def counts(self) -> dict[str, int]:
        """Return counts by name: SGLang's names for tokens, and slots by space. At idle `tier_copies_running` is 0."""
        return {
            "hicache_host_used_tokens": self.pool.num_used_tokens,
            "hicache_host_total_tokens": self.pool.num_tokens,
            "tier_copies_running": self.num_running,
            **self.pool.counts(),
        }

    def seconds(self) -> dict[str, float]:
        """Return the seconds that copies have taken, from their start to their end, by name."""
        return {"load_back_seconds": self.load_back_s, "hicache_backup_seconds": self.backup_s}

    def audit(self, *, idle: bool) -> list[str]:
        """Return one sentence for each inconsistency; `idle`: no copy runs, and no retracted request is left."""
        found = self.pool.audit()
        if idle:
            kept = [lease for lease in self.pool.slots.pages.live_leases if lease.owner.startswith(_OWNERS)]
            found += [f"host tier: slots are held at idle: {lease!r}" for lease in kept]
        return found

    # ------------------------------------------------------------------ saves

    def _add(self, rid: str, token_ids: bytes, after: int = 0) -> None:
        self._pending[rid] = _Pending(token_ids, after)
        self._parked.discard(rid)
        if len(self._pending) > MAX_PENDING:
            oldest, dropped = self._pending.popitem(last=False)
            self._parked.discard(oldest)
            self._drop(len(dropped.token_ids) // TOKEN_BYTES)

    def _forget_pending(self) -> None:
        self._pending.clear()
        self._parked.clear()

    def _start_saves(self) -> None:
        if len(self._saves) == MAX_SAVES or len(self._parked) == len(self._pending):
            return
        for rid in [rid for rid in self._pending if rid not in self._parked]:
            if len(self._saves) == MAX_SAVES:
                return
            pending = self._pending[rid]
            if any(_agree(copy.token_ids, pending.token_ids) for copy in self._saves):
                self._parked.add(rid)  # its pages may be in the tier soon
                continue
            del self._pending[rid]
            self._start_save(rid, pending)

    def _start_save(self, rid: str, pending: _Pending) -> None:
        """Save what the tier lacks of the pages, up to the first state that it lacks."""
        token_ids = pending.token_ids
        num_cached = self._tree.peek(token_ids, len(token_ids) // self._num_bytes(1))
        if self.policy == "write_through_selective":
            num_cached = self._reused(token_ids, num_cached)
        stops = [end for end in self._missing_states(token_ids, num_cached) if end > pending.after]
        end = stops[0] if stops else num_cached
        if end == 0:
            return
        begin = token_ids[: self._num_bytes(end)]
        first = self.pool.match_pages(begin, self._layout.tokens_in(end)) // self._layout.page_tokens
        numbers = self._missing_windows(begin, first, end)
        if first == end and not numbers and not stops:
            return
        if end < num_cached:
            self._add(rid, token_ids, end)
        owner = f"save of {rid}"
        device = self._memory.lock_for_copy(begin, owner, numbers, state=bool(stops))
        host = None if device is None else self.pool.reserve(begin, end, owner, numbers, state=bool(stops))
        if device is None or host is None:
            if device is not None:
                device.drop("tier")
            self._drop(self._layout.tokens_in(end - first))
            return
        copies = self._pair(device, host, range(host.num_prefix_pages, end), numbers)
        if bool(stops) and device.groups is not None and host.groups is not None:
            source = device.groups.source
            assert source is not None and source.state is not None
            copies.append(PageCopies(PageSpace.SLOTS, (source.state,), tuple(host.groups.kept.values())))
        self._saves.append(self._copy(rid, begin, device, host, copies, self._executor.start_save))

    def _end_save(self, copy: TierCopy) -> None:
        self._parked.clear()
        if copy.is_wanted:
            self.pool.store(copy.host, copy.token_ids)
            self._counters["hicache_backup_tokens"] += copy.num_tokens
            self._counters["hicache_backup_bytes"] += copy.num_bytes
            self._counters["hicache_backups"] += 1
            self.backup_s += self._now() - copy.began_at
        copy.host.drop("tier")
        copy.device.drop("tier")

    def _drop(self, num_tokens: int) -> None:
        self._counters["hicache_backup_dropped_tokens"] += num_tokens

    def _reused(self, token_ids: bytes, num_pages: int) -> int:
        """Return the leading pages that a later request has used again."""
        node = self._tree.match(token_ids, num_pages).node
        while node.parent is not None and not node.hits:
            node = node.parent
        return node.end

    def _missing_states(self, token_ids: bytes, num_pages: int) -> list[int]:
        """Return the ends, in pages, ascending, of states that the device has on this path and the tier lacks."""
        in_host = set(state_ends(self.pool.slots, token_ids, num_pages))
        return [end for end in state_ends(self._memory, token_ids, num_pages) if end not in in_host]

    def _missing_windows(self, token_ids: bytes, first: int, end: int) -> list[int]:
        """Return the numbers of window pages that the device has and the tier lacks: of pages from `first` on, and of
        those that the token behind page `end` reads.
        """
        if not self._layout.window:
            return []
        start = min(first, first_window(self._memory, end))
        numbers = window_numbers(self._memory, token_ids, end)
        in_host = window_numbers(self.pool.slots, token_ids, first)
        return [number for number in range(start, end) if number in numbers and number not in in_host]

    def _find_dirty(self) -> None:
        """Queue the pages that eviction would take next, while few are free and the tier lacks them."""
        pages = self._memory.pages
        if pages.num_free * CLEAN_SHARE >= pages.num_total or self._pending or self._seen_version == self._tree.version:
            return
        self._seen_version = self._tree.version
        for node in self._tree.coldest(MAX_SAVES):
            token_ids = self._tree.tokens_of(node)
            if self.pool.match(token_ids, len(token_ids) // TOKEN_BYTES) * TOKEN_BYTES < len(token_ids):
                self._add(f"eviction {len(self._pending)}", token_ids)

    # ------------------------------------------------------------------ loads

    def _start_load(self, rid: str, token_ids: bytes, *, has_groups: bool) -> bool:
        """Load the pages that the device lacks; False where memory is short. `has_groups`: with window pages and state
        behind the tokens.
        """
        num_tokens = len(token_ids) // TOKEN_BYTES
        end, has_state = self._layout.whole_pages(num_tokens), has_groups and self._memory.has_cached_states
        numbers = range(first_window(self._memory, end), end) if has_groups and self._layout.window else range(0)
        owner = f"load for {rid}"
        host = self.pool.lock(token_ids, owner, numbers, state=has_state)
        if host is None:
            return False
        lacks_state = has_state and not has_state_behind(self._memory, token_ids, end)
        device = self._memory.reserve_for_copy(token_ids, end, owner, numbers, state=lacks_state)
        if device is None:
            host.drop("tier")
            return False
        lacking = [number for number in numbers if not is_shared(device, number)]
        copies = self._pair(device, host, range(device.num_prefix_pages, end), lacking)
        if lacks_state and device.groups is not None and host.groups is not None:
            source = host.groups.source
            assert source is not None and source.state is not None
            copies.append(PageCopies(PageSpace.SLOTS, tuple(device.groups.kept.values()), (source.state,)))
        self._loads[rid] = self._copy(rid, token_ids, device, host, copies, self._executor.start_load)
        return True

    def _end_load(self, copy: TierCopy) -> None:
        if copy.is_wanted:
            self._memory.cache(copy.device, copy.token_ids, ending=True)
            self._counters["load_back_tokens"] += copy.num_tokens
            self._counters["load_back_bytes"] += copy.num_bytes
            self._counters["load_backs"] += 1
            self.load_back_s += self._now() - copy.began_at
        copy.device.drop("tier")
        copy.host.drop("tier")
        if copy.has_reader:
            self._loaded[copy.rid] = copy.num_tokens

    # ------------------------------------------------------------------ both

    def _pair(self, device: Lease, host: Lease, pages: range, numbers: Sequence[int]) -> list[PageCopies]:
        """Return the copies of token pages with the numbers `pages`, and of window pages with `numbers`."""
        copies: list[PageCopies] = []
        if pages:
            own = tuple(device.pages[pages.start : pages.stop])
            copies.append(PageCopies(PageSpace.TOKENS, own, tuple(host.pages[pages.start : pages.stop])))
        if numbers and device.groups is not None and host.groups is not None:
            window, slots = device.groups.window, host.groups.window
            own = tuple(window[number] for number in numbers)
            copies.append(PageCopies(PageSpace.WINDOW, own, tuple(slots[number] for number in numbers)))
        return copies

    def _copy(
        self,
        rid: str,
        token_ids: bytes,
        device: Lease,
        host: Lease,
        copies: list[PageCopies],
        start: Callable[[Sequence[PageCopies]], CopyHandle],
    ) -> TierCopy:
        assert num_copied(copies), "a copy of nothing"
        layout = self._layout
        num_bytes = sum(len(one.pages) * layout.space_bytes(one.space) for one in copies)
        num_pages = sum(len(one.pages) for one in copies if one.space is PageSpace.TOKENS)
        num_tokens = layout.tokens_in(num_pages)
        handle = start(copies)
        handle.on_end(self._wake)
        return TierCopy(rid, token_ids, device, host, handle, num_tokens, num_bytes, self._now())

    @property
    def _tree(self) -> RadixTree:
        """The prefix cache; a change of role may make it anew."""
        assert self._memory.pages.tree is not None
        return self._memory.pages.tree

    def _num_bytes(self, num_pages: int) -> int:
        return self._layout.tokens_in(num_pages) * TOKEN_BYTES


def _agree(one: bytes, other: bytes) -> bool:
    """Whether two prompts, each of whole pages, begin alike, so that copies of both would copy the same pages."""
    return one.startswith(other) or other.startswith(one)
