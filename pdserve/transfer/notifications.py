"""What the engine tells the side that is written to: notes of writes, counted until all of a key are there.

A transport that notifies (`TransportFacts.notifies`) brings a note with each write. `Done` of the control plane says
how many there are of a key, and is believed only when they have all come. Notes of keys that never come to `Done` are
forgotten in their turn. One thread, which sleeps unless something expected has not come.
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
"""What has not come so long after it was expected will not come: the sender's engine had it acknowledged before."""
IDLE_LOOK_S = 5.0
"""How often notes are taken from the engine that nobody expects, so that they do not pile up there."""
FIRST_POLL_S = 0.0002
LONGEST_POLL_S = 0.005
LONGEST_LOOK_S = 0.1
"""Of the time between two looks no more than this counts: a process that was stopped has heard nothing meanwhile."""
CLOSE_TIMEOUT_S = 5.0
MAX_KEYS = 4096
"""Keys whose notes are kept before anybody expects them; far more than can be in flight at once."""


class Note(msgspec.Struct, frozen=True, array_like=True):
    """Names one write: the job `index` of `key`."""

    key: MemoryKey
    index: Count


_notes = msgspec.msgpack.Decoder(Note)


def encode_note(key: MemoryKey, index: int) -> bytes:
    """The note of a write, some tens of bytes."""
    return msgspec.msgpack.encode(Note(key, index))


class Notifications:
    """Says for keys whether their notes have come. `take` gives those that came since it was last called."""

    def __init__(self, take: Callable[[], Sequence[bytes]], post: Callable[[TransferEvent], None]) -> None:
        self._take = take
        self._post = post
        self._changed = threading.Condition()
        self._seen: OrderedDict[MemoryKey, set[int]] = OrderedDict()
        self._expected: dict[MemoryKey, tuple[int, float]] = {}
        """How many of each key, and up to which of our seconds they are waited for."""
        self._looked_at = self._seconds = 0.0
        self._num_complaints = 0
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="kv-notes", daemon=True)
        self._thread.start()

    def expect(self, key: MemoryKey, count: int) -> bool:
        """Whether `count` writes of `key` have been notified; they mostly have. If not, `Notified` is posted when they
        have, or have not within `TIMEOUT_S`. Once a key.
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
        """End the thread; what is still expected is not reported."""
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
                self._complain("a notification is none of ours: %s", error)
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
        if self._num_complaints & (self._num_complaints - 1) == 0:  # what comes each time must not flood the log
            log.warning(f"{sentence} (%d so far)", error, self._num_complaints)
