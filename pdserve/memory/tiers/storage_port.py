"""The scheduler's view of the store: pages by their keys and the slots of the host tier, jobs by numbers.

    scheduler/storage_tier.py ── look_up, get, put, give_up, poll ──> StoragePort
        LocalStoragePort       one rank, over a StorageClient
        ranks/rank_storage.py  several ranks: the least of what each one got

All ranks of a replica make the same calls, so that a job has the same number on all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pdserve.memory.layout import PageSpace
from pdserve.memory.tiers.prefix_ends import PageKey, PrefixEnds
from pdserve.memory.tiers.storage import ObjectId
from pdserve.memory.tiers.storage_client import CountLeading, Job, Lookup, StorageClient

SlotBytes = Callable[[PageSpace, int], memoryview]
"""Returns the bytes of a slot of a page space on this rank."""


@dataclasses.dataclass(frozen=True, slots=True)
class JobEnd:
    """A job has ended: the number of leading pages that were found, read or sent, the least of all ranks."""

    number: int
    num_pages: int


class StoragePort(Protocol):
    """Starts jobs and reports their ends. Scheduler thread; no call waits for the store.

    `root`: digest of the namespace that the digests of pages continue, see `KeyNamespace.root`. Each job gets the next
    number. Until a job has ended, its slots are not used for anything else.
    """

    def look_up(self, root: bytes, keys: Sequence[PageKey], ends: PrefixEnds | None = None) -> int:
        """Ask how many leading pages are stored.

        With `ends`, `keys` are the token pages of the prompt from some page on, and the job reports the last end of the
        prompt at which the store has window pages and state too, in pages from the prompt's start; 0: none.
        """
        ...

    def get(self, root: bytes, keys: Sequence[PageKey], slots: Sequence[int]) -> int:
        """Read pages into slots of their spaces, up to the first one that is a miss."""
        ...

    def put(self, root: bytes, keys: Sequence[PageKey], slots: Sequence[int]) -> int:
        """Store the pages in slots of their spaces."""
        ...

    def give_up(self, number: int, *, late: bool) -> None:
        """End a job. `poll` reports it with the pages that were moved so far. `late`: see `StorageClient.give_up`."""
        ...

    def poll(self) -> Sequence[JobEnd]:
        """Return the jobs that have ended since the last call, in the same order on all ranks. Call it in each turn."""
        ...

    @property
    def num_pending(self) -> int:
        """Jobs whose end was not reported."""
        ...

    def clear(self) -> None:
        """Remove all objects of the store, in the background."""
        ...

    def facts(self) -> Mapping[str, float | str]:
        """Return the state of this rank's client, for `/get_server_info`."""
        ...


class LocalStoragePort:
    """Implements `StoragePort` for one rank. `parts`: its `rank_parts`; `slot_bytes`: its part of the host tier."""

    def __init__(self, client: StorageClient, parts: Mapping[PageSpace, str], slot_bytes: SlotBytes) -> None:
        self._client, self._parts, self._slot_bytes = client, parts, slot_bytes
        self._jobs: dict[int, Job] = {}
        self._reads: set[int] = set()
        self._num_started = 0

    def look_up(self, root: bytes, keys: Sequence[PageKey], ends: PrefixEnds | None = None) -> int:
        """See `StoragePort.look_up`."""
        ids = self._ids(root, keys)
        if ends is None:
            return self._add_read(self._client.start_lookup(ids))

        def find_end(num_leading: int, count: CountLeading) -> int:
            return ends.last(num_leading, lambda needed: count(self._ids(root, needed)))

        return self._add_read(self._client.start_lookup(ids, find_end))

    def get(self, root: bytes, keys: Sequence[PageKey], slots: Sequence[int]) -> int:
        """See `StoragePort.get`."""
        return self._add_read(self._client.start_get(self._ids(root, keys), self._buffers(keys, slots)))

    def put(self, root: bytes, keys: Sequence[PageKey], slots: Sequence[int]) -> int:
        """See `StoragePort.put`."""
        return self._add(self._client.start_put(self._ids(root, keys), self._buffers(keys, slots)))

    def give_up(self, number: int, *, late: bool) -> None:
        """See `StoragePort.give_up`."""
        job = self._jobs.get(number)
        if job is not None:
            self._client.give_up(job, late=late)

    def poll(self) -> Sequence[JobEnd]:
        """See `StoragePort.poll`. Reads end when the breaker opens."""
        if not self._client.breaker.allows:
            for number in self._reads:
                if not self._jobs[number].is_done:
                    self._client.give_up(self._jobs[number], late=False)
        ended = [number for number, job in self._jobs.items() if job.is_done or job.is_cancelled]
        self._reads.difference_update(ended)
        return [JobEnd(number, _num_pages(self._jobs.pop(number))) for number in ended]

    @property
    def num_pending(self) -> int:
        """See `StoragePort.num_pending`."""
        return len(self._jobs)

    def clear(self) -> None:
        """See `StoragePort.clear`."""
        self._client.clear()

    def facts(self) -> Mapping[str, float | str]:
        """See `StoragePort.facts`."""
        return self._client.facts()

    def _ids(self, root: bytes, keys: Sequence[PageKey]) -> list[ObjectId]:
        return [ObjectId(root, key.digest, self._parts[key.space]) for key in keys]

    def _buffers(self, keys: Sequence[PageKey], slots: Sequence[int]) -> list[memoryview]:
        return [self._slot_bytes(key.space, slot) for key, slot in zip(keys, slots, strict=True)]

    def _add_read(self, job: Job) -> int:
        number = self._add(job)
        self._reads.add(number)
        return number

    def _add(self, job: Job) -> int:
        self._num_started += 1
        self._jobs[self._num_started] = job
        return self._num_started


def _num_pages(job: Job) -> int:
    if isinstance(job, Lookup):
        return 0 if job.is_cancelled else job.num_found
    return job.num_done
