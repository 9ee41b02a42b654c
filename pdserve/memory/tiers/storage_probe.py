"""The probe of a store whose breaker is open: the last look-up or read again.

A store that is quick to say what it has, but slow to give it, would pass a probe that only asks. No request waits for a
probe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdserve.memory.tiers.storage import ObjectId, Storage, check

MOST_REPEATS = 10
"""Probes in a row that repeat one read. The next one asks for an object that was never stored, so that a store that is
slow with one object alone is used again."""
LEAST_LIMIT_S = 0.1
"""Shortest time that a repeated read may take, in seconds."""
NEVER_STORED = "pdserve-probe"


class StorageProbe:
    """The probe of one client. All methods: the thread that reads."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: seconds that a call may take."""
        self._call_limit_s = limit_s
        self._ids: tuple[ObjectId, ...] = ()
        self._sizes: tuple[int, ...] = ()
        self._num_pages = 0
        self._repeats = 0

    def note(self, ids: Sequence[ObjectId], sizes: Sequence[int] = (), num_pages: int = 0) -> None:
        """A look-up of `ids` begins, or the first call of a read of `num_pages` objects with payloads of `sizes`."""
        self._ids, self._sizes, self._num_pages, self._repeats = tuple(ids), tuple(sizes), num_pages, 0

    def run(
        self,
        storage: Storage,
        num_stored: Callable[[Sequence[str]], int],
        objects: Callable[[Sequence[int]], list[memoryview]],
        now: Callable[[], float],
        late_s: float | None,
    ) -> str | None:
        """Ask the store; return what is wrong with it, None if it answers as it should.

        Args:
            storage: the store.
            num_stored: returns how many leading keys the store says to have.
            objects: returns a buffer for the object of each payload size.
            now: the clock, seconds.
            late_s: seconds after which a request has given up on the last read; None: none has.

        Raises:
            Exception: whatever the store raises.
        """
        begin, ids = now(), self._ids
        if not ids or self._repeats >= MOST_REPEATS:
            self._ids = ()
            num_found = num_stored([NEVER_STORED])
            return "the store names an object that was never stored" if num_found else None
        self._repeats += 1
        is_lie = False
        try:
            num_found = num_stored([identity.key for identity in ids])
            if self._sizes and num_found:
                is_lie = not self._reads(storage, ids[:num_found], objects(self._sizes[:num_found]))
        finally:
            took_s = now() - begin
            is_slow = took_s > self._limit_s(late_s)
            if not is_slow:  # an object that cannot be read says nothing about the others
                self._ids = ()
        if is_slow:
            return f"the last read took {took_s:.1f} s again"
        return "the store has named objects that it does not have" if is_lie else None

    def _reads(self, storage: Storage, ids: Sequence[ObjectId], buffers: Sequence[memoryview]) -> bool:
        """Return whether the first object can be read."""
        was_read = storage.get_into([identity.key for identity in ids], buffers)
        return bool(was_read) and was_read[0] and check(buffers[0], ids[0]) is None

    def _limit_s(self, late_s: float | None) -> float:
        """Return the seconds that a repeated call may take: at this rate a request would have got half of its pages."""
        if late_s is None:
            return self._call_limit_s
        share = 2 * len(self._sizes) / self._num_pages if self._num_pages else 1.0
        return max(LEAST_LIMIT_S, min(1.0, share) * late_s)
