"""Memory of the layout groups that do not use the token pages: window pages and state slots.

Groups of the kinds FULL, MLA, INDEX and DRAFT have the same page numbers, those of `KVMemory.pages`. WINDOW groups have
page numbers of their own, and so have STATE groups, whose pages are slots. A request gets both with its lease and keeps
them until the lease ends, so holds and fences cover them too.

A request has window pages only for tokens that a later step reads or writes. A page returns to the pool when it is
behind the window. So the pages that a request can need at a time are bounded, and the pool commits that bound when
the request starts: a running request always finds its next page.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from pdserve.memory.cached_states import CachedStates, RadixNode
from pdserve.memory.cached_windows import CachedWindowPage, CachedWindows
from pdserve.memory.layout import KVLayout, PageSpace
from pdserve.memory.lease import GroupLease, PageAllocator


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupPoolSizes:
    """Window pages and state slots of a rank; 0 without groups of that kind.

    `step_tokens`: most tokens of one request in a step; None: whole prompts. `decode_step_tokens`: the same once its
    prompt is complete: 1, and its drafts. `num_steps_ahead`: steps that may be under way while the next one is planned.
    """

    num_window_pages: int = 0
    num_slots: int = 0
    step_tokens: int | None = None
    num_steps_ahead: int = 1
    decode_step_tokens: int = 1


class GroupPools:
    """Owns window pages and state slots. Scheduler thread only.

    `on_free` is called with the group space and the pages that became free.
    """

    def __init__(
        self,
        layout: KVLayout,
        sizes: GroupPoolSizes,
        on_free: Callable[[PageSpace, list[int]], None] | None = None,
    ) -> None:
        self._layout = layout
        self._sizes = sizes
        self._on_free = on_free
        self._window = PageAllocator(sizes.num_window_pages)
        self._slots = PageAllocator(sizes.num_slots)
        self._num_committed = 0
        self._live: dict[GroupLease, None] = {}
        self.states: CachedStates | None = None
        """States in the prefix cache, which have slots of this pool; None without a cache."""
        self.windows: CachedWindows | None = None
        """Window pages in the prefix cache, which are pages of this pool; None without a cache."""
        self._waiting: dict[GroupLease, int] = {}
        """Positions of kept states whose pages the cache lacks so far: requests that need a slot get theirs."""
        self.is_used = layout.window > 0 or layout.has_state
        """True when the layout has WINDOW or STATE groups."""

    @property
    def num_slots_available(self) -> int:
        """Slots that requests can get: free ones, and those of states that can be evicted."""
        if self.states is None:
            return self._slots.num_free
        return self._slots.num_free + self.states.num_evictable + len(self._waiting)

    def fits(self, max_len: int, *, decode_only: bool = False, after: Sequence[GroupLease] = ()) -> bool:
        """Return whether `reserve` with these arguments succeeds, as if the leases `after` had ended."""
        if self._layout.has_state and self.num_slots_available + len(after) == 0:
            return False
        committed = self._num_committed - sum(lease.most_window_pages for lease in after)
        return committed + self.most_window_pages(max_len, decode_only=decode_only) <= self._window.num_pages

    def could_ever_fit(self, max_len: int) -> bool:
        """Return whether a request of `max_len` tokens fits when all is free."""
        if self._layout.has_state and self._slots.num_pages == 0:
            return False
        return self.most_window_pages(max_len) <= self._window.num_pages

    def reserve(
        self, owner: str, max_len: int, *, decode_only: bool = False, source: RadixNode | None = None
    ) -> GroupLease | None:
        """Return a slot and a commitment of window pages; None, without any change, when either is short.

        `max_len`: most tokens of the request. `decode_only`: each step computes one token of it, and drafts. `source`:
        a node of the prefix cache whose state the request continues from. Where its state is the only one that can be
        evicted, the request gets that slot itself.
        """
        if not self.fits(max_len, decode_only=decode_only):
            return None
        slot = self._reserve_slot(source) if self._layout.has_state else None
        most = self.most_window_pages(max_len, decode_only=decode_only)
        lease = GroupLease(owner, slot, most)
        if source is not None and source.state is not None:
            lease.source = source
        self._num_committed += most
        self._live[lease] = None
        return lease

    def reserve_for_copy(
        self,
        owner: str,
        *,
        shared: Mapping[int, CachedWindowPage],
        source: RadixNode | None = None,
        new: Iterable[int] = (),
        state_at: int | None = None,
    ) -> GroupLease | None:
        """Return what a copy between tiers needs; None, without any change, when window pages or slots are short.

        Args:
            owner: a label for the audit.
            shared: window pages of the cache to lock, by number.
            source: the node whose state is read, which stays locked until the lease ends.
            new: numbers of fresh window pages.
            state_at: position of a state for which a slot is taken, see `GroupLease.kept`.
        """
        numbers = list(new)
        most = len(numbers) + len(shared)
        if self._num_committed + most > self._window.num_pages:
            return None
        if source is not None:
            assert self.states is not None
            self.states.lock(source)
        slot = None if state_at is None else self._take_slot()
        if state_at is not None and slot is None:
            if source is not None and self.states is not None:
                self.states.unlock(source)
            return None
        lease = GroupLease(owner, None, most, source=source)
        self._num_committed += most
        self._live[lease] = None
        self.share_window(lease, shared)
        lease.window.update(zip(numbers, self._take_window(len(numbers)), strict=True))
        if state_at is not None and slot is not None:
            lease.kept[state_at] = slot
        return lease

    def _reserve_slot(self, source: RadixNode | None) -> int:
        """Take a slot. A `source` that keeps its state is locked."""
        if source is None:
            slot = self._take_slot()
            assert slot is not None, "it fits"
            return slot
        assert self.states is not None
        self.states.lock(source)
        slot = self._take_slot()
        if slot is None:
            self.states.unlock(source)
            slot = self.states.take(source)
        return slot

    def _take_slot(self) -> int | None:
        """Return a free slot; evicts a state where none is free. None: no state can be evicted."""
        if self._slots.num_free == 0 and self.states is not None:
            evicted = self.states.evict()
            if evicted is not None:
                self.free_slot(evicted)
            elif self._waiting:
                self.drop_kept(*next(iter(self._waiting.items())))
        taken = self._slots.take(1)
        return None if taken is None else taken[0]

    def source_of(self, lease: GroupLease) -> int:
        """Return the slot from which the request's first step copies its state; -1: it begins without a copy."""
        return -1 if lease.source is None or lease.source.state is None else lease.source.state

    def copied(self, lease: GroupLease) -> None:
        """Unlock the state that the request began from: the step with the copy has ended."""
        if lease.source is not None and self.states is not None:
            self.states.unlock(lease.source)
            lease.source = None

    def keep(self, lease: GroupLease, position: int, *, evict: bool) -> int:
        """Return a slot for a copy of the request's state after `position` tokens; -1 when there is none.

        With `evict` the least recently used state may make room.
        """
        if self.states is None or position in lease.kept or (self._slots.num_free == 0 and not evict):
            return -1
        slot = self._take_slot()
        if slot is None:
            return -1
        lease.kept[position] = slot
        return slot

    def drop_kept(self, lease: GroupLease, position: int) -> None:
        """Free the copy of the state at `position`, which no step under way writes."""
        self.free_slot(self.take_kept(lease, position))

    def take_kept(self, lease: GroupLease, position: int) -> int:
        """Remove the copy of the state at `position` from the request; return its slot, which the caller owns."""
        if self._waiting.get(lease) == position:
            del self._waiting[lease]
        return lease.kept.pop(position)

    def drop_unwritten(self, lease: GroupLease, numbers: Iterable[int], *, state: bool) -> None:
        """Free what a copy did not write: fresh window pages with these numbers, and with `state` the slots of states.

        The commitment stays until the lease ends.
        """
        pages = [lease.window.pop(number) for number in numbers]
        assert not any(page in lease.cached for page in pages), "a window page of the cache is not the copy's"
        self.free_window(pages)
        for position in list(lease.kept) if state else ():
            self.drop_kept(lease, position)

    def let_wait(self, lease: GroupLease, position: int) -> None:
        """Let the copy of the state at `position` wait until the cache has the pages before it."""
        self._waiting[lease] = position

    def free_slot(self, slot: int) -> None:
        """Free a slot that the caller owns."""
        self._free(PageSpace.SLOTS, self._slots, [slot])

    def begin_decode(self, lease: GroupLease, max_len: int) -> None:
        """Lower the commitment of a request whose prompt is complete, as its pages return."""
        lease.most_in_decode = self.most_window_pages(max_len, decode_only=True)
        self._lower(lease)

    def most_window_pages(self, max_len: int, *, decode_only: bool = False) -> int:
        """Return the window pages that a request of `max_len` tokens may have at a time."""
        layout, sizes = self._layout, self._sizes
        if layout.window == 0:
            return 0
        whole = layout.pages_for(max_len)
        step = sizes.decode_step_tokens if decode_only else sizes.step_tokens
        if step is None:
            return whole
        step = max(step, sizes.decode_step_tokens)
        num_live = layout.pages_for(layout.window - 1 + step) + 1
        num_returning = sizes.num_steps_ahead * (layout.pages_for(step) + 1)
        return min(whole, num_live + num_returning)

    def cover(self, lease: GroupLease, start: int, end: int) -> tuple[list[int], list[int]]:
        """Give a request the window pages of a step that computes tokens `[start, end)`.

        Returns:
            The numbers within the request of its new pages, and the pages that fell behind the window. The caller
            passes the latter to `give_back` once no step under way reads them.
        """
        needed = self._layout.window_pages(start, end)
        behind = [index for index in lease.window if index < needed.start]
        released = [lease.window.pop(index) for index in behind]
        new = [index for index in needed if index not in lease.window]
        lease.window.update(zip(new, self._take_window(len(new)), strict=True))
        lease.returning.update(zip(released, behind, strict=True))
        assert len(lease.window) + lease.num_returning <= lease.most_window_pages, "more window pages than committed"
        return new, released

    def give_back(self, lease: GroupLease, pages: Iterable[int]) -> None:
        """Free pages that `cover` released."""
        returned = list(pages)
        for page in returned:
            lease.returning.pop(page, None)
        self._lower(lease)
        self._leave_window(lease, returned)

    def share_window(self, lease: GroupLease, pages: Mapping[int, CachedWindowPage]) -> None:
        """Give a request that continues from a cached prefix window pages of the cache, by number; it locks them."""
        for number, cached in pages.items():
            assert self.windows is not None
            self.windows.lock(cached)
            lease.window[number] = cached.page
            lease.cached[cached.page] = cached

    def uncached_window(self, lease: GroupLease, num_pages: int) -> dict[int, int]:
        """Return the window pages that only the request itself can find, by number below `num_pages`."""
        numbers = {number: page for page, number in lease.returning.items()} | lease.window
        found = {page for page, cached in lease.cached.items() if cached.token_page is not None}
        return {n: page for n, page in numbers.items() if n < num_pages and page not in found}

    def cache_window(self, lease: GroupLease, token_page: int, page: int) -> None:
        """Give the cache the request's window page `page` of the tokens in `token_page`, if it has none of them."""
        assert self.windows is not None
        cached = self.windows.add(token_page, page, lease.cached.get(page))
        if cached is not None:
            lease.cached[page] = cached

    def free_window(self, pages: list[int]) -> None:
        """Free window pages that the caller owns."""
        self._free(PageSpace.WINDOW, self._window, pages)

    def _take_window(self, num_pages: int) -> list[int]:
        """Take window pages that are committed to a request; evicts cached ones where too few are free."""
        missing = num_pages - self._window.num_free
        if missing > 0 and self.windows is not None:
            evicted = [page for page in (self.windows.evict() for _ in range(missing)) if page is not None]
            self.free_window(evicted)
        pages = self._window.take(num_pages)
        assert pages is not None, "window pages are committed"
        return pages

    def _leave_window(self, lease: GroupLease, pages: Iterable[int]) -> None:
        """Free a request's own window pages, and unlock those of the cache."""
        own = []
        for page in pages:
            cached = lease.cached.pop(page, None)
            if cached is None:
                own.append(page)
            else:
                assert self.windows is not None
                self.windows.unlock(cached)
        self.free_window(own)

    def end(self, lease: GroupLease) -> None:
        """Free all window pages and the slot of a request."""
        assert lease.num_returning == 0, "window pages of an ended request are still read"
        self.copied(lease)
        for position in list(lease.kept):
            self.drop_kept(lease, position)
        del self._live[lease]
        self._num_committed -= lease.most_window_pages
        self._leave_window(lease, [page for _, page in sorted(lease.window.items())])
        if lease.slot is not None:
            self._free(PageSpace.SLOTS, self._slots, [lease.slot])
        lease.window, lease.slot = {}, None

    def allocator_of(self, space: PageSpace) -> PageAllocator:
        """Return the free list of the window pages or of the slots."""
        return self._window if space is PageSpace.WINDOW else self._slots

    def counts(self) -> dict[str, int]:
        """Return counts by name, of the spaces that the layout uses. At idle the free ones equal their totals."""
        found: dict[str, int] = {}
        if self._layout.window:
            found |= {"window_pages_total": self._window.num_pages, "window_pages_free": self._window.num_free}
        if self._layout.has_state:
            found |= {"slots_total": self._slots.num_pages, "slots_free": self._slots.num_free}
        if self.states is not None:
            found["slots_cached"] = len(self.states)
        if self.windows is not None:
            found["window_pages_cached"] = len(self.windows)
        return found

    def audit(self) -> list[str]:
        """Return one sentence for each inconsistency: every page and slot is free or belongs to one live lease."""
        held = [page for lease in self._live for page in (*lease.window.values(), *lease.returning)]
        window = list(dict.fromkeys(page for lease in self._live for page in lease.cached))
        if self.windows is not None:
            window = list(dict.fromkeys((*window, *self.windows.pages())))
        known = set(window)
        window += [page for page in held if page not in known]
        slots = [lease.slot for lease in self._live if lease.slot is not None]
        slots += [slot for lease in self._live for slot in lease.kept.values()]
        if self.states is not None:
            slots += self.states.slots()
        found = _audit("window pages", self._window, window) + _audit("slots", self._slots, slots)
        found += self._audit_cached()
        committed = sum(lease.most_window_pages for lease in self._live)
        if committed != self._num_committed:
            found.append(f"window pages: {self._num_committed} are committed, live requests have {committed}")
        return found

    def _audit_cached(self) -> list[str]:
        """Check that the locks of cached window pages belong to live leases, which hold the pages."""
        expected = Counter[CachedWindowPage](cached for lease in self._live for cached in lease.cached.values())
        wrong = [cached.page for cached, count in expected.items() if cached.locks != count]
        if self.windows is not None:
            wrong += [cached.page for cached in self.windows.locked() if cached not in expected]
        wrong += [
            page for lease in self._live for page in lease.cached
            if page not in lease.returning and page not in lease.window.values()
        ]  # fmt: skip
        return [f"window pages: locks of {sorted(wrong)} in the cache are not those of live requests"] if wrong else []

    def holders(self) -> list[str]:
        """Return the owners of live leases."""
        return [lease.owner for lease in self._live]

    def _lower(self, lease: GroupLease) -> None:
        """Lower the commitment of a request that decodes to what it can still need."""
        if lease.most_in_decode is None:
            return
        new = self._layout.pages_for(self._sizes.decode_step_tokens - 1) + 1
        soon = len(lease.window) + lease.num_returning + (self._sizes.num_steps_ahead + 1) * new
        most = max(soon, lease.most_in_decode)
        if most < lease.most_window_pages:
            self._num_committed -= lease.most_window_pages - most
            lease.most_window_pages = most

    def _free(self, space: PageSpace, allocator: PageAllocator, pages: list[int]) -> None:
        if not pages:
            return
        allocator.give_back(pages)
        if self._on_free is not None:
            self._on_free(space, pages)


def _audit(name: str, allocator: PageAllocator, owned: Sequence[int]) -> list[str]:
    found = []
    free = set(allocator.free_pages()[0])
    if len(set(owned)) != len(owned):
        found.append(f"{name}: {len(owned) - len(set(owned))} have several owners")
    if both := free & set(owned):
        found.append(f"{name}: {sorted(both)} are both owned and free")
    if (lost := allocator.num_pages - len(free | set(owned))) != 0:
        found.append(f"{name}: {lost} of {allocator.num_pages} are lost")
    return found
