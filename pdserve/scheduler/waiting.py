"""The order of requests that wait to be started. Owned by `Prefilling`.

Every policy is a number per request, smallest first, that time does not change: what waits longer gains on all that
came later at the same pace. So nothing starves, and nothing is sorted twice but the head of `lpm` when the cache has
changed.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

from pdserve.config.groups import SchedulePolicy
from pdserve.memory.kv_memory import KVMemory
from pdserve.scheduler.req import Req

LPM_WINDOW = 64
"""How many requests at the head are looked up again when the cache has changed."""
LPM_TOKENS = 256
"""Cached tokens that weigh as much as `aging_s` seconds of waiting."""
LPM_MOST = 6
"""A longer prefix than so many times `LPM_TOKENS` weighs no more."""

Entry = tuple[bool, float, int, Req]
"""(not resumed, rank, number of arrival, request): numbers differ, so requests are never compared."""


class WaitingQueue:
    """Requests in the order of a policy; those that were retracted come before all others, the oldest first."""

    def __init__(self, policy: SchedulePolicy, aging_s: float, memory: KVMemory) -> None:
        self._memory = memory
        self._aging_s = aging_s
        self._rank: Callable[[Req], float] = {"fcfs": _arrival, "priority": self._by_priority, "lpm": self._by_prefix}[
            policy
        ]
        self._follows_cache = policy == "lpm"
        self._seen_version = -1
        self._entries: list[Entry] = []
        self._place: dict[str, Entry] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, req: Req) -> bool:
        return req.rid in self._place

    def __getitem__(self, index: int) -> Req:
        """The one that has `index` others before it."""
        return self._entries[index][3]

    def __iter__(self) -> Iterator[Req]:
        """In order. The queue must not be changed meanwhile."""
        return (entry[3] for entry in self._entries)

    def add(self, req: Req, *, resumed: bool = False) -> None:
        """A request that was retracted is `resumed`."""
        self._number += 1
        rank = req.times.arrived if resumed else self._rank(req)
        self._insert((not resumed, rank, self._number, req))

    def remove(self, req: Req) -> None:
        """Take out a request, wherever it stands."""
        entry = self._place.pop(req.rid)
        index = bisect.bisect_left(self._entries, entry)
        assert self._entries[index] is entry
        del self._entries[index]

    @property
    def num_resumed(self) -> int:
        """Retracted requests among those that wait."""
        return bisect.bisect_left(self._entries, True, key=lambda entry: entry[0])

    def refresh(self) -> None:
        """Rank the head of the queue anew when the policy follows the cache and the cache has changed."""
        version = self._memory.cache_version
        if not self._follows_cache or version == self._seen_version:
            return
        self._seen_version = version
        head = [entry for entry in self._entries[:LPM_WINDOW] if entry[0]]
        for entry in head:
            rank = self._rank(entry[3])
            if rank != entry[1]:
                self.remove(entry[3])
                self._insert((True, rank, entry[2], entry[3]))

    def _insert(self, entry: Entry) -> None:
        bisect.insort(self._entries, entry)
        self._place[entry[3].rid] = entry

    def _by_priority(self, req: Req) -> float:
        return req.times.arrived - self._aging_s * req.spec.priority

    def _by_prefix(self, req: Req) -> float:
        num_cached = self._memory.match_prefix(req.packed(req.num_known), req.num_known - 1)
        return req.times.arrived - self._aging_s * min(num_cached / LPM_TOKENS, LPM_MOST)


def _arrival(req: Req) -> float:
    return req.times.arrived
