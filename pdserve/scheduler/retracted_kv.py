"""The KV of retracted requests in host memory: in slots of the host tier, or in memory of its own without a tier.

Both are copied while no step is under way, and the scheduler waits for the copy: a peer may write into the pages as
soon as they are free. Slots of the tier are kept by a lease; cached slots make room for them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

from pdserve.executor.interface import Executor
from pdserve.memory.kv_memory import KVMemory
from pdserve.memory.layout import KVLayout, PageSpace
from pdserve.memory.lease import Lease
from pdserve.memory.tiers.host_memory import PageCopies
from pdserve.memory.tiers.host_pool import HostPool
from pdserve.scheduler.request import Req


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _SlotPages:
    """Implements `HostPages`: KV in slots of the host tier that `lease` keeps.

    `copies`: the pages that it came from, and its slots. `pool` has the bytes; None: other ranks have a part of them.
    """

    lease: Lease
    num_bytes: int
    copies: Sequence[PageCopies]
    layout: KVLayout
    pool: HostPool | None

    def export(self) -> list[bytes] | None:
        """See `HostPages.export`."""
        memory = None if self.pool is None else self.pool.memory
        if memory is None:
            return None
        found = [b""] * len(self.layout.groups)
        for one in self.copies:
            for part in memory.parts[one.space]:
                slab = memory.slabs[one.space][list(one.slots), part.start : part.start + part.num_bytes]
                found[part.group] = slab.tobytes()
        return found


class RetractedKV:
    """Copies the KV of retracted requests to host memory and back. Scheduler thread; no step is under way.

    `most_bytes` returns the limit of all of it, on all ranks together; 0: the KV is computed again. It is asked for
    each request, since a change of role may change it. `pool`: the host tier; None without one.
    """

    def __init__(
        self,
        memory: KVMemory,
        executor: Executor,
        counters: Counter[str],
        most_bytes: Callable[[], int],
        pool: HostPool | None = None,
        has_all: Callable[[], bool] = bool,
    ) -> None:
        """`has_all` returns whether this process has the KV of all layers and heads, see `HostPages.export`."""
        self._memory, self._executor, self._counters = memory, executor, counters
        self._most_bytes, self._pool, self._has_all = most_bytes, pool, has_all
        self.num_bytes = 0
        """Bytes of host memory in use."""

    def save(self, req: Req) -> bool:
        """Copy the computed KV of a request, whose window is covered; False when there is no room for it."""
        assert req.lease is not None
        layout = self._memory.layout
        pages = self._memory.pages_by_group(req.lease, req.computed)
        num_bytes = layout.bytes_by_group(pages)
        if self.num_bytes + num_bytes > self._most_bytes():
            return False
        if self._pool is None:
            req.saved = self._executor.offload(pages)
        else:
            by_space = _by_space(layout, pages)
            lease = self._reserve(self._pool, req.rid, by_space)
            if lease is None:
                return False
            copies = _copies(lease, by_space)
            self._executor.copy_now(copies, to_host=True)
            req.saved = _SlotPages(lease, num_bytes, copies, layout, self._pool if self._has_all() else None)
        self.num_bytes += req.saved.num_bytes
        self._counters["offloaded_pages"] += len(pages[0])
        return True

    def restore(self, req: Req) -> None:
        """Copy the saved KV into the lease of the request, whose window is covered, and forget it."""
        assert req.saved is not None and req.lease is not None
        pages = self._memory.pages_by_group(req.lease, req.computed)
        if isinstance(req.saved, _SlotPages):
            by_space = _by_space(self._memory.layout, pages)
            self._executor.copy_now(_copies(req.saved.lease, by_space), to_host=False)
        else:
            self._executor.restore(req.saved, pages)
        self._counters["restored_pages"] += len(pages[0])
        self.forget(req)

    def forget(self, req: Req) -> None:
        """Drop the saved KV of a request, if there is any."""
        saved, req.saved = req.saved, None
        if saved is None:
            return
        self.num_bytes -= saved.num_bytes
        if isinstance(saved, _SlotPages):
            saved.lease.drop("tier")

    @property
    def bytes_outside_tier(self) -> int:
        """Bytes of host memory that no slot of the host tier has."""
        return self.num_bytes if self._pool is None else 0

    def _reserve(self, pool: HostPool, rid: str, by_space: dict[PageSpace, Sequence[int]]) -> Lease | None:
        num_windows = len(by_space.get(PageSpace.WINDOW, ()))
        has_slot = bool(by_space.get(PageSpace.SLOTS))
        num_pages = len(by_space[PageSpace.TOKENS])
        return pool.reserve(b"", num_pages, f"retracted {rid}", range(num_windows), state=has_slot)


def _by_space(layout: KVLayout, pages: Sequence[Sequence[int]]) -> dict[PageSpace, Sequence[int]]:
    """Return the pages of each space; groups of a space have the same pages."""
    return {group.space: own for group, own in zip(layout.groups, pages, strict=True)}


def _copies(lease: Lease, by_space: dict[PageSpace, Sequence[int]]) -> list[PageCopies]:
    copies: list[PageCopies] = []
    for space, pages in by_space.items():
        slots: Sequence[int] = lease.pages
        if space is not PageSpace.TOKENS:
            assert lease.groups is not None or not pages
            groups = lease.groups
            found = None if groups is None else groups.window if space is PageSpace.WINDOW else groups.kept
            slots = [] if found is None else [found[number] for number in sorted(found)]
        if pages:
            copies.append(PageCopies(space, tuple(pages), tuple(slots)))
    return copies
