"""Counts the engine's notifications of landed writes on the receiving side, until all writes of a key have landed.

A transport that notifies (`TransportFacts.notifies`) delivers a note with each write. `TransferDone` on the control
plane states the number of writes of a key, and is accepted only when all their notes have arrived. Notes of keys
without a `TransferDone` are dropped, oldest key first. One thread, which sleeps unless an expected note is missing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from pdserve.transfer.events import Notified, TransferEvent
from pdserve.transfer.wire import Count, MemoryKey

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Seconds after which an expected note counts as missing: the sender's engine got its ack before."""
IDLE_LOOK_S = 5.0
"""Seconds between reads of notes that no key expects, so that they do not accumulate in the engine."""
FIRST_POLL_S = 0.0002
LONGEST_POLL_S = 0.005
LONGEST_LOOK_S = 0.1
"""Most seconds between two reads that count towards a timeout: a stopped process receives no notes meanwhile."""
CLOSE_TIMEOUT_S = 5.0
MAX_KEYS = 4096
"""Most keys whose notes are kept before they are expected; far more than can be in flight at once."""


class Note(msgspec.Struct, frozen=True, array_like=True):
    """Names one write: job `index` of `key`."""

    key: MemoryKey
    index: Count


_notes = msgspec.msgpack.Decoder(Note)


def encode_note(key: MemoryKey, index: int) -> bytes:
    """Return the note of a write, some tens of bytes."""
    return msgspec.msgpack.encode(Note(key, index))


class Notifications:
    """Reports for keys whether their notes have arrived. `take` returns the notes since its last call."""

    def __init__(self, take: Callable[[], Sequence[bytes]], post: Callable[[TransferEvent], None]) -> None:
        self._take = take
        self._post = post
        self._changed = threading.Condition()
        self._seen: OrderedDict[MemoryKey, set[int]] = OrderedDict()
        self._expected: dict[MemoryKey, tuple[int, float]] = {}
        """Number of notes of each key, and the time up to which they are awaited, on the clock of `_seconds`."""
        self._looked_at = self._seconds = 0.0
        self._num_complaints = 0
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="kv-notes", daemon=True)
        self._thread.start()

    def expect(self, key: MemoryKey, count: int) -> bool:
        """Return True when `count` writes of `key` have been notified, the common case.

        False: `Notified` is posted when they have, or after `TIMEOUT_S`. Call once a key.
        """
        with self._changed:
            self._look()
            if len(self._seen.get(key, ())) >= count:
                del self._seen[key]
                return True
            self._expected[key] = count, self._seconds + TIMEOUT_S
            self._changed.notify()
            return False

    def close(self) -> None:
        """End the thread; keys that are still expected are not reported."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        poll_s = FIRST_POLL_S
        with self._changed:
            while not self._closing:
                if self._changed.wait(poll_s if self._expected else IDLE_LOOK_S):
                    poll_s = FIRST_POLL_S
                else:
                    poll_s = min(2 * poll_s, LONGEST_POLL_S)
                self._look()
                self._tell()

    def _look(self) -> None:
        now = time.monotonic()
        self._seconds += min(now - self._looked_at, LONGEST_LOOK_S)
        self._looked_at = now
        try:
            payloads = self._take()
        except Exception as error:
            self._complain("the engine's notifications cannot be read: %r", error)
            return
        for payload in payloads:
            try:
                note = _notes.decode(payload)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                self._complain("cannot decode a transfer notification: %s", error)
                continue
            self._seen.setdefault(note.key, set()).add(note.index)
            if len(self._seen) > MAX_KEYS:
                self._seen.popitem(last=False)

    def _tell(self) -> None:
        for key, (count, until) in list(self._expected.items()):
            num_missing = max(0, count - len(self._seen.get(key, ())))
            if num_missing == 0 or self._seconds > until:
                del self._expected[key]
                self._seen.pop(key, None)
                self._post(Notified(key, num_missing))

    def _complain(self, sentence: str, error: Exception) -> None:
        self._num_complaints += 1
        if self._num_complaints & (self._num_complaints - 1) == 0:  # repeated errors must not flood the log
            log.warning(f"{sentence} (%d so far)", error, self._num_complaints)
